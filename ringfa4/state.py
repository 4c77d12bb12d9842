"""Partials are an algebra.

The running state of a query row is (acc, max, sum): numerator, running maximum, denominator.

    merge      m = max(m1, m2),  acc = acc1 e^(m1-m) + acc2 e^(m2-m),  sum likewise
    finalise   out = acc / sum,  lse = m + log(sum)
    enter      (out, lse) is (acc=out, max=lse, sum=1);  identity: max = -inf, acc = sum = 0

fp32, finalised once, after the last partial: over 72 partials its error is a third of that of a
running (out, lse). Both sides -inf stays the identity, never NaN; a payload under max = -inf is
ignored, whatever it holds. A learnable sink is one more partial: out = 0, lse = sink.

Nothing is initialised up front: a row is assigned by the first partial that reaches it and merged
into after that. Which rows were reached is known on the host (:class:`Written`), because partials
come in whole ranges of rows; the same holds for gradients (:class:`Grads`).

With the fused kernels (ringfa4.fused) partials wait until there are four and are merged in one pass
over the state, which moves 4 bytes of memory an element and partial in place of 10 (bf16). What
waits is at most three outputs, 1.5 times the memory of acc; :meth:`State.settle` merges it. The
last pass finalises too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ringfa4.fused import fused
from ringfa4.wire import PLAIN, PlainShard

# MKL chooses a function's kernel in its first call; when threads make that call at once, one of
# them may compute its part at low precision and nobody is told (pytorch issue 188792, oneMKL
# 2024.2). So exp and log of the state are called once, on one element, before any thread can.
for _dtype in (torch.float32, torch.float64):
    torch.log(torch.exp(torch.ones(1, dtype=_dtype)))
del _dtype


class Written:
    """Which rows of each batch row have been assigned: sorted, disjoint, half-open intervals."""

    def __init__(self, batch: int) -> None:
        self._rows: list[list[tuple[int, int]]] = [[] for _ in range(batch)]

    def claim(self, batch: int, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """Mark [start, stop); its pieces in order, as (start, stop, whether written before)."""
        pieces: list[tuple[int, int, bool]] = []
        if start >= stop:
            return pieces
        rows = self._rows[batch]
        first = bisect_left(rows, start, key=lambda span: span[1])
        last = bisect_right(rows, stop, key=lambda span: span[0])
        at, low, high = start, start, stop
        for a, b in rows[first:last]:
            low, high = min(low, a), max(high, b)  # they overlap or touch: one interval now
            a, b = max(a, start), min(b, stop)
            if at < a:
                pieces.append((at, a, False))
            if a < b:
                pieces.append((a, b, True))
            at = b
        if at < stop:
            pieces.append((at, stop, False))
        rows[first:last] = [(low, high)]
        return pieces

    def spans(self, batch: int) -> Sequence[tuple[int, int]]:
        """What was written, in order."""
        return self._rows[batch]

    def gaps(self, batch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) was never written."""
        gaps, at = [], start
        for a, b in self._rows[batch]:
            if at < min(a, stop):
                gaps.append((at, min(a, stop)))
            at = max(at, b)
        if at < stop:
            gaps.append((at, stop))
        return gaps


def _claims(
    written: Written, batch: int | None, size: int, start: int, stop: int
) -> Iterator[tuple[slice, slice, int, int, bool]]:
    """Pieces of [start, stop) for one batch row or, joined where they agree, for all ``size`` rows.

    Yields (batch rows of the state, batch rows of the partial, start, stop, written before).
    """
    if batch is not None:
        for a, b, seen in written.claim(batch, start, stop):
            yield slice(batch, batch + 1), slice(0, 1), a, b, seen
        return
    claims = [written.claim(i, start, stop) for i in range(size)]
    if all(claim == claims[0] for claim in claims):
        for a, b, seen in claims[0]:
            yield slice(0, size), slice(0, size), a, b, seen
        return
    for i, claim in enumerate(claims):
        for a, b, seen in claim:
            yield slice(i, i + 1), slice(i, i + 1), a, b, seen


