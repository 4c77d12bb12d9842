"""MXFP8 encoding in one pass: K or V in, payload and scales of whole records out.

    amax over the block's finite elements -> E8M0 code -> E4M3(x / 2^(code - 127)) -> payload and
    scale atoms

byte for byte what :mod:`ringfa4.mx.wire` writes, straight into the outbox. A thread block encodes
one record of one (batch row, head): 4 warps, each with 32 tokens; a warp takes strips of 8 W
columns, W = 8 or 4 as d allows. In a strip, lane l = W g + q holds the tokens W g .. W g + W - 1
and the columns 8 q .. 8 q + 7, so that

- a load instruction reads 16 bytes a lane, 16 W consecutive bytes of 32 / W tokens;
- the payload leaves with d contiguous as 8 bytes a token and lane, 8 W consecutive ones, or with
  the sequence contiguous as W bytes a column: whole 32-byte sectors, and no shared memory;
- amax is a maximum over the lane's own elements and shuffles: over the 4 lanes of a block of 32
  columns, over the 32 / W groups of tokens, or over both.

Thread blocks of neighbouring heads are neighbours in the grid, as their rows are in memory. Bytes
moved: each element read once, its code written once, the scales are 1/32 of that; arithmetic is
about six instructions an element, a third of what the chip does in that time. Tokens past the
chunk's end enter as zeros.

A block of 1 x 32 has a scale per token and 32 columns, one of 32 x 1 per column and 32 tokens, one
of 32 x 32 both. The Hadamard transform stays outside: :mod:`ringfa4.precondition` applies it to K
and V before they are encoded.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import shuffle_sync_bfly

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import TILE, EncodeSpec

THREADS = EncodeSpec.THREADS


class Encode:
    """Grid (records * heads, batch, 1), block (THREADS, 1, 1)."""

    def __init__(self, spec: EncodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        records: Int64,
        record_bytes: Int64,
        payload: Int64,
        scales_d: Int64,
        scales_seq: Int64,
        tokens: Int32,
        heads: Int32,
        stream: Any,
    ) -> None:
        self.kernel(
            x, stride_b, stride_s, stride_h, records, record_bytes,
            payload, scales_d, scales_seq, tokens, heads,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        records: Int64,
        record_bytes: Int64,
        payload: Int64,
        scales_d: Int64,
        scales_seq: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        """Strides and offsets in bytes; ``x`` at the chunk's first token, ``records`` at its first
        record.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        record, head = block // heads, block % heads
        warp, lane = thread // 32, thread % 32
        row = Int64(batch * heads + head)
        first = record * 128 + warp * TILE
        source = x + batch * stride_b + head * stride_h
        target = records + record * record_bytes
        self._encode(
            source, stride_s, first, tokens,
            target + payload, target + scales_d, target + scales_seq, row, warp, lane,
        )  # fmt: skip

    def _encode(
        self, source: Any, stride_s: Any, first: Any, tokens: Any,
        payload: Any, scales_d: Any, scales_seq: Any, row: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        """The warp's 32 tokens; as many strips are loaded ahead as 64 registers hold."""
        spec, width = self.spec, self.spec.lanes
        size = 4 if spec.dtype == "fp32" else 2
        atoms = -(-spec.d // 128)
        group, q = lane // width, lane % width
        starts, valid = [], []
        for i in range(width):
            token = first + group * width + i
            starts.append(source + token * stride_s + q * (8 * size))
            valid.append(dev.less(token, tokens))
        strips = spec.d // (8 * width)
        codes: list[list[Any]] = []
        for begin in range(0, strips, spec.ahead):
            here = range(begin, min(begin + spec.ahead, strips))
            words = [
                [
                    self._load(starts[i] + s * (8 * width * size), valid[i], size)
                    for i in range(width)
                ]
                for s in here
            ]
            for s, rows in zip(here, words, strict=True):
                code = self._codes(rows)
                self._write_payload(rows, code, payload, row, s, warp, group, q)
                codes.append(code)
        if spec.along_d:
            self._write_along_d(codes, scales_d + row * (512 * atoms), warp, lane, q)
        if spec.along_seq:
            self._write_along_seq(codes, scales_seq + row * (512 * atoms), warp, lane, group, q)

    @staticmethod
    def _load(address: Any, valid: Any, size: int) -> list[Any]:
        """8 elements."""
        words = dev.load(address, 4, valid)
        return words if size == 2 else words + dev.load(address + 16, 4, valid)

    def _finite(self, words: list[Any]) -> list[Any]:
        """8 values, infinities as NaN; unpacked when needed, as fp32 takes twice the registers."""
        return [dev.infinite_to_nan(x) for x in dev.unpack(words, self.spec.dtype)]

    def _codes(self, rows: list[list[Any]]) -> list[Any]:
        """Scale codes of the lane's W x 8 elements: 1 for a tile, W for 1 x 32, 8 for 32 x 1."""
        spec, width = self.spec, self.spec.lanes
        block_lanes, groups = [1, 2], [n for n in (4, 8, 16) if n >= width]
        lanes = block_lanes + groups
        count = 1
        if spec.rows == 1:
            count, lanes = width, block_lanes
        elif spec.cols == 1:
            count, lanes = 8, groups
        amax = [Float32(0.0)] * count
        for i, words in enumerate(rows):
            for j, x in enumerate(self._finite(words)):
                n = self._block(i, j)
                amax[n] = dev.max_magnitude(amax[n], x)
        return [dev.scale_code(dev.max_over_lanes(a, lanes), spec.floor) for a in amax]

    def _block(self, i: int, j: int) -> int:
        """Which of the lane's blocks holds its token i and column j."""
        return i if self.spec.rows == 1 else j if self.spec.cols == 1 else 0

    def _write_payload(
        self, rows: list[list[Any]], codes: list[Any], payload: Any,
        row: Any, s: int, warp: Any, group: Any, q: Any,
    ) -> None:  # fmt: skip
        spec, width, always = self.spec, self.spec.lanes, Int32(1)
        factors = [dev.inverse_scale(c) for c in codes]

        def scaled(i: int) -> list[Any]:
            values = self._finite(rows[i])
            return [dev.multiply(x, factors[self._block(i, j)]) for j, x in enumerate(values)]

        token, column = warp * TILE + group * width, s * (8 * width) + q * 8
        if spec.contiguous == "d":
            to = payload + (row * 128 + token) * spec.d + column
            for i in range(width):
                x = scaled(i)
                pair = [dev.to_e4m3(x[:4], spec.native), dev.to_e4m3(x[4:], spec.native)]
                dev.store(to + i * spec.d, pair, always)
            return
        to = payload + (row * spec.d + column) * 128 + token
        columns: list[list[Any]] = [[] for _ in range(8)]
        for i in range(0, width, 4):
            four = [scaled(i + n) for n in range(4)]
            for j in range(8):
                columns[j].append(dev.to_e4m3([x[j] for x in four], spec.native))
        for j in range(8):
            dev.store(to + j * 128, columns[j], always)

    def _write_along_d(
        self, codes: list[list[Any]], scales: Any, warp: Any, lane: Any, q: Any
    ) -> None:
        """Matrix (128 tokens, d / 32): token 32 w + l is the word at 16 l + 4 w, a byte a block.

        Lanes hold the code of their own block; the 4 bytes of a word come together by shuffles.
        """
        spec, width = self.spec, self.spec.lanes
        blocks = width // 4  # of a strip
        to = scales + (lane * 16 + warp * 4)
        for atom in range(-(-spec.d // 128)):
            words = [Int32(0)] * len(codes[0])
            for s in range(atom * 4 // blocks, min((atom + 1) * 4 // blocks, len(codes))):
                shift = ((s * blocks) % 4 + q // 4) * 8
                for n, code in enumerate(codes[s]):
                    words[n] = words[n] | (code << shift)
            for offset in (4, 8):
                if offset < width:
                    words = [w | shuffle_sync_bfly(w, offset=offset) for w in words]
            missing = range(min(4, spec.d // 32 - atom * 4), 4)
            neutral = sum(127 << (8 * n) for n in missing)
            # Of the rows of a group, lane q has taken token W g + q, which is token `lane`.
            word = self._of_lane(words, q) | Int32(neutral)
            dev.store(to + atom * 512, [word], Int32(1))

    def _write_along_seq(
        self, codes: list[list[Any]], scales: Any, warp: Any, lane: Any, group: Any, q: Any
    ) -> None:
        """Matrix (d, 4): column c, tokens 32 w .. is byte 16 (c % 32) + 4 (c // 32 % 4) + w.

        The 32 / W lanes that hold a column share its 8 neighbours: W / 4 columns each.
        """
        spec, width, always = self.spec, self.spec.lanes, Int32(1)
        blocks, each = width // 4, width // 4
        for s, code in enumerate(codes):
            first_block = s * blocks
            atom, within = first_block // 4, first_block % 4
            to = scales + atom * 512 + (warp + (q // 4 + within) * 4 + (q % 4) * 128)
            for m in range(each):
                j = group * each + m
                dev.store_byte(to + j * 16, self._of_lane(code, j), always)
        for block in range(spec.d // 32, -(-spec.d // 128) * 4):
            to = scales + block // 4 * 512 + (lane * 16 + warp + block % 4 * 4)
            dev.store_byte(to, Int32(127), always)

    @staticmethod
    def _of_lane(codes: list[Any], index: Any) -> Any:
        """codes[index], for a list that lies in registers; a list of one has no index."""
        chosen = codes[0]
        for n, code in enumerate(codes[1:], 1):
            chosen = dev.select(dev.equal(index, Int32(n)), code, chosen)
        return chosen
