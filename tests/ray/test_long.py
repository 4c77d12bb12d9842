"""What takes longer on a Ray cluster: clusters of their own, drivers that end badly, nodes that
differ. Slow: `make test-ray`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray_work
import torch
from distributed.test_ring_gloo import CASES, _together
from rings import Case, check
from rings import run as virtual

ray_work.ray_cluster()

import ray  # noqa: E402

from ringfa4.launch.ray_cluster import (  # noqa: E402
    LocalCluster,
    RankFailed,
    Ring,
    Shape,
    connected,
    ring_cluster,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent.parent


def test_one_rank_needs_nobody() -> None:
    """Case 39, and the library as the docs show it."""
    case = Case(**{**vars(CASES["causal"]), "world": 1})
    with ring_cluster() as ring:
        got = _together(case, ring.run(ray_work.parts, case))
    check(case, got)
    want = virtual(case)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize(("culprit", "direction"), [(0, "forward"), (1, "backward")])
def test_a_stopped_process_keeps_nobody(culprit: int, direction: str) -> None:
    """It answers neither ranks nor the driver; as rank 0 it also holds the group's store."""
    with ring_cluster(2) as ring:
        pids = [place.pid for place in ring.gang.places]
        begin = time.monotonic()
        with pytest.raises(RankFailed, match="within 4 s; it does not answer") as caught:
            ring.run(ray_work.fails, culprit, direction, "fetch", 1, "stop", 4.0)
        print(f"stopped: {time.monotonic() - begin:.1f} s to: {caught.value}")
        assert (caught.value.rank, caught.value.step) == (culprit, 1)
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
        assert [rank for rank, _, _ in ring.run(ray_work.places)] == [0, 1]


def other_sources(folder: Path) -> Path:
    """A copy of the checkout's library in which one line differs."""
    for name in ("ringfa4", "comm", "kernels", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "ringfa4" / "errors.py").open("a") as file:
        file.write("# not what the others run\n")
    return folder


def broken_torch(folder: Path) -> Path:
    """A torch that cannot be loaded, as where its libraries are missing."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: not found')\n")
    return folder


@pytest.mark.parametrize(
    ("install", "kind", "message"),
    [
        (other_sources, ValueError, r"nodes run different versions: 127\.0\.0\.\d has ringfa4 "),
        (
            broken_torch,
            RankFailed,
            r"a rank on 127\.0\.0\.\d: it cannot start: ImportError: libtorch",
        ),
    ],
)
def test_a_node_with_another_install(
    install: Callable[[Path], Path],
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before anything runs, in one line that names the node."""
    monkeypatch.chdir(tmp_path)  # Ray puts the driver's directory on the ranks' path, first
    path = os.pathsep.join([str(install(tmp_path / "other")), *filter(None, sys.path)])
    cluster = LocalCluster(2, cpus=1, env={1: {"PYTHONPATH": path}})
    try:
        with connected(cluster.address):
            with pytest.raises(kind, match=message) as caught:
                Ring(Shape(2, 1)).run(ray_work.places)
            assert "\n" not in str(caught.value)
            states = [group["state"] for group in ray.util.placement_group_table().values()]
            assert states == ["REMOVED"]
    finally:
        cluster.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_gpus_that_only_ray_knows_of() -> None:
    """Ray is told of two GPUs a node; a rank that gets one says what torch makes of it."""
    cluster = LocalCluster(2, cpus=2, gpus=2)
    try:
        with connected(cluster.address):
            with pytest.raises(RankFailed, match=r"before the first step \(settle\)") as caught:
                Ring(Shape(2, 2, gpus=True)).run(ray_work.places)
            assert "\n" not in str(caught.value) and "a rank on 127.0.0." in str(caught.value)
            with pytest.raises(ValueError, match="3 CPU, 3 GPU each are wanted"):
                Ring(Shape(2, 3, gpus=True)).run(ray_work.places)
    finally:
        cluster.close()


# ---- the command, with a cluster of its own -----------------------------------------------------


def command(folder: Path, *argv: str) -> subprocess.Popen[str]:
    """launch/ray_ring.py on two nodes of this machine, whose files go into ``folder``."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "ray_ring.py"), "--nodes", "2", *argv],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def family(folder: Path) -> list[int]:
    """Processes that have ``folder`` in their command line or environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if bytes(folder) in words and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


def ranks(folder: Path) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in family(folder)}
    return [pid for pid, name in names.items() if "_Actor" in name]


def assert_nothing_left(folder: Path, *, files: bool = False) -> None:
    """No rank and, after the minute that Ray's agents take, no process; and no file, unless
    ``files`` are forgiven."""
    deadline = time.monotonic() + 100
    while (left := family(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert files or os.listdir(folder) == []


def running(started: subprocess.Popen[str], folder: Path) -> list[int]:
    """Its ranks, once it reports progress."""
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("forward:"):
            return ranks(folder)
    raise AssertionError(started.communicate())


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files; its name is short enough for the sockets that Ray puts into it."""
    with tempfile.TemporaryDirectory(prefix="r4-", dir="/tmp") as made:
        yield Path(made)


def test_the_command_checks_and_leaves_nothing(folder: Path) -> None:
    done = command(folder, "--seq", "8K", "--backward", "--check")
    said, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert "check passed" in said and errors == ""
    assert_nothing_left(folder)


def test_a_rank_killed_from_outside_and_a_retry(folder: Path) -> None:
    started = command(folder, "--seq", "64K", "--heads", "4", "--check", "--retries", "1")
    os.kill(running(started, folder)[-1], signal.SIGKILL)
    said, errors = started.communicate(timeout=200)
    assert started.returncode == 0, errors
    lost, again = (x for x in said.splitlines() if x.startswith(("rank ", "starting ")))
    assert "its process is gone" in lost and "in forward" in lost
    assert again == "starting all ranks again (1 of 1)" and "check passed" in said
    assert_nothing_left(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_takes_all_with_it(number: signal.Signals, folder: Path) -> None:
    """A killed one has no time to take its temporary files along."""
    started = command(folder, "--seq", "64K", "--heads", "4")
    assert len(running(started, folder)) == 2
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode != 0
    assert_nothing_left(folder, files=number == signal.SIGKILL)
