"""How long two tiles take a scheduler and the matrix unit: instructions as ptxas scheduled them.

A forward kernel of this family keeps two tiles of queries in flight. A thread block's four
schedulers do the same at the same time, so one is replayed: a softmax warp of each tile, and the
matrix unit, which takes products in order (:mod:`ringfa4.launch.cost_products`). Where two warps
share a row, each with half of the keys, both are replayed.

A product of P starts when it has been published, that of Q when the one before it is done; a warp
starts when its S is. What a warp does is its loop, instruction by instruction: each says how many
cycles the next must wait, which scoreboards it holds and which it waits for (tests/ptx/sass.py).
A scheduler issues one instruction a cycle; a unit takes a warp's instruction every so many
(:class:`Timing`).

Left out: other warps (load, products, epilogue), copies of scales in front of products, waits for K
and V, conflicts for registers and banks, instruction fetch. Two thread blocks that share products
are taken to do the same at the same time. Which of two ready warps the hardware takes, and how many
instructions wait in front of a busy unit, is not known: ``POLICIES`` are replayed, and their spread
reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ringfa4.launch.cost_products import LATE, Event, Order, Product

NONE = 7
"""Scoreboard of an instruction that holds none."""

CLASSES = ("exp", "fma2", "fma", "imad", "alu", "pack", "load", "store", "shared", "other")


@dataclass(frozen=True)
class Op:
    """One SASS instruction: ``kind`` of CLASSES; ``registers`` of a tensor-memory access; ``event``
    what it waits for, "S", "factor", or "pair" (that the tile's other warp is there too), or what
    it publishes, "loaded", "factor", "O", a part of "P", or "".
    """

    kind: str
    stall: int
    results: int = NONE
    operands: int = NONE
    waits: int = 0
    registers: int = 0
    event: str = ""

    @staticmethod
    def read(text: str) -> Op:
        """``kind/stall/results/operands/waits[/registers[/event]]``, as :meth:`__str__` writes."""
        kind, stall, results, operands, waits, *rest = text.split("/")
        if kind not in CLASSES:
            raise ValueError(f"unknown class of instruction {kind!r} in {text!r}")
        registers, event = (*rest, "", "")[:2]
        return Op(
            kind, int(stall), int(results), int(operands), int(waits), int(registers or 0), event
        )

    def __str__(self) -> str:
        text = f"{self.kind}/{self.stall}/{self.results}/{self.operands}/{self.waits}"
        if self.registers or self.event:
            text += f"/{self.registers or ''}"
        return text + (f"/{self.event}" if self.event else "")


@dataclass(frozen=True)
class Timing:
    """Cycles; the first group is how long a unit of one scheduler is taken by a warp's instruction.

    load, store   for each register of a tensor-memory access
    after_*       from there to the result
    values        a product of P and V of a 128 x 128 tile
    logits        a product of Q and K, or of half of K where S comes in halves
    handshake     from the end of a product to a warp that has seen it, plus from P to its product
    """

    exp: float
    values: float
    logits: float
    handshake: float
    fma2: float = 2
    fma: float = 1
    imad: float = 2
    alu: float = 2
    pack: float = 4
    load: float = 1
    store: float = 1
    after_arithmetic: float = 4
    after_exp: float = 18
    after_load: float = 30
    after_store: float = 20
    after_shared: float = 29
    after_other: float = 12


@dataclass(frozen=True)
class Policy:
    """``greedy``: the warp that issued last goes on as long as it can, else the one that has waited
    longest. ``queue``: instructions that a busy unit lets wait in front of it.
    """

    greedy: bool
    queue: int


POLICIES = tuple(Policy(greedy, queue) for greedy in (True, False) for queue in (0, 1, 3))


@dataclass(frozen=True)
class Kernel:
    """What is replayed.

    loops          of the softmax warps that share a tile on a scheduler, each from its wait for S
                   on; of two, the first has the late half of S, where it comes in halves
    parts          the shares of a product of P that its publications allow, one after another; they
                   sum to 1
    shared_scales  S of one tile may only be overwritten when the other tile's has been loaded
    halves         S comes in halves, one for each of two warps
    rescaling      what another warp does to O, tile after tile, between the factor that the softmax
                   publishes and the product of P
    """

    loops: tuple[Sequence[Op], ...]
    parts: tuple[float, ...]
    shared_scales: bool
    halves: bool = False
    rescaling: Sequence[Op] = ()

    def __post_init__(self) -> None:
        def number(event: str) -> tuple[int, ...]:
            return tuple(sum(op.event == event for op in loop) for loop in self.loops)

        published = number("P")
        if not all(published) or max(published) != len(self.parts):
            raise ValueError(f"{published} publications of P by each warp, {self.parts=}")
        if abs(sum(self.parts) - 1) > 1e-9:
            raise ValueError(f"{self.parts=} do not sum to 1")
        if not all(loop and loop[0].event == "S" for loop in self.loops):
            raise ValueError("a loop begins with its wait for S")
        if (self.shared_scales or self.halves) and set(number("loaded")) != {1}:
            raise ValueError("shared scales and halves need an event 'loaded' of each warp")
        meetings = number("pair")
        if any(meetings) and (len(meetings) != 2 or meetings[0] != meetings[1]):
            raise ValueError(f"{len(meetings)} warps of a tile meet {meetings} times")
        if self.halves and len(self.loops) != 2:
            raise ValueError(f"halves of S for {len(self.loops)} warps")
        if self.rescaling and not all(number("factor")):
            raise ValueError("rescaling needs an event 'factor' of each warp")

    @property
    def publications(self) -> tuple[int, ...]:
        """Of P, by each warp of a tile."""
        return tuple(sum(op.event == "P" for op in loop) for loop in self.loops)


def rescaling(columns: int, step: int = 16) -> tuple[Op, ...]:
    """O times a factor: ``columns`` of a lane, loaded, multiplied, stored ``step`` at a time.

    Written by hand: ptxas' own code for it lies on two paths of a loop for both tiles.
    """
    ops = [Op("other", 1, event="factor"), Op("shared", 1, 0), Op("alu", 12, waits=1)]
    for _ in range(columns // step):
        ops += [Op("load", 1, 1, registers=step), Op("fma2", 1, waits=2)]
        ops += [Op("fma2", 1)] * (step // 2 - 1) + [Op("store", 4, operands=2, registers=step)]
    return (*ops, Op("other", 1, waits=4, event="O"))


@dataclass
class _Warp:
    loop: Sequence[Op]
    tile: int
    index: int = 0  # of those that share the tile
    softmax: bool = True
    at: int = 0
    turn: int = 0
    met: int = 0  # how often it has met the tile's other warp
    ready: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)


class Replay:
    """One run; ``cycles`` is what a tile takes once nothing of the start is left."""

    def __init__(self, kernel: Kernel, timing: Timing, policy: Policy) -> None:
        self.kernel, self.timing, self.policy = kernel, timing, policy
        self.units: dict[str, float] = {}
        self.events: dict[tuple[str, int, int], list[float]] = {}
        self.order: Sequence[Product] = ()
        self.given = 0
        self.product_free = 0.0
        self.warps: list[_Warp] = []
        self.started: list[float] = []
        self.chains: list[float] = []

    def run(self, turns: int = 12, skip: int = 3) -> float:
        """Cycles a 128 x 128 tile: two tiles a turn of the loop."""
        kernel, timing = self.kernel, self.timing
        self.order = Order(
            kernel.parts, kernel.publications, kernel.halves, kernel.shared_scales,
            bool(kernel.rescaling), timing.values, timing.logits,
        ).products(turns)  # fmt: skip
        self.warps = [
            _Warp(loop, tile, index) for index, loop in enumerate(kernel.loops) for tile in (0, 1)
        ]
        warps = list(self.warps)
        if kernel.rescaling:
            warps.append(_Warp(kernel.rescaling, 0, softmax=False))
        now, last = 0.0, warps[0]
        while min(w.turn for w in warps) < turns:
            self._products()
            due = [(self._when(w, now), w) for w in warps if w.turn < turns]
            soonest = min(when for when, _ in due)
            if soonest == float("inf"):
                raise RuntimeError("nothing can go on: the loop's events do not fit its products")
            ready = [w for when, w in due if when == soonest]
            if self.policy.greedy and last in ready:
                warp = last
            else:
                warp = min(ready, key=lambda w: w.ready)
            self._issue(warp, soonest)
            now, last = soonest + 1, warp
        spans = self.started[skip:]
        return (spans[-1] - spans[0]) / (len(spans) - 1) / 2

    def _seen(self, event: Event) -> float:
        """When it happened, or will have; infinity as long as that is not known."""
        name, tile, warp, number = event
        times = self.events.get((name, tile, warp), [])
        return times[number] if number < len(times) else float("inf")

    def _happens(self, name: str, tile: int, warp: int, when: float) -> None:
        self.events.setdefault((name, tile, warp), []).append(when)

    # ---- the matrix unit ------------------------------------------------------------------------

    def _products(self) -> None:
        """Give the matrix unit what it can start, in order."""
        half = self.timing.handshake / 2
        while self.given < len(self.order):
            product = self.order[self.given]
            ready = max((self._seen(event) + half for event in product.after), default=0.0)
            if ready == float("inf"):
                return
            self.product_free = max(self.product_free, ready) + product.cycles
            self.given += 1
            for tile, warp in product.logits:
                self._happens("S", tile, warp, self.product_free + half)

    # ---- warps ----------------------------------------------------------------------------------

    def _when(self, warp: _Warp, now: float) -> float:
        """First cycle at which the warp's instruction can be issued."""
        op = warp.loop[warp.at]
        when = max(warp.ready, now)
        for board in range(6):
            if op.waits >> board & 1:
                when = max(when, warp.boards[board])
        if op.event == "S":
            when = max(when, self._seen(("S", warp.tile, warp.index, warp.turn)))
        elif op.event == "factor" and not warp.softmax:
            factors = (("factor", warp.tile, w.index, warp.turn) for w in self._sharing(warp))
            when = max(when, *(self._seen(event) for event in factors))
        elif op.event == "pair" and not self._meets(warp):
            return float("inf")
        for unit, taken in self._units(op):
            when = max(when, self.units.get(unit, 0.0) - self.policy.queue * taken)
        return when

    def _sharing(self, warp: _Warp) -> list[_Warp]:
        """The softmax warps of its tile."""
        return [w for w in self.warps if w.tile == warp.tile]

    def _meets(self, warp: _Warp) -> bool:
        """Whether the tile's other warp has come as far."""
        (other,) = (w for w in self._sharing(warp) if w is not warp)
        return other.met + (other.loop[other.at].event == "pair") > warp.met

    def _units(self, op: Op) -> tuple[tuple[str, float], ...]:
        """Which units take the instruction, and for how long."""
        t = self.timing
        if op.kind == "exp":
            return (("exp", t.exp),)
        if op.kind in ("fma", "fma2", "imad"):
            return (("fma", {"fma": t.fma, "fma2": t.fma2, "imad": t.imad}[op.kind]),)
        if op.kind == "alu":
            return (("alu", t.alu),)
        if op.kind == "pack":
            return (("alu", t.alu), ("pack", t.pack))
        if op.kind in ("load", "store"):
            each = t.load if op.kind == "load" else t.store
            return (("tensor memory", op.registers * each),)
        return ()

    def _issue(self, warp: _Warp, now: float) -> None:
        op, t = warp.loop[warp.at], self.timing
        if op.event == "S" and warp.tile == 0 and warp.index == 0:
            self.started.append(now)
        units = self._units(op)
        start = max([now, *(self.units.get(unit, 0.0) for unit, _ in units)])
        taken = 0.0
        for unit, taken in units:
            self.units[unit] = start + taken
        after = {
            "exp": t.after_exp,
            "load": taken + t.after_load,
            "store": taken + t.after_store,
            "shared": t.after_shared,
            "other": t.after_other,
        }.get(op.kind, t.after_arithmetic)
        if op.results != NONE:
            warp.boards[op.results] = max(warp.boards[op.results], start + after)
        if op.operands != NONE:
            read = start + (taken if op.kind == "store" else 4)
            warp.boards[op.operands] = max(warp.boards[op.operands], read)
        if op.event in ("loaded", "P", "O") or (op.event == "factor" and warp.softmax):
            self._happens(op.event, warp.tile, warp.index, now)
            if op.event == "P":
                self.chains.append(now - self._seen(("S", warp.tile, LATE, warp.turn)))
        warp.met += op.event == "pair"
        warp.ready = now + max(1, op.stall)
        warp.at += 1
        if warp.at == len(warp.loop):
            warp.at = 0
            if warp.softmax or warp.tile == 1:
                warp.turn += 1
            if not warp.softmax:
                warp.tile = 1 - warp.tile


@dataclass(frozen=True)
class Replayed:
    """Cycles a tile under all policies, and cycles from S, all of it, to the last part of P
    (median).
    """

    low: float
    middle: float
    high: float
    chain: float


def replay(kernel: Kernel, timing: Timing, policies: Iterable[Policy] = POLICIES) -> Replayed:
    cycles, chains = [], []
    for policy in policies:
        run = Replay(kernel, timing, policy)
        cycles.append(run.run())
        each = sum(kernel.publications) * 2
        turns = [run.chains[n : n + each] for n in range(2 * each, len(run.chains), each)]
        chains.append(median(max(turn) for turn in turns))
    return Replayed(min(cycles), median(cycles), max(cycles), median(chains))
