"""The ring between GPUs: exact, repeatable under delays, in sub-groups, and when a peer dies.

On as many GPUs as there are, up to four, a process each; the transports' own contract between GPUs
is in test_transports_cuda.py. The same jobs run over gloo in distributed/test_two_processes.py.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from gpu.processes import Job, check, run_processes
from ring_jobs import ring_jobs, sub_group_jobs

GPUS = torch.cuda.device_count()
WORLD = min(GPUS, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}"),
]

nvshmem = pytest.param(
    "nvshmem",
    marks=pytest.mark.skipif(find_spec("nvshmem") is None, reason="nvshmem4py is not installed"),
)
TRANSPORTS = ["symm_mem", nvshmem, "torch_p2p"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_ring_between_gpus(transport: str) -> None:
    jobs = ring_jobs(calls=1000, late_calls=50)
    check(run_processes(transport, WORLD, jobs), jobs)


@pytest.mark.parametrize("transport", ["symm_mem", "torch_p2p"])
def test_sub_groups_of_gpus(transport: str) -> None:
    jobs = sub_group_jobs(WORLD)
    check(run_processes(transport, WORLD, jobs), jobs)


@pytest.mark.skipif(find_spec("nvshmem") is None, reason="nvshmem4py is not installed")
def test_nvshmem_keeps_to_the_ranks_it_was_started_with() -> None:
    everybody, alone = Job("exact_ring", {"problem": "causal"}), [[r] for r in range(WORLD)]
    jobs = [everybody, Job("messages", groups=alone), everybody]
    for first, refused, last in run_processes("nvshmem", WORLD, jobs):
        assert first.error is None and last.error is None, (first, last)
        assert refused.error == "ValueError" and "already spans ranks" in refused.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_peer_is_named_at_the_next_call(transport: str) -> None:
    timeout_s = 5.0
    jobs = [Job("ring_killed", {"culprit": 1}, timeout_s)]
    told = run_processes(transport, WORLD, jobs, dies=[1])
    for rank, lines in enumerate(told):
        if rank != 1:
            assert lines[0].error is None, lines
            assert lines[0].value < 3 * timeout_s


@pytest.mark.parametrize("transport", ["symm_mem", nvshmem])
def test_a_peer_killed_in_mid_call_is_named(transport: str) -> None:
    """The device waits for words that nobody writes; the watchdog lets it go on."""
    timeout_s = 3.0
    jobs = [Job("killed", {"culprit": 1}, timeout_s)]
    told = run_processes(transport, 2, jobs, dies=[1])
    assert told[0][0].error is None, told
    assert told[0][0].value < 3 * timeout_s


def test_who_stays_in_a_transfer_of_nccl_ends() -> None:
    """Its kernels cannot be called back, and its own watchdog has 10 minutes: ours ends the
    process, after the transport's timeout and :data:`ringfa4.comm.stuck.STUCK_S`.
    """
    jobs = [Job("stranded_by_killed", {"culprit": 1}, 3.0)]
    survivor, dead = run_processes("torch_p2p", 2, jobs, dies=[0, 1])
    assert survivor == [] and dead == [], "nobody has a result"
