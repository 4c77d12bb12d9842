"""What one launch of the SM100 kernel walks: tables of items and segments, and a mode for each row.

    item      neighbouring records of queries of one batch row: two (256 rows) at most, or four
              where pairs of thread blocks compute a work
    segment   one band between the item's chunk and one chunk of keys, as chunk-local coordinates
    mode      of a row of the state: 0 leave it, 1 write it (unread), 2 merge into it

An item's pairs are those of its segments whose query is one of its rows. Invariants, tested against
every pair by itself: each allowed pair of the tasks is in exactly one segment of exactly one item;
a record of queries is in at most one item of its batch row, so that one work item owns a row's
state; segments keep the order of the tasks; a row's mode is not 0 exactly when it sees a key. So no
row is touched that sees nothing, and no row needs an identity.

Tables are int32, one line for each item and segment, on the CPU:

    items     batch, q_record, tiles, row, first, rows, seg0, seg1
    segments  record, q0, q1, k0, k1, lo, hi, 0

``q_record`` counts the records of the local queries, chunk after chunk; ``row`` is the item's first
row in the local tensors, ``first`` the same within its chunk, ``rows`` how many exist; ``tiles``,
1 or 2, how many each of ``ctas`` thread blocks computes: tile t of thread block r is record
``q_record`` + ``ctas`` t + r, or nothing where that lies behind the rows. A pair (i, j) of a
segment is allowed where q0 <= i < q1, k0 <= j < k1, lo <= j - i <= hi (unbounded: -+UNBOUNDED).
Token j lies in row j % 128 of packed record ``record`` + j // 128; ``record`` may be negative, when
the chunk's first records were not fetched.

Items come longest first (most pairs of records): a launch hands them out in order, so the shortest
ones fill the gaps at the end. Left out: cutting a long item along its keys, which would need a
second pass over the state; a chunk of queries has an item for each 256 of them (of a pair: 512) and
head, many more than a chip has multiprocessors wherever a ring is worth its while.

Bands of one pair of chunks are disjoint, and a tile that two of them touch is visited twice: exact,
and dear only for documents of a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ringfa4.kernels.sm100.specs import ITEM_WORDS, LEAVE, MERGE, SEGMENT_WORDS, WRITE
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import RECORD, Shard
from ringfa4.wire import RecordMap
from ringfa4.written import Written

UNBOUNDED = 1 << 30
"""Stands for no bound; chunks are shorter, so that j - i and i + hi stay within 32 bits."""

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class WorkList:
    """The tables of some tasks; ``seen[i]`` are the local rows of batch row i that see a key."""

    items: Tensor
    segments: Tensor
    seen: tuple[Spans, ...]

    def claim(self, written: Written, rows: int) -> Tensor:
        """Claims the rows that see a key; uint8 (batch, ``rows``), the mode of each local row."""
        modes = np.full((len(self.seen), rows), LEAVE, dtype=np.uint8)
        for batch, spans in enumerate(self.seen):
            for start, stop in spans:
                for a, b, before in written.claim(batch, start, stop):
                    modes[batch, a:b] = MERGE if before else WRITE
        return torch.from_numpy(modes)


def work_list(
    tasks: Sequence[Task], queries: Shard, keys: RecordMap, batch: int, ctas: int = 1
) -> WorkList:
    """The tables of ``tasks``; those of a plan's step are kept, since every layer asks again.

    ``queries`` maps chunks to local rows, ``keys`` says where records of keys are; ``batch`` is the
    number of batch rows, all of which a task without one is for; ``ctas`` thread blocks (1 or 2)
    compute a work.
    """
    if isinstance(tasks, tuple):
        return _kept(_Same(tasks), queries, keys, batch, ctas)
    return _build(tasks, queries, keys, batch, ctas)


class _Same:
    """A tuple of tasks as a key that is equal to itself only: hashing it does not visit them."""

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks = tasks

    def __hash__(self) -> int:
        return id(self.tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tasks is other.tasks


@lru_cache(maxsize=256)
def _kept(tasks: _Same, queries: Shard, keys: RecordMap, batch: int, ctas: int) -> WorkList:
    return _build(tasks.tasks, queries, keys, batch, ctas)


def _build(
    tasks: Sequence[Task], queries: Shard, keys: RecordMap, batch: int, ctas: int
) -> WorkList:
    tables = _Tables(queries, keys, ctas)
    shared = [task for task in tasks if task.batch is None]
    own: dict[int, list[Task]] = {task.batch: [] for task in tasks if task.batch is not None}
    assert all(0 <= row < batch for row in own), (sorted(own), batch)
    for task in tasks if own else ():
        for row in own if task.batch is None else (task.batch,):
            own[row].append(task)
    for_all = tables.rows_of(shared) if len(own) < batch else _Rows()
    lines: list[tuple[int, ...]] = []
    seen: list[Spans] = []
    for row in range(batch):
        found = tables.rows_of(own[row]) if row in own else for_all
        lines += [(cost, row, *item) for cost, item in found.items]
        seen.append(found.seen)
    lines.sort(key=lambda line: -line[0])  # stable: neighbours stay neighbours and share their keys
    return WorkList(
        _table([line[1:] for line in lines], ITEM_WORDS),
        _table(tables.segments, SEGMENT_WORDS),
        tuple(seen),
    )


def _table(lines: Sequence[tuple[int, ...]], words: int) -> Tensor:
    return torch.tensor(lines, dtype=torch.int32).view(len(lines), words)


@dataclass(frozen=True)
class _Rows:
    """Items (visited pairs of records, columns from q_record on) and rows of one batch row."""

    items: tuple[tuple[int, tuple[int, ...]], ...] = ()
    seen: Spans = ()


class _Tables:
    """The table of segments as it grows, and where lists of segments are in it."""

    def __init__(self, queries: Shard, keys: RecordMap, ctas: int) -> None:
        self._queries, self._keys, self._ctas = queries, keys, ctas
        self.segments: list[tuple[int, ...]] = []
        self._lists: dict[tuple[int, ...], tuple[int, int]] = {}

    def rows_of(self, tasks: Iterable[Task]) -> _Rows:
        """Items and rows of the tasks of one batch row, chunk by chunk."""
        by_chunk: dict[int, list[Task]] = {}
        for task in tasks:
            by_chunk.setdefault(task.q_chunk, []).append(task)
        items: list[tuple[int, tuple[int, ...]]] = []
        seen: list[tuple[int, int]] = []
        for chunk, here in sorted(by_chunk.items()):
            bands = self._add(here)
            items += self._items(chunk, bands)
            offset = self._queries.offsets[chunk]
            seen += [(offset + band.q0, offset + band.q1) for band in bands.values()]
        return _Rows(tuple(items), _union(seen))

    def _add(self, tasks: Iterable[Task]) -> dict[int, Band]:
        """Append the segments of tasks; their bands by number, in the order of the tasks."""
        bands: dict[int, Band] = {}
        for task in tasks:
            first, here = self._keys.packed(task.k_chunk)
            record = first - here.start
            for whole in task.bands:
                band = whole.trimmed()
                if band is None:
                    continue  # it holds no pair
                inside = here.start * RECORD <= band.k0 and band.k1 <= here.stop * RECORD
                assert inside, f"{band} of chunk {task.k_chunk} needs more than {here}"
                assert max(band.q1, band.k1) < UNBOUNDED, band
                lo = -UNBOUNDED if band.lo is None else band.lo
                hi = UNBOUNDED if band.hi is None else band.hi
                bands[len(self.segments)] = band
                self.segments.append((record, band.q0, band.q1, band.k0, band.k1, lo, hi, 0))
        return bands

    def _items(self, chunk: int, bands: dict[int, Band]) -> list[tuple[int, tuple[int, ...]]]:
        """As many neighbouring records that see keys as an item takes, from the left."""
        touching: dict[int, list[int]] = {}
        for number, band in bands.items():
            for record in range(band.q0 // RECORD, (band.q1 - 1) // RECORD + 1):
                touching.setdefault(record, []).append(number)
        count, offset = self._queries.chunks[chunk].count, self._queries.offsets[chunk]
        base, stop = self._queries.record_base[chunk], 0
        items: list[tuple[int, tuple[int, ...]]] = []
        for record in sorted(touching):
            if record < stop:
                continue  # of the item before
            numbers, stop = touching[record], record + 1
            while stop < record + 2 * self._ctas and stop in touching:
                numbers = sorted({*numbers, *touching[stop]})
                stop += 1
            first, tiles = record * RECORD, -(-(stop - record) // self._ctas)
            rows = min(stop * RECORD, count) - first
            visits = sum(_records(bands[n], first, first + rows) for n in numbers)
            where = self._place(numbers)
            item = (base + record, tiles, offset + first, first, rows, *where)
            items.append((tiles * visits, item))
        return items

    def _place(self, numbers: list[int]) -> tuple[int, int]:
        """[start, stop) of the table with these segments in this order: as they are if they follow
        one another, else copied once to its end.
        """
        start, stop = numbers[0], numbers[-1] + 1
        if stop - start == len(numbers):
            return start, stop
        key = tuple(numbers)
        if key not in self._lists:
            start = len(self.segments)
            self.segments += [self.segments[n] for n in numbers]
            self._lists[key] = start, len(self.segments)
        return self._lists[key]


def _records(band: Band, i0: int, i1: int) -> int:
    """Records of keys that rows [i0, i1) of the chunk see in a trimmed band."""
    start, stop = max(band.q0, i0), min(band.q1, i1)
    k0 = band.k0 if band.lo is None else max(band.k0, start + band.lo)
    k1 = band.k1 if band.hi is None else min(band.k1, stop + band.hi)
    assert start < stop and k0 < k1, (band, i0, i1)
    return (k1 - 1) // RECORD - k0 // RECORD + 1


def _union(spans: list[tuple[int, int]]) -> Spans:
    """Sorted, disjoint, with gaps between: half-open intervals that hold what ``spans`` do."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return tuple(union)
