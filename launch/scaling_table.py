"""The table of `bench.py --scaling`: a line a pass of each row that is done.

    TFLOP/s     of the pairs that the mask allows, per GPU, on the clock of the slowest
    of kernel   time of the kernel's bare library calls for the same work / the row's (a kernel
                that makes no library calls: time of the ring's work without transfers / the row's)
    of local    time of the ring's work without transfers / the row's
    exposed     seconds in which computing stood still for transfers, more than without them
    slowed      by how much its transfers lengthen computing
    hidden      1 - exposed / seconds that the transfers take by themselves
    memory      the most of a rank, inputs and the transport's arena included
    error       SQNR of sampled rows against fp64; FAILED: more than rounding explains

Both sides of a ratio use one kernel, hence one determinism: fa4 sums dQ in a fixed order,
fa4-nondeterministic does not. "both" is forward and backward together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringfa4.launch.scaling_journal import Entry
from ringfa4.launch.scaling_rows import Row
from ringfa4.launch.sizes import bytes_text
from ringfa4.wire import Direction

HEADINGS = (
    "", "pass", "s", "TFLOP/s", "of kernel", "of local", "exposed", "slowed", "hidden",
    "memory", "error",
)  # fmt: skip


def table(
    rows: Sequence[Row], entries: Mapping[str, Entry], world: int, head_dim: int
) -> list[tuple[str, ...]]:
    """A line a pass of each row that is done, problem by problem."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for problem in dict.fromkeys(row.problem for row in rows):
        for row in rows:
            entry = entries.get(row.name, {})
            if row.problem != problem or entry.get("state") != "done":
                continue
            result, local = entry["result"], _result(entries, row.local)
            for name in (*result["passes"], *(["both"] if len(result["passes"]) > 1 else [])):
                numbers = compare(row, name, result, local, world, head_dim)
                lines.append((row.name if name == "forward" else "", name, *_cells(numbers)))
    return lines


def _result(entries: Mapping[str, Entry], name: str) -> dict[str, Any] | None:
    entry = entries.get(name, {})
    return entry["result"] if entry.get("state") == "done" else None


def compare(
    row: Row,
    name: str,
    result: Mapping[str, Any],
    local: Mapping[str, Any] | None,
    world: int,
    head_dim: int,
) -> dict[str, Any]:
    """The numbers of one line; None where there is nothing to compare with or to see."""
    passes: list[Direction] = ["forward", "backward"]
    taken = [p for p in passes if p in result["passes"] and name in (p, "both")]
    own = [result["passes"][p] for p in taken]
    seconds = sum(p["reported_s"] for p in own)
    work = sum(row.problem.flops(p, head_dim) for p in taken)
    found: dict[str, Any] = dict.fromkeys(HEADINGS[2:])
    found |= {"s": seconds, "TFLOP/s": work / seconds / world / 1e12}
    if name != "backward" and result["peak_bytes"] is not None:
        found["memory"] = result["peak_bytes"] + result["arena_bytes"]
    prefixes = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv"), "both": ()}[name]
    errors = [e for e in result["errors"] if e["name"] in prefixes]
    found["error"] = errors or None
    if local is None:
        return found
    base = [local["passes"][p] for p in taken]
    whole = sum(p["reported_s"] for p in base)
    library = [p["library_s"] for p in base]
    found["of kernel"] = (whole if None in library else sum(library)) / seconds
    if row.setup.kind == "ring":
        alone = sum(p["alone_s"] for p in own)
        standing, computing = (
            sum(p["spans"][what] for p in own) - sum(p["spans"][what] for p in base)
            for what in ("standing", "compute")
        )
        found |= {"of local": whole / seconds, "exposed": standing, "slowed": computing}
        found["hidden"] = 1 - standing / alone if alone > 0 and world > 1 else None
    return found


def _cells(numbers: Mapping[str, Any]) -> list[str]:
    """As the table shows them, in the order of HEADINGS."""
    show: dict[str, Callable[[Any], str]] = {
        "s": lambda x: f"{x:.4g}",
        "TFLOP/s": lambda x: f"{x:.4g}",
        "of kernel": lambda x: f"{100 * x:.1f}%",
        "of local": lambda x: f"{100 * x:.1f}%",
        "exposed": lambda x: f"{1e3 * x:.2f} ms",
        "slowed": lambda x: f"{1e3 * x:.2f} ms",
        "hidden": lambda x: f"{100 * x:.0f}%",
        "memory": bytes_text,
        "error": lambda x: ", ".join(map(_error, x)),
    }
    return ["" if numbers[n] is None else show[n](numbers[n]) for n in HEADINGS[2:]]


def _error(verdict: Mapping[str, Any]) -> str:
    wrong = "" if verdict["passed"] else ", FAILED"
    return f"{verdict['name']} {verdict['sqnr_db']:.1f} dB{wrong}"
