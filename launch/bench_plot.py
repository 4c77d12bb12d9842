"""bench.py's picture: busy time of each ring over the direct call, by sequence length.

One panel a pass; a line a setup through the medians, a dot a repetition. Needs matplotlib.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ringfa4.errors import MissingLibraryError
from ringfa4.launch.bench_runs import Common, Row, Setup, base_of
from ringfa4.launch.sizes import size_text


def require_matplotlib() -> None:
    """Raises MissingLibraryError that says how to get it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingLibraryError("--plot needs matplotlib: pip install 'ringfa4[plot]'")


def plot(path: str, rows: Sequence[Row], common: Common, title: str) -> None:
    """Write the PNG (or what the name's suffix says)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(common.passes), 5.0), layout="constrained")
    panels = figure.subplots(1, len(common.passes), sharey=True, squeeze=False)[0]
    lines: dict[tuple[Setup, int, int], list[Row]] = {}
    for row in rows:
        base = base_of(rows, row)
        if row.setup is not None and row.costs and base is not None and base.costs:
            where = row.setup, row.shape.heads, row.shape.kv_heads
            lines.setdefault(where, []).append(row)
    colours: dict[tuple[Setup, int, int], str] = {}  # a traced ring has that of the untraced one
    for panel, name in zip(panels, common.passes, strict=True):
        for (setup, heads, kv_heads), members in lines.items():
            alike = replace(setup, traced=False), heads, kv_heads
            colour = colours.setdefault(alike, f"C{len(colours)}")
            medians = []
            for row in members:
                base = base_of(rows, row)
                assert base is not None, "rows without one are left out above"
                ratios = [ratio.busy_s for ratio in row.ratios(base, name)]
                medians.append(statistics.median(ratios))
                panel.plot([row.shape.seq] * len(ratios), ratios, ".", color=colour, alpha=0.4)
            label = f"{setup}, {heads}:{kv_heads} heads"
            style = "o--" if setup.traced else "o-"
            panel.plot([r.shape.seq for r in members], medians, style, color=colour, label=label)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        seqs = sorted({row.shape.seq for members in lines.values() for row in members})
        panel.set_xticks(seqs, [size_text(seq).split()[0] for seq in seqs])
        panel.minorticks_off()
        panel.set_title(name)
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("busy time over the direct call's\n(dashed: traced over untraced)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
