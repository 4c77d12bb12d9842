"""The CPU kernel: PyTorch's flash attention for CPUs, called piece by piece.

    forward:   (out, lse) of a piece from one native call; the state merges them
    backward:  the native backward with the merged (out, lse); it computes delta = rowsum(out * dout) itself

Bands become pieces (:mod:`ringfa4.kernels.pieces`): rectangles and top-left-causal boxes need no mask, and a masked piece has
at most 256 rows. K and V are strided views into the records: neither expanded for GQA, nor cast.

What the native call does not do, and what is done about it:

- one head dimension for all operands: the smaller of dk and dv is padded with zeros, a piece at a time for K and V;
- no gradient into lse: columns are added to out, dout and V so that out . dout gains -dlse exactly (:func:`_factors`);
- GQA in backward: one call for each query head of a group, as strided slices, summed in fp32;
- a row without keys gives lse 0 instead of -inf, and no keys at all crash the process: pieces have neither;
- lse = -inf in backward gives NaN: +inf is passed, so P = 0;
- a masked pair multiplies what it masks by 0, which lets NaN through: keys that are not finite in a piece that is no rectangle, and
  (in backward) rows that are not finite anywhere, are computed as zeros, and NaN is put where it belongs afterwards. Inf counts as NaN there.

Left out: fp64 (the reference kernel's), softcap, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.pieces import is_causal, is_masked, pieces
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import Grads, State
from ringfa4.wire import EncodedShard

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CpuQueries(Queries):
    """q, out, dout (b, s, heads_q, width), padded with zeros to one width; lse (b, heads_q, s).

    In backward, rows that must not reach the native call are zeros with lse = +inf, and
    ``spoilt`` says what they spoil: None, or flags (b, heads_q, s) for dQ and dK, and for dV.
    """

    out: Tensor
    dout: Tensor
    lse: Tensor
    spoilt: tuple[Tensor, Tensor] | None

    def __init__(self, q: Tensor, shard: Shard, width: int) -> None:
        super().__init__(_padded(q, width), shard)
        self.dk, self.width = q.shape[-1], width


class CpuKernel(BlockKernel):
    """bf16, fp16 and fp32 on the CPU; every mask; GQA; dv != dk."""

    name = "cpu"

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.device != "cpu":
            return f"kernel 'cpu' computes on the CPU, the tensors are on {spec.device!r}"
        if spec.dtype not in DTYPES:
            return f"kernel 'cpu' takes {', '.join(map(str, DTYPES))}, not {spec.dtype}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        return None

    def prepare(self, q: Tensor, shard: Shard) -> CpuQueries:
        return CpuQueries(q, shard, q.shape[-1])

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> CpuQueries:
        finite_p = _finite(q) & _finite(dout) & (lse < torch.inf)  # NaN < inf is false
        finite = finite_p & _finite(out)
        if dlse is not None:
            finite &= torch.isfinite(dlse)
        dead = lse == -torch.inf  # nothing depends on such a row, whatever it holds
        if bool((dead | ~finite).any()):
            unused_p, unused = dead | ~finite_p, dead | ~finite
            q, dout, out = _zeroed(q, unused_p), _zeroed(dout, unused_p), _zeroed(out, unused)
            lse = lse.masked_fill(unused_p, torch.inf)
            dlse = None if dlse is None else dlse.masked_fill(unused, 0)
        spoilt = None if bool((dead | finite).all()) else (~(dead | finite), ~(dead | finite_p))

        out, dout = out.to(q.dtype), dout.to(q.dtype)
        if dlse is not None:
            left, right = _factors(dlse.transpose(1, 2), q.dtype)
            out, dout = torch.cat([out, left.neg()], -1), torch.cat([dout, right], -1)
        queries = CpuQueries(q, shard, max(q.shape[-1], out.shape[-1]))
        queries.out, queries.dout = _padded(out, queries.width), _padded(dout, queries.width)
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
        width = max(queries.dk, dv)
        for task, piece, batch, rows in _calls(queries, tasks):
            q = _padded(queries.q[batch, rows], width).transpose(1, 2)
            k, v, bad = _keys_values(shard, task, piece, width)
            out, lse = _forward(q, k, v, 0.0, is_causal(piece), attn_mask=_mask(piece), scale=scale)
            if bad is not None:
                seen_k, seen_v = (_seen_by_queries(piece, flags, q.shape[1]) for flags in bad)
                lse = lse.masked_fill(seen_k, torch.nan)
                out = out.masked_fill((seen_k | seen_v).unsqueeze(-1), torch.nan)
            state.merge(task.batch, rows, out.transpose(1, 2)[..., :dv], lse)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, CpuQueries)
        for task, piece, batch, rows in _calls(queries, tasks):
            q, out, dout = (
                x[batch, rows].transpose(1, 2) for x in (queries.q, queries.out, queries.dout)
            )
            lse = queries.lse[batch, :, rows]
            k, v, bad = _keys_values(shard, task, piece, queries.width)
            group = q.shape[1] // k.shape[1]
            dq = torch.empty_like(q)
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
            for member in range(group):
                of = slice(member, None, group)
                dq[:, of], dk_part, dv_part = _backward(
                    dout[:, of], q[:, of], k, v, out[:, of], lse[:, of], 0.0, is_causal(piece),
                    attn_mask=_mask(piece), scale=scale,
                )  # fmt: skip
                dk += dk_part
                dv += dv_part
            if bad is not None or queries.spoilt is not None:
                _spoil(piece, queries, batch, rows, bad, dq, dk, dv)
            grads.add_dq(task.batch, rows, dq.transpose(1, 2)[..., : queries.dk])
            grads.add_dkv(
                task.batch,
                task.k_chunk,
                piece.k0,
                piece.k1,
                dk.transpose(1, 2)[..., : queries.dk],
                dv.transpose(1, 2)[..., : shard.geometry.dv],
            )


def _calls(queries: Queries, tasks: Sequence[Task]) -> Iterator[tuple[Task, Band, slice, slice]]:
    """(task, piece, its batch rows, its rows of the local tensors), in list order."""
    for task in tasks:
        batch = slice(None) if task.batch is None else slice(task.batch, task.batch + 1)
        for band in task.bands:
            for piece in pieces(band):
                yield task, piece, batch, queries.rows(task.q_chunk, piece.q0, piece.q1)


def _keys_values(
    shard: EncodedShard, task: Task, piece: Band, width: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """K, V (b', heads_kv, m, width) of a piece, and the keys (b', heads_kv, m) whose K or V was not finite.

    Such keys are zeroed and told only when the piece masks pairs; None otherwise, and when all are finite.
    """
    batch = slice(None) if task.batch is None else slice(task.batch, task.batch + 1)
    k, v = (x[batch] for x in shard.keys_values(task.k_chunk, piece.k0, piece.k1))
    bad = None
    masks = piece.lo is not None or piece.hi is not None
    if masks and not bool(torch.isfinite(k.sum() + v.sum())):  # one pass, no temporary
        bad = (~_finite(k), ~_finite(v))
        k, v = _zeroed(k, bad[0]), _zeroed(v, bad[1])
    return _padded(k, width).transpose(1, 2), _padded(v, width).transpose(1, 2), bad


@lru_cache(maxsize=16)
def _box_mask(rows: int, keys: int, lo: int | None, hi: int | None) -> Tensor:
    """fp32 (rows, keys): 0 where lo <= b - a <= hi, else -inf. The interior tiles of a window share one."""
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
    """(..., width): zeros after what x has; x itself when it is wide enough and its last stride is 1."""
    if x.shape[-1] < width:
        return functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _finite(x: Tensor) -> Tensor:
    """(b, s, h, d) -> (b, h, s): all of a token's head is finite."""
    return torch.isfinite(x).all(-1).transpose(1, 2)


