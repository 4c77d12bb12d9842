"""Everything worth running on a machine with one GPU, or with several, in order of worth, within
a time.

    python launch/gpu_session.py --out FOLDER               on all GPUs, within 9 minutes
    python launch/gpu_session.py --out FOLDER --gpus 1      on one of them
    python launch/gpu_session.py --out FOLDER --resume      what FOLDER does not have yet
    python launch/gpu_session.py --list                     the commands

On one GPU:

    tests       all of tests/gpu
    nvshmem     that transport's tests, ranks sharing the card under MPS and nothing beside them
    virtual     virtual ranks over one call, and where the time goes (launch/transport_bench.py)
    million     1M tokens on 8 virtual ranks, forward and backward, checked (launch/ring.py)
    over        1M tokens on 1 and 8 virtual ranks over FA4's call, deterministic all of them
    plain       128K tokens on 8 virtual ranks; what `--trace` costs is the next one over it
    traced      the same with `--trace`
    rates       block kernels at 32K and 128K tokens, byte movers (launch/kernel_bench.py)

On several:

    suite       the ring and the transports between GPUs (tests/gpu)
    transports  rates of pulls and sends, alone and beside attention (launch/transport_bench.py)
    scaling     rows at 256K and 1M first (launch/bench.py --scaling), again behind a row that ended
                the processes
    million     1M tokens, forward and backward, checked (launch/ring.py)
    memory      200 transports opened and closed, on GPUs that nothing else uses (tests/gpu)

A step past its limit is ended, with all its processes, and the next one runs. FOLDER gets log.txt
(what the steps said), steps.json (how each ended; --resume runs the others again) and the steps'
own files, few enough and small enough to be carried away. Exit code 0: every step ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ringfa4.comm.registry import TRANSPORTS
from ringfa4.comm.streams import NO_MULTICAST

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 540.0

ENVIRONMENT = {
    **NO_MULTICAST,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the tests ask for deterministic operators
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # several processes, one compilation
    "OMP_NUM_THREADS": "4",
    "PYTHONUNBUFFERED": "1",
}
"""For the steps, unless the user set them otherwise."""


SECONDS_LEFT = "SECONDS_LEFT"
"""A word of a command that stands for how long it may measure."""

TO_FINISH_S = 15.0
"""What a command takes beside that: starting processes, and the row it is in."""


@dataclass(frozen=True)
class Step:
    """A command and its longest time; ``tries``: how often it is run until it ends well."""

    name: str
    command: Sequence[str]
    limit_s: float
    tries: int = 1


def steps(gpus: int, folder: Path, python: str = sys.executable) -> list[Step]:
    """The session's steps, most important first, for as many GPUs."""
    return _on_one(folder, python) if gpus == 1 else _on_several(gpus, folder, python)


