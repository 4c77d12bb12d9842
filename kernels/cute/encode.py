"""MXFP8 encoding in one pass: K or V in, payload and scales of whole records out.

    amax over the block's finite elements -> E8M0 code -> E4M3(x / 2^(code - 127)) -> payload and
    scale atoms

byte for byte what :mod:`ringfa4.mx.wire` writes, straight into the outbox. A thread block encodes
one record of one (batch row, head): 4 warps, each with 32 tokens; a warp takes the columns 32 at a
time. In such a 32 x 32 tile lane l = 4 g + q holds the tokens 4 g .. 4 g + 3 and the columns 8 q ..
8 q + 7, so that

- a 16-byte load per token: four lanes read 64 consecutive bytes;
- the payload leaves with d contiguous as 8 bytes per token, or with the sequence contiguous as 4
  bytes (the four tokens) per column: both write whole 32-byte sectors, and neither needs shared
  memory;
- amax is a maximum over the lane's own elements and shuffles over q, over g, or over both.

Bytes moved: each element read once, its code written once, the scales are 1/32 of that; arithmetic
is about six instructions an element, a third of what the chip does in that time. Tokens past the
chunk's end enter as zeros.

A block of 1 x 32 has a scale per token and 32 columns, one of 32 x 1 per column and 32 tokens, one
of 32 x 32 both. The Hadamard transform stays outside: :mod:`ringfa4.precondition` applies it to K
and V before they are encoded.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import TILE, EncodeSpec

THREADS = EncodeSpec.THREADS


class Encode:
    """Grid (records, heads, batch), block (THREADS, 1, 1)."""

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
        record, head, batch = cute.arch.block_idx()
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
        """The warp's 32 tokens; as many tiles are loaded ahead as 64 registers hold."""
        spec = self.spec
        size = 4 if spec.dtype == "fp32" else 2
        atoms = -(-spec.d // 128)
        group, quad = lane // 4, lane % 4
        starts, valid = [], []
        for i in range(4):
            token = first + group * 4 + i
            starts.append(source + token * stride_s + quad * (8 * size))
            valid.append(dev.less(token, tokens))
        ahead = 8 // size
        codes: list[list[Any]] = []
        for begin in range(0, spec.d // TILE, ahead):
            tiles = range(begin, min(begin + ahead, spec.d // TILE))
            words = [
                [self._load(starts[i] + t * (TILE * size), valid[i], size) for i in range(4)]
                for t in tiles
            ]
            for t, rows in zip(tiles, words, strict=True):
                values = [[dev.infinite_to_nan(x) for x in dev.unpack(r, spec.dtype)] for r in rows]
                code = self._codes(values)
                self._write_payload(values, code, payload, row, t, warp, group, quad)
                codes.append(code)
        if spec.along_d:
            self._write_along_d(codes, scales_d + row * (512 * atoms), warp, lane, quad)
        if spec.along_seq:
            self._write_along_seq(codes, scales_seq + row * (512 * atoms), warp, lane, group, quad)

    @staticmethod
    def _load(address: Any, valid: Any, size: int) -> list[Any]:
        """8 elements."""
        words = dev.load(address, 4, valid)
        return words if size == 2 else words + dev.load(address + 16, 4, valid)

    def _codes(self, values: list[list[Any]]) -> list[Any]:
        """Scale codes of the lane's 4 x 8 elements: one for a tile, 4 for rows (1 x 32), 8 for
        columns (32 x 1).
        """
        spec = self.spec
        if spec.rows == 1:
            blocks, lanes = values, (1, 2)
        elif spec.cols == 1:
            blocks, lanes = [[r[j] for r in values] for j in range(8)], (4, 8, 16)
        else:
            blocks, lanes = [[x for r in values for x in r]], (1, 2, 4, 8, 16)
        codes = []
        for block in blocks:
            amax = Float32(0.0)
            for x in block:
                amax = dev.max_magnitude(amax, x)
            codes.append(dev.scale_code(dev.max_over_lanes(amax, lanes), spec.floor))
        return codes

    def _write_payload(
        self, values: list[list[Any]], codes: list[Any], payload: Any,
        row: Any, t: int, warp: Any, group: Any, quad: Any,
    ) -> None:  # fmt: skip
        spec, always = self.spec, Int32(1)
        factors = [dev.inverse_scale(c) for c in codes]

        def scaled(i: int, j: int) -> Any:
            factor = factors[i if spec.rows == 1 else j if spec.cols == 1 else 0]
            return dev.multiply(values[i][j], factor)

        if spec.contiguous == "d":
            to = payload + (row * 128 + warp * TILE + group * 4) * spec.d + (t * TILE + quad * 8)
            for i in range(4):
                pair = [
                    dev.to_e4m3([scaled(i, j + n) for n in range(4)], spec.native) for j in (0, 4)
                ]
                dev.store(to + i * spec.d, pair, always)
        else:
            to = payload + (row * spec.d + t * TILE + quad * 8) * 128 + (warp * TILE + group * 4)
            for j in range(8):
                word = dev.to_e4m3([scaled(i, j) for i in range(4)], spec.native)
                dev.store(to + j * 128, [word], always)

    def _write_along_d(
        self, codes: list[list[Any]], scales: Any, warp: Any, lane: Any, quad: Any
    ) -> None:
        """Matrix (128 tokens, d / 32): token 32 w + l is the word at 16 l + 4 w, its blocks are the
        word's bytes.
        """
        to = scales + (lane * 16 + warp * 4)
        own = [self._of_lane(code, quad) for code in codes]  # of token `lane` of the warp
        for begin in range(0, len(own), 4):
            word = Int32(0)
            for n in range(4):
                code = own[begin + n] if begin + n < len(own) else Int32(127)
                word = word | (code << (8 * n))
            dev.store(to + begin * 128, [word], Int32(1))

    def _write_along_seq(
        self, codes: list[list[Any]], scales: Any, warp: Any, lane: Any, group: Any, quad: Any
    ) -> None:
        """Matrix (d, 4): column 32 t + c, tokens 32 w.. is byte 16 c + 4 (t % 4) + w of atom t //
        4.
        """
        column = lane if self.spec.cols != 1 else quad * 8 + group
        to = scales + (column * 16 + warp)
        padded = -(-len(codes) // 4) * 4
        for t in range(padded):
            byte = self._of_lane(codes[t], group) if t < len(codes) else Int32(127)
            dev.store_byte(to + (t // 4 * 512 + t % 4 * 4), byte, Int32(1))

    @staticmethod
    def _of_lane(codes: list[Any], index: Any) -> Any:
        """codes[index], for a list that lies in registers."""
        chosen = codes[0]
        for n, code in enumerate(codes[1:], 1):
            chosen = dev.select(dev.equal(index, Int32(n)), code, chosen)
        return chosen
