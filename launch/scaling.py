"""The ring on several GPUs beside its own kernel alone and beside what others do, in one run.

    torchrun --standalone --nproc-per-node 2 launch/bench.py --scaling --json FILE
    ... --scaling --rows '256K/16:16/causal/*' --budget 200     the most important first, in 200 s
    ... --scaling --list                                        the rows, and nothing else
    ... --scaling --json FILE --resume                          what FILE does not have yet

Rows, their names and order: :mod:`ringfa4.launch.scaling_rows`. How one is measured:
:mod:`ringfa4.launch.scaling_runs`. A row that cannot run says why, and the rest goes on; a row past
--row-limit ends the processes. Results reach FILE row by row, and --resume goes on behind the row
that ended the last run (:mod:`ringfa4.launch.scaling_journal`).

What the table's columns are: :mod:`ringfa4.launch.scaling_table`.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import torch

from ringfa4.comm.registry import TRANSPORTS
from ringfa4.launch.chrome_trace import Part, document
from ringfa4.launch.console import Console
from ringfa4.launch.options import DTYPES, Parser, require_folders, typed
from ringfa4.launch.scaling_journal import Journal
from ringfa4.launch.scaling_rivals import RIVALS
from ringfa4.launch.scaling_rows import Grid, Problem, Row, selected
from ringfa4.launch.scaling_runs import FLOPS_ASSUMED, Bench, Measured, measure
from ringfa4.launch.scaling_table import table
from ringfa4.launch.sizes import parse_size
from ringfa4.launch.workload import DTYPES as TORCH_DTYPES
from ringfa4.launch.world import environment, exit_code, one_rank

PROBLEMS = {
    "cuda": "256K/16:16/causal,1M/8:8/causal,256K/64:8/causal,64K/16:16/causal,64K/64:8/causal,"
    "256K/16:16/full,1M/16:16/causal,256K/64:8/full,64K/16:16/full,64K/64:8/full,"
    "1M/64:8/causal,1M/16:16/full,1M/64:8/full",
    "cpu": "2K/2:2/causal,2K/4:2/causal,2K/2:2/full",
}
"""What is measured unless --problems says otherwise, most important first."""

KERNELS = {"cuda": "fa4-nondeterministic,fa4", "cpu": "cpu"}
HEAD_DIM = {"cuda": 128, "cpu": 64}
TRANSPORT_ORDER = "symm_mem,nvshmem,torch_p2p"

ROW_OVERHEAD_S = {"cuda": 4.0, "cpu": 0.2}
"""What a row takes beside its passes: opening a transport, warming up, checking."""


@dataclass(frozen=True)
class Options:
    """One field per option, by its name."""

    problems: list[Problem] | None
    transport: list[str]
    wire: list[str]
    kernel: list[str] | None
    rivals: list[str]
    rows: list[str]
    head_dim: int | None
    dtype: str
    device: str | None
    forward_only: bool
    repeat: int
    burst: int
    row_seconds: float
    row_limit: float
    budget: float | None
    check_rows: int
    seed: int
    timeout: float
    list: bool
    resume: bool
    json: str | None
    trace: str | None


def _names(text: str, known: Sequence[str] = ()) -> list[str]:
    """``"a,b"``; "none" is no name at all."""
    names = [] if text == "none" else text.split(",")
    for name in names:
        if known and name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}, none")
    return names


def _problems(text: str) -> list[Problem]:
    return [Problem.parse(part) for part in text.split(",")]


def parse_options(argv: Sequence[str]) -> Options:
    """Options of ``argv``, without --scaling itself. Raises UsageError."""
    parser = Parser(
        prog="bench.py --scaling",
        description="Rows by importance; lists are in order of importance too.",
        epilog=(__doc__ or "").partition("\n\n")[2].partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    count, seconds = typed(parse_size, 1), typed(float, 0)
    what = parser.add_argument_group("rows")
    what.add_argument(
        "--problems",
        type=typed(_problems),
        metavar="SEQ/HEADS:KV_HEADS/MASK,..",
        help="64K to 1M, unless on the CPU",
    )
    what.add_argument(
        "--transport",
        type=typed(lambda text: _names(text, tuple(TRANSPORTS))),
        default=TRANSPORT_ORDER.split(","),
        metavar="NAME,..",
    )
    what.add_argument("--wire", type=typed(_names), default=["mxfp8", "bf16"], metavar="NAME,..")
    what.add_argument("--kernel", type=typed(_names), metavar="NAME,..", help="of ring and rivals")
    what.add_argument(
        "--rivals",
        type=typed(lambda text: _names(text, tuple(RIVALS))),
        default=list(RIVALS),
        metavar="NAME,..",
        help=f"of {', '.join(RIVALS)}; or none",
    )
    what.add_argument(
        "--rows",
        type=typed(_names),
        default=[],
        metavar="PATTERN,..",
        help="of row names; * is anything",
    )
    what.add_argument("--head-dim", type=count, metavar="N")
    what.add_argument("--dtype", choices=DTYPES, default="bf16")
    what.add_argument("--list", action="store_true", help="say the rows and measure nothing")
    how = parser.add_argument_group("measuring")
    how.add_argument("--device", choices=tuple(PROBLEMS), help="default: cuda if there is one")
    how.add_argument("--forward-only", action="store_true")
    how.add_argument("--repeat", type=count, default=3, metavar="N", help="at most, of each row")
    how.add_argument("--burst", type=count, default=4, metavar="N", help="short passes in a row")
    how.add_argument("--row-seconds", type=seconds, default=4.0, metavar="S", help="then no more")
    how.add_argument("--row-limit", type=seconds, default=120.0, metavar="S", help="ends processes")
    how.add_argument("--budget", type=seconds, metavar="S", help="begin no row that would pass it")
    how.add_argument(
        "--check-rows", type=typed(parse_size, 0), default=16, metavar="N", help="sampled; 0: none"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random inputs")
    how.add_argument("--timeout", type=seconds, default=100.0, metavar="S", help="wait for a peer")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="results, row by row")
    out.add_argument("--resume", action="store_true", help="go on with --json FILE")
    out.add_argument("--trace", metavar="FILE", help="timeline of the rings' calls, device times")
    values = parser.parse_args(argv)
    return Options(**{f.name: getattr(values, f.name) for f in fields(Options)})


# ---- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """The exit code of one process."""
    command = f"launch/bench.py --scaling {shlex.join(argv)}"
    return exit_code("bench.py", lambda: scaling(parse_options(argv), command))


def scaling(options: Options, command: str) -> bool:
    """Measure the rows and say what was found; True."""
    rank, world, _ = environment()
    require_folders(json=options.json, trace=options.trace)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    head_dim = options.head_dim or HEAD_DIM[device]
    grid = Grid(
        problems=options.problems or _problems(PROBLEMS[device]),
        transports=options.transport,
        wires=options.wire,
        kernels=options.kernel or KERNELS[device].split(","),
        rivals=options.rivals,
        dtype=options.dtype,
    )
    rows = selected(grid.rows(), options.rows)
    console = Console(sys.stdout, speaks=rank == 0)
    if options.list:
        for row in rows:
            console.say(row.name)
        return True
    about = {
        "command": command,
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "ranks": world,
        "head_dim": head_dim,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
        "python": platform.python_version(),
    }
    console.say(f"{command}: {len(rows)} rows, {world} rank(s) on {about['device']}")
    journal = Journal(options.json if rank == 0 else None, about, resume=options.resume)
    with one_rank(device, "torch_p2p", options.timeout) as (context, peers):
        bench = Bench(
            context=context,
            peers=peers,
            head_dim=head_dim,
            dtype=TORCH_DTYPES[options.dtype],
            backward=not options.forward_only,
            repeat=options.repeat,
            burst=options.burst,
            row_seconds=options.row_seconds,
            check_rows=options.check_rows,
            seed=options.seed,
            timeout_s=options.timeout,
        )
        _Run(options, bench, journal, console).all(rows)
    console.say()
    console.table(table(rows, journal.rows, world, head_dim))
    for row in rows:
        entry = journal.rows.get(row.name, {"state": "left out", "why": "not reached"})
        if entry["state"] != "done":
            console.say(f"{row.name}: {entry['state']}: {entry['why']}")
    return True


class _Run:
    """All rows, on one rank. What is measured or left out is rank 0's decision."""

    def __init__(self, options: Options, bench: Bench, journal: Journal, console: Console) -> None:
        self.options, self.bench = options, bench
        self.journal, self.console = journal, console
        self.began = time.monotonic()
        self.rate: float | None = None
        self.traces: list[list[Part]] = []

    def all(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._agreed(row.name in self.journal):
                continue
            if self._agreed(not self._fits(row)):
                why = f"no time left of --budget {self.options.budget:g}"
                self.journal.note(row.name, "left out", why=why)
                continue
            self.console.rewrite(row.name)
            self.journal.note(row.name, "begun")
            with self.journal.limit(row.name, self.options.row_limit):
                found = self._one(row)
            if isinstance(found, str):
                self.journal.note(row.name, "refused", why=found)
                continue
            self.journal.note(row.name, "done", result=found.as_json())
            self._learn(row, found)
            if found.parts and self.options.trace is not None:
                self.traces.append(found.parts)
                if self.bench.peers.rank == 0:
                    Path(self.options.trace).write_text(json.dumps(document(self.traces)))

    def _agreed(self, own: bool) -> bool:
        """What rank 0 says; only it has the file and the time that counts. Collective."""
        said = float(own and self.bench.peers.rank == 0)
        return self.bench.most(said) > 0

    def _fits(self, row: Row) -> bool:
        if self.options.budget is None:
            return True
        device = self.bench.device.type
        rate = self.rate or FLOPS_ASSUMED[device]
        work = sum(row.problem.flops(d, self.bench.head_dim) for d in self.bench.directions)
        once = work / (rate * self.bench.peers.world)
        # One repetition, and of a local row one that keeps the library calls, and those again.
        expected = ROW_OVERHEAD_S[device] + 3 * once
        return time.monotonic() - self.began + expected <= self.options.budget

    def _learn(self, row: Row, found: Measured) -> None:
        """The slowest rate so far: rows are left out rather than cut off."""
        work = sum(row.problem.flops(d, self.bench.head_dim) for d in self.bench.directions)
        spent = sum(p.reported_s for p in found.passes.values())
        rate = work / spent / self.bench.peers.world
        self.rate = rate if self.rate is None else min(self.rate, rate)

    def _one(self, row: Row) -> Measured | str:
        """What was measured, or why not, the same on every rank."""
        why, found = None, None
        try:
            found = measure(self.bench, row, traced=self.options.trace is not None)
        except ValueError as error:
            why = str(error)
        except Exception as error:  # other people's code and a full memory: the next row may do
            why = f"{type(error).__name__}: {error}"
        gc.collect()
        try:
            told = None if why is None else ValueError(why)
            self.bench.context.agree({"call": row.name}, error=told)
        except ValueError as error:
            return str(error)
        assert found is not None
        return found
