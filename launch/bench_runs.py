"""What bench.py measures: one direct call over the whole sequence, and rings over the same tokens.

    direct   PyTorch's own kernel on all of q, k, v: (b, h, s, d) contiguous, the layout it is
             fastest in; backward through autograd
    ring     ringfa4.ring.forward and backward of every rank, on its shard (b, s, h, d)

Repetitions are interleaved (direct, ring 1, ring 2, ..., direct, ...), and a ratio is taken within
one repetition: what slows a shared machine down for minutes slows both sides. Reported are medians.

Both sides find their code loaded and their buffers there: a small problem goes first, and each ring
goes round once with a kernel that computes nothing. Inputs are drawn outside the measurement, the
same for every setup. Costs of a ring: wall time of all ranks, from a barrier to a barrier; busy
time summed over ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4.context import Context
from ringfa4.launch.chrome_trace import Call, Part, gather
from ringfa4.launch.clocks import Clock, Cost
from ringfa4.launch.inputs import RandomInputs
from ringfa4.launch.peers import Peers
from ringfa4.launch.probes import Idle
from ringfa4.mask import Mask
from ringfa4.ops import checked
from ringfa4.problem import softmax_scale
from ringfa4.ring import Ring, backward, forward
from ringfa4.shard import Shard, contiguous
from ringfa4.trace import NAMED, Observer, Recorder
from ringfa4.wire import Direction

T = TypeVar("T")

DIRECT_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Kernels that the direct call may take: those that never hold a seq x seq matrix."""

WARM_UP = 256
"""Tokens of the small problem that goes first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem, over which a direct call and rings are compared."""

    seq: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One ring. ``traced``: it records its spans, and is compared with the one that does not."""

    wire: str
    sharding: str
    ranks: int
    traced: bool = False

    def __str__(self) -> str:
        text = f"{self.wire}, {self.sharding}, {self.ranks} rank{'s' * (self.ranks > 1)}"
        return text + ", traced" * self.traced


@dataclass(frozen=True)
class Common:
    """What all rows of a run share."""

    head_dim: int
    dtype: torch.dtype
    mask: str
    kernel: str
    precondition: str
    device: torch.device
    backward: bool
    seed: int

    @property
    def passes(self) -> tuple[Direction, ...]:
        return ("forward", "backward") if self.backward else ("forward",)

    def mask_of(self, shape: Shape) -> Mask:
        return masks.causal(shape.seq) if self.mask == "causal" else masks.full(shape.seq)

    def rows(self, shape: Shape, shard: Shard) -> dict[str, Tensor]:
        """q, k, v and dout (1, s, h, d) of ``shard``."""
        heads = {
            "q": shape.heads,
            "k": shape.kv_heads,
            "v": shape.kv_heads,
            "dout": shape.heads,
        }
        drawn = RandomInputs(self.seed, 1, self.dtype)
        return {
            name: drawn.rows(name, shard, count, self.head_dim).to(self.device)
            for name, count in heads.items()
        }


@dataclass
class Row:
    """One line of the result; ``setup`` None is the direct call."""

    shape: Shape
    setup: Setup | None
    costs: dict[Direction, list[Cost]] = field(default_factory=dict)
    refused: str | None = None

    def median(self, name: Direction) -> Cost:
        costs = self.costs[name]
        wall, busy = ([getattr(c, what) for c in costs] for what in ("wall_s", "busy_s"))
        return Cost(statistics.median(wall), statistics.median(busy))

    def ratios(self, base: Row, name: Direction) -> list[Cost]:
        """This row's costs over ``base``'s, repetition by repetition."""
        pairs = zip(self.costs[name], base.costs[name], strict=True)
        return [Cost(a.wall_s / b.wall_s, a.busy_s / b.busy_s) for a, b in pairs]


def timed(peers: Peers, clock: Clock | None, call: Callable[[], T]) -> tuple[Cost, T]:
    """What ``call`` costs on all ranks together; those without a clock are counted by another."""
    peers.barrier()
    if clock is not None:
        clock.start()
    peers.barrier()  # nobody begins before every clock runs
    result = call()
    peers.barrier()  # nor does a clock stop before everybody has ended
    own = Cost(0.0, 0.0) if clock is None else clock.stop()
    wall, busy = (torch.tensor(x, dtype=torch.float64) for x in (own.wall_s, own.busy_s))
    return Cost(peers.max(wall).item(), peers.sum(busy).item()), result


# ---- the direct call ----------------------------------------------------------------------------


def direct_refusal(shape: Shape) -> str | None:
    """Why there is no direct call of this shape."""
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} query heads are not a multiple of {shape.kv_heads} K/V heads"
    return None


class Direct:
    """softmax(scale * q k^T under the mask) v over the whole sequence, and its gradients."""

    def __init__(self, common: Common, shape: Shape) -> None:
        whole = common.rows(shape, contiguous(shape.seq, 1).shards[0])
        self.q, self.k, self.v, self.dout = (
            whole[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "dout")
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_(common.backward)
        self.causal = common.mask == "causal"

    def forward(self) -> Tensor:
        """out (b, h, s, d)."""
        with sdpa_kernel(DIRECT_KERNELS):
            out: Tensor = scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=self.causal,
                enable_gqa=self.q.shape[1] != self.k.shape[1],
            )  # fmt: skip
        return out

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv, each (b, h, s, d)."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)


def direct_costs(common: Common, shape: Shape, peers: Peers, clock: Clock) -> dict[Direction, Cost]:
    """Rank 0 computes, alone; the others wait. Collective."""
    if peers.rank != 0:
        return {name: timed(peers, None, lambda: None)[0] for name in common.passes}
    call = Direct(common, shape)
    costs: dict[Direction, Cost] = {}
    costs["forward"], out = timed(peers, clock, call.forward)
    if common.backward:
        costs["backward"], _ = timed(peers, clock, lambda: call.backward(out))
    return costs


# ---- the ring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One ring's costs, and what its ranks recorded (nothing unless traced)."""

    costs: dict[Direction, Cost]
    parts: list[Part]


