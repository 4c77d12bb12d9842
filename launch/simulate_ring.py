"""One call of the ring on a machine model: the plan's own steps, as work on lanes and links.

    lane "compute"   agree, encode, then for each step t: kernel, merge (of dQ in backward), and
                     in every second one add what peers returned in t - 2 and t - 1; at the end,
                     finish
    lane "fetch"     records of step t, once the source has published or carried them, ``depth``
                     steps ahead
    lane "carry"     records of another domain, a lap ahead, once the copy of lap - 2 was read
    lane "grads"     dK/dV of step t to their owner or who carried, once slot i % 2 of his inbox is
                     free

It is the order of :mod:`ringfa4.ring` over a pulling transport (:mod:`ringfa4.comm.pull`), or with
``two_sided`` over one whose transfers wait for both ends (:mod:`ringfa4.comm.torch_p2p`). Pairs,
rows and bytes of every step are the plan's, exact; seconds are the machine's rates, so every time
here is modelled. Compute waits where a rank waits: nothing is in lockstep.

    efficiency = FLOPs / (ranks x kernel rate) / seconds     1: nothing but kernels, evenly
    exposed    = what compute waited for records, and for dK/dV

Left out: kernels that get slower on small steps, memory bandwidth that kernels and merges take from
each other, hosts that cannot issue fast enough, and switches between NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ringfa4.launch.plan_numbers import Numbers, Shape, Work, gradient_bytes, record_bytes
from ringfa4.launch.simulate_events import Link, Op, run
from ringfa4.launch.simulate_machine import Machine

KERNELS = ("mxfp8", "bf16")

AT_ONCE = 2
"""Steps whose dK/dV are added in one pass: :mod:`ringfa4.homecoming`, which needs torch."""

ROOM = 1 << 29
"""Bytes of dQ's parts that wait for one another: :mod:`ringfa4.grads`, likewise."""

COMPUTE = ("agree", "encode", "kernel", "merge", "convert", "reduce", "finish")
"""Kinds of work on the compute lane."""


@dataclass(frozen=True)
class Setting:
    """What is not the plan's nor the machine's.

    ``kernel``: in which format it computes; one that differs from the wire's converts on arrival.
    ``fused``: the kernel keeps the state in its epilogue, so merges cost nothing. ``at_once``: how
    many partials one pass over the state or dQ adds (:mod:`ringfa4.state`: 4). ``depth``: how many
    steps ahead records are fetched (the ring's own: 1).
    """

    kernel: str = "mxfp8"
    fused: bool = False
    at_once: int = 4
    depth: int = 1

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {self.kernel!r}; there are {sorted(KERNELS)}")
        if self.depth < 1 or self.at_once < 1:
            raise ValueError(f"at least one each: {self.depth=}, {self.at_once=}")


