"""Tolerances, each named once and derived; nothing in the tests compares with a bare number.

The rule for kernels that compute in the dtype of their inputs: be no worse than twice a plain
attention in that dtype, materialised by ordinary tensor operations, on the same inputs

    max|x - truth|  <=  2 max|plain - truth|  +  u max|truth|,     u = half a unit in the last place

where the last term is what rounding the exact result to the dtype costs. It needs no constant that
depends on length, head size or data: the plain attention has them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringfa4.mask import Mask
from ringfa4.testing.oracles import Truth, allowed

FACTOR = 2.0
"""Allowed multiple of the plain attention's error; tilings differ in the order of their sums."""

RING_GROWTH_FP32 = 1.2
"""Error of a ring of 72 against that of one rank, fp32: the state is finalised once, so only the
rounding of 72 fp32 merges adds to it."""

LSE_LOW_PRECISION = 2.0**-12
"""Absolute error of lse with 16-bit operands. Their products are exact in fp32; what is left is the
kernel's exp, good to about 2^-16 relative in PyTorch's, with four bits to spare."""

MXFP8_SQNR_DB = 20.0
"""Least SQNR of a kernel that rounds all operands to E4M3 in blocks of 32, Gaussian data. Three
bits of significand give 31.5 dB an operand; four or five roundings in a row leave 24 to 26 dB, and
small sums scatter by a few dB more."""

MXFP8_SINK_DB = 25.0
"""Least SQNR of the output where one key with V = 0 takes most of the weight and V has mean 1."""

MXFP8_EXTERNAL_LSE_DB = 0.5
"""Most that SQNR may fall when the merged lse lies 8.3 above the local one (P scaled by 1/4000): a
block scale moves with P, and only a power of two is lost in the worst block."""


def half_ulp(dtype: torch.dtype) -> float:
    """Relative error of rounding to ``dtype``; that of fp32 at best, in which states are kept."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2


def bound(plain: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Largest error allowed anywhere in a tensor, by the rule above."""
    finite = torch.isfinite(truth)
    if not bool(finite.any()):
        return 0.0
    baseline = (plain.to(torch.float64) - truth)[finite].abs().max()
    return float(FACTOR * baseline + half_ulp(dtype) * truth[finite].abs().max())


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Truth:
    """Forward and backward of materialised attention, every operation in the dtype of ``q``.

    lse is what fp32 makes of the rounded logits: no baseline for lse, see LSE_LOW_PRECISION.
    """
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * (q @ k.repeat_interleave(group, 1).mT)
    logits = logits.masked_fill(~allowed(mask).unsqueeze(1).to(q.device), -torch.inf)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    safe = logits.masked_fill(empty, 0)
    out = torch.softmax(safe, -1).masked_fill(empty, 0) @ v.repeat_interleave(group, 1)
    lse = torch.logsumexp(safe.to(torch.promote_types(q.dtype, torch.float32)), -1)
    loss = (out * dout.transpose(1, 2)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(empty.squeeze(-1), 0) * dlse).sum()
    dq, dk, dv = (x.transpose(1, 2) for x in torch.autograd.grad(loss, (q, k, v)))
    lse = lse.detach().masked_fill(empty.squeeze(-1), -torch.inf)
    return Truth(out.detach().transpose(1, 2), lse, dq, dk, dv, None)
