"""Measure a ring on CPU processes, and predict it from rates measured apart: side by side.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 launch/simulate_check.py \\
        --seq 2K,4K,8K --wire bf16,mxfp8

In each repetition, on all ranks at once, so that they share cores as they do in the ring:

    kernel, copy  the ring's own loop over a transport that moves nothing: the pairs over its
                  compute spans, bytes over its encode and reduce spans; step: what is left
    link          every rank reads from its neighbour over the real transport; agree: bare headers
    drag          how much longer compute takes beside such a transfer
    measured      the ring; time of the slowest rank, from a barrier on

The prediction (:mod:`ringfa4.launch.simulate_ring`) sees the rates and the plan, never the ring's
own times. Medians over the repetitions. Left out: GPUs, where the host sees no device time.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4.comm.interface import (
    Contribution,
    Control,
    Exchange,
    Handle,
    Schedule,
    StepTransfers,
    Transfer,
    Transport,
)
from ringfa4.context import Context
from ringfa4.launch.console import Console
from ringfa4.launch.inputs import RandomInputs
from ringfa4.launch.options import SHARDINGS, Parser, typed
from ringfa4.launch.peers import Peers
from ringfa4.launch.plan_numbers import Numbers, Shape, record_bytes
from ringfa4.launch.simulate_machine import Machine, Rate
from ringfa4.launch.simulate_ring import Setting, simulate
from ringfa4.launch.sizes import parse_size, parse_sizes, size_text
from ringfa4.launch.workload import DTYPES
from ringfa4.launch.world import exit_code, one_rank
from ringfa4.ring import Ring, backward, forward
from ringfa4.trace import Recorder
from ringfa4.wire import Direction

PASSES: tuple[Direction, ...] = ("forward", "backward")

LINK_BYTES = 1 << 22
"""What a rank reads from its neighbour when the link is measured."""

READINGS = 7
"""How often a link is measured in each repetition."""

# ---- a transport that moves nothing ------------------------------------------------------------


class _Still(Handle):
    def __init__(self, view: Tensor | None) -> None:
        self._view = view

    def wait(self) -> Tensor | None:
        return self._view


class StillExchange(Exchange):
    """Every read finds the rank's own records, over and over; contributions are zeros."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._outbox = torch.zeros(schedule.own_bytes, dtype=torch.uint8)
        self._slot = torch.zeros(schedule.grad_bytes, dtype=torch.uint8)
        self._inbox = torch.zeros(schedule.grad_bytes, dtype=torch.uint8)
        self._records = self._outbox

    def outbox(self) -> Tensor:
        return self._outbox

    def publish(self) -> None:
        times = -(-self.schedule.fetch_bytes // max(1, self._outbox.numel()))
        self._records = self._outbox.repeat(max(1, times))

    def fetch(self, step: int) -> Handle:
        receive = self.schedule.steps[step].receive
        return _Still(None if receive is None else self._records[: receive.nbytes])

    def grad_slot(self, step: int) -> Tensor | None:
        out = self.schedule.steps[step].grad_out
        return None if out is None else self._slot[: out.nbytes]

    def send_grads(self, step: int) -> None:
        """They go nowhere."""

    def contributions(self, step: int) -> Iterator[Contribution]:
        given = self.schedule.steps[step].grad_in
        if given is not None:
            yield Contribution(given.peer, self._inbox[: given.nbytes], lambda: None)

    def finish(self) -> None:
        """Nothing was under way."""


class StillTransport(Transport):
    """One rank of a world whose other ranks are not asked."""

    name = "still"

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.device = rank, world, torch.device("cpu")

    def ready(self, schedule: Schedule) -> bool:
        return True

    def open(self, schedule: Schedule) -> Exchange:
        return StillExchange(schedule)

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [local.clone() for _ in sizes]

    def abort(self, reason: str) -> None:
        """Nobody waits here."""

    def close(self) -> None:
        """Nothing to release."""


class StillControl(Control):
    """Everybody says what this rank says."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.timeout_s = rank, world, 1.0

    def gather(self, message: bytes) -> list[bytes]:
        return [message] * self.world

    def report(self, reason: str) -> None:
        """Nobody listens."""

    def failure(self) -> tuple[int, str] | None:
        return None

    def close(self) -> None:
        """Nothing to release."""


# ---- what is measured ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    seq: int
    wire: str
    heads: int
    kv_heads: int
    head_dim: int
    sharding: str

    @property
    def kernel(self) -> str:
        return "mxfp8" if self.wire.startswith("mxfp8") else "bf16"


class Bench:
    """One case on this rank: its inputs, its rings, and what the rates are."""

    def __init__(self, case: Case, context: Context, peers: Peers) -> None:
        self.case, self.context, self.peers = case, context, peers
        dtype = DTYPES.get(case.wire, torch.bfloat16)
        mask = masks.causal(case.seq)
        self.cp = ContextParallel(context, mask=mask, sharding=case.sharding, wire=case.wire)
        drawn = RandomInputs(0, 1, dtype)
        shard = self.cp.problem.q_sharding.shards[peers.rank]
        heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
        self.q, self.k, self.v, self.dout = (
            drawn.rows(name, shard, n, case.head_dim) for name, n in heads.items()
        )
        self.scale = case.head_dim**-0.5
        shape = Shape(1, case.heads, case.kv_heads, case.head_dim, case.head_dim)
        sides = self.cp.problem.q_sharding, self.cp.problem.k_sharding
        self.numbers = {
            way: Numbers.of(mask, *sides, case.wire, shape, backward=way == "backward")
            for way in PASSES
        }
        self._saved: tuple[Tensor, Tensor] | None = None

    def ring(self, way: Direction) -> Ring:
        return self.cp.problem.ring(self.q, self.k, self.v, backward=way == "backward")

    def call(self, ring: Ring, way: Direction) -> tuple[float, Recorder]:
        """Seconds of the slowest rank, and this rank's spans."""
        recorder = Recorder()
        self.peers.barrier()
        start = time.perf_counter()
        if way == "forward":
            self._saved = forward(ring, self.q, self.k, self.v, scale=self.scale, observer=recorder)
        else:
            assert self._saved is not None, "forward comes first"
            backward(
                ring, self.q, self.k, self.v, *self._saved, self.dout,
                scale=self.scale, observer=recorder,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        return self.peers.max(torch.tensor(seconds, dtype=torch.float64)).item(), recorder

    def still(self, way: Direction) -> Ring:
        """The same ring where nothing moves."""
        rank, world = self.peers.rank, self.peers.world
        alone = Context(StillTransport(rank, world), StillControl(rank, world))
        return replace(self.ring(way), context=alone)

    def compute_rates(self, way: Direction) -> dict[str, float]:
        """Kernel and copy rates, and what a step costs beside them; means over ranks."""
        ring = self.still(way)
        _, spans = self.call(ring, way)
        numbers, rank, shape = self.numbers[way], self.peers.rank, self.numbers[way].shape
        compute, passes = (
            sum(spans.seconds(kind) for kind in kinds)
            for kinds in (("compute",), ("encode", "reduce"))
        )
        whole = max(s.stop for s in spans.spans) - min(s.start for s in spans.spans)
        records = numbers.plan.k_sharding.shards[rank].records
        plain, encoded = (
            record_bytes(wire, shape, backward=numbers.backward)
            for wire in ("bf16", self.case.wire)
        )
        came = sum(s.grad_in.nbytes for s in ring.schedule(way).steps if s.grad_in)
        added = came * (1 + 2 * ring.sums.dtype.itemsize / ring.contribution.dtype.itemsize)
        rates = {
            f"{way}_{self.case.kernel}": numbers.flops(numbers.work[rank]) / compute / 1e12,
            "copy_gbs": (records * (plain + encoded) + added) / passes / 1e9,
            "step_us": 1e6 * (whole - compute - passes) / numbers.world,
        }
        return {name: self.mean(rate) for name, rate in rates.items()}

    def mean(self, x: float) -> float:
        return self.peers.sum(torch.tensor(x, dtype=torch.float64)).item() / self.peers.world

    def link(self, nbytes: int, beside: Callable[[], object] = lambda: None) -> float:
        """Seconds in which every rank reads ``nbytes`` from its neighbour, ``beside`` included."""
        rank, world = self.peers.rank, self.peers.world
        whole = ((0, nbytes),)
        step = StepTransfers(
            receive=Transfer((rank - 1) % world, whole), send=Transfer((rank + 1) % world, whole)
        )
        exchange = self.context.transport.open(
            Schedule(rank, world, nbytes, nbytes, nbytes, 0, (StepTransfers(), step))
        )
        exchange.publish()
        self.peers.barrier()
        start = time.perf_counter()
        coming = exchange.fetch(1)
        beside()
        coming.wait()
        seconds = time.perf_counter() - start
        exchange.finish()
        return self.mean(seconds)

    def agree(self) -> float:
        """Seconds of a bare header exchange."""
        self.peers.barrier()
        start = time.perf_counter()
        for _ in range(10):
            self.context.agree({"call": "timing"})
        return self.mean((time.perf_counter() - start) / 10)

    def link_rates(self) -> dict[str, float]:
        """What does not depend on the pass."""
        first, wide = (
            statistics.median(self.link(nbytes) for _ in range(READINGS))
            for nbytes in (128, LINK_BYTES)
        )
        found: dict[str, float] = {
            "link_gbs": LINK_BYTES / max(wide - first, 0.1 * wide) / 1e9,
            "transfer_us": first * 1e6,
            "agree_us": self.agree() * 1e6,
        }
        ring = self.still("forward")
        alone = self.mean(self.call(ring, "forward")[1].seconds("compute"))
        spans: list[Recorder] = []
        many = max(1, int(0.5 * alone / wide)) * LINK_BYTES
        taken = self.link(many)
        self.link(many, lambda: spans.append(self.call(ring, "forward")[1]))
        both = self.mean(spans[0].seconds("compute"))
        return {**found, "drag": max(0.0, (both - alone) / taken)}


@dataclass
class Row:
    """Predicted and measured seconds of one pass, of every repetition."""

    predicted: list[float]
    measured: list[float]
    exposed: list[float]
    waited: list[float]


def compare(bench: Bench, repeat: int) -> tuple[dict[Direction, Row], dict[str, float]]:
    """The two sides, repetition by repetition, and the median rates. Collective."""
    rows = {way: Row([], [], [], []) for way in PASSES}
    seen: list[dict[str, float]] = []
    for repetition in range(repeat + 1):
        measured = {way: bench.call(bench.ring(way), way) for way in PASSES}
        links = bench.link_rates()
        rates = {way: {**links, **bench.compute_rates(way)} for way in PASSES}
        if repetition == 0:
            continue  # buffers grow and code loads
        seen.append({**rates["backward"], **rates["forward"]})
        for way, row in rows.items():
            setting = Setting(bench.case.kernel, fused=True)  # its merges are in compute spans
            found = simulate(bench.numbers[way], machine(rates[way], bench.peers.world), setting)
            seconds, spans = measured[way]
            row.predicted.append(found.seconds)
            row.measured.append(seconds)
            row.exposed.append(sum(found.exposed.values()))
            row.waited.append(bench.mean(spans.seconds("wait") + spans.seconds("reduce")))
    return rows, {name: statistics.median(r[name] for r in seen) for name in seen[0]}


def machine(rates: Mapping[str, float], world: int) -> Machine:
    """These processes; all in one domain."""
    source = "measured beside the ring"
    known = {name: Rate(value, source) for name, value in rates.items()}
    return Machine("these processes", world, known, two_sided=True)


def parser() -> Parser:
    made = Parser(
        prog="simulate_check.py",
        description="Measure a causal ring on CPU processes beside its prediction.",
        allow_abbrev=False,
    )
    count = typed(parse_size, 1)
    made.add_argument("--seq", type=typed(parse_sizes), default=[2048, 8192], metavar="N,N")
    made.add_argument("--wire", type=lambda text: text.split(","), default=["bf16"])
    made.add_argument("--heads", type=count, default=4)
    made.add_argument("--kv-heads", type=count, default=4)
    made.add_argument("--head-dim", type=count, default=64)
    made.add_argument("--sharding", choices=SHARDINGS, default="zigzag")
    made.add_argument("--repeat", type=count, default=5)
    made.add_argument("--timeout", type=float, default=300.0)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one process; ``argv`` None is the command line."""
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    return exit_code("simulate_check.py", lambda: launch(parser().parse_args(argv), command))


def launch(options: argparse.Namespace, command: str) -> bool:
    """Measure every case, and say both sides. True: there is nothing to fail."""
    with one_rank("cpu", "auto", options.timeout) as (context, peers):
        if peers.world == 1:
            raise ValueError("one rank moves nothing: run it under torchrun")
        console = Console(sys.stdout, speaks=peers.rank == 0)
        console.say(f"launch/simulate_check.py {command}: {peers.world} processes")
        rows: list[tuple[str, ...]] = [
            ("tokens", "wire", "pass", "measured", "predicted", "ratio", "waited", "exposed")
        ]
        for seq, wire in product(options.seq, options.wire):
            case = Case(
                seq, wire, options.heads, options.kv_heads, options.head_dim, options.sharding
            )
            found, rates = compare(Bench(case, context, peers), options.repeat)
            shown = ", ".join(f"{name} {value:.3g}" for name, value in rates.items())
            console.say(f"{size_text(seq)}, {wire}: {shown}")
            rows += [_text(case, way, row) for way, row in found.items()]
        console.say("medians in ms; ratio: predicted / measured, in the same repetition (range)")
        console.table(rows)
    return True


def _text(case: Case, way: Direction, row: Row) -> tuple[str, ...]:
    ratios = [p / m for p, m in zip(row.predicted, row.measured, strict=True)]
    measured, predicted, waited, exposed = (
        f"{1e3 * statistics.median(x):.4g}"
        for x in (row.measured, row.predicted, row.waited, row.exposed)
    )
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    tokens = size_text(case.seq).split()[0]
    return tokens, case.wire, way, measured, predicted, spread, waited, exposed


if __name__ == "__main__":
    sys.exit(main())
