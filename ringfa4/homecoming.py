"""How dK/dV come home in a backward pass: where each step's are put, who adds them, and when.

    step t, owner o     contribution of rank r -> o, who adds those of all ranks in plan order
    under a topology    -> who carried the records for the domain, who adds its domain's, and hands
                        the sum to o

What is sent in step t is taken in step t + 1, so that it travels while that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringfa4.comm.interface import Exchange
from ringfa4.fused import assign
from ringfa4.grads import add_into
from ringfa4.plan import Step
from ringfa4.shard import RECORD
from ringfa4.trace import Observer
from ringfa4.wire import PlainShard, PlainWire

if TYPE_CHECKING:
    from ringfa4.ring import Ring


class Homecoming:
    """dK/dV on their way: each step's to their owner or to who carried, sums to their owners.

    A carried shard's sum begins with this rank's own part, in turn 0, and takes those of the turns
    in order; it leaves in turn 0 of the next lap (:mod:`ringfa4.plan`). Every other contribution is
    taken one step behind, so that it travels while the next step computes.

    Sums are in fp32 (fp64 for fp64), also on their way; contributions are in the kernel's dtype.
    """

    def __init__(
        self, ring: Ring, exchange: Exchange, device: torch.device, observer: Observer
    ) -> None:
        self.ring, self.exchange, self.observer = ring, exchange, observer
        self.own = Sums(ring, ring.plan.step(ring.rank, 0), ring.sums, device)
        self.carried: dict[int, Sums] = {}
        """lap -> sum; two at most."""
        self.taken = 0

    def place(self, step: Step) -> PlainShard:
        """Where the kernel puts dK/dV of ``step``, which has tasks."""
        ring, (lap, turn) = self.ring, self.ring.plan.lap(step.index)
        if step.index == 0:
            return self.own.rows
        if lap and turn == 0:
            return self._carry(step).rows
        slot = self.exchange.grad_slot(step.index)
        assert slot is not None, "a step with tasks has a contribution"
        where = ring.records(step, returned=True)
        return ring.contribution.view(ring.geometry, where, slot, "backward")

    def _carry(self, step: Step) -> Sums:
        """What this rank adds up of the records carried from ``step`` on; undefined at first."""
        ring = self.ring
        lap, _ = ring.plan.lap(step.index)
        # In a domain of one it gets this step's part only, and is a contribution like others.
        wire = ring.sums if ring.plan.order.size > 1 else ring.contribution
        self.carried[lap] = Sums(ring, step, wire, self.own.buffer.device)
        return self.carried[lap]

    def after(self, step: Step) -> None:
        """``step`` is computed: hand over, and take what came in the one before."""
        t = step.index
        lap, turn = self.ring.plan.lap(t)
        if t == 0 and not step.tasks:
            self.own.buffer.zero_()
        if lap and turn == 0 and step.held and not step.tasks:
            self._carry(step).buffer.zero_()
        if t == 0:
            return
        if turn == 0:
            self._send_sum(t)
        else:
            with self.observer.span("grads", t):
                self.exchange.send_grads(t)
        self._take(t - 1)

    def end(self) -> None:
        """After the last step."""
        last = len(self.ring.schedule("backward").steps) - 1
        if last == self.ring.plan.world:
            self._send_sum(last)
        self._take(last)

    def _send_sum(self, t: int) -> None:
        """The sum of the lap that ended before step ``t``, complete."""
        self._take(t - 1)
        with self.observer.span("grads", t):
            sums = self.carried.pop(self.ring.plan.lap(t)[0] - 1, None)
            slot = self.exchange.grad_slot(t)
            assert (slot is None) == (sums is None), "a lap with records has a sum"
            if slot is not None and sums is not None:
                slot.copy_(sums.buffer)
            self.exchange.send_grads(t)

    def _take(self, t: int) -> None:
        """Add what peers handed over in step ``t``; what they did before is added already."""
        plan = self.ring.plan
        if t <= self.taken:
            return
        self.taken = t
        lap, turn = plan.lap(t)
        sums = self.carried.get(lap) if lap and turn else self.own
        with self.observer.span("reduce", t):
            for given in self.exchange.contributions(t):
                assert sums is not None, "what came was due"
                dtype, spans = self.ring.given(t)
                sums.add(spans, given.view.view(dtype))
                given.release()


class Sums:
    """dK/dV of the records that ``step`` has, in the dtype of ``wire``, added in plan order;
    ``buffer``, read as ``rows``, is undefined at first.
    """

    def __init__(self, ring: Ring, step: Step, wire: PlainWire, device: torch.device) -> None:
        self.ring, where = ring, ring.records(step)
        size = where.records * wire.record_bytes(ring.geometry, "backward")
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.rows = wire.view(ring.geometry, where, self.buffer, "backward")

    def add(self, spans: Sequence[tuple[int, int]], given: Tensor) -> None:
        """Add ``given`` (in any dtype, flat) to the elements of ``spans``, rows of padding and all:
        those are undefined here, too, and nobody reads them.
        """
        sums, at = self.buffer.view(self.rows.geometry.dtype), 0
        for offset, count in spans:
            # As rows of one width, whatever the geometry: the fused kernel is compiled for each.
            into = sums[offset : offset + count].view(1, -1, 1, RECORD)
            add_into(into, given[at : at + count].view_as(into))
            at += count

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk (b, sk, heads_kv, dk) and dv (b, sk, heads_kv, dv), contiguous, in ``dtype``."""
        g, shard = self.rows.geometry, self.rows.map.shard
        dk, dv = (
            torch.empty(g.batch, len(shard), g.heads_kv, d, dtype=dtype, device=self.buffer.device)
            for d in (g.dk, g.dv)
        )
        for first, row, count, _ in shard.runs:
            local = slice(first, first + count)
            keys, values = self.rows.packed_rows(row, count)
            assign(dk[:, local], self.ring.precondition.key_gradient(keys))
            assign(dv[:, local], values)
        return dk, dv
