"""What a work item visits: records of keys, segment by segment, and what a row sees in each.

All warps of a thread block walk the same list; tables are in :mod:`ringfa4.kernels.sm100.specs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.specs import ITEM_WORDS, ROWS, SEGMENT_WORDS

ROW_BITS = ROWS.bit_length() - 1


@dataclass(frozen=True)
class Item:
    """One line of the items table."""

    batch: Int32
    q_record: Int32
    tiles: Int32
    row: Int32
    first: Int32
    rows: Int32
    seg0: Int32
    seg1: Int32

    @classmethod
    def read(cls, items: Int64, number: Int32) -> Item:
        address = items + Int64(number) * (4 * ITEM_WORDS)
        return cls(*ptx.load_words(address), *ptx.load_words(address + 16))


@dataclass(frozen=True)
class Segment:
    """One line of the segments table, and the records [t0, t1) of the chunk in which some of an
    item's rows see a key.
    """

    record: Int32
    q0: Int32
    q1: Int32
    k0: Int32
    k1: Int32
    lo: Int32
    hi: Int32
    t0: Int32
    t1: Int32

    @classmethod
    def read(cls, segments: Int64, number: Int32, first: Int32, rows: Int32) -> Segment:
        """For ``rows`` queries from ``first`` of their chunk on."""
        address = segments + Int64(number) * (4 * SEGMENT_WORDS)
        record, q0, q1, k0 = ptx.load_words(address)
        k1, lo, hi, _ = ptx.load_words(address + 16)
        i0, i1 = cutlass.max(q0, first), cutlass.min(q1, first + rows)
        j0, j1 = cutlass.max(k0, i0 + lo), cutlass.min(k1, i1 + hi)
        some = Int32((i0 < i1) & (j0 < j1))
        t0 = j0 >> ROW_BITS
        t1 = t0 + some * (((j1 + (ROWS - 1)) >> ROW_BITS) - t0)
        return cls(record, q0, q1, k0, k1, lo, hi, t0, t1)

    def cuts(self, item: Item, t: Int32) -> Any:
        """Whether some row of the item does not see all of the chunk's record ``t``."""
        j0, j1 = self.seen_by(item.first, item.rows)
        start = t << ROW_BITS
        return (start < j0) | (j1 < start + ROWS)

    def seen_by(self, first: Int32, rows: int | Int32) -> tuple[Any, Any]:
        """The keys [j0, j1) of the chunk that all of ``rows`` queries see; j1 <= j0 for none."""
        last = first + (rows - 1)
        inside = Int32((first >= self.q0) & (last < self.q1))
        j0, j1 = cutlass.max(self.k0, last + self.lo), cutlass.min(self.k1, first + self.hi + 1)
        return j0, j0 + inside * (j1 - j0)


@cute.jit
def visits(segments: Int64, item: Item) -> Int32:
    """How many records the item visits."""
    count = Int32(0)
    for number in cutlass.range(item.seg0, item.seg1, unroll=1):
        segment = Segment.read(segments, number, item.first, item.rows)
        count += segment.t1 - segment.t0
    return count