class Costs:
    """Seconds of each piece of a rank's work, from its size and the machine's rates."""

    def __init__(self, numbers: Numbers, machine: Machine, setting: Setting) -> None:
        self.numbers, self.setting = numbers, setting
        way = "backward" if numbers.backward else "forward"
        self.flops_per_s = machine.rate(f"{way}_{setting.kernel}") * 1e12
        self.copy = machine.rate("copy_gbs") * 1e9
        self.drag, self.link = machine.rate("drag"), machine.rate("link_gbs") * 1e9
        self.agree_s, self.step_s, self.transfer_s = (
            machine.rate(f"{name}_us") * 1e-6 for name in ("agree", "step", "transfer")
        )
        shape = numbers.shape
        self._plain = record_bytes("bf16", shape)
        self._encoded = record_bytes(numbers.wire, shape, backward=numbers.backward)
        self.converts = numbers.wire.startswith("mxfp8") != (setting.kernel == "mxfp8")
        self._converted = record_bytes(setting.kernel, shape, backward=numbers.backward)
        self._returned = [gradient_bytes(numbers.wire, shape, summed=n) for n in (False, True)]

    def kernel(self, work: Work) -> float:
        return self.numbers.flops(work.pairs) / self.flops_per_s + self.step_s

    def slowed(self, nbytes: int) -> float:
        """How much longer a kernel takes beside transfers of ``nbytes``."""
        return self.drag * nbytes / self.link

    def merge(self, work: Work) -> float:
        """Forward: the partial in (2 B), acc in and out (4 + 4 B) once for
        ``at_once`` of them. Backward: the kernel's dQ (2 B) likewise; it writes dK/dV where they
        leave from.
        """
        if self.setting.fused:
            return 0.0
        shape = self.numbers.shape
        width = shape.dk if self.numbers.backward else shape.dv
        return work.rows * shape.heads * width * (2 + 8 / self.setting.at_once) / self.copy

    def convert(self, work: Work) -> float:
        """Records from the wire's format to the kernel's."""
        if not self.converts:
            return 0.0
        return work.records * (self._encoded + self._converted) / self.copy

    def encode(self, rank: int) -> float:
        """The own shard, and what the kernel prepares of Q (and O, dO): read, and written anew."""
        shape = self.numbers.shape
        records = self.numbers.plan.k_sharding.shards[rank].records
        rows = len(self.numbers.sharding.shards[rank]) * shape.batch * shape.heads
        queries = rows * shape.dk * 3 if self.setting.kernel == "mxfp8" else 0
        if self.numbers.backward:
            queries += rows * shape.dv * (7 if self.setting.kernel == "mxfp8" else 4)
        return (records * (self._plain + self._encoded) + queries) / self.copy

    def reduce(self, work: Work, together: int) -> float:
        """What ``work`` returned, read and added to what is there, in one pass for ``together``."""
        each, sums = self._returned[work.summed], self._returned[True]
        return work.returned * (1 + 2 * sums / each / together) / self.copy

    def leave(self, work: Work) -> float:
        """A lap's sum from where it was added up to the slot that it is sent from. An upper bound:
        the ring's last pass of additions writes there itself.
        """
        return 2 * work.returned / self.copy

    def finish(self, rank: int) -> float:
        """Backward: dK and dV rounded. The last merge of forward divides and rounds too, the last
        sum of dQ rounds.
        """
        if not self.numbers.backward:
            return 0.0
        records = self.numbers.plan.k_sharding.shards[rank].records
        return records * self._plain * 3 / self.copy


@dataclass(frozen=True)
class Wires:
    """The links of every rank: of its NVLink domain, and to the other domains."""

    machine: Machine
    world: int
    links: dict[tuple[str, int], Link] = field(default_factory=dict)

    def between(self, source: int, reader: int) -> tuple[Link, Link]:
        """What a transfer from ``source`` to ``reader`` crosses."""
        inside = source // self.machine.domain == reader // self.machine.domain
        kind = "link" if inside else "nic"
        return self._link(f"{kind} out", source), self._link(f"{kind} in", reader)

    def _link(self, name: str, rank: int) -> Link:
        found = self.links.get((name, rank))
        if found is None:
            rate = self.machine.rate("link_gbs" if name.startswith("link") else "nic_gbs")
            found = self.links[name, rank] = Link(f"{name} of rank {rank}", rate * 1e9)
        return found


