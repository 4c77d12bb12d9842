"""What every block kernel must do. Subclass :class:`KernelContract` and name the kernel.

Each case is run on memory full of NaN, in the way a ring runs it: K/V encoded as records, tasks
from a mask and two shards, the state finalised, dK/dV read back from the gradient records; and
compared with fp64 by definition. dK/dV are those of a contribution to another rank, in the dtype in
which the kernel gives them. Subclasses choose dtypes, device, wire, sizes and how results
are judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.mask import Band, Mask
from ringfa4.plan import Task
from ringfa4.shard import Chunk, Shard
from ringfa4.state import State
from ringfa4.testing import oracles
from ringfa4.testing.compare import compare
from ringfa4.testing.oracles import Truth
from ringfa4.testing.tolerances import LSE_LOW_PRECISION, bound, half_ulp, plain_attention
from ringfa4.wire import PLAIN, EncodedShard, Geometry, RecordMap, sum_dtype, wire_format

SENTINEL = 12288.0
"""Exact in every dtype a state or gradient has, and unlike any result."""


def shard(*lengths: int) -> Shard:
    """Consecutive chunks of the given lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Shard(tuple(Chunk(a, n) for a, n in zip(starts, lengths, strict=True)))


def tasks_of(mask: Mask, q_shard: Shard, k_shard: Shard) -> list[Task]:
    """A task for each row of the mask and each pair of (unit-stride) chunks that a band touches."""
    tasks = []
    for row, bands in enumerate(mask.rows):
        for a, q in enumerate(q_shard.chunks):
            for b, k in enumerate(k_shard.chunks):
                box = (q.start, q.start + q.count, k.start, k.start + k.count)
                inside = [band.within(*box) for band in bands]
                own = tuple(x.shifted(-q.start, -k.start) for x in inside if x is not None)
                if own:
                    batch = row if mask.batch > 1 else None
                    tasks.append(_task(batch, a, b, own))
    return tasks


def _task(batch: int | None, q_chunk: int, k_chunk: int, bands: tuple[Band, ...]) -> Task:
    q = min(x.q0 for x in bands), max(x.q1 for x in bands)
    k = min(x.k0 for x in bands), max(x.k1 for x in bands)
    return Task(batch, q_chunk, k_chunk, q, k, bands)


@dataclass(frozen=True)
class Case:
    """Inputs of one attention, and how they are sharded."""

    mask: Mask
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    q_shard: Shard
    k_shard: Shard
    wire: str | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def tasks(self) -> list[Task]:
        return tasks_of(self.mask, self.q_shard, self.k_shard)

    @property
    def geometry(self) -> Geometry:
        k, v = self.k, self.v
        return Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        return sum_dtype(self.q.dtype)

    @cached_property
    def truth(self) -> Truth:
        return oracles.attention_gradients(self.q, self.k, self.v, self.mask, self.dout, self.dlse)

    @cached_property
    def plain(self) -> Truth:
        return plain_attention(self.q, self.k, self.v, self.mask, self.dout, self.dlse)

    def encoded(self, direction: str = "forward") -> EncodedShard:
        wire = wire_format(self.wire, self.k.dtype)
        size = self.k_shard.records * wire.record_bytes(self.geometry, direction)
        buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.k.device)
        wire.encode(self.k, self.v, self.k_shard, buffer, direction)
        return wire.view(self.geometry, RecordMap.whole(self.k_shard), buffer, direction)

    def state(self, fill: float = math.nan) -> State:
        batch, seq, heads, _ = self.q.shape
        state = State(
            batch, seq, heads, self.v.shape[3], device=self.q.device, dtype=self.sum_dtype
        )
        for x in (state.acc, state.max, state.sum):
            x.fill_(fill)
        return state

    def grads(self, dtype: torch.dtype, fill: float = math.nan) -> GradSums:
        return GradSums(self, dtype, fill)


