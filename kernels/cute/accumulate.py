"""Gradient sums: sum <- x, or sum <- sum + x, with x in the inputs' dtype and the sum in fp32; also
a sum rounded to bf16, where it is assigned.

dQ sums lie token by token, dK and dV inside gradient records, so rows (token, head) have any
strides; PyTorch's operators take three times as long on those. A thread handles UNITS runs of four
elements.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import RUN, AccumulateSpec

THREADS, UNITS = AccumulateSpec.THREADS, AccumulateSpec.UNITS


class Accumulate:
    """Grid (blocks of runs, batch, 1); runs are counted along d, then heads, then tokens."""

    def __init__(self, spec: AccumulateSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        sum: Int64,
        sum_b: Int64,
        sum_s: Int64,
        sum_h: Int64,
        x: Int64,
        x_b: Int64,
        x_s: Int64,
        x_h: Int64,
        tokens: Int32,
        heads: Int32,
        stream: Any,
    ) -> None:
        self.kernel(sum, sum_b, sum_s, sum_h, x, x_b, x_s, x_h, tokens, heads).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        sum: Int64,
        sum_b: Int64,
        sum_s: Int64,
        sum_h: Int64,
        x: Int64,
        x_b: Int64,
        x_s: Int64,
        x_h: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        """Strides in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        self._accumulate(
            sum + batch * sum_b, sum_s, sum_h, x + batch * x_b, x_s, x_h, tokens, heads,
            Int64(block) * (THREADS * UNITS) + thread,
        )  # fmt: skip

    def _accumulate(
        self, sum: Any, sum_s: Any, sum_h: Any, x: Any, x_s: Any, x_h: Any,
        tokens: Any, heads: Any, start: Any,
    ) -> None:  # fmt: skip
        spec = self.spec
        size, width = (4 if dtype == "fp32" else 2 for dtype in (spec.dtype, spec.into))
        columns = spec.d // RUN
        loaded = []
        for n in range(UNITS):
            at = start + n * THREADS
            row, run = Int32(at // columns), Int32(at % columns)
            token, head = row // heads, row % heads
            exists = dev.less(token, tokens)
            to = sum + token * sum_s + head * sum_h + run * Int64(width * RUN)
            source = x + token * x_s + head * x_h + run * Int64(size * RUN)
            new = dev.load(source, RUN * size // 4, exists)
            old = None if spec.first else dev.load(to, RUN, exists)
            loaded.append((to, exists, new, old))
        for to, exists, new, old in loaded:
            values = dev.unpack(new, spec.dtype)
            if old is not None:
                before = dev.unpack(old, "fp32")
                values = [a + b for a, b in zip(before, values, strict=True)]
            dev.store(to, dev.pack(values, spec.into), exists)
