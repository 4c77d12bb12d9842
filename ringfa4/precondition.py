"""Changes of variables that make Q and K easier to quantise and leave attention as it is.

    K mean     k' = k - mu          mu (b, heads_kv, d): the mean of all ranks' keys
               q.k' = q.k - q.mu: each query's logits shift by one number, so out is the same
               and lse = lse' + scale * q.mu (before the sink); any constant mu would do
    Hadamard   q' = R q, k' = R k   R = H diag(signs) / sqrt(n), orthogonal
               logits are the same; an outlier channel is spread over n channels

Both: the mean is taken off first, then everything is rotated. Backward of the exact function, with
P and delta of the whole attention (sink included) and dS of the kernel, which works on q', k' and
lse' = lse - scale * q.mu:

    dK = R^T dK'                    nothing depends on mu, so it has no gradient
    dQ = R^T dQ' + scale * rowsum(dS) * mu
    rowsum(dS) = dlse + exp(sink - lse) * delta,    delta = rowsum(out * dout) - dlse

since the rows of P sum to 1 - exp(sink - lse); it is 0 where a row saw no key (lse = -inf).

The order of use, by the executor (q, k, lse are the callers', primes are the kernel's):

    forward    mu = mean(k, all_reduce);   k' = keys(k, mu);   q' = queries(q)
               after the last step: state.max += shift(q, mu, scale), then finalise(sink)
    backward   k', q' as before, from the saved mu;   lse' = lse - shift(q, mu, scale)
               prepare_backward(q', out, dout, lse', dlse);   dsink from lse, as ever
               dq = query_gradient(dq', mu, row_sums(delta, lse, dlse, sink), scale)
               dk = key_gradient(dk'), once, at the owner

Work is in fp32 (fp64 for fp64 inputs); q' and k' are rounded to the input dtype, 50 dB below them
for bf16. The signs come from a fixed integer hash, so every rank and version has the same. Left
out: V, whose rounding errors average out over keys, and softcap, whose logits are not
shift-invariant (:meth:`Precondition.refuses`). Nothing here communicates. Shapes: q (b, sq,
heads_q, d), k (b, sk, heads_kv, d), lse (b, heads_q, sq).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sum of a small tensor over ranks, with the same bits on every rank."""

_NAMES = {
    "none": (False, False),
    "hadamard": (True, False),
    "k-mean": (False, True),
    "both": (True, True),
}


@dataclass(frozen=True, slots=True)
class Precondition:
    """Which changes of variables: part of what ranks agree on."""

    hadamard: bool = False
    k_mean: bool = False

    @classmethod
    def parse(cls, name: str) -> Precondition:
        """From "none", "hadamard", "k-mean" or "both". ValueError for anything else."""
        if name not in _NAMES:
            raise ValueError(f"unknown precondition {name!r}; there are {list(_NAMES)}")
        hadamard, k_mean = _NAMES[name]
        return cls(hadamard, k_mean)

    @property
    def plain(self) -> bool:
        """Whether it leaves everything as it is."""
        return not (self.hadamard or self.k_mean)

    @property
    def name(self) -> str:
        return next(n for n, parts in _NAMES.items() if parts == (self.hadamard, self.k_mean))

    def refuses(self, *, softcap: float | None = None) -> str | None:
        """None, or why it would not leave attention as it is."""
        if self.k_mean and softcap is not None:
            return f"k-mean shifts logits, which {softcap=} does not forgive; use 'hadamard'"
        return None

    def mean(self, k: Tensor, all_reduce: AllReduce) -> Tensor | None:
        """mu (b, heads_kv, d) over all ranks' keys; None without K mean. Collective.

        A channel's mean that is not finite becomes 0, which is as valid: mu must not carry one
        key's NaN into all others.
        """
        if not self.k_mean:
            return None
        sums = k.sum(1, dtype=_work(k))
        count = sums.new_full((1,), k.shape[1])
        total = all_reduce(torch.cat([sums.flatten(), count]))
        mu = (total[:-1] / total[-1].clamp(min=1)).view_as(sums)
        return torch.where(torch.isfinite(mu), mu, 0)

    def keys(self, k: Tensor, mu: Tensor | None) -> Tensor:
        """k' = R (k - mu) in k's dtype."""
        if mu is not None:
            k = (k - mu.unsqueeze(1)).to(k.dtype)
        return rotate(k) if self.hadamard else k

    def queries(self, q: Tensor) -> Tensor:
        """q' = R q in q's dtype."""
        return rotate(q) if self.hadamard else q

    def query_gradient(
        self, dq: Tensor, mu: Tensor | None, row_sums: Tensor | None, scale: float
    ) -> Tensor:
        """dQ = R^T dQ' + scale * rowsum(dS) mu, for dQ' as the kernel sums it (fp32)."""
        if self.hadamard:
            dq = rotate_back(dq)
        if mu is None:
            return dq
        assert row_sums is not None, "K mean needs rowsum(dS)"
        grouped: Tensor = dq.unflatten(2, (mu.shape[1], -1))
        weights = (scale * row_sums).transpose(1, 2).unflatten(2, (mu.shape[1], -1))
        grouped = grouped + weights.unsqueeze(-1) * mu[:, None, :, None]
        return grouped.flatten(2, 3)

    def key_gradient(self, dk: Tensor) -> Tensor:
        """dK = R^T dK': once, at the owner, after all ranks' contributions are summed."""
        return rotate_back(dk) if self.hadamard else dk


