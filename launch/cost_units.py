"""What units of an SM100 or SM103 multiprocessor do in a clock, and what counted work takes them.

Counts are those of the PTX executor (tests/ptx/README.md, "Counting work"), of two thread blocks
that share products together. Rates have a source each, ``RATES``; nothing was measured by us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Of one multiprocessor, for each clock."""

    per_clock: float
    of: str
    source: str


_QUICKRUN = "measured on B300: github.com/ademeure/QuickRunCUDA"

RATES = {
    "mma, 16-bit": Rate(8192, "FLOP", "data sheet peak / SMs / clock; agrees with PROFILES"),
    "mma, 8-bit": Rate(16384, "FLOP", "twice that; the same with block scales (PTX kind mxf8f6f4)"),
    "exp, sm_100a": Rate(16, "results", "measured 16.00: NVIDIA/cudnn-frontend pull request 1178"),
    "exp, sm_103a": Rate(
        32, "results", "NVIDIA blog, Making Softmax More Efficient with Blackwell Ultra; "
        f"31.8 {_QUICKRUN}, F2FP_DEEP_DIVE",
    ),
    "fma": Rate(128, "results", f"{_QUICKRUN}, B300_PIPE_CATALOG; packed: as many"),
    "imad": Rate(64, "results", f"{_QUICKRUN}, B300_PIPE_CATALOG"),
    "alu": Rate(64, "instructions", f"{_QUICKRUN}, B300_PIPE_CATALOG; FMNMX3 too"),
    "pack": Rate(32, "instructions", f"31.2 of f32 -> e4m3x2, {_QUICKRUN}, F2FP_DEEP_DIVE"),
    "issue": Rate(128, "lanes", "four schedulers, a warp instruction each"),
    "shared": Rate(
        128, "bytes", f"{_QUICKRUN}: 98% of it; MMA operands too (SemiAnalysis, 2026-03)"
    ),
    "tensor memory": Rate(
        512, "bytes", "a column of 128 lanes; reads measured at 211 with one warp of each quarter "
        f"({_QUICKRUN}), so up to 2.4 times more cycles",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """A matrix product of one instruction, K 32 bytes deep; M = 256 is that of two thread blocks,
    on the matrix units and from the shared memories of both.
    """

    kind: str
    m: int
    n: int
    a_in_tensor_memory: bool

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * (16 if self.kind == "f16" else 32)

    @property
    def shared_bytes(self) -> int:
        """Of operands."""
        return 32 * (self.n + (0 if self.a_in_tensor_memory else self.m))


_MMA = re.compile(r"mma (f16|f8f6f4|mxf8f6f4) M(\d+) N(\d+)( A in tensor memory)?$")


def instructions(counts: Mapping[str, float]) -> list[tuple[Instruction, float]]:
    """Products, and how many there were."""
    found = ((_MMA.match(name), count) for name, count in counts.items())
    return [
        (Instruction(x[1], int(x[2]), int(x[3]), x[4] is not None), count)
        for x, count in found
        if x
    ]


def memory_cycles(counts: Mapping[str, float]) -> dict[str, float]:
    """Of shared memory (MMA operands, copies in, scales out, ld and st) and of tensor memory."""

    def of(*names: str) -> float:
        return sum(counts.get(name, 0.0) for name in names)

    wavefronts = of("ld.shared wavefronts", "st.shared wavefronts")
    copied = sum(n for name, n in counts.items() if name.endswith("bytes into shared memory"))
    copied += of("bulk store bytes", "bulk reduction bytes")
    scales = of("tcgen05.cp bytes")
    shared = of("mma operand bytes from shared memory") + copied + scales + 128 * wavefronts
    tensor = of("tcgen05.ld bytes", "tcgen05.st bytes") + 4 * scales  # replicated over 128 lanes
    return {
        "shared": shared / RATES["shared"].per_clock,
        "tensor memory": tensor / RATES["tensor memory"].per_clock,
    }
