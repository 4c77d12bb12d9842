"""A kernel that errs as low precision does: every operand of every product is rounded to E4M3.

    forward    S = Q8 K8^T,  P = exp(S - m),  out = P8 V8 / rowsum(P),  lse = m + log(rowsum(P))
    backward   P = exp(S - lse),  dS = P (dO8 V8^T - delta)
               dV = P8^T dO8,  dQ = dS8 K8,  dK = dS8^T Q8

x8 is x in E4M3 with a power-of-two scale for each 32 neighbours along the contraction: MXFP8's
numerics, not its bytes, so any wire serves. Everything else is fp64.

``p_scale`` is the planted fault: P is rounded at that constant scale instead. It looks right on
local attention, where P is of order 1, and fails when the lse of a merge over many more keys makes
P small, or when one key takes all the weight. The kernel contract must tell the two apart.

What this double is not: the rounding oracle of MXFP8 kernels, tile by tile and on their own wires
(:mod:`ringfa4.kernels.reference_mxfp8`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.reference import ReferenceQueries, allowed_pairs, masked_matmul
from ringfa4.mx import quantise
from ringfa4.mx.formats import ALONG_D, E4M3
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, saturating; NaN stays NaN. Result in fp64."""
    clamped = x.to(torch.float32).clamp(-E4M3.max, E4M3.max)
    return clamped.to(torch.float8_e4m3fn).to(torch.float64)


def rounded(x: Tensor, dim: int) -> Tensor:
    """MXFP8 with a scale for each 32 elements along ``dim``. Result in fp64."""
    last = x.to(torch.float32).movedim(dim, -1)
    return quantise.rounded(last, ALONG_D).to(torch.float64).movedim(-1, dim)


class LowPrecisionKernel(BlockKernel):
    """Dense, slow, on any device; masks, GQA and head sizes as the reference kernel."""

    name = "low-precision-double"

    def __init__(self, p_scale: float | None = None) -> None:
        self.p_scale = p_scale

    def _rounded_p(self, p: Tensor, dim: int) -> Tensor:
        if self.p_scale is None:
            return rounded(p, dim)
        return to_e4m3(p * self.p_scale) / self.p_scale

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        return None

    def prepare(self, q: Tensor, shard: Shard) -> Queries:
        return Queries(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> ReferenceQueries:
        queries = ReferenceQueries(q, shard)
        queries.dout, queries.lse = dout, lse
        queries.delta = (out.to(torch.float64) * dout).sum(-1).transpose(1, 2)
        if dlse is not None:
            queries.delta = queries.delta - dlse
        return queries

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        for task in tasks:
            batch, rows, allowed, k, v = _operands(queries, shard, task)
            q = _grouped(queries.q[batch, rows], k.shape[1])
            logits = scale * (rounded(q, -1) @ rounded(k, -1).mT)
            logits = logits.masked_fill(~allowed, -torch.inf)
            top = logits.amax(-1, keepdim=True)
            p = torch.exp(logits - top.masked_fill(top == -torch.inf, 0)).masked_fill(~allowed, 0)
            total = p.sum(-1, keepdim=True)
            acc = masked_matmul(self._rounded_p(p, -1), allowed, rounded(v, -2))
            state.merge_state(
                task.batch,
                rows,
                acc.flatten(1, 2).transpose(1, 2),
                top.squeeze(-1).flatten(1, 2),
                total.squeeze(-1).flatten(1, 2),
            )

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, ReferenceQueries)
        for task in tasks:
            batch, rows, allowed, k, v = _operands(queries, shard, task)
            q, dout = (_grouped(x[batch, rows], k.shape[1]) for x in (queries.q, queries.dout))
            lse, delta = (
                _grouped(x[batch, :, rows].transpose(1, 2).unsqueeze(-1), k.shape[1])
                for x in (queries.lse, queries.delta)
            )
            live = allowed & (lse != -torch.inf)
            logits = scale * (rounded(q, -1) @ rounded(k, -1).mT)
            p = torch.exp(logits - lse).masked_fill(~live, 0)
            dp = rounded(dout, -1) @ rounded(v, -1).mT
            ds = scale * (p * (dp - delta)).masked_fill(~live, 0)
            dq = masked_matmul(rounded(ds, -1), live, rounded(k, -2))
            dk = masked_matmul(rounded(ds, -2).mT, live.mT, rounded(q, -2)).sum(2)
            dv = masked_matmul(self._rounded_p(p, -2).mT, live.mT, rounded(dout, -2)).sum(2)
            grads.add_dq(task.batch, rows, dq.flatten(1, 2).transpose(1, 2))
            k0, k1 = task.k
            grads.add_dkv(task.batch, task.k_chunk, k0, k1, dk.transpose(1, 2), dv.transpose(1, 2))


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """(b, n, heads_q, d) -> fp64 (b, heads_kv, group, n, d)."""
    by_head = x.to(torch.float64).reshape(*x.shape[:2], heads_kv, -1, x.shape[-1])
    return by_head.permute(0, 2, 3, 1, 4)


def _operands(
    queries: Queries, shard: EncodedShard, task: Task
) -> tuple[slice, slice, Tensor, Tensor, Tensor]:
    """Batch rows, rows of q, allowed (n, m), and K, V (b', heads_kv, 1, m, d) of a task."""
    batch = slice(None) if task.batch is None else slice(task.batch, task.batch + 1)
    k, v = (x[batch].transpose(1, 2).unsqueeze(2) for x in shard.keys_values(task.k_chunk, *task.k))
    allowed = allowed_pairs(task.bands, *task.q, *task.k).to(queries.q.device)
    return batch, queries.rows(task.q_chunk, *task.q), allowed, k, v
