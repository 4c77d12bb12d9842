"""The load warp, one thread of it: Q of each item, then its records of K and V in order.

A barrier counts a payload's bytes and those of its scales together. The slots of K and of V are
rings that advance together; a position in [0, 2 slots) is a slot and the parity of its use.

Thread blocks of a pair each load their tiles of Q, their half of the keys of K and of the columns
of V, and all scales of K and V.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import Block
from ringfa4.kernels.sm100.specs import ATOM, ROWS, ForwardSpec
from ringfa4.kernels.sm100.walk import Segment


def slot_and_parity(position: Int32, slots: int) -> tuple[Any, Any]:
    parity = Int32(position >= slots)
    return position - parity * slots, parity


def advanced(position: Int32, slots: int) -> Any:
    return cutlass.select_(position == 2 * slots - 1, Int32(0), position + 1)


@cute.jit
def load(block: Block) -> None:
    slots = block.spec.slots
    position, uses = Int32(0), Int32(0)  # uses: bit t, parity of the uses of tile t's Q
    work = block.first_work
    while work < block.works:
        item, head = block.item(work)
        first = Int32(1)
        head_kv = item.batch * block.heads_kv + head // (block.heads_q // block.heads_kv)
        for number in cutlass.range(item.seg0, item.seg1, unroll=1):
            segment = Segment.read(block.segments, number, item)
            for t in cutlass.range(segment.t0, segment.t1, unroll=1):
                record = segment.record + t
                if first != 0:
                    _load_q(block, item, head, Int32(0), uses)
                _load_k(block, record, ptx.anew(head_kv), position)
                if first != 0:
                    uses = uses ^ 1
                    if item.tiles > 1:
                        _load_q(block, item, head, Int32(1), uses)
                        uses = uses ^ 2
                _load_v(block, record, head_kv, position)
                position, first = advanced(position, slots), Int32(0)
        work += block.step
    _drain(block, position, uses)


def _load_q(block: Block, item: Any, head: Any, tile: Any, uses: Any) -> None:
    spec, at, barriers = block.spec, block.at, block.barriers
    atoms, tile_bytes = ATOM * spec.k_atoms, ROWS * spec.dk
    ptx.mbarrier_wait(block.barrier(barriers.q_empty, tile), ((uses >> tile) & 1) ^ 1)
    full = block.barrier(barriers.q_full, tile)
    ptx.mbarrier_expect(full, tile_bytes + atoms)
    row = ptx.anew(item.batch * block.heads_q + head)
    # A pair's last tile may lie behind the item: any record of it will do, its rows do not exist.
    within = cutlass.min(block.tile_start(tile), item.rows - 1) // ROWS
    record = ptx.anew(item.q_record + within)
    target = block.shared(at.q, tile_bytes, tile)
    _load_tile(block.q_map, target, spec, ROWS, Int32(0), (row, record), full)
    source = block.q_records + Int64(record) * block.q_record_bytes + block.q_scales
    ptx.load_bytes(block.shared(at.q_scales, atoms, tile), source + Int64(row) * atoms, atoms, full)


def _load_k(block: Block, record: Any, head_kv: Any, position: Any) -> None:
    spec, at, barriers = block.spec, block.at, block.barriers
    atoms, tile_bytes = ATOM * spec.k_atoms, spec.k_rows * spec.dk
    slot, parity = slot_and_parity(position, spec.slots)
    ptx.mbarrier_wait(block.barrier(barriers.k_empty, slot), parity ^ 1)
    full = block.barrier(barriers.k_full, slot)
    ptx.mbarrier_expect(full, tile_bytes + atoms)
    for start in range(0, spec.k_rows, spec.k_box):  # keys of each product of S
        first = block.rank * spec.k_box + start * spec.ctas
        target = block.shared(at.k + start * spec.span, tile_bytes, slot)
        _load_tile(block.k_map, target, spec, spec.k_rows, first, (head_kv, record), full)
    source = block.kv_records + Int64(record) * block.kv_record_bytes + block.k_scales
    ptx.load_bytes(
        block.shared(at.k_scales, atoms, slot), source + Int64(head_kv) * atoms, atoms, full
    )


def _load_v(block: Block, record: Any, head_kv: Any, position: Any) -> None:
    spec, at, barriers = block.spec, block.at, block.barriers
    tile_bytes = ROWS * spec.v_rows
    slot, parity = slot_and_parity(position, spec.slots)
    ptx.mbarrier_wait(block.barrier(barriers.v_empty, slot), parity ^ 1)
    full = block.barrier(barriers.v_full, slot)
    ptx.mbarrier_expect(full, tile_bytes + ATOM)
    target = block.shared(at.v, tile_bytes, slot)
    first = block.rank * spec.v_rows
    ptx.load_box(target, block.v_map, (Int32(0), first, head_kv, record), full)
    source = block.kv_records + Int64(record) * block.kv_record_bytes + block.v_scales
    ptx.load_bytes(
        block.shared(at.v_scales, ATOM, slot), source + Int64(head_kv) * ATOM, ATOM, full
    )


def _load_tile(
    tensor_map: Any, target: Any, spec: ForwardSpec, rows: int, first: Any, of: tuple[Any, Any],
    full: Any,
) -> None:  # fmt: skip
    """A box's rows, or part of a tile of ``rows`` rows of dk bytes, from row ``first`` of a (head,
    record), in boxes as wide as the swizzle.
    """
    for box in range(spec.dk // spec.span):
        at = (Int32(box * spec.span), first, *of)
        ptx.load_box(target + box * rows * spec.span, tensor_map, at, full)


def _drain(block: Block, position: Any, uses: Any) -> None:
    """Wait until nothing loaded is still read: commits must not arrive at a block that is gone."""
    slots, barriers = block.spec.slots, block.barriers
    for _ in range(slots):
        slot, parity = slot_and_parity(position, slots)
        for first in (barriers.k_empty, barriers.v_empty):
            ptx.mbarrier_wait(block.barrier(first, slot), parity ^ 1)
        position = advanced(position, slots)
    for tile in range(2):
        ptx.mbarrier_wait(block.barrier(barriers.q_empty, tile), ((uses >> tile) & 1) ^ 1)
