"""Attention by its definition, in fp64: what every kernel and every ring is measured against.

    S_ij = scale * q_i . k_j   where the mask allows (i, j), else -inf
    lse_i = log( sum_j exp(S_ij) + exp(sink) ),   out_i = sum_j exp(S_ij - lse_i) v_j

One dense matrix, nothing tiled or merged, differentiable: autograd through :func:`attention` gives the true
gradients, those into lse and sink included. A row without keys gives out 0 and lse -inf (or sink) with zero gradients, never NaN.

:func:`merge_partials` is the definition of the merge in the same sense. Memory is O(b h s^2): for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.mask import Band, Mask


def allowed(mask: Mask, *, device: torch.device | None = None) -> Tensor:
    """Boolean (batch or 1, seq_q, seq_k), by band membership."""
    i = torch.arange(mask.seq_q, device=device).unsqueeze(1)
    j = torch.arange(mask.seq_k, device=device).unsqueeze(0)
    rows = [torch.zeros(mask.seq_q, mask.seq_k, dtype=torch.bool, device=device)]
    rows *= mask.batch
    return torch.stack(
        [torch.stack([none, *(_inside(b, i, j) for b in bands)]).any(0) for none, bands in zip(rows, mask.rows, strict=True)]
    )


def _inside(band: Band, i: Tensor, j: Tensor) -> Tensor:
    inside = (i >= band.q0) & (i < band.q1) & (j >= band.k0) & (j < band.k1)
    if band.lo is not None:
        inside = inside & (j - i >= band.lo)
    if band.hi is not None:
        inside = inside & (j - i <= band.hi)
    return inside


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (b, s, heads_q, dv) and lse (b, heads_q, s), fp64.

    q (b, s, heads_q, dk), k (b, m, heads_kv, dk), v (b, m, heads_kv, dv); sink (heads_q,). ``scale`` None is dk ** -0.5.
    """
    q, k, v = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * (q @ k.mT)
    visible = allowed(mask, device=q.device).unsqueeze(1)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sink is not None:  # one more key, whose value is 0
        column = sink.to(torch.float64).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[-1])], 2)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    safe = logits.masked_fill(empty, 0)  # the double where: no NaN reaches the backward pass
    p = torch.softmax(safe, -1).masked_fill(empty, 0)
    lse = torch.logsumexp(safe, -1).masked_fill(empty.squeeze(-1), -torch.inf)
    return (p @ v).transpose(1, 2), lse


@dataclass(frozen=True)
class Truth:
    """Everything attention returns, forward and backward, fp64; gradients in the shapes of their inputs."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Truth:
    """Forward and autograd of <out, dout> + <lse, dlse>; rows whose lse is -inf take no part in the latter."""
    leaves = [x.detach().to(torch.float64).requires_grad_() for x in (q, k, v)]
    if sink is not None:
        sink = sink.detach().to(torch.float64).requires_grad_()
    out, lse = attention(*leaves, mask, scale=scale, sink=sink)
    loss = (out * dout.to(torch.float64)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(torch.float64)).sum()
    wanted = leaves if sink is None else [*leaves, sink]
    dq, dk, dv, *rest = torch.autograd.grad(loss, wanted)
    return Truth(out.detach(), lse.detach(), dq, dk, dv, rest[0] if rest else None)


def merge_partials(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over both key sets from that over each: out (b, s, h, d), lse (b, h, s). Differentiable.

    A side with lse = -inf contributes nothing, whatever its out holds; with both, the result is (0, -inf) and every gradient is 0.
    """
    top = torch.maximum(lse1, lse2).detach()
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0)

    def weight(lse: Tensor) -> Tensor:
        dead = lse == -torch.inf
        return torch.exp(lse.masked_fill(dead, 0) - top).masked_fill(dead, 0)

    def part(out: Tensor, lse: Tensor, w: Tensor) -> Tensor:
        dead = (lse == -torch.inf).transpose(1, 2).unsqueeze(-1)
        return out.masked_fill(dead, 0) * w.transpose(1, 2).unsqueeze(-1)

    w1, w2 = weight(lse1), weight(lse2)
    total = (w1 + w2).masked_fill(empty, 1)
    out = (part(out1, lse1, w1) + part(out2, lse2, w2)) / total.transpose(1, 2).unsqueeze(-1)
    return out, (top + torch.log(total)).masked_fill(empty, -torch.inf)
