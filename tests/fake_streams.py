"""Streams without a GPU: a lane is a thread that works off a queue, late at random.

    current lane   the calling thread itself: work happens at once, waits block
    side lane      a thread of its own: enqueueing returns at once, work is late by random times

So the pull protocol runs with real asynchrony on the CPU: a missing wait shows as wrong bytes.
"""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringfa4.comm import background
from ringfa4.comm.cuda_local import SharedMemory, SharedSpace, local_pull_transport
from ringfa4.comm.lanes import Engine, Lane, Mark
from ringfa4.comm.local import LocalWorld
from ringfa4.comm.pull import PullTransport
from ringfa4.comm.signals import memory_transport

SPIN_S = 0.0002


class Done:
    """A mark; reached when set."""

    def __init__(self, reached: bool = False) -> None:
        self.event = threading.Event()
        if reached:
            self.event.set()

    def query(self) -> bool:
        return self.event.is_set()


def spin(words: Sequence[Tensor], value: int) -> None:
    while any(int(word) < value for word in words):
        time.sleep(SPIN_S)


class HostLane(Lane):
    """The calling thread."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def fill(self, into: Tensor, byte: int) -> None:
        into.fill_(byte)

    def record(self) -> Mark:
        return Done(reached=True)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, Done)
        mark.event.wait()

    def write(self, words: Sequence[Tensor], value: int) -> None:
        for word in words:
            word.fill_(value)

    def wait(self, words: Sequence[Tensor], value: int) -> None:
        spin(words, value)


class ThreadLane(Lane):
    """A thread; ``late_s`` bounds the random pause before each piece of work."""

    def __init__(self, seed: int, late_s: float) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        main = functools.partial(_work_off, self._work, random.Random(seed), late_s)
        end = functools.partial(self._work.put, None)
        background.start("lane", main, end)
        weakref.finalize(self, end)

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._work.put(lambda: into.copy_(source))

    def fill(self, into: Tensor, byte: int) -> None:
        self._work.put(lambda: into.fill_(byte))

    def record(self) -> Mark:
        done = Done()
        self._work.put(done.event.set)
        return done

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, Done)
        self._work.put(mark.event.wait)

    def write(self, words: Sequence[Tensor], value: int) -> None:
        for word in words:
            self._work.put(lambda word=word: word.fill_(value))

    def wait(self, words: Sequence[Tensor], value: int) -> None:
        self._work.put(lambda: spin(words, value))


def _work_off(
    work: queue.SimpleQueue[Callable[[], object] | None], draw: random.Random, late_s: float
) -> None:
    while (piece := work.get()) is not None:
        time.sleep(draw.random() ** 4 * late_s)
        piece()


class FakeEngine(Engine):
    """Lanes of the CPU."""

    def __init__(self, seed: int = 0, late_s: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self._seed, self._late_s = seed, late_s

    def current(self) -> Lane:
        return HostLane()

    def side(self) -> Lane:
        self._seed += 1
        return ThreadLane(self._seed, self._late_s)

    def require_no_capture(self) -> None:
        """There is nothing to capture."""

    def enter_thread(self) -> None:
        """Threads need no preparation."""

    def host_copy(self, words: Tensor) -> Callable[[], list[list[int]]]:
        return words.tolist


_spaces_lock = threading.Lock()


def space_of(world: LocalWorld) -> SharedSpace:
    """The space of a world, made by whichever rank comes first."""
    with _spaces_lock:
        made: SharedSpace = world.__dict__.setdefault("space", SharedSpace(world))
    return made


def event_transport(world: LocalWorld, rank: int, late_s: float = 0.0) -> PullTransport:
    """As virtual ranks on a GPU: flags are events."""
    return local_pull_transport(space_of(world), rank, FakeEngine(100 * rank, late_s))


def word_transport(world: LocalWorld, rank: int, late_s: float = 0.0) -> PullTransport:
    """As NVSHMEM and torch symmetric memory: flags are words that the lanes wait for."""
    engine = FakeEngine(100 * rank, late_s)
    memory = SharedMemory(space_of(world), rank, engine.device)
    return memory_transport("words", world.control(rank), engine, memory)
