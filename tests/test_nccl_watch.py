"""The host watchdog of NCCL transfers, on works that complete when the test says so."""

from __future__ import annotations

import gc
import logging
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from ringfa4.comm import nccl_watch, torch_p2p
from ringfa4.comm.gloo import Posted
from ringfa4.comm.interface import Control
from ringfa4.comm.nccl_watch import WorkWatch
from ringfa4.comm.streams import CudaEngine
from ringfa4.errors import PeerError


class FakeWork:
    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        """The device waits, not the host."""


class FakeControl(Control):
    """Rank 0 of 3."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = 0, 3, timeout_s
        self.told: list[str] = []
        self.failed: tuple[int, str] | None = None

    def gather(self, message: bytes) -> list[bytes]:
        raise NotImplementedError

    def report(self, reason: str) -> None:
        self.told.append(reason)

    def failure(self) -> tuple[int, str] | None:
        return self.failed

    def close(self) -> None:
        raise NotImplementedError


def no_device() -> None:
    """Nothing to make ready."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watch, "WATCH_S", 0.005)


def until_lost(watch: WorkWatch, limit_s: float = 20.0) -> PeerError:
    deadline = time.monotonic() + limit_s
    while watch.lost is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert watch.lost is not None, "nothing was noticed"
    return watch.lost


def test_a_lost_peer_is_named_logged_told_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    control, first, second = FakeControl(1000.0), FakeWork(), FakeWork()
    watch = WorkWatch(control, no_device)
    with caplog.at_level(logging.ERROR, "ringfa4"):
        watch.watch([first], 1, "K/V records", 3)
        watch.watch([second], 2, "reader of K/V", 4)
        first.done = True
        control.timeout_s = 0.1
        lost = until_lost(watch)
        watch.close()
    assert (lost.rank, lost.step) == (2, 4), "the first one came"
    for said in (str(lost), control.told[0], caplog.messages[0]):
        assert "rank 2: no reader of K/V within 0.1 s" in said, said
    assert len(control.told) == 1 == len(caplog.messages), "once"
    with pytest.raises(PeerError, match="rank 2"):
        watch.watch([FakeWork()], 1, "anything", 0)


def test_a_reported_failure_is_passed_on_before_the_timeout() -> None:
    control = FakeControl(1000.0)
    watch = WorkWatch(control, no_device)
    watch.watch([FakeWork()], 1, "K/V records", 2)
    control.failed = 2, "out of memory"
    lost = until_lost(watch)
    watch.close()
    assert (lost.rank, lost.awaited) == (2, 1) and "out of memory" in str(lost)


def test_progress_restarts_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve transfers of 0.4 timeouts each: late altogether, but never the one that is waited
    for. The last one is, when it takes more than one timeout."""
    now = [100.0]
    monkeypatch.setattr(nccl_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(nccl_watch, "WATCH_S", 3600.0)  # it looks when this test does
    control = FakeControl(0.5)
    watch, works = WorkWatch(control, no_device), [FakeWork() for _ in range(13)]
    for n, work in enumerate(works):
        watch.watch([work], 1, f"transfer {n}", n)
    watch.look()
    for work in works[:-1]:
        now[0] += 0.2
        watch.look()
        work.done = True
        watch.look()
    assert watch.lost is None and not control.told
    now[0] += 0.6
    watch.look()
    watch.close()
    assert watch.lost is not None and "no transfer 12 within 0.5 s" in str(watch.lost)


@pytest.mark.parametrize("given_up", [False, True])
def test_who_stays_in_a_transfer_ends(given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody aborts the communicator: its works are complete then."""
    now, ended = [100.0], list[str]()
    monkeypatch.setattr(nccl_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(nccl_watch, "WATCH_S", 3600.0)
    monkeypatch.setattr(nccl_watch.stuck, "end_process", ended.append)
    control, work = FakeControl(0.5), FakeWork()
    watch = WorkWatch(control, no_device)
    watch.watch([work], 1, "K/V records", 1)
    watch.look()
    now[0] += 0.6
    watch.look()
    assert watch.lost is not None
    now[0] += nccl_watch.stuck.STUCK_S - 0.1
    watch.look()
    assert not ended, "who can still act has time to"
    work.done = given_up
    now[0] += 0.2
    watch.look()
    watch.close()
    assert [str(watch.lost) in words for words in ended] == ([] if given_up else [True])


def test_the_thread_ends_with_its_object() -> None:
    control = FakeControl(1000.0)
    watch = WorkWatch(control, no_device)
    watch.watch([FakeWork()], 1, "K/V records", 1)
    (thread,) = (t for t in threading.enumerate() if t.name == "NCCL watchdog of rank 0")
    del watch
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_torch_p2p_watches_what_the_device_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: None)
    monkeypatch.setattr(CudaEngine, "__init__", lambda *a: None)
    monkeypatch.setattr(CudaEngine, "enter_thread", lambda self: None)
    control = FakeControl(0.1)
    group = cast(dist.ProcessGroup, None)
    mover = torch_p2p._NcclMover(group, torch.device("cpu"), control)
    posted, data = Posted(), torch.zeros(4, dtype=torch.uint8)
    posted.works = [(FakeWork(), 2, data)]
    mover.settle(posted, "K/V records", 5)
    deadline = time.monotonic() + 20
    with pytest.raises(PeerError, match=r"rank 2: no K/V records within 0.1 s"):
        while time.monotonic() < deadline:
            mover.settle(Posted(), "anything", None)
            time.sleep(0.002)
    mover.close()
