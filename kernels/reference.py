"""The reference kernel: dense masked attention per task, in fp64, by the definition.

    S = scale * Q K^T   (-inf outside the bands)        P = exp(S - lse)
    forward:   out = softmax(S) V,  lse = logsumexp(S)
    backward:  dS = P * (dO V^T - delta),  dQ = scale * dS K,  dK = scale * dS^T Q,  dV = P^T dO

It serves every spec and is what the others are read against: no tricks, no fast paths. Rows of Q
are taken in blocks so that a block's logits stay within :data:`BLOCK` elements; results round once,
when they enter the state or the gradients. K and V are cast to fp64 one task at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard

BLOCK = 1 << 22
"""Logits (batch * heads * rows * keys) held at a time: 32 MB in fp64, and a few such arrays."""


def allowed_pairs(bands: Sequence[Band], q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Boolean (q1 - q0, k1 - k0): which pairs of the box lie in any of ``bands``."""
    i = torch.arange(q0, q1).unsqueeze(1)
    j = torch.arange(k0, k1).unsqueeze(0)
    allowed = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
    for band in bands:
        inside = (i >= band.q0) & (i < band.q1) & (j >= band.k0) & (j < band.k1)
        if band.lo is not None:
            inside &= j - i >= band.lo
        if band.hi is not None:
            inside &= j - i <= band.hi
        allowed |= inside
    return allowed


def masked_matmul(weights: Tensor, allowed: Tensor, values: Tensor) -> Tensor:
    """weights @ values, where weights are 0 outside ``allowed`` and 0 * NaN counts as 0 there.

    weights and allowed (..., n, m), values (..., m, d). A value that is not finite makes NaN of
    the results it enters through an allowed pair, and of no other.
    """
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return weights @ values
    clean = weights @ values.masked_fill(bad, 0)
    return clean.masked_fill(allowed.to(values) @ bad.to(values) > 0, torch.nan)


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """fp64 (b, n, heads_q, d) -> (b, heads_kv, group, n, d): head h reads K/V head h // group."""
    grouped = x.to(torch.float64).reshape(*x.shape[:2], heads_kv, -1, x.shape[-1])
    return grouped.permute(0, 2, 3, 1, 4)


def _ungrouped(x: Tensor) -> Tensor:
    """(b, heads_kv, group, n, d) -> (b, n, heads_q, d)."""
    return x.flatten(1, 2).transpose(1, 2)


class ReferenceQueries(Queries):
    """In backward also dout (b, s, heads_q, dv), lse and delta (b, heads_q, s), in fp64."""

    dout: Tensor
    lse: Tensor
    delta: Tensor


class ReferenceKernel(BlockKernel):
    """Dense attention in fp64 on any device that has fp64."""

    name = "reference"

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        return None

    def prepare(self, q: Tensor, shard: Shard) -> ReferenceQueries:
        return ReferenceQueries(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> ReferenceQueries:
        queries = ReferenceQueries(q, shard)
        queries.dout, queries.lse = dout.to(torch.float64), lse.to(torch.float64)
        queries.delta = (out.to(torch.float64) * queries.dout).sum(-1).transpose(1, 2)
        if dlse is not None:
            queries.delta = queries.delta - dlse.to(torch.float64)
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
            k, v = _keys_values(shard, task)
            for q0, q1, allowed, logits in self._blocks(queries, task, k, scale):
                rows = queries.rows(task.q_chunk, q0, q1)
                lse = torch.logsumexp(logits, -1)
                p = torch.exp(logits - _shift(lse)).masked_fill(~allowed, 0)
                out = _ungrouped(masked_matmul(p, allowed, v.unsqueeze(2)))
                state.merge(task.batch, rows, out, lse.flatten(1, 2))

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
            k, v = _keys_values(shard, task)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            heads_kv = k.shape[1]
            batch = _batch(task)
            for q0, q1, allowed, logits in self._blocks(queries, task, k, scale):
                rows = queries.rows(task.q_chunk, q0, q1)
                q = _grouped(queries.q[batch, rows], heads_kv)
                dout = _grouped(queries.dout[batch, rows], heads_kv)
                lse, delta = (
                    _grouped(x[batch, :, rows].transpose(1, 2).unsqueeze(-1), heads_kv)
                    for x in (queries.lse, queries.delta)
                )
                live = allowed & (lse != -torch.inf)
                p = torch.exp(logits - lse).masked_fill(~live, 0)
                dp = dout @ v.unsqueeze(2).mT
                ds = (p * (dp - delta)).masked_fill(~live, 0) * scale
                grads.add_dq(task.batch, rows, _ungrouped(masked_matmul(ds, live, k.unsqueeze(2))))
                dk += masked_matmul(ds.mT, live.mT, q).sum(2)
                dv += masked_matmul(p.mT, live.mT, dout).sum(2)
            k0, k1 = task.k
            grads.add_dkv(task.batch, task.k_chunk, k0, k1, dk.transpose(1, 2), dv.transpose(1, 2))

    @staticmethod
    def _blocks(
        queries: Queries, task: Task, k: Tensor, scale: float
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(q0, q1, allowed (n, m), masked logits (b, heads_kv, group, n, m)) for blocks of rows."""
        (start, stop), (k0, k1) = task.q, task.k
        batch, heads_kv = k.shape[:2]
        height = max(1, BLOCK // (batch * queries.q.shape[2] * max(1, k1 - k0)))
        for q0 in range(start, stop, height):
            q1 = min(q0 + height, stop)
            q = queries.q[_batch(task), queries.rows(task.q_chunk, q0, q1)]
            allowed = allowed_pairs(task.bands, q0, q1, k0, k1).to(q.device)
            logits = scale * (_grouped(q, heads_kv) @ k.unsqueeze(2).mT)
            yield q0, q1, allowed, logits.masked_fill(~allowed, -torch.inf)


def _batch(task: Task) -> slice:
    return slice(None) if task.batch is None else slice(task.batch, task.batch + 1)


def _keys_values(shard: EncodedShard, task: Task) -> tuple[Tensor, Tensor]:
    """fp64 K (b', heads_kv, m, dk) and V (b', heads_kv, m, dv) of the task."""
    k, v = shard.keys_values(task.k_chunk, *task.k)
    batch = _batch(task)
    return (
        k[batch].transpose(1, 2).to(torch.float64),
        v[batch].transpose(1, 2).to(torch.float64),
    )


def _shift(lse: Tensor) -> Tensor:
    """What to subtract from the logits of each row; 0 where the row has no key."""
    return lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
