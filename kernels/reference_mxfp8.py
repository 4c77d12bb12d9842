"""The rounding oracle: attention that rounds where an MXFP8 kernel rounds, and nowhere else.

    forward    S = scale Q_d K_d^T;   over key tiles of 128:  m' = max(m, rowmax S)
               P = exp(S - m'),  sum = sum e^(m-m') + rowsum(P),  acc = acc e^(m-m') + P_k V_s
    backward   P = exp(scale Q_d K_d^T - lse),   dS = P * (dO_d V_d^T - delta)
               dV = P_q^T dO_s,   dK = scale dS_q^T Q_s,   dQ = scale dS_k K_s

x_d and x_s are x in MXFP8 for a contraction over d and over tokens: one 32 x 32 tiled copy on wire
"mxfp8", 1 x 32 blocks along the contraction on "mxfp8-1x32". K and V are the wire's own payload and
scales. P and dS are rounded in blocks of 32 along the contraction, keys (P_k, dS_k) or queries
(P_q, dS_q), **each with the scale of its own maximum**: with the merged lse, P is about 1/N, and
under a constant scale it would vanish. Sums are fp32; delta comes from the unrounded out and dout.
Blocks are aligned to their chunk, as the wire's are.

A tensor-core kernel differs from this only in the order of fp32 sums, in exp, and in how far its
running maximum lags, so it is held tightly to this kernel, and this one by SQNR to fp64. Made to be
read; it runs anywhere torch does, at a tenth of the speed of bf16 attention on a CPU.

With ``integer``, P = 2^(X - m), X = scale log2(e) Q_d K_d^T and m = ceil(max X): what the SM100
kernel computes. Since m is an integer, lagging changes the exponents of P and how it is rounded not
at all, so such a kernel can be held to this one for any lag. It costs 0.2 dB on Gaussian data: the
largest P of a row is no longer 1, which E4M3 holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.reference import allowed_pairs, masked_matmul
from ringfa4.mx.formats import ALONG_D, ALONG_SEQ, BLOCK, BlockShape
from ringfa4.mx.layout import Axis
from ringfa4.mx.quantise import rounded
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, MxShard, MxWire, Which
from ringfa4.plan import Task
from ringfa4.shard import RECORD, Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard

WIRES = {wire.name: wire for wire in (MXFP8, MXFP8_1X32)}

LOG2_E = math.log2(math.e)

LOGITS = 1 << 20
"""Logits (batch * heads * rows * keys) held at a time: 4 MB in fp32, and a few such arrays."""


class MxQueries(Queries):
    """Q, and in backward dO, lse and delta; rounded copies are made on first use and kept for the
    call.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor

    def __init__(self, q: Tensor, shard: Shard) -> None:
        super().__init__(q, shard)
        self._rounded: dict[tuple[str, BlockShape], Tensor] = {}

    def operand(self, which: str, wire: MxWire, along: Axis) -> Tensor:
        """Q ("q") or dO ("dout") in MXFP8 for a contraction over ``along``, (b, heads_q, s, d)
        fp32.
        """
        shape = wire.shape(along)
        if (which, shape) not in self._rounded:
            x = (self.q if which == "q" else self.dout).to(torch.float32).transpose(1, 2)
            pieces = [
                rounded(x[:, :, self.rows(c, 0, chunk.count)], shape)
                for c, chunk in enumerate(self.shard.chunks)
            ]
            self._rounded[which, shape] = torch.cat(pieces, 2)
        return self._rounded[which, shape]


