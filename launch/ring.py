"""Run one ring attention from the shell: measured, and checked against fp64.

    torchrun --standalone --nproc-per-node 2 launch/ring.py --seq 64K --backward --check
    torchrun launch/ring.py --seq 1M                        one process
    python launch/ring.py --seq 16K --virtual-ranks 5       five ranks as threads of one process

Where ranks run, and exit codes: :mod:`ringfa4.launch.world`. What a rank does:
:mod:`ringfa4.launch.runs`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ringfa4.context import Context
from ringfa4.launch import table
from ringfa4.launch.console import Console
from ringfa4.launch.options import Options, parse_options, require_folders
from ringfa4.launch.peers import Peers
from ringfa4.launch.runs import Report, run_rank
from ringfa4.launch.workload import Workload, build, choose_device
from ringfa4.launch.world import environment, exit_code, one_rank, virtual


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one process; ``argv`` None is the command line."""
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    return exit_code("ring.py", lambda: launch(parse_options(argv), command))


def launch(options: Options, command: str) -> bool:
    """Run ``options`` on the ranks that there are; whether the check passed (True without one)."""
    rank, world, _ = environment()
    if options.virtual_ranks is not None and world > 1:
        raise ValueError(
            f"--virtual-ranks {options.virtual_ranks} runs in one process, not {world}"
        )
    require_folders(output=options.output, json=options.json, trace=options.trace)
    device = choose_device(options)
    work = build(options, device)
    human = stream_for_people(options)
    console = Console(human, speaks=rank == 0)
    ranks = options.virtual_ranks or world
    console.say(f"launch/ring.py {command}")
    console.table(table.settings(options, work, device, ranks), numbers=False)
    if options.virtual_ranks is not None:

        def main_of(context: Context, peers: Peers) -> Report:
            quiet = console if peers.rank == 0 else Console(human, speaks=False)
            return run_rank(options, work, context, peers, quiet)

        reports = virtual(ranks, options.transport, main_of, device, options.timeout)
        report = reports[0]
    else:
        with one_rank(device, options.transport, options.timeout) as (context, peers):
            report = run_rank(options, work, context, peers, console)
    if rank == 0:
        conclude(options, work, device, ranks, f"launch/ring.py {command}", console, report)
    return report.passed


def stream_for_people(options: Options) -> TextIO:
    """Standard output, unless --json takes it."""
    return sys.stderr if options.json == "-" else sys.stdout


def conclude(
    options: Options,
    work: Workload,
    device: str,
    ranks: int,
    command: str,
    console: Console,
    report: Report,
    threads: int | None = None,
) -> None:
    """Rank 0's report: the tables, and the files of --trace and --json."""
    for line in report.choices:
        console.say(line)
    console.table(table.results(report))
    console.say(table.peak(report))
    if report.verdicts:
        console.table(table.verdicts(report))
        console.say(table.TOLERANCE)
        console.say("check passed" if report.passed else "check FAILED")
    if options.output is not None:
        console.say(f"wrote {options.output}")
    if options.trace is not None:
        Path(options.trace).write_text(json.dumps(report.timeline))
        console.say(f"wrote {options.trace}: open it at ui.perfetto.dev")
    text = table.json_text(options, work, device, ranks, command, report, threads)
    if options.json == "-":
        print(text)
    elif options.json is not None:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
