"""The softmax warps: eight for each tile, two threads for each row, 64 keys of a record each.

A record's logits come as S; with x = S c, c = |scale| log2 e, per block of 32 keys

    E = max(ceil(max x), reference - 119),   P = 2^(x - E + 8) in (0, 256],   sum += 2^(E - 8 - r) P

P is rounded to E4M3 and has the E8M0 scale E - 8 - reference: each block its own, at no cost, since
the exponential needs an offset anyhow. ``reference`` is an integer, so E does not depend on it, and
O and the sum are multiplied by powers of two when it moves: when a row's ceil(max x) exceeds it by
more than LAG. The two threads of a row meet in each record to find out; else they share nothing,
not even the sum. A row without keys so far has the reference NOTHING.

Some of the exponentials are polynomials on the FMA units, 2^a = 2^floor(a) (1 + f c1 + f^2 c2 +
f^3 c3) with f = a - floor(a), a relative error of 8.6e-5, 1/700 of half a unit of E4M3. a is
clamped at -127 by an FMA that saturates: y = (a + 127) / 256. Maxima propagate NaN, which that FMA
does not: a row that sees one becomes NaN by its offset.

Exact zeros: a masked logit is -inf, and both ways its P is 0; so sum is 0 exactly for rows without
keys.

Order is what time is made of here. S is given back as soon as it is loaded. S of keys 64 to 127
comes early: its warps compute all of their P before they meet those of the other half, then write
the scales of both. The others, whose S comes late and for whom the next product waits, meet them at
once and publish P block by block; what is left to add up comes after each arrival. That the late
half has come says also that O is done, and that S may be overwritten by P. ptxas would mix all
this; see :func:`instructions.wall`.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import barrier, sync_warp

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import (
    EARLY,
    LATE,
    MAXIMUM,
    OUT,
    REFERENCE,
    SUM,
    Block,
    P,
    S,
)
from ringfa4.kernels.sm100.loads import advanced, slot_and_parity
from ringfa4.kernels.sm100.specs import ATOM, ROWS
from ringfa4.kernels.sm100.walk import Segment

BLOCK = 32
KEYS = 64
"""Of a record, for each of a row's two threads."""

BEGUN = 8
"""Pairs of the late half's first block that are begun before the warps meet, on SM103."""

PAIRS = 1
"""The first of the named barriers at which the two warps of the same rows meet."""

LAG = 8.0
NOTHING = -(2.0**100)
FLOOR = -119.0
"""Least exponent of a block against the reference: E8M0 code 0 is 2^-127 = 2^(FLOOR - 8)."""

ROUND = 1.5 * 2.0**23
"""Added to |x| < 2^22 it leaves an integer in the low bits."""

CODE = 2.0**23
"""Added to an integer of [0, 255] it leaves that integer in the low byte."""

POLYNOMIAL = (0.69511681, 0.22764487, 0.07706715)


@cute.jit
def softmax(block: Block, tile: Int32, half: cutlass.Constexpr, warp: Int32) -> None:
    """``warp`` of the four with keys 64 ``half`` and on of a tile, 32 rows each."""
    barriers, slots = block.barriers, block.spec.slots
    tmem = block.tmem() + (warp << 21) + tile * ROWS
    full = block.barrier(barriers.s_full, tile * 2 + half)
    done, empty = block.barrier(barriers.o_full, tile), block.barrier(barriers.o_empty, tile)
    records, items, position = Int32(0), Int32(0), Int32(0)  # parities, and that of V's ring
    work = block.first_work
    while work < block.works:
        item, _ = block.item(work)
        if tile < item.tiles:
            reference, sums = Float32(NOTHING), Int64(0)
            first = Int32(1)
            low = item.first + block.tile_start(tile) + warp * 32
            for number in cutlass.range(item.seg0, item.seg1, unroll=1):
                segment = Segment.read(block.segments, number, item)
                for t in cutlass.range(segment.t0, segment.t1, unroll=1):
                    ptx.mbarrier_wait(full, records)
                    records = records ^ 1
                    ptx.after_thread_sync()
                    where = Where(tile, half, warp, tmem, low, t * ROWS)
                    if segment.cuts(t):
                        slot, _ = slot_and_parity(position, slots)
                        marks = block.marks(slot)
                        reference, sums = _record(
                            block, where, segment, marks, first, reference, sums
                        )
                    else:
                        reference, sums = _record(block, where, None, None, first, reference, sums)
                    first = Int32(0)
                    position = advanced(position, slots)
            if first == 0:
                ptx.mbarrier_wait(empty, items ^ 1)
                items = items ^ 1
                lane = ptx.lane()
                row, total = warp * 32 + lane, ptx.add(*ptx.halves(sums))
                ptx.store_shared(block.row(tile, row, SUM + half), total)
                if cutlass.const_expr(half == LATE):
                    ptx.store_shared(block.row(tile, row, REFERENCE), reference)
                sync_warp()
                ptx.arrive_once(done, lane)
        else:
            position = (position + block.visits(item)) % (2 * slots)
        work += block.step


