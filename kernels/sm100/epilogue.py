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
from ringfa4.kernels.sm100.block import EARLY, LATE, OUT, REFERENCE, SUM, Block
from ringfa4.kernels.sm100.specs import LEAVE, MERGE, ROWS

AHEAD = 4
"""Loads of old rows in flight: 16 registers."""

LN2, LOG2E = math.log(2.0), 1 / math.log(2.0)

STORES, READS, TAKES = 1, 2, 4
"""Flags of a row: its state is written; read; O enters."""


@cute.jit
def finish(block: Block, warp: Int32, lane: Int32) -> None:
    tmem = block.tmem() + (warp << 21) + OUT[0]
    items = Int32(0)  # parities of the tiles' items
    work = block.first_work
    while work < block.works:
        item, head = block.item(work)
        if block.visits(item) > 0:
            for tile in cutlass.range(item.tiles, unroll=1):
                parity = (items >> tile) & 1
                reference, total = _stage(block, tile, warp, lane, tmem + tile * ROWS, parity)
                first = block.tile_start(tile) + warp * 32
                _merge(block, item, head, first, warp, lane, reference, total)
                items = items ^ (1 << tile)
        work += block.step


@cute.jit
def _stage(
    block: Block, tile: Int32, warp: Int32, lane: Int32, tmem: Int32, parity: Int32
) -> tuple[Float32, Float32]:
    """A tile's O into shared memory; the lane's row's reference and sum. Frees all three."""
    barriers, dv = block.barriers, block.spec.dv
    ptx.mbarrier_wait(block.barrier(barriers.o_full, tile), parity)
    ptx.after_thread_sync()
    row = warp * 32 + lane
    reference = ptx.load_shared_float(block.row(tile, row, REFERENCE))
    sums = [ptx.load_shared_float(block.row(tile, row, SUM + half)) for half in (LATE, EARLY)]
    total = ptx.add(*sums)
    target = _row(block, warp, lane, Int32(0))
    for column in cutlass.range(0, dv, 32, unroll=1):  # eight chunks
        values = ptx.tmem_load(tmem + column, 32)
        for chunk in cutlass.range_constexpr(8):
            address = (target ^ (chunk * 16)) + column * 4
            ptx.store_shared(address, *values[4 * chunk : 4 * chunk + 4])
    ptx.before_thread_sync()
    sync_warp()
    ptx.arrive_once(block.barrier(barriers.o_empty, tile), lane)
    if cutlass.const_expr(block.spec.ctas == 2):
        block.arrive_once(block.barrier(barriers.o_free, tile), lane)
    return reference, total


def _row(block: Block, warp: Any, row: Any, chunk: Any) -> Any:
    """Address of the chunk ``chunk`` % 8 among the first eight of a row of the warp."""
    start = block.shared(block.at.staging, 32 * block.spec.dv * 4, warp)
    return (start + row * (block.spec.dv * 4)) + (((chunk ^ row) & 7) << 4)


@cute.jit
def _merge(
    block: Block, item: Any, head: Int32, first: Int32, warp: Int32, lane: Int32,
    reference: Float32, total: Float32,
) -> None:  # fmt: skip
    """The warp's rows, ``first`` of the item and on, from shared memory into the state."""
    row = first + lane
    local = Int64(item.row + row)
    exists = Int32(row < item.rows)
    mode = ptx.load_byte(block.modes + item.batch * block.modes_row + local, exists)
    merges = Int32(mode == MERGE)
    at = item.batch * block.row_b + head * block.row_h + local * 4
    old_max = ptx.load_floats(block.max + at, merges, 1)[0]
    old_sum = ptx.load_floats(block.sum + at, merges, 1)[0]
    takes = 1 - ptx.equal(total, 0.0)
    reads = merges & (1 - ptx.equal(old_max, -math.inf))
    new_max = ptx.select(takes, ptx.scaled(reference, LN2), Float32(-math.inf))
    top = ptx.select(reads, ptx.maximum(old_max, new_max), new_max)
    finite = ptx.select(ptx.equal(top, -math.inf), Float32(0.0), top)
    old_weight = ptx.select(reads, _weight(old_max, finite), Float32(0.0))
    new_weight = _weight(new_max, finite)
    new_sum = ptx.select(takes, ptx.multiply(total, new_weight), Float32(0.0))
    stores = Int32(mode != LEAVE)
    ptx.store_floats(block.max + at, [top], stores)
    old_sum = ptx.select(reads, old_sum, Float32(0.0))
    ptx.store_floats(block.sum + at, [ptx.fma(old_sum, old_weight, new_sum)], stores)
    flags = stores * STORES + reads * READS + takes * TAKES

    dv = block.spec.dv
    lanes = dv // 4
    chunk, within = lane % lanes, lane // lanes
    address = block.acc + item.batch * block.acc_b + head * (dv * 4) + chunk * 16
    address = address + Int64(item.row + first + within) * block.acc_s
    together = 32 // lanes
    for begin in cutlass.range(0, 32, AHEAD * together, unroll=1):
        rows = [begin + n * together + within for n in range(AHEAD)]
        of_row = [shuffle_sync(flags, r) for r in rows]
        addresses = [address + n * together * block.acc_s for n in range(AHEAD)]
        old = [
            ptx.load_floats(at, flag & READS, 4) for at, flag in zip(addresses, of_row, strict=True)
        ]
        for n in cutlass.range_constexpr(AHEAD):
            of_old, of_new = shuffle_sync(old_weight, rows[n]), shuffle_sync(new_weight, rows[n])
            source = _row(block, warp, rows[n], chunk) + (chunk // 8) * 128
            taken = of_row[n] & TAKES
            new = [
                ptx.select(taken, ptx.multiply(x, of_new), Float32(0.0))
                for x in ptx.load_shared(source, 4)
            ]
            merged = [ptx.fma(x, of_old, y) for x, y in zip(old[n], new, strict=True)]
            ptx.store_floats(addresses[n], merged, of_row[n] & STORES)
        address += AHEAD * together * block.acc_s
    sync_warp()


def _weight(x: Any, top: Any) -> Any:
    """e^(x - top)."""
    return ptx.exp2(ptx.scaled(ptx.subtract(x, top), LOG2E))
