"""The ring against one direct call over the whole sequence, in one run.

    python launch/bench.py --seq 16K,64K --heads 4 --wire bf16,mxfp8 --ranks 2,4
    python launch/bench.py --seq 16K --sharding zigzag,striped --repeat 5 --plot ratios.png
    torchrun --standalone --nproc-per-node 2 launch/bench.py --seq 16K --json -

Options that take lists span a grid: every shape is measured with every setup. Ranks are threads of
this process, or the processes that torchrun started. What is measured, and how it is kept fair:
:mod:`ringfa4.launch.bench_runs`. A row that cannot be computed says why.

    busy     CPU seconds of all ranks (on a GPU: seconds of its stream)
    ratio    median of busy / the direct call's busy, in the same repetition; range: all repetitions
    TFLOP/s  of the pairs that the mask allows, by wall time

    torchrun --standalone --nproc-per-node 2 launch/bench.py --scaling --help

measures something else, on GPUs: :mod:`ringfa4.launch.scaling`.

--trace FILE runs each ring a second time while it records its spans, compares that with the ring
that does not, and writes the timeline.

--model sm100 measures nothing: it prints what forward kernels should reach on B200 and B300,
modelled from counted instructions (:mod:`ringfa4.launch.cost_model`).
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ringfa4.context import Context
from ringfa4.launch import cost_tables, scaling
from ringfa4.launch.bench_plot import plot, require_matplotlib
from ringfa4.launch.bench_runs import (
    Common,
    Measured,
    Row,
    Setup,
    Shape,
    Stage,
    base_of,
    direct_costs,
    flops,
    grid,
    ring_costs,
    run,
)
from ringfa4.launch.chrome_trace import document
from ringfa4.launch.clocks import CLOCKS, Cost
from ringfa4.launch.console import Console
from ringfa4.launch.options import DTYPES, SHARDINGS, Parser, require_folders, typed
from ringfa4.launch.peers import Alone, Peers
from ringfa4.launch.sizes import parse_size, parse_sizes, size_text
from ringfa4.launch.workload import DTYPES as TORCH_DTYPES
from ringfa4.launch.world import environment, exit_code, one_rank, virtual
from ringfa4.wire import Direction


@dataclass(frozen=True)
class Options:
    """One field per option, by its name; lists span the grid."""

    seq: list[int]
    heads: list[int]
    kv_heads: list[int] | None
    head_dim: int
    dtype: str
    mask: str
    wire: list[str] | None
    sharding: list[str]
    ranks: list[int] | None
    kernel: str
    precondition: str
    transport: str
    device: str | None
    forward_only: bool
    repeat: int
    threads: int
    seed: int
    timeout: float
    json: str | None
    plot: str | None
    trace: str | None
    model: str | None


def _names(text: str, known: Sequence[str] = ()) -> list[str]:
    names = text.split(",")
    for name in names:
        if known and name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return names


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options of ``argv`` (None: the process's own). Raises UsageError."""
    parser = Parser(
        prog="bench.py",
        description="The ring against one direct call. Sizes take K, M, G (binary), and lists.",
        epilog=(__doc__ or "").partition("\n\n")[2].partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes, count = typed(parse_sizes, 1), typed(parse_size, 1)
    names, shardings = typed(_names), typed(lambda text: _names(text, SHARDINGS))
    shape = parser.add_argument_group("shapes")
    shape.add_argument("--seq", type=sizes, default=[16 << 10], metavar="N,..", help="tokens")
    shape.add_argument("--heads", type=sizes, default=[4], metavar="N,..", help="query heads")
    shape.add_argument("--kv-heads", type=sizes, metavar="N,..", help="as --heads if not given")
    shape.add_argument("--head-dim", type=count, default=64, metavar="N")
    shape.add_argument("--dtype", choices=DTYPES, default="bf16")
    shape.add_argument("--mask", choices=("causal", "full"), default="causal")
    shape.add_argument("--seed", type=int, default=0, help="of the random inputs")
    ring = parser.add_argument_group("rings")
    ring.add_argument("--wire", type=names, metavar="NAME,..", help="default: as --dtype")
    ring.add_argument("--sharding", type=shardings, default=["zigzag"], metavar="NAME,..")
    ring.add_argument("--ranks", type=sizes, metavar="N,..", help="default 2, or torchrun's")
    ring.add_argument("--kernel", metavar="NAME", default="auto")
    ring.add_argument("--precondition", metavar="NAME", default="none")
    ring.add_argument("--transport", metavar="NAME", default="auto")
    how = parser.add_argument_group("measuring")
    how.add_argument("--device", choices=tuple(CLOCKS), help="default: cuda if there is one")
    how.add_argument("--forward-only", action="store_true")
    how.add_argument("--repeat", type=count, default=3, metavar="N")
    how.add_argument("--threads", type=count, default=1, metavar="N", help="of PyTorch, each rank")
    how.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="wait for a peer")
    what = parser.add_argument_group("what comes out")
    what.add_argument("--json", metavar="FILE", help="results as JSON ('-': standard output)")
    what.add_argument("--plot", metavar="FILE", help="picture of the ratios (PNG)")
    what.add_argument("--trace", metavar="FILE", help="timeline of the rings, and what it costs")
    what.add_argument("--scaling", action="store_true", help="another bench: --scaling --help")
    what.add_argument("--model", choices=("sm100",), help="modelled rates instead of measured ones")
    values = parser.parse_args(argv)
    for name in ("seq", "heads", "kv_heads", "ranks"):
        if 0 in (getattr(values, name) or ()):
            parser.error(f"--{name.replace('_', '-')} must not be 0")
    return Options(**{f.name: getattr(values, f.name) for f in fields(Options)})