def _zeroed(x: Tensor, where: Tensor) -> Tensor:
    """x (b, s, h, d) with zeros where (b, h, s) says so."""
    return x.masked_fill(where.transpose(1, 2).unsqueeze(-1), 0)


def _factors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two (..., n) in ``dtype`` with sum(left * right, -1) = x, exactly: n = 1 in fp32, else 3.

    x is fp32. Three significands of 8 (bf16) or 11 bits hold its 24; each part is a significand times a power of two, and
    the power is shared between both factors, so that fp16 reaches from 2^-26 to 2^30.
    """
    left, right, rest = [], [], x.to(torch.float32)
    for _ in range(1 if dtype == torch.float32 else 3):
        significand, exponent = torch.frexp(rest)
        significand = significand.to(dtype)
        half = torch.div(exponent, 2, rounding_mode="floor")
        left.append(torch.ldexp(torch.ones_like(rest), half).to(dtype))
        right.append(torch.ldexp(significand.to(torch.float32), exponent - half).to(dtype))
        rest = rest - torch.ldexp(significand.to(torch.float32), exponent)
    return torch.stack(left, -1), torch.stack(right, -1)


# ---- what depends on values that are not finite -------------------------------------------------


def _any_between(flags: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """(..., n): whether any of flags (..., m) in [start, stop) (n,) is set."""
    count = functional.pad(flags.cumsum(-1), (1, 0))
    return count[..., stop] > count[..., start]


def _seen(piece: Band, flags: Tensor) -> Tensor:
    """flags (b, h, m) of the piece's keys -> (b, h, n): its queries that see a flagged key."""
    box = piece.shifted(-piece.q0, -piece.k0)
    a = torch.arange(box.q1)
    start = torch.zeros_like(a) if box.lo is None else (a + box.lo).clamp(0, box.k1)
    stop = torch.full_like(a, box.k1) if box.hi is None else (a + box.hi + 1).clamp(0, box.k1)
    return _any_between(flags, start, stop)


