"""Host time of ring calls of virtual ranks on one GPU, measured without one.

    python tests/host_time.py [--ranks 8] [--wire bf16] [--calls 30]

Everything is as on a GPU, :mod:`ringfa4.comm.cuda_local` with its turns included, but what would
reach the device does nothing: lanes drop their work, fused kernels pack their arguments, attention
returns empty tensors. What is left is Python, torch's operators on tiny tensors of the CPU, and
hand-overs between threads. Not in it: launches, events and stream waits of CUDA (their counts are
printed), and the library's own call.

Prints the CPU time of the process of the best call, all ranks together, when its first attention
call came, and of one span of each kind the median time (with waits for the turn or for peers).
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from fake_streams import Done, FakeEngine, HostLane
from torch import Tensor

import ringfa4.problem
from ringfa4 import ContextParallel
from ringfa4.comm.cuda_local import SharedSpace, local_pull_transport
from ringfa4.comm.lanes import Lane, Mark
from ringfa4.comm.local import LocalWorld
from ringfa4.context import Context
from ringfa4.kernels.choose import Choice
from ringfa4.kernels.cute import host
from ringfa4.kernels.cute.specs import Spec, parameters
from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.native import NativeKernel, Rows
from ringfa4.mask import Band
from ringfa4.ring import backward, forward
from ringfa4.trace import Recorder

counted: Counter[str] = Counter()
"""What CUDA would be asked to do, in all calls."""


PASSED = Done(reached=True)


class IdleLane(HostLane):
    def copy(self, into: Tensor, source: Tensor) -> None:
        counted["copies"] += 1

    def record(self) -> Mark:
        counted["events"] += 1
        return PASSED

    def after(self, mark: Mark) -> None:
        counted["waits"] += 1


class IdleEngine(FakeEngine):
    def current(self) -> Lane:
        return IdleLane()

    side = current


class IdleKernel(NativeKernel):
    name = "idle"

    def supports(self, spec: KernelSpec) -> str | None:
        return None

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        counted["attention"] += 1
        return torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])

    def differentiate(
        self, box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        counted["attention"] += 1
        return torch.empty_like(rows.q), torch.empty_like(k), torch.empty_like(v)


def idle_launch(spec: Spec, device: torch.device, grid: tuple[int, int, int], *args: int) -> None:
    counted["fused kernels"] += 1
    struct.pack("@" + parameters(spec), *args)


def without_a_gpu() -> None:
    """Fused kernels everywhere, on the CPU, that do nothing; the idle kernel for every choice."""
    host._launch, host._native = idle_launch, lambda device: True
    for name, module in list(sys.modules.items()):
        if name.startswith("ringfa4.") and callable(getattr(module, "fused", None)):
            module.fused = lambda device: host
    ringfa4.problem.choose_kernel = lambda asked, spec: Choice(IdleKernel(), "idle")


def rank_calls(
    space: SharedSpace, rank: int, wire: str, calls: int
) -> dict[str, list[tuple[float, float, Recorder]]]:
    """Of each call: process seconds, wall-clock start, spans."""
    world, control = space.world.world, space.world.control(rank)
    context = Context(local_pull_transport(space, rank, IdleEngine()), control)
    cp = ContextParallel(context, seq_len=world * 256, kernel="auto", wire=wire)
    q, k, v = (torch.randn(1, 256, 2, 32).bfloat16() for _ in range(3))
    ring = cp.problem.ring(q, k, v, backward=True)
    out, lse = forward(ring, q, k, v, scale=1.0)

    def ahead(observer: Recorder) -> object:
        return forward(ring, q, k, v, scale=1.0, observer=observer)

    def back(observer: Recorder) -> object:
        return backward(ring, q, k, v, out, lse, out, scale=1.0, observer=observer)

    made: dict[str, list[tuple[float, float, Recorder]]] = {}
    passes: Sequence[tuple[str, Callable[[Recorder], object]]]
    passes = (("forward", ahead), ("backward", back))
    for name, call in passes:
        call(Recorder())
        for _ in range(calls):
            control.gather(b"together")
            recorder, wall, cpu = Recorder(), time.perf_counter(), time.process_time()
            call(recorder)
            control.gather(b"done")
            made.setdefault(name, []).append((time.process_time() - cpu, wall, recorder))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--calls", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    without_a_gpu()
    space = SharedSpace(LocalWorld(args.ranks, 60.0))
    made: dict[int, dict[str, list[tuple[float, float, Recorder]]]] = {}

    def main_of(rank: int) -> None:
        made[rank] = rank_calls(space, rank, args.wire, args.calls)

    threads = [threading.Thread(target=main_of, args=(rank,)) for rank in range(args.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("forward", "backward"):
        calls = list(zip(*(made[rank][name] for rank in range(args.ranks)), strict=True))
        best = min(calls, key=lambda ranks: ranks[0][0])
        begun = min(wall for _, wall, _ in best)
        spans = [span for _, _, recorder in best for span in recorder.spans]
        first = min(span.start for span in spans if span.kind == "compute") - begun
        kinds = {
            kind: f"{statistics.median(s.seconds for s in spans if s.kind == kind) * 1e6:.0f}"
            for kind in dict.fromkeys(span.kind for span in spans)
        }
        print(
            f"{name}: {best[0][0] * 1e3:.2f} ms, first attention after {first * 1e3:.2f} ms; "
            f"us a span: {kinds}"
        )
    print(f"in all {2 * (args.calls + 1) + 1} calls: {dict(counted)}")


if __name__ == "__main__":
    main()
