"""Gradient sums: into <- sum + x_1 + .. + x_n in this order, every addition rounded to fp32, with x
in the inputs' dtype and the sum in fp32.

Where there is no sum yet x_1 takes its place (``first``); ``into`` is the sum itself or, in the
last pass, the rounded result. Several parts at once give the bits of one after another, and move 2
bytes an element and part beside the sum's 8, where each alone moves 10 (bf16).

dQ sums lie token by token, dK and dV inside gradient records, so rows (token, head) have any
strides; PyTorch's operators take three times as long on those. A thread handles ``units`` runs of
four elements.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import RUN, AccumulateSpec

THREADS = AccumulateSpec.THREADS


class Accumulate:
    """Grid (blocks of runs, batch, 1); runs are counted along d, then heads, then tokens."""

    def __init__(self, spec: AccumulateSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        into: Int64,
        into_b: Int64,
        into_s: Int64,
        into_h: Int64,
        sum: Int64,
        sum_b: Int64,
        sum_s: Int64,
        sum_h: Int64,
        x0: Int64,
        x0_b: Int64,
        x0_s: Int64,
        x0_h: Int64,
        x1: Int64,
        x1_b: Int64,
        x1_s: Int64,
        x1_h: Int64,
        x2: Int64,
        x2_b: Int64,
        x2_s: Int64,
        x2_h: Int64,
        x3: Int64,
        x3_b: Int64,
        x3_s: Int64,
        x3_h: Int64,
        tokens: Int32,
        heads: Int32,
        stream: Any,
    ) -> None:
        self.kernel(
            into, into_b, into_s, into_h, sum, sum_b, sum_s, sum_h,
            x0, x0_b, x0_s, x0_h, x1, x1_b, x1_s, x1_h,
            x2, x2_b, x2_s, x2_h, x3, x3_b, x3_s, x3_h, tokens, heads,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        into: Int64,
        into_b: Int64,
        into_s: Int64,
        into_h: Int64,
        sum: Int64,
        sum_b: Int64,
        sum_s: Int64,
        sum_h: Int64,
        x0: Int64,
        x0_b: Int64,
        x0_s: Int64,
        x0_h: Int64,
        x1: Int64,
        x1_b: Int64,
        x1_s: Int64,
        x1_h: Int64,
        x2: Int64,
        x2_b: Int64,
        x2_s: Int64,
        x2_h: Int64,
        x3: Int64,
        x3_b: Int64,
        x3_s: Int64,
        x3_h: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        """Addresses and strides in bytes; those of parts that are not there are not used."""
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        spec = self.spec
        given = [
            (x0, x0_b, x0_s, x0_h), (x1, x1_b, x1_s, x1_h),
            (x2, x2_b, x2_s, x2_h), (x3, x3_b, x3_s, x3_h),
        ][: spec.partials]  # fmt: skip
        self._accumulate(
            (into + batch * into_b, into_s, into_h),
            (sum + batch * sum_b, sum_s, sum_h),
            [(x + batch * b, s, h) for x, b, s, h in given],
            tokens, heads, Int64(block) * (THREADS * spec.units) + thread,
        )  # fmt: skip

    def _accumulate(
        self, into: Any, sum: Any, parts: list[Any], tokens: Any, heads: Any, start: Any
    ) -> None:
        spec = self.spec
        size, width = (4 if dtype == "fp32" else 2 for dtype in (spec.dtype, spec.into))
        columns = spec.d // RUN
        loaded = []
        for n in range(spec.units):
            at = start + n * THREADS
            row, run = Int32(at // columns), Int32(at % columns)
            token, head = row // heads, row % heads
            exists = dev.less(token, tokens)
            to, old, *new = (
                address + token * s + head * h + run * Int64(bytes * RUN)
                for (address, s, h), bytes in (
                    (into, width), (sum, 4), *((part, size) for part in parts),
                )
            )  # fmt: skip
            words = [dev.load(x, RUN * size // 4, exists) for x in new]
            before = None if spec.first else dev.load(old, RUN, exists)
            loaded.append((to, exists, before, words))
        if spec.partials > 1:
            cute.arch.sync_threads()  # so that no addition is moved between the loads
        for to, exists, before, words in loaded:
            new = [dev.unpack(x, spec.dtype) for x in words]
            values = new.pop(0) if before is None else dev.unpack(before, "fp32")
            for x in new:
                values = [a + b for a, b in zip(values, x, strict=True)]
            dev.store(to, dev.pack(values, spec.into), exists)
