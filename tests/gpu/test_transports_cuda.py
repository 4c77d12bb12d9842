"""The CUDA transports keep the contract: virtual ranks, NVSHMEM under MPS, and pairs of GPUs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transport_contract as contract
from gpu import bodies
from gpu.processes import Job, check, mps, run_processes
from ring_bodies import late_copies
from ring_jobs import ring_jobs, sub_group_jobs
from test_transports import InThreads

from ringfa4.comm import reach, streams
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.comm.registry import open_transport, transport_factory
from ringfa4.errors import MissingLibraryError

pytestmark = pytest.mark.gpu

needs_nvshmem = pytest.mark.skipif(
    find_spec("nvshmem") is None, reason="nvshmem4py is not installed"
)
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, found {torch.cuda.device_count()}"
)


def on_gpu(
    world: int, fn: Callable[[int, Any, Control], Any], timeout_s: float = 60.0
) -> list[Any]:
    return run_ranks(world, fn, timeout_s, "cuda")


def late_on_gpu(
    world: int, fn: Callable[[int, Any, Control], Any], timeout_s: float = 60.0
) -> list[Any]:
    with late_copies(seed=world):
        return run_ranks(world, fn, timeout_s, "cuda")


class TestVirtualRanks(InThreads):
    impatience = ("open", 2.0)  # who is late keeps the turn: no other rank opens

    runner = staticmethod(on_gpu)


class TestVirtualRanksOnLateCopies(InThreads):
    impatience = TestVirtualRanks.impatience

    runner = staticmethod(late_on_gpu)
    many_calls = 20


@pytest.mark.parametrize("world", [2, 8, 72])
def test_virtual_ranks_drift_over_many_calls(world: int) -> None:
    calls = 200 if world < 10 else 3
    done = on_gpu(world, lambda r, t, c: bodies.many_calls(r, t, c, calls=calls))
    assert done == [calls] * world


def test_two_hundred_virtual_worlds_keep_memory_flat() -> None:
    """What torch holds after any number of contexts opened, used and closed."""

    def once(rank: int, transport: Transport, control: Control) -> None:
        contract.causal_calls(rank, transport, control, calls=2)
        transport.close()

    held = []
    for _ in range(200):
        on_gpu(2, once)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[5:])) == 1, held


def test_capture_is_refused() -> None:
    def main(rank: int, transport: Transport, control: Control) -> str:
        return bodies.refused_capture(rank, transport, control)

    assert "CUDA graph" in on_gpu(1, main)[0]


def contract_jobs(world: int, *, calls: int = 1000) -> list[Job]:
    return [
        Job("random_calls", {"seed": 0, "calls": 24, "drift_s": 0.0}),
        Job("random_calls", {"seed": 50, "calls": 8, "drift_s": 0.01}),
        Job("causal_calls", {"calls": 6}),
        Job("bad_schedules"),
        Job("growing"),
        Job("messages"),
        Job("gathered", {"sizes": [0, 70_000, 3, 128][:world]}),
        Job("summed", {"drift_seed": 1}),
        Job("many_calls", {"calls": calls}),
        Job("ring_as_on_virtual_ranks"),
    ]


PULL = [
    Job("late_calls", {"calls": 20}),
    Job("refused_capture"),
]
FAILING = [
    Job("failing", {"culprit": 1, "where": where})
    for where in ("before publish", "after fetch", "before send_grads")
]


def test_threads_that_ask_for_a_queue_at_once_take_none_from_each_other() -> None:
    """8 queues, 4 waiting streams each."""
    device = torch.device("cuda", 0)
    streams._queue_left.cache_clear()
    assert run_ranks(3, lambda *_: streams.queue_left(device), 60.0) == [True] * 3


@pytest.mark.parametrize("connections, left", [("1", False), ("8", True)])
def test_waits_must_leave_a_hardware_queue(connections: str, left: bool) -> None:
    """Also where they do not, the waits that found out end."""
    asks = (
        "import torch; from ringfa4.comm.streams import queue_left; "
        "print(queue_left(torch.device('cuda', 0))); torch.cuda.synchronize()"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks],
        env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": connections},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(left)]


@needs_nvshmem
@pytest.mark.parametrize("world", [2, 3])
def test_nvshmem_between_processes_on_one_gpu(world: int) -> None:
    jobs = [*contract_jobs(world), *PULL, *FAILING]
    with mps():
        check(run_processes("nvshmem", world, jobs), jobs)


one_gpu = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="ranks must share a GPU")


@one_gpu
@pytest.mark.parametrize("world", [2, 3])
def test_nccl_between_processes_on_one_gpu(world: int) -> None:
    jobs = contract_jobs(world, calls=200)
    with mps():
        check(run_processes("torch_p2p", world, jobs), jobs)


@one_gpu
def test_the_ring_over_nccl_between_processes_on_one_gpu() -> None:
    jobs = [*ring_jobs(calls=50, late_calls=10), *sub_group_jobs(4)]
    with mps():
        check(run_processes("torch_p2p", 4, jobs), jobs)


@one_gpu
def test_nccl_names_a_peer_killed_between_calls() -> None:
    timeout_s = 5.0
    with mps():
        jobs = [Job("ring_killed", {"culprit": 1}, timeout_s)]
        survivor, dead = run_processes("torch_p2p", 2, jobs, dies=[1])
    assert not dead and survivor[0].error is None, survivor
    assert survivor[0].value < 3 * timeout_s


@one_gpu
def test_who_stays_in_a_transfer_of_nccl_on_one_gpu_ends() -> None:
    """As between two GPUs (test_two_gpus.py)."""
    with mps():
        jobs = [Job("stranded_by_killed", {"culprit": 1}, 3.0)]
        survivor, dead = run_processes("torch_p2p", 2, jobs, dies=[0, 1])
    assert survivor == [] and dead == [], "nobody has a result"


@needs_nvshmem
def test_nvshmem_notices_a_killed_peer() -> None:
    timeout_s = 3.0
    with mps():
        jobs = [Job("killed", {"culprit": 1}, timeout_s)]
        survivor, dead = run_processes("nvshmem", 2, jobs, dies=[1])
    assert not dead and survivor[0].error is None, survivor
    assert survivor[0].value < 3 * timeout_s


@needs_nvshmem
@one_gpu
def test_nvshmem_on_a_shared_gpu_asks_for_mps() -> None:
    for line in (rank[0] for rank in run_processes("nvshmem", 2, [Job("messages")])):
        assert line.error == "ValueError" and "MPS" in line.message


@one_gpu
def test_symm_mem_wants_a_gpu_for_every_rank() -> None:
    for line in (rank[0] for rank in run_processes("symm_mem", 2, [Job("messages")])):
        assert line.error == "ValueError" and "share a GPU" in line.message


@pytest.mark.parametrize("name", ["symm_mem", pytest.param("nvshmem", marks=needs_nvshmem)])
def test_ranks_in_different_nvlink_domains_are_told_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 43: real seats, but for hosts and fabrics, which one machine has one of."""
    here, real = threading.local(), reach.seat_of

    def seat_of(device: torch.device) -> reach.Seat:
        return replace(real(device), boot=f"boot-{here.rank}", fabric=f"rack-{here.rank}/0")

    monkeypatch.setattr(reach, "seat_of", seat_of)

    def main(rank: int, transport: Transport, control: Control) -> str:
        here.rank = rank
        with pytest.raises(ValueError, match="NVLink domain") as caught:
            transport_factory(name)(None, torch.device("cuda"), control)
        return str(caught.value)

    said = run_ranks(2, main, 60.0)  # threads of the host: nothing has been moved to a GPU
    assert said[0] == said[1] and "fabric rack-0/0 and rack-1/0" in said[0]


