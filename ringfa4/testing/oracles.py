"""Attention by its definition, in fp64: what every kernel and every ring is measured against.

    S_ij = scale * q_i . k_j   where the mask allows (i, j), else -inf
    lse_i = log( sum_j exp(S_ij) + exp(sink) ),   out_i = sum_j exp(S_ij - lse_i) v_j

One dense matrix, nothing tiled or merged, differentiable: autograd through :func:`attention` gives
the true gradients, those into lse and sink included. A row without keys gives out 0, lse -inf (or
sink) and zero gradients, never NaN. :func:`merge_partials` is the merge by definition, likewise.
Memory is O(b h s^2): for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.mask import Mask


def allowed(mask: Mask) -> Tensor:
    """Boolean (batch or 1, seq_q, seq_k): the keys of every query, band by band, row by row."""
    visible = torch.zeros(mask.batch, mask.seq_q, mask.seq_k, dtype=torch.bool)
    for row, bands in enumerate(mask.rows):
        for band in bands:
            for i in range(band.q0, band.q1):
                start, stop = band.keys_of(i)
                visible[row, i, start:stop] = True
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (b, s, heads_q, dv) and lse (b, heads_q, s), fp64.

    q (b, s, heads_q, dk), k (b, m, heads_kv, dk), v (b, m, heads_kv, dv); sink (heads_q,).
    ``scale`` None is dk ** -0.5.
    """
    q, k, v = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * (q @ k.mT)
    visible = allowed(mask).unsqueeze(1).to(q.device)
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
    """What attention returns, forward and backward, fp64; gradients are shaped as their inputs."""

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
    """Forward, and autograd of <out, dout> + <lse, dlse>; rows with lse = -inf have no dlse."""
    q, k, v = (x.detach().to(torch.float64).requires_grad_() for x in (q, k, v))
    if sink is not None:
        sink = sink.detach().to(torch.float64).requires_grad_()
    out, lse = attention(q, k, v, mask, scale=scale, sink=sink)
    loss = (out * dout.to(torch.float64)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(torch.float64)).sum()
    wanted = [q, k, v] if sink is None else [q, k, v, sink]
    dq, dk, dv, *rest = torch.autograd.grad(loss, wanted)
    return Truth(out.detach(), lse.detach(), dq, dk, dv, rest[0] if rest else None)


def gradients_given(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a part of an attention whose merged out and lse are given, written out.

    P = exp(S - lse), 0 where lse = -inf;  dS = P (dO V^T - delta), delta = rowsum(out dout) - dlse.
    With out and lse of the same keys these are the gradients of :func:`attention_gradients`.
    """
    q, k, v, out, dout = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v, out, dout))
    heads_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = lse.to(torch.float64).unsqueeze(-1)
    live = allowed(mask).unsqueeze(1).to(q.device) & (lse != -torch.inf)
    p = torch.exp((scale * (q @ k.mT) - lse).masked_fill(~live, -torch.inf))
    delta = (out * dout).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(torch.float64).unsqueeze(-1)
    ds = scale * p * (dout @ v.mT - delta)
    by_group = (ds.mT @ q, p.mT @ dout)
    dk, dv = (x.reshape(x.shape[0], heads_kv, group, *x.shape[2:]).sum(2) for x in by_group)
    return (ds @ k).transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def merge_partials(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two key sets from that over each: out (b, s, h, d), lse (b, h, s).

    Differentiable. A side with lse = -inf contributes nothing, whatever its out holds; with both,
    the result is (0, -inf) and every gradient is 0.
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
