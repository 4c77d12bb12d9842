"""Modelled efficiency as a picture: against tokens, and against ranks.

A line for each number of ranks (each length) and wire; forward solid, backward dashed. matplotlib
is optional; nothing else here needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfa4.errors import MissingLibraryError
from ringfa4.launch.sizes import size_text

if TYPE_CHECKING:
    from ringfa4.launch.simulate import Case
    from ringfa4.launch.simulate_ring import Outcome


def save(outcomes: Sequence[tuple[Case, Outcome]], path: str | Path, title: str) -> None:
    """Write the picture to ``path`` (the suffix chooses the format). MissingLibraryError without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingLibraryError(
            "a picture needs matplotlib, which is not installed: pip install 'ringfa4[plot]'"
        ) from None
    figure = Figure(figsize=(12, 7.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=11)
    tokens, ranks = figure.subplots(1, 2, sharey=True)
    _panel(tokens, outcomes, x="seq", by="ranks")
    _panel(ranks, outcomes, x="ranks", by="seq")
    tokens.set_ylabel("modelled efficiency: kernel alone, evenly, over all of it")
    figure.savefig(path)


def _panel(axes: Any, outcomes: Sequence[tuple[Case, Outcome]], *, x: str, by: str) -> None:
    from matplotlib import colormaps

    lines: dict[tuple[int, str], dict[bool, list[tuple[int, float]]]] = {}
    for case, found in outcomes:
        ways = lines.setdefault((getattr(case, by), case.wire), {})
        ways.setdefault(case.backward, []).append((getattr(case, x), found.efficiency))
    for n, ((value, wire), ways) in enumerate(lines.items()):
        name = f"{value} ranks" if by == "ranks" else size_text(value).split()[0]
        for backward, points in ways.items():
            at, efficiency = zip(*sorted(points), strict=True)
            style = "s--" if backward else "o-"
            label = f"{name}, {wire}, {'backward' if backward else 'forward'}"
            color = colormaps["tab20"](n % 20)
            axes.plot(at, efficiency, style, color=color, label=label, markersize=4)
    seen = sorted({getattr(case, x) for case, _ in outcomes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(seen, [size_text(v).split()[0] for v in seen])
    axes.minorticks_off()
    axes.set_xlabel("tokens" if x == "seq" else "ranks")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
