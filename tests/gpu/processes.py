"""Ranks in processes of their own, for tests: several jobs run in one set of processes.

    told = run_processes("symm_mem", 2, [Job("random_calls", {"seed": 0, "calls": 8, ...}), ...])
    check(told, jobs)

A process takes seconds to start on a GPU, so jobs share them: each opens a transport, runs a body
of one of BODIES, and closes it when the body did not fail. Rank r uses GPU r modulo the number
there is; where ranks share one, MPS must run (:func:`mps`), and NCCL goes through sockets
(:data:`ONE_GPU`). Without a GPU the same goes on the CPU, over gloo.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent

ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
"""NCCL refuses two ranks on one GPU of one host. Told that each is on a host of its own, by
``NCCL_HOSTID``, it takes them, and moves their bytes through sockets.
"""

BODIES = ("transport_contract", "ring_bodies", "gpu.bodies")
"""Where a body is looked for, in order."""


@dataclass(frozen=True)
class Job:
    """``body`` with its arguments; ``timeout_s`` bounds the waits of the transport.

    ``groups``: the groups in which it runs, as lists of global ranks; None is all ranks together.
    A rank in none of them sits the job out.
    """

    body: str
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 20.0
    groups: list[list[int]] | None = None


@dataclass(frozen=True)
class Told:
    """How one job ended on one rank: its value, or the error's type name and message.

    ``free_bytes``: memory of the GPU that nobody held afterwards. ``seconds``: opening included.
    """

    body: str
    value: Any = None
    error: str | None = None
    message: str = ""
    free_bytes: int = 0
    seconds: float = 0.0


def run_processes(
    transport: str,
    world: int,
    jobs: Sequence[Job],
    *,
    limit_s: float = 100.0,
    dies: Sequence[int] | None = (),
    group_timeout_s: float = 600.0,
) -> list[list[Told]]:
    """[rank][job]. AssertionError when a rank outlives ``limit_s``, dies that should not, or lives
    that should (``dies``; None: any may).

    ``group_timeout_s``: when the watchdog of NCCL ends a process that waits for a peer.
    """
    import torch
    import torch.distributed as dist

    # As torchrun's agent has it: it outlives any rank, and its port is nobody else's meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = json.dumps([asdict(job) for job in jobs])
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(world)]
        ranks = []
        for rank, log in enumerate(logs):
            names = {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": store.port}
            names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            names = {name: str(value) for name, value in names.items()}
            names |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": path}
            if transport == "torch_p2p" and 0 < torch.cuda.device_count() < world:
                names |= ONE_GPU | {"NCCL_HOSTID": f"rank-{rank}"}
            said = [transport, work, str(log), str(group_timeout_s), str(limit_s)]
            command = [sys.executable, "-m", "gpu.processes", *said]
            with open(f"{log}.err", "w") as errors:
                ranks.append(subprocess.Popen(command, env=os.environ | names, stderr=errors))
        deadline = time.monotonic() + limit_s
        late = []
        for rank, process in enumerate(ranks):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(rank)
        told = [
            [Told(**json.loads(line)) for line in log.read_text().splitlines()]
            if log.exists()
            else []
            for log in logs
        ]
        for rank, process in enumerate(ranks):
            if process.returncode != 0:
                print(f"--- rank {rank} of {transport}, exit {process.returncode}: {told[rank]}")
                print(Path(f"{logs[rank]}.err").read_text()[-4000:])
        assert not late, f"ranks {late} of {transport} still ran after {limit_s:g} s"
        dead = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
        assert dies is None or dead == sorted(dies), f"ranks {dead} of {transport} died"
        return told


def check(told: Sequence[Sequence[Told]], jobs: Sequence[Job]) -> None:
    """Every job ended well on every rank; those of ``failing`` as they should."""
    for rank, lines in enumerate(told):
        assert len(lines) == len(jobs), f"rank {rank} ended after {lines}"
        for job, line in zip(jobs, lines, strict=True):
            if job.body == "failing":
                culprit = job.arguments["culprit"]
                want = "ZeroDivisionError" if rank == culprit else "PeerError"
                assert line.error == want and "deliberate" in line.message, (rank, job, line)
            else:
                assert line.error is None, (rank, job, line)


@contextmanager
def mps() -> Iterator[None]:
    """An MPS daemon of our own, for processes that share a GPU as peers."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # MPS gives 2, the transports want 5
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
            try:
                yield
            finally:
                subprocess.run(
                    ["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True, timeout=20
                )
        finally:
            del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


BEFORE_LIMIT_S = 5.0
"""A process that is about to be ended for its time says where it is."""


def _rank(
    transport: str, jobs: Sequence[Job], log: Path, group_timeout_s: float, limit_s: float
) -> None:
    """What one process does."""
    faulthandler.dump_traceback_later(max(1.0, limit_s - BEFORE_LIMIT_S))
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        apart = torch.cuda.device_count() >= world or "NCCL_HOSTID" in os.environ
        backend = "nccl" if apart else "gloo"
    torch.set_num_threads(1)  # small operators on the CPU would fight over the cores
    dist.init_process_group(
        backend,
        device_id=device if backend == "nccl" else None,
        timeout=timedelta(seconds=group_timeout_s),
    )
    for job in jobs:
        since = time.monotonic()
        told = _one(transport, job, device)
        gc.collect()
        free = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        told = replace(told, free_bytes=free, seconds=time.monotonic() - since)
        with log.open("a") as file:
            file.write(json.dumps(asdict(told)) + "\n")
    if not jobs[-1].body.endswith("killed"):  # else NCCL would wait for who is gone
        dist.destroy_process_group()


def _one(transport_name: str, job: Job, device: Any) -> Told:
    """One job on a fresh transport."""
    import torch.distributed as dist

    from ringfa4.comm.registry import open_transport

    modules = [import_module(name) for name in BODIES]
    body = next(getattr(m, job.body) for m in modules if hasattr(m, job.body))
    try:
        group = dist.group.WORLD
        if job.groups is not None:
            # Every process makes every group, in one order.
            made = {tuple(ranks): dist.new_group(ranks) for ranks in job.groups}
            mine = [g for ranks, g in made.items() if dist.get_rank() in ranks]
            if not mine:
                return Told(job.body, "sat out")
            group = mine[0]
        transport, control = open_transport(transport_name, group, device, job.timeout_s)
        value = body(transport.rank, transport, control, **job.arguments)
        transport.close()
        control.close()
    except Exception as error:
        return Told(job.body, None, type(error).__name__, str(error))
    return Told(job.body, value if isinstance(value, int | float | str) else None)


if __name__ == "__main__":
    given = [Job(**job) for job in json.loads(sys.argv[2])]
    _rank(sys.argv[1], given, Path(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