class _Ring:
    """Builds the ops of one call, step by step over all ranks."""

    def __init__(self, numbers: Numbers, machine: Machine, setting: Setting) -> None:
        self.numbers, self.setting, self.two_sided = numbers, setting, machine.two_sided
        self.costs, self.wires = Costs(numbers, machine, setting), Wires(machine, numbers.world)
        ranks = self.ranks = range(numbers.world)
        self.ops: list[Op] = []
        self.compute: list[Op | None] = [None] * numbers.world
        """The last op of each compute lane."""
        self.fetched: list[dict[int, Op]] = [{} for _ in ranks]
        self.last_fetch: list[Op | None] = [None] * numbers.world
        self.posted: list[Op | None] = [None] * numbers.world
        self.carried: list[dict[int, Op]] = [{} for _ in ranks]
        """The copy of each lap."""
        self.reads: dict[tuple[int, int], list[Op]] = {}
        """(source, lap) -> what peers fetch from its copy."""
        self.ended: list[list[Op | None]] = [[] for _ in ranks]
        """The last op of each step on the compute lane."""
        self.pushed: list[list[Op]] = [[] for _ in ranks]
        self.coming: list[dict[int, Op]] = [{} for _ in ranks]
        """Contributions on their way to each rank, by step."""
        self.given = [0] * numbers.world
        self.taken = 0
        """The last step whose contributions were added."""
        self.released: list[list[Op]] = [[] for _ in ranks]

    def build(self) -> list[Op]:
        published: list[Op] = []
        for rank in self.ranks:
            self.work("agree", rank, 0, self.costs.agree_s)
            published.append(self.work("encode", rank, 0, self.costs.encode(rank)))
        self.published = published
        plan, world = self.numbers.plan, self.numbers.world
        for t in range(1, min(self.setting.depth, world)):
            self.fetch(t)
        for t in range(len(self.numbers.steps[0])):
            if t + self.setting.depth < world:
                self.fetch(t + self.setting.depth)
            if t < world:
                self.step(t)
            if self.numbers.backward and t:
                if plan.lap(t)[1] == 0 or t - 1 - self.taken >= AT_ONCE:
                    self.take(t - 1)  # a sum leaves complete, and the inbox holds two
                self.give(t)
            for rank in self.ranks:
                self.ended[rank].append(self.compute[rank])
        if self.numbers.backward:
            self.take(len(self.numbers.steps[0]) - 1)
        for rank in self.ranks:
            self.work("finish", rank, 0, self.costs.finish(rank))
        return self.ops

    def add(self, op: Op) -> Op:
        self.ops.append(op)
        return op

    def work(
        self, kind: str, rank: int, step: int, seconds: float, after: Sequence[Op | None] = ()
    ) -> Op:
        """On the compute lane."""
        op = self.add(Op(kind, rank, step, (self.compute[rank], *after), seconds=seconds))
        self.compute[rank] = op
        return op

    def fetch(self, t: int) -> None:
        """Start the transfers of step ``t``: its buffer was last read in step t - 1 - depth."""
        for rank in self.ranks:
            done = t - 1 - self.setting.depth
            read = self.ended[rank][done] if done >= 0 else self.published[rank]
            after = (read, self.last_fetch[rank], self.posted[rank])
            self.posted[rank] = self.add(Op("post", rank, t, after))
        plan = self.numbers.plan
        begun, turn = plan.lap(t - 1)
        if turn == 0 and begun + 1 < plan.order.count:
            for rank in self.ranks:
                self.carry(rank, t, begun + 1)
        for rank in self.ranks:
            work = self.numbers.steps[rank][t]
            if not work.read:
                continue
            lap = plan.lap(t)[0]
            there = self.posted[work.source] if self.two_sided else self.published[work.source]
            copy = self.carried[work.source].get(lap) if lap else None
            op = self.move("fetch", rank, t, work.source, work.read, (there, copy))
            self.fetched[rank][t] = self.last_fetch[rank] = op
            if lap:
                self.reads.setdefault((work.source, lap), []).append(op)

    def carry(self, rank: int, t: int, lap: int) -> None:
        """Start in step ``t`` what ``rank`` brings over for ``lap``."""
        work = self.numbers.steps[rank][lap * self.numbers.plan.order.size]
        if work.carried:
            there = self.posted[work.owner] if self.two_sided else self.published[work.owner]
            free = self.reads.get((rank, lap - 2), [])
            after = (there, self.carried[rank].get(lap - 1), *free)
            op = self.move("carry", rank, t, work.owner, work.carried, after)
            self.carried[rank][lap] = op

    def move(
        self, kind: str, rank: int, t: int, source: int, nbytes: int, after: Sequence[Op | None]
    ) -> Op:
        """A transfer that ``rank`` reads."""
        return self.add(
            Op(
                kind, rank, t, (self.posted[rank], *after), seconds=self.costs.transfer_s,
                nbytes=nbytes, links=self.wires.between(source, rank),
            )
        )  # fmt: skip

    def step(self, t: int) -> None:
        """Compute step ``t``, with what a transfer beside it costs."""
        for rank in self.ranks:
            work = self.numbers.steps[rank][t]
            if not work.tasks:
                continue
            lap, turn = self.numbers.plan.lap(t)
            here = self.carried[rank].get(lap) if lap and turn == 0 else None
            after = [self.fetched[rank].get(t), here]
            if self.numbers.backward and t and len(self.pushed[rank]) >= 2:
                after.append(self.pushed[rank][-2])
            if self.costs.converts:
                self.work("convert", rank, t, self.costs.convert(work), after)
            seconds = self.costs.kernel(work) + self.costs.slowed(self.beside(rank, t))
            self.work("kernel", rank, t, seconds, after)
            if not self.setting.fused:
                self.work("merge", rank, t, self.costs.merge(work))

    def beside(self, rank: int, t: int) -> int:
        """Bytes that move while ``rank`` computes step ``t``: what was begun just before."""
        steps, coming = self.numbers.steps[rank], t + self.setting.depth
        moved = steps[t - 1].returned if t else 0
        if coming < self.numbers.world:
            moved += steps[coming].read
            lap, turn = self.numbers.plan.lap(coming - 1)
            following = (lap + 1) * self.numbers.plan.order.size
            if turn == 0 and following < self.numbers.world:
                moved += steps[following].carried
        return moved

    def give(self, t: int) -> None:
        """dK/dV of step ``t`` on their way."""
        if self.numbers.plan.lap(t)[1] == 0:
            for rank in self.ranks:  # the sum of a lap goes from where it was added up to its slot
                work = self.numbers.steps[rank][t]
                if work.returned:
                    self.work("reduce", rank, t, self.costs.leave(work))
        here = list(self.compute)
        for rank in self.ranks:
            work = self.numbers.steps[rank][t]
            if work.taker is None:
                continue
            taker, index = work.taker, self.given[work.taker]
            after = [here[rank], self.published[taker]]
            after += self.pushed[rank][-1:]
            if index >= 2:
                after.append(self.released[taker][index - 2])
            if self.two_sided:
                after.append(here[taker])
            op = Op(
                "grads", rank, t, after,
                seconds=self.costs.transfer_s, nbytes=work.returned,
                links=self.wires.between(rank, taker),
            )  # fmt: skip
            self.pushed[rank].append(self.add(op))
            self.coming[taker][t] = op
            self.given[taker] += 1

    def take(self, last: int) -> None:
        """Add what came up to step ``last`` and was not added yet, and free the inbox."""
        steps = range(self.taken + 1, last + 1)
        self.taken = max(self.taken, last)
        for rank in self.ranks:
            ops = [op for t in steps if (op := self.coming[rank].pop(t, None)) is not None]
            together = min(len(ops), self.setting.at_once)
            for op in ops:
                seconds = self.costs.reduce(self.numbers.steps[op.rank][op.step], together)
                added = self.work("reduce", rank, op.step, seconds, [op])
            self.released[rank] += [added for _ in ops]