# ---- where ranks run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Threads:
    """Virtual ranks; the direct call runs in the main thread."""

    options: Options
    device: str

    def direct(self, common: Common, shape: Shape) -> dict[Direction, Cost]:
        return direct_costs(common, shape, Alone(), CLOCKS[self.device]())

    def ring(self, common: Common, shape: Shape, setup: Setup) -> Measured:
        def rank(context: Context, peers: Peers) -> Measured:
            clock = CLOCKS[self.device]() if peers.rank == 0 else None
            return ring_costs(common, shape, setup, context, peers, clock)

        timeout = self.options.timeout
        return virtual(setup.ranks, self.options.transport, rank, self.device, timeout)[0]


@dataclass(frozen=True)
class Processes:
    """One rank a process; rank 0 makes the direct call."""

    context: Context
    peers: Peers
    device: str

    def direct(self, common: Common, shape: Shape) -> dict[Direction, Cost]:
        return direct_costs(common, shape, self.peers, CLOCKS[self.device]())

    def ring(self, common: Common, shape: Shape, setup: Setup) -> Measured:
        clock = CLOCKS[self.device]()
        return ring_costs(common, shape, setup, self.context, self.peers, clock)


# ---- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one process; ``argv`` None is the command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--scaling" in given:
        given.remove("--scaling")
        return scaling.main(given)
    command = f"launch/bench.py {shlex.join(given)}"
    return exit_code("bench.py", lambda: bench(parse_options(given), command))


def bench(options: Options, command: str) -> bool:
    """Measure, and say it in all the ways that were asked for; True."""
    rank, world, _ = environment()
    require_folders(json=options.json, plot=options.plot, trace=options.trace)
    if options.model is not None:
        _model(options, rank)
        return True
    if options.plot is not None:
        require_matplotlib()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if world > 1 and options.ranks not in (None, [world]):
        raise ValueError(f"--ranks {options.ranks}: torchrun started {world} processes")
    shapes = [
        Shape(*numbers)
        for heads in options.heads
        for numbers in product(options.seq, [heads], options.kv_heads or [heads])
    ]
    ranks = options.ranks or [world if world > 1 else 2]
    wires = options.wire or [options.dtype]
    rows = grid(shapes, wires, options.sharding, ranks, traced=options.trace is not None)
    common = Common(
        head_dim=options.head_dim,
        dtype=TORCH_DTYPES[options.dtype],
        mask=options.mask,
        kernel=options.kernel,
        precondition=options.precondition,
        device=torch.device(device),
        backward=not options.forward_only,
        seed=options.seed,
    )
    console = Console(sys.stderr if options.json == "-" else sys.stdout, speaks=rank == 0)
    console.say(command)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with ExitStack() as stack:
            stage: Stage = Threads(options, device)
            if world > 1:
                opened = one_rank(device, options.transport, options.timeout)
                stage = Processes(*stack.enter_context(opened), device)
            parts = run(rows, common, stage, options.repeat, lambda *at: _progress(console, *at))
    finally:
        torch.set_num_threads(before)
    if rank == 0:
        unit = CLOCKS[device]().unit
        for shape in shapes:
            console.say(f"\n{_title(common, shape)}, {options.threads} thread(s) a rank")
            console.table(table([row for row in rows if row.shape == shape], common, unit))
            for row in rows:
                if row.shape == shape and row.refused is not None:
                    console.say(f"{_label(row)}: refused: {row.refused}")
        _write(options, command, rows, common, parts)
    return True


