"""A plan in numbers: pairs and bytes of every rank in every step.

    step t of rank r:   pairs   (query, key) pairs that the mask allows, over batch rows, per head
                        bytes   records read from the source, at the wire's bytes a record
                        carried records brought over for the domain, where the topology has several
                        returns dK/dV of the same records to the source, or a domain's sum of them
                                to their owner

Integers only, from :mod:`ringfa4.plan`; neither torch nor numpy, so a laptop plans for a cluster.
The bytes of a record are written down once more here, from the layouts that
:mod:`ringfa4.wire` and :mod:`ringfa4.mx.wire` document; a test compares them with the wires' own.

Left out: time. What a byte and a pair cost is the machine's business; the ratio of both is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ringfa4.mask import Mask, document_cuts
from ringfa4.mx.formats import ATOM, BLOCK
from ringfa4.plan import Plan, RecordRange
from ringfa4.shard import RECORD, Sharding
from ringfa4.topology import Topology

PLAIN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Wires that carry the input dtype as it is: bytes of an element."""

MX_WIRES = ("mxfp8", "mxfp8-1x32")

WIRES = (*PLAIN_BYTES, *MX_WIRES)


@dataclass(frozen=True, slots=True)
class Shape:
    """What attention is computed on, as far as bytes and FLOPs depend on it."""

    batch: int = 1
    heads: int = 32
    heads_kv: int = 8
    dk: int = 128
    dv: int = 128

    def __post_init__(self) -> None:
        if self.heads % self.heads_kv:
            raise ValueError(
                f"query heads must be a multiple of K/V heads: {self.heads} and {self.heads_kv}"
            )


