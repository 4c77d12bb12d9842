"""What can be compiled: a frozen spec for each kernel, and how its arguments are passed.

A spec holds everything that is fixed at compile time, so equal specs are one kernel, and its repr
names the kernel in the on-disk cache. Kernels take integers only (addresses, strides and sizes),
and a softmax scale: ``SIGNATURE`` has a letter for each, "q" for 64 bits, "i" for 32, "f" for fp32.
Nothing of the DSL is imported here, so that a warm cache never pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


class Spec(Protocol):
    """A kernel: its repr says all that is compiled, ``SIGNATURE`` how its host function is called.

    A device function that is given other parameters, such as tensor maps made by the host function,
    has them in ``PARAMETERS``, as a format of :mod:`struct`.
    """

    SIGNATURE: ClassVar[str]
    THREADS: ClassVar[int]

    def __hash__(self) -> int: ...


def parameters(spec: Spec) -> str:
    """What the device function takes, in order, as a format of :mod:`struct`."""
    found: str = getattr(spec, "PARAMETERS", spec.SIGNATURE)
    return found


TILE = 32
"""Tokens that a warp of encode and decode holds: those of a block along the sequence."""


def lanes_across(d: int) -> int:
    """Lanes of a warp side by side along d, 8 columns each: 256 bytes of bf16 where d allows."""
    assert d % TILE == 0, d
    return 16 if d % 128 == 0 else 8 if d % 64 == 0 else 4


RUN = 4
"""Elements of a row that a thread of merge handles together: 16 bytes of fp32, so that neighbouring
threads read and write neighbouring 16 bytes of the state, whole sectors at a time."""

PARTIALS = 4
"""Most partials that one merge, or one sum, takes: each adds up to 4 registers a run."""


@dataclass(frozen=True)
class EncodeSpec:
    """``dtype`` "bf16", "fp16" or "fp32"; ``rows`` x ``cols`` elements share a scale.

    ``contiguous`` is the payload's fast axis, "d" or "seq"; ``along_d`` and ``along_seq`` which
    scale atoms are written; ``floor`` the rounding of scales; ``native``: the hardware converts to
    E4M3 (SM89 and newer).
    """

    SIGNATURE: ClassVar[str] = "qqqqqqqqqii"
    THREADS: ClassVar[int] = 128

    dtype: str
    d: int
    rows: int
    cols: int
    contiguous: str
    along_d: bool
    along_seq: bool
    floor: bool
    native: bool

    @property
    def lanes(self) -> int:
        return min(8, lanes_across(self.d))

    @property
    def ahead(self) -> int:
        """Strips loaded before the first is used: 64 registers of words."""
        return max(1, 32 // (self.lanes * (4 if self.dtype == "fp32" else 2)))


@dataclass(frozen=True)
class DecodeSpec:
    """``dtype`` of the output; ``contiguous`` the payload's fast axis; ``along`` whose scale atoms
    are read.
    """

    SIGNATURE: ClassVar[str] = "qqqqqqi"
    THREADS: ClassVar[int] = 128

    dtype: str
    d: int
    contiguous: str
    along: str
    native: bool

    @property
    def lanes(self) -> int:
        return lanes_across(self.d)


@dataclass(frozen=True)
class MergeSpec:
    """``dtype`` of out, its width ``dv``, how many ``partials``; ``first``: the state is not read;
    ``final``: it is not written, but finalised out and lse are.

    A thread block takes ``tokens`` x ``heads`` rows.
    """

    SIGNATURE: ClassVar[str] = "qqqqqqqiiqqqq" + "qqqqqqq" * PARTIALS
    THREADS: ClassVar[int] = 256

    dtype: str
    dv: int
    partials: int
    first: bool
    final: bool
    tokens: int
    heads: int

    @property
    def units(self) -> int:
        """Runs of a block that each thread handles."""
        return -(-self.tokens * self.heads * (self.dv // RUN) // self.THREADS)

    @classmethod
    def of(
        cls, dtype: str, dv: int, heads: int, partials: int, first: bool, final: bool = False
    ) -> MergeSpec:
        """Blocks of 8 tokens or more (they share sectors of lse) and about 8 runs a thread."""
        rows = max(8, 8 * cls.THREADS * RUN // dv)
        here = 1
        while here * 2 <= min(heads, rows // 8):
            here *= 2
        return cls(dtype, dv, partials, first, final, max(8, rows // here // 8 * 8), here)


@dataclass(frozen=True)
class GuardSpec:
    """``given``: rows that the caller flags are zeroed; ``zero_found``: those not finite are."""

    SIGNATURE: ClassVar[str] = "qqqqqqqii"
    THREADS: ClassVar[int] = 256

    dtype: str
    d: int
    given: bool
    zero_found: bool

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share a row: a power of two, at most its 16-byte pieces."""
        pieces = self.d * (4 if self.dtype == "fp32" else 2) // 16
        return 1 << min(4, pieces.bit_length() - 1)

    @property
    def groups(self) -> int:
        """Rows that a block handles at once."""
        return self.THREADS // self.lanes

    @property
    def rows(self) -> int:
        """Rows of each thread, all loaded before the first is used."""
        return 4


@dataclass(frozen=True)
class FillSpec:
    """``word``: four bytes that repeat through a row of ``row_bytes``."""

    SIGNATURE: ClassVar[str] = "qqqqqqqi"
    THREADS: ClassVar[int] = 128

    row_bytes: int
    word: int


@dataclass(frozen=True)
class AccumulateSpec:
    """``dtype`` of what is added, rows of ``d``; ``first``: there is no sum yet; ``into``: what the
    sum is rounded to; ``partials``: how many are added.
    """

    SIGNATURE: ClassVar[str] = "qqqq" * (2 + PARTIALS) + "ii"
    THREADS: ClassVar[int] = 256

    dtype: str
    d: int
    first: bool
    into: str = "fp32"
    partials: int = 1

    @property
    def units(self) -> int:
        """Runs of a thread, all loaded before the first is added: 48 to 64 registers of words."""
        return 8 if self.partials <= 2 else 4
