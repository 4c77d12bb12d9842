"""How one row of `bench.py --scaling` is measured, on one rank.

    passes     forward, then backward, together --repeat times (and no further repetition once that
               took --row-seconds); between barriers, on the clock of the slowest rank. Short passes
               are made up to --burst times in a row, as the layers of a model make them, and one is
               reported: what the host does before its first kernel hides behind the call before it
    spans      seconds of each kind of span in the repetition reported, of the rank with the most
    alone      the ring with a kernel that computes nothing: what its transfers take by themselves
    library    the library calls of the local row, made once more with nothing around them
    peak       most memory torch's allocator held, and the transport's arena beside it, per rank;
               inputs included. NCCL's own buffers are not seen.
    errors     sampled rows against fp64 over all keys (ringfa4.launch.checks)

The repetition reported is the one with the median of forward + backward. A small problem goes first
and finds the kernels compiled; the run alone finds the buffers allocated. Inputs are standard
normal, drawn on the device from (seed, rank).
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4.comm.control import open_control
from ringfa4.comm.pull import PullTransport
from ringfa4.comm.registry import open_transport
from ringfa4.context import Context
from ringfa4.kernels.interface import BlockKernel
from ringfa4.launch.checks import Checker, Tensors, Verdict
from ringfa4.launch.chrome_trace import Call, Part, gather
from ringfa4.launch.peers import Peers
from ringfa4.launch.probes import Idle
from ringfa4.launch.runs import half_ulp, moved_bytes
from ringfa4.launch.scaling_local import StillTransport, recorded
from ringfa4.launch.scaling_rivals import RIVALS, Rival, Share, plain_ring
from ringfa4.launch.scaling_rows import Problem, Row
from ringfa4.launch.spans import STANDING, Timeline, seconds, timeline
from ringfa4.mx.formats import E4M3
from ringfa4.mx.wire import MxWire
from ringfa4.problem import softmax_scale
from ringfa4.ring import backward, forward
from ringfa4.shard import Sharding, contiguous, zigzag
from ringfa4.trace import NAMED, Observer
from ringfa4.wire import Direction

FLOPS_ASSUMED = {"cuda": 400e12, "cpu": 0.03e12}
"""Per rank and second: for what a row is expected to take before any was measured."""

BURST_S = 0.1
"""Passes expected to take longer are made one at a time."""

WARM_UP = 512
"""Tokens of a rank in the small problem that goes first."""


@dataclass(frozen=True)
class Bench:
    """Where rows are measured and how. ``context``: for what ranks say to each other."""

    context: Context
    peers: Peers
    head_dim: int
    dtype: torch.dtype
    backward: bool
    repeat: int
    burst: int
    row_seconds: float
    check_rows: int
    seed: int
    timeout_s: float

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def directions(self) -> tuple[Direction, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    def share(self, problem: Problem) -> dict[str, Tensor]:
        """q, k, v, dout (1, s, h, d) of this rank."""
        heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads}
        generator = torch.Generator(self.device).manual_seed(self.seed << 16 | self.peers.rank)

        def drawn(count: int) -> Tensor:
            shape = 1, problem.seq // self.peers.world, count, self.head_dim
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return {name: drawn(n) for name, n in (heads | {"dout": problem.heads}).items()}

    def timed(self, call: Callable[[], object]) -> float:
        """Seconds of the slowest rank. Collective."""
        self.peers.barrier()
        self._settle()
        start = time.perf_counter()
        call()
        self._settle()
        return self.most(time.perf_counter() - start)

    def in_a_row(self, problem: Problem) -> int:
        """How many calls of a pass are made at once; from what a call should take, not what it did,
        so that rows of one problem are treated alike.
        """
        work = problem.flops("forward", self.head_dim) / self.peers.world
        return min(self.burst, 1 + int(BURST_S * FLOPS_ASSUMED[self.device.type] / work))

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def most(self, x: float) -> float:
        """The largest of all ranks' ``x``. Collective."""
        return self.peers.max(torch.tensor(x, dtype=torch.float64)).item()


