"""Who becomes which rank, and whom a failure is laid on: without Ray."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from ringfa4.comm.reach import Seat
from ringfa4.launch import ray_rank
from ringfa4.launch.ray_outcomes import BUSY, LOST, Outcome, blame, diagnose, raised_alike
from ringfa4.launch.ray_places import (
    Place,
    domains,
    even_domains,
    in_order,
    local_ranks,
    require_one_build,
)
from ringfa4.launch.ray_rank import PORTS, bind, build, interface_of
from ringfa4.topology import Topology

ROOT = Path(__file__).resolve().parent.parent.parent


def place(domain: str, address: str, gpu: int | None, pid: int = 7) -> Place:
    return Place(f"node-{address}", address, pid, None if gpu is None else str(gpu), domain)


TWO_RACKS = [
    place(domain, f"10.0.{rack}.{node}", gpu)
    for domain, rack in (("fabric-z", 1), ("fabric-a", 2))
    for node in (9, 10)
    for gpu in range(12)
]
"""In the order of ranks: the rack with the lower addresses first, then nodes, then GPUs, as
numbers."""


def test_neighbours_share_node_and_domain_wherever_ray_put_them() -> None:
    shuffled = random.Random(3).sample(TWO_RACKS, len(TWO_RACKS))
    assert [shuffled[i] for i in in_order(shuffled)] == TWO_RACKS
    assert domains(TWO_RACKS) == (0,) * 24 + (1,) * 24
    assert local_ranks(TWO_RACKS) == list(range(12)) * 4


def test_one_domain_over_several_nodes_stays_together() -> None:
    """The second node's domain begins on the first: its ranks follow, before another domain's."""
    first, second, other = (place(d, f"10.0.0.{i}", 0) for i, d in ((1, "x"), (3, "x"), (2, "y")))
    for places in permutations([first, second, other]):
        assert [places[i] for i in in_order(places)] == [first, second, other]


def test_ranks_of_a_node_without_gpus_are_all_there() -> None:
    places = [place("n", "10.0.0.1", None, pid) for pid in (30, 10, 20)]
    assert [places[i].pid for i in in_order(places)] == [10, 20, 30]


@pytest.mark.parametrize(
    ("numbers", "count"),
    [([0, 0, 1, 1], 2), ([0, 0, 0], None), ([0, 1, 2], None), ([0, 0, 1], None), ([0], None)],
)
def test_domains_of_one_size_reach_the_plan(numbers: list[int], count: int | None) -> None:
    assert even_domains(numbers) == count
    if count is not None:
        assert Topology.of(numbers) == Topology.even(len(numbers), count)


def test_another_build_is_refused_by_name() -> None:
    require_one_build(["1.0", "1.0"], ["a", "b"])
    with pytest.raises(ValueError, match=r"10\.0\.0\.1 has 1\.0, 10\.0\.0\.3 has 1\.1"):
        require_one_build(["1.0", "1.0", "1.1"], ["10.0.0.1", "10.0.0.2", "10.0.0.3"])


def test_a_build_names_versions_and_sources() -> None:
    assert all(part in build() for part in ("ringfa4 ", "sources ", "torch ", "Python "))


# ---- who is to blame ----------------------------------------------------------------------------

PEER = Outcome(0, error="PeerError", message="rank 2: late", blames=2, step=3)
KEPT = replace(PEER, message="rank 2: rank 0: late", awaited=1)
"""Rank 2 has given rank 0 up, which itself waits for rank 1."""
FORWARD = ("forward", "wait", 3)


@pytest.mark.parametrize(
    ("outcomes", "culprit"),
    [
        ([PEER, Outcome(1, error="KeyError"), Outcome(2, error=LOST)], 2),
        ([PEER, Outcome(1, error="KeyError"), Outcome(2, error=BUSY)], 1),
        ([PEER, replace(PEER, rank=1), Outcome(2, error=BUSY)], 2),
        ([PEER, Outcome(1, error="ContextBrokenError"), replace(PEER, rank=2, blames=0)], 2),
        ([replace(PEER, blames=1), replace(PEER, rank=1), Outcome(2, error=BUSY)], 2),
        ([KEPT, Outcome(1, error=BUSY), replace(PEER, rank=2, blames=0)], 1),
        ([Outcome(0, error="PeerError"), Outcome(1, error=BUSY), Outcome(2)], 1),
        ([Outcome(0, error="PeerError"), Outcome(1), Outcome(2)], None),
    ],
)
def test_facts_overrule_hearsay(outcomes: list[Outcome], culprit: int | None) -> None:
    assert blame(outcomes) == culprit


PLACES = [place(f"n{i}", f"10.0.0.{i}", None, 100 + i) for i in range(3)]


def test_one_line_names_rank_process_node_step_and_witness() -> None:
    late = Outcome(0, error="PeerError", message="rank 1: late", blames=1, step=4)
    soon = Outcome(2, error="PeerError", message="rank 1: gone", blames=1, step=3, spot=FORWARD)
    error = diagnose([late, Outcome(1, error=LOST, message="killed"), soon], PLACES, {})
    assert str(error) == (
        "rank 1 (pid 101 on 10.0.0.1): killed; rank 2 noticed in forward, step 3 (wait)"
    )
    assert (error.rank, error.step, error.details) == (1, 3, "")


def test_a_lost_node_is_said_to_be_lost() -> None:
    lost = [Outcome(0), Outcome(1, error=LOST, message="killed"), Outcome(2)]
    error = diagnose(lost, PLACES, {}, frozenset([PLACES[1].node]))
    assert "its node 10.0.0.1 is gone; before its first step" in str(error)


def test_an_error_of_its_own_has_its_step_and_traceback() -> None:
    own = Outcome(1, error="KeyError", message="'x'", details="Traceback ...\n", spot=FORWARD)
    error = diagnose([PEER, own, Outcome(2, error=BUSY)], PLACES, {})
    assert "rank 1 (pid 101 on 10.0.0.1): KeyError: 'x'; in forward, step 3 (wait)" in str(error)
    assert (error.rank, error.step, error.details) == (1, 3, "Traceback ...\n")


def test_who_does_not_answer_is_where_he_was_seen() -> None:
    heard = Outcome(0, error="PeerError", message="rank 1: no K/V records within 4 s (noticed in "
                    "step 2)", blames=1, step=2, spot=("backward", "wait", 2))  # fmt: skip
    error = diagnose([heard, Outcome(1, error=BUSY)], PLACES, {1: FORWARD})
    assert str(error).endswith(
        ": no K/V records within 4 s; it does not answer; last seen in forward, step 3 (wait); "
        "rank 0 noticed in backward, step 2 (wait)"
    )


def test_who_kept_the_one_that_was_given_up_is_named() -> None:
    gave_up = Outcome(2, error="PeerError", message="rank 0: late", blames=0, step=2)
    outcomes = [replace(KEPT, spot=FORWARD), Outcome(1, error=BUSY), gave_up]
    error = diagnose(outcomes, PLACES, {1: FORWARD})
    assert str(error) == (
        "rank 1 (pid 101 on 10.0.0.1): rank 0, which was given up, waited for it; it does not "
        "answer; last seen in forward, step 3 (wait); rank 0 noticed in forward, step 3 (wait)"
    )
    assert (error.rank, error.step) == (1, 3)


def test_who_does_not_answer_may_be_all_that_is_known() -> None:
    late = Outcome(0, error="PeerError", message="a peer: it failed or is late")
    error = diagnose([late, Outcome(1, error=BUSY, message="no answer")], PLACES, {})
    said = "rank 1 (pid 101 on 10.0.0.1): no answer; rank 0: a peer: it failed or is late"
    assert (str(error), error.rank, error.step) == (said, 1, None)


def test_nobody_is_named_without_evidence() -> None:
    error = diagnose(
        [Outcome(0, error="PeerError", message="a peer: late"), Outcome(1)], PLACES, {}
    )
    assert (str(error), error.rank) == ("rank 0: a peer: late", None)


def test_what_all_raise_alike_is_the_callers_mistake() -> None:
    said = [Outcome(r, error="ValueError", message="seq=-1") for r in range(2)]
    assert isinstance(raised_alike(said), ValueError) and str(raised_alike(said)) == "seq=-1"
    assert raised_alike([said[0], replace(said[1], message="seq=-2")]) is None
    assert raised_alike([said[0], Outcome(1)]) is None
    assert raised_alike([Outcome(r, error="KeyError", message="x") for r in range(2)]) is None


# ---- ports and interfaces -----------------------------------------------------------------------


def test_a_taken_port_is_passed_over() -> None:
    with bind("127.0.0.1", 0) as taken:
        first = taken.getsockname()[1]
        with bind("127.0.0.1", first) as other:
            assert first < other.getsockname()[1] < first + PORTS


def test_all_ports_taken_is_an_error_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", occupied)
    with pytest.raises(ValueError, match=r"ports 29500 to 29515 of 127\.0\.0\.1 are all taken"):
        bind("127.0.0.1", 29500)


def test_an_address_of_another_host_is_not_a_taken_port() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        bind("203.0.113.1", 0)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.1") is None


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", ["rack/7", None])
def test_a_rank_sees_the_gpus_of_its_node_and_uses_its_own(
    fabric: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(ray_rank, "seat_of", lambda d: Seat("h", "b", str(d), fabric, mps=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert ray_rank.Rank("n", "127.0.0.1", "5").settle(["4", "5", "7"]) == (fabric or "n")
    assert (os.environ["CUDA_VISIBLE_DEVICES"], used) == ("4,5,7", ["cuda:1"])


def test_a_rank_without_a_gpu_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ray_rank.Rank("node", "127.0.0.1", None).settle([]) == "node"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


# ---- Ray is optional ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["ringfa4", "ringfa4.api", "ringfa4.launch.ring"])
def test_nothing_else_imports_ray(module: str) -> None:
    code = f"import sys; sys.modules['ray'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_ray_the_command_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; from ringfa4.launch.ray_ring import main; main([])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "ray_ring.py: Ray is not installed; pip install 'ringfa4[ray]'\n"
