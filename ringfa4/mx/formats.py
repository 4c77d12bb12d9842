"""The MX numbers: E4M3 elements, E8M0 scales, blocks of 32, and the atom in which tensor cores read
scales.

    value = E4M3(payload) * 2^(scale - 127)             (OCP Microscaling Formats 1.0, section 5)

Every fact about a format is here once, as a field of a frozen object; the rest of the library asks
these objects and never a dtype. The element table is computed from the definition, in Python
integers, so that it is an oracle for hardware and library conversions rather than a copy of them.

Left out: E5M2, FP6, FP4 and other block lengths, which nothing here reads. Neither torch nor numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

BLOCK = 32
"""Elements that share a scale along the contraction axis: fixed by OCP MX and by the tensor cores.
"""


@dataclass(frozen=True)
class ElementFormat:
    """A sign-magnitude mini-float without infinities: all ones is NaN, all else is a number."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int

    @property
    def nan(self) -> int:
        """The NaN that encoders write; the same with the sign bit set is NaN as well."""
        return 0x7F

    @property
    def emax(self) -> int:
        """Exponent of the largest number: what FLOOR scaling subtracts."""
        return (1 << self.exponent_bits) - 1 - self.bias

    @property
    def max(self) -> float:
        """Largest number; the mantissa of all ones at emax is taken by NaN."""
        return math.ldexp((2 << self.mantissa_bits) - 2, self.emax - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of each of the 256 codes."""
        return tuple(self._value(code) for code in range(256))

    def _value(self, code: int) -> float:
        magnitude = code & 0x7F
        if magnitude == self.nan:
            return math.nan
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        value = math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if code & 0x80 else value


E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7)
"""Largest 448, smallest 2^-9, 15 binades of normals and 3 bits below them."""


@dataclass(frozen=True)
class ScaleFormat:
    """A power of two in a byte: no sign, no zero, no infinity."""

    name: str
    bias: int
    nan: int

    @property
    def neutral(self) -> int:
        """The scale 1: what padding and blocks of zeros carry."""
        return self.bias

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of each of the 256 codes."""
        return tuple(
            math.nan if code == self.nan else math.ldexp(1.0, code - self.bias)
            for code in range(256)
        )


E8M0 = ScaleFormat("e8m0", bias=127, nan=255)


class ScaleRounding(Enum):
    """How a block's scale follows from its largest magnitude ``amax``; both clamp at 2^-127.

    RCEIL: the smallest power of two s with amax / s <= 448. Nothing saturates. Default.
    FLOOR: 2^(floor(log2 amax) - 8), the method of OCP MX 1.0, section 6.3. A block whose amax has a
        mantissa above 1.75 saturates at 448: 0.9% of Gaussian elements, and a tenth more error.

    amax = 0 gives the neutral scale in both.
    """

    RCEIL = "rceil"
    FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Which elements of a (rows, columns) matrix share a scale: ``rows`` x ``cols`` of them.

    For K, V, Q and dO rows are tokens and columns the head dimension, so :data:`ALONG_D` blocks
    serve contractions over d, :data:`ALONG_SEQ` those over tokens, and :data:`TILE` both: each 1 x
    32 and each 32 x 1 block of a tile carries the tile's scale.
    """

    name: str
    rows: int
    cols: int


ALONG_D = BlockShape("1x32", 1, BLOCK)
ALONG_SEQ = BlockShape("32x1", BLOCK, 1)
TILE = BlockShape("32x32", BLOCK, BLOCK)


@dataclass(frozen=True, slots=True)
class ScaleAtom:
    """The unit in which tcgen05 reads scales: ``rows`` rows x ``blocks`` blocks along the
    contraction.

    Scale (row, block) is byte (row % 32) * 16 + (row // 32) * 4 + block: one copy of the atom to
    tensor memory (tcgen05.cp 32x128b.warpx4) puts it where the MMA wants it (PTX ISA 9.1, section
    9.7.16.10.7).
    """

    rows: int
    blocks: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.blocks

    def byte(self, row: int, block: int) -> int:
        return row % 32 * 16 + row // 32 * 4 + block


ATOM = ScaleAtom(rows=128, blocks=4)
