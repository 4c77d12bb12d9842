"""What the fused kernels must give, on whatever runs them: a card, or the PTX executor.

Subclasses say where tensors live and within which context the kernels run; the reference is always
PyTorch's operators on the CPU. Bytes and decoded values must be equal, merged states equal to
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ringfa4.kernels.cute import host
from ringfa4.kernels.native import fill_rows, guarded
from ringfa4.mx.formats import ScaleRounding
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, MxWire
from ringfa4.shard import Chunk, Shard
from ringfa4.state import State
from ringfa4.testing.compare import compare
from ringfa4.wire import PLAIN, Geometry, RecordMap

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIRES = pytest.mark.parametrize("wire", [MXFP8, MXFP8_1X32], ids=lambda w: w.name)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


def shard(*lengths: int) -> Shard:
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return Shard(tuple(Chunk(a, n) for a, n in zip(starts, lengths, strict=True)))


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Magnitudes over the dtype's range, zeros, blocks of zeros, NaN and infinities."""
    gen = torch.Generator().manual_seed(seed)
    widest = 12 if dtype == torch.float16 else 60
    exponent = torch.randint(-widest, widest, shape[:-1], generator=gen).unsqueeze(-1)
    x = torch.randn(*shape, generator=gen) * torch.exp2(exponent.float())
    x[torch.rand(*shape, generator=gen) < 0.05] = 0
    x[:, 5:70, 0] = 0
    x = x.to(dtype)
    x[0, 3, -1, 7], x[-1, 40, 0, 0], x[0, 90, -1, -1] = math.nan, math.inf, -math.inf
    x[0, 91, -1, 1] = -math.nan
    return x


def encoded(wire: MxWire, k: Tensor, v: Tensor, own: Shard, direction: str) -> Tensor:
    geometry = Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)
    size = own.records * wire.record_bytes(geometry, direction)
    buffer = torch.full((size,), 0xA5, dtype=torch.uint8, device=k.device)
    wire.encode(k, v, own, buffer, direction)
    return buffer


def partial(
    batch: int, n: int, heads: int, dv: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """out and lse, with dead rows (lse = -inf) whose out is NaN."""
    gen = torch.Generator().manual_seed(seed)
    out = torch.randn(batch, n, heads, dv, generator=gen).to(dtype)
    lse = 6 * torch.randn(batch, heads, n, generator=gen)
    dead = torch.rand(batch, heads, n, generator=gen) < 0.2
    lse[dead] = -math.inf
    return out.masked_fill(dead.transpose(1, 2).unsqueeze(-1), math.nan), lse


Part = tuple[slice, Tensor, Tensor]


def state_of(parts: list[Part], device: torch.device, dtype: torch.dtype) -> State:
    """77 tokens, on memory full of NaN."""
    batch, _, heads, dv = parts[0][1].shape
    state = State(batch, 77, heads, dv, device=device, dtype=dtype)
    for x in (state.acc, state.max, state.sum):
        x.fill_(math.nan)
    return state


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], merges: int) -> None:
    """For each merge a rounding of fp32 and those of ex2.approx, 2^-22 for each weight."""
    for a, b in zip(got, want, strict=True):
        result = compare(a.cpu(), b)
        assert result.misplaced == 0, result
        assert result.max_abs <= merges * 2.0**-20 * float(b[b.isfinite()].abs().max()), result


