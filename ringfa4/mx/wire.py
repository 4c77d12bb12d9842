"""K and V in MXFP8 on the wire: records whose bytes are the block kernel's operands.

A record holds 128 tokens of one chunk. For each contraction of attention that reads K or V it has
an operand: an E4M3 payload, and one E8M0 scale per 32 contracted elements in 512-byte atoms
(:mod:`ringfa4.mx.layout`). b batch rows, h K/V heads, n(d) = ceil(d / 128); every section is a
multiple of 128 bytes:

    forward               section                               bytes           read by
      k payload           [b][h][128 tokens][dk]                b h 128 dk      S = Q K^T
      v payload           [b][h][dv][128 tokens]                b h 128 dv      O = P V
      k scales along d    [b][h][n(dk) atoms: token x dk/32]    b h 512 n(dk)   S
      v scales along seq  [b][h][n(dv) atoms: dv x 4]           b h 512 n(dv)   O

    backward, mxfp8 (32 x 32 tiles)
      k payload           [b][h][128 tokens][dk]                b h 128 dk      S, dQ = dS K
      v payload           [b][h][128 tokens][dv]                b h 128 dv      dP = dO V^T
      k scales along d    [b][h][n(dk) atoms: token x dk/32]    b h 512 n(dk)   S
      k scales along seq  [b][h][n(dk) atoms: dk x 4]           b h 512 n(dk)   dQ
      v scales along d    [b][h][n(dv) atoms: token x dv/32]    b h 512 n(dv)   dP

    backward, mxfp8-1x32: as above, with a second K payload, for dQ, after the first:
      k payload           [b][h][dk][128 tokens]                b h 128 dk      dQ

So a payload lies with the contracted axis contiguous ("K-major"): what TMA loads and both tcgen05
and the FP8 wgmma of Hopper (which has no other way) read without a transpose. The one exception is
K for dQ on tiles: the same bytes are read transposed, which tcgen05 can for 8-bit operands. Tensor
maps over a section have the dimensions (contiguous axis, other axis, head and batch row, record),
the last with the record's size as its stride; TMA swizzles on the way in.

Padding (tokens past the end of a chunk, scales outside a matrix) is payload 0 and scale 127.
Readers must not depend on it for tokens that no task names. Documents of 128 tokens or more share
no record with another one (:meth:`MxWire.split_at`), so none of their scales depends on it either.

Left out: dK/dV, which travel in the dtype that the kernel gives them in (:mod:`ringfa4.wire`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringfa4.fused import fused
from ringfa4.mask import Mask, document_cuts
from ringfa4.mx.formats import ALONG_D, ALONG_SEQ, ATOM, BLOCK, TILE, BlockShape, ScaleRounding
from ringfa4.mx.layout import Axis, atoms, from_atoms, operand_scales, to_atoms
from ringfa4.mx.quantise import dequantise, quantisable, quantise
from ringfa4.shard import RECORD, Shard
from ringfa4.wire import Direction, EncodedShard, Geometry, RecordMap, WireFormat

Which = Literal["q", "k", "v"]
"""Whose operand; Q never travels, but kernels keep it in records of its own."""

GROUP = 1 << 18
"""Elements encoded or decoded at a time: a few arrays of them stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand's sections: byte offsets in a record, and how the payload lies.

    ``along`` is the contracted axis, ``contiguous`` the one that varies fastest in the payload,
    ``d`` the head dimension. ``scales`` holds ``atoms`` atoms per batch row and head.
    """

    which: Which
    along: Axis
    contiguous: Axis
    d: int
    payload: int
    scales: int

    @property
    def scale_shape(self) -> tuple[int, int]:
        """(other axis, blocks along the contracted one) of one record, batch row and head."""
        return (RECORD, self.d // BLOCK) if self.along == "d" else (self.d, RECORD // BLOCK)

    @property
    def atoms(self) -> int:
        return atoms(*self.scale_shape)


@dataclass(frozen=True)
class RecordLayout:
    """The byte map of a record: the table of the module, computed."""

    geometry: Geometry
    operands: tuple[Operand, ...]
    nbytes: int

    @classmethod
    def of(cls, geometry: Geometry, tiles: bool, direction: Direction) -> RecordLayout:
        rows = geometry.batch * geometry.heads_kv
        sections: list[tuple[Which, Axis, Axis, bool]] = (
            [("k", "d", "d", True), ("v", "seq", "seq", True)]
            if direction == "forward"
            else [
                ("k", "d", "d", True),
                ("k", "seq", "d" if tiles else "seq", not tiles),
                ("v", "d", "d", True),
            ]
        )
        at, payloads = 0, []
        for which, _, _, own in sections:
            if own:
                payloads.append(at)
                at += rows * RECORD * (geometry.dk if which == "k" else geometry.dv)
            else:
                payloads.append(payloads[-1])
        operands = []
        for (which, along, contiguous, _), payload in zip(sections, payloads, strict=True):
            d = geometry.dk if which == "k" else geometry.dv
            operand = Operand(which, along, contiguous, d, payload, at)
            operands.append(operand)
            at += rows * operand.atoms * ATOM.nbytes
        assert at % 128 == 0, (geometry, direction)
        return cls(geometry, tuple(operands), at)

    @classmethod
    def of_queries(cls, batch: int, heads_q: int, dk: int, dtype: torch.dtype) -> RecordLayout:
        """Records of Q alone, for S = Q K^T: a payload and its scales along d, as those of K lie.

        Its geometry counts query heads as K/V heads.
        """
        scales = batch * heads_q * RECORD * dk
        operand = Operand("q", "d", "d", dk, 0, scales)
        nbytes = scales + batch * heads_q * operand.atoms * ATOM.nbytes
        return cls(Geometry(batch, heads_q, dk, dk, dtype), (operand,), nbytes)

    def operand(self, which: Which, along: Axis | None = None) -> Operand:
        """The operand of ``which`` contracted over ``along`` (None: the first there is)."""
        for operand in self.operands:
            if operand.which == which and along in (None, operand.along):
                return operand
        raise AssertionError(f"these records hold no {which} along {along}")

    def payloads(self) -> list[list[Operand]]:
        """The operands, together where they share a payload."""
        by_payload: dict[int, list[Operand]] = {}
        for operand in self.operands:
            by_payload.setdefault(operand.payload, []).append(operand)
        return list(by_payload.values())

    def payload(self, operand: Operand, records: Tensor) -> Tensor:
        """(records, b, h, 128, d) view of a payload in ``records`` (records, nbytes)."""
        g, d = self.geometry, operand.d
        stop = operand.payload + g.batch * g.heads_kv * RECORD * d
        inner = (RECORD, d) if operand.contiguous == "d" else (d, RECORD)
        view: Tensor = records[:, operand.payload : stop].unflatten(
            1, (g.batch, g.heads_kv, *inner)
        )
        return view if operand.contiguous == "d" else view.transpose(-2, -1)

    def scales(self, operand: Operand, records: Tensor) -> Tensor:
        """(records, b, h, atoms * 512) view of the scales in ``records``."""
        g, size = self.geometry, operand.atoms * ATOM.nbytes
        stop = operand.scales + g.batch * g.heads_kv * size
        view: Tensor = records[:, operand.scales : stop].unflatten(1, (g.batch, g.heads_kv, size))
        return view


class MxShard(EncodedShard):
    """Records in MXFP8. Kernels that read bytes use ``buffer``, ``map`` and ``layout``."""

    def __init__(self, wire: str, layout: RecordLayout, map: RecordMap, buffer: Tensor) -> None:
        super().__init__(wire, layout.geometry, map, buffer)
        self.layout = layout
        self._decoded: dict[tuple[Operand, torch.dtype], Tensor] = {}

    @property
    def records(self) -> Tensor:
        """(records, bytes of a record)."""
        size = self.map.records * self.layout.nbytes
        return self.buffer[:size].view(self.map.records, self.layout.nbytes)

    def keys_values(self, chunk: int, k0: int, k1: int) -> tuple[Tensor, Tensor]:
        dtype = self.geometry.dtype
        return self.operand("k", None, chunk, k0, k1, dtype), self.operand(
            "v", None, chunk, k0, k1, dtype
        )

    def operand(
        self, which: Which, along: Axis | None, chunk: int, k0: int, k1: int, dtype: torch.dtype
    ) -> Tensor:
        """De-quantised tokens [k0, k1) of ``chunk``, (b, k1 - k0, heads_kv, d), as contracted over
        ``along``.

        None: the first there is. All records are decoded at once, and kept as long as this object:
        chunks that lie beside each other do so decoded.
        """
        operand = self.layout.operand(which, along)
        start, stop = self.map.row(chunk, k0), self.map.row(chunk, k1)
        assert start <= stop, (chunk, k0, k1)
        key = operand, dtype
        if key not in self._decoded:
            self._decoded[key] = self._decode(operand, self.records, dtype)
        return self._decoded[key][:, :, start:stop].transpose(1, 2)

    def _decode(self, operand: Operand, records: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, heads_kv, 128 * records, d), contiguous."""
        g, count = self.geometry, len(records)
        out = torch.empty(
            g.batch, g.heads_kv, count, RECORD, operand.d, dtype=dtype, device=records.device
        )
        kernels = fused(records.device)
        if kernels is not None:
            kernels.decode(
                records,
                out.flatten(2, 3),
                contiguous=operand.contiguous,
                along=operand.along,
                payload=operand.payload,
                scales=operand.scales,
            )
            return out.flatten(2, 3)
        for a, b in _groups(count, g.batch * g.heads_kv * operand.d):
            payload = self.layout.payload(operand, records[a:b])
            scales = from_atoms(self.layout.scales(operand, records[a:b]), *operand.scale_shape)
            if operand.contiguous == "d":
                linear, shape = (
                    (scales, ALONG_D) if operand.along == "d" else (scales.mT, ALONG_SEQ)
                )
                values = dequantise(payload, linear, shape, dtype)
            else:  # in the order of the bytes, which is cheaper to look up
                values = dequantise(payload.mT, scales, ALONG_D, dtype).mT
            out[:, :, a:b] = values.permute(1, 2, 0, 3, 4)
        return out.flatten(2, 3)


