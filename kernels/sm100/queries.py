"""Q as the SM100 kernel reads it: MXFP8 records, as those of K on the wire.

    record = [b][heads_q][128 rows][dk] payload, [b][heads_q][n(dk)] scale atoms along d

Each chunk of the local queries starts a record, padded with payload 0 and scale 127, so that record
and tile are one; all sections are multiples of 128 bytes. Encoding is the wire's own
(:meth:`ringfa4.mx.wire.MxWire.write`): one pass of the fused kernel on a GPU, PyTorch's operators
elsewhere, the same bytes from both. Blocks are the wire's too: 32 x 32 tiles on "mxfp8", so that a
backward pass may read the same payload along the rows, 1 x 32 on "mxfp8-1x32".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.kernels.interface import Queries
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, RecordLayout
from ringfa4.shard import Shard

WIRES = {wire.name: wire for wire in (MXFP8, MXFP8_1X32)}
"""The wires whose records the kernel reads; both lay out forward records alike."""


@dataclass(frozen=True)
class QueryRecords:
    """``records`` (n, bytes of a record) uint8; offsets of payload and scales in a record."""

    records: Tensor
    payload: int
    scales: int


class Sm100Queries(Queries):
    """Q (b, s, heads_q, dk), any strides; its records are made once a call, for the call's wire."""

    def __init__(self, q: Tensor, shard: Shard) -> None:
        super().__init__(q, shard)
        self._records: dict[str, QueryRecords] = {}

    def records(self, wire: str) -> QueryRecords:
        """Q in the blocks of ``wire``, a name of WIRES; encoded by the first step that asks."""
        if wire not in self._records:
            batch, _, heads, dk = self.q.shape
            layout = RecordLayout.of_queries(batch, heads, dk, self.q.dtype)
            size = self.shard.records, layout.nbytes
            records = torch.empty(size, dtype=torch.uint8, device=self.q.device)
            WIRES[wire].write(layout, "q", self.q, self.shard, records)
            (operand,) = layout.operands
            self._records[wire] = QueryRecords(records, operand.payload, operand.scales)
        return self._records[wire]
