"""What gpu/test_two_gpus.py does between GPUs, between processes over gloo."""

from __future__ import annotations

import pytest
import torch
from gpu.processes import Job, check, run_processes
from ring_jobs import ring_jobs, sub_group_jobs

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: gpu/test_two_gpus.py runs these jobs there"
)


def test_the_ring_between_processes() -> None:
    jobs = ring_jobs(calls=30, late_calls=6)
    told = run_processes("torch_p2p", 2, jobs)
    check(told, jobs)
    rows = [[line.value for line in lines if line.body == "exact_ring"] for lines in told]
    assert rows[0] != rows[1], "ranks hold what differs, of uneven shards"
    assert all(sum(row) > 0 for row in rows)


def test_sub_groups_of_processes() -> None:
    jobs = sub_group_jobs(3)
    told = run_processes("torch_p2p", 3, jobs)
    check(told, jobs)
    assert [line.value == "sat out" for line in told[1]] == [False] * 4 + [True] * 2
    assert not [line for line in told[0] + told[2] if line.value == "sat out"]


def test_a_killed_peer_is_named_at_the_next_call() -> None:
    timeout_s = 60.0
    jobs = [Job("ring_killed", {"culprit": 1}, timeout_s)]
    survivor, dead = run_processes("torch_p2p", 2, jobs, dies=[1])
    assert not dead and survivor[0].error is None, survivor
    assert survivor[0].value < timeout_s, "by the lost connection, not by the timeout"
