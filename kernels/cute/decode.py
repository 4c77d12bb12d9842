"""MXFP8 decoding in one pass: payload and scales of records in, K or V in the callers' dtype out.

    value = E4M3(payload) * 2^(scale - 127)     exact in bf16 and fp32; fp16 saturates

The same work split as :mod:`ringfa4.kernels.cute.encode`: a thread block decodes one record of one
(batch row, head), a warp 32 tokens in strips of 8 W columns, lane l = W g + q the tokens W g .. W g
+ W - 1 and the columns 8 q .. 8 q + 7 of a strip. A payload along the sequence is first brought to
shared memory, whole lines of 128 tokens at a time: a lane needs 16 bytes of a line, and gathered
from memory that way the L2 cache yields 71% of a copy's rate. The result is (b, heads, tokens, d),
tokens counting whole records; what padding holds is decoded like everything else.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import TILE, DecodeSpec

THREADS = DecodeSpec.THREADS


class Decode:
    """Grid (records * heads, batch, 1), block (THREADS, 1, 1)."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        records: Int64,
        record_bytes: Int64,
        payload: Int64,
        scales: Int64,
        out: Int64,
        out_row: Int64,
        heads: Int32,
        stream: Any,
    ) -> None:
        self.kernel(records, record_bytes, payload, scales, out, out_row, heads).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        records: Int64,
        record_bytes: Int64,
        payload: Int64,
        scales: Int64,
        out: Int64,
        out_row: Int64,
        heads: Int32,
    ) -> None:
        """Offsets in bytes; ``out_row`` is the size of one (batch row, head) of ``out``."""
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        record, head = block // heads, block % heads
        row = Int64(batch * heads + head)
        source = records + record * record_bytes
        self._decode(
            source + payload, source + scales, out + row * out_row, row, record,
            thread // 32, thread % 32,
        )  # fmt: skip

    def _decode(
        self, payload: Any, scales: Any, out: Any, row: Any, record: Any, warp: Any, lane: Any
    ) -> None:
        spec, width, always = self.spec, self.spec.lanes, Int32(1)
        size = 4 if spec.dtype == "fp32" else 2
        group, q = lane // width, lane % width
        strips, atoms = spec.d // (8 * width), -(-spec.d // 128)
        scales = scales + row * (512 * atoms)
        shared = self._share(payload, row, warp, lane) if spec.contiguous == "seq" else None
        ahead = max(1, 16 // width)
        for begin in range(0, strips, ahead):
            here = range(begin, min(begin + ahead, strips))
            words = [self._load(payload, shared, row, s, warp, group, q) for s in here]
            factors = [self._factors(scales, s, warp, group, q) for s in here]
            for s, word, factor in zip(here, words, factors, strict=True):
                values = self._values(word)
                token = Int64(record * 128 + warp * TILE + group * width)
                to = out + (token * spec.d + (s * (8 * width) + q * 8)) * size
                for i in range(width):
                    line = [dev.multiply(values[i][j], factor[i][j]) for j in range(8)]
                    packed = dev.pack(line, spec.dtype)
                    for n in range(0, len(packed), 4):
                        at = to + (i * spec.d * size + 4 * n)
                        dev.store(at, packed[n : n + 4], always)

    def _share(self, payload: Any, row: Any, warp: Any, lane: Any) -> Any:
        """The record's lines (d of 128 tokens) in shared memory; its address.

        16 bytes n of a line c lie at n ^ (c / 8 mod 8) of its place, so that eight lanes with
        neighbouring runs of columns read different banks.
        """
        d, always = self.spec.d, Int32(1)
        shared = cute.arch.alloc_smem(Int32, d * 32, 128).toint()
        piece, within = lane % 8, warp * 4 + lane // 8
        loaded = []
        for first in range(0, d, 16):
            column = within + first
            at = payload + (row * d + column) * 128 + piece * 16
            loaded.append((column, dev.load(at, 4, always)))
        for column, words in loaded:
            dev.write_shared(shared + column * 128 + (piece ^ (column // 8 % 8)) * 16, words)
        cute.arch.sync_threads()
        return shared

    def _load(
        self, payload: Any, shared: Any, row: Any, s: int, warp: Any, group: Any, q: Any
    ) -> list[Any]:
        """The lane's 8 W codes: W pairs of words (tokens), or 8 times W / 4 words (columns)."""
        d, width, always = self.spec.d, self.spec.lanes, Int32(1)
        token, column = warp * TILE + group * width, s * (8 * width) + q * 8
        if shared is None:
            at = payload + (row * 128 + token) * d + column
            return [dev.load(at + i * d, 2, always) for i in range(width)]
        piece = (token // 16) ^ (column // 8 % 8)
        at = shared + column * 128 + piece * 16 + token % 16
        return [dev.read_shared(at + j * 128, width // 4) for j in range(8)]

    def _values(self, words: list[Any]) -> list[list[Any]]:
        """fp32 codes as [token][column]."""
        native = self.spec.native
        lines = [[x for word in line for x in dev.from_e4m3(word, native)] for line in words]
        if self.spec.contiguous == "d":
            return lines
        return [[column[i] for column in lines] for i in range(self.spec.lanes)]

    def _factors(self, scales: Any, s: int, warp: Any, group: Any, q: Any) -> list[list[Any]]:
        """Scale values of a strip as [token][column]."""
        width, always = self.spec.lanes, Int32(1)
        first_block = s * (width // 4)
        within = (first_block % 4 + q // 4) * 8  # the bit of the lane's block in a word of tokens
        atom = scales + first_block // 4 * 512
        if self.spec.along == "d":
            at = atom + (group * (16 * width) + warp * 4)
            rows = [dev.load_shared_line(at + i * 16, always) for i in range(width)]
            return [[dev.scale_value((word >> within) & 0xFF)] * 8 for word in rows]
        # The words of a column hold 4 column groups, a byte for each of the 4 warps.
        at = atom + (q % 4 * 128 + within // 2)
        columns = [dev.load_shared_line(at + j * 16, always) for j in range(8)]
        return [[dev.scale_value((word >> (warp * 8)) & 0xFF) for word in columns]] * width
