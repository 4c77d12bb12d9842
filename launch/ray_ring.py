"""Run the ring attention of launch/ring.py on a Ray cluster.

    python launch/ray_ring.py --nodes 2 --ranks-per-node 2 --seq 256K --backward --check
    python launch/ray_ring.py --address auto --nodes 4 --ranks-per-node 8 --seq 8M

Options, table, JSON and trace are launch/ring.py's; the driver prints them and writes the files
(--output is written by all ranks, hence must lie on storage that they share). Without --address
a cluster of --nodes nodes is started on this machine and ended with the command. Unless --domains
says otherwise, domains are the cluster's: NVLink's where there are GPUs, else nodes. A failure is
one line that names rank and step; --retries N starts all ranks again from the inputs.

Exit codes as launch/ring.py's. What a gang is: :mod:`ringfa4.launch.ray_gang`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from ringfa4.errors import MissingLibraryError
from ringfa4.launch import table
from ringfa4.launch.console import Console
from ringfa4.launch.options import Options, options_of, require_folders, ring_parser, typed
from ringfa4.launch.ray_job import job
from ringfa4.launch.ray_outcomes import RankFailed
from ringfa4.launch.ray_places import even_domains
from ringfa4.launch.ring import conclude, stream_for_people
from ringfa4.launch.runs import Report
from ringfa4.launch.workload import build
from ringfa4.launch.world import exit_code

if TYPE_CHECKING:
    from ringfa4.launch.ray_cluster import Ring

EPILOG = """\
examples:
  python launch/ray_ring.py --nodes 2 --ranks-per-node 2 --seq 256K --backward --check
  python launch/ray_ring.py --address auto --nodes 4 --ranks-per-node 8 --seq 8M --retries 2

exit codes: 0 done (and within tolerance), 1 refused, failed or past tolerance, 2 usage
"""


@dataclass(frozen=True)
class RayOptions:
    """One field per option of this launcher alone, by its name."""

    address: str | None
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    retries: int
    port: int
    start_timeout: float


def parse_options(argv: Sequence[str] | None = None) -> tuple[Options, RayOptions]:
    """Options of ``argv`` (None: the process's own); UsageError as launch/ring.py's."""
    parser = ring_parser("ray_ring.py", EPILOG)
    where = parser.add_argument_group("where it runs")
    count = typed(int, 1)
    where.add_argument(
        "--address", metavar="A", help="of a cluster, or 'auto' (default: one on this machine)"
    )
    where.add_argument("--nodes", type=count, default=1, metavar="N")
    where.add_argument("--ranks-per-node", type=count, default=1, metavar="N")
    where.add_argument("--cpus-per-rank", type=count, default=1, metavar="N", help="threads too")
    where.add_argument(
        "--retries", type=typed(int, 0), default=0, metavar="N", help="start again N times"
    )
    where.add_argument(
        "--port", type=typed(int, 0), default=0, metavar="P", help="first that rank 0 tries"
    )
    where.add_argument(
        "--start-timeout", type=float, default=120.0, metavar="S", help="for nodes and ranks"
    )
    values = parser.parse_args(argv)
    if values.virtual_ranks is not None:
        parser.error("--virtual-ranks are threads of one process; see launch/ring.py")
    ours = RayOptions(**{field.name: getattr(values, field.name) for field in fields(RayOptions)})
    return options_of(parser, values), ours


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; ``argv`` None is the command line."""
    command = shlex.join(sys.argv[1:] if argv is None else argv)

    def run() -> bool:
        try:
            return launch(*parse_options(argv), command)
        except RankFailed as error:
            print(f"{error.details}ray_ring.py: {error}", file=sys.stderr, flush=True)
        except MissingLibraryError as error:
            print(f"ray_ring.py: {error}", file=sys.stderr, flush=True)
        return False

    return exit_code("ray_ring.py", run)


def launch(options: Options, ours: RayOptions, command: str) -> bool:
    """Run ``options`` on a cluster; whether the check passed (True without one)."""
    from ringfa4.launch.ray_cluster import ring_cluster  # so that --help needs no Ray

    require_folders(output=options.output, json=options.json, trace=options.trace)
    stream = stream_for_people(options)
    console = Console(stream, speaks=True)
    command = f"launch/ray_ring.py {command}"
    console.say(command)
    with ring_cluster(
        ours.nodes,
        ours.ranks_per_node,
        address=ours.address,
        gpus=None if options.device is None else options.device == "cuda",
        cpus_per_rank=ours.cpus_per_rank,
        port=ours.port,
        timeout_s=options.timeout,
        start_s=ours.start_timeout,
    ) as ring:
        device = "cuda" if ring.shape.gpus else "cpu"
        if options.domains is None:
            options = replace(options, domains=even_domains(ring.gang.domains))
        work = build(options, device)
        threads = min(ring.run(torch.get_num_threads))
        console.table(where(ring), numbers=False)
        said = options, work, device, ring.shape.ranks
        console.table(table.settings(*said, threads), numbers=False)
        report = with_retries(options, device, ours.retries, ring, console)
    conclude(*said, command, console, report, threads)
    return report.passed


def where(ring: Ring) -> list[tuple[str, str, str]]:
    """A line a domain: its ranks and their nodes."""
    gang = ring.gang
    rows = []
    for domain in sorted(set(gang.domains)):
        ranks = [r for r, d in enumerate(gang.domains) if d == domain]
        nodes = list(dict.fromkeys(gang.places[r].address for r in ranks))
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        rows.append((f"domain {domain}", who, ", ".join(nodes)))
    return rows


def with_retries(
    options: Options, device: str, retries: int, ring: Ring, console: Console
) -> Report:
    """Rank 0's report. A failed gang is started again ``retries`` times, then RankFailed."""
    resolved = replace(options, input=_absolute(options.input), output=_absolute(options.output))
    shown = Relay(console.stream)
    for attempt in range(retries + 1):
        try:
            reports = ring.run(job, resolved, device, show=shown, terminal=console.terminal)
        except RankFailed as error:
            shown.end_line()
            if attempt == retries:
                raise
            console.say(f"{error.details}{error}")
            console.say(f"starting all ranks again ({attempt + 1} of {retries})")
        else:
            shown.end_line()
            report: Report = reports[0]
            return report
    raise AssertionError("the last attempt returns or raises")


def _absolute(path: str | None) -> str | None:
    """Ranks have working directories of their own."""
    return None if path is None else str(Path(path).resolve())


class Relay:
    """Passes rank 0's text on to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.last = stream, "\n"

    def __call__(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
        self.last = (self.last + text)[-1]

    def end_line(self) -> None:
        """A failure may leave a line of progress open."""
        if self.last != "\n":
            self("\n")


if __name__ == "__main__":
    sys.exit(main())
