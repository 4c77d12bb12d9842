"""The merge of partials into the running state, in one pass over the state.

    m = max(max, lse_1, .., lse_n),  acc <- acc e^(max - m) + sum_p out_p e^(lse_p - m),  sum
    likewise,  max <- m;  or, when it is the last (``final``), out = acc / sum, lse = m + log(sum)

ringfa4.state's algebra, with the same cases: both -inf stay the identity; an out under lse = -inf
is not read into the result, whatever it holds; rows that nothing reached yet are assigned and not
read (``first``). Unfused operators would pass over acc twice and over every partial twice; here acc
is read and written once, a partial read once.

A thread block owns TOKENS x HEADS whole rows, so that nobody else reads the max and sum it writes:
all are loaded, the block synchronises, then they are written. Eight consecutive tokens share a
32-byte sector of max, sum and lse, whose fast axis is the sequence. A thread handles ``units`` runs
of four elements, all of them loaded before the first is used.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import RUN, MergeSpec

THREADS = MergeSpec.THREADS


class Merge:
    """Grid (blocks of tokens, blocks of heads, batch), block (THREADS, 1, 1)."""

    def __init__(self, spec: MergeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        acc: Int64,
        max: Int64,
        sum: Int64,
        acc_b: Int64,
        acc_s: Int64,
        row_b: Int64,
        row_h: Int64,
        tokens: Int32,
        heads: Int32,
        out: Int64,
        out_b: Int64,
        out_s: Int64,
        lse: Int64,
        out0: Int64,
        out0_b: Int64,
        out0_s: Int64,
        out0_h: Int64,
        lse0: Int64,
        lse0_b: Int64,
        lse0_h: Int64,
        out1: Int64,
        out1_b: Int64,
        out1_s: Int64,
        out1_h: Int64,
        lse1: Int64,
        lse1_b: Int64,
        lse1_h: Int64,
        out2: Int64,
        out2_b: Int64,
        out2_s: Int64,
        out2_h: Int64,
        lse2: Int64,
        lse2_b: Int64,
        lse2_h: Int64,
        out3: Int64,
        out3_b: Int64,
        out3_s: Int64,
        out3_h: Int64,
        lse3: Int64,
        lse3_b: Int64,
        lse3_h: Int64,
        stream: Any,
    ) -> None:
        self.kernel(
            acc, max, sum, acc_b, acc_s, row_b, row_h, tokens, heads,
            out, out_b, out_s, lse,
            out0, out0_b, out0_s, out0_h, lse0, lse0_b, lse0_h,
            out1, out1_b, out1_s, out1_h, lse1, lse1_b, lse1_h,
            out2, out2_b, out2_s, out2_h, lse2, lse2_b, lse2_h,
            out3, out3_b, out3_s, out3_h, lse3, lse3_b, lse3_h,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        acc: Int64,
        max: Int64,
        sum: Int64,
        acc_b: Int64,
        acc_s: Int64,
        row_b: Int64,
        row_h: Int64,
        tokens: Int32,
        heads: Int32,
        out: Int64,
        out_b: Int64,
        out_s: Int64,
        lse: Int64,
        out0: Int64,
        out0_b: Int64,
        out0_s: Int64,
        out0_h: Int64,
        lse0: Int64,
        lse0_b: Int64,
        lse0_h: Int64,
        out1: Int64,
        out1_b: Int64,
        out1_s: Int64,
        out1_h: Int64,
        lse1: Int64,
        lse1_b: Int64,
        lse1_h: Int64,
        out2: Int64,
        out2_b: Int64,
        out2_s: Int64,
        out2_h: Int64,
        lse2: Int64,
        lse2_b: Int64,
        lse2_h: Int64,
        out3: Int64,
        out3_b: Int64,
        out3_s: Int64,
        out3_h: Int64,
        lse3: Int64,
        lse3_b: Int64,
        lse3_h: Int64,
    ) -> None:
        """Addresses of the first row's acc, max and sum, of the finalised out and lse (which has
        the strides of max), then of each partial's out and lse; strides in bytes.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, head_block, batch = cute.arch.block_idx()
        spec = self.spec
        given = [
            (out0, out0_b, out0_s, out0_h, lse0, lse0_b, lse0_h),
            (out1, out1_b, out1_s, out1_h, lse1, lse1_b, lse1_h),
            (out2, out2_b, out2_s, out2_h, lse2, lse2_b, lse2_h),
            (out3, out3_b, out3_s, out3_h, lse3, lse3_b, lse3_h),
        ]  # fmt: skip
        units = self._units(thread, block, head_block, tokens, heads)
        state = (acc + batch * acc_b, max + batch * row_b, sum + batch * row_b)
        result = (out + batch * out_b, lse + batch * row_b)
        partials = [
            (o + batch * o_b, o_s, o_h, e + batch * e_b, e_h)
            for o, o_b, o_s, o_h, e, e_b, e_h in given[: spec.partials]
        ]
        loaded = self._load(units, state, partials, acc_s, row_h)
        cute.arch.sync_threads()
        # Run by run: merged all before the first is stored, they would be merged between the loads.
        for unit, (old, new) in zip(units, loaded, strict=True):
            merged = self._merge(old, new)
            if spec.final:
                self._finalise(unit, merged, result, out_s, row_h)
            else:
                self._store(unit, merged, state, acc_s, row_h)

    def _units(
        self, thread: Any, block: Any, head_block: Any, tokens: Any, heads: Any
    ) -> list[tuple[Any, Any, Any, Any]]:
        """(token, head, run of the row, whether it exists) of each of the thread's runs; runs of a
        row are neighbours.
        """
        spec = self.spec
        columns = spec.dv // RUN
        units = []
        for n in range(spec.units):
            at = thread + n * THREADS
            row = at // columns
            token = block * spec.tokens + row // spec.heads
            head = head_block * spec.heads + row % spec.heads
            exists = dev.less(token, tokens) & dev.less(head, heads)
            if spec.tokens * spec.heads * columns % THREADS:
                exists = exists & dev.less(row, Int32(spec.tokens * spec.heads))
            units.append((token, head, at % columns, exists))
        return units

    def _load(
        self,
        units: list[Any],
        state: tuple[Any, ...],
        partials: list[Any],
        acc_s: Any,
        row_h: Any,
    ) -> list[Any]:
        """For each run: (acc, max, sum) or None on first use, and [(out, lse)] of the partials."""
        spec = self.spec
        acc, max, sum = state
        size = 4 if spec.dtype == "fp32" else 2
        loaded = []
        for token, head, run, exists in units:
            old = None
            if not spec.first:
                at = acc + token * acc_s + (head * (4 * spec.dv) + run * (4 * RUN))
                words = dev.load(at, RUN, exists)
                row = head * row_h + token * Int64(4)
                old = (
                    dev.unpack(words, "fp32"),
                    dev.from_bits(dev.load_shared_line(max + row, exists)),
                    dev.from_bits(dev.load_shared_line(sum + row, exists)),
                )
            new = []
            for out, out_s, out_h, lse, lse_h in partials:
                at = out + token * out_s + head * out_h + run * Int64(RUN * size)
                words = dev.load(at, RUN * size // 4, exists)
                row = lse + head * lse_h + token * Int64(4)
                new.append((words, dev.from_bits(dev.load_shared_line(row, exists))))
            loaded.append((old, new))
        return loaded

    def _merge(self, old: Any, new: list[Any]) -> tuple[list[Any], Any, Any]:
        """(acc, max, sum) of a run; ``old`` and ``new`` as :meth:`_load` has them."""
        top = Float32(-float("inf"))
        for _, lse in new:
            top = dev.maximum(top, lse)
        if old is not None:
            top = dev.maximum(top, old[1])
        # Both -inf: every weight is e^(-inf - 0) = 0.
        safe = dev.select(dev.is_negative_infinity(top), Float32(0.0), top)
        if old is None:
            values, total = [Float32(0.0)] * RUN, Float32(0.0)
        else:
            weight = dev.exp(old[1] - safe)
            values = [dev.multiply(x, weight) for x in old[0]]
            total = dev.multiply(old[2], weight)
        for words, lse in new:
            dead = dev.is_negative_infinity(lse)
            weight = dev.exp(lse - safe)
            total = total + weight
            for n, x in enumerate(dev.unpack(words, self.spec.dtype)):
                live = dev.select(dead, Float32(0.0), x)
                values[n] = dev.fused_multiply_add(live, weight, values[n])
        return values, top, total

    def _store(
        self,
        unit: tuple[Any, ...],
        merged: tuple[list[Any], Any, Any],
        state: tuple[Any, ...],
        acc_s: Any,
        row_h: Any,
    ) -> None:
        (token, head, run, exists), (values, top, total) = unit, merged
        acc, max, sum = state
        at = acc + token * acc_s + (head * (4 * self.spec.dv) + run * (4 * RUN))
        dev.store(at, dev.pack(values, "fp32"), exists)
        row = head * row_h + token * Int64(4)
        owner = exists & dev.equal(run, Int32(0))
        dev.store(max + row, [dev.bits(top)], owner)
        dev.store(sum + row, [dev.bits(total)], owner)

    def _finalise(
        self,
        unit: tuple[Any, ...],
        merged: tuple[list[Any], Any, Any],
        result: tuple[Any, ...],
        out_s: Any,
        row_h: Any,
    ) -> None:
        (token, head, run, exists), (values, top, total) = unit, merged
        out, lse = result
        size = 4 if self.spec.dtype == "fp32" else 2
        nothing = dev.equal(dev.bits(total), Int32(0))
        inverse = dev.reciprocal(dev.select(nothing, Float32(1.0), total))
        line = [dev.multiply(x, inverse) for x in values]
        at = out + token * out_s + (head * (size * self.spec.dv) + run * (size * RUN))
        dev.store(at, dev.pack(line, self.spec.dtype), exists)
        row = lse + head * row_h + token * Int64(4)
        whole = top + dev.log(total)
        dev.store(row, [dev.bits(whole)], exists & dev.equal(run, Int32(0)))
