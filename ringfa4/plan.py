"""Who computes what, when, and which records move for it.

    step t of rank r:  owner = (r - t) mod P,  tasks = mask on (q chunks of r) x (k chunks of owner)

A plan is data: frozen, pure Python, no torch. The executor, the simulator, the plan printer and the
tests read the same object; each rank materialises only its own view. Reading owner (r - t) rather
than (r + t) matters under causal masks: with empty steps skipped, the other direction makes all
ranks read rank 0 first.

Coordinates inside a task are chunk-local: row a of q chunk c is token ``q_shard.offsets[c] + a`` of
the rank's q, and key b of k chunk d is token b of that chunk on the owner. Bands are rewritten
accordingly: a = (i - start) / stride.

Invariants (tested as properties): over all ranks and steps every allowed (i, j) is in exactly one
band of one task; the sources of a step are a partial permutation of the ranks (nobody is read twice
in a step); a step without tasks moves nothing; a step moves no record that no task of it needs,
except between the first and the last needed record of a chunk.

Left out on purpose: how many bytes a record has (the wire knows) and how long anything takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from ringfa4.mask import Band, Intervals, Mask
from ringfa4.shard import RECORD, Sharding


@dataclass(frozen=True, slots=True)
class Task:
    """All pairs between one q chunk and one k chunk, for one batch row (None: every row).

    ``q`` and ``k`` are the half-open bounding ranges of ``bands``, all in chunk-local coordinates.
    A kernel computes each tile once, under the union of the (disjoint) bands.
    """

    batch: int | None
    q_chunk: int
    k_chunk: int
    q: tuple[int, int]
    k: tuple[int, int]
    bands: tuple[Band, ...]

    @property
    def area(self) -> int:
        return sum(band.area for band in self.bands)


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Records [start, stop) of chunk ``chunk`` of the owner's shard."""

    chunk: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """Step ``index`` of one rank: K/V of ``owner``, read from ``source``.

    Owner and source differ only when a topology relays. ``ranges`` are the records the tasks need,
    at most one range a chunk, in chunk order; empty without tasks. They arrive packed: range after
    range, nothing between.
    """

    index: int
    owner: int
    source: int
    ranges: tuple[RecordRange, ...]
    tasks: tuple[Task, ...]

    @property
    def records(self) -> int:
        return sum(len(r) for r in self.ranges)

    @property
    def area(self) -> int:
        """Pairs summed over the listed batch rows (a shared row counts once)."""
        return sum(task.area for task in self.tasks)