def ring_costs(
    common: Common, shape: Shape, setup: Setup, context: Context, peers: Peers, clock: Clock | None
) -> Measured:
    """Collective. ValueError, alike on every rank, for what cannot be computed."""
    cp = ContextParallel(
        context,
        mask=common.mask_of(shape),
        sharding=setup.sharding,
        wire=setup.wire,
        kernel=common.kernel,
        precondition=common.precondition,
    )
    x = common.rows(shape, cp.problem.q_sharding.shards[peers.rank])
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    scale = softmax_scale(None, common.head_dim)
    calls: list[Call] = []

    def measure(name: Direction, call: Callable[[Ring, Observer], T]) -> tuple[Cost, T]:
        ring = checked(context, lambda: cp.problem.ring(q, k, v, backward=name == "backward"))
        call(replace(ring, kernel=Idle(ring.kernel)), NAMED)
        recorder = Recorder() if setup.traced else None
        cost, result = timed(peers, clock, lambda: call(ring, recorder or NAMED))
        if recorder is not None:
            calls.append(Call(f"{name}, {shape.seq} tokens, {setup}", name, ring, recorder.spans))
        return cost, result

    costs: dict[Direction, Cost] = {}
    costs["forward"], (out, lse) = measure(
        "forward", lambda ring, observer: forward(ring, q, k, v, scale=scale, observer=observer)
    )
    if common.backward:
        costs["backward"], _ = measure(
            "backward",
            lambda ring, observer: backward(
                ring, q, k, v, out, lse, dout, scale=scale, observer=observer
            ),
        )
    return Measured(costs, gather(context, calls) if calls else [])


# ---- all of them --------------------------------------------------------------------------------


class Stage(Protocol):
    """Where ranks run: as processes, or as threads of this one."""

    def direct(self, common: Common, shape: Shape) -> dict[Direction, Cost]: ...

    def ring(self, common: Common, shape: Shape, setup: Setup) -> Measured: ...


def grid(
    shapes: Sequence[Shape], wires: Sequence[str], shardings: Sequence[str], ranks: Sequence[int],
    *, traced: bool,
) -> list[Row]:  # fmt: skip
    """The rows of a run, shape by shape, a direct call first in each."""
    setups = [Setup(*how) for how in product(wires, shardings, ranks)]
    rows = []
    for shape in shapes:
        rows.append(Row(shape, None))
        for setup in setups:
            rows.append(Row(shape, setup))
            if traced:
                rows.append(Row(shape, replace(setup, traced=True)))
    return rows


def base_of(rows: Sequence[Row], row: Row) -> Row | None:
    """What ``row`` is compared with: the direct call, or for a traced ring the one that is not."""
    if row.setup is None:
        return None
    other = replace(row.setup, traced=False) if row.setup.traced else None
    return next(r for r in rows if r.shape == row.shape and r.setup == other)


def run(
    rows: Sequence[Row],
    common: Common,
    stage: Stage,
    repeat: int,
    say: Callable[[Row, int], None],
) -> list[list[Part]]:
    """Fill ``rows``; the parts of the last repetition's traced rings. Collective.

    A row that refuses keeps the reason and is not tried again.
    """
    traces: dict[tuple[Shape, Setup], list[Part]] = {}
    for row in rows:
        if row.setup is None:
            row.refused = direct_refusal(row.shape)
    warm_up(rows, common, stage)
    for shape in dict.fromkeys(row.shape for row in rows):
        for repetition in range(repeat):
            for row in rows:
                if row.shape != shape or row.refused is not None:
                    continue
                for name, cost in _costs(row, common, stage, traces).items():
                    row.costs.setdefault(name, []).append(cost)
                say(row, repetition)
    return list(traces.values())


def warm_up(rows: Sequence[Row], common: Common, stage: Stage) -> None:
    """Each direct call and ring once over few tokens; refusals show here and cost nothing."""
    for row in rows:
        if row.refused is None:
            small = replace(row, shape=replace(row.shape, seq=min(row.shape.seq, WARM_UP)))
            _costs(small, common, stage, {})
            row.refused = small.refused


def _costs(
    row: Row, common: Common, stage: Stage, traces: dict[tuple[Shape, Setup], list[Part]]
) -> dict[Direction, Cost]:
    """Costs of one repetition; none, and the reason in the row, when it refuses."""
    try:
        if row.setup is None:
            return stage.direct(common, row.shape)
        measured = stage.ring(common, row.shape, row.setup)
    except ValueError as error:
        row.refused = str(error)
        return {}
    if measured.parts:
        traces[row.shape, row.setup] = measured.parts
    return measured.costs


def flops(common: Common, shape: Shape, name: Direction) -> float:
    """Of the pairs that the mask allows: 2 (dk + dv) each in forward, 2.5 times that in
    backward.
    """
    forward_flops = common.mask_of(shape).area * shape.heads * 4 * common.head_dim
    return forward_flops * (2.5 if name == "backward" else 1)
