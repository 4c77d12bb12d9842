"""Partials are an algebra.

The running state of a query row is (acc, max, sum), fp32: softmax numerator, running maximum and denominator,

    merge:     m = max(m1, m2),  acc = acc1 e^(m1-m) + acc2 e^(m2-m),  sum likewise
    finalise:  out = acc / sum,  lse = m + log(sum)
    enter:     (out, lse) is (acc=out, max=lse, sum=1);   identity: max = -inf, sum = 0

finalised once, after the last partial. Over 72 partials its error is a third of that of a running (out, lse). Both sides -inf stays the
identity, never NaN; a payload under max = -inf is ignored, whatever it holds. A learnable sink is one more partial with out = 0 and lse = sink.

Nothing is initialised up front: a row is assigned by the first partial that reaches it, and merged after that. Which rows were reached is known
on the host (:class:`Written`), because partials come in whole row ranges.
"""

from __future__ import annotations
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ringfa4.wire import Geometry, PlainShard, RecordMap, gradient_wire


class Written:
    """Which rows of each batch row have been assigned: sorted disjoint half-open intervals."""

    def __init__(self, batch: int) -> None:
        self._rows: list[list[tuple[int, int]]] = [[] for _ in range(batch)]

    def claim(self, batch: int, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """Mark [start, stop); returns its pieces in order as (start, stop, was written before)."""
        pieces, at, lo, hi = [], start, start, stop
        rest = []
        for a, b in self._rows[batch]:
            if b < start or a > stop:
                rest.append((a, b))
                continue
            lo, hi = min(lo, a), max(hi, b)
            a, b = max(a, start), min(b, stop)
            if at < a:
                pieces.append((at, a, False))
            if a < b:
                pieces.append((a, b, True))
                at = b
        if at < stop:
            pieces.append((at, stop, False))
        self._rows[batch] = sorted([*rest, (lo, hi)])
        return pieces

    def gaps(self, batch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) was never written."""
        gaps, at = [], start
        for a, b in self._rows[batch]:
            if a >= stop:
                break
            if at < min(a, stop):
                gaps.append((at, min(a, stop)))
            at = max(at, b)
        if at < stop:
            gaps.append((at, stop))
        return gaps


def _groups(written: Written, batch: int | None, size: int, start: int, stop: int) -> Iterator[tuple[slice, int, int, bool]]:
    """(batch slice, start, stop, was written) over one batch row or all of them, joined where rows agree."""
    if batch is not None:
        for a, b, seen in written.claim(batch, start, stop):
            yield slice(batch, batch + 1), a, b, seen
        return
    claims = [written.claim(i, start, stop) for i in range(size)]
    if all(c == claims[0] for c in claims):
        for a, b, seen in claims[0]:
            yield slice(0, size), a, b, seen
        return
    for i, pieces in enumerate(claims):
        for a, b, seen in pieces:
            yield slice(i, i + 1), a, b, seen


def merge_weights(m1: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(max, e^(m1 - max), e^(m2 - max)); both -inf gives (-inf, 0, 0)."""
    m = torch.maximum(m1, m2)
    safe = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    return m, torch.exp(m1 - safe), torch.exp(m2 - safe)


class State:
    """Running state of the local queries: acc (b, s, heads_q, dv), max and sum (b, heads_q, s); fp32 (fp64 for the oracle kernel)."""

    def __init__(self, batch: int, seq: int, heads: int, dv: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.acc = torch.empty(batch, seq, heads, dv, device=device, dtype=dtype)
        self.max = torch.empty(batch, heads, seq, device=device, dtype=dtype)
        self.sum = torch.empty(batch, heads, seq, device=device, dtype=dtype)
        self.written = Written(batch)

    def merge(self, batch: int | None, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the partial (out, lse) of local rows ``rows``: out (b', n, heads, dv), lse (b', heads, n).

        b' is 1 for a given ``batch`` and the whole batch for None. Rows whose lse is -inf contribute nothing, whatever out holds there.
        """
        self.merge_state(batch, rows, out, lse, None)

    def merge_state(self, batch: int | None, rows: slice, acc: Tensor, max: Tensor, sum: Tensor | None) -> None:
        """As :meth:`merge` for a partial that is itself a state; sum None means 1 (and 0 under -inf)."""
        for where, a, b, seen in _groups(self.written, batch, self.acc.shape[0], rows.start, rows.stop):
            part = slice(where.start, where.stop) if batch is None else slice(None)
            local = slice(a - rows.start, b - rows.start)
            new_acc, new_max = acc[part, local], max[part, :, local].to(self.max.dtype)
            dead = new_max == -torch.inf
            new_sum = torch.ones_like(new_max) if sum is None else sum[part, :, local].to(self.sum.dtype)
            new_sum = new_sum.masked_fill(dead, 0)
            to_acc, to_max, to_sum = self.acc[where, a:b], self.max[where, :, a:b], self.sum[where, :, a:b]
            if dead.device.type != "cpu" or bool(dead.any()):
                new_acc = new_acc.masked_fill(dead.transpose(1, 2).unsqueeze(-1), 0)
            if not seen:
                to_acc.copy_(new_acc)
                to_max.copy_(new_max)
                to_sum.copy_(new_sum)
                continue
            m, w1, w2 = merge_weights(to_max, new_max)
            to_acc.mul_(w1.transpose(1, 2).unsqueeze(-1)).addcmul_(new_acc.to(to_acc.dtype), w2.transpose(1, 2).unsqueeze(-1))
            to_sum.mul_(w1).addcmul_(new_sum, w2)
            to_max.copy_(m)

    def finalise(self, dtype: torch.dtype, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out (b, s, heads, dv) in ``dtype`` and lse (b, heads, s) in the state's dtype, natural log.

        ``sink`` (heads,): the logit of a key whose value is 0, added once, here. Rows that no key reached give (0, -inf), or (0, sink).
        """
        batch, seq = self.acc.shape[:2]
        for i in range(batch):
            for a, b in self.written.gaps(i, 0, seq):
                self.acc[i, a:b] = 0
                self.max[i, :, a:b] = -torch.inf
                self.sum[i, :, a:b] = 0
        m, total, scale = self.max, self.sum, None
        if sink is not None:
            logit = sink.to(m.dtype).view(1, -1, 1).expand_as(m)
            m, scale, extra = merge_weights(self.max, logit)
            total = self.sum * scale + extra
        empty = total == 0
        inverse = torch.where(empty, torch.zeros_like(total), (1.0 if scale is None else scale) / torch.where(empty, torch.ones_like(total), total))
        out = (self.acc * inverse.transpose(1, 2).unsqueeze(-1)).to(dtype)
        return out, torch.where(empty, torch.full_like(m, -torch.inf), m + torch.log(torch.where(empty, torch.ones_like(total), total)))


class Grads:
    """Gradient sums: dQ of the local queries for the whole call, dK/dV of one owner's records for the current step.

    dq (b, s, heads_q, dk); dK/dV in the layout of :func:`ringfa4.wire.gradient_wire` over the step's record map. fp32, or fp64 for fp64 inputs.
    """

    def __init__(self, batch: int, seq: int, heads: int, dk: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.dq = torch.empty(batch, seq, heads, dk, device=device, dtype=dtype)
        self._dq_written = Written(batch)
        self._kv: PlainShard | None = None
        self._kv_written: dict[int, Written] = {}

    def begin(self, geometry: Geometry, map: RecordMap, buffer: Tensor) -> None:
        """dK/dV of the coming tasks go to ``buffer`` (uint8, packed as ``map`` says, contents undefined)."""
        wire = gradient_wire(self.dq.dtype)
        self._kv = wire.view(replace(geometry, dtype=wire.dtype), map, buffer, "backward")
        self._kv_written = {r.chunk: Written(geometry.batch) for r in map.ranges}

    def add_dq(self, batch: int | None, rows: slice, dq: Tensor) -> None:
        """dq (b', n, heads_q, dk) into the local rows ``rows``."""
        for where, a, b, seen in _groups(self._dq_written, batch, self.dq.shape[0], rows.start, rows.stop):
            part = slice(where.start, where.stop) if batch is None else slice(None)
            value, into = dq[part, a - rows.start : b - rows.start], self.dq[where, a:b]
            into.add_(value) if seen else into.copy_(value)

    def add_dkv(self, batch: int | None, chunk: int, k0: int, k1: int, dk: Tensor, dv: Tensor) -> None:
        """dk (b', n, heads_kv, dk), dv (b', n, heads_kv, dv) into tokens [k0, k1) of ``chunk``."""
        assert self._kv is not None, "begin() comes first"
        for where, a, b, seen in _groups(self._kv_written[chunk], batch, self._kv.geometry.batch, k0, k1):
            part = slice(where.start, where.stop) if batch is None else slice(None)
            for into, value in zip(self._kv.keys_values(chunk, a, b), (dk, dv), strict=True):
                piece = value[part, a - k0 : b - k0]
                into[where].add_(piece) if seen else into[where].copy_(piece)

    def end(self) -> None:
        """Zero what no task of this step reached; the buffer is complete after this (padding rows stay undefined)."""
        assert self._kv is not None, "begin() comes first"
        for chunk, start, stop in self._kv.map.tokens():
            for i in range(self._kv.geometry.batch):
                for a, b in self._kv_written[chunk].gaps(i, start, stop):
                    for into in self._kv.keys_values(chunk, a, b):
                        into[i].zero_()
        self._kv = None

    def finish(self) -> Tensor:
        """dq, zero where no key reached the row."""
        for i in range(self.dq.shape[0]):
            for a, b in self._dq_written.gaps(i, 0, self.dq.shape[1]):
                self.dq[i, a:b] = 0
        return self.dq
