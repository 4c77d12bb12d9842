"""What the kernels here say to the hardware: loads, stores, conversions and shuffles, as PTX.

Addresses are bytes (Int64), vectors are lists of 32-bit words, and every access carries a
predicate: a load whose predicate is 0 gives zeros, a store whose predicate is 0 does nothing. So
the kernels have no branches, and the list of loads a thread issues before it first waits is what
stands in the source. The functions here are traced as plain Python: their loops are unrolled.

E4M3 is converted by hardware from SM89 on and by integer arithmetic before (:func:`to_e4m3`,
``native``); both give the same bytes. E8M0 is integer arithmetic everywhere, since only SM100 has
conversions for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx, shuffle_sync_bfly


def load(address: Int64, words: int, predicate: Int32) -> list[Any]:
    """``words`` (1, 2 or 4) 32-bit words, or zeros; read once, so not kept in L1."""
    vector = "" if words == 1 else f".v{words}"
    names = [f"{{$w{n}}}" for n in range(words)]
    target = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    loaded = inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
        f"@p ld.global.L1::no_allocate{vector}.b32 {target}, [{{$r0}}]; }}",
        write_only_types=[Int32] * words,
        read_only_args=[address, predicate],
    )
    return [loaded] if words == 1 else list(loaded)


def load_shared_line(address: Int64, predicate: Int32) -> Any:
    """One 32-bit word whose neighbours other threads of the block read: kept in L1."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, predicate],
    )


def store(address: Int64, words: Sequence[Any], predicate: Int32) -> None:
    """1, 2 or 4 32-bit words."""
    count = len(words)
    vector = "" if count == 1 else f".v{count}"
    names = [f"{{$r{n + 2}}}" for n in range(count)]
    source = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; "
        f"@p st.global{vector}.b32 [{{$r0}}], {source}; }}",
        read_only_args=[address, predicate, *words],
    )


def write_shared(address: Int32, words: Sequence[Any]) -> None:
    """4 32-bit words to shared memory."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def read_shared(address: Int32, words: int) -> list[Any]:
    """1, 2 or 4 32-bit words of shared memory."""
    vector = "" if words == 1 else f".v{words}"
    names = ", ".join(f"{{$w{n}}}" for n in range(words))
    target = names if words == 1 else "{" + names + "}"
    loaded = inline_ptx(
        f"ld.shared{vector}.b32 {target}, [{{$r0}}];",
        write_only_types=[Int32] * words,
        read_only_args=[address],
    )
    return [loaded] if words == 1 else list(loaded)


def load_byte(address: Int64, predicate: Int32) -> Any:
    """A byte as Int32, or 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@p ld.global.u8 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, predicate],
    )


def store_byte(address: Int64, byte: Int32, predicate: Int32) -> None:
    inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.u8 [{$r0}], {$r1}; }",
        read_only_args=[address, byte, predicate],
    )


def bits(x: Float32) -> Any:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def from_bits(x: Int32) -> Any:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def select(predicate: Int32, yes: Any, no: Any) -> Any:
    """``yes`` where the predicate is not 0. Int32 or Float32."""
    kind = Float32 if isinstance(yes, Float32) else Int32
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[kind],
        read_only_args=[predicate, yes, no],
    )


def less(a: Int32, b: Int32) -> Any:
    """1 where a < b, else 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r0}, {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def equal(a: Int32, b: Int32) -> Any:
    """1 where a == b, else 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.eq.s32 p, {$r0}, {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def unpack(words: Sequence[Any], dtype: str) -> list[Any]:
    """fp32 values of packed "bf16", "fp16" or "fp32" words, in memory order; exact."""
    if dtype == "fp32":
        return [from_bits(w) for w in words]
    values: list[Any] = []
    for w in words:
        if dtype == "bf16":
            code = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
        else:
            code = (
                "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
                "cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }"
            )
        values += inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[w])
    return values


