"""Ranks in processes of their own on GPUs, for tests: several jobs run in one set of processes.

    told = run_processes("symm_mem", 2, [Job("random_calls", {"seed": 0, "calls": 8, ...}), ...])

A process takes seconds to start on a GPU, so jobs share them: each opens a transport, runs a body
of :mod:`transport_contract` or :mod:`gpu.bodies`, and closes it when the body did not fail. Rank r
uses GPU r modulo the number there is; where ranks share one, MPS must run (:func:`mps`).
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """``body`` with its arguments; ``timeout_s`` bounds the waits of the transport."""

    body: str
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 20.0


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
    dies: int | None = None,
) -> list[list[Told]]:
    """[rank][job]. AssertionError when a rank outlives ``limit_s`` or dies that should not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    work = json.dumps([asdict(job) for job in jobs])
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(world)]
        ranks = []
        for rank, log in enumerate(logs):
            names = {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            names = {name: str(value) for name, value in names.items()}
            names |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": path}
            command = [sys.executable, "-m", "gpu.processes", transport, work, str(log)]
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
        assert dead == ([] if dies is None else [dies]), f"ranks {dead} of {transport} died"
        return told


@contextmanager
def mps() -> Iterator[None]:
    """An MPS daemon of our own, for processes that share a GPU as peers."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
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
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _rank(transport_name: str, jobs: Sequence[Job], log: Path) -> None:
    """What one process does."""
    import torch
    import torch.distributed as dist

    from ringfa4.comm.registry import open_transport

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(1)  # small operators on the CPU would fight over the cores
    backend = "nccl" if torch.cuda.device_count() >= world else "gloo"
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    for job in jobs:
        module = "transport_contract"
        if not hasattr(import_module(module), job.body):
            module = "gpu.bodies"
        body = getattr(import_module(module), job.body)
        since = time.monotonic()
        try:
            transport, control = open_transport(
                transport_name, dist.group.WORLD, device, job.timeout_s
            )
            value = body(rank, transport, control, **job.arguments)
            transport.close()
            control.close()
            told = Told(job.body, value if isinstance(value, int | float | str) else None)
        except Exception as error:
            told = Told(job.body, None, type(error).__name__, str(error))
        gc.collect()
        torch.cuda.empty_cache()
        seconds = time.monotonic() - since
        told = replace(told, free_bytes=torch.cuda.mem_get_info()[0], seconds=seconds)
        with log.open("a") as file:
            file.write(json.dumps(asdict(told)) + "\n")
    if jobs[-1].body != "killed":  # else NCCL would wait for who is gone
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], [Job(**job) for job in json.loads(sys.argv[2])], Path(sys.argv[3]))
