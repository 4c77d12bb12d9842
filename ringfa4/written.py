"""Which rows of a sum or a state have been reached: known on the host, since they come in ranges.

So nothing is initialised up front. What reaches a row first is assigned, what comes later is added
or merged, and rows that nothing reached are filled at the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar


class Written:
    """Which rows of each batch row have been assigned: sorted, disjoint, half-open intervals."""

    def __init__(self, batch: int) -> None:
        self._rows: list[list[tuple[int, int]]] = [[] for _ in range(batch)]

    def claim(self, batch: int, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """Mark [start, stop); its pieces in order, as (start, stop, whether written before)."""
        pieces: list[tuple[int, int, bool]] = []
        if start >= stop:
            return pieces
        rows = self._rows[batch]
        first = bisect_left(rows, start, key=lambda span: span[1])
        last = bisect_right(rows, stop, key=lambda span: span[0])
        at, low, high = start, start, stop
        for a, b in rows[first:last]:
            low, high = min(low, a), max(high, b)  # they overlap or touch: one interval now
            a, b = max(a, start), min(b, stop)
            if at < a:
                pieces.append((at, a, False))
            if a < b:
                pieces.append((a, b, True))
            at = b
        if at < stop:
            pieces.append((at, stop, False))
        rows[first:last] = [(low, high)]
        return pieces

    def spans(self, batch: int) -> Sequence[tuple[int, int]]:
        """What was written, in order."""
        return self._rows[batch]

    def gaps(self, batch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) was never written."""
        gaps, at = [], start
        for a, b in self._rows[batch]:
            if at < min(a, stop):
                gaps.append((at, min(a, stop)))
            at = max(at, b)
        if at < stop:
            gaps.append((at, stop))
        return gaps


def claims(
    written: Written, batch: int | None, size: int, start: int, stop: int
) -> Iterator[tuple[slice, slice, int, int, bool]]:
    """Pieces of [start, stop) for one batch row or, joined where they agree, for all ``size`` rows.

    Yields (batch rows of the state, batch rows of the partial, start, stop, written before).
    """
    if batch is not None:
        for a, b, seen in written.claim(batch, start, stop):
            yield slice(batch, batch + 1), slice(0, 1), a, b, seen
        return
    each = [written.claim(i, start, stop) for i in range(size)]
    if all(pieces == each[0] for pieces in each):
        for a, b, seen in each[0]:
            yield slice(0, size), slice(0, size), a, b, seen
        return
    for i, pieces in enumerate(each):
        for a, b, seen in pieces:
            yield slice(i, i + 1), slice(i, i + 1), a, b, seen


class Waiting(Protocol):
    """What is for ``rows`` of one ``batch`` row or, for None, of all."""

    @property
    def batch(self) -> int | None: ...

    @property
    def rows(self) -> slice: ...


W = TypeVar("W", bound=Waiting)


def claims_of(
    written: Written, size: int, waiting: Sequence[W], whole: tuple[int, int] | None = None
) -> Iterator[tuple[slice, slice, int, int, bool, list[W]]]:
    """The rows that ``waiting`` (all for the same batch rows) are for, in pieces that get the same
    of them: as :func:`claims`, and those, in order.

    With ``whole`` all of these rows instead; what nothing waits for comes with none, and counts as
    written from then on.
    """
    edges = {edge for one in waiting for edge in (one.rows.start, one.rows.stop)}
    if whole is not None:
        edges = {*whole, *(edge for edge in edges if whole[0] < edge < whole[1])}
    for start, stop in pairwise(sorted(edges)):
        here = [one for one in waiting if one.rows.start <= start and stop <= one.rows.stop]
        if not here and whole is None:
            continue
        batch = here[0].batch if here else None
        for claim in claims(written, batch, size, start, stop):
            yield *claim, here
