"""What forward kernels should reach on SM100 and SM103, modelled from counts: nothing is measured.

    python launch/bench.py --model sm100

For a 128 x 128 tile of queries and keys, d 128, two products of 2 128^3 FLOP:

    units   counted work over the rate of each unit: a bound that no schedule beats. "mma" counts
            FLOP; narrow products keep the matrix unit longer, :attr:`Counted.products`
    chain   cycles from S to P of one tile while the other runs, by replaying the loop
    cycles  what a tile takes when two are in flight (:mod:`ringfa4.launch.cost_replay`)
    share   cycles of the matrix unit / cycles: the share of its peak, whatever the clock

Counts come from the PTX executor and from ptxas' schedule; `python -m ptx.counts` (tests/ptx)
writes them to ``COUNTS``. Rates have a source each, ``RATES``. One number is fitted, ``HANDSHAKE``,
to what Nsight Compute showed of four FlashAttention-4 kernels, ``PROFILES``; each of them predicted
by a fit to the others is off by ``ERROR`` at most. An interval is that, or the spread over what is
not known of the scheduler, whichever is wider, never better than the fullest unit or than what
products keep the matrix unit; the upper end of a block-scaled kernel has ``BLOCK_SCALES`` on top.

Throughput needs a clock, and cards do not hold theirs under load: it is given at the clock that
the data sheet's peak implies, and ``THROUGHPUTS`` shows which clocks published figures imply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ringfa4.launch.cost_replay import (
    POLICIES,
    Kernel,
    Op,
    Policy,
    Replayed,
    Timing,
    replay,
    rescaling,
)
from ringfa4.launch.cost_units import RATES, instructions, memory_cycles

COUNTS = Path(__file__).with_name("sm100_counts.json")
"""Written by ``python -m ptx.counts``, committed; tests/test_cost_model.py compares the two."""

ROWS = 128
FLOP = 2 * 2 * ROWS**3
"""Of a tile: two products."""


@dataclass(frozen=True)
class Arch:
    """``clock_ghz``: data-sheet peak / (multiprocessors x FLOP a clock)."""

    name: str
    card: str
    multiprocessors: int
    clock_ghz: float

    @property
    def exp_cycles(self) -> float:
        """Of one warp's instruction on one of four schedulers."""
        return 4 * 32 / RATES[f"exp, {self.name}"].per_clock


ARCHS = {
    "sm_100a": Arch("sm_100a", "B200", 148, 1.85),
    "sm_103a": Arch("sm_103a", "B300", 148, 1.85),
}

HANDSHAKE = 250.0
"""Cycles from the end of a product to the warp that has seen it, plus those from P to its product:
the multiple of 25 with the least sum of squared errors against PROFILES."""

ERROR = 0.09
"""Largest error of a kernel of PROFILES when HANDSHAKE is fitted to the others, rounded up."""

BLOCK_SCALES = 0.084
"""What copies of scales in front of products cost at most, not replayed: cuDNN's MXFP8 forward
takes 8.4% more time than its fp8 forward on GB300, 7.4% on GB200, other differences included (32K,
d 128, no mask; NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, 2026-04)."""


@dataclass(frozen=True)
class Counted:
    """One entry of COUNTS, a kernel: per 128 x 128 tile, and once for each tile of queries.

    A tile belongs to one thread block, so what a pair of them does for its tiles together is shared
    out evenly; ``loops``, ``parts``, ``shared_scales``, ``halves`` as :class:`Kernel` has them.
    """

    name: str
    title: str
    arch: Arch
    bits: int
    tile: Mapping[str, float]
    once: Mapping[str, float]
    loops: tuple[Sequence[Op], ...]
    parts: tuple[float, ...]
    shared_scales: bool
    halves: bool
    rescales: bool
    emulated: int | None

    @property
    def mma(self) -> float:
        """Cycles a tile that the matrix unit needs for its FLOP."""
        return sum(x.flop * n for x, n in instructions(self.tile)) / self._rate

    @property
    def products(self) -> tuple[float, float]:
        """Cycles of a tile's product of P and V, and of all its products of Q and K.

        An instruction takes as long as its FLOP or as its operands from shared memory, whichever is
        longer: with N = 64 the latter.
        """
        shared = RATES["shared"].per_clock

        def cycles(of_p: bool) -> float:
            return sum(
                max(x.flop / self._rate, x.shared_bytes / shared) * n
                for x, n in instructions(self.tile)
                if x.a_in_tensor_memory == of_p
            )

        return cycles(True), cycles(False)

    @property
    def pairs(self) -> bool:
        """Whether two thread blocks share products."""
        return any(x.m == 256 for x, _ in instructions(self.tile))

    @property
    def _rate(self) -> float:
        return RATES[f"mma, {self.bits}-bit"].per_clock

    def of_loops(self, *kinds: str) -> int:
        """Instructions a row, of all warps that share it."""
        return sum(op.kind in kinds for loop in self.loops for op in loop)


