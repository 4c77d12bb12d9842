"""The cost model's tables, for people and for programs: see :mod:`ringfa4.launch.cost_model`.

All of it is modelled; nothing here was measured on a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringfa4.launch.console import Console
from ringfa4.launch.cost_model import (
    HANDSHAKE,
    PROFILES,
    THROUGHPUTS,
    Counted,
    binding,
    committed,
    error,
    implied_clock_ghz,
    modelled,
    petaflops,
    published_cycles,
    units,
)
from ringfa4.launch.cost_units import RATES, memory_cycles

UNITS = ("mma", "exp", "fma", "alu", "pack", "issue", "shared", "tensor memory")


def report(console: Console) -> None:
    """Everything, as tables."""
    kernels = committed()
    console.say("MODELLED, not measured: cycles of one multiprocessor for a 128 x 128 tile, d 128")
    console.say()
    console.table(unit_rows(kernels))
    console.say("\nTwo tiles in flight (modelled interval, middle in the middle)\n")
    console.table(cycle_rows(kernels))
    console.say("\nWhat a tile of queries costs once, in cycles of these units\n")
    console.table(once_rows(kernels))
    console.say(f"\nThe model against Nsight Compute ({PROFILES[0].source})\n")
    console.table(profile_rows(kernels))
    console.say("\nPublished throughput, and the clock at which the modelled cycles give it\n")
    console.table(clock_rows(kernels))
    console.say()
    for name, rate in RATES.items():
        console.say(f"rate: {name}: {rate.per_clock:g} {rate.of} a clock and SM: {rate.source}")


def as_json() -> dict[str, Any]:
    """The same for programs; cycles are [low, middle, high], all of it modelled."""
    kernels = committed()
    found = {}
    for name, kernel in kernels.items():
        m = modelled(kernel)
        cycles = [m.low, m.middle, m.high]
        found[name] = {
            "title": kernel.title,
            "arch": kernel.arch.name,
            "emulated": kernel.emulated,
            "units": units(kernel),
            "fullest": binding(units(kernel)),
            "products": sum(kernel.products),
            "chain": m.chain,
            "cycles": cycles,
            "share_of_peak": [kernel.mma / c for c in reversed(cycles)],
            "pflops": [petaflops(kernel.arch, c) for c in reversed(cycles)],
            "clock_ghz": kernel.arch.clock_ghz,
        }
    errors = {profile.kernel: error(profile, kernels) for profile in PROFILES}
    return {"modelled": found, "handshake": HANDSHAKE, "errors": errors}


def _label(kernel: Counted) -> str:
    emulated = "" if kernel.emulated is None else f", {kernel.emulated} of 32 polynomials"
    pairs = ", pairs" if kernel.pairs else ""
    return f"{kernel.title}, {kernel.arch.name}{pairs}{emulated}"


def unit_rows(kernels: Mapping[str, Counted]) -> list[tuple[str, ...]]:
    """Of units, and how long products keep the matrix unit: longer than its FLOP take where their
    operands from shared memory do.
    """
    rows: list[tuple[str, ...]] = [("", *UNITS, "fullest", "products")]
    for kernel in kernels.values():
        cycles = units(kernel)
        numbers = (f"{cycles[name]:.0f}" for name in UNITS)
        products = f"{sum(kernel.products):.0f}"
        rows.append((_label(kernel), *numbers, binding(cycles), products))
    return rows


def cycle_rows(kernels: Mapping[str, Counted]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "chain", "cycles", "share of peak", "PFLOPS at 1.85 GHz")]
    for kernel in kernels.values():
        m = modelled(kernel)
        cycles = f"{m.low:.0f}..{m.middle:.0f}..{m.high:.0f}"
        share = "..".join(f"{100 * kernel.mma / c:.0f}" for c in (m.high, m.middle, m.low))
        rate = "..".join(f"{petaflops(kernel.arch, c):.2f}" for c in (m.high, m.middle, m.low))
        rows.append((_label(kernel), f"{m.chain:.0f}", cycles, f"{share}%", rate))
    return rows


def once_rows(kernels: Mapping[str, Counted]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "shared", "tensor memory")]
    for kernel in kernels.values():
        cycles = memory_cycles(kernel.once)
        rows.append((_label(kernel), *(f"{max(0.0, c):.0f}" for c in cycles.values())))
    return rows


def profile_rows(kernels: Mapping[str, Counted]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "published", "by its exp share", "modelled", "error")]
    for profile in PROFILES:
        kernel = kernels[profile.kernel]
        published = published_cycles(profile, kernels)
        by_exp = units(kernel)["exp"] / profile.exp
        off = error(profile, kernels)
        rows.append(
            (
                _label(kernel),
                f"{published:.0f}",
                f"{by_exp:.0f}",
                f"{published * (1 + off):.0f}",
                f"{100 * off:+.1f}%",
            )
        )
    return rows


def clock_rows(kernels: Mapping[str, Counted]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "PFLOPS", "GHz", "what")]
    for figure in THROUGHPUTS:
        kernel = kernels[figure.kernel]
        clock = implied_clock_ghz(kernel.arch, modelled(kernel).middle, figure.pflops)
        rows.append((_label(kernel), f"{figure.pflops:.3f}", f"{clock:.2f}", figure.what))
    return rows
