"""The CPU kernel: PyTorch's flash attention for CPUs, called piece by piece.

    forward:   (out, lse) of a piece from one native call; the state merges them
    backward:  the native backward with the merged (out, lse), delta = rowsum(out * dout) inside

Bands become pieces (:mod:`ringfa4.kernels.pieces`): rectangles and top-left-causal boxes need no
mask, and a masked piece has at most 256 rows. K and V are packed a task at a time, not expanded for
GQA, nor cast (only fp16 is: :data:`COMPUTE`). What the native call does not do, and what is done
about it:

- one head dimension for all operands: narrower ones are padded with zeros;
- no gradient into lse: columns [-1] in out, dlse in dout and 0 in V lower out . dout by dlse;
- GQA in backward: one call for each query head of a group, as strided slices, summed in fp32;
- a row without keys gives lse 0, not -inf; no keys at all crash the process: pieces have neither;
- lse = -inf in backward gives NaN: such rows enter as zeros with lse = +inf, so P = 0;
- NaN leaks through masked pairs: where it may have, :mod:`ringfa4.kernels.nonfinite` isolates it,
  a whole token at a time, and inf like NaN.

Native tensors are (b, h, s, d), as views. Left out: fp64 (see reference), softcap, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.nonfinite import (
    all_finite,
    broken,
    seen_by_keys,
    seen_by_queries,
    spoil,
    zeroed,
)
from ringfa4.kernels.pieces import boxes, is_causal, is_full, is_masked, pieces
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

COMPUTE = {
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
}
"""Input dtype -> dtype of the native call. fp16 runs in fp32: with the merged lse P is about 1/N,
below fp16's normal range from 16K keys on; and the native fp16 backward is ten times slower."""

SUMMED = 2048
"""Most rows, and most keys, of a native backward call, which sums dQ, dK, dV in the inputs' dtype.

bf16, d = 64, SQNR of dK: 48 dB up to 2,048 rows, 43 at 8,192, 37 at 32,768; of dQ alike with the
keys. Beyond a call sums are fp32. It takes no longer (8,192 x 8,192: 0.97 s cut, 0.96 s whole).
"""


class CpuQueries(Queries):
    """``native``: q (b, heads_q, s, width), and in backward out and dout alike; width >= dk."""

    def __init__(self, q: Tensor, shard: Shard, *native: Tensor) -> None:
        super().__init__(q, shard)
        self.width = max(x.shape[-1] for x in native)
        self.native = tuple(_padded(x, self.width) for x in native)


class CpuBackward(CpuQueries):
    """``lse`` (b, heads_q, s) is +inf in rows that must not contribute: zeros in ``native``.

    ``spoilt``: None, or two flags (b, heads_q, s): rows that make NaN of their dQ and of the dK of
    the keys they see, and rows that make NaN of the dV of those keys. A query that sees a broken
    key is among them, since its out is: with None, no masked pair can let anything through.
    """

    lse: Tensor
    spoilt: tuple[Tensor, Tensor] | None


