"""How long two tiles take a scheduler and the matrix unit: instructions as ptxas scheduled them.

A forward kernel of this family keeps two tiles of queries in flight. A thread block's four
schedulers do the same at the same time, so one is replayed: a softmax warp of each tile, and the
matrix unit, which takes products in order:

    O_0 += P_0(i) V(i),  S_0 = Q_0 K(i+1),  O_1 += P_1(i) V(i),  S_1 = Q_1 K(i+1),  ...

A product of P starts when a warp has published P, that of Q when the one before it is done; a warp
starts when its S is. What a warp does is its loop, instruction by instruction: each says how many
cycles the next must wait, which scoreboards it holds and which it waits for (tests/ptx/sass.py).
A scheduler issues one instruction a cycle; a unit takes a warp's instruction every so many
(:class:`Timing`).

Left out: other warps (load, products, epilogue), copies of scales in front of products, waits for K
and V, conflicts for registers and banks, instruction fetch. Which of two ready warps the hardware
takes, and how many instructions wait in front of a busy unit, is not known: ``POLICIES`` are
replayed, and their spread reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

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
    product       one of the two products of a 128 x 128 tile
    handshake     from the end of a product to a warp that has seen it, plus from P to its product
    """

    exp: float
    product: float
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

    loop           of a softmax warp, from its wait for S on
    parts          the shares of a product of P that each publication allows; they sum to 1
    shared_scales  S of one tile may only be overwritten when the other tile's has been loaded
    warps          of a scheduler that share a tile, each with its part of the keys
    rescaling      what another warp does to O, tile after tile, between the factor that the softmax
                   publishes and the product of P
    """

    loop: Sequence[Op]
    parts: tuple[float, ...]
    shared_scales: bool
    warps: int = 1
    rescaling: Sequence[Op] = ()

    def __post_init__(self) -> None:
        published = sum(op.event == "P" for op in self.loop)
        if published != len(self.parts) or abs(sum(self.parts) - 1) > 1e-9:
            raise ValueError(f"{published} publications of P, {self.parts=}")
        if not self.loop or self.loop[0].event != "S":
            raise ValueError("a loop begins with its wait for S")
        if self.shared_scales and not any(op.event == "loaded" for op in self.loop):
            raise ValueError("shared_scales needs an event 'loaded'")
        if self.warps < 1 or (self.warps != 2 and any(op.event == "pair" for op in self.loop)):
            raise ValueError(f"{self.warps=} of a tile, and pairs of them meet")
        if self.rescaling and not any(op.event == "factor" for op in self.loop):
            raise ValueError("rescaling needs an event 'factor'")


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
    part: int = 0
    softmax: bool = True
    at: int = 0
    turn: int = 0
    ready: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)


class Replay:
    """One run; ``cycles`` is what a tile takes once nothing of the start is left."""

    def __init__(self, kernel: Kernel, timing: Timing, policy: Policy) -> None:
        self.kernel, self.timing, self.policy = kernel, timing, policy
        self.units: dict[str, float] = {}
        self.events: dict[tuple[str, int], list[float]] = {}
        self.product_free = 0.0
        self.order: list[tuple[str, int, int, int]] = []
        self.given = 0
        self.warps: list[_Warp] = []
        self.told: dict[tuple[str, int, int], int] = {}
        self.started: list[float] = []
        self.chains: list[float] = []

    def run(self, turns: int = 12, skip: int = 3) -> float:
        """Cycles a 128 x 128 tile: two tiles a turn of the loop."""
        self.order = [("S", 0, 0, 0), ("S", 1, 0, 0)]
        for turn in range(turns):
            for tile in (0, 1):
                self.order += [("P", tile, turn, part) for part in range(len(self.kernel.parts))]
                if turn + 1 < turns:
                    self.order.append(("S", tile, turn + 1, 0))
        parts = range(self.kernel.warps)
        warps = [_Warp(self.kernel.loop, tile, part) for part in parts for tile in (0, 1)]
        self.warps = list(warps)
        if self.kernel.rescaling:
            warps.append(_Warp(self.kernel.rescaling, 0, softmax=False))
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

    def _seen(self, name: str, tile: int, turn: int) -> float:
        times = self.events.get((name, tile), [])
        return times[turn] if turn < len(times) else float("inf")

    # ---- the matrix unit ------------------------------------------------------------------------

    def _products(self) -> None:
        """Give the matrix unit what it can start, in order."""
        half, parts = self.timing.handshake / 2, self.kernel.parts
        while self.given < len(self.order):
            kind, tile, turn, part = self.order[self.given]
            ready, length = 0.0, self.timing.product
            if kind == "P":
                ready = self._seen("P", tile, turn * len(parts) + part)
                if self.kernel.rescaling:
                    ready = max(ready, self._seen("O", tile, turn))
                ready += half
                length *= parts[part]
            elif turn and self.kernel.shared_scales:
                ready = self._seen("loaded", 1 - tile, turn - 1 if tile == 0 else turn) + half
            if ready == float("inf"):
                return
            self.product_free = max(self.product_free, ready) + length
            self.given += 1
            if kind == "S":
                self.events.setdefault(("S", tile), []).append(self.product_free + half)

    # ---- warps ----------------------------------------------------------------------------------

    def _when(self, warp: _Warp, now: float) -> float:
        """First cycle at which the warp's instruction can be issued."""
        op = warp.loop[warp.at]
        when = max(warp.ready, now)
        for board in range(6):
            if op.waits >> board & 1:
                when = max(when, warp.boards[board])
        if op.event == "S" or (op.event == "factor" and not warp.softmax):
            when = max(when, self._seen(op.event, warp.tile, warp.turn))
        if op.event == "pair" and not self._met(warp):
            return float("inf")
        for unit, taken in self._units(op):
            when = max(when, self.units.get(unit, 0.0) - self.policy.queue * taken)
        return when

    def _met(self, warp: _Warp) -> bool:
        """Whether the tile's other warp has come as far."""
        (other,) = (w for w in self.warps if w.tile == warp.tile and w is not warp)
        return (other.turn, other.at) >= (warp.turn, warp.at)

    def _publish(self, event: str, warp: _Warp, now: float) -> None:
        """Known when the last of the tile's warps has said so."""
        times = self.events.setdefault((event, warp.tile), [])
        if not warp.softmax or self.kernel.warps == 1:
            times.append(now)
            return
        each = (event, warp.tile, warp.part)
        self.told[each] = self.told.get(each, 0) + 1
        last = min(self.told.get((event, warp.tile, p), 0) for p in range(self.kernel.warps))
        if last > len(times):
            times.append(now)

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
        if op.event == "S" and warp.tile == 0 and warp.part == 0:
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
            self._publish(op.event, warp, now)
            if op.event == "P":
                self.chains.append(now - self._seen("S", warp.tile, warp.turn))
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
    """Cycles a tile under all policies, and cycles from S to the last part of P (median)."""

    low: float
    middle: float
    high: float
    chain: float


def replay(kernel: Kernel, timing: Timing, policies: Iterable[Policy] = POLICIES) -> Replayed:
    cycles, chains = [], []
    for policy in policies:
        run = Replay(kernel, timing, policy)
        cycles.append(run.run())
        each = len(kernel.parts) * kernel.warps * 2
        turns = [run.chains[n : n + each] for n in range(2 * each, len(run.chains), each)]
        chains.append(median(max(turn) for turn in turns))
    return Replayed(min(cycles), median(cycles), max(cycles), median(chains))
