"""Run one ring attention from the shell: measured, and checked against fp64.

    torchrun --standalone --nproc-per-node 2 launch/ring.py --seq 64K --backward --check
    torchrun launch/ring.py --seq 1M                        one process
    python launch/ring.py --seq 16K --virtual-ranks 5       five ranks as threads of one process

This file finds out where it runs and turns errors into lines and exit codes: 0 done, 1 refused,
failed or past tolerance, 2 usage. What a rank does is :mod:`ringfa4.launch.runs`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.context import Context, close_contexts, context_for
from ringfa4.errors import RingError
from ringfa4.launch import table
from ringfa4.launch.console import Console
from ringfa4.launch.options import Options, UsageError, parse_options
from ringfa4.launch.peers import Alone, Peers, Processes, Threads
from ringfa4.launch.runs import Report, run_rank
from ringfa4.launch.workload import Workload, build, choose_device


def environment() -> tuple[int, int, int]:
    """(rank, world, local rank) from torchrun, or (0, 1, 0)."""
    rank, world, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    return rank, world, local


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one process; ``argv`` None is the command line."""
    rank = environment()[0]
    try:
        options = parse_options(argv)
        passed = launch(options, shlex.join(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        _complain(rank, f"{error.usage}ring.py: error: {error}")
        return 2
    except (ValueError, OSError) as error:  # alike on every rank: said once
        _complain(rank, f"ring.py: {error}")
        return 1
    except RingError as error:  # each rank knows something of its own
        print(f"ring.py: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0 if passed else 1


def _complain(rank: int, message: str) -> None:
    """Rank 0 says it. The others give it time to, since torchrun ends all when one has ended."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)


def launch(options: Options, command: str) -> bool:
    """Run ``options`` on the ranks that there are; whether the check passed (True without one)."""
    rank, world, local = environment()
    if options.virtual_ranks is not None and world > 1:
        raise ValueError(
            f"--virtual-ranks {options.virtual_ranks} runs in one process, not {world}"
        )
    device = choose_device(options)
    work = build(options, device)
    human = sys.stderr if options.json == "-" else sys.stdout
    console = Console(human, speaks=rank == 0)
    ranks = options.virtual_ranks or world
    console.say(f"launch/ring.py {command}")
    console.table(table.settings(options, work, device, ranks), numbers=False)
    if options.virtual_ranks is not None:
        report = virtual(options, work, console, device)
    elif world > 1:
        report = processes(options, work, console, device, local)
    else:
        context = context_for(device=device, transport=options.transport, timeout_s=options.timeout)
        report = run_rank(options, work, context, Alone(), console)
        close_contexts()
    if rank == 0:
        _show(options, work, console, report)
    text = table.json_text(options, work, device, ranks, f"launch/ring.py {command}", report)
    if rank == 0 and options.json == "-":
        print(text)
    elif rank == 0 and options.json is not None:
        Path(options.json).write_text(text + "\n")
    return report.passed


def processes(
    options: Options, work: Workload, console: Console, device: str, local: int
) -> Report:
    """One rank a process, as torchrun started them."""
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    context = context_for(transport=options.transport, timeout_s=options.timeout)
    report = run_rank(options, work, context, Processes(context.device), console)
    close_contexts()
    dist.destroy_process_group()
    return report


def virtual(options: Options, work: Workload, console: Console, device: str) -> Report:
    """All ranks as threads of this process, which share its CPU or one GPU."""
    if options.transport not in ("auto", "local"):
        raise ValueError(f"virtual ranks move bytes by 'local', not {options.transport!r}")
    assert options.virtual_ranks is not None
    threads = Threads(options.virtual_ranks, options.timeout)

    def main_of(rank: int, transport: Transport, control: Control) -> Report:
        peers: Peers = threads.member(rank)
        quiet = console if rank == 0 else Console(console.stream, speaks=False)
        try:
            return run_rank(options, work, Context(transport, control), peers, quiet)
        except BaseException:
            threads.abort()
            raise

    return run_ranks(options.virtual_ranks, main_of, options.timeout, device)[0]


def _show(options: Options, work: Workload, console: Console, report: Report) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
