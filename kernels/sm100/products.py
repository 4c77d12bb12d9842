"""The warp that gives products to the matrix unit, one thread of it.

Step by step, tile after tile: O_t += P_t V of the record before, then S_t = Q_t K^T of this one, so
the softmax of one tile runs while the other's products do. Steps follow one another across items:
the first S of an item does not wait for the last O of the item before.

Products of one thread complete in order; a commit tells who waits for them. The scales of Q and K
lie in the other tile's S, which is free once its softmax has read it (s_loaded).

Of a pair the leader's thread gives products of 256 rows, which read and write both thread blocks'
memories at the same addresses; what it must wait for in the other is told it there
(:mod:`ringfa4.kernels.sm100.relay` and the barriers of ``specs.Barriers``).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import (
    K_SCALES,
    OUT,
    P_SCALES,
    Q_SCALES,
    V_SCALES,
    Block,
    P,
    S,
)
from ringfa4.kernels.sm100.loads import advanced, slot_and_parity
from ringfa4.kernels.sm100.specs import ATOM, ROWS
from ringfa4.kernels.sm100.walk import Segment

# Parities of uses so far, bits of one word: + tile.
Q_USES, S_USES, P_USES, O_USES = 0, 2, 4, 6


@cute.jit
def multiply(block: Block) -> None:
    slots = block.spec.slots
    tmem = block.tmem()
    k, v, uses, cleaned = Int32(0), Int32(0), Int32(0), Int32(0)
    waiting, later, last = Int32(0), Int32(0), Int32(0)  # of the record before: its tiles, ...
    work = block.first_work
    while work < block.works:
        item, _ = block.item(work)
        count = block.visits(item)
        i = Int32(0)
        for number in cutlass.range(item.seg0, item.seg1, unroll=1):
            segment = Segment.read(block.segments, number, item)
            for t in cutlass.range(segment.t0, segment.t1, unroll=1):
                first, final = Int32(i == 0), Int32(i == count - 1)
                cut = Int32(segment.cuts(t))
                for tile in cutlass.range_constexpr(2):
                    if tile < waiting:
                        uses = _values(block, tmem, tile, v, uses, waiting, later, last)
                    if tile < item.tiles:
                        uses = _logits(
                            block, tmem, tile, k, uses, item.tiles, first, final, cut, cleaned
                        )
                if waiting > 0:
                    v = advanced(v, slots)
                cleaned = cleaned ^ (cut << slot_and_parity(k, slots)[0])
                k = advanced(k, slots)
                i += 1
                waiting, later, last = item.tiles, 1 - first, final
        work += block.step
    for tile in cutlass.range_constexpr(2):
        if tile < waiting:
            uses = _values(block, tmem, tile, v, uses, waiting, later, last)


@cute.jit
def _logits(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, position: Int32, uses: Int32,
    tiles: Int32, first: Int32, final: Int32, cut: Int32, cleaned: Int32,
) -> Int32:  # fmt: skip
    """S of a tile; ``first`` and ``final``: the item's first and last record.

    Where the record is ``cut``, its V is clean before there is an S: softmax and the products of V
    rely on it. ``cleaned``: parities of the slots.
    """
    spec, at, barriers = block.spec, block.at, block.barriers
    slot, parity = slot_and_parity(position, spec.slots)
    if cutlass.const_expr(tile == 0):
        if cut != 0:
            _wait_clean(block, slot, (cleaned >> slot) & 1)
        _wait_loaded(block, barriers.k_full, barriers.k_peer, slot, parity)
        _wait_empty(block, barriers.s_loaded + 1, uses, S_USES + 1)
    _wait_empty(block, barriers.s_loaded, uses, S_USES)
    if first != 0:
        _wait_loaded(block, barriers.q_full, barriers.q_peer, tile, (uses >> (Q_USES + tile)) & 1)
        uses = uses ^ (1 << (Q_USES + tile))
    ptx.after_thread_sync()
    atoms, tile_bytes = ATOM * spec.k_atoms, ROWS * spec.dk
    scales = tmem + S[1 - tile]
    for atom in cutlass.range_constexpr(spec.k_atoms):
        for column, source in (
            (Q_SCALES, block.shared(at.q_scales, atoms, tile)),
            (K_SCALES, block.shared(at.k_scales, atoms, slot)),
        ):
            source = ptx.matrix_descriptor(source + atom * ATOM, ptx.SCALES)
            ptx.copy_scales(spec.ctas, scales + (column + 4 * atom), source)
    a = ptx.matrix_descriptor(block.shared(at.q, tile_bytes, tile), ptx.k_major(spec.span))
    b = block.shared(at.k, spec.k_rows * spec.dk, slot)
    b = ptx.matrix_descriptor(b, ptx.k_major(spec.span))
    for step in cutlass.range_constexpr(spec.dk // 32):
        box, within = divmod(step * 32, spec.span)
        columns = step // 4 * 4
        ptx.product(
            spec.ctas,
            tmem + S[tile],
            a + (box * ROWS * spec.span + within) // 16,
            b + (box * spec.k_rows * spec.span + within) // 16,
            block.instruction | ptx.scale_bytes(step % 4),
            scales + (Q_SCALES + columns),
            scales + (K_SCALES + columns),
            Int32(step > 0),
        )
    ptx.commit(spec.ctas, block.barrier(barriers.s_full, tile))
    if tile == tiles - 1:
        ptx.commit(spec.ctas, block.barrier(barriers.k_empty, slot))
    if final != 0:
        ptx.commit(spec.ctas, block.barrier(barriers.q_empty, tile))
    return uses ^ (1 << (S_USES + tile))


@cute.jit
def _values(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, position: Int32, uses: Int32,
    tiles: Int32, later: Int32, last: Int32,
) -> Int32:  # fmt: skip
    """O of a tile; ``later``: not the item's first record, ``last``: its last."""
    spec, at, barriers = block.spec, block.at, block.barriers
    slot, parity = slot_and_parity(position, spec.slots)
    if cutlass.const_expr(tile == 0):
        _wait_loaded(block, barriers.v_full, barriers.v_peer, slot, parity)
    _wait_full(block, barriers.p_ready + tile, uses, P_USES + tile)
    if later == 0:
        free = barriers.o_empty if spec.ctas == 1 else barriers.o_free
        _wait_empty(block, free + tile, uses, O_USES + tile)
        uses = uses ^ (1 << (O_USES + tile))
    ptx.after_thread_sync()
    region = tmem + S[tile]
    for column, source in (
        (P_SCALES, block.shared(at.p_scales, ATOM, tile)),
        (V_SCALES, block.shared(at.v_scales, ATOM, slot)),
    ):
        ptx.copy_scales(spec.ctas, region + column, ptx.matrix_descriptor(source, ptx.SCALES))
    b = ptx.matrix_descriptor(block.shared(at.v, ROWS * spec.v_rows, slot), ptx.k_major(ROWS))
    for step, begins in ((0, True), (2, False), (1, False), (3, False)):
        if cutlass.const_expr(step == 1):
            _wait_full(block, barriers.p_rest + tile, uses, P_USES + tile)
            ptx.after_thread_sync()
        ptx.product(
            spec.ctas,
            tmem + OUT[tile],
            region + (P + 8 * step),
            b + 2 * step,
            Int32(ptx.product_descriptor(spec.ctas, spec.dv) | ptx.scale_bytes(step)),
            region + P_SCALES,
            region + V_SCALES,
            later if begins else Int32(1),
        )
    if tile == tiles - 1:
        ptx.commit(spec.ctas, block.barrier(barriers.v_empty, slot))
    if last != 0:
        ptx.commit(spec.ctas, block.barrier(barriers.o_full, tile))
    return uses ^ (1 << (P_USES + tile))


def _wait_loaded(block: Block, full: int, peer: int, index: Any, parity: Any) -> None:
    """Until what is to be multiplied is there, in each thread block of a pair."""
    ptx.mbarrier_wait(block.barrier(full, index), parity)
    if block.spec.ctas == 2:
        ptx.mbarrier_wait(block.barrier(peer, index), parity)


def _wait_clean(block: Block, slot: Any, parity: Any) -> None:
    """Until V holds no NaN. Guards of a pair mark what they found in each other's shared memory."""
    wait = ptx.mbarrier_wait if block.spec.ctas == 1 else ptx.mbarrier_wait_cluster
    wait(block.barrier(block.barriers.v_clean, slot), parity)


def _wait_full(block: Block, barrier: Any, uses: Any, bit: int) -> None:
    """Until it has been filled as often as the uses say, and once more."""
    ptx.mbarrier_wait(block.barrier(barrier), (uses >> bit) & 1)


def _wait_empty(block: Block, barrier: Any, uses: Any, bit: int) -> None:
    """Until it has been emptied as often as the uses say."""
    ptx.mbarrier_wait(block.barrier(barrier), ((uses >> bit) & 1) ^ 1)
