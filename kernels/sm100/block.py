"""What all warps of a thread block share: arguments, addresses, and where tensor memory holds what.

Columns of tensor memory, of 128 lanes x 32 bits:

      0 - 127   S of tile 0      0 - 63 of keys 0 to 63 (late), 64 - 127 of the others (early)
    128 - 255   S of tile 1      within the late half, once its softmax has read it:
    256 - 383   O of tile 0          0 - 31   P of the tile, E4M3
    384 - 511   O of tile 1         32 - 35   scales of P          36 - 39   scales of V
                                    40 - 47   scales of Q and K, of the *other* tile's late half
                                    48 - 55   scales of Q and K, of the tile's own early half

Where dk = 192 S comes whole, and 40 - 55 are scales of Q and K for the other tile's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.specs import (
    ROW_TOPS,
    ROW_WORDS,
    ROWS,
    Barriers,
    ForwardSpec,
    SharedMap,
)
from ringfa4.kernels.sm100.walk import Item, visits

TMEM_COLUMNS = 512
S, OUT = (0, 128), (256, 384)
P, P_SCALES, V_SCALES = 0, 32, 36
LATE_SCALES, EARLY_SCALES = 40, 48

LATE, EARLY = 0, 1
"""Halves of the keys of a record, 0 to 63 and 64 to 127, by when their S is multiplied."""

REFERENCE, SUM, MAXIMUM = 0, 1, 3
"""A row's words of shared memory; one sum for either half of the keys."""

TINY = 2.0**-100
"""Least scale of a logit: 0 would make NaN of a masked one."""

LOG2E = 1 / math.log(2.0)


@dataclass(frozen=True)
class Block:
    """Launch arguments (see ForwardSpec), tensor maps' addresses, and what follows from them.

    ``reduces``: tensor memory is loaded with maxima; ``base`` is the address of dynamic shared
    memory, ``rank`` the number of the thread block in its pair, 0 for the leader or without one;
    ``exponent`` |scale| log2 e; ``instruction`` describes the products of S, whose Q is negated for
    a negative scale.
    """

    spec: ForwardSpec
    reduces: bool
    base: Int32
    rank: Int32
    q_map: Int64
    k_map: Int64
    v_map: Int64
    q_records: Int64
    q_record_bytes: Int64
    q_scales: Int64
    kv_records: Int64
    kv_record_bytes: Int64
    k_scales: Int64
    v_scales: Int64
    heads_q: Int32
    heads_kv: Int32
    acc: Int64
    max: Int64
    sum: Int64
    acc_b: Int64
    acc_s: Int64
    row_b: Int64
    row_h: Int64
    items: Int64
    segments: Int64
    modes: Int64
    modes_row: Int64
    n_items: Int32
    exponent: Float32
    instruction: Int32

    @classmethod
    def of(
        cls, spec: ForwardSpec, reduces: bool, base: Int32, maps: Sequence[Any], *scalars: Any
    ) -> Block:
        """``scalars`` as ForwardSpec.DEVICE names them, the scale last."""
        scale = scalars[-1]
        exponent = ptx.maximum(ptx.scaled(ptx.magnitude(scale), LOG2E), Float32(TINY))
        instruction = Int32(scale < 0.0) * ptx.NEGATE_A
        instruction = instruction | ptx.product_descriptor(spec.ctas, spec.s_keys)
        rank = ptx.cluster_rank() if spec.ctas == 2 else Int32(0)
        return cls(spec, reduces, base, rank, *maps, *scalars[:-1], exponent, instruction)

    @property
    def at(self) -> SharedMap:
        return self.spec.shared

    @property
    def barriers(self) -> Barriers:
        return Barriers.of(self.spec)

    def barrier(self, first: int, index: Any = 0) -> Any:
        """Address of a barrier: ``first`` of its kind, plus a tile or a slot."""
        return self.base + self.at.barriers + (first + index) * 8

    def shared(self, offset: int, size: int = 0, index: Any = 0) -> Any:
        """Address of the ``index``-th of regions of ``size`` bytes."""
        return self.base + offset + index * size

    def row(self, tile: Any, row: Any, word: int) -> Any:
        """Address of a word of a row."""
        return self.shared(self.at.rows + word * ROWS * 4, 4, tile * (ROW_WORDS * ROWS) + row)

    def tops(self, tile: Any, row: Any) -> Any:
        """Address of the offsets of a row's first two blocks."""
        return self.shared(self.at.tops, 4 * ROW_TOPS, tile * ROWS + row)

    def marks(self, slot: Any) -> Any:
        """Address of the marks of a slot of V: 16 bytes from each thread block that scans it."""
        return self.shared(self.at.v_marks, 16 * self.spec.ctas, slot)

    def tmem(self) -> Any:
        """The base of tensor memory."""
        return ptx.load_shared_word(self.base + self.at.tmem_base)

    def arrive_once(self, barrier: Any, lane: Any) -> None:
        """Lane 0 arrives for its warp where the products wait: in the leader."""
        if self.spec.ctas == 1:
            ptx.arrive_once(barrier, lane)
        else:
            ptx.arrive_once_at(0, barrier, lane)

    def tile_start(self, tile: Any) -> Any:
        """The first row of a tile within its item: thread blocks of a pair take turns."""
        return (tile * self.spec.ctas + self.rank) * ROWS

    @property
    def first_work(self) -> Any:
        return cute.arch.block_idx()[0] // self.spec.ctas

    @property
    def works(self) -> Any:
        return self.n_items * self.heads_q

    @property
    def step(self) -> Any:
        """From one work of a thread block to its next."""
        return cute.arch.grid_dim()[0] // self.spec.ctas

    def item(self, work: Int32) -> tuple[Item, Any]:
        """(item, query head) of a work index."""
        number = work // self.heads_q
        return Item.read(self.items, number), work - number * self.heads_q

    def visits(self, item: Item) -> Any:
        return visits(self.segments, item)
