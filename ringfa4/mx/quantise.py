"""Numbers to MX blocks and back.

    scale  = rounding(max |x| over the block's finite elements)      E8M0, from the float's bits
    code   = E4M3(x / 2^(scale - 127)), to nearest even              the only rounding
    value  = E4M3 table[code] * 2^(scale - 127)

Matrices are the last two dimensions, (..., rows, cols); a block is ``shape.rows x shape.cols`` of
them, and sizes must be multiples of it (callers pad with zeros, which change no scale).

What is not finite: **a NaN or infinite element becomes the code 0x7F (NaN), and its block's scale
is that of the other elements.** So NaN reaches exactly what depends on the element, tiles spread it
to no neighbour, and an infinity (E4M3 has none) stays loud instead of saturating. The scale 255
(NaN for the whole block) is never written, and read as OCP defines it.

Scales are never converted with torch's float8_e8m0fnu, which rounds to nearest. Left out: gradients
(rounding has none; callers differentiate the exact function).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringfa4.mx.formats import E4M3, E8M0, BlockShape, ScaleRounding

_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Dtypes that can be quantised, and the integer their bits are read as."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """``payload`` uint8 (..., rows, cols), ``scales`` uint8 (..., rows / shape.rows, cols /
    shape.cols).
    """

    payload: Tensor
    scales: Tensor
    shape: BlockShape


def quantisable(dtype: torch.dtype) -> bool:
    return dtype in _INTEGER


def block_amax(x: Tensor, shape: BlockShape) -> tuple[Tensor, bool]:
    """Largest finite magnitude of each block, fp32, and whether all of ``x`` is finite.

    Magnitudes are compared as integers: for floats without their sign the order is the same, and
    16-bit integers reduce at twice the rate of fp32.
    """
    integer = _INTEGER[x.dtype]
    bits = x.view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=x.dtype).view(integer).item()
    amax = _block_max(bits, shape)
    finite = bool((amax < infinity).all())
    if not finite:
        amax = _block_max(bits.masked_fill_(bits >= infinity, 0), shape)
    return amax.view(x.dtype).to(torch.float32), finite


def _block_max(bits: Tensor, shape: BlockShape) -> Tensor:
    """Maximum over blocks; over rows first, where the reduction runs along contiguous memory."""
    if shape.rows > 1:
        bits = bits.unflatten(-2, (-1, shape.rows)).amax(-2)
    if shape.cols > 1:
        bits = bits.unflatten(-1, (-1, shape.cols)).amax(-1)
    return bits


def scale_bytes(amax: Tensor, rounding: ScaleRounding = ScaleRounding.RCEIL) -> Tensor:
    """E8M0 codes (uint8) for finite ``amax`` >= 0 (fp32)."""
    if rounding is ScaleRounding.RCEIL:
        bits = (amax / E4M3.max).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # Round up to a power of two. Below the normals 2^-127 is the mantissa 2^22.
        above = torch.where(exponent == 0, mantissa > 1 << 22, mantissa != 0)
        code = exponent + above.to(torch.int32)
    else:
        code = ((amax.view(torch.int32) >> 23) - E4M3.emax).clamp_(min=0)
    return code.masked_fill_(amax == 0, E8M0.neutral).to(torch.uint8)


def _inverse(scales: Tensor) -> Tensor:
    """2^(127 - scale), fp32, from the bits.

    The largest finite fp32 gets the scale 247, far below 254, from where on the result would be
    subnormal.
    """
    return ((2 * E8M0.bias - scales.to(torch.int32)) << 23).view(torch.float32)


def quantise(
    x: Tensor, shape: BlockShape, rounding: ScaleRounding = ScaleRounding.RCEIL
) -> Quantised:
    """``x`` (..., rows, cols), bf16, fp16 or fp32, any strides."""
    amax, finite = block_amax(x, shape)
    scales = scale_bytes(amax, rounding)
    bad = None if finite else ~torch.isfinite(x)
    if bad is not None:
        x = x.masked_fill(bad, 0)
    inverse = _inverse(scales)
    if x.dtype == torch.bfloat16:
        # Exact in bf16 too: a power of two, and what underflows there rounds to 0 in E4M3.
        inverse = inverse.to(torch.bfloat16)
    scaled = _per_block(x, shape) * _spread(inverse, shape)
    if rounding is ScaleRounding.FLOOR:
        scaled = scaled.clamp_(-E4M3.max, E4M3.max)  # versions of torch differ past 448
    payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8).reshape(x.shape)
    if bad is not None:
        payload.masked_fill_(bad, E4M3.nan)
    return Quantised(payload, scales, shape)


def _per_block(x: Tensor, shape: BlockShape) -> Tensor:
    """(..., rows, cols) -> (..., row blocks, rows in block, col blocks, cols in block)."""
    split: Tensor = x.unflatten(-1, (-1, shape.cols)).unflatten(-3, (-1, shape.rows))
    return split


def _spread(scales: Tensor, shape: BlockShape) -> Tensor:
    """(..., row blocks, col blocks), to multiply with :func:`_per_block`."""
    return scales.unsqueeze(-1).unsqueeze(-3)


@cache
def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device=device, dtype=dtype)


def look_up(codes: Tensor, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """``values[codes]`` for uint8 codes of any shape, contiguous."""
    table = _table(values, dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def dequantise(payload: Tensor, scales: Tensor, shape: BlockShape, dtype: torch.dtype) -> Tensor:
    """The values, in ``dtype``, contiguous. Exact in fp32 and bf16, whose exponent is E8M0's.

    fp16 is narrower: what RCEIL rounded up past its largest number (from 63488 on) becomes that
    number.
    """
    work = torch.float32 if dtype == torch.float16 else dtype
    values = look_up(payload, E4M3.values, work)
    factors = look_up(scales, E8M0.values, work)
    _per_block(values, shape).mul_(_spread(factors, shape))
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        return values.clamp_(-largest, largest).to(dtype)
    return values


def rounded(x: Tensor, shape: BlockShape, rounding: ScaleRounding = ScaleRounding.RCEIL) -> Tensor:
    """``x`` (fp32) as a kernel that reads it in MXFP8 sees it; incomplete blocks at the end are
    filled up with zeros.
    """
    rows, cols = x.shape[-2:]
    coded = quantise(pad(x, (0, -cols % shape.cols, 0, -rows % shape.rows)), shape, rounding)
    values = dequantise(coded.payload, coded.scales, shape, torch.float32)
    return values[..., :rows, :cols]