NONE = Precondition()


def shift(q: Tensor, mu: Tensor, scale: float) -> Tensor:
    """scale * q.mu (b, heads_q, sq): what lse' lacks."""
    work = q.to(_work(q)).unflatten(2, (mu.shape[1], -1))
    return scale * torch.einsum("bshgd,bhd->bhgs", work, mu.to(work.dtype)).flatten(1, 2)


def row_sums(delta: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor | None) -> Tensor:
    """rowsum(dS) (b, heads_q, sq) from the callers' lse (sink included), and delta = rowsum(out *
    dout) - dlse.

    ``sink`` (heads_q,). Without sink and dlse it is 0: rows of softmax's Jacobian sum to 0.
    """
    total = torch.zeros_like(delta) if dlse is None else dlse.to(delta.dtype)
    if sink is not None:
        total = total + torch.exp(sink.to(delta.dtype).view(1, -1, 1) - lse) * delta
    return total.masked_fill(lse == -torch.inf, 0)


# ---- the rotation -------------------------------------------------------------------------------


ROWS = 1024
"""Vectors rotated at a time on a CPU, so that all passes over them stay in cache (8x faster)."""


def rotate(x: Tensor) -> Tensor:
    """R x along the last dimension, in x's dtype."""
    return _by_rows(x, lambda rows, signs: _transform(rows * signs))


def rotate_back(y: Tensor) -> Tensor:
    """R^T y along the last dimension: the inverse of :func:`rotate`."""
    return _by_rows(y, lambda rows, signs: _transform(rows) * signs)


def hadamard_block(d: int) -> int:
    """Side of the diagonal blocks: the largest power of two that divides ``d`` (96 = 3 x 32)."""
    return d & -d


def _by_rows(x: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    signs = _signs(x.shape[-1], _work(x), x.device)
    out = torch.empty_like(flat)
    step = ROWS if x.device.type == "cpu" else max(1, len(flat))
    for a in range(0, len(flat), step):
        out[a : a + step] = function(flat[a : a + step].to(signs.dtype), signs)
    return out.view(x.shape)


def _transform(x: Tensor) -> Tensor:
    """Block-diagonal H / sqrt(n) of (rows, d): butterflies over the bits of the index."""
    block = hadamard_block(x.shape[-1])
    half = 1
    while half < block:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.empty_like(x)
        plus, minus = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        torch.add(low, high, out=plus)
        torch.sub(low, high, out=minus)
        half *= 2
    return x * (1 / math.sqrt(block))


@cache
def _signs(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([sign(i) for i in range(d)], dtype=dtype, device=device)


def sign(index: int) -> int:
    """+1 or -1 by the top bit of a 32-bit finaliser (that of MurmurHash3) of ``index`` + 1.

    The +1 keeps index 0 off the finaliser's fixed point 0.
    """
    x = index + 1
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return 1 - 2 * ((x ^ x >> 16) >> 31)


def _work(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
