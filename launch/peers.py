"""Sums and maxima over ranks for measuring and checking: beside the ring, never through it.

    Alone       one process, nothing to do
    Processes   torch.distributed's collectives on the default group
    Threads     virtual ranks of one process: everybody puts a tensor down, everybody reads all

Every rank makes every call in the same order. Results are new tensors on the argument's device,
equal on all ranks; sums are added in rank order where we add them ourselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4.errors import PeerError


class Peers(Protocol):
    """The collectives of one rank."""

    rank: int
    world: int

    def sum(self, x: Tensor) -> Tensor: ...

    def max(self, x: Tensor) -> Tensor: ...

    def barrier(self) -> None: ...


class Alone:
    """A world of one."""

    rank, world = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x.clone()

    def max(self, x: Tensor) -> Tensor:
        return x.clone()

    def barrier(self) -> None:
        """Nobody to wait for."""


class Processes:
    """The default process group, whose backend takes tensors on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), device

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        out = x.to(self.device, copy=True).contiguous()
        with _peer_errors():
            dist.all_reduce(out, op)
        return out.to(x.device)

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        with _peer_errors():
            dist.barrier()


LOST = "it failed or is late (measuring and checking)"


@contextmanager
def _peer_errors() -> Iterator[None]:
    """torch.distributed says RuntimeError when a peer is gone or late; which one it cannot say."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(LOST) from error


class Threads:
    """``Threads(world, timeout_s).member(rank)`` are the peers of one virtual rank."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world = world
        self.slots: list[Tensor | None] = [None] * world
        self.meeting = threading.Barrier(world, timeout=timeout_s)

    def member(self, rank: int) -> Peers:
        return _Thread(self, rank)

    def abort(self) -> None:
        """Wake whoever waits here: they raise PeerError."""
        self.meeting.abort()


def _settle(x: Tensor) -> None:
    """Ranks on one GPU compute on streams of their own: finish this one's work first."""
    if x.device.type == "cuda":
        torch.cuda.current_stream(x.device).synchronize()


class _Thread:
    def __init__(self, shared: Threads, rank: int) -> None:
        self._shared, self.rank, self.world = shared, rank, shared.world

    def _reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        self._shared.slots[self.rank] = x
        _settle(x)
        self.barrier()
        parts = [part for part in self._shared.slots if part is not None]
        assert len(parts) == self.world
        result = reduce(combine, parts[1:], parts[0].clone())
        _settle(x)
        self.barrier()  # nobody overwrites a slot that another rank still reads
        return result

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.add)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.maximum)

    def barrier(self) -> None:
        try:
            self._shared.meeting.wait()
        except threading.BrokenBarrierError:
            raise PeerError(LOST) from None