def pack(values: Sequence[Any], dtype: str) -> list[Any]:
    """fp32 values rounded to nearest even into words; fp16 saturates at its largest number, NaN
    stays.
    """
    if dtype == "fp32":
        return [bits(x) for x in values]
    words = []
    for lo, hi in zip(values[::2], values[1::2], strict=True):
        if dtype == "bf16":
            code = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"
        else:
            clamp = "".join(
                f"min.NaN.f32 {x}, {{$r{n}}}, 0f477FE000; max.NaN.f32 {x}, {x}, 0fC77FE000; "
                for n, x in enumerate(("lo", "hi"))
            )
            code = "{ .reg .f32 lo, hi; " + clamp + "cvt.rn.f16x2.f32 {$w0}, hi, lo; }"
        words.append(inline_ptx(code, write_only_types=[Int32], read_only_args=[lo, hi]))
    return words


def infinite_to_nan(x: Float32) -> Any:
    """x + 0 * x: itself when finite (zeros keep their sign), NaN otherwise."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def max_magnitude(amax: Float32, x: Float32) -> Any:
    """max(amax, |x|), where NaN counts as nothing."""
    return inline_ptx(
        "{ .reg .f32 t; abs.f32 t, {$r1}; max.f32 {$w0}, {$r0}, t; }",
        write_only_types=[Float32],
        read_only_args=[amax, x],
    )


def max_over_lanes(amax: Float32, offsets: Sequence[int]) -> Any:
    """The maximum over the lanes whose numbers differ by any sum of ``offsets`` (powers of two)."""
    for offset in offsets:
        amax = max_magnitude(amax, shuffle_sync_bfly(amax, offset=offset))
    return amax


def maximum(x: Float32, y: Float32) -> Any:
    """NaN if either is."""
    return inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def is_negative_infinity(x: Float32) -> Any:
    """1 or 0."""
    return equal(bits(x), Int32(-0x00800000))


def multiply(x: Float32, y: Float32) -> Any:
    """Not flushing subnormals, whatever the compiler's flags."""
    return inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def fused_multiply_add(x: Float32, y: Float32, z: Float32) -> Any:
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[x, y, z],
    )


def scale_code(amax: Float32, floor: bool) -> Any:
    """E8M0 code of a block from its largest finite magnitude: quantise.scale_bytes in integers.

    RCEIL, with amax = 1.m * 2^(e - 127): amax / 448 = (1.m / 1.75) * 2^(e - 135), so the code is e
    - 8, and one more when m > 0.75. At e = 8 the quotient is subnormal in fp32 and its rounding
    moves that edge by one unit.
    """
    code = (
        "{ .reg .pred p; .reg .b32 e, m, edge; shr.u32 e, {$r0}, 23; "
        "sub.s32 {$w0}, e, 8; max.s32 {$w0}, {$w0}, 0; "
    )
    if not floor:
        code += (
            "and.b32 m, {$r0}, 0x7fffff; "
            "setp.eq.s32 p, e, 8; selp.b32 edge, 0x600001, 0x600000, p; "
            "setp.gt.s32 p, m, edge; setp.ge.and.s32 p, e, 8, p; @p add.s32 {$w0}, {$w0}, 1; "
        )
    code += "setp.eq.s32 p, {$r0}, 0; selp.b32 {$w0}, 127, {$w0}, p; }"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[bits(amax)])


def inverse_scale(code: Int32) -> Any:
    """2^(127 - code), fp32; codes that scale_code gives are at most 247."""
    return from_bits((254 - code) << 23)


def scale_value(code: Int32) -> Any:
    """2^(code - 127), fp32: 0 is subnormal, 255 is NaN."""
    word = inline_ptx(
        "{ .reg .pred p; shl.b32 {$w0}, {$r0}, 23; "
        "setp.eq.s32 p, {$r0}, 0; selp.b32 {$w0}, 0x00400000, {$w0}, p; "
        "setp.eq.s32 p, {$r0}, 255; selp.b32 {$w0}, 0x7fc00000, {$w0}, p; }",
        write_only_types=[Int32],
        read_only_args=[code],
    )
    return from_bits(word)


def to_e4m3(x: Sequence[Any], native: bool) -> Any:
    """Four fp32 values -> one word of E4M3 codes, the first in the lowest byte; nearest even,
    saturating at 448, NaN 0x7f.
    """
    if native:
        return inline_ptx(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; mov.b32 {$w0}, {lo, hi}; }",
            write_only_types=[Int32],
            read_only_args=list(x),
        )
    word = Int32(0)
    for n, value in enumerate(x):
        word = word | (_to_e4m3_by_integers(value) << (8 * n))
    return word