def _seen_by_queries(piece: Band, flags: Tensor, heads_q: int) -> Tensor:
    """flags (b, heads_kv, m) of the keys -> (b, heads_q, n): the queries that see a flagged key."""
    return _seen(piece, flags).repeat_interleave(heads_q // flags.shape[1], 1)


def _seen_by_keys(piece: Band, flags: Tensor, heads_kv: int) -> Tensor:
    """flags (b, heads_q, n) of the queries -> (b, heads_kv, m): the keys that a flagged query sees."""
    transposed = Band(
        piece.k0,
        piece.k1,
        piece.q0,
        piece.q1,
        None if piece.hi is None else -piece.hi,
        None if piece.lo is None else -piece.lo,
    )
    return _seen(transposed, flags.unflatten(1, (heads_kv, -1)).any(2))


def _spoil(
    piece: Band,
    queries: CpuQueries,
    batch: slice,
    rows: slice,
    bad: tuple[Tensor, Tensor] | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """NaN into the dQ, dK, dV of a piece that depend on rows or keys which were computed as zeros.

    A query whose P, dO or delta is not finite spoils its dQ and the dK of the keys it sees; dV has no delta and no V in it.
    """
    heads_q, heads_kv = dq.shape[1], dk.shape[1]
    if queries.spoilt is None:
        for_dk = for_dv = torch.zeros(dq.shape[:3], dtype=torch.bool)
    else:
        for_dk, for_dv = (flags[batch, :, rows] for flags in queries.spoilt)
    if bad is not None:
        seen_k, seen_v = (_seen_by_queries(piece, flags, heads_q) for flags in bad)
        for_dk, for_dv = for_dk | seen_k | seen_v, for_dv | seen_k
    dq.masked_fill_(for_dk.unsqueeze(-1), torch.nan)
    dk.masked_fill_(_seen_by_keys(piece, for_dk, heads_kv).unsqueeze(-1), torch.nan)
    dv.masked_fill_(_seen_by_keys(piece, for_dv, heads_kv).unsqueeze(-1), torch.nan)