def record_bytes(wire: str, shape: Shape, *, backward: bool = False) -> int:
    """Bytes of 128 tokens of K and V on ``wire``. ValueError as the wire's own."""
    rows = shape.batch * shape.heads_kv
    width = shape.dk + shape.dv
    if wire in PLAIN_BYTES:
        return RECORD * rows * width * PLAIN_BYTES[wire]
    if wire not in MX_WIRES:
        raise ValueError(f"unknown wire {wire!r}; there are {sorted(WIRES)}")
    if shape.dk % BLOCK or shape.dv % BLOCK:
        raise ValueError(
            f"wire {wire!r} needs head dimensions that are multiples of {BLOCK}: "
            f"dk={shape.dk}, dv={shape.dv}"
        )
    # Atoms hold 128 x 4 scales; both orientations of a d-wide operand need ceil(d / 128) of them.
    k_scales, v_scales = (-(-d // ATOM.rows) * ATOM.nbytes for d in (shape.dk, shape.dv))
    size = RECORD * width + k_scales + v_scales
    if backward:
        size += k_scales  # K is contracted over the sequence too, for dQ
        if wire == "mxfp8-1x32":
            size += RECORD * shape.dk  # and with scales of its own, which take a second payload
    return rows * size


def gradient_wire(wire: str, *, summed: bool = False) -> str:
    """The plain wire in which dK and dV go back for K and V on ``wire``.

    One step's are bf16 for bf16 inputs (of which MXFP8 is taken to be made), as all kernels but
    ``reference`` and ``reference-mxfp8`` give them. Others, and what ranks have ``summed``: fp32.
    """
    if wire == "fp64":
        return wire
    return "bf16" if not summed and wire in ("bf16", *MX_WIRES) else "fp32"


def gradient_bytes(wire: str, shape: Shape, *, summed: bool = False) -> int:
    """Bytes of 128 tokens of dK and dV on their way back."""
    return record_bytes(gradient_wire(wire, summed=summed), shape)


@dataclass(frozen=True, slots=True)
class Work:
    """One step of one rank; step 0 is its own K/V, which it need not read.

    ``rows`` are the query rows that its tasks span: what a merge passes over. ``read`` are bytes
    read from ``source``, except where they were ``carried``, for the domain, from the owner.
    ``returned`` go to ``taker``: in turn 0 of a lap, the sum of the lap before (``summed``).
    """

    owner: int
    source: int
    pairs: int
    tasks: int
    rows: int
    records: int
    read: int
    carried: int
    returned: int
    taker: int | None
    summed: bool = False


Back = tuple[int, int]
"""Bytes of a record of dK/dV: of one step's, and of sums; 0 in forward."""


def _work(plan: Plan, rank: int, t: int, rows: int, record: int, back: Back) -> Work:
    """Step ``t`` of ``rank``."""
    tally, (lap, turn) = plan.tally(rank, t), plan.lap(t)
    own = t == 0 or (lap and turn == 0)
    given = plan.returns(rank, t) if back[0] and t else None
    return Work(
        owner=plan.owner(rank, t),
        source=plan.source(rank, t),
        pairs=tally.area * rows,
        tasks=tally.tasks,
        rows=tally.rows * rows,
        records=tally.records,
        read=0 if own else tally.records * record,
        carried=_count(plan.carried(rank, lap)) * record if lap and turn == 0 else 0,
        returned=_count(given.ranges) * back[given.summed] if given else 0,
        taker=given.peer if given else None,
        summed=given is not None and given.summed,
    )


def _last_return(plan: Plan, rank: int, back: Back) -> Work:
    """After the last step: the sum of the last lap goes home."""
    given = plan.returns(rank, plan.world)
    if given is None:
        return Work(rank, rank, 0, 0, 0, 0, 0, 0, 0, None)
    returned = _count(given.ranges) * back[given.summed]
    return Work(rank, rank, 0, 0, 0, 0, 0, 0, returned, given.peer, given.summed)


def _count(ranges: Iterable[RecordRange]) -> int:
    return sum(len(r) for r in ranges)


@dataclass(frozen=True)
class Numbers:
    """Everything that is shown of a plan. ``steps[rank][t]``; after the plan's steps there is one
    more in backward where ranks carry.

    ``returned`` of a step is 0 unless ``backward``.
    """

    mask: Mask
    sharding: Sharding
    wire: str
    shape: Shape
    backward: bool
    plan: Plan = field(repr=False)
    steps: tuple[tuple[Work, ...], ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        mask: Mask,
        sharding: Sharding,
        sharding_k: Sharding,
        wire: str = "mxfp8",
        shape: Shape | None = None,
        *,
        backward: bool = False,
        topology: Topology | None = None,
        progress: Callable[[int], None] = lambda ranks: None,
    ) -> Numbers:
        """The numbers of the plan that :class:`ringfa4.ContextParallel` would make.

        ``progress`` is called with the number of ranks done: a thousand documents dealt out token
        by token are millions of tasks.
        """
        shape = Shape() if shape is None else shape
        record = record_bytes(wire, shape, backward=backward)
        back = 0, 0
        if backward:
            back = gradient_bytes(wire, shape), gradient_bytes(wire, shape, summed=True)
        cuts = document_cuts(mask) if wire in MX_WIRES else ()
        plan = Plan(mask, sharding, sharding_k.split(cuts), topology)
        rows = shape.batch if mask.batch == 1 else 1
        steps = []
        for rank in range(plan.world):
            own = [_work(plan, rank, t, rows, record, back) for t in range(plan.world)]
            if backward and plan.order.count > 1:
                own.append(_last_return(plan, rank, back))
            steps.append(tuple(own))
            progress(rank + 1)
        return cls(mask, sharding, wire, shape, backward, plan, tuple(steps))

    @property
    def world(self) -> int:
        return len(self.steps)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Pairs of each rank."""
        return tuple(sum(w.pairs for w in own) for own in self.steps)

    @cached_property
    def read(self) -> tuple[int, ...]:
        """Bytes that each rank reads from others, or carries."""
        return tuple(sum(w.read + w.carried for w in own) for own in self.steps)

    def across(self, topology: Topology) -> int:
        """Bytes that cross between the domains of ``topology``, dK/dV included."""
        total = 0
        for rank, own in enumerate(self.steps):
            for w in own:
                total += w.read * (not topology.together(rank, w.source))
                total += w.carried * (not topology.together(rank, w.owner))
                if w.taker is not None:
                    total += w.returned * (not topology.together(rank, w.taker))
        return total

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """Bytes of dK/dV that each rank returns to others."""
        return tuple(sum(w.returned for w in own) for own in self.steps)

    @property
    def fair(self) -> float:
        """Pairs of a rank if all had the same."""
        return sum(self.work) / self.world

    @property
    def balance(self) -> float:
        """Most work of a rank over the mean; 1.0 is perfect."""
        return max(self.work) / self.fair if self.fair else 1.0

    @property
    def lockstep(self) -> float:
        """As ``balance``, if every step took as long as its busiest rank: the worst drift can do.

        Ranks do not wait for each other like that: a rank is held up only by K/V not yet there.
        """
        busiest = sum(max(own[t].pairs for own in self.steps) for t in range(self.world))
        return busiest / self.fair if self.fair else 1.0

    @property
    def token_balance(self) -> float:
        """Most tokens of a rank over the mean: memory, and the work of everything but attention."""
        tokens = [len(shard) for shard in self.sharding.shards]
        return max(tokens) * self.world / self.sharding.seq if self.sharding.seq else 1.0

    def flops(self, pairs: int) -> int:
        """Of ``pairs`` pairs a head: forward 2 (dk + dv) each, backward 2.5 times that."""
        forward = 2 * (self.shape.dk + self.shape.dv) * self.shape.heads * pairs
        return forward * 5 // 2 if self.backward else forward

    @property
    def bytes_per_kflop(self) -> float | None:
        """Bytes moved per thousand FLOPs over the whole call; None when there is nothing to do.

        1 is a GB/s for each TFLOP/s. Below what the machine has, transfers can hide behind work.
        """
        flops = self.flops(sum(self.work))
        return 1e3 * (sum(self.read) + sum(self.returned)) / flops if flops else None