def counted(name: str, entry: Mapping[str, Any]) -> Counted:
    """An entry of COUNTS."""
    tiles, queries = entry["tiles"], entry["query_tiles"]
    return Counted(
        name=name,
        title=entry["title"],
        arch=ARCHS[entry["arch"]],
        bits=16 if entry["dtype"] == "bf16" else 8,
        tile={key: count / tiles for key, count in entry["more"].items()},
        once={key: count / queries for key, count in entry["once"].items()},
        loops=tuple(tuple(Op.read(op) for op in text.split()) for text in entry["loops"]),
        parts=tuple(entry["parts"]),
        shared_scales=entry["shared_scales"],
        halves=entry["halves"],
        rescales=entry["rescales"],
        emulated=entry.get("emulated"),
    )


@lru_cache(maxsize=1)
def committed() -> dict[str, Counted]:
    """All kernels of COUNTS."""
    kernels = json.loads(COUNTS.read_text())["kernels"]
    return {name: counted(name, entry) for name, entry in kernels.items()}


# ---- units --------------------------------------------------------------------------------------


def rescaled_share(tiles: int = 64) -> float:
    """Share of key tiles at which a warp must rescale when any of its 32 rows has a new maximum.

    Rows of independent logits: tile n of a row holds its maximum so far with probability 1 / n.
    """
    return sum(1 - (1 - 1 / n) ** 32 for n in range(1, tiles + 1)) / tiles


def units(kernel: Counted) -> dict[str, float]:
    """Cycles that each unit is taken by a tile; every scheduler has all of ``loops``."""
    timing = timing_of(kernel)
    extra = rescaling(ROWS) if kernel.rescales else ()
    share = rescaled_share() if kernel.rescales else 0.0

    def number(*kinds: str) -> float:
        return kernel.of_loops(*kinds) + share * sum(op.kind in kinds for op in extra)

    return {
        "mma": kernel.mma,
        "exp": number("exp") * timing.exp,
        "fma": number("fma2") * timing.fma2
        + number("fma") * timing.fma
        + number("imad") * timing.imad,
        "alu": number("alu", "pack") * timing.alu,
        "pack": number("pack") * timing.pack,
        "issue": sum(map(len, kernel.loops)) + share * len(extra),
        **memory_cycles(kernel.tile),
    }


def binding(cycles: Mapping[str, float]) -> str:
    return max(cycles, key=lambda name: cycles[name])


# ---- cycles -------------------------------------------------------------------------------------


def timing_of(kernel: Counted, handshake: float = HANDSHAKE) -> Timing:
    values, logits = kernel.products
    return Timing(kernel.arch.exp_cycles, values, logits / (1 + kernel.halves), handshake)


def replayed(
    kernel: Counted, handshake: float = HANDSHAKE, policies: Iterable[Policy] = POLICIES
) -> Replayed:
    """The loop; where another warp rescales O, as often as :func:`rescaled_share` says."""
    timing, policies = timing_of(kernel, handshake), tuple(policies)
    plain_kernel = Kernel(kernel.loops, kernel.parts, kernel.shared_scales, kernel.halves)
    plain = replay(plain_kernel, timing, policies)
    if not kernel.rescales:
        return plain
    other = replay(replace(plain_kernel, rescaling=rescaling(ROWS)), timing, policies)
    share = rescaled_share()

    def mean(a: float, b: float) -> float:
        return (1 - share) * a + share * b

    return Replayed(
        mean(plain.low, other.low),
        mean(plain.middle, other.middle),
        mean(plain.high, other.high),
        mean(plain.chain, other.chain),
    )


