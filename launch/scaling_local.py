"""The ring's work without its transfers, and the bare library calls in it: what a ring is held to.

    StillTransport    fetch(t) lends the own records in place of the peer's; dK/dV go nowhere, and
                      what "arrives" is zeros
    recorded          a kernel that keeps each library call it makes, to be made again by itself

A rank over a still transport encodes, computes, merges and adds as many bytes of the same kind as
in the ring, over its own keys instead of the others': the results are wrong, the work is the same.
Real records, not zeros, because a GPU multiplies zeros faster. Shards must be of one size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ringfa4.comm.arena import aligned_empty
from ringfa4.comm.interface import (
    Contribution,
    Exchange,
    Handle,
    Schedule,
    Transport,
    require_gather_arguments,
)
from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.native import NativeKernel


class StillTransport(Transport):
    """Nothing moves. No method waits for anybody."""

    name = "still"

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._own = aligned_empty(0, device)
        self._slot = aligned_empty(0, device)
        self._inbox = aligned_empty(0, device)

    def ready(self, schedule: Schedule) -> bool:
        return schedule.own_bytes <= len(self._own) and schedule.grad_bytes <= len(self._inbox)

    def open(self, schedule: Schedule) -> Exchange:
        """ValueError when a step reads more than this rank owns."""
        schedule.require_valid(self.rank, self.world)
        for number, step in enumerate(schedule.steps):
            if step.receive is not None and step.receive.nbytes > schedule.own_bytes:
                raise ValueError(
                    f"step {number} reads {step.receive.nbytes} bytes, this rank owns "
                    f"{schedule.own_bytes}: shards must be of one size"
                )
        if not self.ready(schedule):
            self._own, self._slot, self._inbox = (
                aligned_empty(n, self.device)
                for n in (schedule.own_bytes, schedule.grad_bytes, schedule.grad_bytes)
            )
            self._inbox.zero_()
        return _StillExchange(schedule, self._own, self._slot, self._inbox)

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """``local`` for everybody's; sizes must be equal."""
        require_gather_arguments(local, sizes, self.rank, self.world)
        if len(set(sizes)) > 1:
            raise ValueError(f"shards must be of one size: {list(sizes)}")
        return [local.clone() for _ in sizes]

    def abort(self, reason: str) -> None:
        """Nobody waits here."""

    def close(self) -> None:
        """Memory goes with the object."""


class _StillExchange(Exchange):
    def __init__(self, schedule: Schedule, own: Tensor, slot: Tensor, inbox: Tensor) -> None:
        self._schedule, self._own, self._slot, self._inbox = schedule, own, slot, inbox

    def outbox(self) -> Tensor:
        return self._own[: self._schedule.own_bytes]

    def publish(self) -> None:
        """Nobody reads."""

    def fetch(self, step: int) -> Handle:
        receive = self._schedule.steps[step].receive
        return _Here(None if receive is None else self._own[: receive.nbytes])

    def grad_slot(self, step: int) -> Tensor | None:
        out = self._schedule.steps[step].grad_out
        return None if out is None else self._slot[: out.nbytes]

    def send_grads(self, step: int) -> None:
        """They stay."""

    def contributions(self, step: int) -> Iterator[Contribution]:
        given = self._schedule.steps[step].grad_in
        if given is not None:
            yield Contribution(given.peer, self._inbox[: given.nbytes], lambda: None)

    def finish(self) -> None:
        """Nothing is under way."""


class _Here(Handle):
    def __init__(self, view: Tensor | None) -> None:
        self._view = view

    def wait(self) -> Tensor | None:
        return self._view


def recorded(kernel: BlockKernel) -> tuple[BlockKernel, list[Callable[[], object]]]:
    """A kernel like ``kernel``, and the library calls that it has made, to be repeated in order.

    The list stays empty for kernels that call no library. Operands are kept alive.
    """
    calls: list[Callable[[], object]] = []
    if not isinstance(kernel, NativeKernel):
        return kernel, calls
    twin = copy.copy(kernel)
    for name in ("attend", "differentiate"):
        made = getattr(kernel, name)

        setattr(twin, name, partial(_kept, calls, made))
    return twin, calls


def _kept(
    calls: list[Callable[[], object]], made: Callable[..., object], *operands: object
) -> object:
    """``made(*operands)``, noted in ``calls``."""
    calls.append(partial(made, *operands))
    return made(*operands)
