"""Arithmetic, conversions and functions of the executor against NumPy, torch and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from ptx import build
from ptx.snippets import apply

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the core")

RNG = np.random.default_rng(7)
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        448.0,
        464.0,
        465.0,
        2 ** (-9),
        2 ** (-10),
        0.003,
        2.0 ** (-149),
        -(2.0 ** (-126)),
        65504.0,
        65520.0,
        3.4e38,
        1.5,
        2.5,
        -0.5,
    ],
    np.float32,
)


def floats(count: int = 4096) -> np.ndarray:
    """Any bit pattern, moderate values and special ones."""
    bits = RNG.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    moderate = (RNG.standard_normal(count) * 2.0 ** RNG.integers(-12, 12, count)).astype(np.float32)
    return np.concatenate([bits, moderate, SPECIAL])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, except that any NaN equals any other."""
    nan = np.isnan(a) & np.isnan(b)
    unsigned = f"u{a.dtype.itemsize}"
    return bool(np.all(nan | (a.view(unsigned) == b.view(unsigned))))


def test_e4m3_decodes_all_codes() -> None:
    codes = np.arange(256, dtype=np.uint16)
    pair = apply("cvt.rn.f16x2.e4m3x2 %o, %x;", codes | codes << 8, out=np.uint32)
    low = (pair & 0xFFFF).astype(np.uint16).view(np.float16)
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()
    assert same(low, want)
    assert same((pair >> 16).astype(np.uint16).view(np.float16), want)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)]
)
def test_fp8_rounds_to_nearest_even_and_saturates(kind: str, dtype: torch.dtype) -> None:
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)
    grid = np.unique(finite[torch.isfinite(finite)].numpy())
    middles = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([floats(), middles.astype("f4"), grid.astype("f4")])
    codes = apply(f"cvt.rn.satfinite.{kind}.f32 %o, %x, %x;", x, out=np.uint16)
    assert np.array_equal(codes & 0xFF, codes >> 8)
    got = torch.from_numpy((codes & 0xFF).astype(np.uint8)).view(dtype).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        clipped = np.clip(x.astype(np.float64), grid[0], grid[-1])
    distance = np.abs(got - clipped)
    nearest = np.abs(grid[None, :] - clipped[:, None]).min(1)
    assert np.array_equal(np.isnan(got), np.isnan(x))
    ok = ~np.isnan(x)
    assert np.array_equal(distance[ok], nearest[ok])
    assert np.array_equal(np.signbit(got[ok]), np.signbit(x[ok]))
    # A tie goes to the even code.
    tie = np.isin(np.abs(clipped), np.abs(middles))
    assert tie.sum() >= middles.size and not (codes[tie] & 1).any()


def test_packed_conversions_put_a_high() -> None:
    bits = apply("cvt.rn.bf16x2.f32 %o, %x, %y;", np.float32([1.0]), np.float32([2.0]), out="u4")
    assert bits[0] == 0x3F80_4000
    bits = apply("cvt.rn.f16x2.f32 %o, %x, %y;", np.float32([1.0]), np.float32([2.0]), out="u4")
    assert bits[0] == 0x3C00_4000


def test_packed_16_bit_floats_to_fp8_and_scales() -> None:
    """From f16x2 and bf16x2 the same codes as from the exact f32."""
    half = np.arange(65536, dtype=np.uint16)
    for kind in ("f16", "bf16"):
        exact = apply(f"cvt.f32.{kind} %o, %x;", half, out=np.float32)
        pairs = half.astype(np.uint32) | np.uint32(0x3C00) << 16
        for to, mode in (("e4m3x2", "rn.satfinite"), ("ue8m0x2", "rp.satfinite")):
            if to == "ue8m0x2" and kind == "f16":
                continue
            want = apply(f"cvt.{mode}.{to}.f32 %o, %x, %x;", exact, out=np.uint16) & 0xFF
            got = apply(f"cvt.{mode}.{to}.{kind}x2 %o, %x;", pairs, out=np.uint16)
            assert np.array_equal(got & 0xFF, want)


def test_16_bit_conversions() -> None:
    x = floats()
    bf16 = apply("cvt.rn.bf16.f32 %o, %x;", x, out=np.uint16)
    want = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(bf16[~nan], want[~nan]) and (bf16[nan] == 0x7FFF).all()
    with np.errstate(over="ignore"):
        assert same(apply("cvt.rn.f16.f32 %o, %x;", x, out=np.float16), x.astype(np.float16))
    half = np.arange(65536, dtype=np.uint16)
    assert same(apply("cvt.f32.f16 %o, %x;", half, out="f4"), half.view(np.float16).astype("f4"))
    brain = apply("cvt.f32.bf16 %o, %x;", half, out=np.uint32)
    finite = (half & 0x7F80) != 0x7F80
    assert np.array_equal(brain[finite], half[finite].astype(np.uint32) << 16)


