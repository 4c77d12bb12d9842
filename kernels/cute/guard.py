"""Rows that are not finite: found, zeroed or made NaN, in one pass or none.

    Guard    copies x, finds rows with a value that is not finite, and zeroes rows: those flagged
             by the caller, or those it found
    Fill     writes one value over the flagged rows in place; it reads flags only, so where nothing
             is flagged it costs a launch

A row is one (token, head). Library calls with masked pairs need both
(:mod:`ringfa4.kernels.native`): 0 * NaN leaks through a masked pair. Adding a one to the exponent's
lowest bit of |x| carries into the sign bit exactly when the exponent is all ones, that is for
infinities and NaN; two 16-bit values are tested in one word.

Shapes: x (b, n, h, d) with any 16-byte strides, flags (b, h, n) bytes, contiguous.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import shuffle_sync_bfly

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import FillSpec, GuardSpec

MAGNITUDE = {"bf16": 0x7FFF7FFF, "fp16": 0x7FFF7FFF, "fp32": 0x7FFFFFFF}
ONE = {"bf16": 0x00800080, "fp16": 0x04000400, "fp32": 0x00800000}
SIGN = {"bf16": -0x7FFF8000, "fp16": -0x7FFF8000, "fp32": -0x80000000}
"""Masks of a word, as Int32: all but the signs, the exponents' lowest bits, the signs."""


class Guard:
    """Grid (blocks of rows, batch, 1); rows are counted token by token, heads inside."""

    def __init__(self, spec: GuardSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        out: Int64,
        given: Int64,
        found: Int64,
        tokens: Int32,
        heads: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, stride_b, stride_s, stride_h, out, given, found, tokens, heads).launch(
            grid=(1, 1, 1), block=(GuardSpec.THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        out: Int64,
        given: Int64,
        found: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        """Strides in bytes. ``out`` (b, n, h, d) is contiguous; flags ``given`` and ``found`` are
        (b, h, n).
        """
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        self._guard(
            x + batch * stride_b, stride_s, stride_h, out, given, found, tokens, heads,
            thread, block, batch,
        )  # fmt: skip

    def _guard(
        self, x: Any, stride_s: Any, stride_h: Any, out: Any, given: Any, found: Any,
        tokens: Any, heads: Any, thread: Any, block: Any, batch: Any,
    ) -> None:  # fmt: skip
        spec = self.spec
        size = 4 if spec.dtype == "fp32" else 2
        runs, lanes = spec.d * size // 16, spec.lanes
        lane, first = thread % lanes, thread // lanes
        loaded = []
        for n in range(spec.rows):
            row = block * (spec.rows * spec.groups) + n * spec.groups + first
            token, head = row // heads, row % heads
            exists = dev.less(token, tokens)
            source = x + token * stride_s + head * stride_h
            target = out + ((Int64(batch) * tokens + token) * heads + head) * Int64(spec.d * size)
            flag = (Int64(batch) * heads + head) * tokens + token
            words = []
            for at in range(0, runs, lanes):
                run = lane + at
                here = exists & dev.less(run, Int32(runs)) if at + lanes > runs else exists
                words.append((run, here, dev.load(source + run * Int64(16), 4, here)))
            dead = dev.load_byte(given + flag, exists) if spec.given else Int32(0)
            loaded.append((exists, target, flag, dead, words))
        for exists, target, flag, dead, words in loaded:
            carry = Int32(0)
            for _, _, line in words:
                for word in line:
                    carry = carry | ((word & MAGNITUDE[spec.dtype]) + ONE[spec.dtype])
            offset = 1
            while offset < lanes:
                carry = carry | shuffle_sync_bfly(carry, offset=offset)
                offset *= 2
            finite = dev.equal(carry & SIGN[spec.dtype], Int32(0))
            broken = dev.less(dead | finite, Int32(1))
            zero = dead | broken if spec.zero_found else dead
            for run, here, line in words:
                kept = [dev.select(zero, Int32(0), word) for word in line]
                dev.store(target + run * Int64(16), kept, here)
            dev.store_byte(found + flag, broken, exists & dev.equal(lane, Int32(0)))


class Fill:
    """Grid (blocks of tokens, heads, batch); a thread for each row."""

    def __init__(self, spec: FillSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        flags: Int64,
        flags_b: Int64,
        flags_h: Int64,
        tokens: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, stride_b, stride_s, stride_h, flags, flags_b, flags_h, tokens).launch(
            grid=(1, 1, 1), block=(FillSpec.THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        flags: Int64,
        flags_b: Int64,
        flags_h: Int64,
        tokens: Int32,
    ) -> None:
        """Strides in bytes; flags are contiguous along the sequence."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        token = block * FillSpec.THREADS + thread
        at = x + batch * stride_b + token * stride_s + head * stride_h
        self._fill(at, flags + batch * flags_b + head * flags_h + token, dev.less(token, tokens))

    def _fill(self, at: Any, flag: Any, exists: Any) -> None:
        spec = self.spec
        flagged = dev.load_byte(flag, exists)
        word = [Int32(spec.word)] * 4
        for offset in range(0, spec.row_bytes, 16):
            dev.store(at + offset, word, flagged)