class CpuKernel(BlockKernel):
    """bf16, fp16 and fp32 on the CPU; every mask; GQA; dv != dk."""

    name = "cpu"

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.device != "cpu":
            return f"kernel 'cpu' computes on the CPU, the tensors are on {spec.device!r}"
        if spec.dtype not in COMPUTE:
            return f"kernel 'cpu' takes {', '.join(map(str, COMPUTE))}, not {spec.dtype}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        return None

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the native call, which returns them so."""
        return COMPUTE[dtype]

    def prepare(self, q: Tensor, shard: Shard) -> CpuQueries:
        return CpuQueries(q, shard, q.to(COMPUTE[q.dtype]).transpose(1, 2))

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> CpuBackward:
        native = [x.to(COMPUTE[q.dtype]).transpose(1, 2) for x in (q, out, dout)]
        spoilt = None
        if not all_finite(*native, lse, *([] if dlse is None else [dlse])):
            native, lse, dlse, spoilt = _silenced(native, lse, dlse)
        if dlse is not None:
            parts = _summands(dlse, native[0].dtype)
            minus = parts.new_full((), -1).expand_as(parts)
            native[1:] = torch.cat([native[1], minus], -1), torch.cat([native[2], parts], -1)
        queries = CpuBackward(q, shard, *native)
        queries.lse, queries.spoilt = lse, spoilt
        return queries

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        assert isinstance(queries, CpuQueries)
        dv = shard.geometry.dv
        width = max(queries.width, dv)
        for task, piece, batch, rows, (k, v) in _calls(queries, shard, tasks, width):
            q = _padded(queries.native[0][batch, :, rows], width)
            out, lse = _attend(piece, scale, q, k, v)
            if not is_full(piece) and not all_finite(out):
                out, lse = _attend_isolated(piece, scale, q, k, v)
            state.merge(task.batch, rows, out[..., :dv].transpose(1, 2), lse)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, CpuBackward)
        g = shard.geometry
        with _threads_at_most(g.batch * g.heads_kv):
            self._backward(queries, shard, tasks, scale, grads)

    def _backward(
        self,
        queries: CpuBackward,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        widths = queries.q.shape[-1], shard.geometry.dk, shard.geometry.dv
        calls = _calls(queries, shard, tasks, queries.width, SUMMED)
        for task, piece, batch, rows, (k, v) in calls:
            q, out, dout = (x[batch, :, rows] for x in queries.native)
            lse = queries.lse[batch, :, rows]
            if queries.spoilt is None:
                results = _differentiate(piece, scale, q, k, v, out, dout, lse)
            else:
                bad, bad_p = (flags[batch, :, rows] for flags in queries.spoilt)
                results = _differentiate_isolated(piece, scale, q, k, v, out, dout, lse, bad, bad_p)
            dq, dk, dv = (
                x[..., :width].transpose(1, 2) for x, width in zip(results, widths, strict=True)
            )
            grads.add_dq(task.batch, rows, dq)
            grads.add_dkv(task.batch, task.k_chunk, piece.k0, piece.k1, dk, dv)


@contextmanager
def _threads_at_most(count: int) -> Iterator[None]:
    """No more OpenMP threads than the native backward has (batch row, K/V head) pairs to share out.

    The others would spin on cores that are needed: 8,192 tokens, one head, 2 threads on 2 busy
    cores took 24 s, one thread 0.9 s.
    """
    before = torch.get_num_threads()
    if before <= count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batch(task: Task) -> slice:
    return slice(None) if task.batch is None else slice(task.batch, task.batch + 1)


def _calls(
    queries: Queries,
    shard: EncodedShard,
    tasks: Sequence[Task],
    width: int,
    side: int | None = None,
) -> Iterator[tuple[Task, Band, slice, slice, tuple[Tensor, Tensor]]]:
    """(task, piece, its batch rows, its rows of the local tensors, its K and V), in list order.

    ``side``: no piece has more rows or keys.
    """
    for task in tasks:
        start, stop = task.k
        keys, values = _packed(shard, task, width)
        for band in task.bands:
            for box in (band,) if side is None else boxes(band, side):
                for piece in pieces(box):
                    rows = queries.rows(task.q_chunk, piece.q0, piece.q1)
                    assert start <= piece.k0 and piece.k1 <= stop
                    seen = slice(piece.k0 - start, piece.k1 - start)
                    yield task, piece, _batch(task), rows, (keys[:, :, seen], values[:, :, seen])


def _packed(shard: EncodedShard, task: Task, width: int) -> tuple[Tensor, Tensor]:
    """K and V (b', heads_kv, m, width) of a task's keys, each head's rows side by side.

    Records interleave heads, K and V token by token; at that stride the native call takes a tenth
    longer (its rows share cache sets) than on a copy, which costs next to nothing.
    """
    k, v = shard.keys_values(task.k_chunk, *task.k)
    k, v = (x[_batch(task)].to(COMPUTE[x.dtype]).transpose(1, 2) for x in (k, v))
    return _padded(k, width).contiguous(), _padded(v, width).contiguous()


# ---- one piece, one native call (a group of them in backward) -----------------------------------


def _attend(piece: Band, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (b, heads_q, n, width) and lse (b, heads_q, n)."""
    out, lse = _forward(q, k, v, 0.0, is_causal(piece), attn_mask=_mask(piece), scale=scale)
    return out, lse


def _differentiate(
    piece: Band,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (b, heads_q, n, width), dK and dV (b, heads_kv, m, width)."""
    group = q.shape[1] // k.shape[1]
    members = [slice(member, None, group) for member in range(group)]

    def one(of: slice) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _backward(
            dout[:, of],
            q[:, of],
            k,
            v,
            out[:, of],
            lse[:, of],
            0.0,
            is_causal(piece),
            attn_mask=_mask(piece),
            scale=scale,
        )
        return dq, dk, dv

    if group == 1:
        return one(members[0])
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
    for of in members:
        dq[:, of], dk_part, dv_part = one(of)
        dk += dk_part
        dv += dv_part
    return dq, dk, dv


@lru_cache(maxsize=16)
def _box_mask(rows: int, keys: int, lo: int | None, hi: int | None) -> Tensor:
    """fp32 (rows, keys): 0 where lo <= b - a <= hi, else -inf. A window's inner tiles share one."""
    difference = torch.arange(keys) - torch.arange(rows).unsqueeze(1)
    outside = torch.zeros(rows, keys, dtype=torch.bool)
    if lo is not None:
        outside |= difference < lo
    if hi is not None:
        outside |= difference > hi
    return torch.zeros(rows, keys).masked_fill(outside, -torch.inf)


def _mask(piece: Band) -> Tensor | None:
    if not is_masked(piece):
        return None
    box = piece.shifted(-piece.q0, -piece.k0)
    return _box_mask(box.q1, box.k1, box.lo, box.hi)


def _padded(x: Tensor, width: int) -> Tensor:
    """(..., width) with zeros at the end and last stride 1; ``x`` itself when it is so already."""
    if x.shape[-1] < width:
        return functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _summands(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., n) in ``dtype`` whose sum is x (fp32), exactly: n = 1 in fp32, 3 in bf16."""
    parts, rest = [], x.to(torch.float32)
    for _ in range(1 if dtype == torch.float32 else 3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(torch.float32)
    return torch.stack(parts, -1)


# ---- the same when something is not finite ------------------------------------------------------


def _attend_isolated(
    piece: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`_attend`, where only queries that see a broken key or value get NaN."""
    bad_k, bad_v = broken(k), broken(v)
    out, lse = _attend(piece, scale, q, zeroed(k, bad_k), zeroed(v, bad_v))
    spoilt_k, spoilt_v = (seen_by_queries(piece, x, q.shape[1]) for x in (bad_k, bad_v))
    return spoil(out, spoilt_k | spoilt_v), lse.masked_fill(spoilt_k, torch.nan)


def _silenced(
    native: list[Tensor], lse: Tensor, dlse: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """([q, out, dout], lse, dlse) fit for the native call, and the ``spoilt`` of CpuBackward.

    A row with lse = -inf is dead: it depends on nothing, whatever else it holds. A broken out or
    dlse spoils delta alone, which dV does not depend on.
    """
    q, out, dout = native
    dead = lse == -torch.inf
    bad_p = (broken(q) | broken(dout) | ~(lse < torch.inf)) & ~dead  # NaN < inf is false
    bad = (bad_p | broken(out)) & ~dead
    if dlse is not None:
        bad |= ~torch.isfinite(dlse) & ~dead
        dlse = dlse.masked_fill(dead | bad, 0)
    silent = [zeroed(q, dead | bad_p), zeroed(out, dead | bad), zeroed(dout, dead | bad_p)]
    spoilt = (bad, bad_p) if bool(bad.any()) else None
    return silent, lse.masked_fill(dead | bad_p, torch.inf), dlse, spoilt


def _differentiate_isolated(
    piece: Band,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    bad: Tensor,
    bad_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_differentiate`, where only what depends on a spoilt row or broken key gets NaN.

    In a rectangle every query sees every key, so broken keys need no help there.
    """
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if not is_full(piece):
        bad_k, bad_v = broken(k), broken(v)
        k, v = zeroed(k, bad_k), zeroed(v, bad_v)
        bad_p = bad_p | seen_by_queries(piece, bad_k, heads_q)
        bad = bad | bad_p | seen_by_queries(piece, bad_v, heads_q)
    dq, dk, dv = _differentiate(piece, scale, q, k, v, out, dout, lse)
    return (
        spoil(dq, bad),
        spoil(dk, seen_by_keys(piece, bad, heads_kv)),
        spoil(dv, seen_by_keys(piece, bad_p, heads_kv)),
    )
