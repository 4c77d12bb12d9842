"""Partials are an algebra.

The running state of a query row is (acc, max, sum): numerator, running maximum, denominator.

    merge      m = max(m1, m2),  acc = acc1 e^(m1-m) + acc2 e^(m2-m),  sum likewise
    finalise   out = acc / sum,  lse = m + log(sum)
    enter      (out, lse) is (acc=out, max=lse, sum=1);  identity: max = -inf, acc = sum = 0

fp32, finalised once, after the last partial: over 72 partials its error is a third of that of a
running (out, lse). Both sides -inf stays the identity, never NaN; a payload under max = -inf is
ignored, whatever it holds. A learnable sink is one more partial: out = 0, lse = sink.

Nothing is initialised up front: a row is assigned by the first partial that reaches it and merged
into after that. Which rows were reached is known on the host (:mod:`ringfa4.written`), because
partials come in whole ranges of rows.

With the fused kernels (ringfa4.fused) partials wait until there are four and are merged in one pass
over the state, which moves 4 bytes of memory an element and partial in place of 10 (bf16). What
waits is at most three outputs, 1.5 times the memory of acc; :meth:`State.settle` merges it. The
last pass finalises too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.fused import fused
from ringfa4.written import Written, claims, claims_of

# MKL chooses a function's kernel in its first call; when threads make that call at once, one of
# them may compute its part at low precision and nobody is told (pytorch issue 188792, oneMKL
# 2024.2). So exp and log of the state are called once, on one element, before any thread can.
for _dtype in (torch.float32, torch.float64):
    torch.log(torch.exp(torch.ones(1, dtype=_dtype)))
del _dtype


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
        size = self.acc.shape[0]
        for into, part, a, b, seen, here in claims_of(self.written, size, waiting):
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
        for into, part, a, b, seen in claims(
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
        pieces = claims_of(self.written, batch, self._waiting, whole=(0, seq))
        for into, part, a, b, seen, here in pieces:
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