@dataclass(frozen=True)
class Where:
    """A warp's part of a record: rows from ``low`` on, the ``half`` of the keys from ``start`` on,
    of their chunks.
    """

    tile: Int32
    half: int
    warp: Int32
    tmem: Int32
    low: Int32
    start: Int32


@cute.jit
def _record(
    block: Block, where: Where, segment: Any, marks: Any,
    first: Int32, reference: Float32, sums: Int64,
) -> tuple[Float32, Int64]:  # fmt: skip
    """A warp's part of S to P and its scales.

    ``segment`` and the address of V's marks: None where all rows of the item see all of the record.
    Returns the row's reference and a pair of partial sums.
    """
    lane = ptx.lane()  # read again for each record, so that what follows from it holds no registers
    c = block.exponent
    logits, maxima = _loaded(block, where, segment, lane)
    maxima = [_ceiling(x, c) for x in maxima]
    floor = ptx.add_constant(reference, FLOOR)
    tops = [ptx.maximum(x, floor) for x in maxima]
    blocks = [(logits[n * BLOCK : (n + 1) * BLOCK], tops[n]) for n in range(KEYS // BLOCK)]
    step = _early if where.half == EARLY else _late
    return step(block, where, segment, marks, first, reference, sums, blocks, lane)


def _late(
    block: Block, where: Where, segment: Any, marks: Any,
    first: Any, reference: Any, sums: Any, blocks: Any, lane: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Each block published as soon as it is done; ``segment`` and ``marks`` are not needed."""
    tile, barriers, pairs = where.tile, block.barriers, range(BLOCK // 2)
    tops = [top for _, top in blocks]
    ptx.store_shared(block.tops(tile, where.warp * 32 + lane), *tops)
    begun = []
    if block.reduces:  # where there is time: before that, exponentials bind
        begun = _exponentials(block, *blocks[0], pairs[:BEGUN])
    reference, sums = _met(block, where, ptx.maximum(*tops), None, first, reference, sums)
    target = where.tmem + (S[0] + P)
    for n, ready in ((0, barriers.p_ready), (1, barriers.p_rest)):
        values = begun + _exponentials(block, *blocks[n], pairs[len(begun) // 2 :])
        begun = []
        _publish(block, target + n * (BLOCK // 4), _packed(values), ready, tile, lane)
        sums = _added(_total(values), _code(tops[n], reference), sums)
    return reference, sums


def _early(
    block: Block, where: Where, segment: Any, marks: Any,
    first: Any, reference: Any, sums: Any, blocks: Any, lane: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """All of P before the other half is met, then the scales of both and what was computed."""
    tile, pairs = where.tile, range(BLOCK // 2)
    words: list[Any] = []
    totals: list[Any] = []
    for x, top in blocks:
        values = _exponentials(block, x, top, pairs)
        words += _packed(values)
        totals.append(_total(values))
        ptx.wall()  # one block after the other, or masked copies need registers
    own = ptx.maximum(*(top for _, top in blocks))
    others = block.tops(tile, where.warp * 32 + lane)
    reference, sums = _met(block, where, own, others, first, reference, sums)
    tops = [*ptx.load_shared(others, 2), *(top for _, top in blocks)]
    codes = [_code(top, reference) for top in tops]
    scales = ptx.low_bytes(codes)
    if segment is not None:
        masks = _masks(segment, where, range(0, ROWS, BLOCK), ptx.lane())
        bad = [m & mark for m, mark in zip(masks, _marked(block, marks), strict=True)]
        scales = scales | ptx.low_bytes([ptx.ones(x) for x in bad])  # NaN
    atom = block.shared(block.at.p_scales, ATOM, tile)
    ptx.store_shared(atom + lane * 16 + where.warp * 4, scales)
    ptx.fence_proxy_async()
    target = where.tmem + (S[0] + P + KEYS // 4)
    _publish(block, target, words, block.barriers.p_ready, tile, lane)
    for total, code in zip(totals, codes[2:], strict=True):
        sums = _added(total, code, sums)
    return reference, sums


def _publish(
    block: Block, target: Any, words: list[Any], barrier: Any, tile: Any, lane: Any
) -> None:
    """A part of P into tensor memory, and that it is there."""
    ptx.tmem_store(target, words)
    ptx.tmem_wait_stores()
    ptx.before_thread_sync()
    sync_warp()
    block.arrive_once(block.barrier(barrier, tile), lane)
    ptx.wall()  # what follows does not delay the arrival


def _loaded(block: Block, where: Where, segment: Any, lane: Any) -> tuple[list[Any], list[Any]]:
    """A row's logits, -inf where masked, and the maximum of each block; S may be overwritten."""
    start = where.half * KEYS
    source = where.tmem + (start + S[0])
    maxima = None
    if segment is not None:
        masks = _masks(segment, where, range(start, start + KEYS, BLOCK), lane)
        logits = _masked(source, masks)
    elif block.reduces:
        logits, maxima = ptx.tmem_load_reduced(source, KEYS, BLOCK)
    else:
        logits = ptx.tmem_load(source, KEYS)
    ptx.before_thread_sync()
    sync_warp()
    loaded = block.barrier(block.barriers.s_loaded, where.tile * 2 + where.half)
    block.arrive_once(loaded, lane)
    ptx.wall()
    if maxima is None:
        maxima = [_largest(logits[n : n + BLOCK]) for n in range(0, KEYS, BLOCK)]
    return logits, maxima


@cute.jit
def _met(
    block: Block, where: Where, own: Float32, others: Any,
    first: Int32, reference: Float32, sums: Int64,
) -> tuple[Float32, Int64]:  # fmt: skip
    """The two warps of the same rows meet; the reference and the sums against it.

    The reference moves where the maximum of a row, ``own`` or that of the other half, is LAG above.
    They exchange these only if that is so for any of their rows, which is rare. ``others``: where
    the late half has left its own.
    """
    pair = PAIRS + where.tile * 4 + where.warp
    limit = ptx.add_constant(reference, LAG)
    moves = ptx.any_thread(pair, 64, ptx.greater(own, limit))
    ptx.after_thread_sync()
    if moves != 0:
        at = block.row(where.tile, where.warp * 32 + ptx.lane(), MAXIMUM)
        if cutlass.const_expr(where.half == EARLY):
            ptx.store_shared(at, own)
        barrier(barrier_id=pair, number_of_threads=64)
        if cutlass.const_expr(where.half == EARLY):
            other = ptx.maximum(*ptx.load_shared(others, 2))
        else:
            other = ptx.load_shared_float(at)
        top = ptx.maximum(own, other)
        new = ptx.select(ptx.greater(top, limit), top, reference)
        factor = ptx.exp2(ptx.subtract(reference, new))
        factors = ptx.pair(factor, factor)
        sums = ptx.multiply_pair(sums, factors)
        reference = new
        if first == 0:
            columns = block.spec.dv // 2
            _rescale(where.tmem + (OUT[0] + where.half * columns), factors, columns)
    return reference, sums


def _masks(segment: Any, where: Where, keys: range, lane: Any) -> list[Any]:
    """Bits of the keys of a record that the lane's row sees, for each block of them."""
    j0, j1 = segment.seen_by(where.low + lane)
    j0, j1 = j0 - where.start, j1 - where.start
    return [ptx.low_ones(j1 - n) & ~ptx.low_ones(j0 - n) for n in keys]


def _marked(block: Block, marks: Any) -> Any:
    """Bits of the keys that have a NaN in V, for each block: in any of its columns."""
    found = [ptx.load_shared_words(marks + 16 * n) for n in range(block.spec.ctas)]
    return [functools.reduce(operator.or_, words) for words in zip(*found, strict=True)]


def _masked(source: Any, masks: list[Any]) -> list[Any]:
    """Logits, -inf where masked; a few at a time, lest two copies of all need registers."""
    logits: list[Any] = []
    for n in range(0, KEYS, 16):
        found = ptx.tmem_load(source + n, 16)
        logits += [ptx.keep(x, masks[n // BLOCK], n % BLOCK + m) for m, x in enumerate(found)]
        ptx.wall()
    return logits


def _packed(values: list[Any]) -> list[Any]:
    return [ptx.to_e4m3(values[n : n + 4]) for n in range(0, len(values), 4)]


def _total(values: list[Any]) -> Any:
    """A pair of partial sums of a block's values."""
    total = ptx.pair(*values[:2])
    for n in range(2, BLOCK, 2):
        total = ptx.add_pair(total, ptx.pair(*values[n : n + 2]))
    return total


def _added(total: Any, code: Any, sums: Any) -> Any:
    """The sums, plus a block's partial sums times its scale."""
    weight = ptx.from_bits(ptx.shift_left(code, 23))
    return ptx.fma_pair(total, ptx.pair(weight, weight), sums)


def _code(top: Any, reference: Any) -> Any:
    """E8M0 code top - 8 - reference + 127 in the low byte; its shift by 23 is the scale in fp32.

    Not below 0: where the reference has moved that far, P counts for less than 2^FLOOR anyhow.
    """
    code = ptx.maximum_constant(ptx.subtract(top, reference), FLOOR)
    return ptx.bits(ptx.add_constant(code, CODE - FLOOR))


def _largest(logits: list[Any]) -> Any:
    top = ptx.maximum(*logits[:3])
    for n in range(3, BLOCK - 1, 2):
        top = ptx.maximum(top, logits[n], logits[n + 1])
    return ptx.maximum(top, logits[BLOCK - 1])


def _ceiling(top: Any, c: Any) -> Any:
    """ceil(c top): an integer as long as it is one in fp32, never less than c top."""
    return ptx.add_constant(ptx.fma_up(top, c, ROUND), -ROUND)


@cute.jit
def _rescale(output: Int32, factors: Int64, columns: cutlass.Constexpr) -> None:
    """O of the warp's rows times a factor each. No product writes it now: S was committed after.

    A loop, as it happens seldom and few registers are free.
    """
    for column in cutlass.range(0, columns, 16, unroll=1):
        values = ptx.tmem_load(output + column, 16)
        scaled: list[Any] = []
        for n in cutlass.range_constexpr(0, 16, 2):
            scaled += ptx.halves(ptx.multiply_pair(ptx.pair(*values[n : n + 2]), factors))
        ptx.tmem_store(output + column, [ptx.bits(x) for x in scaled])
        ptx.tmem_wait_stores()


def _exponentials(block: Block, logits: list[Any], top: Any, pairs: range) -> list[Any]:
    """2^(c x - top + 8) of some pairs of a block, of all of which ``emulated``, spread evenly, are
    polynomials.
    """
    c, emulated = block.exponent, block.spec.emulated
    offset = ptx.fma_constants(top, -1.0, 8.0)
    cs, offsets = ptx.pair(c, c), ptx.pair(offset, offset)
    values: list[Any] = []
    for n in pairs:
        x = logits[2 * n : 2 * n + 2]
        if (n + 1) * emulated // BLOCK > n * emulated // BLOCK:
            small, shifted = ptx.scaled(c, 1 / 256), ptx.fma_constants(top, -1 / 256, 135 / 256)
            values += _polynomial(ptx.pair(*(ptx.fma_saturated(y, small, shifted) for y in x)))
        else:
            exponents = ptx.fma_pair(ptx.pair(*x), cs, offsets)
            values += [ptx.exp2(y) for y in ptx.halves(exponents)]
    return values


def _polynomial(y: Any) -> list[Any]:
    """2^a of a pair y = (a + 127) / 256, which is not negative; 0 for y = 0."""
    first, second, third = (ptx.constant_pair(x) for x in POLYNOMIAL)
    span, biased = ptx.constant_pair(256.0), ptx.constant_pair(ROUND - 127)
    whole = ptx.fma_pair(y, span, biased, "rm")  # floor(a) in its low bits
    f = ptx.fma_pair(y, span, ptx.subtract_pair(biased, whole))
    power = ptx.fma_pair(f, third, second)
    power = ptx.fma_pair(power, f, first)
    power = ptx.fma_pair(power, f, ptx.constant_pair(1.0))
    return [
        ptx.from_bits(ptx.shift_add(ptx.bits(exponent), 23, ptx.bits(mantissa)))
        for exponent, mantissa in zip(ptx.halves(whole), ptx.halves(power), strict=True)
    ]
