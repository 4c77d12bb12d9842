"""What a rank of launch/ray_ring.py runs.

In a module of its own, which ranks import: functions of a script travel by value, and with them
copies of what they refer to.
"""

from __future__ import annotations

from ringfa4.launch.console import Console
from ringfa4.launch.options import Options
from ringfa4.launch.ray_rank import WHEREABOUTS, printed
from ringfa4.launch.runs import Report, run_rank
from ringfa4.launch.workload import build
from ringfa4.launch.world import in_group


def job(options: Options, device: str) -> Report:
    """The run of ``options`` on this rank of the default group."""
    work = build(options, device)
    with in_group(options.transport, options.timeout) as (context, peers):
        console = Console(printed(), speaks=peers.rank == 0)
        return run_rank(options, work, context, peers, console, WHEREABOUTS.watch)
