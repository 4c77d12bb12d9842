"""What the ranks of a Ray gang run for tests/ray/, and how those tests get at Ray.

Ranks import this module by name, which a test module is not (tests/ray is no package: it would hide
Ray itself).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.faults_work import cycles
from distributed.ring_work import ring
from rings import Case

from ringfa4 import ContextParallel
from ringfa4.comm import reach
from ringfa4.comm.control import open_control
from ringfa4.errors import MissingLibraryError
from ringfa4.launch.options import Options
from ringfa4.launch.ray_rank import WHEREABOUTS
from ringfa4.launch.runs import Report
from ringfa4.ring import backward, forward
from ringfa4.trace import Observer


def ray_cluster() -> ModuleType:
    """ringfa4.launch.ray_cluster; without Ray the calling module is skipped, visibly."""
    try:
        from ringfa4.launch import ray_cluster
    except MissingLibraryError as error:
        pytest.skip(str(error), allow_module_level=True)
    return ray_cluster


def parts(case: Case) -> dict[str, Any]:
    return ring(case)


def places() -> tuple[int, str, str]:
    """(rank, LOCAL_RANK, what the environment says)."""
    return dist.get_rank(), os.environ["LOCAL_RANK"], os.environ.get("RINGFA4_TEST", "")


class _Fatal:
    """Does something to this process when it enters a span."""

    def __init__(self, inner: Observer, kind: str, step: int, deed: str) -> None:
        self.inner, self.at, self.deed = inner, (kind, step), deed

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        self.inner.span(kind, step)
        if (kind, step) == self.at:
            commit(self.deed)
        return nullcontext()


def commit(deed: str) -> None:
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "sleep":
        time.sleep(600)
    elif deed == "raise":
        raise FloatingPointError("not today")
    else:
        raise AssertionError(deed)


TIMEOUT_S = 60.0
"""How long ranks wait where nobody is late, on a slow machine too."""


def fails(
    culprit: int,
    direction: str,
    kind: str,
    step: int,
    deed: str,
    patience_s: float = TIMEOUT_S,
) -> None:
    """Forward and backward of one full attention; rank ``culprit`` does ``deed`` in mid-call.

    The others wait for ``patience_s``, from their first call on.
    """
    cp = ContextParallel(seq_len=64 * dist.get_world_size(), mask="full", timeout_s=TIMEOUT_S)
    x = torch.ones(1, 64, 1, 32)
    cp.attention(x, x, x)
    cp.context.control.timeout_s = patience_s
    made = cp.problem.ring(x, x, x, backward=True)

    def watch(name: str) -> Observer:
        seen = WHEREABOUTS.watch(name)
        at_fault = dist.get_rank() == culprit and name == direction
        return _Fatal(seen, kind, step, deed) if at_fault else seen

    out, lse = forward(made, x, x, x, scale=1.0, observer=watch("forward"))
    backward(made, x, x, x, out, lse, x, scale=1.0, observer=watch("backward"))
    raise AssertionError("the call ended although a rank was not there")


def another_plan() -> None:
    """Rank 1 has a mask of its own."""
    mask = "full" if dist.get_rank() == 1 else "causal"
    ContextParallel(seq_len=64, mask=mask, timeout_s=TIMEOUT_S)


def unfit() -> None:
    raise ValueError("seq=-1 is no length")


def job_that_fails_once(options: Options, device: str) -> Report:
    """The job of ray_ring.py; the first attempt loses rank 1."""
    from ringfa4.launch.ray_job import job

    first = Path(os.environ["RINGFA4_TEST"])
    if dist.get_rank() == 1 and not first.exists():
        first.touch()
        commit("kill")
    return job(options, device)


def sleeps(seconds: float) -> None:
    """Ranks that meet nobody: only Ray can tell that one is gone."""
    time.sleep(seconds)


def different_domains() -> None:
    """GPUs are made up: ranks 0 and 1 in one rack's NVLink domain, ranks 2 and 3 in another's."""
    rank = dist.get_rank()
    host = f"node-{rank // 2}"
    seat = reach.Seat(host, f"boot-{host}", f"{rank}" * 8, f"rack-{rank // 2}/0", mps=False)
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    visible, torch.cuda.device_count = torch.cuda.device_count, lambda: 0
    seat_of, reach.seat_of = reach.seat_of, lambda device: seat
    control = open_control(dist.group.WORLD, TIMEOUT_S)
    try:
        reach.require_reachable(control, torch.device("cuda"), "symm_mem")
    finally:
        control.close()
        torch.cuda.is_available, torch.cuda.device_count = available, visible
        reach.seat_of = seat_of


@contextmanager
def nothing(address: str) -> Iterator[None]:
    """In place of a connection that this process has already."""
    yield


__all__ = ["cycles"]