@lru_cache(maxsize=64)
def _replayed(name: str) -> Replayed:
    return replayed(committed()[name])


@dataclass(frozen=True)
class Modelled:
    """Cycles a tile: an interval and its middle; ``chain`` from S to P."""

    low: float
    middle: float
    high: float
    chain: float


def interval(
    found: Replayed, floor: float, error: float = ERROR, block_scaled: bool = False
) -> Modelled:
    """The wider of the spread and ``error``; no less than ``floor``."""
    low = max(floor, min(found.low, found.middle / (1 + error)))
    high = max(found.high, found.middle / (1 - error)) * (1 + BLOCK_SCALES * block_scaled)
    return Modelled(low, max(found.middle, floor), max(high, floor), found.chain)


def modelled(kernel: Counted) -> Modelled:
    known = committed().get(kernel.name) if COUNTS.exists() else None
    found = _replayed(kernel.name) if kernel is known else replayed(kernel)
    floor = max(*units(kernel).values(), sum(kernel.products))
    return interval(found, floor, block_scaled=kernel.shared_scales)


def petaflops(arch: Arch, cycles: float, clock_ghz: float | None = None) -> float:
    """Of the whole card, all tiles alike."""
    clock = arch.clock_ghz if clock_ghz is None else clock_ghz
    return arch.multiprocessors * FLOP / cycles * clock * 1e-6


def implied_clock_ghz(arch: Arch, cycles: float, pflops: float) -> float:
    return pflops * 1e6 * cycles / (arch.multiprocessors * FLOP)


# ---- what was published -------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """Shares of time that units of one kernel were busy, by Nsight Compute; cycles follow."""

    kernel: str
    tensor: float
    exp: float
    source: str = "github.com/Dao-AILab/flash-attention issue 2701 (2026-07)"


PROFILES = (
    Profile("fa4_bf16_100", 0.877, 0.719),
    Profile("fa4_fp8_100", 0.436, 0.716),
    Profile("fa4_bf16_103_max", 0.999, 0.503),
    Profile("fa4_fp8_103_max", 0.552, 0.557),
)
"""On B300 before FlashAttention took row maxima by tcgen05.ld.red: counted without it too."""


def published_cycles(profile: Profile, kernels: Mapping[str, Counted]) -> float:
    return kernels[profile.kernel].mma / profile.tensor


@dataclass(frozen=True)
class Throughput:
    kernel: str
    pflops: float
    what: str


THROUGHPUTS = (
    Throughput("fa4_bf16_100", 1.535, "8K, 64 heads, full: flash-attention pull request 2280"),
    Throughput("fa4_bf16_100", 1.418, "the same, causal"),
    Throughput("fa4_bf16_100", 1.613, "best: FlashAttention-4, arXiv 2603.05451"),
    Throughput("fa4_bf16_103_max", 1.882, "16K, full: flash-attention pull request 2605"),
    Throughput("fa4_fp8_103_max", 2.46, "issue 2701"),
)


def fitted(
    profiles: Sequence[Profile], kernels: Mapping[str, Counted], grid: Iterable[float]
) -> float:
    """The handshake with the least sum of squared relative errors."""

    def loss(handshake: float) -> float:
        return sum(error(p, kernels, handshake) ** 2 for p in profiles)

    return min(grid, key=loss)


def error(profile: Profile, kernels: Mapping[str, Counted], handshake: float = HANDSHAKE) -> float:
    """(modelled - published) / published, of cycles a tile."""
    kernel = kernels[profile.kernel]
    found = _replayed(kernel.name) if handshake == HANDSHAKE else replayed(kernel, handshake)
    cycles = max(found.middle, *units(kernel).values())
    return cycles / published_cycles(profile, kernels) - 1