@dataclass(frozen=True)
class Outcome:
    """What a call takes; every time modelled, in seconds."""

    numbers: Numbers = field(repr=False)
    machine: Machine = field(repr=False)
    setting: Setting
    ops: list[Op] = field(repr=False)
    links: dict[tuple[str, int], Link] = field(repr=False)
    seconds: float
    kernel_s: float
    """Of all ranks: FLOPs at the kernel's rate."""

    @property
    def efficiency(self) -> float:
        return self.kernel_s / (self.numbers.world * self.seconds)

    @cached_property
    def last(self) -> list[Op]:
        """The work on the compute lane of the rank that ends last, in order."""
        rank = max(self.ops, key=lambda op: op.end).rank
        return [op for op in self.ops if op.rank == rank and op.kind in COMPUTE]

    @cached_property
    def spent(self) -> dict[str, float]:
        """Kind of work -> seconds, of the rank that ends last."""
        spent = dict.fromkeys(COMPUTE, 0.0)
        for op in self.last:
            spent[op.kind] += op.end - op.start
        return spent

    @cached_property
    def exposed(self) -> dict[str, float]:
        """What the rank that ends last waited for -> seconds: "fetch", records; "carry", its own
        copy of another domain's; "grads", dK/dV. With ``spent`` these are all of its time.
        """
        waited, now = {"fetch": 0.0, "carry": 0.0, "grads": 0.0}, 0.0
        for op in self.last:
            if op.start > now:
                waited[max(op.after, key=lambda before: before.end).kind] += op.start - now
            now = op.end
        return waited

    @cached_property
    def units(self) -> dict[str, float]:
        """Unit -> seconds that the busiest one of its kind works; the largest one binds."""
        ranks = range(self.numbers.world)
        groups = {"kernel": ("kernel",), "memory passes": COMPUTE[1:2] + COMPUTE[3:]}
        found = {}
        for unit, kinds in groups.items():
            busy = [0.0] * len(ranks)
            for op in self.ops:
                if op.kind in kinds:
                    busy[op.rank] += op.seconds
            found[unit] = max(busy)
        for (name, _), link in self.links.items():
            unit = "NVLink" if name.startswith("link") else "NIC"
            found[unit] = max(found.get(unit, 0.0), link.busy_s)
        return found

    @property
    def binds(self) -> str:
        return max(self.units, key=self.units.__getitem__)

    @property
    def memory_bytes(self) -> int:
        """Of the rank that holds most: tensors, state and the transport's buffers."""
        waiting = 0 if self.setting.fused else self.setting.at_once - 1
        return max(memory(self.numbers, rank, waiting) for rank in range(self.numbers.world))

    @property
    def memory_share(self) -> float:
        """Of the machine's memory."""
        return self.memory_bytes / (self.machine.rate("memory_gib") * 2**30)


