"""The epilogue warps: O, reference and sum of a tile into the fp32 state, as each row's mode says.

    m = reference ln 2,  max' = max(max, m)
    acc' = acc e^(max - max') + O e^(m - max'),  sum' likewise

or (O, m, sum) alone where the row is written, or was empty: a payload under max = -inf is ignored.
Rows that no key reached enter as (0, -inf, 0).

A thread reads its row of O from tensor memory into shared memory, which frees O for the next item
before the first access to global memory; a warp then moves its 32 rows one after the other, whole
rows of 16 bytes a lane. Chunk c of row r lies at c ^ (r % 8): no bank conflicts either way.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import shuffle_sync, sync_warp

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import OUT, Block
from ringfa4.kernels.sm100.specs import LEAVE, MERGE, ROWS

AHEAD = 8
"""Loads of old rows in flight: 32 registers."""

LN2, LOG2E = math.log(2.0), 1 / math.log(2.0)

STORES, READS, TAKES = 1, 2, 4
"""Flags of a row: its state is written; read; O enters."""


@cute.jit
def finish(block: Block, warp: Int32, lane: Int32) -> None:
    tmem = block.tmem() + (warp << 21)
    items = Int32(0)  # parities of the tiles' items
    work = block.first_work
    while work < block.works:
        item, head = block.item(work)
        if block.visits(item) > 0:
            for tile in cutlass.range_constexpr(2):
                if tile < item.tiles:
                    _tile(block, item, head, tile, warp, lane, tmem, (items >> tile) & 1)
                    items = items ^ (1 << tile)
        work += block.ctas


@cute.jit
def _tile(
    block: Block, item: Any, head: Int32, tile: cutlass.Constexpr, warp: Int32, lane: Int32,
    tmem: Int32, parity: Int32,
) -> None:  # fmt: skip
    barriers, dv = block.barriers, block.spec.dv
    row = tile * ROWS + warp * 32 + lane
    local = Int64(item.row + row)
    exists = Int32(row < item.rows)
    mode = ptx.load_byte(block.modes + item.batch * block.modes_row + local, exists)
    merges = Int32(mode == MERGE)
    at = item.batch * block.row_b + head * block.row_h + local * 4
    old_max = ptx.load_floats(block.max + at, merges, 1)[0]
    old_sum = ptx.load_floats(block.sum + at, merges, 1)[0]

    ptx.mbarrier_wait(block.barrier(barriers.o_full, tile), parity)
    ptx.after_thread_sync()
    reference, total = ptx.load_shared(block.shared(block.at.rows, 8, row), 2)
    staging = block.shared(block.at.staging, 32 * dv * 4, warp)
    for column in cutlass.range_constexpr(0, dv, 32):
        values = ptx.tmem_load(tmem + (OUT[tile] + column), 32)
        for n in cutlass.range_constexpr(0, 32, 4):
            chunk = Int32((column + n) // 4)
            ptx.store_shared(_chunk(staging, dv, lane, chunk), *values[n : n + 4])
    ptx.before_thread_sync()
    sync_warp()
    ptx.arrive_once(block.barrier(barriers.o_empty, tile), lane)

    empty = ptx.equal(total, 0.0)
    reads = merges & (1 - ptx.equal(old_max, -math.inf))
    takes = 1 - empty
    new_max = ptx.select(takes, ptx.scaled(reference, LN2), Float32(-math.inf))
    top = ptx.select(reads, ptx.maximum(old_max, new_max), new_max)
    finite = ptx.select(ptx.equal(top, -math.inf), Float32(0.0), top)
    old_weight = ptx.select(reads, _weight(old_max, finite), Float32(0.0))
    new_weight = _weight(new_max, finite)
    new_sum = ptx.select(takes, ptx.multiply(total, new_weight), Float32(0.0))
    stores = Int32(mode != LEAVE)
    ptx.store_floats(block.max + at, [top], stores)
    ptx.store_floats(block.sum + at, [ptx.fma(old_sum, old_weight, new_sum)], stores)

    flags = stores * STORES + reads * READS + takes * TAKES
    _rows(block, item, head, tile * ROWS + warp * 32, lane, staging, flags, old_weight, new_weight)
    sync_warp()


def _weight(x: Any, top: Any) -> Any:
    """e^(x - top)."""
    return ptx.exp2(ptx.scaled(ptx.subtract(x, top), LOG2E))


def _chunk(staging: Any, dv: int, row: Any, chunk: Any) -> Any:
    return staging + row * (dv * 4) + ((chunk ^ (row & 7)) << 4)


@cute.jit
def _rows(
    block: Block, item: Any, head: Int32, first: Int32, lane: Int32, staging: Int32,
    flags: Int32, old_weight: Float32, new_weight: Float32,
) -> None:  # fmt: skip
    """The warp's 32 rows, ``first`` of the item and on; flags and weights are the lane's row's."""
    dv = block.spec.dv
    lanes = dv // 4
    together = 32 // lanes
    chunk = lane % lanes
    base = block.acc + item.batch * block.acc_b + head * (dv * 4) + chunk * 16
    base = base + Int64(item.row + first) * block.acc_s
    for begin in cutlass.range(0, 32, AHEAD * together, unroll=1):
        rows = [begin + n * together + lane // lanes for n in range(AHEAD)]
        flag = [shuffle_sync(flags, r) for r in rows]
        addresses = [base + r * block.acc_s for r in rows]
        old = [ptx.load_floats(a, f & READS, 4) for a, f in zip(addresses, flag, strict=True)]
        for n, row in enumerate(rows):
            of_old, of_new = shuffle_sync(old_weight, row), shuffle_sync(new_weight, row)
            new = ptx.load_shared(_chunk(staging, dv, row, chunk), 4)
            taken = flag[n] & TAKES
            new = [ptx.select(taken, ptx.multiply(x, of_new), Float32(0.0)) for x in new]
            merged = [ptx.fma(x, of_old, y) for x, y in zip(old[n], new, strict=True)]
            ptx.store_floats(addresses[n], merged, flag[n] & STORES)