class CuteContract:
    """Subclass it as ``TestX``."""

    device = torch.device("cpu")
    tokens = (129, 128, 43)
    dims: tuple[tuple[int, int], ...] = ((128, 128), (64, 96), (32, 256), (192, 128))
    all_bf16 = 1 << 16
    """How many of the bit patterns the exhaustive test takes, evenly spread."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Where the kernels run."""
        yield

    @pytest.fixture(params=["hardware", "integers"])
    def conversion(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """E4M3 converted by the hardware, or as on SM80, which cannot."""
        if request.param == "integers":
            monkeypatch.setattr(host, "_native", lambda device: False)
        return str(request.param)

    def encode(self, wire: MxWire, k: Tensor, v: Tensor, own: Shard, direction: str) -> Tensor:
        k, v = k.to(self.device), v.to(self.device)
        with self.running():
            return encoded(wire, k, v, own, direction).cpu()

    # ---- MXFP8 ---------------------------------------------------------------------------------

    @DIRECTIONS
    @WIRES
    def test_the_bytes_are_those_of_the_reference(
        self, wire: MxWire, direction: str, conversion: str
    ) -> None:
        own = shard(*self.tokens)
        for dims in self.dims:
            for seed, dtype in enumerate(DTYPES):
                k, v = (values(2, len(own), 3, d, dtype=dtype, seed=seed + d) for d in dims)
                want = encoded(wire, k, v, own, direction)
                got = self.encode(wire, k, v, own, direction)
                wrong = (got != want).nonzero()
                assert not len(wrong), (dims, dtype, len(wrong), wrong[:8].flatten().tolist())

    @pytest.mark.parametrize("scales", ["rceil", "floor"])
    def test_every_bf16_gives_the_right_scale_and_code(self, scales: str, conversion: str) -> None:
        """Each bit pattern leads one block of 1 x 32, so its scale is decided by it alone."""
        wire = MxWire("every bf16", tiles=False, rounding=ScaleRounding(scales))
        patterns = torch.arange(0, 1 << 16, (1 << 16) // self.all_bf16, dtype=torch.int32)
        k = torch.zeros(1, len(patterns), 1, 32, dtype=torch.bfloat16)
        k[0, :, 0, 0] = patterns.to(torch.int16).view(torch.bfloat16)
        k[0, :, 0, 1] = k[0, :, 0, 0] / 3
        own = shard(len(patterns))
        want = encoded(wire, k, k, own, "forward")
        assert torch.equal(self.encode(wire, k, k, own, "forward"), want)

    def test_scales_of_fp32_at_their_edges(self) -> None:
        """Around every 1.75 * 2^e, where the scale steps, also where amax / 448 is subnormal."""
        exponents = torch.arange(0, 254, dtype=torch.int32) << 23
        steps = torch.arange(-3, 4, dtype=torch.int32) + 0x600000
        bits = (exponents.unsqueeze(1) + steps).flatten()
        k = torch.zeros(1, len(bits), 1, 32)
        k[0, :, 0, 5] = bits.view(torch.float32)
        own = shard(len(bits))
        want = encoded(MXFP8_1X32, k, k, own, "forward")
        assert torch.equal(self.encode(MXFP8_1X32, k, k, own, "forward"), want)

    def test_strides_do_not_matter(self) -> None:
        own = shard(200)
        wide = torch.randn(2, 200, 8, 256).to(torch.bfloat16).to(self.device)
        for k in (wide[:, :, ::2, 64:192], wide[..., ::2], wide[:, :, :4, 1:129]):
            want = encoded(MXFP8, k.cpu(), k.cpu(), own, "backward")
            with self.running():
                assert torch.equal(encoded(MXFP8, k, k, own, "backward").cpu(), want)

    @DIRECTIONS
    @WIRES
    def test_decoded_values_are_those_of_the_reference(
        self, wire: MxWire, direction: str, conversion: str
    ) -> None:
        """Of random bytes: every code and every scale, NaN included."""
        own = shard(*self.tokens)
        whole = RecordMap.whole(own)
        for dtype in DTYPES:
            for dims in self.dims:
                geometry = Geometry(2, 3, *dims, dtype)
                gen = torch.Generator().manual_seed(sum(dims))
                size = own.records * wire.record_bytes(geometry, direction)
                noise = torch.randint(0, 256, (size,), generator=gen, dtype=torch.uint8)
                want = wire.view(geometry, whole, noise, direction)
                got = wire.view(geometry, whole, noise.to(self.device), direction)
                for operand in want.layout.operands:
                    for chunk, start, stop in whole.tokens():
                        where = operand.which, operand.along, chunk, start, stop, dtype
                        b = want.operand(*where)
                        with self.running():
                            a = got.operand(*where).cpu()
                        nan = torch.isnan(b)
                        assert torch.equal(torch.isnan(a), nan), where
                        assert torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0)), where

    # ---- merging -------------------------------------------------------------------------------

    def merged(self, parts: list[Part], *, waiting: bool = True) -> State:
        """Merged as they come: by fours, or with ``waiting`` False each for itself."""
        state = state_of(parts, self.device, torch.float32)
        with self.running():
            for rows, out, lse in parts:
                state.merge(None, rows, out.to(self.device), lse.to(self.device))
                if not waiting:
                    state.settle()
            state.settle()
        return state

    @staticmethod
    def reference(parts: list[Part]) -> tuple[Tensor, Tensor]:
        state = state_of(parts, torch.device("cpu"), torch.float64)
        for rows, out, lse in parts:
            state.merge(None, rows, out, lse)
        return state.finalise(torch.float64)

    @pytest.mark.parametrize("heads, dv", [(8, 128), (3, 96), (1, 64), (5, 256), (2, 8), (6, 192)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_merging_keeps_the_algebra(self, heads: int, dv: int, dtype: torch.dtype) -> None:
        ranges = [slice(0, 50), slice(20, 77), slice(3, 4), slice(0, 77), slice(9, 60)]
        parts = [
            (rows, *partial(2, rows.stop - rows.start, heads, dv, dtype, seed))
            for seed, rows in enumerate(ranges)
        ]
        for waiting in (True, False):
            got = self.merged(parts, waiting=waiting).finalise(torch.float32)
            close(got, self.reference(parts), len(parts))

    def test_partials_that_wait_are_those_of_their_batch_row_and_dtype(self) -> None:
        """Mixed, some of single batch rows, some in fp32, in any order: nothing is lost."""
        state, want = (
            State(2, 77, 3, 64, device=device, dtype=dtype)
            for device, dtype in (
                (self.device, torch.float32),
                (torch.device("cpu"), torch.float64),
            )
        )
        steps = [(None, 0, 77), (0, 5, 50), (0, 0, 77), (None, 40, 77), (1, 3, 30), (1, 0, 2)]
        for n, (row, start, stop) in enumerate([*steps, *reversed(steps)]):
            dtype = torch.float32 if n % 5 == 2 else torch.bfloat16
            out, lse = partial(2 if row is None else 1, stop - start, 3, 64, dtype, n)
            want.merge(row, slice(start, stop), out, lse)
            with self.running():
                state.merge(row, slice(start, stop), out.to(self.device), lse.to(self.device))
        with self.running():
            state.settle()
        close(state.finalise(torch.float32), want.finalise(torch.float64), 2 * len(steps))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
    def test_the_last_pass_finalises(self, dtype: torch.dtype, count: int) -> None:
        """Rows that waiting partials reach, that earlier ones reached, and that nothing did."""
        ranges = [slice(5, 50), slice(20, 70), slice(5, 70), slice(60, 61), slice(5, 9)] * 2
        parts = [
            (rows, *partial(2, rows.stop - rows.start, 6, 96, dtype, seed))
            for seed, rows in enumerate(ranges[: count + 1])
        ]
        state = state_of(parts, self.device, torch.float32)
        with self.running():
            for n, (rows, out, lse) in enumerate(parts):
                state.merge(None, rows, out.to(self.device), lse.to(self.device))
                if n == 0 and count % 2 == 0:
                    state.settle()
            out, lse = (x.cpu() for x in state.finalise(dtype))
        want, want_lse = self.reference(parts)
        assert out.dtype == dtype and bool((lse[..., :5] == -math.inf).all())
        close((lse,), (want_lse,), len(parts))
        result = compare(out, want)
        ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
        largest = float(want.abs().max())
        assert result.misplaced == 0, result
        assert result.max_abs <= (ulp + len(parts) * 2.0**-20) * largest, result

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_several_partials_at_once_are_several_merges(self, count: int) -> None:
        whole = slice(0, 77)
        parts = [(whole, *partial(2, 77, 6, 128, torch.bfloat16, n)) for n in range(count + 1)]
        rest = [(out.to(self.device), lse.to(self.device)) for _, out, lse in parts[1:]]
        later = self.merged(parts[:1])
        first = state_of(parts, self.device, torch.float32)
        for row in range(2):
            first.written.claim(row, 0, 77)
        with self.running():
            host.merge(later.acc, later.max, later.sum, rest, first=False)
            host.merge(first.acc, first.max, first.sum, rest, first=True)
        close(later.finalise(torch.float32), self.reference(parts), count + 1)
        close(first.finalise(torch.float32), self.reference(parts[1:]), count)

    def test_nan_alive_reaches_its_row_only(self) -> None:
        out, lse = partial(1, 77, 4, 64, torch.bfloat16, 0)
        out, lse = torch.nan_to_num(out), torch.nan_to_num(lse, neginf=0.0)
        bad_out, bad_lse = out.clone(), lse.clone()
        bad_out[0, 30, 2, 5], bad_lse[0, 1, 50] = math.nan, math.nan
        whole = slice(0, 77)
        state = self.merged([(whole, out, lse), (whole, bad_out, bad_lse)])
        with self.running():
            at_once = state.finalise(torch.bfloat16)
        state = self.merged([(whole, out, lse), (whole, bad_out, bad_lse)])
        for got, got_lse in (at_once, state.finalise(torch.float32)):
            assert torch.isnan(got).any(-1).nonzero().tolist() == [[0, 30, 2], [0, 50, 1]]
            assert torch.isnan(got_lse).nonzero().tolist() == [[0, 1, 50]]

    def test_merging_repeats_to_the_bit(self) -> None:
        parts = [(slice(0, 77), *partial(1, 77, 4, 128, torch.bfloat16, n)) for n in range(3)]
        first, second = self.merged(parts), self.merged(parts)
        for name in ("acc", "max", "sum"):
            assert torch.equal(getattr(first, name), getattr(second, name))

    @pytest.mark.parametrize("heads, d", [(3, 96), (8, 128), (1, 8)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients_are_assigned_then_added(
        self, heads: int, d: int, dtype: torch.dtype
    ) -> None:
        """Into rows of any strides, as gradient records have them; sums are exact to the bit."""
        wide = torch.full((131, 2, heads * (d + 8)), math.nan).to(self.device)
        into = wide[..., : heads * d].unflatten(-1, (heads, d)).transpose(0, 1)[:, 1:120]
        first, second = (torch.randn(2, 119, heads, d).to(dtype) for _ in range(2))
        with self.running():
            host.add(into, None, [first.to(self.device)])
            host.add(into, into, [second.to(self.device)])
        assert torch.equal(into.cpu(), first.float() + second.float())
        assert bool(torch.isnan(wide[:1]).all()) and bool(torch.isnan(wide[120:]).all())
        assert bool(torch.isnan(wide[..., heads * d :]).all())

    @pytest.mark.parametrize("heads, d", [(3, 96), (8, 128), (1, 8)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients_that_travel_as_they_are_keep_their_bits(
        self, heads: int, d: int, dtype: torch.dtype
    ) -> None:
        """Assigned to rows of their own dtype: every NaN too, and nothing beside them."""
        words = torch.int32 if dtype == torch.float32 else torch.int16
        generator = torch.Generator().manual_seed(d)
        limits = torch.iinfo(words)
        sizes = (131, 2, heads * (d + 8)), (2, 119, heads, d)
        wide, x = (
            torch.randint(limits.min, limits.max, size, generator=generator, dtype=words)
            for size in sizes
        )
        want, got = wide.clone(), wide.to(self.device)

        def rows(x: Tensor) -> Tensor:
            return x[..., : heads * d].unflatten(-1, (heads, d)).transpose(0, 1)[:, 1:120]

        rows(want).copy_(x)
        into, part = rows(got).view(dtype), x.to(self.device).view(dtype)
        assert host.adds(into, None, [part])
        assert host.adds(into, into, [part]) == (dtype == torch.float32)
        with self.running():
            host.add(into, None, [part])
        assert torch.equal(got.cpu(), want)

    @pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parts_added_at_once_are_those_added_one_by_one(
        self, dtype: torch.dtype, into: torch.dtype
    ) -> None:
        """To the bit, in their order, with strides of their own; what is not to be read is NaN."""
        generator = torch.Generator().manual_seed(0)
        shape = batch, tokens, heads, d = 2, 119, 3, 40
        sums = 100 * torch.randn(shape, generator=generator)
        parts, there = [], []
        for n in range(host.PARTIALS):
            wide = torch.full((tokens, batch, heads, d + 8 * n), math.nan)
            wide[..., :d] = torch.randn(tokens, batch, heads, d, generator=generator)
            wide = wide.to(dtype)
            parts.append(wide[..., :d].transpose(0, 1))
            there.append(wide.to(self.device)[..., :d].transpose(0, 1))
        for based in (True, False):
            for count in range(1, len(parts) + 1):
                want = sums.clone() if based else parts[0].float()
                for x in parts[0 if based else 1 : count]:
                    want = want + x.float()
                base = sums.to(self.device) if based else None
                itself = based and into == torch.float32
                got = base if itself else torch.full(shape, math.nan, dtype=into).to(self.device)
                assert got is not None and host.adds(got, base, there[:count])
                with self.running():
                    host.add(got, base, there[:count])
                assert torch.equal(got.cpu(), want.to(into)), (based, count)
                assert base is None or itself or torch.equal(base.cpu(), sums)
        assert not host.adds(sums, None, [*parts, parts[0]]), "there is no kernel for five"

    @pytest.mark.parametrize("heads, d", [(3, 96), (8, 128), (1, 8)])
    def test_sums_are_rounded_as_the_operators_round_them(self, heads: int, d: int) -> None:
        """fp32 into bf16: halfway cases, infinities and NaN among them."""
        generator = torch.Generator().manual_seed(d)
        wide = torch.randn(131, 2, heads * (d + 8), generator=generator)
        wide.view(torch.int32)[:, 0] &= -0x8000  # bits end in 1 or in zeros: many are halfway
        wide[3, 0, :4] = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38])
        x = wide[..., : heads * d].unflatten(-1, (heads, d)).transpose(0, 1)
        got = torch.zeros(2, 131, heads, d, dtype=torch.bfloat16, device=self.device)
        part = x.to(self.device)
        assert host.adds(got, None, [part])
        assert not host.adds(got, got, [part])
        assert not host.adds(got.half(), None, [part]), "fp16 would saturate"
        with self.running():
            host.add(got, None, [part])
        assert torch.equal(got.cpu().float().nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("heads, dk, dv", [(2, 128, 64), (3, 40, 8), (1, 4, 6)])
    def test_records_as_they_are_are_those_of_the_operators(
        self, heads: int, dk: int, dv: int, dtype: torch.dtype
    ) -> None:
        """Every bit, padding too, from tensors with other strides; rows of 8 or 12 bytes are left
        to the operators.
        """
        own = Shard((Chunk(0, 130), Chunk(256, 64)))
        generator = torch.Generator().manual_seed(dk)
        k, v = (
            torch.randn(194, 2, heads, d, generator=generator).to(dtype).transpose(0, 1)
            for d in (dk, dv)
        )
        geometry, wire = Geometry(2, heads, dk, dv, dtype), PLAIN[dtype]
        size = own.records * wire.record_bytes(geometry, "forward")
        want = torch.full((size,), 0xFF, dtype=torch.uint8)
        got = want.to(self.device)
        wire.encode(k, v, own, want, "forward")
        with self.running():
            wire.encode(k.to(self.device), v.to(self.device), own, got, "forward")
        assert torch.equal(got.cpu(), want)

    # ---- rows that are not finite --------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("d", [8, 80, 96, 256])
    def test_guarding_is_that_of_the_operators(self, dtype: torch.dtype, d: int) -> None:
        wide = values(2, 131, 6, d, dtype=dtype, seed=d)
        dead = torch.rand(2, 3, 131, generator=torch.Generator().manual_seed(1)) < 0.1
        for x in (wide[:, :, ::2], wide[:, :, :3].contiguous()):
            for given in (None, dead):
                for zero_found in (False, True):
                    want = guarded(x, given, zero_found=zero_found)
                    there = None if given is None else given.to(self.device)
                    here = x.to(self.device)
                    with self.running():
                        got = guarded(here, there, zero_found=zero_found)
                    assert torch.equal(got[1].cpu(), want[1])
                    assert torch.equal(*(torch.nan_to_num(y[0].cpu(), 1.5) for y in (got, want)))

    @pytest.mark.parametrize("value", [0.0, math.nan])
    def test_filling_changes_the_flagged_rows_only(self, value: float) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(2, 300, 5, 96).to(dtype).to(self.device)
            flags = (torch.rand(2, 5, 300) < 0.1).to(self.device)
            want = x.masked_fill(flags.transpose(1, 2).unsqueeze(-1), value)
            with self.running():
                fill_rows(x, flags, value)
            assert torch.equal(torch.isnan(x), torch.isnan(want))
            assert torch.equal(torch.nan_to_num(x, 7.0), torch.nan_to_num(want, 7.0))
