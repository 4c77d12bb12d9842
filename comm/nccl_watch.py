"""A host watchdog for transfers that only the device waits for: those of NCCL.

    watch(works, peer, what, step)    kept in the order in which the device does them
    every WATCH_S seconds             the complete ones are dropped; when a peer reported a failure,
                                      or the oldest was incomplete for ``timeout_s``, it is ``lost``

The caller's thread may sit in a synchronisation then, where no exception reaches it. So the message
is logged at once (logger "ringfa4"), told to the peers through the control channel, and raised as
PeerError in the next use of the transport. The device stays in the transfer, and what follows it
would compute with what was never received: unless the caller aborts the communicator, which is the
caller's, the process ends (:mod:`ringfa4.comm.stuck`). NCCL's own watchdog would do so after the
timeout of the process group, 10 minutes unless the caller set it.

A transfer starts after the computation that was enqueued before it, so ``timeout_s`` must be longer
than a step computes.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringfa4.comm import background, stuck
from ringfa4.comm.interface import Control
from ringfa4.errors import PeerError

WATCH_S = 0.1
"""How often the watchdog looks."""


class Work(Protocol):
    """What torch.distributed returns for an operation under way."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Watched:
    works: tuple[Work, ...]
    peer: int | None
    what: str
    step: int | None


class WorkWatch:
    """Works of one rank; its thread starts with the first and ends with the object."""

    def __init__(self, control: Control, enter_thread: Callable[[], None]) -> None:
        """``enter_thread`` readies the watchdog's thread to ask the device
        (:meth:`ringfa4.comm.lanes.Engine.enter_thread`).
        """
        self.lost: PeerError | None = None
        self._control, self._enter_thread = control, enter_thread
        self._watched: deque[_Watched] = deque()
        self._since = 0.0
        """When the oldest became the oldest, and once ``lost`` is known, since when it is."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[Work], peer: int | None, what: str, step: int | None) -> None:
        """``works``, all of one wait of the device; raises PeerError when a peer is lost."""
        self.require_peers()
        if not works:
            return
        self._watched.append(_Watched(tuple(works), peer, what, step))
        if self._thread is None:
            main = functools.partial(_watch, weakref.ref(self), self._enter_thread, self._stop)
            name = f"NCCL watchdog of rank {self._control.rank}"
            self._thread = background.start(name, main, self._stop.set)

    def require_peers(self) -> None:
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """What the watchdog does."""
        now, moved = time.monotonic(), False
        while self._watched and all(work.is_completed() for work in self._watched[0].works):
            self._watched.popleft()
            moved = True
        if moved or not self._watched or self._since == 0.0:
            self._since = now
        if not self._watched:
            return
        if self.lost is not None:
            self._end_when_stuck(now - self._since)
            return
        late, failed = self._watched[0], self._control.failure()
        if failed is not None:
            self.lost = PeerError(failed[1], rank=failed[0], step=late.step, awaited=late.peer)
        elif now - self._since > self._control.timeout_s:
            reason = f"no {late.what} within {self._control.timeout_s:g} s"
            self.lost = PeerError(reason, rank=late.peer, step=late.step)
        else:
            return
        logging.getLogger("ringfa4").error(
            "rank %d: %s; the device stays in this transfer", self._control.rank, self.lost
        )
        self._control.report(str(self.lost))
        self._since = now

    def _end_when_stuck(self, waited_s: float) -> None:
        """Nobody gave the communicator up, so this rank cannot go on."""
        patience_s = stuck.patience_s(self._control.timeout_s)
        if waited_s > patience_s:
            stuck.end_process(
                f"rank {self._control.rank} ends: its GPU is still in an NCCL transfer "
                f"{patience_s:g} s after a peer was lost: {self.lost}"
            )


def _watch(
    watched: weakref.ref[WorkWatch], enter_thread: Callable[[], None], stop: threading.Event
) -> None:
    """The watchdog; ends with what it watches."""
    enter_thread()
    while not stop.wait(WATCH_S):
        watch = watched()
        if watch is None:
            return
        watch.look()
        del watch