def merge_weights(max1: Tensor, max2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(max, e^(max1 - max), e^(max2 - max)); both -inf gives (-inf, 0, 0)."""
    top = torch.maximum(max1, max2)
    finite = top.masked_fill(top == -torch.inf, 0)
    return top, torch.exp(max1 - finite), torch.exp(max2 - finite)


def _per_row(x: Tensor) -> Tensor:
    """(b, h, s) -> (b, s, h, 1), to scale rows of (b, s, h, d)."""
    return x.transpose(1, 2).unsqueeze(-1)


@dataclass(frozen=True)
class _Waiting:
    """A partial that is not merged yet: out (b', n, heads, dv), lse (b', heads, n) of ``rows``."""

    batch: int | None
    rows: slice
    out: Tensor
    lse: Tensor

    def goes_with(self, other: _Waiting) -> bool:
        """Whether one pass of the fused kernel can merge both."""
        return self.batch == other.batch and self.out.dtype == other.out.dtype

    def of(self, part: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """out and lse of the batch rows ``part`` and of local rows inside ``rows``."""
        here = slice(start - self.rows.start, stop - self.rows.start)
        return self.out[part, here], self.lse[part, :, here]


class State:
    """acc (b, s, heads, dv), max and sum (b, heads, s) of the local queries.

    fp32, or fp64 for fp64 inputs. They hold every partial merged so far only after :meth:`settle`.
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        heads: int,
        dv: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.acc = torch.empty(batch, seq, heads, dv, device=device, dtype=dtype)
        self.max = torch.empty(batch, heads, seq, device=device, dtype=dtype)
        self.sum = torch.empty(batch, heads, seq, device=device, dtype=dtype)
        self.written = Written(batch)
        self._waiting: list[_Waiting] = []

    def merge(self, batch: int | None, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the partial (out, lse) of the local rows ``rows``, in any float dtype.

        out (b', n, heads, dv), lse (b', heads, n); b' is 1 for a given ``batch`` and the whole
        batch for None. Rows whose lse is -inf contribute nothing, whatever out holds there.

        On GPUs that have it, a fused kernel passes over the state once for several partials;
        elsewhere the operators of :meth:`merge_state` pass over it twice for each. Both keep the
        algebra above. ``out`` and ``lse`` must stay as they are until :meth:`settle`.
        """
        kernels = fused(self.acc.device)
        if kernels is None or not kernels.merges(self.acc, out, lse):
            self.merge_state(batch, rows, out, lse, torch.ones_like(lse))
            return
        new = _Waiting(batch, rows, out, lse)
        if self._waiting and not new.goes_with(self._waiting[0]):
            self.settle()
        self._waiting.append(new)
        if len(self._waiting) == kernels.PARTIALS:
            self.settle()

    def settle(self) -> None:
        """Merge what waits: one pass over each range of rows that has the same partials."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        kernels = fused(self.acc.device)
        assert kernels is not None, "partials wait for a fused kernel only"
        first, last = min(p.rows.start for p in waiting), max(p.rows.stop for p in waiting)
        for start, stop, here in _ranges(waiting, first, last):
            if not here:
                continue
            for into, part, a, b, seen in _claims(
                self.written, here[0].batch, self.acc.shape[0], start, stop
            ):
                kernels.merge(
                    self.acc[into, a:b],
                    self.max[into, :, a:b],
                    self.sum[into, :, a:b],
                    [p.of(part, a, b) for p in here],
                    first=not seen,
                )

    def merge_state(
        self, batch: int | None, rows: slice, acc: Tensor, max: Tensor, sum: Tensor
    ) -> None:
        """As :meth:`merge` for a partial that is itself a state."""
        self.settle()
        dead = max == -torch.inf
        acc, sum = acc.masked_fill(_per_row(dead), 0), sum.masked_fill(dead, 0)
        for into, part, a, b, seen in _claims(
            self.written, batch, self.acc.shape[0], rows.start, rows.stop
        ):
            new = slice(a - rows.start, b - rows.start)
            new_acc, new_max, new_sum = acc[part, new], max[part, :, new], sum[part, :, new]
            to_acc, to_max, to_sum = (
                self.acc[into, a:b],
                self.max[into, :, a:b],
                self.sum[into, :, a:b],
            )
            if not seen:
                to_acc.copy_(new_acc)
                to_max.copy_(new_max)
                to_sum.copy_(new_sum)
                continue
            top, w_old, w_new = merge_weights(to_max, new_max.to(to_max.dtype))
            to_acc.mul_(_per_row(w_old)).addcmul_(new_acc.to(to_acc.dtype), _per_row(w_new))
            to_sum.mul_(w_old).addcmul_(new_sum.to(to_sum.dtype), w_new)
            to_max.copy_(top)

    def finalise(
        self, dtype: torch.dtype, sink: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """out (b, s, heads, dv) in ``dtype`` and lse (b, heads, s) in the state's dtype.

        ``sink`` (heads,): the logit of one more key, whose value is 0; added once, here. Rows that
        no key reached give (0, -inf), or (0, sink). ``shift`` (b, heads, s): what every logit of a
        row lacks (keys whose mean was taken off); it comes before the sink. The last call on a
        state.
        """
        if sink is None and shift is None and self._finalises_at_once(dtype):
            return self._finalise_at_once(dtype)
        self.settle()
        batch, seq = self.acc.shape[:2]
        for i in range(batch):
            for a, b in self.written.gaps(i, 0, seq):
                self.acc[i, a:b] = 0
                self.max[i, :, a:b] = -torch.inf
                self.sum[i, :, a:b] = 0
        top, total, acc = self.max, self.sum, self.acc
        if shift is not None:
            top = top + shift.to(top.dtype)
        if sink is not None:
            logit = sink.to(top.dtype).view(1, -1, 1).expand_as(top)
            top, weight, extra = merge_weights(top, logit)
            total = total * weight + extra
            acc = acc * _per_row(weight)
        lse = top + torch.log(total)  # -inf where nothing was reached: total is 0 there
        out = acc / _per_row(total.masked_fill(total == 0, 1))
        return out.to(dtype), lse

    def _finalises_at_once(self, dtype: torch.dtype) -> bool:
        """Whether the fused kernel can merge what waits and finalise."""
        kernels = fused(self.acc.device)
        fits = all(p.batch is None and p.out.dtype == dtype for p in self._waiting)
        return fits and kernels is not None and kernels.finalises(self.acc, dtype)

    def _finalise_at_once(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As :meth:`finalise`; the state does not get what waited."""
        kernels = fused(self.acc.device)
        assert kernels is not None
        out, lse = torch.empty_like(self.acc, dtype=dtype), torch.empty_like(self.max)
        batch, seq = self.acc.shape[:2]
        for start, stop, here in _ranges(self._waiting, 0, seq):
            for into, part, a, b, seen in _claims(self.written, None, batch, start, stop):
                if not here and not seen:  # no key reached these rows
                    out[into, a:b] = 0
                    lse[into, :, a:b] = -torch.inf
                    continue
                kernels.merge(
                    self.acc[into, a:b],
                    self.max[into, :, a:b],
                    self.sum[into, :, a:b],
                    [p.of(part, a, b) for p in here],
                    first=not seen,
                    final=(out[into, a:b], lse[into, :, a:b]),
                )
        return out, lse


def _ranges(
    waiting: Sequence[_Waiting], start: int, stop: int
) -> Iterator[tuple[int, int, list[_Waiting]]]:
    """[start, stop) in ranges (a, b) of rows with the same partials, which come with each."""
    inside = {edge for p in waiting for edge in (p.rows.start, p.rows.stop) if start < edge < stop}
    for a, b in pairwise(sorted({start, stop, *inside})):
        yield a, b, [p for p in waiting if p.rows.start <= a and b <= p.rows.stop]


class Grads:
    """Gradient sums: dQ of the local queries for a call, dK/dV of an owner's records for a step.

    dq (b, s, heads_q, dk) in fp32, or fp64 for fp64 inputs. dK/dV in the layout of plain wires
    (:mod:`ringfa4.wire`) over the step's record map, as sums or, to travel, in a narrower dtype:

        rows that get one part, in that dtype    are that part, to the bit
        rows that get more, or a wider one       are summed like dq, and rounded when the step ends
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        heads: int,
        dk: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dq = torch.empty(batch, seq, heads, dk, device=device, dtype=dtype)
        self._dq_written = Written(batch)
        self._kv: PlainShard | None = None
        self._kv_written = Written(batch)
        """Packed rows of the step's records."""
        self._wide: PlainShard | None = None
        self._wide_written = Written(batch)
        """Those of them whose sum is in ``_wide`` and not, or not yet, in ``_kv``."""
        self._spare = torch.empty(0, dtype=torch.uint8, device=device)
        """Memory of ``_wide``, kept from step to step."""

    def begin(self, kv: PlainShard) -> None:
        """dK/dV of the coming tasks go to ``kv``, whose contents are undefined."""
        self._kv, self._wide = kv, None
        self._kv_written, self._wide_written = (Written(kv.geometry.batch) for _ in range(2))

    def add_dq(self, batch: int | None, rows: slice, dq: Tensor) -> None:
        """Add dq (b', n, heads_q, dk) into the local rows ``rows``."""
        for into, part, a, b, seen in _claims(
            self._dq_written, batch, self.dq.shape[0], rows.start, rows.stop
        ):
            new = _part(dq, part, a - rows.start, b - rows.start)
            add_into(_part(self.dq, into, a, b), new, seen)

    def add_dkv(
        self, batch: int | None, chunk: int, k0: int, k1: int, dk: Tensor, dv: Tensor
    ) -> None:
        """Add dk, dv (b', n, heads_kv, dk or dv) into tokens [k0, k1) of ``chunk``."""
        self.add_dkv_of(batch, [(chunk, k0, k1)], dk, dv)

    def add_dkv_of(
        self, batch: int | None, keys: Sequence[tuple[int, int, int]], dk: Tensor, dv: Tensor
    ) -> None:
        """As :meth:`add_dkv` for several ranges (chunk, k0, k1) that follow one another in dk and
        dv. Those that do so in the records as well are added at once.
        """
        assert self._kv is not None, "begin() comes first"
        rows: list[tuple[int, int]] = []
        for chunk, k0, k1 in keys:
            row, count = self._kv.map.row(chunk, k0), k1 - k0
            if rows and sum(rows[-1]) == row:
                row, count = rows[-1][0], rows.pop()[1] + count
            rows.append((row, count))
        at, every = 0, slice(0, dk.shape[0])
        for row, count in rows:
            new = (_part(x, every, at, at + count) for x in (dk, dv))
            self._add_rows(batch, row, *new)
            at += count

    def _add_rows(self, batch: int | None, row: int, dk: Tensor, dv: Tensor) -> None:
        """Add dk, dv into packed rows from ``row`` on."""
        kv = self._kv
        assert kv is not None, "begin() comes first"
        size, own, stop = kv.geometry.batch, kv.geometry.dtype, row + dk.shape[1]
        exact = own == dk.dtype == dv.dtype
        for into, part, a, b, seen in _claims(self._kv_written, batch, size, row, stop):
            new = tuple(_part(x, part, a - row, b - row) for x in (dk, dv))
            if own != self.dq.dtype and (seen or not exact):
                self._add_wide(into, a, new, seen)
                continue
            for sums, x in zip(kv.packed_rows(a, b - a), new, strict=True):
                add_into(_part(sums, into, 0, b - a), x, seen)

    def _add_wide(self, into: slice, row: int, new: Sequence[Tensor], seen: bool) -> None:
        """Add parts to sums that the step's end rounds; ``seen``: to what these rows hold already,
        which may still be one part and exact.
        """
        kv, wide = self._kv, self._wide_shard()
        assert kv is not None
        size, stop = kv.geometry.batch, row + new[0].shape[1]
        batch = None if into == slice(0, size) else into.start
        claims = _claims(self._wide_written, batch, size, row, stop)
        for into, part, a, b, summed in claims:
            rows = (shard.packed_rows(a, b - a) for shard in (wide, kv))
            for sums, one, more in zip(*rows, new, strict=True):
                to = _part(sums, into, 0, b - a)
                if seen and not summed:
                    add_into(to, _part(one, into, 0, b - a), seen=False)
                add_into(to, _part(more, part, a - row, b - row), seen)

    def _wide_shard(self) -> PlainShard:
        """The step's records in the dtype of sums; undefined at first."""
        if self._wide is None:
            assert self._kv is not None, "begin() comes first"
            geometry, map, wire = self._kv.geometry, self._kv.map, PLAIN[self.dq.dtype]
            size = map.records * wire.record_bytes(geometry, "backward")
            if self._spare.numel() < size:
                self._spare = torch.empty(size, dtype=torch.uint8, device=self.dq.device)
            self._wide = wire.view(geometry, map, self._spare, "backward")
        return self._wide

    def end(self) -> None:
        """Round what was summed beside; zero the tokens that no task of this step reached. Padding
        rows stay undefined.
        """
        assert self._kv is not None, "begin() comes first"
        for i in range(self._kv.geometry.batch):
            for a, b in self._wide_written.spans(i):
                rows = (shard.packed_rows(a, b - a) for shard in (self._kv, self._wide_shard()))
                for one, sums in zip(*rows, strict=True):
                    one[i].copy_(sums[i])
        for chunk, start, stop in self._kv.map.tokens():
            row = self._kv.map.row(chunk, start)
            for i in range(self._kv.geometry.batch):
                for a, b in self._kv_written.gaps(i, row, row + stop - start):
                    for sums in self._kv.packed_rows(a, b - a):
                        sums[i].zero_()
        self._kv = None

    def finish(self) -> Tensor:
        """dq, zero where no key reached the row."""
        for i in range(self.dq.shape[0]):
            for a, b in self._dq_written.gaps(i, 0, self.dq.shape[1]):
                self.dq[i, a:b] = 0
        return self.dq


def _part(x: Tensor, batch: slice, start: int, stop: int) -> Tensor:
    """Some rows of x (b, n, h, d). All of them are x itself: a slice costs the host 2 us."""
    whole = (batch.start, batch.stop, start, stop) == (0, x.shape[0], 0, x.shape[1])
    return x if whole else x[batch, start:stop]


def add_into(into: Tensor, value: Tensor, seen: bool = True) -> None:
    """Add ``value`` (b, n, h, d) into a sum, or assign it where nothing was written yet."""
    kernels = fused(into.device)
    if kernels is not None and kernels.accumulates(into, value, first=not seen):
        kernels.accumulate(into, value, first=not seen)
    elif seen:
        into.add_(value)
    else:
        into.copy_(value)
