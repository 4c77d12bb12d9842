"""A plan as a picture: whose pairs are whose, what each rank computes when, and what it reads.

Three panels, all from :class:`ringfa4.launch.plan_numbers.Numbers`:

    the mask     queries down, keys to the right; a cell has the colour of the rank that computes it
    the work     a bar a rank, cut into steps; the colour is that of the rank whose K/V it reads
    the reads    bytes by rank and step

So the same colour is the same rank everywhere. matplotlib is optional; nothing else here needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringfa4.errors import MissingLibraryError
from ringfa4.launch.plan_numbers import Numbers
from ringfa4.launch.sizes import bytes_text
from ringfa4.mask import Mask
from ringfa4.shard import Sharding

CELLS = 160
"""Cells of the mask's picture, each way: about two pixels each."""

LABELLED = 16
"""Up to so many ranks have their number in bars and cells."""

GREY = (0.62, 0.62, 0.62)
"""Cells whose tokens several ranks share."""


def save(numbers: Numbers, path: str | Path, title: str, subtitle: str) -> None:
    """Write the picture to ``path`` (the suffix chooses the format). MissingLibraryError without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise MissingLibraryError(
            "a picture needs matplotlib, which is not installed: pip install 'ringfa4[plot]'"
        ) from None
    engine = ConstrainedLayoutEngine(rect=(0.0, 0.0, 1.0, 0.91), h_pad=0.08, wspace=0.03)
    figure = Figure(figsize=(13, 6.6), dpi=100, layout=engine)
    figure.text(0.01, 0.985, title, fontsize=14, fontweight="bold", ha="left", va="top")
    figure.text(0.01, 0.94, subtitle, fontsize=10, color="0.3", ha="left", va="top")
    panels = figure.subplot_mosaic([["mask", "work"], ["mask", "reads"]], width_ratios=[1, 1.15])
    colors = palette(numbers.world)
    draw_mask(panels["mask"], numbers, colors)
    draw_work(panels["work"], numbers, colors)
    draw_reads(figure, panels["reads"], numbers)
    figure.savefig(path)


def palette(world: int) -> list[tuple[float, float, float]]:
    """One colour a rank: distinct ones for a few ranks, a wheel for many."""
    from matplotlib import colormaps

    for name in ("tab10", "tab20"):
        table = colormaps[name]
        listed = [table(n) for n in range(table.N)]
        distinct = [c for c in listed if max(c[:3]) - min(c[:3]) > 0.1]  # GREY is taken
        if world <= len(distinct):
            return [(c[0], c[1], c[2]) for c in distinct[:world]]
    wheel = colormaps["turbo"]
    picked = (wheel((r + 0.5) / world) for r in range(world))
    return [(c[0], c[1], c[2]) for c in picked]


def owners(sharding: Sharding, cells: int) -> list[int | None]:
    """The rank that owns most of each of ``cells`` equal parts of the sequence; None: none does."""
    held: list[dict[int, float]] = [{} for _ in range(cells)]
    size = sharding.seq / cells
    for rank, shard in enumerate(sharding.shards):
        for chunk in shard.chunks:
            for n in range(int(chunk.start / size), min(cells, int((chunk.stop - 1) / size) + 1)):
                overlap = min(chunk.stop, (n + 1) * size) - max(chunk.start, n * size)
                held[n][rank] = held[n].get(rank, 0.0) + max(0.0, overlap) / chunk.stride
    found: list[int | None] = []
    for part in held:
        rank = max(part, key=part.__getitem__)
        found.append(rank if part[rank] > 0.55 * sum(part.values()) else None)
    return found


def coverage(mask: Mask, rows: int, columns: int) -> list[list[float]]:
    """Share of allowed pairs in each cell of a grid over the mask's first batch row."""
    grid = [[0.0] * columns for _ in range(rows)]
    q_edges, k_edges = (
        [seq * n // cells for n in range(cells + 1)]
        for seq, cells in ((mask.seq_q, rows), (mask.seq_k, columns))
    )
    for band in mask.rows[0]:
        for a in range(band.q0 * rows // mask.seq_q, -(-band.q1 * rows // mask.seq_q)):
            strip = band.within(q_edges[a], q_edges[a + 1], 0, mask.seq_k)
            if strip is None:
                continue
            first = strip.k0 * columns // mask.seq_k
            for b in range(first, -(-strip.k1 * columns // mask.seq_k)):
                piece = strip.within(0, mask.seq_q, k_edges[b], k_edges[b + 1])
                cell = (q_edges[a + 1] - q_edges[a]) * (k_edges[b + 1] - k_edges[b])
                grid[a][b] += piece.area / cell if piece is not None else 0.0
    return grid


def draw_mask(axes: Any, numbers: Numbers, colors: list[tuple[float, float, float]]) -> None:
    mask, sharding = numbers.mask, numbers.sharding
    axes.set_title("Who computes which pair", loc="left", fontsize=11)
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    if not mask.area:
        axes.text(0.5, 0.5, "no pair is allowed", ha="center", transform=axes.transAxes)
        return
    rows, columns = min(CELLS, mask.seq_q), min(CELLS, mask.seq_k)
    share = coverage(mask, rows, columns)
    whose = owners(sharding, rows)
    image = [
        [_faded(GREY if rank is None else colors[rank], cell) for cell in line]
        for rank, line in zip(whose, share, strict=True)
    ]
    extent = (0, mask.seq_k, mask.seq_q, 0)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    for ticks, seq in ((axes.set_xticks, mask.seq_k), (axes.set_yticks, mask.seq_q)):
        at = [seq * n // 4 for n in range(5)]
        ticks(at, [_short(n) for n in at])
    note = f"colour: the rank that owns the query ({sharding.name})"
    if None in whose:
        note += "; grey: several ranks' tokens"
    if mask.batch > 1:
        note += f"; batch row 0 of {mask.batch}"
    axes.text(0.0, -0.12, note, fontsize=9, color="0.3", transform=axes.transAxes)
    _legend(axes, colors)


def _legend(axes: Any, colors: list[tuple[float, float, float]]) -> None:
    """Which colour is which rank: all of them, or nine of many."""
    from matplotlib.patches import Patch

    world = len(colors)
    if world > LABELLED:
        some = sorted({(world - 1) * n // 8 for n in range(9)})
        handles = [Patch(color=colors[r], label=f"rank {r}") for r in some]
        axes.legend(handles=handles, loc="upper right", fontsize=8)
        return
    handles = [Patch(color=color, label=f"rank {r}") for r, color in enumerate(colors)]
    axes.legend(handles=handles, loc="upper right", fontsize=8, ncols=1 + len(colors) // 9)


def _faded(color: tuple[float, float, float], share: float) -> tuple[float, ...]:
    """``color`` on white; whatever is allowed at all stays visible."""
    strength = 0.0 if share <= 0 else 0.3 + 0.7 * min(share, 1.0)
    return tuple(1 - strength * (1 - c) for c in color)


def draw_work(axes: Any, numbers: Numbers, colors: list[tuple[float, float, float]]) -> None:
    axes.set_title(
        "What each rank computes, step after step (colour: whose K/V it reads)",
        loc="left",
        fontsize=11,
    )
    few = numbers.world <= LABELLED
    fair = numbers.fair or 1.0
    longest = max(numbers.work) / fair
    height = 0.86 if few else 1.0
    for rank, own in enumerate(numbers.steps):
        at, bars = 0.0, []
        for work in own:
            width = work.pairs / fair
            bars.append((at, width))
            if few and width > 0.025 * longest:
                middle = at + width / 2
                axes.text(middle, rank, str(work.owner), ha="center", va="center", fontsize=8)
            at += width
        axes.broken_barh(  # one object a rank: thousands of bars apiece take seconds
            bars,
            (rank - height / 2, height),
            facecolors=[colors[work.owner] for work in own],
            edgecolor="white",
            linewidth=0.5 if few else 0,
        )
    axes.axvline(1.0, color="black", linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(longest, 1.0) * 1.06)
    axes.set_xlabel("work (pairs); 1, dashed: what each would have if all had the same")
    _ranks(axes, numbers.world)


def draw_reads(figure: Any, axes: Any, numbers: Numbers) -> None:
    from matplotlib import colormaps

    moved = [[w.read + w.carried + w.returned for w in own[1:]] for own in numbers.steps]
    what = "reads, and returns as dK/dV," if numbers.backward else "reads"
    axes.set_title(f"What each rank {what} in each step", loc="left", fontsize=11)
    order = "rank r - t" if numbers.plan.order.count == 1 else "its domain, or carried into it"
    axes.set_xlabel(f"step t: from {order}, under way while step t - 1 computes")
    _ranks(axes, numbers.world)
    most = max((x for line in moved for x in line), default=0)
    if not most:
        axes.text(0.5, 0.5, "nothing moves", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_ylim(numbers.world - 0.5, -0.5)
        return
    unit, name = _unit(most)
    image = axes.imshow(
        [[x / unit if x else float("nan") for x in line] for line in moved],
        aspect="auto",
        interpolation="nearest",
        cmap=colormaps["viridis_r"],
        vmin=0,
        extent=(0.5, len(moved[0]) + 0.5, numbers.world - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, label=f"{name} (white: nothing)", pad=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if numbers.world <= LABELLED:
        for rank, line in enumerate(moved):
            for t, x in enumerate(line, 1):
                if x:
                    dark = x > 0.5 * most
                    color = "white" if dark else "black"
                    text = f"{x / unit:.3g}"
                    axes.text(t, rank, text, ha="center", va="center", fontsize=8, color=color)


def _ranks(axes: Any, world: int) -> None:
    """Rank 0 at the top, whole numbers only."""
    axes.set_ylabel("rank")
    axes.set_ylim(world - 0.5, -0.5)
    if world <= LABELLED:
        axes.set_yticks(range(world))


def _unit(n: int) -> tuple[int, str]:
    """The binary unit in which ``n`` bytes read well."""
    name = bytes_text(n).split()[1]
    return {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[name], name


def _short(n: int) -> str:
    """A position on an axis: 262144 -> 256K."""
    for suffix, unit in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= unit and n % (unit // 4) == 0:
            return f"{n / unit:g}{suffix}"
    return str(n)