@dataclass
class Pass:
    """Forward or backward: seconds of every repetition, and of the one reported the rest."""

    seconds: list[float] = field(default_factory=list)
    reported_s: float = 0.0
    spans: dict[str, float] = field(default_factory=dict)
    alone_s: float | None = None
    library_s: float | None = None
    moved_bytes: int = 0
    """By this rank, K/V read and dK/dV handed over; the most of all ranks."""


@dataclass
class Measured:
    """What a row found; equal on all ranks, but for ``parts`` (a timeline, rank 0 has all)."""

    passes: dict[Direction, Pass]
    errors: list[Verdict]
    peak_bytes: int | None
    arena_bytes: int
    notes: list[str]
    parts: list[Part] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "parts"}


class _Attention(ABC):
    """One rank's attention on ``x``; keeps its last results, and no older ones meanwhile."""

    def __init__(self, x: dict[str, Tensor]) -> None:
        self.x = x
        self.out: Tensor = x["q"].new_empty(0)
        self.lse: Tensor | None = None
        self.grads: tuple[Tensor, ...] | None = None

    def run(self, name: Direction, observer: Observer = NAMED) -> None:
        """One pass; ``observer`` sees its spans, where it has any. Collective."""
        if name == "forward":
            self.out, self.lse, self.grads = self.out.new_empty(0), None, None
            self.out, self.lse = self.forward(observer)
        else:
            self.grads = None
            self.grads = self.backward(observer)

    @abstractmethod
    def forward(self, observer: Observer) -> tuple[Tensor, Tensor | None]:
        """out, and lse (None where none is returned)."""

    @abstractmethod
    def backward(self, observer: Observer) -> tuple[Tensor, ...]:
        """dq, dk, dv."""


def measure(bench: Bench, row: Row, *, traced: bool) -> Measured:
    """Collective. Raises what refuses or fails, not always on every rank."""
    if row.problem.seq % (2 * bench.peers.world):
        raise ValueError(f"{row.problem.seq} tokens are no 2 x {bench.peers.world} equal chunks")
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    return (_rival_row if row.setup.kind == "rival" else _ring_row)(bench, row, traced)


def _small(bench: Bench, problem: Problem) -> Problem:
    return replace(problem, seq=min(problem.seq, WARM_UP * bench.peers.world))


