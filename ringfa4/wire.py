"""How K and V look as bytes while they travel: the wire formats.

A shard on the wire is an array of records; a record holds 128 consecutive tokens of one chunk, all
batch rows and all K/V heads, in the layout the kernel reads. So any token range is one contiguous
copy, encoding happens once (at the owner, straight into the transport's outbox), and nobody repacks
on arrival. The tail of a chunk's last record is padding: payload 0 (and neutral scales, for formats
that have them).

Plain formats (the input dtype as it is) interleave token by token:

    record = [128 tokens][batch][ K: heads_kv * dk | V: heads_kv * dv ]

so K and V of any token range are strided views, no copy. dK/dV lie in the same layout, whatever the
wire of K and V: a step's contribution in the dtype that the kernel gives it in
(:meth:`ringfa4.kernels.interface.BlockKernel.gradient_dtype`), sums in fp32. MXFP8 formats live in
:mod:`ringfa4.mx.wire`.

torch is imported; nothing here communicates or computes attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ringfa4.fused import assign
from ringfa4.mask import Mask
from ringfa4.plan import RecordRange
from ringfa4.shard import RECORD, Shard

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one token of K and V is: ``dtype`` is the callers' dtype, before encoding."""

    batch: int
    heads_kv: int
    dk: int
    dv: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RecordMap:
    """Where the records of some ranges of a shard lie when packed one after another.

    ``whole(shard)`` is the map of the owner's outbox; ``RecordMap(shard, step.ranges)`` that of a
    fetched view.
    """

    shard: Shard
    ranges: tuple[RecordRange, ...]

    @classmethod
    def whole(cls, shard: Shard) -> RecordMap:
        return cls(
            shard, tuple(RecordRange(c, 0, chunk.records) for c, chunk in enumerate(shard.chunks))
        )

    @cached_property
    def records(self) -> int:
        return sum(len(r) for r in self.ranges)

    @cached_property
    def _base(self) -> dict[int, tuple[int, RecordRange]]:
        table, at = {}, 0
        for r in self.ranges:
            table[r.chunk] = (at, r)
            at += len(r)
        return table

    def row(self, chunk: int, token: int) -> int:
        """Packed row (record * 128 + row in record) of ``token`` of ``chunk``; ``token`` may be
        the range's end.
        """
        base, r = self._base[chunk]
        if not r.start * RECORD <= token <= r.stop * RECORD:
            raise AssertionError(f"token {token} of chunk {chunk} is outside {r}")
        return (base - r.start) * RECORD + token

    def packed(self, chunk: int) -> tuple[int, RecordRange]:
        """First packed record of ``chunk``, and which of its records are here."""
        return self._base[chunk]

    def tokens(self) -> list[tuple[int, int, int]]:
        """(chunk, first token, token past the last) for each range, without the padding."""
        return [
            (r.chunk, r.start * RECORD, min(r.stop * RECORD, self.shard.chunks[r.chunk].count))
            for r in self.ranges
        ]

    def spans(self, record_bytes: int) -> tuple[tuple[int, int], ...]:
        """(byte offset in the owner's outbox, bytes) to copy, in order; adjacent ranges are
        joined.
        """
        spans: list[tuple[int, int]] = []
        for r in self.ranges:
            start = (self.shard.record_base[r.chunk] + r.start) * record_bytes
            size = len(r) * record_bytes
            if spans and sum(spans[-1]) == start:
                spans[-1] = (spans[-1][0], spans[-1][1] + size)
            elif size:
                spans.append((start, size))
        return tuple(spans)

    def inside(
        self, ranges: Sequence[RecordRange], record_bytes: int
    ) -> tuple[tuple[int, int], ...]:
        """(byte offset in what is packed here, bytes) of ``ranges``, in order; adjacent ones are
        joined.
        """
        spans: list[tuple[int, int]] = []
        for r in ranges:
            first, there = self.packed(r.chunk)
            start, size = (first + r.start - there.start) * record_bytes, len(r) * record_bytes
            if spans and sum(spans[-1]) == start:
                start, size = spans[-1][0], spans.pop()[1] + size
            spans.append((start, size))
        return tuple(spans)


class EncodedShard(ABC):
    """Records of one owner as a kernel sees them: bytes, and where each token is.

    ``wire`` names the format; kernels that read the bytes themselves check it and use ``buffer``
    and ``map``; others ask for :meth:`keys_values`.
    """

    def __init__(self, wire: str, geometry: Geometry, map: RecordMap, buffer: Tensor) -> None:
        self.wire, self.geometry, self.map, self.buffer = wire, geometry, map, buffer

    @abstractmethod
    def keys_values(self, chunk: int, k0: int, k1: int) -> tuple[Tensor, Tensor]:
        """K (b, k1-k0, heads_kv, dk) and V (b, k1-k0, heads_kv, dv) of tokens [k0, k1) of
        ``chunk``.

        Plain wires return views in the input dtype; quantising wires decode (once a shard, cached)
        to the input dtype.
        """


