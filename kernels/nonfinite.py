"""What depends on values that are not finite, when masked pairs must not let them through.

A masked pair has P = 0, but 0 * NaN is NaN: a matrix product over a piece with masked pairs carries
a NaN from a key to queries that do not see it. The remedy: compute with zeros in place of such
tokens, then put NaN where it belongs. Here are the flags for that: which tokens, and who sees them.

Tensors are in the native layout (b, h, n, d), flags (b, h, n). Everything is linear in the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ringfa4.mask import Band


def all_finite(*tensors: Tensor) -> bool:
    """No NaN or inf anywhere: one pass and no temporary for each, as sums carry them."""
    return all(bool(torch.isfinite(x.sum(dtype=torch.float32))) for x in tensors)


def broken(x: Tensor) -> Tensor:
    """(b, h, n, d) -> (b, h, n): the tokens with any value that is not finite."""
    return ~torch.isfinite(x).all(-1)


def zeroed(x: Tensor, where: Tensor) -> Tensor:
    """``x`` with zeros in the flagged tokens."""
    return x.masked_fill(where.unsqueeze(-1), 0)


def spoil(x: Tensor, where: Tensor) -> Tensor:
    """``x`` with NaN in the flagged tokens."""
    return x.masked_fill(where.unsqueeze(-1), torch.nan)


def seen_by_queries(piece: Band, flags: Tensor, heads_q: int) -> Tensor:
    """Flags of the piece's keys (b, heads_kv, m) -> the queries (b, heads_q, n) that see one."""
    return _seen(piece, flags).repeat_interleave(heads_q // flags.shape[1], 1)


def seen_by_keys(piece: Band, flags: Tensor, heads_kv: int) -> Tensor:
    """Flags of the piece's queries (b, heads_q, n) -> the keys (b, heads_kv, m) that one sees."""
    lo = None if piece.hi is None else -piece.hi
    hi = None if piece.lo is None else -piece.lo
    transposed = Band(piece.k0, piece.k1, piece.q0, piece.q1, lo, hi)
    by_group = flags.reshape(flags.shape[0], heads_kv, -1, flags.shape[2]).any(2)
    return _seen(transposed, by_group)


def _seen(piece: Band, flags: Tensor) -> Tensor:
    """Row a sees the keys [a + lo, a + hi] of the box: a difference of running counts."""
    box = piece.shifted(-piece.q0, -piece.k0)
    if box.lo is None and box.hi is not None and 0 <= box.hi <= box.k1 - box.q1:
        # A diagonal that leaves the box at neither side, as causal masks have: no indices needed.
        return flags.cumsum(-1)[..., box.hi : box.hi + box.q1] > 0
    a = torch.arange(box.q1, device=flags.device)
    start = torch.zeros_like(a) if box.lo is None else (a + box.lo).clamp(0, box.k1)
    stop = torch.full_like(a, box.k1) if box.hi is None else (a + box.hi + 1).clamp(0, box.k1)
    count = functional.pad(flags.cumsum(-1), (1, 0))
    return count[..., stop] > count[..., start]