@pytest.mark.parametrize("saturate", [True, False])
def test_ue8m0_rounds_up(saturate: bool) -> None:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    x = np.concatenate([floats(), powers, np.nextafter(powers, np.float32(np.inf))])
    kind = "satfinite.ue8m0x2" if saturate else "ue8m0x2"
    code = apply(f"cvt.rp.{kind}.f32 %o, %x, %x;", x, out=np.uint16) & 0xFF
    nan, infinite = np.isnan(x), np.isinf(x)
    assert (code[nan] == 255).all() and (code[infinite] == (254 if saturate else 255)).all()
    for value, byte in zip(
        np.abs(x[~nan & ~infinite]).tolist(), code[~nan & ~infinite].tolist(), strict=True
    ):
        exact, scale = Fraction(value), Fraction(2) ** (byte - 127)
        if byte == 254:
            assert exact > Fraction(2) ** 126
        elif byte == 255:
            assert not saturate and exact > Fraction(2) ** 127
        elif byte:
            assert scale / 2 < exact <= scale
        else:
            assert exact <= Fraction(2) ** -127


def test_ue8m0_decodes() -> None:
    codes = np.arange(256, dtype=np.uint16)
    got = apply("cvt.rn.bf16x2.ue8m0x2 %o, %x;", codes, out=np.uint32) & 0xFFFF
    value = (got << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    assert np.array_equal(value[:255], 2.0 ** (np.arange(255) - 127)) and np.isnan(value[255])


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
def test_directed_rounding_brackets_the_exact_result(op: str, mode: str) -> None:
    x, y, z = (RNG.standard_normal(512).astype(np.float32) for _ in range(3))
    x *= np.float32(2.0) ** RNG.integers(-30, 30, 512).astype(np.float32)
    code = f"{op}.{mode}.f32 %o, %x, %y{', %z' if op == 'fma' else ''};"
    got = apply(code, x, y, z, out=np.float32)
    for a, b, c, d in zip(x.tolist(), y.tolist(), z.tolist(), got.tolist(), strict=True):
        a, b, c, g = Fraction(a), Fraction(b), Fraction(c), Fraction(d)
        exact = {"add": a + b, "mul": a * b, "fma": a * b + c}[op]
        down = mode == "rm" or (mode == "rz" and exact > 0)
        beyond = Fraction(
            float(np.nextafter(np.float32(d), np.float32(np.inf if down else -np.inf)))
        )
        assert g <= exact < beyond if down else beyond < exact <= g


def test_packed_f32x2_and_the_exp2_trick() -> None:
    """add.rm with 1.5*2^23 leaves floor(x) in the low bits; element 0 is the low half."""
    x = (RNG.standard_normal(512) * 20).astype(np.float32)
    pairs = x.reshape(-1, 2).copy().view(np.uint64).reshape(-1)
    magic = np.float32([12582912.0, 12582912.0]).view(np.uint64)
    got = apply("add.rm.f32x2 %o, %x, %y;", pairs, magic, out=np.uint64).view(np.float32)
    assert np.array_equal(got - np.float32(12582912.0), np.floor(x))


def test_mixed_precision_add_and_fma_round_once() -> None:
    a = RNG.standard_normal(256).astype(np.float32)
    bits = (a.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    c = RNG.standard_normal(256).astype(np.float32)
    assert same(apply("add.rn.f32.bf16 %o, %x, %y;", bits, c, out="f4"), exact + c)
    want = (exact.astype(np.float64) ** 2 + c).astype(np.float32)
    assert same(apply("fma.rn.f32.bf16 %o, %x, %x, %y;", bits, c, out="f4"), want)


def test_min_max_with_nan_and_zeros() -> None:
    nan, zero = np.float32(np.nan), np.float32(0)
    x = np.float32([nan, 1, nan, -0.0, 0.0])
    y = np.float32([2, nan, nan, 0.0, -0.0])
    assert same(apply("max.f32 %o, %x, %y;", x, y, out="f4"), np.float32([2, 1, nan, zero, zero]))
    assert same(apply("min.f32 %o, %x, %y;", x, y, out="f4"), np.float32([2, 1, nan, -zero, -zero]))
    assert np.isnan(apply("max.NaN.f32 %o, %x, %y;", x, y, out="f4")[:3]).all()
    three = apply("max.f32 %o, %x, %y, %z;", x, y, np.float32(7), out="f4")
    assert np.array_equal(three, np.full(5, 7, "f4"))


@pytest.mark.parametrize(
    ("code", "function", "limit"),
    [
        ("ex2.approx.ftz.f32", np.exp2, 2 * 2.0**-23),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 2.0**-22.9),
        ("sqrt.approx.f32", np.sqrt, 2.0**-23),
    ],
)
def test_approximate_functions_within_the_stated_error(code: str, function, limit: float) -> None:
    x = (RNG.random(4096) * 60 + 0.01).astype(np.float32)
    got = apply(f"{code} %o, %x;", x, out=np.float32).astype(np.float64)
    want = function(x.astype(np.float64))
    assert (np.abs(got / want - 1) <= limit).all()


def test_ex2_lg2_rcp_at_special_values() -> None:
    x = np.float32([-np.inf, 0.0, -0.0, np.nan, np.inf, 2.0**-149])
    got = apply("ex2.approx.ftz.f32 %o, %x;", x, out=np.float32)
    assert same(got, np.float32([0, 1, 1, np.nan, np.inf, 1]))
    got = apply("ex2.approx.ftz.f32 %o, %x;", np.float32([-127, -126]), out=np.float32)
    assert same(got, np.float32([0, 2.0**-126]))  # the subnormal result is flushed
    got = apply("lg2.approx.ftz.f32 %o, %x;", np.float32([0, -1, 8, 2.0**-149]), out=np.float32)
    assert same(got, np.float32([-np.inf, np.nan, 3, -np.inf]))
    got = apply("rcp.approx.ftz.f32 %o, %x;", np.float32([0.0, -0.0, 4]), out=np.float32)
    assert same(got, np.float32([np.inf, -np.inf, 0.25]))


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_float_to_integer(mode: str, function) -> None:
    x = np.concatenate(
        [(RNG.standard_normal(512) * 1000).astype("f4"), np.float32([0.5, 1.5, -2.5])]
    )
    assert np.array_equal(
        apply(f"cvt.{mode}.s32.f32 %o, %x;", x, out="i4"), function(x).astype("i4")
    )
    clamped = apply(f"cvt.{mode}.s32.f32 %o, %x;", np.float32([1e20, -1e20, np.nan]), out="i4")
    assert clamped.tolist() == [2**31 - 1, -(2**31), 0]
    assert apply(f"cvt.{mode}.u32.f32 %o, %x;", np.float32([-5.0]), out="u4").tolist() == [0]


def test_integer_conversions_extend_and_cut() -> None:
    x = RNG.integers(-(2**31), 2**31, 256, dtype=np.int64).astype(np.int32)
    assert np.array_equal(apply("cvt.s64.s32 %o, %x;", x, out="i8"), x.astype(np.int64))
    assert np.array_equal(apply("cvt.u64.u32 %o, %x;", x, out="u8"), x.view("u4").astype("u8"))
    assert np.array_equal(apply("cvt.s32.s8 %o, %x;", x, out="i4"), x.astype(np.int8).astype("i4"))
    assert np.array_equal(apply("cvt.u16.u32 %o, %x;", x, out="u2"), x.astype(np.uint16))
    assert np.array_equal(apply("cvt.rn.f32.s32 %o, %x;", x, out="f4"), x.astype(np.float32))
    narrow = x.astype(np.int16)
    assert np.array_equal(apply("cvt.s32.s16 %o, %x;", narrow, out="i4"), narrow.astype("i4"))


def test_integer_arithmetic() -> None:
    x = RNG.integers(-(2**31), 2**31, 512, dtype=np.int64).astype(np.int32)
    y = RNG.integers(-(2**31), 2**31, 512, dtype=np.int64).astype(np.int32)
    y[y == 0] = 3
    wide = x.astype(np.int64) * y
    unsigned = x.view("u4").astype(np.uint64) * y.view("u4")
    assert np.array_equal(apply("mul.lo.s32 %o, %x, %y;", x, y, out="i4"), wide.astype(np.int32))
    assert np.array_equal(
        apply("mul.hi.s32 %o, %x, %y;", x, y, out="i4"), (wide >> 32).astype("i4")
    )
    assert np.array_equal(
        apply("mul.hi.u32 %o, %x, %y;", x, y, out="u4"), (unsigned >> 32).astype("u4")
    )
    assert np.array_equal(apply("mul.wide.s32 %o, %x, %y;", x, y, out="i8"), wide)
    assert np.array_equal(
        apply("mad.lo.s32 %o, %x, %y, %x;", x, y, out="i4"), (wide + x).astype("i4")
    )
    quotient = np.array(
        [int(a / b) if abs(a) < 2**52 else 0 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    )
    assert np.array_equal(apply("div.s32 %o, %x, %y;", x, y, out="i4"), quotient)
    assert np.array_equal(apply("rem.s32 %o, %x, %y;", x, y, out="i4"), x - quotient * y)
    assert np.array_equal(apply("neg.s32 %o, %x;", x, out="i4"), -x)
    pairs = x.astype(np.int16), y.astype(np.int16)
    want = pairs[0].astype(np.int32) * pairs[1]
    assert np.array_equal(apply("mul.wide.s16 %o, %x, %y;", *pairs, out="i4"), want)


def test_bits_and_shifts() -> None:
    x = RNG.integers(0, 2**32, 256, dtype=np.uint32)
    by = RNG.integers(0, 70, 256).astype(np.uint32)
    signed = x.view(np.int32).astype(np.int64)
    assert np.array_equal(
        apply("shl.b32 %o, %x, %y;", x, by, out="u4"), np.where(by > 31, 0, x << (by & 31))
    )
    assert np.array_equal(
        apply("shr.u32 %o, %x, %y;", x, by, out="u4"), np.where(by > 31, 0, x >> (by & 31))
    )
    want = (signed >> np.minimum(by, 31).astype(np.int64)).astype("i4")
    assert np.array_equal(apply("shr.s32 %o, %x, %y;", x, by, out="i4"), want)
    y = RNG.integers(0, 2**32, 256, dtype=np.uint32)
    z = RNG.integers(0, 2**32, 256, dtype=np.uint32)
    majority = (x & y) | (y & z) | (x & z)
    assert np.array_equal(apply("lop3.b32 %o, %x, %y, %z, 0xE8;", x, y, z, out="u4"), majority)
    assert np.array_equal(
        apply("prmt.b32 %o, %x, %y, 0x5410;", x, y, out="u4"), (x & 0xFFFF) | y << 16
    )
    replicated = apply("prmt.b32 %o, %x, %x, 0xBBBB;", x, out="u4")
    assert np.array_equal(replicated, np.where(x >> 31, 0xFFFFFFFF, 0).astype("u4"))
    both = y.astype(np.uint64) << 32 | x
    want = (both >> (z & 31).astype(np.uint64)).astype(np.uint32)
    assert np.array_equal(apply("shf.r.wrap.b32 %o, %x, %y, %z;", x, y, z, out="u4"), want)
    assert np.array_equal(apply("bfe.u32 %o, %x, 5, 9;", x, out="u4"), x >> 5 & 0x1FF)
    want = ((signed >> 5 & 0x1FF) ^ 0x100) - 0x100
    assert np.array_equal(apply("bfe.s32 %o, %x, 5, 9;", x, out="i4"), want)
    assert np.array_equal(
        apply("bfi.b32 %o, %x, %y, 8, 4;", x, y, out="u4"), (y & ~np.uint32(0xF00)) | (x & 0xF) << 8
    )
    assert apply("clz.b32 %o, %x;", np.uint32([0, 1, 2**31]), out="u4").tolist() == [32, 31, 0]
    assert apply("popc.b32 %o, %x;", np.uint32([0, 0xFFFF0001]), out="u4").tolist() == [0, 17]
    assert apply("bfind.u32 %o, %x;", np.uint32([0, 1, 2**31]), out="i4").tolist() == [-1, 0, 31]
    signs = apply("copysign.f32 %o, %x, %y;", np.float32([-1, 2]), np.float32([3, -4]), out="f4")
    assert signs.tolist() == [-3, 4]
    assert apply("brev.b32 %o, %x;", np.uint32([1]), out="u4").tolist() == [2**31]


@pytest.mark.parametrize(
    ("comparison", "on_nan"),
    [("eq", 0), ("ne", 0), ("lt", 0), ("ge", 0), ("equ", 1), ("neu", 1), ("nan", 1), ("num", 0)],
)
def test_comparisons_of_nan(comparison: str, on_nan: int) -> None:
    x = np.float32([np.nan, 1.0])
    code = f"setp.{comparison}.f32 %q, %x, %y; selp.b32 %o, 1, 0, %q;"
    got = apply(code, x, np.float32(1.0), out="u4")
    ordinary = {"eq": 1, "ne": 0, "lt": 0, "ge": 1, "equ": 1, "neu": 0, "nan": 0, "num": 1}
    assert got.tolist() == [on_nan, ordinary[comparison]]