class Tally(NamedTuple):
    """A step in numbers: pairs, tasks, records read, and query rows (of each q chunk and mask row,
    the range that its tasks span).
    """

    area: int
    tasks: int
    records: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """The work of all ranks; :meth:`step` materialises one rank's step when asked.

    Wires that quantise groups of tokens want no record to hold two documents: the caller passes a
    ``k_sharding`` already cut there (``k_sharding.split(document_cuts(mask))``).

    Only :meth:`step` and :meth:`steps` build tasks and keep them; everything a rank asks about the
    others (:meth:`ranges`, :meth:`busy`, :meth:`areas`, :meth:`tally`) leaves no tasks behind.

    Raises ValueError when mask and shardings do not fit together.
    """

    mask: Mask
    q_sharding: Sharding
    k_sharding: Sharding
    _steps: dict[tuple[int, int], Step] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        mask, q, k = self.mask, self.q_sharding, self.k_sharding
        if q.world != k.world:
            raise ValueError(f"q is sharded over {q.world} ranks, k over {k.world}")
        if (q.seq, k.seq) != (mask.seq_q, mask.seq_k):
            raise ValueError(
                f"shardings of {q.seq} queries and {k.seq} keys do not fit "
                f"a mask of {mask.seq_q} x {mask.seq_k}"
            )
        if q.stride != k.stride and mask.features & {"lo", "hi"}:
            raise ValueError(
                f"mask {mask.name!r} bounds j - i, which needs q and k sharded with one stride: "
                f"q {q.name!r} has {q.stride}, k {k.name!r} has {k.stride}"
            )

    @property
    def world(self) -> int:
        return self.q_sharding.world

    def step(self, rank: int, index: int) -> Step:
        """Step ``index`` in [0, world) of ``rank``. Cached."""
        found = self._steps.get((rank, index))
        if found is None:
            found = self._steps[rank, index] = self._build(rank, index)
        return found

    def steps(self, rank: int) -> tuple[Step, ...]:
        """All steps of ``rank``, in order; the empty ones too, since peers count on the index."""
        return tuple(self.step(rank, t) for t in range(self.world))

    def owner(self, rank: int, index: int) -> int:
        """The rank whose K/V ``rank`` computes with in step ``index``."""
        if not (0 <= rank < self.world and 0 <= index < self.world):
            raise ValueError(f"{rank=} and {index=} must be within 0..{self.world - 1}")
        return (rank - index) % self.world

    def reader(self, rank: int, index: int) -> int:
        """The rank that reads from ``rank`` in step ``index`` (it may need no records)."""
        return (rank + index) % self.world

    def ranges(self, rank: int, index: int) -> tuple[RecordRange, ...]:
        """``step(rank, index).ranges`` without building tasks: for what peers read from a rank."""
        found = self._steps.get((rank, index))
        if found is not None:
            return found.ranges
        spans: dict[int, tuple[int, int]] = {}
        for _, _, k_chunk, band in self._pieces(rank, self.owner(rank, index)):
            k0, k1 = spans.get(k_chunk, (band.k0, band.k1))
            spans[k_chunk] = min(k0, band.k0), max(k1, band.k1)
        return _records(spans)

    def busy(self, rank: int, index: int) -> bool:
        """Whether the step has tasks; otherwise it moves nothing."""
        return next(self._pieces(rank, self.owner(rank, index)), None) is not None

    def contributions(self, owner: int) -> tuple[int, ...]:
        """The steps (from 1 on) in which dK/dV reach ``owner`` from its reader, in plan order."""
        return tuple(t for t in range(1, self.world) if self.busy(self.reader(owner, t), t))

    def areas(self, rank: int) -> tuple[int, ...]:
        """``step(rank, t).area`` for each t."""
        return tuple(
            sum(band.area for _, _, _, band in self._pieces(rank, self.owner(rank, t)))
            for t in range(self.world)
        )

    def tally(self, rank: int, index: int) -> Tally:
        """What ``step(rank, index)`` amounts to."""
        area, pairs, spans = 0, set[tuple[int, int, int]](), dict[int, tuple[int, int]]()
        rows: dict[tuple[int, int], tuple[int, int]] = {}
        for row, q_chunk, k_chunk, band in self._pieces(rank, self.owner(rank, index)):
            area += band.area
            pairs.add((row, q_chunk, k_chunk))
            k0, k1 = spans.get(k_chunk, (band.k0, band.k1))
            spans[k_chunk] = min(k0, band.k0), max(k1, band.k1)
            q0, q1 = rows.get((row, q_chunk), (band.q0, band.q1))
            rows[row, q_chunk] = min(q0, band.q0), max(q1, band.q1)
        records = sum(len(r) for r in _records(spans))
        return Tally(area, len(pairs), records, sum(q1 - q0 for q0, q1 in rows.values()))

    def work(self, rank: int) -> int:
        """``sum(areas(rank))`` without visiting the owners."""
        return sum(
            bands[n].rows_area(q.positions())
            for q in self.q_sharding.shards[rank].chunks
            for bands, index in self._rows
            for n in index.touching(q.start, q.stop)
        )

    @cached_property
    def balance(self) -> float:
        """Most work of a rank over the mean: 1.0 is perfect (and what an empty mask gets)."""
        work = [self.work(rank) for rank in range(self.world)]
        assert sum(work) == self.mask.area, "work is lost or done twice"
        return max(work) * self.world / sum(work) if sum(work) else 1.0

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal exactly when two ranks hold the same plan; names do not count."""
        mask = [[[b.q0, b.q1, b.k0, b.k1, b.lo, b.hi] for b in bands] for bands in self.mask.rows]
        shardings = [
            [[[c.start, c.count, c.stride] for c in shard.chunks] for shard in sharding.shards]
            for sharding in (self.q_sharding, self.k_sharding)
        ]
        seqs = [self.mask.seq_q, self.mask.seq_k]
        return hashlib.sha256(json.dumps([seqs, mask, shardings]).encode()).digest()

    def _build(self, rank: int, index: int) -> Step:
        owner = self.owner(rank, index)
        assert self.reader(owner, index) == rank, "the sources of a step are a permutation"
        pairs: dict[tuple[int, int, int], list[Band]] = {}
        for row, q_chunk, k_chunk, band in self._pieces(rank, owner):
            pairs.setdefault((row, q_chunk, k_chunk), []).append(band)
        tasks, spans = [], dict[int, tuple[int, int]]()
        for row, q_chunk, k_chunk in sorted(pairs):
            bands = pairs[row, q_chunk, k_chunk]
            q = min(b.q0 for b in bands), max(b.q1 for b in bands)
            k = min(b.k0 for b in bands), max(b.k1 for b in bands)
            batch = None if self.mask.batch == 1 else row
            tasks.append(Task(batch, q_chunk, k_chunk, q, k, tuple(bands)))
            k0, k1 = spans.get(k_chunk, k)
            spans[k_chunk] = min(k0, k[0]), max(k1, k[1])
        return Step(index, owner, owner, _records(spans), tuple(tasks))

    def _pieces(self, rank: int, owner: int) -> Iterator[tuple[int, int, int, Band]]:
        """(mask row, q chunk, k chunk, band in chunk coordinates), without the empty ones.

        Bands are found by the q chunk's positions and k chunks by the keys that those rows of a
        band reach: the cost is that of what is there, not of all bands for each pair of chunks.
        """
        q_chunks, k_chunks = (
            self.q_sharding.shards[rank].chunks,
            self.k_sharding.shards[owner].chunks,
        )
        owned = self._owned[owner]
        for row, (bands, index) in enumerate(self._rows):
            for c, q in enumerate(q_chunks):
                start, stop = q.start, q.stop
                for n in index.touching(start, stop):
                    band = bands[n]
                    k0, k1 = band.k0, band.k1
                    if band.lo is not None:
                        k0 = max(k0, max(start, band.q0) + band.lo)
                    if band.hi is not None:
                        k1 = min(k1, min(stop, band.q1) + band.hi)
                    for d in owned.touching(k0, k1):
                        k = k_chunks[d]
                        local = band.strided(q.start, k.start, q.stride, k.stride)
                        piece = local.within(0, q.count, 0, k.count)
                        if piece is not None:
                            yield row, c, d, piece

    @cached_property
    def _rows(self) -> list[tuple[tuple[Band, ...], Intervals]]:
        return [(bands, Intervals([(b.q0, b.q1) for b in bands])) for bands in self.mask.rows]

    @cached_property
    def _owned(self) -> list[Intervals]:
        return [
            Intervals([(c.start, c.stop) for c in shard.chunks]) for shard in self.k_sharding.shards
        ]


def shared_plan(mask: Mask, q_sharding: Sharding, k_sharding: Sharding) -> Plan:
    """The plan of equal arguments, kept for the last few: layers and calls share its steps.

    Equal, not identical: two masks made from clones of one ``cu_seqlens`` are planned once.
    """
    return _plan_named(mask, q_sharding, k_sharding, mask.name)


@lru_cache(maxsize=8)
def _plan_named(mask: Mask, q_sharding: Sharding, k_sharding: Sharding, name: str) -> Plan:
    """Names do not make masks unequal, but ranks compare them: each has a plan of its own."""
    return Plan(mask, q_sharding, k_sharding)


def _records(spans: dict[int, tuple[int, int]]) -> tuple[RecordRange, ...]:
    """Chunk -> tokens needed, as whole records in chunk order."""
    return tuple(
        RecordRange(chunk, k0 // RECORD, -(-k1 // RECORD))
        for chunk, (k0, k1) in sorted(spans.items())
    )