class WireFormat(ABC):
    """One format. Stateless; ``name`` is what users write and what the plan's digest covers."""

    name: str

    def supports(self, geometry: Geometry) -> str | None:
        """None, or why this geometry cannot travel in this format."""
        return None

    def split_at(self, mask: Mask) -> tuple[int, ...]:
        """Key positions at which chunks must be cut: formats that couple the tokens of a group keep
        the documents of ``mask`` apart.
        """
        return ()

    @abstractmethod
    def record_bytes(self, geometry: Geometry, direction: Direction) -> int:
        """Bytes of a record, a multiple of 128."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor, shard: Shard, out: Tensor, direction: Direction) -> None:
        """Write the whole shard into ``out`` (uint8, ``shard.records * record_bytes``), padding
        included.

        k (b, s, heads_kv, dk), v (b, s, heads_kv, dv), s = len(shard), any strides, local order.
        """

    @abstractmethod
    def view(
        self, geometry: Geometry, map: RecordMap, buffer: Tensor, direction: Direction
    ) -> EncodedShard:
        """Read ``buffer`` (uint8, packed as ``map`` says; may be larger) as records."""


class PlainShard(EncodedShard):
    """Strided K and V over interleaved records."""

    @cached_property
    def _flat(self) -> Tensor:
        g, buffer = self.geometry, self.buffer
        size = self.map.records * RECORD * g.batch * g.heads_kv * (g.dk + g.dv) * g.dtype.itemsize
        return (buffer if buffer.numel() == size else buffer[:size]).view(g.dtype)

    def keys_values(self, chunk: int, k0: int, k1: int) -> tuple[Tensor, Tensor]:
        return self.packed_rows(self.map.row(chunk, k0), k1 - k0)

    def packed_rows(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of ``count`` rows, of whichever chunks they are."""
        return rows_in(self._flat, self.geometry, row, count)


def rows_in(flat: Tensor, geometry: Geometry, row: int, count: int) -> tuple[Tensor, Tensor]:
    """K and V (b, count, heads_kv, dk or dv) of packed rows from ``row`` on, as views of ``flat``,
    which has the elements of some records in ``geometry``'s layout, in any dtype.
    """
    # A call asks for hundreds of these; a chain of views costs the host several times as much.
    g, width = geometry, geometry.heads_kv * (geometry.dk + geometry.dv)
    token = g.batch * width
    start = flat.storage_offset() + row * token
    return (
        flat.as_strided((g.batch, count, g.heads_kv, g.dk), (width, token, g.dk, 1), start),
        flat.as_strided(
            (g.batch, count, g.heads_kv, g.dv), (width, token, g.dv, 1), start + g.heads_kv * g.dk
        ),
    )


@dataclass(frozen=True)
class PlainWire(WireFormat):
    """One dtype, as it is. As a wire of K and V ``dtype`` must be theirs; dK/dV have their own."""

    name: str
    dtype: torch.dtype

    def supports(self, geometry: Geometry) -> str | None:
        if geometry.dtype != self.dtype:
            return f"wire {self.name!r} carries {self.dtype}, the inputs are {geometry.dtype}"
        return None

    def record_bytes(self, geometry: Geometry, direction: Direction) -> int:
        item = torch.empty(0, dtype=self.dtype).element_size()
        return RECORD * geometry.batch * geometry.heads_kv * (geometry.dk + geometry.dv) * item

    def encode(self, k: Tensor, v: Tensor, shard: Shard, out: Tensor, direction: Direction) -> None:
        geometry = Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)
        encoded = PlainShard(self.name, geometry, RecordMap.whole(shard), out)
        for first, row, count, padding in shard.runs:
            into = encoded.packed_rows(row, count)
            for to, x in zip(into, (k, v), strict=True):
                assign(to, x if count == x.shape[1] else x[:, first : first + count])
            if padding:
                for pad in encoded.packed_rows(row + count, padding):
                    pad.zero_()

    def view(
        self, geometry: Geometry, map: RecordMap, buffer: Tensor, direction: Direction
    ) -> PlainShard:
        """``geometry`` may name another dtype than the wire's: dK/dV are of K and V's geometry."""
        own = geometry if geometry.dtype == self.dtype else replace(geometry, dtype=self.dtype)
        return PlainShard(self.name, own, map, buffer)


PLAIN = {
    torch.float32: PlainWire("fp32", torch.float32),
    torch.bfloat16: PlainWire("bf16", torch.bfloat16),
    torch.float16: PlainWire("fp16", torch.float16),
    torch.float64: PlainWire("fp64", torch.float64),
}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what partials and gradients of inputs in ``dtype`` are summed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wire_format(name: str | None, dtype: torch.dtype) -> WireFormat:
    """The format called ``name``; None is the input dtype as it is. ValueError for unknown
    names.
    """
    if name is None:
        if dtype not in PLAIN:
            raise ValueError(f"no wire carries {dtype}; choose one of {sorted(map(str, PLAIN))}")
        return PLAIN[dtype]
    from ringfa4.mx.wire import MXFP8, MXFP8_1X32  # it builds on this module

    table: dict[str, WireFormat] = {w.name: w for w in (*PLAIN.values(), MXFP8, MXFP8_1X32)}
    if name not in table:
        raise ValueError(f"unknown wire {name!r}; there are {sorted(table)}")
    return table[name]
