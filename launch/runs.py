"""One rank's run: inputs, forward, backward, transfers alone, check, output file, report.

    time        wall time of the slowest rank, from a barrier on; the fastest of --repeat (on a GPU
                of 2 by default: the first call compiles kernels and gets its memory)
    TFLOP/s     allowed pairs x heads x 2 (dk + dv), backward 2.5 times that, of all ranks together
    moved       bytes that ranks read from others, dK/dV included
    K/V         those of K and V among them, and their share of what bf16 would take
    alone       what the same transfers take when nothing is computed
    waited      time in fetch, wait, send and reduce while computing; hidden = 1 - waited / alone

The last two are sums over ranks, and host times: they are given where the host computes (CPU).
Waiting for a rank that is behind counts as waited: where cores are short, hidden tends to 0.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringfa4 import ContextParallel
from ringfa4.context import Context
from ringfa4.launch.checks import Checker, Tensors, Verdict
from ringfa4.launch.chrome_trace import Call, document, gather
from ringfa4.launch.console import Console, Progress
from ringfa4.launch.gpu_trace import Row, Timeline
from ringfa4.launch.options import Options
from ringfa4.launch.peers import Peers
from ringfa4.launch.probes import Idle, Paced
from ringfa4.launch.tensorfile import TensorFile, create
from ringfa4.launch.workload import Workload, choose_wire
from ringfa4.mx.formats import E4M3, ElementFormat
from ringfa4.mx.wire import MxWire
from ringfa4.ops import checked
from ringfa4.ring import Ring, backward, forward
from ringfa4.topology import Topology
from ringfa4.trace import NAMED, Observer, Recorder
from ringfa4.wire import PLAIN, Direction

T = TypeVar("T")

MOVING = ("publish", "fetch", "wait", "grads", "reduce")
"""Spans in which a rank moves bytes or waits for them."""


@dataclass(frozen=True)
class Pass:
    """Forward or backward, over all ranks; None where it is not measured."""

    seconds: float
    tokens_per_s: float
    tflop_per_s: float
    moved_bytes: int
    kv_bytes: int
    kv_share: float
    alone_s: float | None
    waited_s: float | None

    @property
    def hidden(self) -> float | None:
        """Share of the transfer time behind which the rank computed."""
        if self.alone_s is None or self.waited_s is None or self.alone_s <= 0:
            return None
        return min(1.0, max(0.0, 1 - self.waited_s / self.alone_s))


@dataclass
class Report:
    """What a run found; equal on all ranks."""

    passes: dict[str, Pass] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    peak_bytes: int = 0
    timeline: dict[str, Any] | None = None
    """With --trace, on rank 0: the trace of all ranks (:mod:`ringfa4.launch.chrome_trace`)."""

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        passes = {name: {**asdict(p), "hidden": p.hidden} for name, p in self.passes.items()}
        body = {**asdict(replace(self, timeline=None)), "passes": passes, "passed": self.passed}
        del body["timeline"]
        return body


def run_rank(
    options: Options,
    work: Workload,
    context: Context,
    peers: Peers,
    console: Console,
    watch: Callable[[str], Observer] = lambda name: NAMED,
    topology: Topology | None = None,
) -> Report:
    """All of a run, on one rank. Collective. ``watch(pass's name)`` sees the pass's spans too.

    ``topology`` None is what ``--domains`` says.
    """
    if topology is None and options.domains is not None:
        topology = Topology.even(peers.world, options.domains)
    cp = ContextParallel(
        context,
        mask=work.mask,
        sharding=options.sharding,
        wire=choose_wire(options, work)[0],
        kernel=options.kernel,
        precondition=options.precondition,
        topology=topology,
    )
    shards = cp.problem.q_sharding, cp.problem.k_sharding
    q_shard, k_shard = (sharding.shards[peers.rank] for sharding in shards)
    q = work.inputs.rows("q", q_shard, work.heads, work.dk).to(context.device)
    k = work.inputs.rows("k", k_shard, work.kv_heads, work.dk).to(context.device)
    v = work.inputs.rows("v", k_shard, work.kv_heads, work.dv).to(context.device)
    sink = None if work.sink is None else work.sink.to(context.device)
    measure = _Measure(options, work, peers, console, watch)

    ring = checked(context, lambda: cp.problem.ring(q, k, v, backward=False))
    out, lse = measure(
        ring,
        "forward",
        lambda r, o: forward(r, q, k, v, scale=work.scale, sink=sink, observer=o),
    )
    tensors = Tensors(q, k, v, out, lse)
    if options.backward:
        dout = work.inputs.rows("dout", q_shard, work.heads, work.dv).to(context.device)
        ring = checked(context, lambda: cp.problem.ring(q, k, v, backward=True))
        dq, dk, dv, dsink = measure(
            ring,
            "backward",
            lambda r, o: backward(
                r, q, k, v, out, lse, dout, scale=work.scale, sink=sink, observer=o
            ),
        )
        tensors = Tensors(q, k, v, out, lse, dout, dq, dk, dv, dsink)

    report = Report(measure.passes, list(dict.fromkeys(cp.explain())))
    if options.check:
        console.say(f"checking {options.check_rows} rows against fp64 over all keys ...")
        checker = Checker(
            peers,
            work.mask,
            shards,
            tensors,
            scale=work.scale,
            sink=sink,
            rows=options.check_rows,
            blocks=half_ulp(E4M3) if isinstance(ring.wire, MxWire) else 0.0,
            rotated=ring.precondition.hadamard,
        )
        report.verdicts = checker.run()
    if options.output is not None:
        save(options.output, work, shards, tensors, peers)
    if options.trace is not None:
        parts = gather(context, measure.calls)
        if peers.rank == 0:
            report.timeline = document([parts])
    report.peak_bytes = int(peers.max(torch.tensor(float(peak_bytes(context.device)))).item())
    return report


class _Measure:
    """Runs passes and keeps their numbers."""

    def __init__(
        self,
        options: Options,
        work: Workload,
        peers: Peers,
        console: Console,
        watch: Callable[[str], Observer],
    ) -> None:
        self.options, self.work, self.peers, self.console = options, work, peers, console
        self.watch = watch
        self.passes: dict[str, Pass] = {}
        self.calls: list[Call] = []
        self._gpu: list[Row] = []
        """What the GPU did in the last pass, of all ranks of this process, on one of them."""

    def __call__(self, ring: Ring, name: Direction, call: Callable[[Ring, Observer], T]) -> T:
        """``call(ring, observer)`` --repeat times, the last result; then the transfers alone."""
        work, peers, on_host = self.work, self.peers, ring.context.device.type == "cpu"
        total = own_pairs(ring)
        best, waited = float("inf"), 0.0
        repeat = self.options.repeat or (1 if on_host else 2)
        for attempt in range(repeat):
            what = name if repeat == 1 else f"{name} {attempt + 1}"
            progress = Progress(self.console, what, total)
            # On a GPU calls return before they have computed; there is nothing to pace.
            paced = replace(ring, kernel=Paced(ring.kernel, progress.add)) if on_host else ring
            seconds, recorder, result = self._timed(what, paced, call)
            self.calls.append(Call(what, name, ring, recorder.spans, self._gpu))
            moving = self._moving(recorder)
            if seconds < best:
                best, waited = seconds, moving
            self.console.end_line()
        alone = None
        if on_host:
            alone = 0.0
            if peers.world > 1:
                idle = replace(ring, kernel=Idle(ring.kernel))
                _, recorder, _ = self._timed(f"{name} without computing", idle, call)
                alone = self._moving(recorder)
        self.passes[name] = Pass(
            seconds=best,
            tokens_per_s=work.batch * work.seq_q / best,
            tflop_per_s=work.flops(backward=name == "backward") / best / 1e12,
            moved_bytes=int(self._sum(moved_bytes(ring, name))),
            kv_bytes=int(self._sum(kv_bytes(ring, name))),
            kv_share=share_of_bf16(ring, name),
            alone_s=alone,
            waited_s=waited if on_host else None,
        )
        return result

    def _timed(
        self, what: str, ring: Ring, call: Callable[[Ring, Observer], T]
    ) -> tuple[float, Recorder, T]:
        """(seconds of the slowest rank, this rank's spans, result)."""
        recorder, device = Recorder(self.watch(what)), ring.context.device
        on_gpu = device.type == "cuda"
        timeline = Timeline(ring.rank, device) if on_gpu and self.options.trace else None
        with timeline or nullcontext():
            self.peers.barrier()
            start = time.perf_counter()
            result = call(ring, recorder)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            slowest = self.peers.max(torch.tensor(seconds, dtype=torch.float64)).item()
        if timeline is not None:
            self._gpu = timeline.rows
            self.peers.barrier()
        return slowest, recorder, result

    def _moving(self, recorder: Recorder) -> float:
        """Time in MOVING spans, summed over ranks."""
        return self._sum(sum(recorder.seconds(kind) for kind in MOVING))

    def _sum(self, x: float) -> float:
        return self.peers.sum(torch.tensor(float(x), dtype=torch.float64)).item()


def half_ulp(element: ElementFormat) -> float:
    """Largest relative error of rounding to ``element``."""
    return 2.0 ** -(element.mantissa_bits + 1)


def own_pairs(ring: Ring) -> int:
    """Pairs that this rank computes, over batch rows and query heads."""
    tasks = (task for step in ring.plan.steps(ring.rank) for task in step.tasks)
    shared = ring.geometry.batch
    return sum(t.area * (shared if t.batch is None else 1) for t in tasks) * ring.heads_q


def moved_bytes(ring: Ring, direction: Direction) -> int:
    """What this rank reads from others and returns to them, in one call."""
    returned = (step.grad_out for step in ring.schedule(direction).steps)
    return kv_bytes(ring, direction) + sum(x.nbytes for x in returned if x is not None)


def kv_bytes(ring: Ring, direction: Direction) -> int:
    """Bytes of K and V that this rank reads from others, or carries, in one call."""
    steps = ring.schedule(direction).steps
    read = (x for step in steps for x in (step.receive, step.carry) if x is not None)
    return sum(x.nbytes for x in read if x.peer != ring.rank)


def share_of_bf16(ring: Ring, direction: Direction) -> float:
    """Size of a record over that of the same tokens in bf16."""
    plain, geometry = PLAIN[torch.bfloat16], ring.geometry
    own = ring.wire.record_bytes(geometry, direction)
    return own / plain.record_bytes(geometry, direction)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: of the GPU if it computes there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's maximum may be that of the process that started this one
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def save(path: str, work: Workload, shards: tuple[Any, Any], t: Tensors, peers: Peers) -> None:
    """Every rank's rows into one safetensors file, which appears when it is complete."""
    sides = {"out": 0, "lse": 0, "dq": 0, "dk": 1, "dv": 1}
    results = {name: getattr(t, name) for name in sides}
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, x in results.items():
        if x is not None:
            shape = list(x.shape)
            shape[2 if name == "lse" else 1] = shards[sides[name]].seq
            whole[name] = x.dtype, tuple(shape)
    if t.dsink is not None:
        whole["dsink"] = t.dsink.dtype, tuple(t.dsink.shape)
    partial = f"{path}.partial"
    if peers.rank == 0:
        create(partial, whole)
    peers.barrier()
    file = TensorFile(partial)
    for name, x in results.items():
        if x is not None:
            shard = shards[sides[name]].shards[peers.rank]
            file.write(name, shard, x.cpu(), dim=2 if name == "lse" else 1)
    if t.dsink is not None and peers.rank == 0:
        file.tensor("dsink", writable=True).copy_(t.dsink)
    peers.barrier()
    if peers.rank == 0:
        os.replace(partial, path)
