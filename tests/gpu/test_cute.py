"""The fused kernels on the card: bytes of MXFP8 records, decoded values, merged states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ringfa4.fused import fused, why_not
from ringfa4.kernels.native import fill_rows, guarded
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, MxWire
from ringfa4.shard import Chunk, Shard
from ringfa4.state import State
from ringfa4.testing.compare import compare
from ringfa4.wire import Geometry, RecordMap

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _there() -> None:
    if fused(DEVICE) is None:
        pytest.skip(str(why_not(DEVICE)))


@pytest.fixture(params=["hardware", "integers"])
def conversion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """E4M3 converted by the hardware, or as on SM80, which cannot."""
    if request.param == "integers":
        from ringfa4.kernels.cute import host

        monkeypatch.setattr(host, "_native", lambda device: False)
    return str(request.param)


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wire", [MXFP8, MXFP8_1X32], ids=lambda w: w.name)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (32, 256), (192, 128)])
def test_the_bytes_are_those_of_the_reference(
    dims: tuple[int, int], wire: MxWire, direction: str, conversion: str
) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        k, v = (values(2, 300, 3, d, dtype=dtype, seed=seed + d) for d in dims)
        own = shard(129, 128, 43)
        want = encoded(wire, k, v, own, direction)
        got = encoded(wire, k.to(DEVICE), v.to(DEVICE), own, direction).cpu()
        wrong = (got != want).nonzero()
        assert not len(wrong), (dtype, len(wrong), wrong[:8].flatten().tolist())


@pytest.mark.parametrize("scales", ["rceil", "floor"])
def test_every_bf16_gives_the_right_scale_and_code(scales: str, conversion: str) -> None:
    """Each bit pattern leads one block of 1 x 32, so its scale is decided by it alone."""
    from ringfa4.mx.formats import ScaleRounding

    wire = MxWire("every bf16", tiles=False, rounding=ScaleRounding(scales))
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    k = torch.zeros(1, 1 << 16, 1, 32, dtype=torch.bfloat16)
    k[0, :, 0, 0] = patterns
    k[0, :, 0, 1] = patterns / 3
    own = shard(1 << 16)
    want = encoded(wire, k, k, own, "forward")
    got = encoded(wire, k.to(DEVICE), k.to(DEVICE), own, "forward").cpu()
    assert torch.equal(got, want)


def test_scales_of_fp32_at_their_edges() -> None:
    """Around every 1.75 * 2^e, where the scale steps, also where amax / 448 is subnormal."""
    exponents = torch.arange(0, 254, dtype=torch.int32) << 23
    steps = torch.arange(-3, 4, dtype=torch.int32) + 0x600000
    bits = (exponents.unsqueeze(1) + steps).flatten()
    k = torch.zeros(1, len(bits), 1, 32)
    k[0, :, 0, 5] = bits.view(torch.float32)
    own = shard(len(bits))
    want = encoded(MXFP8_1X32, k, k, own, "forward")
    got = encoded(MXFP8_1X32, k.to(DEVICE), k.to(DEVICE), own, "forward").cpu()
    assert torch.equal(got, want)


def test_strides_do_not_matter() -> None:
    own = shard(200)
    wide = torch.randn(2, 200, 8, 256, dtype=torch.float32, device=DEVICE).to(torch.bfloat16)
    for k in (wide[:, :, ::2, 64:192], wide[..., ::2], wide[:, :, :4, 1:129]):
        want = encoded(MXFP8, k.cpu(), k.cpu(), own, "backward")
        assert torch.equal(encoded(MXFP8, k, k, own, "backward").cpu(), want)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("wire", [MXFP8, MXFP8_1X32], ids=lambda w: w.name)
def test_decoded_values_are_those_of_the_reference(
    wire: MxWire, direction: str, conversion: str
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dims in ((128, 128), (64, 256), (96, 32)):
            own = shard(129, 300)
            geometry = Geometry(2, 3, *dims, dtype)
            gen = torch.Generator().manual_seed(sum(dims))
            size = own.records * wire.record_bytes(geometry, direction)
            noise = torch.randint(0, 256, (size,), generator=gen, dtype=torch.uint8)
            whole = RecordMap.whole(own)
            want = wire.view(geometry, whole, noise, direction)
            got = wire.view(geometry, whole, noise.to(DEVICE), direction)
            for operand in want.layout.operands:
                for chunk, start, stop in whole.tokens():
                    where = operand.which, operand.along, chunk, start, stop, dtype
                    a, b = got.operand(*where).cpu(), want.operand(*where)
                    nan = torch.isnan(b)
                    assert torch.equal(torch.isnan(a), nan), where
                    assert torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0)), where


# ---- merging ------------------------------------------------------------------------------------


def partial(
    batch: int, n: int, heads: int, dv: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """out and lse, with dead rows (lse = -inf) whose out is NaN, and one row that is NaN alive."""
    gen = torch.Generator().manual_seed(seed)
    out = torch.randn(batch, n, heads, dv, generator=gen).to(dtype)
    lse = 6 * torch.randn(batch, heads, n, generator=gen)
    dead = torch.rand(batch, heads, n, generator=gen) < 0.2
    lse[dead] = -math.inf
    out = out.masked_fill(dead.transpose(1, 2).unsqueeze(-1), math.nan)
    return out, lse


def merged(parts: list[tuple[slice, Tensor, Tensor]], device: torch.device, wide: bool) -> State:
    batch, heads, dv = parts[0][1].shape[0], *parts[0][1].shape[2:]
    dtype = torch.float64 if wide else torch.float32
    state = State(batch, 77, heads, dv, device=device, dtype=dtype)
    for x in (state.acc, state.max, state.sum):
        x.fill_(math.nan)
    for rows, out, lse in parts:
        state.merge(None, rows, out.to(device), lse.to(device))
    return state


@pytest.mark.parametrize("heads, dv", [(8, 128), (3, 96), (1, 64), (5, 256), (2, 8), (6, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merging_keeps_the_algebra(heads: int, dv: int, dtype: torch.dtype) -> None:
    ranges = [slice(0, 50), slice(20, 77), slice(3, 4), slice(0, 77), slice(9, 60)]
    parts = [
        (rows, *partial(2, rows.stop - rows.start, heads, dv, dtype, seed))
        for seed, rows in enumerate(ranges)
    ]
    out, lse = (x.cpu() for x in merged(parts, DEVICE, False).finalise(torch.float32))
    want_out, want_lse = merged(parts, CPU, True).finalise(torch.float64)
    # Five merges: a rounding of fp32 and two of ex2.approx (2^-22) for each weight.
    for got, want in ((out, want_out), (lse, want_lse)):
        result = compare(got, want)
        assert result.misplaced == 0, result
        assert result.max_abs <= 5 * 2.0**-20 * float(want[want.isfinite()].abs().max()), result


def test_several_partials_at_once_are_several_merges() -> None:
    host = fused(DEVICE)
    assert host is not None
    for count in range(1, 5):
        parts = [partial(2, 77, 6, 128, torch.bfloat16, seed) for seed in range(count + 1)]
        whole = slice(0, 77)
        want = merged([(whole, *part) for part in parts], CPU, True)
        got = merged([(whole, *parts[0])], DEVICE, False)
        rest = [(o.to(DEVICE), e.to(DEVICE)) for o, e in parts[1:]]
        host.merge(got.acc, got.max, got.sum, rest, first=False)
        first = State(2, 77, 6, 128, device=DEVICE)
        host.merge(first.acc, first.max, first.sum, rest, first=True)
        first.written.claim(0, 0, 77), first.written.claim(1, 0, 77)
        again = merged([(whole, *part) for part in parts[1:]], CPU, True)
        for a, b in ((got, want), (first, again)):
            for x, y in zip(a.finalise(torch.float32), b.finalise(torch.float64), strict=True):
                result = compare(x.cpu(), y)
                assert result.misplaced == 0, result
                assert result.max_abs <= 5 * 2.0**-20 * float(y[y.isfinite()].abs().max())


def test_nan_alive_reaches_its_row_only() -> None:
    out, lse = partial(1, 77, 4, 64, torch.bfloat16, 0)
    lse = lse.masked_fill(lse == -math.inf, 0.0).contiguous()
    out = torch.nan_to_num(out)
    bad_out, bad_lse = out.clone(), lse.clone()
    bad_out[0, 30, 2, 5], bad_lse[0, 1, 50] = math.nan, math.nan
    whole = slice(0, 77)
    state = merged([(whole, out, lse), (whole, bad_out, bad_lse)], DEVICE, False)
    got, got_lse = (x.cpu() for x in state.finalise(torch.float32))
    nan = torch.isnan(got).any(-1)
    assert nan.nonzero().tolist() == [[0, 30, 2], [0, 50, 1]]
    assert torch.isnan(got_lse).nonzero().tolist() == [[0, 1, 50]]


def test_merging_repeats_to_the_bit() -> None:
    parts = [(slice(0, 77), *partial(1, 77, 4, 128, torch.bfloat16, seed)) for seed in range(3)]
    first, second = merged(parts, DEVICE, False), merged(parts, DEVICE, False)
    assert torch.equal(first.max, second.max) and torch.equal(first.sum, second.sum)
    assert torch.equal(first.acc, second.acc)


# ---- rows that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d", [8, 80, 96, 128, 256])
def test_guarding_is_that_of_the_operators(dtype: torch.dtype, d: int) -> None:
    wide = values(2, 131, 6, d, dtype=dtype, seed=d)
    dead = torch.rand(2, 3, 131, generator=torch.Generator().manual_seed(1)) < 0.1
    for x in (wide[:, :, ::2], wide[:, :, :3].contiguous()):
        for given in (None, dead):
            for zero_found in (False, True):
                want = guarded(x, given, zero_found=zero_found)
                there = None if given is None else given.to(DEVICE)
                got = guarded(x.to(DEVICE), there, zero_found=zero_found)
                assert torch.equal(got[1].cpu(), want[1])
                assert torch.equal(*(torch.nan_to_num(y[0].cpu(), 1.5) for y in (got, want)))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_filling_changes_the_flagged_rows_only(value: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 300, 5, 96, device=DEVICE).to(dtype)
        flags = torch.rand(2, 5, 300, device=DEVICE) < 0.1
        want = x.masked_fill(flags.transpose(1, 2).unsqueeze(-1), value)
        fill_rows(x, flags, value)
        assert torch.equal(torch.isnan(x), torch.isnan(want))
        assert torch.equal(torch.nan_to_num(x, 7.0), torch.nan_to_num(want, 7.0))