def _to_e4m3_by_integers(x: Float32) -> Any:
    """Normals: round the bits to 3 of mantissa, re-bias 127 -> 7. Below 2^-6: |x| + 2^14 holds |x|
    / 2^-9 in its low bits.
    """
    return inline_ptx(
        "{ .reg .pred p; .reg .b32 a, s, odd, sub; .reg .f32 f; "
        "mov.b32 a, {$r0}; shr.u32 s, a, 24; and.b32 s, s, 0x80; and.b32 a, a, 0x7fffffff; "
        "mov.b32 f, a; add.rn.f32 f, f, 0f46800000; mov.b32 sub, f; sub.s32 sub, sub, 0x46800000; "
        "shr.u32 odd, a, 20; and.b32 odd, odd, 1; "
        "add.s32 {$w0}, a, odd; add.s32 {$w0}, {$w0}, 0x7ffff; "
        "shr.u32 {$w0}, {$w0}, 20; sub.s32 {$w0}, {$w0}, 960; min.s32 {$w0}, {$w0}, 0x7e; "
        "setp.lt.u32 p, a, 0x3c800000; selp.b32 {$w0}, sub, {$w0}, p; or.b32 {$w0}, {$w0}, s; "
        "setp.gt.u32 p, a, 0x7f800000; selp.b32 {$w0}, 0x7f, {$w0}, p; }",
        write_only_types=[Int32],
        read_only_args=[x],
    )


def from_e4m3(word: Int32, native: bool) -> list[Any]:
    """Four E4M3 codes -> fp32, lowest byte first; exact."""
    if native:
        halves = "cvt.rn.f16x2.e4m3x2 lo, b0; cvt.rn.f16x2.e4m3x2 hi, b1;"
        return list(
            inline_ptx(
                "{ .reg .b16 b0, b1, h0, h1, h2, h3; .reg .b32 lo, hi; mov.b32 {b0, b1}, {$r0}; "
                + halves
                + "mov.b32 {h0, h1}, lo; mov.b32 {h2, h3}, hi; cvt.f32.f16 {$w0}, h0; "
                "cvt.f32.f16 {$w1}, h1; cvt.f32.f16 {$w2}, h2; cvt.f32.f16 {$w3}, h3; }",
                write_only_types=[Float32] * 4,
                read_only_args=[word],
            )
        )
    return [_from_e4m3_by_integers((word >> (8 * n)) & 0xFF) for n in range(4)]


def _from_e4m3_by_integers(code: Int32) -> Any:
    """The bits as an fp32 with the wrong bias (subnormal when E4M3's is), times 2^120."""
    return inline_ptx(
        "{ .reg .pred p; .reg .b32 m, s; .reg .f32 f; "
        "and.b32 m, {$r0}, 0x7f; and.b32 s, {$r0}, 0x80; "
        "shl.b32 s, s, 24; setp.eq.s32 p, m, 0x7f; shl.b32 m, m, 20; or.b32 m, m, s; mov.b32 f, m; "
        "mul.rn.f32 f, f, 0f7B800000; selp.f32 {$w0}, 0f7FC00000, f, p; }",
        write_only_types=[Float32],
        read_only_args=[code],
    )


def exp(x: Float32) -> Any:
    """e^x as 2^(x log2 e): 2 ulp near 0, an error of |x| ulp far from it, where merged weights are
    small.
    """
    return inline_ptx(
        "{ .reg .f32 t; mul.rn.f32 t, {$r0}, 0f3FB8AA3B; ex2.approx.f32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def log(x: Float32) -> Any:
    """The natural logarithm as log2(x) ln 2: an error of 2^-22 near 1, -inf of 0."""
    return inline_ptx(
        "{ .reg .f32 t; lg2.approx.f32 t, {$r0}; mul.rn.f32 {$w0}, t, 0f3F317218; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def reciprocal(x: Float32) -> Any:
    """To one ulp."""
    return inline_ptx(
        "rcp.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