def _groups(records: int, width: int) -> Iterator[tuple[int, int]]:
    """Runs of records of about GROUP elements; ``width`` elements a token."""
    step = max(1, GROUP // (RECORD * width))
    for a in range(0, records, step):
        yield a, min(a + step, records)


@dataclass(frozen=True)
class MxWire(WireFormat):
    """``tiles``: one scale per 32 x 32 tile serves both orientations; else 1 x 32 along each
    contraction.
    """

    name: str
    tiles: bool
    rounding: ScaleRounding = ScaleRounding.RCEIL

    def supports(self, geometry: Geometry) -> str | None:
        if not quantisable(geometry.dtype):
            return f"wire {self.name!r} takes bf16, fp16 or fp32, not {geometry.dtype}"
        if geometry.dk % BLOCK or geometry.dv % BLOCK:
            return (
                f"wire {self.name!r} needs head dimensions that are multiples of {BLOCK}: "
                f"dk={geometry.dk}, dv={geometry.dv}"
            )
        return None

    def split_at(self, mask: Mask) -> tuple[int, ...]:
        return document_cuts(mask)

    def layout(self, geometry: Geometry, direction: Direction) -> RecordLayout:
        return RecordLayout.of(geometry, self.tiles, direction)

    def record_bytes(self, geometry: Geometry, direction: Direction) -> int:
        return self.layout(geometry, direction).nbytes

    def shape(self, along: Axis) -> BlockShape:
        """The blocks of operands contracted over ``along``."""
        if self.tiles:
            return TILE
        return ALONG_D if along == "d" else ALONG_SEQ

    def encode(self, k: Tensor, v: Tensor, shard: Shard, out: Tensor, direction: Direction) -> None:
        geometry = Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)
        layout = self.layout(geometry, direction)
        records = out[: shard.records * layout.nbytes].view(-1, layout.nbytes)
        self.write(layout, "k", k, shard, records)
        self.write(layout, "v", v, shard, records)

    def write(
        self, layout: RecordLayout, which: Which, x: Tensor, shard: Shard, records: Tensor
    ) -> None:
        """Encode the local tokens x (b, s, h, d) into their part of ``records`` (n, nbytes)."""
        kernels = fused(x.device)
        rows = layout.geometry.batch * layout.geometry.heads_kv
        for c, chunk in enumerate(shard.chunks):
            base, offset = shard.record_base[c], shard.offsets[c]
            if kernels is not None:
                tokens = x[:, offset : offset + chunk.count]
                here = records[base : base + chunk.records]
                for operands in layout.payloads():
                    if operands[0].which == which:
                        self._write_fused(kernels, operands, tokens, here)
                continue
            for a, b in _groups(chunk.records, rows * x.shape[-1]):
                tokens = x[:, offset + a * RECORD : offset + min(b * RECORD, chunk.count)]
                self._write(layout, which, tokens, records[base + a : base + b])

    def _write_fused(
        self, kernels: ModuleType, operands: Sequence[Operand], x: Tensor, records: Tensor
    ) -> None:
        """Encode x (b, n, h, d) into the payload that ``operands`` share, and all their scales: one
        pass.
        """
        shape = self.shape(operands[0].along)
        scales = {operand.along: operand.scales for operand in operands}
        kernels.encode(
            x,
            records,
            block=(shape.rows, shape.cols),
            contiguous=operands[0].contiguous,
            payload=operands[0].payload,
            scales_d=scales.get("d"),
            scales_seq=scales.get("seq"),
            floor=self.rounding is ScaleRounding.FLOOR,
        )

    def _write(self, layout: RecordLayout, which: Which, x: Tensor, records: Tensor) -> None:
        """Quantise x (b, n, h, d) into ``records``; n falls short of them by the padding."""
        missing = len(records) * RECORD - x.shape[1]
        if missing:
            x = pad(x, (0, 0, 0, 0, 0, missing))
        x = x.unflatten(1, (-1, RECORD)).permute(1, 0, 3, 2, 4)
        done = -1
        for operand in layout.operands:
            if operand.which != which:
                continue
            shape = self.shape(operand.along)
            if operand.payload != done:
                coded, done = quantise(x, shape, self.rounding), operand.payload
                layout.payload(operand, records).copy_(coded.payload)
            scales = to_atoms(operand_scales(coded.scales, shape, operand.along))
            layout.scales(operand, records).copy_(scales)

    def view(
        self, geometry: Geometry, map: RecordMap, buffer: Tensor, direction: Direction
    ) -> MxShard:
        return MxShard(self.name, self.layout(geometry, direction), map, buffer)


MXFP8 = MxWire("mxfp8", tiles=True)
MXFP8_1X32 = MxWire("mxfp8-1x32", tiles=False)
