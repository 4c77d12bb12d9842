"""How far one tensor is from another, in the terms numerics are argued in.

    SQNR = 10 log10( sum b^2 / sum (a - b)^2 )  dB,  b the truth

Attention tensors are also compared head by head: a fault in one head hides in the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """``heads``: the SQNR of each head, empty for tensors without heads.

    ``misplaced`` counts the values that are finite on one side only, or infinite with different
    signs; the other figures are over the values that are finite on both sides.
    """

    sqnr_db: float
    max_abs: float
    cosine: float
    heads: tuple[float, ...]
    misplaced: int

    @property
    def worst_head_db(self) -> float:
        return min(self.heads, default=self.sqnr_db)

    def __str__(self) -> str:
        text = f"SQNR {self.sqnr_db:.1f} dB, max error {self.max_abs:.2e}, cosine {self.cosine:.7f}"
        if len(self.heads) > 1:
            worst = self.heads.index(self.worst_head_db)
            text += f", worst head {worst} at {self.worst_head_db:.1f} dB"
        if self.misplaced:
            text += f", {self.misplaced} values not finite on one side only"
        return text


def sqnr_db(a: Tensor, b: Tensor) -> float:
    """SQNR of ``a`` against the truth ``b``; inf when they are equal."""
    signal, noise = float((b * b).sum()), float(((a - b) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def compare(a: Tensor, b: Tensor) -> Comparison:
    """``a`` against the truth ``b``: (b, s, h, d), (b, h, s), or any shape without heads."""
    if a.shape != b.shape:
        raise ValueError(f"cannot compare {tuple(a.shape)} with {tuple(b.shape)}")
    a, b = a.detach().to(torch.float64), b.detach().to(torch.float64)
    finite = torch.isfinite(a) & torch.isfinite(b)
    alike = finite | (a == b) | (torch.isnan(a) & torch.isnan(b))
    x, y = a.masked_fill(~finite, 0), b.masked_fill(~finite, 0)
    head = {4: 2, 3: 1}.get(a.dim())
    heads = () if head is None else zip(x.unbind(head), y.unbind(head), strict=True)
    norms = float(x.norm() * y.norm())
    return Comparison(
        sqnr_db=sqnr_db(x, y),
        max_abs=float((x - y).abs().max()) if x.numel() else 0.0,
        cosine=float((x * y).sum()) / norms if norms else 1.0,
        heads=tuple(sqnr_db(one, other) for one, other in heads),
        misplaced=int((~alike).sum()),
    )
