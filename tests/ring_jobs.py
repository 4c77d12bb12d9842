"""Which bodies of :mod:`ring_bodies` are run between processes, on GPUs and over gloo."""

from __future__ import annotations

from gpu.processes import Job
from ring_bodies import PROBLEMS


def ring_jobs(*, calls: int, late_calls: int) -> list[Job]:
    """Exactness, bits, ``calls`` back to back, and ``late_calls`` whose copies are late."""
    return [
        *(Job("exact_ring", {"problem": problem}) for problem in PROBLEMS),
        Job("through_autograd"),
        *(Job("ring_as_on_virtual_ranks", {"wire": wire}) for wire in ("bf16", "mxfp8")),
        Job("ring_repeats", {"calls": calls, "late": False}, 60.0),
        Job("ring_repeats", {"calls": late_calls, "late": True}, 60.0),
        Job("ring_repeats", {"calls": late_calls, "late": True, "wire": "mxfp8"}, 60.0),
    ]


def sub_group_jobs(world: int) -> list[Job]:
    """A second group of all; each rank alone; and, of three or more, the ends without the middle:
    group ranks are not global ones.
    """
    everybody, ends = list(range(world)), [0, world - 1]
    groups = [[everybody], [[r] for r in everybody], *([[ends]] if world > 2 else [])]
    bodies = (
        Job("exact_ring", {"problem": "causal"}),
        Job("ring_repeats", {"calls": 5, "late": True}),
    )
    return [Job(job.body, job.arguments, groups=g) for g in groups for job in bodies]
