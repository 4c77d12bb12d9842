"""The MXFP8 forward kernel of SM100: scores, softmax, values and the merge into the state, fused.

A thread block takes two tiles of 128 queries of one (batch row, head) at a time and walks the
records of keys that they see; it is persistent, its works are w = block, block + grid, ... Two
thread blocks, a cluster, do so together where ``spec.ctas`` is 2: two tiles each, of one work.

    warps  0 -  7   softmax of tile 0, two threads for each row     (softmax)
           8 - 15   softmax of tile 1
          16 - 19   O and the state                                 (epilogue)
          20        products; in the leader's peer, relay to it     (products, relay)
          21        copies into shared memory                       (loads)
          22, 23    NaN of V out of records that mask something     (guard)

What each waits for is in :class:`ringfa4.kernels.sm100.specs.Barriers`, where what lies in shared
memory in ``SharedMap`` there and in tensor memory in :mod:`ringfa4.kernels.sm100.block`.

An item must see a key; rows that see none give (0, -inf, 0). NaN reaches what depends on it and
nothing else: in Q its row, in K the rows that see the key, in V their O, all of its head's columns.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.base_dsl import Arch, BaseDSL
from cutlass.cute.nvgpu import cpasync

from ringfa4.kernels.sm100 import instructions as ptx
from ringfa4.kernels.sm100.block import EARLY, LATE, TMEM_COLUMNS, Block
from ringfa4.kernels.sm100.epilogue import finish
from ringfa4.kernels.sm100.guard import guard
from ringfa4.kernels.sm100.loads import load
from ringfa4.kernels.sm100.products import multiply
from ringfa4.kernels.sm100.relay import relay
from ringfa4.kernels.sm100.softmax import softmax
from ringfa4.kernels.sm100.specs import ROWS, ForwardSpec

SOFTMAX_REGISTERS, EPILOGUE_REGISTERS, OTHER_REGISTERS = 96, 56, 40


class Forward:
    """Compile it with arguments of ``ForwardSpec.SIGNATURE`` and a stream."""

    def __init__(self, spec: ForwardSpec) -> None:
        assert 4 * SOFTMAX_REGISTERS + EPILOGUE_REGISTERS + OTHER_REGISTERS == 6 * 80
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        q_records: Int64,
        q_record_bytes: Int64,
        q_payload: Int64,
        q_scales: Int64,
        n_q_records: Int32,
        kv_records: Int64,
        kv_record_bytes: Int64,
        k_payload: Int64,
        v_payload: Int64,
        k_scales: Int64,
        v_scales: Int64,
        n_kv_records: Int32,
        batch: Int32,
        heads_q: Int32,
        heads_kv: Int32,
        acc: Int64,
        max: Int64,
        sum: Int64,
        acc_b: Int64,
        acc_s: Int64,
        row_b: Int64,
        row_h: Int64,
        items: Int64,
        segments: Int64,
        modes: Int64,
        modes_row: Int64,
        n_items: Int32,
        scale: Float32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        spec = self.spec
        rows_q, rows_kv = batch * heads_q, batch * heads_kv
        q = _records(q_records + q_payload, ROWS, spec.dk, rows_q, n_q_records, q_record_bytes)
        k = _records(kv_records + k_payload, ROWS, spec.dk, rows_kv, n_kv_records, kv_record_bytes)
        v = _records(kv_records + v_payload, spec.dv, ROWS, rows_kv, n_kv_records, kv_record_bytes)
        self.kernel(
            _tensor_map(q, ROWS, spec.span),
            _tensor_map(k, spec.k_box, spec.span),
            _tensor_map(v, spec.v_rows, ROWS),
            q_records, q_record_bytes, q_scales,
            kv_records, kv_record_bytes, k_scales, v_scales,
            heads_q, heads_kv,
            acc, max, sum, acc_b, acc_s, row_b, row_h,
            items, segments, modes, modes_row, n_items, scale,
        ).launch(
            grid=(ctas, 1, 1), block=(spec.THREADS, 1, 1), cluster=(spec.ctas, 1, 1),
            smem=spec.SHARED, stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        q_records: Int64,
        q_record_bytes: Int64,
        q_scales: Int64,
        kv_records: Int64,
        kv_record_bytes: Int64,
        k_scales: Int64,
        v_scales: Int64,
        heads_q: Int32,
        heads_kv: Int32,
        acc: Int64,
        max: Int64,
        sum: Int64,
        acc_b: Int64,
        acc_s: Int64,
        row_b: Int64,
        row_h: Int64,
        items: Int64,
        segments: Int64,
        modes: Int64,
        modes_row: Int64,
        n_items: Int32,
        scale: Float32,
    ) -> None:
        block = Block.of(
            self.spec,
            BaseDSL._get_dsl().get_arch_enum().is_family_of(Arch.sm_103f),
            cute.arch.get_dyn_smem(Uint8, alignment=1024).toint(),
            [ptx.map_address(atom) for atom in (q_map, k_map, v_map)],
            q_records, q_record_bytes, q_scales,
            kv_records, kv_record_bytes, k_scales, v_scales,
            heads_q, heads_kv,
            acc, max, sum, acc_b, acc_s, row_b, row_h,
            items, segments, modes, modes_row, n_items, scale,
        )  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        if (warp == 0) & (lane == 0):
            for n, arrivals in enumerate(block.barriers.arrivals):
                ptx.mbarrier_init(block.barrier(n), arrivals)
            ptx.fence_mbarrier_init()
        if warp == 20:
            ptx.tmem_alloc(self.spec.ctas, block.shared(block.at.tmem_base), TMEM_COLUMNS)
        ptx.before_thread_sync()
        self.meet()
        ptx.after_thread_sync()
        if warp < 16:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            if warp // 4 % 2 == LATE:
                softmax(block, warp // 8, LATE, warp % 4)
            else:
                softmax(block, warp // 8, EARLY, warp % 4)
        elif warp < 20:
            cute.arch.setmaxregister_decrease(EPILOGUE_REGISTERS)
            finish(block, warp - 16, lane)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == 20:
                with cute.arch.elect_one():
                    if block.rank == 0:
                        multiply(block)
                    elif cutlass.const_expr(self.spec.ctas == 2):
                        relay(block)
            elif warp == 21:
                with cute.arch.elect_one():
                    load(block)
            else:
                guard(block, (warp - 22) * 32 + lane)
        cute.arch.sync_warp()  # lanes that were not elected wait for the one that was
        ptx.before_thread_sync()
        self.meet()  # also, lest an arrival or a commit find a thread block of the pair gone
        if warp == 20:
            ptx.after_thread_sync()
            ptx.tmem_dealloc(self.spec.ctas, block.tmem(), TMEM_COLUMNS)

    def meet(self) -> None:
        """All threads, of both thread blocks of a pair."""
        if self.spec.ctas == 1:
            cute.arch.sync_threads()
        else:
            ptx.cluster_barrier()


def _records(address: Any, rows: int, columns: int, heads: Any, records: Any, stride: Any) -> Any:
    """A payload as (columns, rows, batch rows and heads, records) bytes."""
    pointer = cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=128)
    strides = (1, columns, rows * columns, cute.assume(stride, divby=128))
    return cute.make_tensor(
        pointer, cute.make_layout((columns, rows, heads, records), stride=strides)
    )


def _tensor_map(payload: Any, rows: int, span: int) -> Any:
    """For boxes of ``rows`` rows of ``span`` bytes, swizzled over that span."""
    box = (span, rows, 1, 1)
    layout = cute.make_layout(box, stride=(1, span, span * rows, span * rows))
    swizzled = cute.make_composed_layout(cute.make_swizzle(span.bit_length() - 5, 4, 3), 0, layout)
    load = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(load, payload, swizzled, box).atom