@pytest.mark.skipif(find_spec("nvshmem") is not None, reason="nvshmem4py is installed")
def test_without_nvshmem4py_the_message_says_how_to_get_it() -> None:
    with pytest.raises(MissingLibraryError, match=r"ringfa4\[nvshmem\]"):
        open_transport("nvshmem", None, torch.device("cuda"), 5.0)


@needs_two_gpus
@pytest.mark.parametrize("transport", ["symm_mem", "nvshmem", "torch_p2p"])
def test_contract_between_gpus(transport: str) -> None:
    if transport == "nvshmem" and find_spec("nvshmem") is None:
        pytest.skip("nvshmem4py is not installed")
    jobs = [*contract_jobs(2), *([] if transport == "torch_p2p" else [*PULL, *FAILING])]
    check(run_processes(transport, 2, jobs), jobs)


@needs_two_gpus
def test_symm_mem_notices_a_killed_peer() -> None:
    timeout_s = 3.0
    jobs = [Job("killed", {"culprit": 1}, timeout_s)]
    survivor, dead = run_processes("symm_mem", 2, jobs, dies=[1])
    assert not dead and survivor[0].error is None, survivor
    assert survivor[0].value < 3 * timeout_s


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="the device's free memory is everybody's: run it without other workers",
)
@pytest.mark.parametrize("transport", ["nvshmem", "symm_mem"])
def test_two_hundred_transports_keep_memory_flat(transport: str) -> None:
    if transport == "nvshmem" and find_spec("nvshmem") is None:
        pytest.skip("nvshmem4py is not installed")
    if torch.cuda.device_count() < 2:
        if transport == "symm_mem":
            pytest.skip("torch symmetric memory needs 2 GPUs")
        with mps():
            told = run_processes(transport, 2, [Job("causal_calls", {"calls": 2})] * 200)
    else:
        told = run_processes(transport, 2, [Job("causal_calls", {"calls": 2})] * 200)
    for lines in told:
        assert [line.error for line in lines] == [None] * 200
        free = [line.free_bytes for line in lines]
        # It is the device's, so a moment at which the other rank has just freed shows in it.
        assert min(free[-50:]) >= min(free[:50]), free
