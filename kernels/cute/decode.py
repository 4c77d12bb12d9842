"""MXFP8 decoding in one pass: payload and scales of records in, K or V in the callers' dtype out.

    value = E4M3(payload) * 2^(scale - 127)     exact in bf16 and fp32; fp16 saturates

The same work split as :mod:`ringfa4.kernels.cute.encode`: a thread block decodes one record of one
(batch row, head), a warp 32 tokens, lane l = 4 g + q the tokens 4 g .. 4 g + 3 and the columns 8 q
.. 8 q + 7 of each 32 x 32 tile. The result is (b, heads, tokens, d), tokens counting whole records;
what padding holds is decoded like everything else.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ringfa4.kernels.cute import device as dev
from ringfa4.kernels.cute.specs import TILE, DecodeSpec

THREADS = DecodeSpec.THREADS


class Decode:
    """Grid (records, heads, batch), block (THREADS, 1, 1)."""

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
        record, head, batch = cute.arch.block_idx()
        row = Int64(batch * heads + head)
        source = records + record * record_bytes
        self._decode(
            source + payload, source + scales, out + row * out_row, row, record,
            thread // 32, thread % 32,
        )  # fmt: skip

    def _decode(
        self, payload: Any, scales: Any, out: Any, row: Any, record: Any, warp: Any, lane: Any
    ) -> None:
        spec, always = self.spec, Int32(1)
        size = 4 if spec.dtype == "fp32" else 2
        group, quad = lane // 4, lane % 4
        tiles, atoms = spec.d // TILE, -(-spec.d // 128)
        scales = scales + row * (512 * atoms)
        for begin in range(0, tiles, 4):
            here = range(begin, min(begin + 4, tiles))
            words = [self._load(payload, row, t, warp, group, quad) for t in here]
            factors = self._factors(scales + begin * 128, here, warp, group, quad)
            for t, word, factor in zip(here, words, factors, strict=True):
                values = self._values(word)
                for i in range(4):
                    token = Int64(record * 128 + warp * TILE + group * 4 + i)
                    to = out + (token * spec.d + (t * TILE + quad * 8)) * size
                    line = [dev.multiply(values[i][j], factor[i][j]) for j in range(8)]
                    packed = dev.pack(line, spec.dtype)
                    for n in range(0, len(packed), 4):
                        dev.store(to + 4 * n, packed[n : n + 4], always)

    def _load(self, payload: Any, row: Any, t: int, warp: Any, group: Any, quad: Any) -> list[Any]:
        """The lane's 32 codes: 4 pairs of words (tokens), or 8 words (columns)."""
        d, always = self.spec.d, Int32(1)
        if self.spec.contiguous == "d":
            at = payload + (row * 128 + warp * TILE + group * 4) * d + (t * TILE + quad * 8)
            return [dev.load(at + i * d, 2, always) for i in range(4)]
        at = payload + (row * d + t * TILE + quad * 8) * 128 + (warp * TILE + group * 4)
        return [dev.load(at + j * 128, 1, always) for j in range(8)]

    def _values(self, words: list[Any]) -> list[list[Any]]:
        """fp32 codes as [token][column]."""
        native = self.spec.native
        if self.spec.contiguous == "d":
            return [[x for word in pair for x in dev.from_e4m3(word, native)] for pair in words]
        columns = [dev.from_e4m3(word, native) for (word,) in words]
        return [[column[i] for column in columns] for i in range(4)]

    def _factors(
        self, atom: Any, tiles: range, warp: Any, group: Any, quad: Any
    ) -> list[list[list[Any]]]:
        """Scale values as [tile][token][column] of the (up to four) tiles of one atom."""
        always = Int32(1)
        if self.spec.along == "d":
            at = atom + (group * 64 + warp * 4)
            rows = [dev.load_shared_line(at + i * 16, always) for i in range(4)]
            return [[[self._byte(word, n)] * 8 for word in rows] for n in range(len(tiles))]
        # The words of a column hold 4 column groups, a byte for each of the 4 warps.
        factors = []
        for n in range(len(tiles)):
            at = atom + (quad * 128 + n * 4)
            columns = [dev.load_shared_line(at + j * 16, always) for j in range(8)]
            line = [dev.scale_value((word >> (warp * 8)) & 0xFF) for word in columns]
            factors.append([line] * 4)
        return factors

    @staticmethod
    def _byte(word: Any, n: int) -> Any:
        return dev.scale_value((word >> (8 * n)) & 0xFF)
