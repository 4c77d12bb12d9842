"""Two warps that keep NaN in V from rows that do not see it.

A masked pair has P = 0, but 0 * NaN is NaN in the product. So in records that some row of the item
does not see whole (all others need nothing) NaN of V becomes 0 in shared memory, and tokens that
had one are marked: softmax gives the rows that do see one a NaN scale. Such records are few, on the
diagonal and at ends; a scan reads 16 KB while earlier records are computed. Thread blocks of a pair
scan a half each and mark in both: a NaN in one half reaches all columns of those rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import barrier, sync_warp

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import Block
from ringfa4.kernels.sm100.loads import advanced, slot_and_parity
from ringfa4.kernels.sm100.specs import ROWS
from ringfa4.kernels.sm100.walk import Segment

THREADS = 64
NAMED_BARRIER = 9


@cute.jit
def guard(block: Block, thread: Int32) -> None:
    slots, barriers = block.spec.slots, block.barriers
    v = Int32(0)
    work = block.first_work
    while work < block.works:
        item, _ = block.item(work)
        for number in cutlass.range(item.seg0, item.seg1, unroll=1):
            segment = Segment.read(block.segments, number, item)
            for t in cutlass.range(segment.t0, segment.t1, unroll=1):
                slot, parity = slot_and_parity(v, slots)
                ptx.mbarrier_wait(block.barrier(barriers.v_full, slot), parity)
                if segment.cuts(t):
                    marks = block.marks(slot) + block.rank * 16
                    if thread == 0:
                        ptx.store_shared(marks, *[Int32(0)] * 4)
                    barrier(barrier_id=NAMED_BARRIER, number_of_threads=THREADS)
                    _scan(block, slot, marks, thread)
                    ptx.fence_proxy_async()
                    barrier(barrier_id=NAMED_BARRIER, number_of_threads=THREADS)
                    _tell(block, marks, block.barrier(barriers.v_clean, slot), thread)
                # Also where nothing is to be done, lest the slot's uses run ahead of this warp; one
                # lane speaks for all once all have seen the slot full.
                sync_warp()
                ptx.arrive_once(block.barrier(barriers.v_empty, slot), thread % 32)
                v = advanced(v, slots)
        work += block.step


@cute.jit
def _tell(block: Block, marks: Int32, clean: Int32, thread: Int32) -> None:
    """That the slot is clean; of a pair, after copying its marks to the other thread block."""
    if cutlass.const_expr(block.spec.ctas == 1):
        ptx.arrive_once(clean, thread)
    else:
        if thread == 0:
            ptx.store_shared_at(block.rank ^ 1, marks, ptx.load_shared_words(marks))
        ptx.arrive_once_at(0, clean, thread, publishes=True)


@cute.jit
def _scan(block: Block, slot: Int32, marks: Int32, thread: Int32) -> None:
    """Zero NaN in a slot of V and mark their tokens."""
    rows = block.spec.v_rows
    tile = block.shared(block.at.v, ROWS * rows, slot)
    for n in cutlass.range(rows // 8, unroll=1):
        chunk = n * THREADS + thread
        address = tile + chunk * 16
        words = ptx.load_shared_words(address)
        found = [ptx.nan_bytes(x) for x in words]
        if (found[0] | found[1] | found[2] | found[3]) != 0:
            # Rows are 8 chunks of 16 tokens; chunk c of row r lies at c ^ (r % 8).
            tokens = ((chunk & 7) ^ ((chunk >> 3) & 7)) * 16
            bits = Int32(0)
            for m in cutlass.range_constexpr(4):
                ptx.store_shared(address + 4 * m, words[m] & ~(found[m] * 0xFF))
                for byte in cutlass.range_constexpr(4):
                    bits = bits | (((found[m] >> (8 * byte)) & 1) << (4 * m + byte))
            ptx.mark_shared(marks + (tokens >> 5) * 4, bits << (tokens & 16))
