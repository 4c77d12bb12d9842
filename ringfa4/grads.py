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

from ringfa4.fused import assign, fused
from ringfa4.wire import PLAIN, PlainShard
from ringfa4.written import Written, claims


class Grads:
    """Gradient sums: dQ of the local queries for a call, dK/dV of an owner's records for a step.

    dq (b, s, heads_q, dk) in fp32, or fp64 for fp64 inputs. dK/dV in the layout of plain wires
    (:mod:`ringfa4.wire`) over the step's record map, as sums or, to travel, in a narrower dtype:

        rows that get one part, in that dtype    are that part, to the bit
        rows that get more, or a wider one       are summed like dq, and rounded when the step ends
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
    ) -> None:
        self.dq = torch.empty(batch, seq, heads, dk, device=device, dtype=dtype)
        self._dq_written = Written(batch)
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
        """Add dq (b', n, heads_q, dk) into the local rows ``rows``."""
        for into, part, a, b, seen in claims(
            self._dq_written, batch, self.dq.shape[0], rows.start, rows.stop
        ):
            new = _part(dq, part, a - rows.start, b - rows.start)
            add_into(_part(self.dq, into, a, b), new, seen)

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
            new = (_part(x, every, at, at + count) for x in (dk, dv))
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
        dk, dv = (_part(x, into, 0, count) for x in kv.packed_rows(row, count))
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
            new = tuple(_part(x, part, a - row, b - row) for x in (dk, dv))
            if own != self.dq.dtype and (seen or not exact):
                self._add_wide(into, a, new, seen)
                continue
            for sums, x in zip(kv.packed_rows(a, b - a), new, strict=True):
                add_into(_part(sums, into, 0, b - a), x, seen)

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
                to = _part(sums, into, 0, b - a)
                if seen and not summed:
                    add_into(to, _part(one, into, 0, b - a), seen=False)
                add_into(to, _part(more, part, a - row, b - row), seen)

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

    def finish(self) -> Tensor:
        """dq, zero where no key reached the row."""
        for i in range(self.dq.shape[0]):
            for a, b in self._dq_written.gaps(i, 0, self.dq.shape[1]):
                self.dq[i, a:b] = 0
        return self.dq


def _part(x: Tensor, batch: slice, start: int, stop: int) -> Tensor:
    """Some rows of x (b, n, h, d). All of them are x itself: a slice costs the host 2 us."""
    whole = (batch.start, batch.stop, start, stop) == (0, x.shape[0], 0, x.shape[1])
    return x if whole else x[batch, start:stop]


def add_into(into: Tensor, value: Tensor, seen: bool = True) -> None:
    """Add ``value`` (b, n, h, d) into a sum, or assign it where nothing was written yet."""
    if not seen:
        assign(into, value)
        return
    kernels = fused(into.device)
    if kernels is not None and kernels.accumulates(into, value, first=False):
        kernels.accumulate(into, value, first=False)
    else:
        into.add_(value)
