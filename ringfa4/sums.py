"""Sums of parts that come in ranges of rows: in the order given, in fp32 (fp64 for fp64).

    dQ        <- sum over steps t, rows of the local queries
    dK, dV    <- own part + sum over contributions in plan order, rows of records

A row is assigned by what reaches it first and added to after that (:mod:`ringfa4.written`); nothing
is allocated or initialised before. With the fused kernels (:mod:`ringfa4.fused`) parts wait until
there are four and are added in one pass: 2 bytes of memory an element and part beside the sum's 8,
in place of 10 (bf16). The last pass rounds, so a sum of few parts never lies in memory in fp32.
Several at once give the bits of one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.fused import assign, fused
from ringfa4.written import Written, claims, claims_of


@dataclass(frozen=True)
class Part:
    """Not added yet: x (b', n, h, d) to ``rows`` of one ``batch`` row or, for None, of all."""

    batch: int | None
    rows: slice
    x: Tensor

    def of(self, part: slice, start: int, stop: int) -> Tensor:
        """Its batch rows ``part``, of rows inside ``rows``."""
        return part_of(self.x, part, start - self.rows.start, stop - self.rows.start)


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of some batch rows, all of which got the same parts.

    ``base`` is the sum of what was added before, None where that is nothing; ``parts`` are to be
    added to it, in order.
    """

    batch: slice
    start: int
    stop: int
    base: Tensor | None
    parts: list[Tensor]


class RowSum:
    """sum (b, s, h, d) of parts.

    ``room``: most bytes of parts that wait in memory for one another, None for as many as one pass
    adds. Parts must stay as they are until :meth:`settle`, or until what :meth:`result` or
    :meth:`rest` gave has been used.
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        heads: int,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        room: int | None = None,
    ) -> None:
        self.room = room
        self.shape = batch, seq, heads, width
        self.device, self.dtype = device, dtype
        self._total: Tensor | None = None
        self._written = Written(batch)
        self._waiting: list[Part] = []

    @property
    def total(self) -> Tensor:
        """All that was added, where something was; undefined elsewhere."""
        self.settle()
        return self._sum()

    def _sum(self) -> Tensor:
        if self._total is None:
            self._total = torch.empty(self.shape, device=self.device, dtype=self.dtype)
        return self._total

    def add(self, batch: int | None, rows: slice, x: Tensor) -> None:
        """Add x (b', n, h, d), in any dtype, to ``rows`` of ``batch`` (None: of all)."""
        kernels = fused(self.device)
        waits = kernels is not None and kernels.joins(x, self.dtype)
        if self._waiting and not (waits and self._goes_along(batch, x)):
            self.settle()
        if kernels is None or not waits:
            for into, part, a, b, seen in self._claims(batch, rows.start, rows.stop):
                new = part_of(x, part, a - rows.start, b - rows.start)
                add_into(part_of(self._sum(), into, a, b), new, seen)
            return
        self._waiting.append(Part(batch, rows, x))
        if len(self._waiting) == kernels.PARTIALS or not self._has_room():
            self.settle()

    def _has_room(self) -> bool:
        return self.room is None or sum(part.x.nbytes for part in self._waiting) <= self.room

    def adopt(self, total: Tensor) -> None:
        """``total`` (b, s, h, d), in the dtype of the sum, is what was added so far, and gets what
        is added from now on.
        """
        assert self._total is None and not self._waiting, "something was added before"
        assert total.shape == self.shape and total.dtype == self.dtype, (total.shape, total.dtype)
        self._total = total
        for _ in self._claims(None, 0, self.shape[1]):
            pass

    def _goes_along(self, batch: int | None, x: Tensor) -> bool:
        first = self._waiting[0]
        return first.batch == batch and first.x.dtype == x.dtype

    def _claims(
        self, batch: int | None, start: int, stop: int
    ) -> Iterator[tuple[slice, slice, int, int, bool]]:
        return claims(self._written, batch, self.shape[0], start, stop)

    def settle(self) -> None:
        """Add what waits: one pass over each range of rows that has the same parts."""
        if not self._waiting:
            return
        total = self._sum()
        for piece in self._pieces():
            put(part_of(total, piece.batch, piece.start, piece.stop), piece.base, piece.parts)
        self._waiting = []

    def _pieces(self, whole: tuple[int, int] | None = None) -> Iterator[Piece]:
        """The rows that something waits for, or all of ``whole``."""
        batch = self.shape[0]
        pieces = claims_of(self._written, batch, self._waiting, whole)
        for into, part, a, b, seen, here in pieces:
            base = part_of(self._sum(), into, a, b) if seen else None
            yield Piece(into, a, b, base, [p.of(part, a, b) for p in here])

    def rest(self, start: int, stop: int) -> Iterator[Piece]:
        """What makes up rows [start, stop), each row once: for a last pass by the caller, who then
        calls :meth:`close`. Parts of single batch rows are settled before.
        """
        if any(part.batch is not None for part in self._waiting):
            self.settle()
        return self._pieces((start, stop))

    def close(self) -> None:
        """What :meth:`rest` gave has been used."""
        self._waiting = []

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum in ``dtype``, zero where nothing was added. The last call on a sum."""
        batch, seq, _, _ = self.shape
        if self._total is None and len(self._waiting) == 1:
            only = self._waiting[0]
            if only.x.shape == self.shape and only.x.dtype == dtype and only.x.is_contiguous():
                return only.x
        if dtype == self.dtype or not self.rounds_at_once(dtype):
            self.settle()
            for i in range(batch):
                for a, b in self._written.gaps(i, 0, seq):
                    self._sum()[i, a:b] = 0
            return self._sum().to(dtype)
        out = torch.empty(self.shape, device=self.device, dtype=dtype)
        for piece in self.rest(0, seq):
            put(part_of(out, piece.batch, piece.start, piece.stop), piece.base, piece.parts)
        self.close()
        return out

    def rounds_at_once(self, dtype: torch.dtype) -> bool:
        """Whether something waits that the last pass can add and round to ``dtype``."""
        kernels = fused(self.device)
        return bool(self._waiting) and kernels is not None and kernels.rounds(dtype)


def put(into: Tensor, base: Tensor | None, parts: list[Tensor]) -> None:
    """base + parts into ``into`` (b, n, h, d), rounded; zero of nothing. With parts: by the fused
    kernel, where those are that :class:`RowSum` lets wait.
    """
    if not parts:
        if base is None:
            into.zero_()
        else:
            assign(into, base)
        return
    kernels = fused(into.device)
    assert kernels is not None, "parts wait for a fused kernel only"
    kernels.add(into, base, parts)


def part_of(x: Tensor, batch: slice, start: int, stop: int) -> Tensor:
    """Some rows of x (b, n, h, d). All of them are x itself: a slice costs the host 2 us."""
    whole = (batch.start, batch.stop, start, stop) == (0, x.shape[0], 0, x.shape[1])
    return x if whole else x[batch, start:stop]


def add_into(into: Tensor, value: Tensor, seen: bool = True) -> None:
    """Add ``value`` (b, n, h, d) into a sum, or assign it where nothing was written yet."""
    if not seen:
        assign(into, value)
        return
    kernels = fused(into.device)
    if kernels is not None and kernels.adds(into, into, [value]):
        kernels.add(into, into, [value])
    else:
        into.add_(value)