class GradSums:
    """Grads over the case's whole key shard, begun, on memory filled with ``fill``; dK/dV in
    ``dtype``.
    """

    def __init__(self, case: Case, dtype: torch.dtype, fill: float) -> None:
        self.case = case
        batch, seq, heads, dk = case.q.shape
        self.sums = Grads(batch, seq, heads, dk, device=case.q.device, dtype=case.sum_dtype)
        self.sums.dq.total.fill_(fill)
        wire = PLAIN[dtype]
        size = case.k_shard.records * wire.record_bytes(case.geometry, "backward")
        buffer = torch.zeros(size, dtype=torch.uint8, device=case.q.device)
        buffer.view(dtype).fill_(fill)
        whole = RecordMap.whole(case.k_shard)
        self.view = wire.view(case.geometry, whole, buffer, "backward")
        self.sums.begin(self.view)

    def dkv(self) -> tuple[Tensor, Tensor]:
        parts = [
            self.view.keys_values(c, 0, chunk.count)
            for c, chunk in enumerate(self.case.k_shard.chunks)
        ]
        return torch.cat([dk for dk, _ in parts], 1), torch.cat([dv for _, dv in parts], 1)


MASKS = {
    "full": lambda s: masks.full(s, s + 40),
    "causal": lambda s: masks.causal(s),
    "causal, bottom-right": lambda s: masks.causal(s, s + 40, "bottom-right"),
    "causal, fewer keys": lambda s: masks.causal(s + 40, s),
    "window": lambda s: masks.window(s, left=20),
    "window, both sides": lambda s: masks.window(s, left=9, right=s // 3),
    "prefix": lambda s: masks.prefix_lm(s, s // 3),
    "documents": lambda s: masks.documents([0, s // 5, s // 5, s // 2, s]),
    "documents of unequal lengths": lambda s: masks.documents(
        [0, s // 5, s // 2, s], [0, s // 3, s // 3, s], align="bottom-right"
    ),
}


class KernelContract:
    """Subclass it as ``TestX`` and set ``kernel``; the rest has defaults for the CPU."""

    kernel: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device = "cpu"
    arch: tuple[int, int] | None = None
    wire: str | None = None
    seq = 150
    heads = (4, 2)
    head_dims = (64, 64)
    heads_and_dims: tuple[tuple[int, int, int, int], ...] = (
        (8, 2, 192, 128),  # cases.md 27
        (4, 1, 32, 32),
        (2, 2, 48, 80),
        (1, 1, 256, 256),
    )

    def make(self) -> BlockKernel:
        from ringfa4.kernels.registry import load_kernel

        return load_kernel(self.kernel)

    # ---- running -------------------------------------------------------------------------------

    def case(
        self,
        mask: Mask,
        *,
        dtype: torch.dtype | None = None,
        heads: tuple[int, int] | None = None,
        dims: tuple[int, int] | None = None,
        batch: int = 2,
        dlse: bool = False,
        chunks: int = 2,
        seed: int = 0,
    ) -> Case:
        """Gaussian inputs, each shard in ``chunks`` chunks of unlike lengths."""
        dtype = self.dtypes[0] if dtype is None else dtype
        heads_q, heads_kv = self.heads if heads is None else heads
        dk, dv = self.head_dims if dims is None else dims
        generator = torch.Generator().manual_seed(seed)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device)

        def cut(seq: int) -> Shard:
            return shard(*([seq // 3, seq - seq // 3] if chunks == 2 else [seq]))

        return Case(
            mask,
            gaussian(batch, mask.seq_q, heads_q, dk).to(dtype),
            gaussian(batch, mask.seq_k, heads_kv, dk).to(dtype),
            gaussian(batch, mask.seq_k, heads_kv, dv).to(dtype),
            gaussian(batch, mask.seq_q, heads_q, dv).to(dtype),
            gaussian(batch, heads_q, mask.seq_q).float() if dlse else None,
            cut(mask.seq_q),
            cut(mask.seq_k),
            self.wire,
        )

    def forward(self, case: Case, state: State | None = None) -> tuple[Tensor, Tensor]:
        kernel, state = self.make(), case.state() if state is None else state
        queries = kernel.prepare(case.q, case.q_shard)
        kernel.forward(queries, case.encoded(), case.tasks, case.scale, state)
        return state.finalise(case.q.dtype)

    def backward(
        self, case: Case, out: Tensor, lse: Tensor, grads: GradSums | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self.make()
        if grads is None:
            grads = case.grads(kernel.gradient_dtype(case.q.dtype))
        queries = kernel.prepare_backward(
            case.q, case.q_shard, out.to(case.q.dtype), case.dout, lse.to(case.sum_dtype), case.dlse
        )
        shard = case.encoded("backward")
        kernel.backward(queries, shard, case.tasks, case.scale, grads.sums)
        grads.sums.end()
        return grads.sums.finish(), *grads.dkv()

    # ---- judging -------------------------------------------------------------------------------

    def judge(self, name: str, got: Tensor, case: Case) -> None:
        """Hold one of out, lse, dq, dk, dv against the truth. Override it for MXFP8."""
        truth, plain = getattr(case.truth, name), getattr(case.plain, name)
        result = compare(got, truth)
        if name == "lse" and case.q.dtype in (torch.bfloat16, torch.float16):
            limit = LSE_LOW_PRECISION
        else:
            limit = bound(plain, truth, case.q.dtype)
        assert result.misplaced == 0, f"{name}: {result}"
        assert result.max_abs <= limit, f"{name}: {result}, allowed {limit:.2e}"

    def check(self, case: Case) -> None:
        """Forward, then backward from the kernel's own out and lse."""
        out, lse = self.forward(case)
        assert out.dtype == case.q.dtype
        dq, dk, dv = self.backward(case, out, lse)
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        for name, got in results.items():
            self.judge(name, got, case)

    # ---- the contract --------------------------------------------------------------------------

    def test_supports_what_it_is_tested_on(self) -> None:
        wire = wire_format(self.wire, self.dtypes[0]).name
        spec = KernelSpec(
            self.device, self.arch, self.dtypes[0], wire, *self.heads, *self.head_dims,
            frozenset({"lo", "hi", "many"}), True,
        )  # fmt: skip
        assert self.make().supports(spec) is None
        uneven = replace(spec, heads_q=self.heads[0] + 1)
        assert self.make().supports(uneven) is not None

    def test_gradients_travel_in_a_dtype_with_the_range_of_sums(self) -> None:
        """Narrower is a matter of precision, which all tests here judge; never of overflow."""
        for dtype in self.dtypes:
            given, sums = self.make().gradient_dtype(dtype), sum_dtype(dtype)
            assert given.itemsize <= sums.itemsize
            assert torch.finfo(given).smallest_normal == torch.finfo(sums).smallest_normal

    @pytest.mark.parametrize("name", MASKS)
    def test_masks(self, name: str) -> None:
        for dtype in self.dtypes:
            self.check(self.case(MASKS[name](self.seq), dtype=dtype, dlse=True))

    def test_heads_and_dims(self) -> None:
        for heads_q, heads_kv, dk, dv in self.heads_and_dims:
            self.check(
                self.case(masks.causal(self.seq), heads=(heads_q, heads_kv), dims=(dk, dv), batch=1)
            )

    def test_one_key_only(self) -> None:
        """out = v and dv = dout; dq and dk are 0, up to the rounding of two equal sums."""
        case = self.case(masks.full(1), chunks=1)
        out, lse = self.forward(case)
        dq, dk, dv = self.backward(case, out, lse)
        for name, got in (("out", out), ("lse", lse), ("dv", dv)):
            self.judge(name, got, case)
        q, k, v, dout = (x.double().abs().amax() for x in (case.q, case.k, case.v, case.dout))
        sums = float(v * dout) * case.v.shape[-1] * case.scale * self.rounding(case)
        group = case.q.shape[2] // case.k.shape[2]
        assert bool((dq.abs() <= sums * k).all())
        assert bool((dk.abs() <= sums * q * group).all())

    @pytest.mark.parametrize("length", [2, 127, 129])
    def test_tails(self, length: int) -> None:
        self.check(self.case(masks.full(length, 129), chunks=1))
        self.check(self.case(masks.causal(length + 40, length), chunks=1))

    def test_batch_rows_with_unlike_masks(self) -> None:
        s = self.seq
        rows = [masks.causal(s), masks.window(s, left=5, right=5), masks.documents([0, 50, s])]
        self.check(self.case(masks.stack(rows), batch=3, dlse=True))

    def test_no_tasks(self) -> None:
        case = self.case(masks.full(40, 30))
        case = replace(case, mask=Mask(40, 30, ((),)))
        out, lse = self.forward(case)
        assert torch.equal(out, torch.zeros_like(out))
        assert bool((lse == -torch.inf).all())
        for grad in self.backward(case, out, lse):
            assert torch.equal(grad, torch.zeros_like(grad))

    def test_rows_without_keys_and_keys_without_rows(self) -> None:
        s = self.seq
        mask = Mask(s, s, ((Band(20, 70, 10, 60), Band(90, 120, 60, 100, None, -30)),))
        self.check(self.case(mask, dlse=True))
        out, lse = self.forward(self.case(mask))
        assert bool((lse[:, :, :20] == -torch.inf).all()) and bool((out[:, :20] == 0).all())

    def test_any_strides(self) -> None:
        case = self.case(masks.causal(self.seq), dlse=True)

        def scattered(x: Tensor) -> Tensor:
            """The same values with heads outermost and every second element of a wider tensor."""
            wide = x.new_full((x.shape[2], x.shape[0], x.shape[1], 2 * x.shape[3]), math.nan)
            view = wide[..., ::2].permute(1, 2, 0, 3)
            view.copy_(x)
            return view

        strided = replace(case, q=scattered(case.q), dout=scattered(case.dout))
        out, lse = self.forward(case)
        for a, b in zip(self.forward(strided), (out, lse), strict=True):
            assert torch.equal(a, b)
        results = self.backward(strided, scattered(out), lse), self.backward(case, out, lse)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    def test_repeats_to_the_bit(self) -> None:
        case = self.case(masks.window(self.seq, left=40), dlse=True)
        first, second = self.forward(case), self.forward(case)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(self.backward(case, *first), self.backward(case, *first), strict=True):
            assert torch.equal(a, b)

    def test_merges_into_what_the_state_holds(self) -> None:
        """Keys one by one chunk, in as many calls, give what one call gives; so do gradients."""
        case = self.case(masks.causal(self.seq, self.seq + 40, "bottom-right"), dlse=True)
        kernel, state = self.make(), case.state()
        grads = case.grads(kernel.gradient_dtype(case.q.dtype))
        queries, encoded = kernel.prepare(case.q, case.q_shard), case.encoded()
        for task in case.tasks:
            kernel.forward(queries, encoded, [task], case.scale, state)
        out, lse = state.finalise(case.q.dtype)
        self.judge("out", out, case)
        self.judge("lse", lse, case)
        queries = kernel.prepare_backward(
            case.q, case.q_shard, out, case.dout, lse.to(case.sum_dtype), case.dlse
        )
        for task in case.tasks:
            kernel.backward(queries, case.encoded("backward"), [task], case.scale, grads.sums)
        grads.sums.end()
        for name, got in zip(("dq", "dk", "dv"), (grads.sums.finish(), *grads.dkv()), strict=True):
            self.judge(name, got, case)

    def test_touches_nothing_outside_its_tasks(self) -> None:
        s = self.seq
        mask = Mask(s, s, ((Band(20, 70, 10, 60, None, 0), Band(90, 120, 60, 100)),))
        case = replace(self.case(mask), q_shard=shard(s), k_shard=shard(s))
        rows = torch.ones(s, dtype=torch.bool)
        keys = rows.clone()
        rows[20:120] = keys[10:100] = (
            False  # the task's ranges; between bands it may write identities
        )
        kernel, state = self.make(), case.state(SENTINEL)
        grads = case.grads(kernel.gradient_dtype(case.q.dtype), SENTINEL)
        queries = kernel.prepare(case.q, case.q_shard)
        kernel.forward(queries, case.encoded(), case.tasks, case.scale, state)
        for x in (state.acc[:, rows], state.max[:, :, rows], state.sum[:, :, rows]):
            assert bool((x == SENTINEL).all())
        truth = case.truth
        queries = kernel.prepare_backward(
            case.q,
            case.q_shard,
            truth.out.to(case.q.dtype),
            case.dout,
            truth.lse.to(case.sum_dtype),
            None,
        )
        encoded = case.encoded("backward")
        kernel.backward(queries, encoded, case.tasks, case.scale, grads.sums)
        for x in (grads.sums.dq.total[:, rows], *(x[:, keys] for x in grads.dkv())):
            assert bool((x == SENTINEL).all())

    def test_dead_rows_in_backward(self) -> None:
        """lse = -inf: P is 0, whatever the row holds."""
        case = self.case(masks.causal(self.seq), dlse=True)
        truth = case.truth
        lse, dout, dlse = truth.lse.clone(), case.dout.clone(), case.dlse.clone()
        lse[:, :, 100:110] = -torch.inf
        dout[:, 105] = dlse[:, :, 106] = math.nan
        dq, dk, dv = self.backward(replace(case, dout=dout, dlse=dlse), truth.out, lse)
        assert bool((dq[:, 100:110] == 0).all())
        exact = oracles.gradients_given(
            case.q, case.k, case.v, case.mask, truth.out, lse, case.dout, case.dlse
        )
        for name, got, want in zip(("dq", "dk", "dv"), (dq, dk, dv), exact, strict=True):
            assert bool(torch.isfinite(got).all()), name
            assert compare(got, want).sqnr_db > self.least_db(case), name

    def rounding(self, case: Case) -> float:
        """Relative error of rounding an operand."""
        return half_ulp(case.q.dtype)

    def least_db(self, case: Case) -> float:
        """SQNR of a result whose every element is wrong by a few roundings of the dtype."""
        return -20 * math.log10(16 * half_ulp(case.q.dtype))

    def test_external_lse(self) -> None:
        """The lse of a merge over many more keys: P is small everywhere, its scale is not known."""
        for dtype in self.dtypes:
            case = self.case(masks.causal(self.seq), dtype=dtype)
            truth = case.truth
            reached = {}
            for rise in (0.0, 8.3):
                lse = (truth.lse + rise).to(case.sum_dtype)
                want = oracles.gradients_given(
                    case.q, case.k, case.v, case.mask, truth.out, lse, case.dout
                )
                got = self.backward(case, truth.out, lse)
                reached[rise] = [compare(a, b).sqnr_db for a, b in zip(got, want, strict=True)]
            for near, far in zip(reached[0.0], reached[8.3], strict=True):
                assert far > near - self.external_lse_db, reached

    external_lse_db = 6.0
    """S - lse is rounded to fp32 a binade higher than before: at most twice the error in P."""

    def test_one_key_takes_all(self) -> None:
        """One key at logit + 14 with V = 0, V elsewhere about 1: out is made of the small P."""
        case = self.case(masks.full(40, self.many_keys), batch=1)
        k, v, q = case.k.clone(), case.v + 1, case.q.clone()
        q[..., 0], k[..., 0] = 1, 0
        k[:, 7] = 0
        k[:, 7, :, 0] = 14 / case.scale
        v[:, 7] = 0
        case = replace(case, q=q, k=k, v=v)
        self.judge_one_key(self.forward(case)[0], case)

    many_keys = 1024
    """A block of 32 that shares its scale with the heavy key may lose its other 31."""

    def judge_one_key(self, out: Tensor, case: Case) -> None:
        self.judge("out", out, case)

    @pytest.mark.parametrize("name", ["causal", "window", "full"])
    @pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout"])
    def test_nan_reaches_what_depends_on_it_only(self, name: str, poisoned: str) -> None:
        case = self.case(MASKS[name](self.seq), dlse=True)
        token, head = 60, 1
        x = getattr(case, poisoned).clone()
        x[1, token, head, 3] = math.nan
        case = replace(case, **{poisoned: x})
        group = case.q.shape[2] // case.k.shape[2]
        sees = oracles.allowed(case.mask)[0]
        heads = range(head * group, head * group + group) if poisoned in "kv" else [head]
        rows = sees[:, token] if poisoned in "kv" else torch.arange(sees.shape[0]) == token

        def flags(seq: int, count: int, heads: range | list[int], tokens: Tensor) -> Tensor:
            marked = torch.zeros(2, seq, count, dtype=torch.bool)
            for h in heads:
                marked[1, :, h] = tokens
            return marked

        def nan_tokens(x: Tensor) -> Tensor:
            return torch.isnan(x).any(-1).cpu()

        spoilt = flags(sees.shape[0], case.q.shape[2], heads, rows)
        out, lse = self.forward(case)
        in_forward = poisoned != "dout"
        assert torch.equal(nan_tokens(out), spoilt & in_forward)
        in_lse = spoilt.transpose(1, 2) & (poisoned in "qk")
        assert torch.equal(torch.isnan(lse).cpu(), in_lse)
        dq, dk, dv = self.backward(case, out, lse)
        keys = sees[rows].any(0)
        kv_heads = sorted({h // group for h in heads})
        reached = flags(sees.shape[1], case.k.shape[2], kv_heads, keys)
        assert torch.equal(nan_tokens(dq), spoilt)
        assert torch.equal(nan_tokens(dk), reached)
        assert torch.equal(nan_tokens(dv), reached & (poisoned != "v"))
