"""Where block kernels add gradients: sums in fp32, parts that travel in the kernel's own dtype.

    dQ of the local queries       <- sum over the steps of a call
    dK/dV of a step's records     <- sum over the step's tasks, in the place it is sent from

A row is assigned by what reaches it first and added to after that (:mod:`ringfa4.written`). What is
assigned to rows that travel may be written there by the kernel itself (:meth:`Grads.place_dkv`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringfa4.sums import RowSum, add_into, part_of
from ringfa4.wire import PLAIN, PlainShard
from ringfa4.written import Written, claims

ROOM = 1 << 29
"""Bytes of dQ's parts that may wait for one another. Beyond it parts are so long that passes over
their sum are nothing beside what makes them, and memory is what counts.
"""


class Grads:
    """Gradient sums: dQ of the local queries for a call, dK/dV of an owner's records for a step.

    dQ (b, s, heads_q, dk) in fp32, or fp64 for fp64 inputs. dK/dV in the layout of plain wires
    (:mod:`ringfa4.wire`) over the step's record map, as sums or, to travel, in a narrower dtype:

        rows that get one part, in that dtype    are that part, to the bit
        rows that get more, or a wider one       are summed like dq, and rounded when the step ends

    ``steps``: how many of the call's give dQ, if known. The parts of two take no more memory than
    their sum and wait for each other in any case.
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        heads: int,
        dk: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        steps: int | None = None,
    ) -> None:
        room = ROOM if steps is None or steps > 2 else None
        self.dq = RowSum(batch, seq, heads, dk, device=device, dtype=dtype, room=room)
        self._kv: PlainShard | None = None
        self._kv_written = Written(batch)
        """Packed rows of the step's records."""
        self._wide: PlainShard | None = None
        self._wide_written = Written(batch)
        """Those of them whose sum is in ``_wide`` and not, or not yet, in ``_kv``."""
        self._spare = torch.empty(0, dtype=torch.uint8, device=device)
        """Memory of ``_wide``, kept from step to step."""

    def begin(self, kv: PlainShard) -> None:
        """dK/dV of the coming tasks go to ``kv``, whose contents are undefined."""
        self._kv, self._wide = kv, None
        self._kv_written, self._wide_written = (Written(kv.geometry.batch) for _ in range(2))

    def add_dq(self, batch: int | None, rows: slice, dq: Tensor) -> None:
        """Add dq (b', n, heads_q, dk) into the local rows ``rows``. It must stay as it is until the
        call has finished: with the fused kernels it waits (:mod:`ringfa4.sums`).
        """
        self.dq.add(batch, rows, dq)

    def add_dkv(
        self, batch: int | None, chunk: int, k0: int, k1: int, dk: Tensor, dv: Tensor
    ) -> None:
        """Add dk, dv (b', n, heads_kv, dk or dv) into tokens [k0, k1) of ``chunk``."""
        self.add_dkv_of(batch, [(chunk, k0, k1)], dk, dv)

    def add_dkv_of(
        self, batch: int | None, keys: Sequence[tuple[int, int, int]], dk: Tensor, dv: Tensor
    ) -> None:
        """As :meth:`add_dkv` for several ranges (chunk, k0, k1) that follow one another in dk and
        dv. Those that do so in the records as well are added at once.
        """
        rows = self._runs(keys)
        at, every = 0, slice(0, dk.shape[0])
        for row, count in rows:
            new = (part_of(x, every, at, at + count) for x in (dk, dv))
            self._add_rows(batch, row, *new)
            at += count

    def place_dkv(
        self, batch: int | None, keys: Sequence[tuple[int, int, int]], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Where a kernel that has dK and dV of these ranges in ``dtype`` may write them itself, in
        place of :meth:`add_dkv_of`: dk, dv (b', n, heads_kv, dk or dv), strided, undefined.

        None where that is not the same: rows that do not follow one another, that hold something
        already, or that are not in that dtype. Who is given a place must fill it.
        """
        kv, runs = self._kv, self._runs(keys)
        assert kv is not None, "begin() comes first"
        if len(runs) != 1 or kv.geometry.dtype != dtype:
            return None
        (row, count), size = runs[0], kv.geometry.batch
        each = range(size) if batch is None else (batch,)
        if any(self._kv_written.gaps(i, row, row + count) != [(row, row + count)] for i in each):
            return None
        for i in each:
            self._kv_written.claim(i, row, row + count)
        into = slice(each[0], each[-1] + 1)
        dk, dv = (part_of(x, into, 0, count) for x in kv.packed_rows(row, count))
        return dk, dv

    def _runs(self, keys: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Packed rows of the ranges (chunk, k0, k1): (first, how many), neighbours joined."""
        assert self._kv is not None, "begin() comes first"
        rows: list[tuple[int, int]] = []
        for chunk, k0, k1 in keys:
            row, count = self._kv.map.row(chunk, k0), k1 - k0
            if rows and sum(rows[-1]) == row:
                row, count = rows[-1][0], rows.pop()[1] + count
            rows.append((row, count))
        return rows

    def _add_rows(self, batch: int | None, row: int, dk: Tensor, dv: Tensor) -> None:
        """Add dk, dv into packed rows from ``row`` on."""
        kv = self._kv
        assert kv is not None, "begin() comes first"
        size, own, stop = kv.geometry.batch, kv.geometry.dtype, row + dk.shape[1]
        exact = own == dk.dtype == dv.dtype
        for into, part, a, b, seen in claims(self._kv_written, batch, size, row, stop):
            new = tuple(part_of(x, part, a - row, b - row) for x in (dk, dv))
            if own != self.dq.dtype and (seen or not exact):
                self._add_wide(into, a, new, seen)
                continue
            for sums, x in zip(kv.packed_rows(a, b - a), new, strict=True):
                add_into(part_of(sums, into, 0, b - a), x, seen)

    def _add_wide(self, into: slice, row: int, new: Sequence[Tensor], seen: bool) -> None:
        """Add parts to sums that the step's end rounds; ``seen``: to what these rows hold already,
        which may still be one part and exact.
        """
        kv, wide = self._kv, self._wide_shard()
        assert kv is not None
        size, stop = kv.geometry.batch, row + new[0].shape[1]
        batch = None if into == slice(0, size) else into.start
        pieces = claims(self._wide_written, batch, size, row, stop)
        for into, part, a, b, summed in pieces:
            rows = (shard.packed_rows(a, b - a) for shard in (wide, kv))
            for sums, one, more in zip(*rows, new, strict=True):
                to = part_of(sums, into, 0, b - a)
                if seen and not summed:
                    add_into(to, part_of(one, into, 0, b - a), seen=False)
                add_into(to, part_of(more, part, a - row, b - row), seen)

    def _wide_shard(self) -> PlainShard:
        """The step's records in the dtype of sums; undefined at first."""
        if self._wide is None:
            assert self._kv is not None, "begin() comes first"
            geometry, map, wire = self._kv.geometry, self._kv.map, PLAIN[self.dq.dtype]
            size = map.records * wire.record_bytes(geometry, "backward")
            if self._spare.numel() < size:
                self._spare = torch.empty(size, dtype=torch.uint8, device=self.dq.device)
            self._wide = wire.view(geometry, map, self._spare, "backward")
        return self._wide

    def end(self) -> None:
        """Round what was summed beside; zero the tokens that no task of this step reached. Padding
        rows stay undefined.
        """
        assert self._kv is not None, "begin() comes first"
        for i in range(self._kv.geometry.batch):
            for a, b in self._wide_written.spans(i):
                rows = (shard.packed_rows(a, b - a) for shard in (self._kv, self._wide_shard()))
                for one, sums in zip(*rows, strict=True):
                    one[i].copy_(sums[i])
        for chunk, start, stop in self._kv.map.tokens():
            row = self._kv.map.row(chunk, start)
            for i in range(self._kv.geometry.batch):
                for a, b in self._kv_written.gaps(i, row, row + stop - start):
                    for sums in self._kv.packed_rows(a, b - a):
                        sums[i].zero_()
        self._kv = None

    def finish(self, dtype: torch.dtype | None = None) -> Tensor:
        """dq in ``dtype``, that of sums unless given; zero where no key reached the row."""
        return self.dq.result(dtype or self.dq.dtype)