def _pytest(python: str) -> list[str]:
    """Without what a machine may have installed beside: pytest-benchmark warns of workers, and
    warnings are errors here.
    """
    return [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark"]


def _on_one(folder: Path, python: str) -> list[Step]:
    launch, tests = ROOT / "launch", ROOT / "tests"
    suite = [*_pytest(python), "-m", "not slow", "--timeout", "120"]
    workers = ["-n", str(min(15, len(os.sched_getaffinity(0)))), "--dist", "worksteal"]
    files = [str(tests / "gpu"), str(tests / "test_scaling.py")]
    shared = [str(tests / "gpu" / "test_transports_cuda.py"), "-k", "nvshmem and not between_gpus"]
    kernels = "fa4,fa4-nondeterministic,cuda_aten"
    virtual = [python, str(launch / "transport_bench.py"), "--ring", "128K", "--where"]
    virtual += ["--virtual-ranks", "1,8", "--kernels", kernels]
    ring = [python, str(launch / "ring.py"), "--heads", "8", "--kv-heads", "8", "--head-dim", "128"]
    ring += ["--wire", "bf16", "--backward", "--kernel", "fa4", "--virtual-ranks", "8"]
    million = [*ring, "--seq", "1M", "--check", "--json", str(folder / "million.json")]
    short = [*ring, "--seq", "128K", "--repeat", "10"]
    over = [python, str(launch / "transport_bench.py"), "--ring", "1M", "--virtual-ranks", "1,8"]
    over += ["--kernels", "fa4", "--own", "--repeat", "1"]
    rates = [python, str(launch / "kernel_bench.py"), "--attention", "32K,128K", "--host"]
    rates += ["--bytes", "64,256,1024", "--repetitions", "5", "--json", str(folder / "rates.json")]
    return [
        Step("tests", [*suite, "-v", *workers, *files], 220.0),
        Step("nvshmem", [*suite, "-v", *shared], 60.0),
        Step("virtual", virtual, 70.0),
        Step("million", million, 90.0),
        Step("over", over, 150.0),
        Step("plain", [*short, "--json", str(folder / "plain.json")], 20.0),
        Step("traced", [*short, "--trace", str(folder / "trace.json")], 25.0),
        Step("rates", rates, 45.0),
    ]


def _on_several(gpus: int, folder: Path, python: str) -> list[Step]:
    launch = ROOT / "launch"
    ranks = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    tests = [str(ROOT / "tests" / "gpu" / f"test_{n}.py") for n in ("two_gpus", "transports_cuda")]
    only = "gpus or symm_mem_notices"  # the second file's other tests need one GPU
    suite = [*_pytest(python), "-v", "-n", "4", "-k", only, *tests]
    memory = [*_pytest(python), "-v", "-k", "memory_flat and not virtual", tests[1]]
    order = ("symm_mem", "nvshmem", "torch_p2p")
    assert set(order) == set(TRANSPORTS)
    rates = [[*ranks, str(launch / "transport_bench.py"), "--transport", name] for name in order]
    bench = [*ranks, str(launch / "bench.py"), "--scaling", "--resume"]
    bench += ["--budget", SECONDS_LEFT, "--json", str(folder / "scaling.json")]
    bench += ["--trace", str(folder / "trace.json")]
    ring = [*ranks, str(launch / "ring.py"), "--seq", "1M", "--backward", "--check"]
    ring += ["--kernel", "fa4-nondeterministic", "--json", str(folder / "million.json")]
    return [
        Step("suite", suite, 150.0),
        *(Step(f"transports {n}", rate, 25.0) for n, rate in zip(order, rates, strict=True)),
        Step("scaling", bench, 210.0, tries=4),
        Step("million", ring, 120.0),
        Step("memory", memory, 60.0),
    ]


class Session:
    """Runs steps within ``seconds``; what they say goes to the log and to standard output."""

    def __init__(self, folder: Path, seconds: float, *, resume: bool) -> None:
        self.folder, self.deadline = folder, time.monotonic() + seconds
        self.notes = folder / "steps.json"
        self.ended: dict[str, str] = {}
        if resume and self.notes.exists():
            self.ended = json.loads(self.notes.read_text())
        elif not resume:
            for old in self.folder.glob("*.json"):
                old.unlink()  # a step would go on with it

    def run(self, plan: Sequence[Step], environment: Mapping[str, str]) -> bool:
        """Whether every step ended well, now or earlier."""
        for step in plan:
            if self.ended.get(step.name) == "well":
                continue
            began = time.monotonic()
            self.ended[step.name] = self._tried(step, environment)
            took = time.monotonic() - began
            print(f"== {step.name}: {self.ended[step.name]} ({took:.0f} s)", flush=True)
            self.notes.write_text(json.dumps(self.ended, indent=1) + "\n")
        return all(self.ended[step.name] == "well" for step in plan)

    def _tried(self, step: Step, environment: Mapping[str, str]) -> str:
        ends = min(self.deadline, time.monotonic() + step.limit_s)
        how = "not run: no time left"
        for _ in range(step.tries):
            if time.monotonic() >= ends:
                return how
            how = self._once(step, ends, environment)
            if how == "well":
                break
        return how

    def _once(self, step: Step, ends: float, environment: Mapping[str, str]) -> str:
        left = f"{max(0.0, ends - time.monotonic() - TO_FINISH_S):.0f}"
        command = [left if word == SECONDS_LEFT else word for word in step.command]
        with (
            open(self.folder / "log.txt", "ab") as log,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            log.write(f"\n== {step.name}: {shlex.join(command)}\n".encode())
            timer = threading.Timer(ends - time.monotonic(), _end, [process])
            timer.start()
            assert process.stdout is not None
            while said := process.stdout.readline():
                log.write(said)
                log.flush()
                sys.stdout.write(said.decode(errors="replace"))
                sys.stdout.flush()
            process.wait()
            timer.cancel()
        if time.monotonic() >= ends:
            return "ended: past its limit"
        return "well" if process.returncode == 0 else f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all it started: torchrun puts its workers into sessions of their own."""
    for pid in [process.pid, *_descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Processes started by ``pid``, by those, and so on."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # "pid (name) state parent ...", and the name may hold spaces.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, look = [], [pid]
    while look:
        parent = look.pop()
        children = [child for child, known in parents.items() if known == parent]
        found += children
        look += children
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), metavar="N")
    parser.add_argument("--steps", default="", metavar="NAME,..", help="these only")
    parser.add_argument("--resume", action="store_true", help="leave out what ended well before")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(argv)
    plan = steps(options.gpus or 1, options.out.resolve())
    if options.steps:
        wanted = options.steps.split(",")
        unknown = [name for name in wanted if name not in [step.name for step in plan]]
        if unknown:
            parser.error(f"no steps {unknown}; there are {[step.name for step in plan]}")
        plan = [step for step in plan if step.name in wanted]
    if options.list:
        for step in plan:
            print(f"{step.name} ({step.limit_s:g} s): {shlex.join(step.command)}")
        return 0
    found = torch.cuda.device_count()
    if not 1 <= options.gpus <= found:
        print(f"gpu_session.py: {options.gpus} of {found} GPUs", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}
    session = Session(options.out, options.seconds, resume=options.resume)
    return 0 if session.run(plan, environment) else 1


if __name__ == "__main__":
    sys.exit(main())
