"""Rings on a Ray cluster of three nodes on this machine, which these tests share: results to the
bit, failures with one error each, and nothing left behind.

Tests follow one another where that saves starting ranks (a second or more each): a gang that a test
leaves in order is the next one's, as in ``ring_cluster``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray_work
import torch
from distributed.test_ring_gloo import CASES, _together
from rings import Case, check
from rings import run as virtual

from ringfa4 import mask as masks
from ringfa4.errors import PlanMismatchError
from ringfa4.launch.console import Console
from ringfa4.topology import Topology

cluster_module = ray_work.ray_cluster()

import ray  # noqa: E402

from ringfa4.launch import ray_gang, ray_ring  # noqa: E402
from ringfa4.launch.ray_cluster import LocalCluster, RankFailed, Ring, Shape, connected  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.timeout(300)  # the first test of a ring starts its ranks


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until every rank has said what it knows, on a slow machine too."""
    monkeypatch.setattr(ray_gang, "GRACE_S", 60.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    there = LocalCluster(3, cpus=2)
    try:
        with connected(there.address):
            yield there
    finally:
        there.close()


@pytest.fixture(scope="module")
def rings(cluster: LocalCluster) -> Iterator[dict[tuple[int, int], Ring]]:
    """Rings by (nodes, ranks a node), kept while their ranks are in order."""
    made: dict[tuple[int, int], Ring] = {}
    yield made
    for ring in made.values():
        ring.close()


@pytest.fixture
def ring(rings: dict[tuple[int, int], Ring], request: pytest.FixtureRequest) -> Iterator[Ring]:
    """A ring of ``request.param`` = (nodes, ranks a node); two nodes, a rank each by default."""
    nodes, ranks = getattr(request, "param", (2, 1))
    for shape, other in rings.items():  # the cluster has CPUs for one ring at a time
        if shape != (nodes, ranks) and other.running:
            other.close()
    if (nodes, ranks) not in rings:
        rings[nodes, ranks] = Ring(Shape(nodes, ranks, timeout_s=ray_work.TIMEOUT_S))
    yield rings[nodes, ranks]


def groups() -> list[str]:
    """States of placement groups that are not removed."""
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


def assert_gone(pids: list[int]) -> None:
    """No process of a failed gang, no placement group, no shared memory."""
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert groups() == []
    shared = [f for f in os.listdir("/dev/shm") if f.startswith(("plasma", "nccl", "ringfa4"))]
    assert shared == []


def failure(ring: Ring, fn: Any, *args: Any) -> RankFailed:
    """The one error of a run that fails; its ranks are gone."""
    pids = [place.pid for place in ring.gang.places]
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ring.run(fn, *args)
    seconds = time.monotonic() - begin
    assert_gone(pids)
    print(f"{seconds:.1f} s from the start of {fn.__name__}{args} to: {caught.value}")
    assert "\n" not in str(caught.value)
    return caught.value


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_ranks_on_two_nodes_compute_the_bits_of_virtual_ranks(ring: Ring, name: str) -> None:
    """Which processes under torchrun compute too, and which are checked against the oracle."""
    case = Case(**{**vars(CASES[name]), "world": 4})
    got = _together(case, ring.run(ray_work.parts, case))
    check(case, got)
    want = virtual(case)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
def test_ranks_are_numbered_through_a_node(ring: Ring) -> None:
    assert ring.run(ray_work.places) == [(r, str(r % 2), "") for r in range(4)]
    assert ring.gang.domains == (0, 0, 1, 1)
    nodes = [place.node for place in ring.gang.places]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
def test_domains_of_the_cluster_reach_the_plan(ring: Ring) -> None:
    """Each node's K/V cross once; the same bits as virtual ranks of the same domains."""
    topology = Topology.of(ring.gang.domains)
    assert topology.domains == ((0, 1), (2, 3))
    case = Case(masks.causal(300), world=4, options={"topology": topology})
    got = _together(case, ring.run(ray_work.parts, case))
    check(case, got)
    want = virtual(case)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
def test_another_plan_on_one_rank_is_everybodys_error(ring: Ring) -> None:
    """And the ranks go on: nothing has moved."""
    before = [place.pid for place in ring.gang.places]
    with pytest.raises(PlanMismatchError, match=r"ranks disagree about plan: rank 0 .* rank 1 has"):
        ring.run(ray_work.another_plan)
    with pytest.raises(ValueError, match="seq=-1 is no length"):
        ring.run(ray_work.unfit)
    ring.run(ray_work.places)
    assert [place.pid for place in ring.gang.places] == before


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
def test_gpus_in_different_domains_are_named(ring: Ring) -> None:
    """Case 43, with GPUs and their fabrics made up: all four ranks agree on one message."""
    with pytest.raises(ValueError, match=r"transport 'symm_mem' .* different hosts and not in one "
                       r"NVLink domain \(fabric rack-0/0 and rack-1/0\)"):  # fmt: skip
        ring.run(ray_work.different_domains)


# ---- failures, the first on the ring of four ----------------------------------------------------


@pytest.mark.parametrize("ring", [(2, 2)], indirect=True)
def test_a_rank_killed_before_it_ran(ring: Ring) -> None:
    place = ring.gang.places[3]
    os.kill(place.pid, signal.SIGKILL)
    error = failure(ring, ray_work.places)
    assert error.rank == 3 and f"rank 3 (pid {place.pid} on {place.address})" in str(error)
    assert "its process is gone" in str(error) and "before its first step" in str(error)


@pytest.mark.parametrize("ring", [(3, 1)], indirect=True)
def test_shuffled_ranks_on_three_nodes_compute_the_same(ring: Ring) -> None:
    def shuffled(places: Any) -> list[int]:
        straight = ray_gang.in_order(places)
        return [straight[i] for i in (1, 2, 0)]

    ring.shape = replace(ring.shape, order=shuffled)
    case = Case(**{**vars(CASES["causal"]), "world": 3})
    got = _together(case, ring.run(ray_work.parts, case))
    assert [place.address[-1] for place in ring.gang.places] == ["3", "4", "2"]
    check(case, got)
    want = virtual(case)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("ring", [(3, 1)], indirect=True)
@pytest.mark.usefixtures("patient")
def test_a_rank_killed_in_forward(ring: Ring) -> None:
    """Before it sends anything: rank 2 waits for it in step 1, rank 0 in step 2, and either may
    notice first."""
    error = failure(ring, ray_work.fails, 1, "forward", "fetch", 1, "kill")
    assert error.rank == 1 and "its process is gone" in str(error)
    assert f" noticed in forward, step {error.step} (wait)" in str(error)
    (witness,) = re.findall(r"rank (\d) noticed", str(error))
    assert (witness, error.step) in [("2", 1), ("0", 2)]


@pytest.mark.usefixtures("patient")
def test_a_rank_killed_in_backward_and_started_again(ring: Ring) -> None:
    error = failure(ring, ray_work.fails, 0, "backward", "fetch", 1, "kill")
    assert (error.rank, error.step) == (0, 1)
    assert "rank 1 noticed in backward, step 1" in str(error)
    assert [rank for rank, _, _ in ring.run(ray_work.places)] == [0, 1]


def test_contexts_come_and_go(ring: Ring) -> None:
    """Case 42, the first cycles of the 200 that tests/test_public_faults.py has: all stays flat."""
    for grown in ring.run(ray_work.cycles, 40):
        assert grown["descriptors"] <= 8 and grown["threads"] <= 4, grown
        assert grown["resident"] < 25 << 20, grown


def test_a_rank_that_raises(ring: Ring) -> None:
    error = failure(ring, ray_work.fails, 1, "backward", "compute", 1, "raise")
    assert (error.rank, error.step) == (1, 1)
    assert "FloatingPointError: not today; in backward, step 1 (compute)" in str(error)
    assert "in commit" in error.details


def test_a_rank_that_hangs(ring: Ring) -> None:
    error = failure(ring, ray_work.fails, 0, "forward", "fetch", 1, "sleep", 3.0)
    assert (error.rank, error.step) == (0, 1)
    assert "within 3 s; it does not answer; last seen in forward, step 1 (fetch)" in str(error)


def test_retries_start_from_the_inputs_and_pass_a_taken_port_over(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ring, "job", ray_work.job_that_fails_once)
    said, failed = tmp_path / "said", tmp_path / "failed"
    options, _ = ray_ring.parse_options(["--seq", "300", "--check", "--timeout", "60"])
    with socket.socket() as taken, said.open("w") as stream:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = Ring(replace(ring.shape, port=port, env={"RINGFA4_TEST": str(failed)}))
        try:
            report = ray_ring.with_retries(options, "cpu", 1, other, Console(stream, speaks=True))
            assert port < other.gang.port < port + 16
        finally:
            other.close()
    assert report.passed and report.verdicts
    lines = said.read_text().splitlines()
    assert lines[0].startswith("rank 1 (pid ") and "its process is gone" in lines[0]
    assert lines[1:3] == ["starting all ranks again (1 of 1)", "checking 32 rows against fp64 over "
                          "all keys ..."]  # fmt: skip


# ---- the command --------------------------------------------------------------------------------


def test_the_command_writes_what_torchrun_writes(
    cluster: LocalCluster, ring: Ring, tmp_path: Path
) -> None:
    ring.close()
    text = ["--seq", "1500", "--backward", "--output"]
    command = [sys.executable, str(ROOT / "launch" / "ray_ring.py"), *text, str(tmp_path / "ray")]
    files = ["--json", "-", "--trace", str(tmp_path / "trace"), "--check"]
    done = subprocess.run(
        [*command, *files, "--address", cluster.address, "--nodes", "2"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "check passed" in done.stderr and "domain 1  rank 1  127.0.0." in done.stderr
    body = json.loads(done.stdout)
    assert (
        body["passed"] and body["world"] == 2 and body["command"].startswith("launch/ray_ring.py")
    )
    assert {e["pid"] for e in json.loads((tmp_path / "trace").read_text())["traceEvents"]} == {0, 1}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, str(ROOT / "launch" / "ring.py"), *text, str(tmp_path / "torchrun")],
        check=True, capture_output=True, timeout=200,
    )  # fmt: skip
    assert (tmp_path / "ray").read_bytes() == (tmp_path / "torchrun").read_bytes()
    assert_gone([])


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("--nodes 0", 2, "'0' is less than 1"),
        ("--virtual-ranks 2", 2, "threads of one process"),
        ("--nodes 4", 1, "4 node(s) with 1 CPU each are wanted, but the cluster has 3: 2 CPU"),
        ("--device cuda", 1, "1 CPU, 1 GPU each are wanted"),
    ],
)
def test_refusals_are_one_line(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    text: str, code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cluster_module, "connected", ray_work.nothing)
    assert ray_ring.main([*text.split(), "--seq", "64", "--address", cluster.address]) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert len([line for line in said if line.startswith("ray_ring.py: ")]) == 1


# ---- last: a node less --------------------------------------------------------------------------


def test_a_node_removed_in_mid_run_and_a_rerun_without_it(
    cluster: LocalCluster, ring: Ring
) -> None:
    places = ring.gang.places
    rank = next(r for r, place in enumerate(places) if place.address != "127.0.0.2")
    index = int(places[rank].address[-1]) - 2
    removal = threading.Timer(0.5, cluster.remove_node, (index,))
    removal.start()
    error = failure(ring, ray_work.sleeps, 60.0)
    removal.join()
    assert error.rank == rank and f"its node {places[rank].address} is gone" in str(error)
    assert [r for r, _, _ in ring.run(ray_work.places)] == [0, 1]
    assert places[rank].address not in [place.address for place in ring.gang.places]
