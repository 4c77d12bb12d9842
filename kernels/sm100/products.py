"""The warp that gives products to the matrix unit, one thread of it.

S = Q K^T of a tile comes in two halves of 64 keys. Record after record, tile after tile:

    O_t += P_t V of the record before; the scales of S_t are copied while the rest of P_t is made
    S_t of keys 0 to 63, the late half: it takes the place of that P
    S of keys 64 to 127, the early half, of the tile that is next: while its O is waited for

so the softmax of one tile runs while the other's products do, and half of it does not wait for its
own tile's O either. Both halves of an item's first record come where the late one does, lest the
last O of the item before wait for this one's Q. Where dk = 192 there is one product of all 128
keys, where the late half is else.

Steps follow one another across items: the first S of an item does not wait for the last O of the
item before. Products of one thread complete in order; a commit tells who waits for them. The scales
of an S lie in tensor memory that is free once its late half has been read (s_loaded).

Of a pair the leader's thread gives products of 256 rows, which read and write both thread blocks'
memories at the same addresses. What it must wait for in the other is told it there: by softmax,
epilogue and guard, of loads by the relay.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import (
    EARLY,
    EARLY_SCALES,
    LATE,
    LATE_SCALES,
    OUT,
    P_SCALES,
    V_SCALES,
    Block,
    P,
    S,
)
from ringfa4.kernels.sm100.loads import advanced, slot_and_parity
from ringfa4.kernels.sm100.specs import ATOM, ROWS
from ringfa4.kernels.sm100.walk import Segment

# Parities of uses so far, bits of one word: + tile, S_USES: + 2 tile + half.
Q_USES, S_USES, P_USES, O_USES = 0, 2, 6, 8


@cute.jit
def multiply(block: Block) -> None:
    slots, early = block.spec.slots, block.spec.early
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
                k_slot, _ = slot_and_parity(k, slots)
                for tile in cutlass.range_constexpr(2):
                    if tile < waiting:
                        uses = _values(
                            block, tmem, tile, v, uses, waiting, later, last, 1 - first, k
                        )
                    if tile < item.tiles:
                        if cutlass.const_expr(tile == 0):
                            _wait_clean(block, cut, k_slot, cleaned)
                        if first != 0:
                            _wait_q(block, tile, uses)
                            uses = uses ^ (1 << (Q_USES + tile))
                            if cutlass.const_expr(early):
                                _copy_scales(block, tmem, tile, (EARLY,), k, uses)
                                uses = _logits(block, tmem, tile, (EARLY,), k, uses)
                            _copy_scales(block, tmem, tile, _late(block), k, uses)
                        uses = _logits(block, tmem, tile, _late(block), k, uses)
                        if tile == item.tiles - 1:
                            _commit(block, block.barriers.k_empty, k_slot)
                        if final != 0:
                            _commit(block, block.barriers.q_empty, tile)
                    if cutlass.const_expr(early and tile == 0):
                        wanted = Int32(item.tiles > 1) & (1 - first)
                        uses = _early(block, tmem, 1, wanted, k, uses)
                if waiting > 0:
                    v = advanced(v, slots)
                cleaned = cleaned ^ (cut << k_slot)
                k = advanced(k, slots)
                if cutlass.const_expr(early):
                    uses = _early(block, tmem, 0, 1 - final, k, uses)
                i += 1
                waiting, later, last = item.tiles, 1 - first, final
        work += block.step
    for tile in cutlass.range_constexpr(2):
        if tile < waiting:
            uses = _values(block, tmem, tile, v, uses, waiting, later, last, Int32(0), k)


@cute.jit
def _wait_clean(block: Block, cut: Int32, slot: Int32, cleaned: Int32) -> None:
    """Where the record is ``cut``, its V is clean before its late S: softmax and the products of V
    rely on it. ``cleaned``: parities of the slots.
    """
    if cut != 0:
        # Guards of a pair mark what they found in each other's shared memory.
        wait = ptx.mbarrier_wait if block.spec.ctas == 1 else ptx.mbarrier_wait_cluster
        wait(block.barrier(block.barriers.v_clean, slot), (cleaned >> slot) & 1)


@cute.jit
def _early(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, wanted: Int32, position: Int32, uses: Int32
) -> Int32:
    """S of a tile's early half, of a record that is not its item's first."""
    if wanted != 0:
        _copy_scales(block, tmem, tile, (EARLY,), position, uses)
        uses = _logits(block, tmem, tile, (EARLY,), position, uses)
    return uses


def _late(block: Block) -> tuple[int, ...]:
    """The halves of what takes the place of P."""
    return (LATE,) if block.spec.early else (LATE, EARLY)


def _scales(block: Block, tmem: Any, tile: int, halves: tuple[int, ...]) -> tuple[Any, Any]:
    """Where the scales of Q and of K lie for an S."""
    columns = S[tile] + EARLY_SCALES if halves == (EARLY,) else S[1 - tile] + LATE_SCALES
    return tmem + columns, tmem + (columns + 4 * block.spec.k_atoms)


@cute.jit
def _copy_scales(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, halves: cutlass.Constexpr,
    position: Int32, uses: Int32,
) -> None:  # fmt: skip
    """Wait for a record's K, and until neither its S nor scales of it overwrite what is not read;
    copy these.
    """
    spec, at, barriers = block.spec, block.at, block.barriers
    slot, parity = slot_and_parity(position, spec.slots)
    _wait_loaded(block, barriers.k_full, barriers.k_peer, slot, parity)
    region = tile if halves == (EARLY,) else 1 - tile
    for half in sorted({2 * tile + half for half in halves} | {2 * region + LATE}):
        _wait_empty(block, barriers.s_loaded + half, uses, S_USES + half)
    ptx.after_thread_sync()
    q_scales, k_scales = _scales(block, tmem, tile, halves)
    atoms = ATOM * spec.k_atoms
    for atom in cutlass.range_constexpr(spec.k_atoms):
        for target, source in (
            (q_scales, block.shared(at.q_scales, atoms, tile)),
            (k_scales, block.shared(at.k_scales, atoms, slot)),
        ):
            source = ptx.matrix_descriptor(source + atom * ATOM, ptx.SCALES)
            ptx.copy_scales(spec.ctas, target + 4 * atom, source)


@cute.jit
def _logits(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, halves: cutlass.Constexpr,
    position: Int32, uses: Int32,
) -> Int32:  # fmt: skip
    """S of a tile, one of its halves or both, whose scales have been copied."""
    spec, at, barriers = block.spec, block.at, block.barriers
    slot, _ = slot_and_parity(position, spec.slots)
    q_scales, k_scales = _scales(block, tmem, tile, halves)
    tile_bytes, key = ROWS * spec.dk, halves[0] * spec.s_keys
    a = ptx.matrix_descriptor(block.shared(at.q, tile_bytes, tile), ptx.k_major(spec.span))
    keys = block.shared(at.k + key // spec.ctas * spec.span, spec.k_rows * spec.dk, slot)
    b = ptx.matrix_descriptor(keys, ptx.k_major(spec.span))
    for step in cutlass.range_constexpr(spec.dk // 32):
        box, within = divmod(step * 32, spec.span)
        columns = step // 4 * 4
        ptx.product(
            spec.ctas,
            tmem + (S[tile] + key),
            a + (box * ROWS * spec.span + within) // 16,
            b + (box * spec.k_rows * spec.span + within) // 16,
            block.instruction | ptx.scale_bytes(step % 4),
            q_scales + columns,
            k_scales + (columns + key // 32),  # a column of scales for 32 keys
            Int32(step > 0),
        )
    for half in halves:
        _commit(block, barriers.s_full, 2 * tile + half)
        uses = uses ^ (1 << (S_USES + 2 * tile + half))
    return uses


@cute.jit
def _values(
    block: Block, tmem: Int32, tile: cutlass.Constexpr, position: Int32, uses: Int32,
    tiles: Int32, later: Int32, last: Int32, follows: Int32, next_position: Int32,
) -> Int32:  # fmt: skip
    """O of a tile; ``later``: not the item's first record, ``last``: its last.

    While the rest of P is waited for, scales are copied for the S that ``follows`` in the item.
    """
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
    for step, begins in ((2, True), (3, False), (0, False), (1, False)):
        if cutlass.const_expr(step == 1):
            if follows != 0:
                _copy_scales(block, tmem, tile, _late(block), next_position, uses)
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
        _commit(block, barriers.v_empty, slot)
    if last != 0:
        _commit(block, barriers.o_full, tile)
    return uses ^ (1 << (P_USES + tile))


def _commit(block: Block, barrier: int, index: Any) -> None:
    """Tell who waits, in both thread blocks of a pair, once all products so far are done."""
    ptx.commit(block.spec.ctas, block.barrier(barrier, index))


def _wait_loaded(block: Block, full: int, peer: int, index: Any, parity: Any) -> None:
    """Until what is to be multiplied is there, in both thread blocks of a pair."""
    ptx.mbarrier_wait(block.barrier(full, index), parity)
    if block.spec.ctas == 2:
        ptx.mbarrier_wait(block.barrier(peer, index), parity)


def _wait_q(block: Block, tile: int, uses: Any) -> None:
    parity = (uses >> (Q_USES + tile)) & 1
    _wait_loaded(block, block.barriers.q_full, block.barriers.q_peer, tile, parity)


def _wait_full(block: Block, barrier: Any, uses: Any, bit: int) -> None:
    """Until it has been filled as often as the uses say, and once more."""
    ptx.mbarrier_wait(block.barrier(barrier), (uses >> bit) & 1)


def _wait_empty(block: Block, barrier: Any, uses: Any, bit: int) -> None:
    """Until it has been emptied as often as the uses say."""
    ptx.mbarrier_wait(block.barrier(barrier), ((uses >> bit) & 1) ^ 1)
