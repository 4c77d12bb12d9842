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
    """One line of the segments table, for the rows of an item.

    Some of them see a key of the chunk's records [t0, t1); all of them see all keys of [w0, w1).
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
    w0: Int32
    w1: Int32

    @classmethod
    def read(cls, segments: Int64, number: Int32, item: Item) -> Segment:
        address = segments + Int64(number) * (4 * SEGMENT_WORDS)
        record, q0, q1, k0 = ptx.load_words(address)
        k1, lo, hi, _ = ptx.load_words(address + 16)
        first, stop = item.first, item.first + item.rows
        i0, i1 = cutlass.max(q0, first), cutlass.min(q1, stop)
        j0, j1 = cutlass.max(k0, i0 + lo), cutlass.min(k1, i1 + hi)
        some = Int32((i0 < i1) & (j0 < j1))
        t0 = j0 >> ROW_BITS
        t1 = t0 + some * (((j1 + (ROWS - 1)) >> ROW_BITS) - t0)
        inside = Int32((first >= q0) & (stop <= q1))
        w0 = (cutlass.max(k0, stop - 1 + lo) + (ROWS - 1)) >> ROW_BITS
        w1 = (inside * cutlass.min(k1, first + hi + 1)) >> ROW_BITS
        return cls(record, q0, q1, k0, k1, lo, hi, t0, t1, w0, w1)

    def cuts(self, t: Int32) -> Any:
        """Whether some row of the item does not see all of the record ``t``."""
        return (t < self.w0) | (t >= self.w1)

    def seen_by(self, row: Int32) -> tuple[Any, Any]:
        """The keys [j0, j1) of the chunk that a query sees; j1 <= j0 for none."""
        inside = Int32((row >= self.q0) & (row < self.q1))
        j0, j1 = cutlass.max(self.k0, row + self.lo), cutlass.min(self.k1, row + self.hi + 1)
        return j0, j0 + inside * (j1 - j0)


@cute.jit
def visits(segments: Int64, item: Item) -> Int32:
    """How many records the item visits."""
    count = Int32(0)
    for number in cutlass.range(item.seg0, item.seg1, unroll=1):
        segment = Segment.read(segments, number, item)
        count += segment.t1 - segment.t0
    return count
