"""The order in which the matrix unit is given its products, and what each of them waits for.

Two tiles of queries are in flight, record after record. Whole products of S go round like this:

    O_0 += P_0(i) V(i),  S_0(i+1),  O_1 += P_1(i) V(i),  S_1(i+1),  ...

Where two warps share a row, each with half of the keys, S may come in halves. The late one comes
where S did; the early one, one product of O before, so that its warp is ahead of the other:

    O_0 += P_0(i) V(i),  late S_0(i+1),  early S_1(i+1),  O_1 += P_1(i) V(i),  late S_1(i+1),  ...

Of the first record, all of S is multiplied at once: nothing is known to be worth waiting for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Event = tuple[str, int, int, int]
"""(what, tile, warp of the tile, how many times before): published by a loop."""

LATE, EARLY = 0, 1
"""The warps of a tile whose S comes in halves."""


@dataclass(frozen=True)
class Product:
    """Takes ``cycles`` once everything of ``after`` is known; ``logits``: the warps, as (tile,
    warp of the tile), whose S it makes.
    """

    cycles: float
    after: tuple[Event, ...] = ()
    logits: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Order:
    """What there is to multiply.

    parts          the shares of a product of P that the publications of P allow, one after another
    publications   of P, in a record, by each warp that shares a tile; who has made its last one
                   holds up no further part
    halves         S comes in halves, of warps LATE and EARLY
    shared_scales  the scales of S lie in the other tile's S (late half), which must be loaded first
    rescaled       O must have been rescaled before a product of P
    values, logits cycles of a product of P and V, and of one of Q and K: of a half, where halved
    """

    parts: Sequence[float]
    publications: Sequence[int]
    halves: bool
    shared_scales: bool
    rescaled: bool
    values: float
    logits: float

    def products(self, turns: int) -> list[Product]:
        """Of ``turns`` records of both tiles."""
        made = [self._logits(tile, 0, warp) for tile in (0, 1) for warp in self._halves]
        if self.halves:
            made.append(self._logits(0, 1, EARLY))
        for turn in range(turns):
            for tile in (0, 1):
                made += self._values(tile, turn)
                made.append(self._logits(tile, turn + 1, LATE))
                if self.halves:
                    made.append(self._logits(1 - tile, turn + 1 + tile, EARLY))
        return made

    @property
    def _halves(self) -> tuple[int, ...]:
        return (LATE, EARLY) if self.halves else (LATE,)

    def _values(self, tile: int, turn: int) -> Iterator[Product]:
        for part, share in enumerate(self.parts):
            after: list[Event] = [
                ("P", tile, warp, turn * count + min(part, count - 1))
                for warp, count in enumerate(self.publications)
            ]
            if self.rescaled:
                after.append(("O", tile, 0, turn))
            yield Product(share * self.values, tuple(after))

    def _logits(self, tile: int, turn: int, warp: int) -> Product:
        """S, or ``warp``'s half of it."""
        warps = range(len(self.publications))
        made = tuple((tile, w) for w in (warps if not self.halves else (warp,)))
        after: list[Event] = []
        if turn and self.halves and warp == EARLY:
            # What its scales, and then S itself, are written over.
            after = [("loaded", tile, w, turn - 1) for w in warps]
        elif turn and self.shared_scales:
            before = turn - 1 if tile == 0 else turn
            holders = (LATE,) if self.halves else warps
            after = [("loaded", 1 - tile, w, before) for w in holders]
        return Product(self.logits, tuple(after), made)
