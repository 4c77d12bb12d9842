"""How dK/dV come home in a backward pass: where each step's are put, who adds them, and when.

    step t, owner o     contribution of rank r -> o, who adds those of all ranks in plan order
    under a topology    -> who carried the records for the domain, who adds its domain's, and hands
                        the sum to o

What is sent in step t travels while step t + 1 computes. The inbox holds two contributions, which
are added in one pass (:mod:`ringfa4.sums`): those of steps t - 2 and t - 1 when step t is computed,
before its own is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringfa4.comm.interface import Contribution, Exchange
from ringfa4.plan import Step
from ringfa4.shard import RECORD
from ringfa4.sums import RowSum, put
from ringfa4.trace import Observer
from ringfa4.wire import PlainShard, rows_in

if TYPE_CHECKING:
    from ringfa4.ring import Ring

AT_ONCE = 2
"""Steps whose contributions are added in one pass: as many as the inbox holds."""


class Homecoming:
    """dK/dV on their way: each step's to their owner or to who carried, sums to their owners.

    A carried shard's sum begins with this rank's own part, in turn 0, and takes those of the turns
    in order; it leaves in turn 0 of the next lap (:mod:`ringfa4.plan`). Every other contribution is
    taken one or two steps behind, so that it travels while the next step computes.

    Sums are in fp32 (fp64 for fp64), also on their way; parts, the own one too, are in the kernel's
    dtype.
    """

    def __init__(
        self, ring: Ring, exchange: Exchange, device: torch.device, observer: Observer
    ) -> None:
        self.ring, self.exchange, self.observer = ring, exchange, observer
        self.device = device
        self.own = Sums(ring, ring.plan.step(ring.rank, 0), device)
        self.carried: dict[int, Sums] = {}
        """lap -> sum; two at most."""
        self.taken = 0
        """The last step whose contributions were taken."""
        self._held: list[tuple[Sums, Contribution]] = []
        """Taken, and perhaps not added yet: to what, and which."""

    def place(self, step: Step) -> PlainShard:
        """Where the kernel puts dK/dV of ``step``, which has tasks."""
        ring, (lap, turn) = self.ring, self.ring.plan.lap(step.index)
        if step.index == 0:
            return self.own.place()
        if lap and turn == 0:
            self.carried[lap] = Sums(ring, step, self.device)
            return self.carried[lap].place()
        slot = self.exchange.grad_slot(step.index)
        assert slot is not None, "a step with tasks has a contribution"
        where = ring.records(step, returned=True)
        return ring.contribution.view(ring.geometry, where, slot, "backward")

    def after(self, step: Step) -> None:
        """``step`` is computed: take what came before, when that is due, and hand over."""
        t = step.index
        lap, turn = self.ring.plan.lap(t)
        if lap and turn == 0 and step.held and not step.tasks:
            self.carried[lap] = Sums(self.ring, step, self.device)
        if turn == 0 and step.tasks:
            (self.carried[lap] if lap else self.own).begin()
        if t == 0:
            return
        if turn == 0:
            self._send_sum(t)
            return
        if t - 1 - self.taken >= AT_ONCE:
            self._take(t - 1)
            self._settle(t - 1)
        with self.observer.span("grads", t):
            self.exchange.send_grads(t)

    def end(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """After the last step: dk (b, sk, heads_kv, dk) and dv (b, sk, heads_kv, dv) of the own
        tokens, contiguous, in ``dtype``.
        """
        last = len(self.ring.schedule("backward").steps) - 1
        if last == self.ring.plan.world:
            self._send_sum(last)
        self._take(last)
        with self.observer.span("finish", 0):
            result = self.own.tensors(dtype)
        self._release()
        return result

    def _send_sum(self, t: int) -> None:
        """The sum of the lap that ended before step ``t``, complete."""
        self._take(t - 1)
        with self.observer.span("grads", t):
            sums = self.carried.pop(self.ring.plan.lap(t)[0] - 1, None)
            slot = self.exchange.grad_slot(t)
            assert (slot is None) == (sums is None), "a lap with records has a sum"
            if slot is not None and sums is not None:
                sums.write(slot.view(self._lap_dtype()))
        self._settle(t - 1)
        with self.observer.span("grads", t):
            self.exchange.send_grads(t)

    def _lap_dtype(self) -> torch.dtype:
        """What a lap's sum travels in. In a domain of one it is one step's part, a contribution
        like others.
        """
        ring = self.ring
        wire = ring.sums if ring.plan.order.size > 1 else ring.contribution
        return wire.dtype

    def _take(self, last: int) -> None:
        """What peers handed over up to step ``last``; what they did before is taken already."""
        plan = self.ring.plan
        for t in range(self.taken + 1, last + 1):
            self.taken = t
            lap, turn = plan.lap(t)
            sums = self.carried.get(lap) if lap and turn else self.own
            with self.observer.span("reduce", t):
                for given in self.exchange.contributions(t):
                    assert sums is not None, "what came was due"
                    dtype, spans = self.ring.given(t)
                    sums.add(spans, given.view.view(dtype))
                    self._held.append((sums, given))

    def _settle(self, t: int) -> None:
        """Add what was taken, and let go of it."""
        if self._held:
            with self.observer.span("reduce", t):
                for sums, _ in self._held:
                    sums.lines.settle()
        self._release()

    def _release(self) -> None:
        for _, given in self._held:
            given.release()
        self._held = []


class Sums:
    """dK/dV of the records that ``step`` has: a part of this rank's own, if there is one, then
    those of others, in plan order. In fp32 (fp64 for fp64).

    ``lines`` has the elements of all records, flat, as rows of one width whatever the geometry (the
    fused kernel is compiled for each). Those of padding are undefined, and nobody reads them.
    """

    def __init__(self, ring: Ring, step: Step, device: torch.device) -> None:
        self.ring, self.where, self.device = ring, ring.records(step), device
        self.dtype = ring.sums.dtype
        record = ring.sums.record_bytes(ring.geometry, "backward") // self.dtype.itemsize
        self._lines_a_record = record // RECORD
        count = self.where.records * self._lines_a_record
        self.lines = RowSum(1, count, 1, RECORD, device=device, dtype=self.dtype)
        self._part: PlainShard | None = None

    def place(self) -> PlainShard:
        """Where the kernel puts this rank's own part, all of it; :meth:`begin` is next."""
        wire, geometry = self.ring.contribution, self.ring.geometry
        size = self.where.records * wire.record_bytes(geometry, "backward")
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._part = wire.view(geometry, self.where, buffer, "backward")
        return self._part

    def begin(self) -> None:
        """The own part is complete."""
        assert self._part is not None, "place() comes first"
        own = self._part.buffer.view(self._part.geometry.dtype).view(1, -1, 1, RECORD)
        if own.dtype == self.dtype:
            self.lines.adopt(own)
        else:
            self.lines.add(None, slice(0, own.shape[1]), own)
        self._part = None

    def add(self, spans: Sequence[tuple[int, int]], given: Tensor) -> None:
        """Add ``given`` (in any dtype, flat) to the elements of ``spans``, rows of padding and
        all.
        """
        at = 0
        for offset, count in spans:
            rows = slice(offset // RECORD, (offset + count) // RECORD)
            self.lines.add(None, rows, given[at : at + count].view(1, -1, 1, RECORD))
            at += count

    def write(self, into: Tensor) -> None:
        """The sum of all records into ``into`` (flat), rounded to its dtype; nothing is added after
        that.
        """
        lines = into.view(1, -1, 1, RECORD)
        if not self.lines.rounds_at_once(into.dtype):
            self.lines.settle()
        for piece in self.lines.rest(0, lines.shape[1]):
            put(lines[:, piece.start : piece.stop], piece.base, piece.parts)
        self.lines.close()

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk (b, sk, heads_kv, dk) and dv (b, sk, heads_kv, dv), contiguous, in ``dtype``: zero
        where nothing was added. Nothing is after that.
        """
        g, shard, precondition = self.ring.geometry, self.where.shard, self.ring.precondition
        dk, dv = (
            torch.empty(g.batch, len(shard), g.heads_kv, d, dtype=dtype, device=self.device)
            for d in (g.dk, g.dv)
        )
        aligned = not (g.dk % 8 or g.dv % 8)
        if not (precondition.plain and aligned and self.lines.rounds_at_once(dtype)):
            self.lines.settle()
        each = self._lines_a_record
        for first, row, count, _ in shard.runs:
            for piece in self.lines.rest(row // RECORD * each, -(-(row + count) // RECORD) * each):
                there = piece.start // each * RECORD
                a, b = max(row, there), min(row + count, piece.stop // each * RECORD)
                keys, values = (None, None)
                if piece.base is not None:
                    keys, values = self._keys_values(piece.base, a - there, b - there)
                    keys = precondition.key_gradient(keys)
                parts = [self._keys_values(x, a - there, b - there) for x in piece.parts]
                local = slice(first + a - row, first + b - row)
                put(dk[:, local], keys, [part_keys for part_keys, _ in parts])
                put(dv[:, local], values, [part_values for _, part_values in parts])
        self.lines.close()
        return dk, dv

    def _keys_values(self, lines: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K's and V's rows [start, stop) of some records."""
        return rows_in(lines.view(-1), self.ring.geometry, start, stop - start)