def _repeat(
    bench: Bench, problem: Problem, attention: _Attention
) -> tuple[dict[Direction, Pass], dict[Direction, Timeline]]:
    """All repetitions of both passes; timelines of a call each, of the repetition reported."""
    passes = {name: Pass() for name in bench.directions}
    lines: list[dict[Direction, list[Timeline]]] = []
    count, spent = bench.in_a_row(problem), 0.0
    while len(lines) < bench.repeat and (not lines or spent < bench.row_seconds):
        seen = {}
        for name in bench.directions:
            seen[name] = [timeline(bench.device) for _ in range(count)]
            taken = bench.timed(partial(_run_all, attention, name, seen[name]))
            passes[name].seconds.append(taken / count)
            spent += taken
        lines.append(seen)
    totals = [sum(p.seconds[n] for p in passes.values()) for n in range(len(lines))]
    median = sorted(range(len(lines)), key=totals.__getitem__)[(len(lines) - 1) // 2]
    for name, found in passes.items():
        found.reported_s = found.seconds[median]
        spans = [span for line in lines[median][name] for span in line.spans]
        groups = {kind: (kind,) for kind in ("agree", "encode", "compute", "finish", *STANDING)}
        for what, kinds in (groups | {"standing": STANDING}).items():
            found.spans[what] = bench.most(seconds(spans, kinds) / count)
    return passes, {name: made[-1] for name, made in lines[median].items()}


def _run_all(attention: _Attention, name: Direction, observers: Sequence[Observer]) -> None:
    for observer in observers:
        attention.run(name, observer)


# ---- the ring, and its work without transfers ---------------------------------------------------


class _RingCalls(_Attention):
    """Our ring. ``rings`` may be exchanged for others over the same tensors."""

    def __init__(self, bench: Bench, context: Context, row: Row) -> None:
        super().__init__(bench.share(row.problem))
        cp = ContextParallel(
            context,
            mask=row.problem.mask_of(),
            sharding="zigzag",
            wire=row.setup.wire,
            kernel=row.setup.kernel,
        )
        q, k, v = (self.x[name] for name in "qkv")
        self.rings = {
            name: cp.problem.ring(q, k, v, backward=name == "backward") for name in bench.directions
        }
        self.scale, self.sharding = softmax_scale(None, bench.head_dim), cp.problem.q_sharding
        self.notes = cp.explain()

    def forward(self, observer: Observer) -> tuple[Tensor, Tensor]:
        q, k, v = (self.x[name] for name in "qkv")
        return forward(self.rings["forward"], q, k, v, scale=self.scale, observer=observer)

    def backward(self, observer: Observer) -> tuple[Tensor, ...]:
        q, k, v, dout = (self.x[name] for name in ("q", "k", "v", "dout"))
        assert self.lse is not None
        given = q, k, v, self.out, self.lse, dout
        return backward(self.rings["backward"], *given, scale=self.scale, observer=observer)[:3]

    @contextmanager
    def by(self, name: Direction, kernel: BlockKernel) -> Iterator[None]:
        """Inside, pass ``name`` is computed by ``kernel``."""
        before = self.rings[name]
        self.rings[name] = replace(before, kernel=kernel)
        try:
            yield
        finally:
            self.rings[name] = before


@contextmanager
def _context(bench: Bench, row: Row) -> Iterator[Context]:
    """The context of a row: a transport of its own, or one over which nothing moves."""
    rank, world = bench.peers.rank, bench.peers.world
    group = dist.group.WORLD if world > 1 else None
    if row.setup.kind == "local":
        still = StillTransport(rank, world, bench.device)
        context = Context(still, open_control(group, bench.timeout_s))
    else:
        context = Context(*open_transport(row.setup.name, group, bench.device, bench.timeout_s))
    try:
        yield context
    except ValueError:  # every rank's: the context is as good as before
        raise
    except BaseException as error:
        context.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        context.close()


def _ring_row(bench: Bench, row: Row, traced: bool) -> Measured:
    with _context(bench, row) as context:
        small = _RingCalls(bench, context, replace(row, problem=_small(bench, row.problem)))
        for name in bench.directions:
            small.run(name)
        calls = _RingCalls(bench, context, row)
        alone = {name: _alone_s(bench, calls, name) for name in bench.directions}
        passes, lines = _repeat(bench, row.problem, calls)
        peak, arena = _peak(bench), _arena_bytes(context.transport)
        for name, found in passes.items():
            found.alone_s = alone[name]
            found.moved_bytes = int(bench.most(moved_bytes(calls.rings[name], name)))
        if row.setup.kind == "local":
            for name, found in passes.items():
                found.library_s, found.alone_s, found.moved_bytes = (
                    _library_s(bench, calls, name), None, 0
                )  # fmt: skip
            return Measured(passes, [], peak, arena, calls.notes)
        parts: list[Part] = []
        if traced:
            made = [
                Call(f"{row.name} {name}", name, calls.rings[name], lines[name].spans)
                for name in bench.directions
            ]
            parts = gather(context, made)
        quantised = isinstance(calls.rings["forward"].wire, MxWire)
        blocks = half_ulp(E4M3) if quantised else 0.0
        errors = _errors(bench, row.problem, calls, calls.sharding, blocks=blocks)
        return Measured(passes, errors, peak, arena, calls.notes, parts)


def _alone_s(bench: Bench, calls: _RingCalls, name: Direction) -> float:
    """Seconds in which the transfers of a pass are moved and awaited while nothing is computed."""
    line = timeline(bench.device)
    with calls.by(name, Idle(calls.rings[name].kernel)):
        bench.timed(partial(calls.run, name))  # buffers grow here
        bench.timed(partial(calls.run, name, line))
    return bench.most(seconds(line.spans, STANDING))


def _library_s(bench: Bench, calls: _RingCalls, name: Direction) -> float | None:
    """Median seconds of the library calls of a pass; None for a kernel that makes none."""
    kernel, made = recorded(calls.rings[name].kernel)
    with calls.by(name, kernel):
        calls.run(name)
    if not made:
        return None

    def again() -> None:
        for call in made:
            call()

    taken: list[float] = []
    while len(taken) < bench.repeat and (not taken or sum(taken) < bench.row_seconds / 2):
        taken.append(bench.timed(again))
    return sorted(taken)[(len(taken) - 1) // 2]


def _arena_bytes(transport: object) -> int:
    """Memory that ranks of a pull transport share, which torch's allocator does not see."""
    if not isinstance(transport, PullTransport):
        return 0
    return sum(len(piece) for piece in transport.arena.pieces[:1])


def _peak(bench: Bench) -> int | None:
    """None on the CPU, where a process only knows the most it has held since it began."""
    if bench.device.type != "cuda":
        return None
    return int(bench.most(torch.cuda.max_memory_allocated(bench.device)))


# ---- rivals -------------------------------------------------------------------------------------


class _RivalCalls(_Attention):
    """A rival, which has no spans."""

    def __init__(self, x: dict[str, Tensor], rival: Rival) -> None:
        super().__init__(x)
        self.rival = rival

    def forward(self, observer: Observer) -> tuple[Tensor, Tensor | None]:
        return self.rival.forward()

    def backward(self, observer: Observer) -> tuple[Tensor, ...]:
        return self.rival.backward()


def _rival_row(bench: Bench, row: Row, traced: bool) -> Measured:
    if not dist.is_initialized():
        raise ValueError(f"{row.setup.name} takes a process group: start with torchrun")
    causal, kernel = row.problem.mask == "causal", row.setup.kernel
    make = RIVALS[row.setup.name]
    small = bench.share(_small(bench, row.problem))
    with make(Share(**small, causal=causal), kernel) as rival:
        calls = _RivalCalls(small, rival)
        for name in bench.directions:
            calls.run(name)
    x = bench.share(row.problem)
    with make(Share(**x, causal=causal), kernel) as rival:
        calls = _RivalCalls(x, rival)
        passes, _ = _repeat(bench, row.problem, calls)
    peak, notes = _peak(bench), [rival.note] if rival.note else []
    borrowed = calls.lse is None
    if borrowed and bench.check_rows:
        notes.append("returns no lse: that of the plain ring is taken for the check")
        with plain_ring(Share(**x, causal=causal), kernel) as ring:
            calls.lse = ring.forward()[1]
    # PyTorch deals out full attention contiguously; for the others the deal makes no difference.
    deal = zigzag if causal else contiguous
    errors = _errors(bench, row.problem, calls, deal(row.problem.seq, bench.peers.world))
    return Measured(passes, [e for e in errors if e.name != "lse" or not borrowed], peak, 0, notes)


# ---- error --------------------------------------------------------------------------------------


def _errors(
    bench: Bench, problem: Problem, calls: _Attention, sharding: Sharding, *, blocks: float = 0.0
) -> list[Verdict]:
    """Sampled rows against fp64; nothing when none are asked for. Collective."""
    if bench.check_rows == 0:
        return []
    assert calls.lse is not None
    x = calls.x
    tensors = Tensors(x["q"], x["k"], x["v"], calls.out, calls.lse)
    if calls.grads is not None:
        dq, dk, dv = calls.grads
        tensors = replace(tensors, dout=x["dout"], dq=dq, dk=dk, dv=dv)
    checker = Checker(
        bench.peers,
        problem.mask_of(),
        (sharding, sharding),
        tensors,
        scale=softmax_scale(None, bench.head_dim),
        rows=bench.check_rows,
        blocks=blocks,
    )
    return checker.run()
