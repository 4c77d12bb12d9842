"""What warp 20 does in a pair's second thread block, one thread of it: says what has been loaded.

The leader's products read Q, K and V of both thread blocks, but a copy into shared memory can tell
its own thread block only that it is there. So, for each copy, in the order of the loads: wait until
it is there, arrive at the leader.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import Block
from ringfa4.kernels.sm100.loads import advanced, slot_and_parity
from ringfa4.kernels.sm100.walk import Segment


@cute.jit
def relay(block: Block) -> None:
    slots, barriers = block.spec.slots, block.barriers
    position, uses = Int32(0), Int32(0)  # uses: bit t, parity of the uses of tile t's Q
    work = block.first_work
    while work < block.works:
        item, _ = block.item(work)
        first = Int32(1)
        for number in cutlass.range(item.seg0, item.seg1, unroll=1):
            segment = Segment.read(block.segments, number, item)
            for _ in cutlass.range(segment.t0, segment.t1, unroll=1):
                slot, parity = slot_and_parity(position, slots)
                if first != 0:
                    _tell(block, barriers.q_full, barriers.q_peer, 0, uses & 1)
                _tell(block, barriers.k_full, barriers.k_peer, slot, parity)
                if first != 0:
                    if item.tiles > 1:
                        _tell(block, barriers.q_full, barriers.q_peer, 1, uses >> 1)
                        uses = uses ^ 2
                    uses = uses ^ 1
                _tell(block, barriers.v_full, barriers.v_peer, slot, parity)
                position, first = advanced(position, slots), Int32(0)
        work += block.step


def _tell(block: Block, full: int, peer: int, index: Any, parity: Any) -> None:
    ptx.mbarrier_wait(block.barrier(full, index), parity)
    block.arrive_once(block.barrier(peer, index), Int32(0))