def _model(options: Options, rank: int) -> None:
    if rank != 0:
        return
    if options.json is None:
        cost_tables.report(Console(sys.stdout, speaks=True))
        return
    text = json.dumps(cost_tables.as_json(), indent=2)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).write_text(text + "\n")


def _progress(console: Console, row: Row, repetition: int) -> None:
    costs = ", ".join(f"{name} {costs[-1].busy_s:.3g} s busy" for name, costs in row.costs.items())
    seq = size_text(row.shape.seq).split()[0]
    console.rewrite(f"{repetition + 1}: {seq} tokens, {_label(row)}: {costs or row.refused}")


def _label(row: Row) -> str:
    return "direct call" if row.setup is None else str(row.setup)


def _title(common: Common, shape: Shape) -> str:
    dtype = str(common.dtype).removeprefix("torch.")
    heads = f"{shape.heads}:{shape.kv_heads} heads of {common.head_dim}"
    return f"{size_text(shape.seq)} tokens, {heads}, {dtype}, {common.mask}, {common.device}"


def table(rows: Sequence[Row], common: Common, unit: str) -> list[tuple[str, ...]]:
    """One line for each measured row and pass."""
    lines: list[tuple[str, ...]] = [
        ("", "pass", unit, "wall s", "TFLOP/s", "ratio", "range", "wall ratio")
    ]
    for row in rows:
        for name in common.passes if row.costs else ():
            cost, compared = row.median(name), comparison(rows, row, name)
            rate = flops(common, row.shape, name) / cost.wall_s / 1e12
            numbers = f"{cost.busy_s:.3f}", f"{cost.wall_s:.3f}", f"{rate:.3g}"
            if compared is None:
                ratios: tuple[str, ...] = ("", "", "")
            else:
                low, high = compared["busy_range"]
                ratios = (
                    f"{compared['busy']:.3f}",
                    f"{low:.3f}..{high:.3f}",
                    f"{compared['wall']:.3f}",
                )
            lines.append((_label(row), name, *numbers, *ratios))
    return lines


def comparison(rows: Sequence[Row], row: Row, name: Direction) -> dict[str, Any] | None:
    """Medians of the ratios to what the row is compared with; None without that."""
    base = base_of(rows, row)
    if base is None or not base.costs:
        return None
    ratios = row.ratios(base, name)
    busy = [ratio.busy_s for ratio in ratios]
    return {
        "to": _label(base),
        "busy": statistics.median(busy),
        "busy_range": (min(busy), max(busy)),
        "wall": statistics.median(ratio.wall_s for ratio in ratios),
    }


def _write(
    options: Options, command: str, rows: Sequence[Row], common: Common, parts: list[Any]
) -> None:
    if options.plot is not None:
        plot(options.plot, rows, common, command)
    if options.trace is not None and parts:
        Path(options.trace).write_text(json.dumps(document(parts)))
    if options.json is None:
        return
    text = json.dumps(as_json(options, command, rows, common), indent=2)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).write_text(text + "\n")


def as_json(options: Options, command: str, rows: Sequence[Row], common: Common) -> dict[str, Any]:
    """All costs, repetition by repetition, and what the table makes of them."""
    found = []
    for row in rows:
        passes = {}
        for name in common.passes if row.costs else ():
            passes[name] = {
                "costs": [asdict(cost) for cost in row.costs[name]],
                "median": asdict(row.median(name)),
                "ratio": comparison(rows, row, name),
            }
        setup = None if row.setup is None else asdict(row.setup)
        found.append(
            {"shape": asdict(row.shape), "setup": setup, "refused": row.refused, "passes": passes}
        )
    about = {"torch": torch.__version__, "python": platform.python_version()}
    return {"command": command, **about, "options": asdict(options), "rows": found}


if __name__ == "__main__":
    sys.exit(main())
