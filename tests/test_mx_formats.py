"""MX numbers against their definition: every E4M3 and E8M0 code, golden cases, torchao's bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringfa4.mx.formats import (
    ALONG_D,
    ALONG_SEQ,
    ATOM,
    BLOCK,
    E4M3,
    E8M0,
    TILE,
    BlockShape,
    ScaleRounding,
)
from ringfa4.mx.layout import atoms, from_atoms, operand_scales, to_atoms
from ringfa4.mx.quantise import block_amax, dequantise, look_up, quantise, rounded, scale_bytes

RCEIL, FLOOR = ScaleRounding.RCEIL, ScaleRounding.FLOOR
SHAPES = [ALONG_D, ALONG_SEQ, TILE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the formats --------------------------------------------------------------------------------


def test_e4m3_facts():
    assert E4M3.max == 448 == 1.75 * 2**8 and E4M3.emax == 8
    assert (E4M3.min_normal, E4M3.min_subnormal) == (2**-6, 2**-9)
    assert [code for code in range(256) if math.isnan(E4M3.values[code])] == [0x7F, 0xFF]
    assert all(math.isfinite(x) for x in E4M3.values if not math.isnan(x))  # no infinities
    named = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125}
    named |= {0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
    assert {code: E4M3.values[code] for code in named} == named
    assert math.copysign(1, E4M3.values[0x80]) == -1  # minus zero is its own code


def test_e4m3_table_is_what_torch_reads():
    read = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    own = torch.tensor(E4M3.values)
    torch.testing.assert_close(own, read, rtol=0, atol=0, equal_nan=True)


def test_e8m0_all_256_values():
    assert (E8M0.bias, E8M0.nan, E8M0.neutral) == (127, 255, 127)
    for code in range(255):
        assert Fraction(E8M0.values[code]) == Fraction(2) ** (code - 127)
    assert math.isnan(E8M0.values[255])
    looked_up = look_up(torch.arange(256, dtype=torch.uint8), E8M0.values, torch.float32)
    torch.testing.assert_close(looked_up, torch.tensor(E8M0.values), rtol=0, atol=0, equal_nan=True)


def nearest_e4m3(x: Fraction) -> int:
    """The code of the nearest number, ties to an even mantissa, for 0 <= x <= 448."""
    codes = sorted(range(0x7F), key=lambda code: E4M3.values[code])
    return min(codes, key=lambda code: (abs(Fraction(E4M3.values[code]) - x), code & 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_nearest_even_at_and_beside_every_midpoint(dtype):
    """One block per case, held at scale 1 by an element of 448."""
    values = [Fraction(E4M3.values[code]) for code in range(0x7F)]
    points = [x for a, b in pairwise(values) for x in (a, (a + b) / 2)]
    points += [x + sign * Fraction(2) ** -12 * x for x in points[2:] for sign in (1, -1)]
    cases = sorted({Fraction(float(torch.tensor(float(x)).to(dtype))) for x in points})
    cases = [x for x in cases if x <= 448]
    x = torch.zeros(len(cases), BLOCK, dtype=dtype)
    x[:, 0], x[:, 1] = 448, torch.tensor([float(c) for c in cases]).to(dtype)
    x[:, 2] = -x[:, 1]
    coded = quantise(x, ALONG_D)
    assert coded.scales.unique().tolist() == [127]
    expected = [nearest_e4m3(c) for c in cases]
    assert coded.payload[:, 1].tolist() == expected
    assert coded.payload[:, 2].tolist() == [code | 0x80 for code in expected]


# ---- scales -------------------------------------------------------------------------------------


def exact_scale(amax: Fraction, rounding: ScaleRounding) -> int:
    """By the definition in ScaleRounding, in rationals."""
    if amax == 0:
        return 127
    if rounding is RCEIL:
        return next(code for code in range(255) if amax <= 448 * Fraction(2) ** (code - 127))
    floor_log2 = max(e for e in range(-150, 129) if Fraction(2) ** e <= amax)
    return max(floor_log2 - 8 + 127, 0)


@pytest.mark.parametrize(
    ("amax", "rceil", "floor"),
    [
        (448.0, 127, 127),  # 448 / 448 = 1 = 2^0; floor(log2 448) - 8 = 0
        (448.00003, 128, 127),  # one ulp more: RCEIL doubles the scale
        (511.0, 128, 127),  # FLOOR keeps scale 1 and saturates
        (512.0, 128, 128),
        (1.0, 119, 119),  # 1/448 = 2^-8.8: up to 2^-8; floor(0) - 8 = -8
        (1.75, 119, 119),  # 1.75/448 = 2^-8 exactly
        (1.7500001, 120, 119),
        (0.0, 127, 127),  # neutral
        (torch.finfo(torch.float32).max, 247, 246),  # 2^128 / 448 = 2^119.2
        (2.0**-118, 1, 1),  # 2^-118 / 448 = 2^-126.8: up to 2^-126; -118 - 8 + 127 = 1
        (2.0**-119 * 1.75, 0, 0),  # 1.75 * 2^-119 / 448 = 2^-127 exactly
        (2.0**-149, 0, 0),  # the smallest subnormal: clamped
    ],
)
def test_golden_scales(amax, rceil, floor):
    x = torch.tensor([amax])
    assert scale_bytes(x, RCEIL).item() == rceil
    assert scale_bytes(x, FLOOR).item() == floor


@given(bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=50))
def test_scales_of_any_magnitude_follow_the_definition(bits):
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for rounding in ScaleRounding:
        expected = [exact_scale(Fraction(x), rounding) for x in amax.tolist()]
        assert scale_bytes(amax, rounding).tolist() == expected


def test_every_scale_an_encoder_can_write_round_trips():
    """Codes 0..247 arise from fp32 data, and 448 * 2^(code - 127) comes back exactly."""
    amax = torch.tensor([448 * 2.0 ** (code - 127) for code in range(247)])
    x = amax.unsqueeze(1).expand(-1, BLOCK).contiguous()
    coded = quantise(x, ALONG_D)
    assert coded.scales.flatten().tolist() == list(range(247))
    assert torch.equal(dequantise(coded.payload, coded.scales, ALONG_D, torch.float32), x)


def test_golden_block():
    """amax 3.0: 3/448 = 2^-7.2, so the scale is 2^-7 (120) and codes are E4M3(128 x)."""
    x = torch.zeros(1, BLOCK)
    x[0, :6] = torch.tensor([3.0, -1.0, 0.1, 2.0**-17, 2.0**-16, -0.0])
    coded = quantise(x, ALONG_D)
    assert coded.scales.tolist() == [[120]]
    # 384 = 1.5 * 2^8; 128 = 2^7; 12.8 -> 13 = 1.625 * 2^3; 2^-10 ties to 0 (even); 2^-9; -0
    assert coded.payload[0, :6].tolist() == [0x7C, 0xF0, 0x55, 0x00, 0x01, 0x80]
    back = dequantise(coded.payload, coded.scales, ALONG_D, torch.float32)
    assert back[0, :6].tolist() == [3.0, -1.0, 13 / 128, 0.0, 2.0**-16, -0.0]


def test_floor_saturates_and_rceil_does_not():
    x = torch.full((1, BLOCK), 500.0)
    floor, rceil = quantise(x, ALONG_D, FLOOR), quantise(x, ALONG_D, RCEIL)
    assert floor.payload.unique().tolist() == [0x7E] and floor.scales.item() == 127
    assert rceil.payload.unique().tolist() == [0x78] and rceil.scales.item() == 128  # 250 -> 256


# ---- blocks -------------------------------------------------------------------------------------


def by_hand(x: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Payload and scales, block by block."""
    rows, cols = x.shape
    payload = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(rows // shape.rows, cols // shape.cols, dtype=torch.uint8)
    for i in range(0, rows, shape.rows):
        for j in range(0, cols, shape.cols):
            where = slice(i, i + shape.rows), slice(j, j + shape.cols)
            code = exact_scale(Fraction(float(x[where].abs().max())), RCEIL)
            scales[i // shape.rows, j // shape.cols] = code
            scaled = x[where].double() * 2.0 ** (127 - code)
            payload[where] = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return payload, scales


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_rounded_one_by_one(shape, dtype):
    x = (randn(64, 96) * torch.logspace(-3, 3, 96)).to(dtype)
    coded = quantise(x, shape)
    payload, scales = by_hand(x, shape)
    assert torch.equal(coded.payload, payload) and torch.equal(coded.scales, scales)
    strided = quantise(x.t().contiguous().t()[None].expand(2, -1, -1), shape)
    assert torch.equal(strided.payload[1], payload) and torch.equal(strided.scales[1], scales)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_decoding_is_exact_and_encoding_again_changes_no_value(shape):
    x = randn(64, 64, seed=1)
    coded = quantise(x, shape)
    once = dequantise(coded.payload, coded.scales, shape, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        other = dequantise(coded.payload, coded.scales, shape, dtype)
        assert other.dtype == dtype and torch.equal(other.float(), once)
    assert torch.equal(rounded(once, shape), once)


def test_a_tile_gives_all_its_blocks_one_scale_and_the_values_of_neither_change():
    """Where nothing falls below E4M3's normals, tile and 1x32 scales give the same numbers."""
    x = randn(64, 64, seed=2)
    x = x.sign() * x.abs().clamp(min=0.01)  # 0.01 / 4 * 448 is far above 2^-6
    assert torch.equal(rounded(x, TILE), rounded(x, ALONG_D))
    assert torch.equal(rounded(x, TILE), rounded(x, ALONG_SEQ))


def test_fp16_past_its_range_decodes_to_its_largest_number():
    x = torch.full((1, BLOCK), 65504.0, dtype=torch.float16)  # rounds up to 65536
    coded = quantise(x, ALONG_D)
    back = dequantise(coded.payload, coded.scales, ALONG_D, torch.float16)
    assert back.unique().tolist() == [65504.0]


# ---- what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_becomes_nan_and_touches_no_other(shape, bad, dtype):
    clean = randn(64, 64, seed=3).to(dtype)
    clean[5, 7] = 0  # what the scale is made of besides the bad element
    dirty = clean.clone()
    dirty[5, 7] = bad
    a, b = quantise(clean, shape), quantise(dirty, shape)
    assert torch.equal(a.scales, b.scales)
    changed = (a.payload != b.payload).nonzero().tolist()
    assert changed == [[5, 7]] and b.payload[5, 7].item() == E4M3.nan
    back = dequantise(b.payload, b.scales, shape, dtype)
    assert back.isnan().nonzero().tolist() == [[5, 7]]


def test_negative_nan_gets_the_same_code():
    x = torch.zeros(1, BLOCK)
    x.view(torch.int32)[0, 3] = -1  # sign bit set, all ones
    assert quantise(x, ALONG_D).payload[0, 3].item() == E4M3.nan


def test_a_block_of_nothing_finite_has_the_neutral_scale():
    coded = quantise(torch.full((1, BLOCK), math.nan), ALONG_D)
    assert coded.scales.item() == E8M0.neutral and coded.payload.unique().tolist() == [E4M3.nan]


def test_scale_255_reads_as_nan():
    payload = torch.full((1, BLOCK), 0x38, dtype=torch.uint8)
    scales = torch.full((1, 1), E8M0.nan, dtype=torch.uint8)
    assert dequantise(payload, scales, ALONG_D, torch.float32).isnan().all()


def test_amax_says_whether_all_is_finite():
    x = randn(32, 32)
    assert block_amax(x, TILE)[1] and block_amax(x, TILE)[0].item() == x.abs().max()
    x[0, 0] = math.inf
    amax, finite = block_amax(x, TILE)
    assert not finite and amax.item() == x.flatten()[1:].abs().max()


# ---- torchao ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchao_mx() -> Callable[[Tensor, ScaleRounding], tuple[Tensor, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns about enums and missing extensions
        reason = "torchao is the oracle here: pip install torchao"
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=reason)
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

    modes = {RCEIL: ScaleCalculationMode.RCEIL, FLOOR: ScaleCalculationMode.FLOOR}

    def to_mx(x: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
        scales, payload = mx.to_mx(x, torch.float8_e4m3fn, BLOCK, modes[rounding])
        return scales.view(torch.uint8), payload.view(torch.uint8)

    return to_mx


@pytest.mark.parametrize("rounding", ScaleRounding, ids=lambda r: r.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_1x32_bytes_are_those_of_torchao(torchao_mx, rounding, dtype):
    """Magnitudes from about 2^-110 to 2^115. Not compared, because torchao does otherwise there:
    blocks of zeros (it writes scale 0, we the neutral 127), amax below 448 * 2^-127 (its scale 0
    is applied as 1), and NaN or infinities (they take its whole block).
    """
    x = randn(2000, 256, seed=4)
    x = x * torch.exp2(torch.linspace(-100, 100, 2000)).unsqueeze(1)
    x[::3] *= torch.exp2(randn(667, 256, seed=5) * 4)
    x = x.to(dtype)
    assert torch.isfinite(x).all()
    coded = quantise(x, ALONG_D, rounding)
    scales, payload = torchao_mx(x, rounding)
    assert torch.equal(coded.scales, scales)
    assert torch.equal(coded.payload, payload)


# ---- where scales lie ---------------------------------------------------------------------------


def test_atom_bytes_are_a_permutation():
    places = [ATOM.byte(row, block) for row in range(128) for block in range(4)]
    assert sorted(places) == list(range(512)) == list(range(ATOM.nbytes))
    assert ATOM.byte(0, 3) == 3 and ATOM.byte(32, 0) == 4 and ATOM.byte(1, 0) == 16


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("along", ["d", "seq"])
def test_atoms_by_the_formula_and_padding_neutral(d, along):
    rows, blocks = (128, d // BLOCK) if along == "d" else (d, 4)
    scales = torch.randint(0, 255, (2, rows, blocks), dtype=torch.uint8)
    packed = to_atoms(scales)
    assert packed.shape == (2, atoms(rows, blocks) * 512)
    expected = torch.full_like(packed, 127)
    across = -(-blocks // 4)
    for row in range(rows):
        for block in range(blocks):
            atom = row // 128 * across + block // 4
            at = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            expected[:, at] = scales[:, row, block]
    assert torch.equal(packed, expected)
    assert torch.equal(from_atoms(packed, rows, blocks), scales)


def test_the_two_orientations_of_a_tile_are_the_same_exponents():
    x = randn(128, 192, seed=6)
    tiles = quantise(x, TILE).scales
    along_d, along_seq = (operand_scales(tiles, TILE, axis) for axis in ("d", "seq"))
    assert along_d.shape == (128, 6) and along_seq.shape == (192, 4)
    for token in range(128):
        for column in range(192):
            tile = tiles[token // 32, column // 32]
            assert along_d[token, column // 32] == tile == along_seq[column, token // 32]


def test_linear_scales_of_1x32_are_operands_as_they_are():
    x = randn(128, 64, seed=7)
    d, seq = quantise(x, ALONG_D).scales, quantise(x, ALONG_SEQ).scales
    assert torch.equal(operand_scales(d, ALONG_D, "d"), d)
    assert torch.equal(operand_scales(seq, ALONG_SEQ, "seq"), seq.mT)