def simulate(numbers: Numbers, machine: Machine, setting: Setting) -> Outcome:
    """ValueError when the machine lacks a rate that the call needs."""
    ring = _Ring(numbers, machine, setting)
    ops = ring.build()
    seconds = run(ops)
    kernel_s = numbers.flops(sum(numbers.work)) / ring.costs.flops_per_s
    return Outcome(numbers, machine, setting, ops, ring.wires.links, seconds, kernel_s)


def memory(numbers: Numbers, rank: int, waiting: int) -> int:
    """Bytes that one attention call holds on ``rank``: bf16 tensors, fp32 state, and buffers.

    Forward: q, k, v, out, lse, the state, ``waiting`` partials; two outboxes, two fetch buffers.
    Backward: dO, dQ, dK and dV besides, their fp32 sums where there are more parts than one pass
    adds, ``waiting`` parts of dQ and the own one of dK and dV, two inbox and two outgoing slots.
    Where ranks carry: two copies, and in backward two sums of them. A model's own memory is not
    here.
    """
    shape: Shape = numbers.shape
    rows = len(numbers.sharding.shards[rank]) * shape.batch
    keys = len(numbers.plan.k_sharding.shards[rank]) * shape.batch
    q, out = rows * shape.heads * shape.dk * 2, rows * shape.heads * shape.dv * 2
    kv = keys * shape.heads_kv * (shape.dk + shape.dv) * 2
    lse = rows * shape.heads * 4
    record = record_bytes(numbers.wire, shape, backward=numbers.backward)
    outbox = max(shard.records for shard in numbers.plan.k_sharding.shards) * record
    fetched = max((work.read for own in numbers.steps for work in own), default=0)
    copy = max((work.carried for own in numbers.steps for work in own), default=0)
    held = q + kv + out + lse + 2 * (outbox + fetched + copy)
    if not numbers.backward:
        return held + (2 + waiting) * out + 2 * lse
    largest = max((work.returned for own in numbers.steps for work in own), default=0)
    records = numbers.plan.k_sharding.shards[rank].records
    parts = sum(work.tasks > 0 for work in numbers.steps[rank])
    if parts > 2:
        waiting = min(waiting, ROOM // q)
    sums = q * (parts if parts <= waiting + 1 else 2 + waiting) + kv
    summed = 2 * copy // record
    if len(numbers.plan.contributions(rank)) > AT_ONCE:
        summed += records
    return held + out + q + kv + sums + summed * record_bytes("fp32", shape) + lse + 4 * largest
