"""What the pull protocol asks of a device and of the memory between ranks.

    Lane      a queue of work in order, as a CUDA stream is; methods only enqueue
    Mark      a point in a lane, which other lanes can wait for
    Engine    the lanes of one device: "current", where the caller computes, and new ones beside it
    Memory    pieces of equal size, one a rank, that every rank can address
    Signals   flags: one writer each, only ever counting up, awaited by a lane

:mod:`ringfa4.comm.pull` is written on these; ``streams``, ``signals``, ``cuda_local``, ``symm_mem``
and ``nvshmem`` supply them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from ringfa4.errors import PeerError

POLL_S = 0.001
"""How often the host looks at a mark, in the rare places where it waits for one."""


class Flag(IntEnum):
    """What a rank tells a peer. Every flag has one writer and only ever counts up."""

    PUBLISHED = 0
    DELIVERED = 1
    RELEASED = 2
    CARRIED = 3
    READ = 4


def stamp(call: int, index: int) -> int:
    """Value of a flag for contribution ``index`` (DELIVERED, RELEASED) or the copy of lap ``index``
    (CARRIED, READ) of ``call``: grows with both."""
    assert 0 <= index < (1 << 20) - 1, f"{index=}"
    return (call << 20) + index + 1


class Mark(Protocol):
    """A point in a lane."""

    def query(self) -> bool:
        """Whether all work before it is done."""


def reached(mark: Mark, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
    """Wait on the host until ``mark`` is reached; False after ``timeout_s`` or when told so."""
    deadline = time.monotonic() + timeout_s
    while not mark.query():
        if give_up() or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


class Lane(ABC):
    """A queue of work done in order. Methods only enqueue."""

    @abstractmethod
    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy bytes (1-D uint8, equal sizes); either may be a peer's."""

    @abstractmethod
    def fill(self, into: Tensor, byte: int) -> None:
        """Set every byte (1-D uint8)."""

    @abstractmethod
    def record(self) -> Mark:
        """A mark behind everything enqueued so far."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """Later work starts when ``mark`` is reached."""

    @abstractmethod
    def write(self, words: Sequence[Tensor], value: int) -> None:
        """Set each word (int64 scalar, possibly a peer's), visible after all earlier work of the
        lane."""

    @abstractmethod
    def wait(self, words: Sequence[Tensor], value: int) -> None:
        """Later work starts when each word (int64 scalar of this rank) is at least ``value``."""


class Engine(ABC):
    """Lanes and memory of one device."""

    device: torch.device

    @abstractmethod
    def current(self) -> Lane:
        """Where the caller's work goes."""

    @abstractmethod
    def side(self) -> Lane:
        """A new lane beside it, for copies."""

    @abstractmethod
    def require_no_capture(self) -> None:
        """Raises RuntimeError under CUDA-graph capture: which buffer is used is host state."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called once in a thread of the transport's own that uses lanes."""

    @abstractmethod
    def host_copy(self, words: Tensor) -> Callable[[], list[list[int]]]:
        """A function that returns what ``words`` (2-D int64) hold, or held a little earlier;
        never waits long."""


class Memory(ABC):
    """Memory of equal size on every rank, each piece addressable by all."""

    @abstractmethod
    def allocate(self, nbytes: int) -> list[Tensor]:
        """Every rank's piece as this rank addresses it (uint8, 128-byte aligned, undefined).
        Collective."""

    @abstractmethod
    def free(self, pieces: list[Tensor]) -> None:
        """Nobody uses ``pieces`` any more. Collective."""


class Signals(ABC):
    """Flags between ranks."""

    lost: PeerError | None
    """A peer that was lost after its wait had been enqueued."""

    @abstractmethod
    def begin(self) -> None:
        """A call of this rank begins: until :meth:`end` only :meth:`wait` waits for peers.

        May raise PeerError, as :meth:`wait`.
        """

    @abstractmethod
    def end(self) -> None:
        """The call is enqueued."""

    @abstractmethod
    def set(self, lane: Lane, flag: Flag, peers: Sequence[int], value: int) -> None:
        """At every rank of ``peers``, raise this rank's ``flag`` to ``value`` after the lane's
        work so far."""

    @abstractmethod
    def wait(
        self, lane: Lane, flag: Flag, peers: Sequence[int], value: int, what: str, step: int | None
    ) -> None:
        """Later work of ``lane`` starts when every peer's ``flag`` is at least ``value``.

        May block the host until a peer has enqueued setting it, and then raises PeerError.
        """

    def would_block(self, flag: Flag, peer: int, value: int) -> bool:
        """Whether :meth:`wait` would block the host now."""
        return False

    @abstractmethod
    def release(self) -> None:
        """Let every wait pass, now and later: the call has failed. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is waited for any more. Collective after a clean run."""