class ReferenceMxfp8Kernel(BlockKernel):
    """MXFP8 attention in fp32 arithmetic, rounded as on SM100."""

    name = "reference-mxfp8"

    def __init__(self, integer: bool = False) -> None:
        self.integer = integer

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.wire not in WIRES:
            return f"it reads MXFP8 wires ({', '.join(WIRES)}), not {spec.wire!r}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        return None

    def prepare(self, q: Tensor, shard: Shard) -> MxQueries:
        return MxQueries(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> MxQueries:
        queries = MxQueries(q, shard)
        queries.dout, queries.lse = dout, lse.to(torch.float32)
        queries.delta = (out.to(torch.float32) * dout.to(torch.float32)).sum(-1).transpose(1, 2)
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
        assert isinstance(queries, MxQueries) and isinstance(shard, MxShard)
        q_d = queries.operand("q", WIRES[shard.wire], "d")
        unit, exp = (LOG2_E, torch.exp2) if self.integer else (1.0, torch.exp)
        for task in tasks:
            k_d, v_s = _operand(shard, task, "k", "d"), _operand(shard, task, "v", "seq")
            for q0, q1 in _row_blocks(task.q[0], task, q_d.shape[1] * k_d.shape[0] * RECORD):
                rows = queries.rows(task.q_chunk, q0, q1)
                q = _grouped(q_d[_batch(task), :, rows], k_d.shape[1])
                top = q.new_full(q.shape[:-1], -torch.inf)
                total = torch.zeros_like(top)
                acc = q.new_zeros(*q.shape[:-1], v_s.shape[-1])
                for k0, k1 in _key_tiles(task):
                    allowed = allowed_pairs(task.bands, q0, q1, k0, k1).to(q.device)
                    if not bool(allowed.any()):
                        continue  # the tile's mask is empty: a kernel skips it too
                    keys = slice(k0 - _first(task), k1 - _first(task))
                    s = (unit * scale * (q @ k_d[:, :, None, keys].mT)).masked_fill(
                        ~allowed, -torch.inf
                    )
                    peak = s.amax(-1)
                    new = torch.maximum(top, peak.ceil() if self.integer else peak)
                    safe = new.masked_fill(new == -torch.inf, 0)
                    p = exp(s - safe.unsqueeze(-1)).masked_fill(~allowed, 0)
                    weight = exp(top - safe)
                    total = total * weight + p.sum(-1)
                    product = masked_matmul(rounded(p, ALONG_D), allowed, v_s[:, :, None, keys])
                    acc = acc * weight.unsqueeze(-1) + product
                    top = new
                top = top.flatten(1, 2) / unit
                state.merge_state(task.batch, rows, _ungrouped(acc), top, total.flatten(1, 2))

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, MxQueries) and isinstance(shard, MxShard)
        wire = WIRES[shard.wire]
        q_d, q_s = (queries.operand("q", wire, axis) for axis in ("d", "seq"))
        dout_d, dout_s = (queries.operand("dout", wire, axis) for axis in ("d", "seq"))
        for task in tasks:
            k_d, k_s = (_operand(shard, task, "k", axis) for axis in ("d", "seq"))
            v_d = _operand(shard, task, "v", "d")
            heads_kv, first = k_d.shape[1], _first(task)
            dk, dv = torch.zeros_like(k_d), torch.zeros_like(v_d)
            start = task.q[0] // BLOCK * BLOCK  # P and dS are rounded over aligned blocks of rows
            width = q_d.shape[1] * k_d.shape[0] * k_d.shape[2]
            for q0, q1 in _row_blocks(start, task, width):
                rows = queries.rows(task.q_chunk, q0, q1)
                qd, qs, dod, dos = (
                    _grouped(x[_batch(task), :, rows], heads_kv) for x in (q_d, q_s, dout_d, dout_s)
                )
                lse, delta = (
                    x[_batch(task), :, rows].unflatten(1, (heads_kv, -1)).unsqueeze(-1)
                    for x in (queries.lse, queries.delta)
                )
                allowed = allowed_pairs(task.bands, q0, q1, first, task.k[1]).to(q_d.device)
                live = allowed & (lse != -torch.inf)
                p = torch.exp(scale * (qd @ k_d[:, :, None].mT) - lse).masked_fill(~live, 0)
                dp = dod @ v_d[:, :, None].mT
                ds = (p * (dp - delta)).masked_fill(~live, 0)
                dv += masked_matmul(rounded(p, ALONG_SEQ).mT, live.mT, dos).sum(2)
                dk += masked_matmul(rounded(ds, ALONG_SEQ).mT, live.mT, qs).sum(2)
                dq = masked_matmul(rounded(ds, ALONG_D), live, k_s[:, :, None])
                own = max(q0, task.q[0])
                dq = scale * _ungrouped(dq)[:, own - q0 :]
                grads.add_dq(task.batch, queries.rows(task.q_chunk, own, q1), dq)
            k0, k1 = task.k
            keys = slice(k0 - first, k1 - first)
            grads.add_dkv(
                task.batch,
                task.k_chunk,
                k0,
                k1,
                scale * dk[:, :, keys].transpose(1, 2),
                dv[:, :, keys].transpose(1, 2),
            )


def _first(task: Task) -> int:
    """First key computed: that of the block in which the task's first key lies."""
    return task.k[0] // BLOCK * BLOCK


def _operand(shard: MxShard, task: Task, which: Which, along: Axis) -> Tensor:
    """fp32 (b', heads_kv, keys, d) of the task's keys, from :func:`_first` on."""
    x = shard.operand(which, along, task.k_chunk, _first(task), task.k[1], torch.float32)
    return x[_batch(task)].transpose(1, 2)


def _key_tiles(task: Task) -> Iterator[tuple[int, int]]:
    """[k0, k1) of each record that the task touches."""
    at, stop = _first(task), task.k[1]
    while at < stop:
        end = min(at // RECORD * RECORD + RECORD, stop)
        yield at, end
        at = end


def _row_blocks(start: int, task: Task, width: int) -> Iterator[tuple[int, int]]:
    """[q0, q1) of blocks of rows from ``start`` to the task's end, multiples of 32 rows each, of
    about LOGITS logits; ``width`` logits a row.
    """
    height = max(1, LOGITS // (width * BLOCK)) * BLOCK
    for at in range(start, task.q[1], height):
        yield at, min(at + height, task.q[1])


def _batch(task: Task) -> slice:
    return slice(None) if task.batch is None else slice(task.batch, task.batch + 1)


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """(b, heads_q, n, d) -> (b, heads_kv, group, n, d)."""
    grouped: Tensor = x.unflatten(1, (heads_kv, -1))
    return grouped


def _ungrouped(x: Tensor) -> Tensor:
    """(b, heads_kv, group, n, d) -> (b, n, heads_q, d)."""
    return x.flatten(1, 2).transpose(1, 2)
