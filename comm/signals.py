"""Flags in symmetric memory, and the watchdog that ends waits for a peer that is gone.

    word[flag][peer] of rank r:   written by ``peer``, waited for by r, zeroed once, counts up

The device waits, so the host cannot see that a peer is late. A thread of each transport looks at
this rank's words while waits are outstanding. When a peer reported a failure, or nothing moved for
``timeout_s`` while a wait is unmet, it notes whom the oldest unmet wait is for, poisons the buffers
of the call and sets all own words to a value that satisfies every wait: the device goes on, its
results of this call are NaN where data was missing, and the next use of the transport raises the
PeerError. Nothing hangs: should the device not take that work, for which it had a queue when the
transport was made (:func:`ringfa4.comm.streams.queue_left`), the process says so and ends
(:mod:`ringfa4.comm.stuck`).

A rank that is merely slow is told apart from one that is gone by progress: every word that moves,
anywhere among this rank's, restarts the clock.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringfa4.comm import background, stuck
from ringfa4.comm.interface import Control
from ringfa4.comm.lanes import Engine, Flag, Lane, Mark, Memory, Signals, reached
from ringfa4.comm.pull import PullTransport
from ringfa4.errors import PeerError

WATCH_S = 0.1
"""How often the watchdog looks."""

PASS = 1 << 62
"""Satisfies every wait."""


Poison = Callable[[Lane, Sequence[int], Sequence[int], int], None]


@dataclass(frozen=True, slots=True)
class _Watch:
    """A wait that was enqueued."""

    flag: Flag
    peer: int
    value: int
    what: str
    step: int | None


class MemorySignals(Signals):
    """Flags as words of symmetric memory, set and awaited by the device. Collective to make."""

    def __init__(self, control: Control, engine: Engine, memory: Memory) -> None:
        self.lost: PeerError | None = None
        self.poison: Poison = _no_poison
        """What to do before waits are released; given the peers that have not published the call,
        and those whose copies are waited for."""
        self._control, self._engine, self._memory = control, engine, memory
        self._rank, world = control.rank, control.world
        self._pieces = memory.allocate(len(Flag) * world * 8)
        tables = [piece.view(torch.int64).view(len(Flag), world) for piece in self._pieces]
        self._own = tables[self._rank]
        self._own.zero_()
        # On the device, not only enqueued: a peer's first flag must not be zeroed.
        if not reached(engine.current().record(), control.timeout_s):
            raise PeerError(f"the device is not ready within {control.timeout_s:g} s")
        self._snapshot = engine.host_copy(self._own)
        control.gather(b"flags are zero")
        self._remote = [[table[flag, self._rank] for table in tables] for flag in Flag]
        self._local = [[self._own[flag, peer] for peer in range(world)] for flag in Flag]
        self._published = 0
        self._watches: deque[_Watch] = deque()
        self._seen: list[list[int]] = []
        self._since = time.monotonic()
        """When the words became what was last seen, or a wait was first outstanding."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._releasing = threading.Lock()
        self._released = False

    def begin(self) -> None:
        """Ranks are processes: nothing is taken in turns."""

    def end(self) -> None:
        """As :meth:`begin`."""

    def set(self, lane: Lane, flag: Flag, peers: Sequence[int], value: int) -> None:
        if flag is Flag.PUBLISHED:
            self._published = value
        lane.write([self._remote[flag][peer] for peer in peers], value)

    def wait(
        self, lane: Lane, flag: Flag, peers: Sequence[int], value: int, what: str, step: int | None
    ) -> None:
        if self.lost is not None:
            raise self.lost
        self._watches.extend(_Watch(flag, peer, value, what, step) for peer in peers)
        if self._thread is None and peers:
            main = functools.partial(_watch, weakref.ref(self), self._engine, self._stop)
            name = f"watchdog of rank {self._rank}"
            self._thread = background.start(name, main, self._stop.set)
        lane.wait([self._local[flag][peer] for peer in peers], value)

    def release(self) -> None:
        with self._releasing:
            if self._released:
                return
            self._released = True
            words = self._snapshot()
            others = [r for r in range(len(words[0])) if r != self._rank]
            absent = [r for r in others if words[Flag.PUBLISHED][r] < self._published]
            late = {
                w.peer
                for w in list(self._watches)
                if not self._met(w, words) and w.flag is Flag.CARRIED
            }
            lane = self._engine.side()
            self.poison(lane, absent, sorted(late), self._published - 1)
            lane.write([word for words in self._local for word in words], PASS)
            self._end_when_stuck(lane.record())
        self._stop.set()

    def _end_when_stuck(self, released: Mark) -> None:
        """End the process when the device does not come to ``released``: it waits for good."""
        patience_s, over = stuck.patience_s(self._control.timeout_s), threading.Event()
        words = (
            f"rank {self._rank} ends: its GPU still waits for a lost peer, and has taken no work "
            f"for {patience_s:g} s that would let it go on (too few hardware queues? see "
            f"CUDA_DEVICE_MAX_CONNECTIONS)"
        )

        def main() -> None:
            if not reached(released, patience_s, over.is_set) and not over.is_set():
                stuck.end_process(words)

        background.start(f"release of rank {self._rank}", main, over.set)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._remote, self._local, self.poison = [], [], _no_poison
        pieces, self._pieces = self._pieces, []
        self._memory.free(pieces)

    def _look(self) -> None:
        """What the watchdog does: once every :data:`WATCH_S`."""
        now = time.monotonic()
        if not self._watches:
            self._since = now
            return
        words = self._snapshot()
        while self._watches and self._met(self._watches[0], words):
            self._watches.popleft()
        if not self._watches or words != self._seen:
            self._seen, self._since = words, now
            return
        late, failed = self._watches[0], self._control.failure()
        if failed is not None:
            self.lost = PeerError(failed[1], rank=failed[0], step=late.step, awaited=late.peer)
        elif now - self._since > self._control.timeout_s:
            reason = f"no {late.what} within {self._control.timeout_s:g} s"
            self.lost = PeerError(reason, rank=late.peer, step=late.step)
        else:
            return
        self.release()

    @staticmethod
    def _met(watch: _Watch, words: list[list[int]]) -> bool:
        return words[watch.flag][watch.peer] >= watch.value


def _no_poison(lane: Lane, absent: Sequence[int], late: Sequence[int], call: int) -> None:
    """There is nothing to poison."""


def _watch(watched: weakref.ref[MemorySignals], engine: Engine, stop: threading.Event) -> None:
    """The watchdog; ends with the signals it watches."""
    engine.enter_thread()
    while not stop.wait(WATCH_S):
        signals = watched()
        if signals is None:
            return
        signals._look()
        del signals


def memory_transport(name: str, control: Control, engine: Engine, memory: Memory) -> PullTransport:
    """A pull transport whose flags are words of ``memory``. Collective."""
    signals = MemorySignals(control, engine, memory)
    transport = PullTransport(name, control, engine, memory, signals)
    signals.poison = transport.poison
    return transport
