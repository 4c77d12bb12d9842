"""Who computes what, when, and which records move for it.

    step t of rank r:  owner = (r - t) mod P,  tasks = mask on (q chunks of r) x (k chunks of owner)

With a :class:`ringfa4.topology.Topology` of several domains a rank *carries* records: once a lap it
brings over what its domain needs of one owner outside, computes with it in turn 0, and its peers
read it there in the other turns. dK/dV go back the same way: peers give theirs to the rank that
carried, which adds them up in plan order and gives the owner one contribution, a lap later:

    step lap * n + turn   turn > 0: to the source;   turn 0: the sum of lap - 1 (> 0) to its owner
    step world            the sum of the last lap

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
except between the first and the last needed record of a chunk. What is carried keeps the last two
for the tasks of the domain; it crosses once.

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
from ringfa4.topology import Topology


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
    range, nothing between. ``held`` are the records at hand, packed in the same way: ``ranges``, or
    all that was carried for the domain.
    """

    index: int
    owner: int
    source: int
    ranges: tuple[RecordRange, ...]
    tasks: tuple[Task, ...]
    held: tuple[RecordRange, ...]

    @property
    def records(self) -> int:
        return sum(len(r) for r in self.ranges)

    @property
    def area(self) -> int:
        """Pairs summed over the listed batch rows (a shared row counts once)."""
        return sum(task.area for task in self.tasks)


class Return(NamedTuple):
    """dK/dV of ``ranges`` of ``owner``'s shard, handed to ``peer``: the owner, or who carried.

    ``summed``: they are the sum of a domain's parts, not one rank's own.
    """

    peer: int
    owner: int
    ranges: tuple[RecordRange, ...]
    summed: bool


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

    ``topology`` None is one domain of all ranks. Raises ValueError when mask, shardings and
    topology do not fit together.
    """

    mask: Mask
    q_sharding: Sharding
    k_sharding: Sharding
    topology: Topology | None = None
    _steps: dict[tuple[int, int], Step] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _carried: dict[tuple[int, int], tuple[RecordRange, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        mask, q, k = self.mask, self.q_sharding, self.k_sharding
        if self.topology is not None and self.topology.world != q.world:
            raise ValueError(
                f"the topology is of {self.topology.world} ranks, the shardings of {q.world}"
            )
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
        lap, turn = self.lap(index)
        return self.order.peer(rank, -lap, -turn)

    def reader(self, rank: int, index: int) -> int:
        """The rank that computes with ``rank``'s K/V in step ``index``, if it has tasks."""
        lap, turn = self.lap(index)
        return self.order.peer(rank, lap, turn)

    def source(self, rank: int, index: int) -> int:
        """Whom ``rank`` reads the records of step ``index`` from."""
        lap, turn = self.lap(index)
        return self.order.peer(rank, 0, -turn) if lap and turn else self.owner(rank, index)

    def asker(self, rank: int, index: int) -> int:
        """The rank whose :meth:`source` is ``rank`` in step ``index`` (it may need no records)."""
        lap, turn = self.lap(index)
        return self.order.peer(rank, 0, turn) if lap and turn else self.reader(rank, index)

    def lap(self, index: int) -> tuple[int, int]:
        """(lap, turn) of step ``index``; a flat ring is one lap."""
        return divmod(index, self.order.size)

    @cached_property
    def order(self) -> Topology:
        """The topology; of one domain when none was given."""
        return self.topology or Topology((tuple(range(self.world)),))

    def carried(self, rank: int, lap: int) -> tuple[RecordRange, ...]:
        """What ``rank`` carries in ``lap``: all that its domain needs of one owner outside.

        Of each chunk the range from the first to the last such record; nothing in lap 0.
        """
        if lap == 0:
            return ()
        found = self._carried.get((rank, lap))
        if found is None:
            spans: dict[int, tuple[int, int]] = {}
            for turn in range(self.order.size):
                peer = self.order.peer(rank, 0, turn)
                for r in self.ranges(peer, lap * self.order.size + turn):
                    start, stop = spans.get(r.chunk, (r.start, r.stop))
                    spans[r.chunk] = min(start, r.start), max(stop, r.stop)
            found = tuple(RecordRange(c, *span) for c, span in sorted(spans.items()))
            self._carried[rank, lap] = found
        return found

    def returns(self, rank: int, index: int) -> Return | None:
        """The dK/dV that ``rank`` hands over in step ``index`` in 1..world; None: nothing.

        Step world is there for the last lap's sum alone.
        """
        lap, turn = self.lap(index)
        if turn == 0 and index:
            owner = self.order.peer(rank, 1 - lap, 0)
            found = Return(owner, owner, self.carried(rank, lap - 1), self.order.size > 1)
        else:
            ranges = self.ranges(rank, index)
            found = Return(self.source(rank, index), self.owner(rank, index), ranges, False)
        return found if found.ranges else None

    def giver(self, rank: int, index: int) -> int:
        """The rank that hands dK/dV to ``rank`` in step ``index``, if it does."""
        lap, turn = self.lap(index)
        return self.order.peer(rank, lap - 1, 0) if turn == 0 else self.asker(rank, index)

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

    def contributions(self, rank: int) -> tuple[int, ...]:
        """The steps (from 1 on, step world included) in which dK/dV reach ``rank``, in order."""
        last = self.world + (self.order.count > 1)
        return tuple(t for t in range(1, last) if self._gives(self.giver(rank, t), t))

    def _gives(self, rank: int, index: int) -> bool:
        """Whether ``returns(rank, index)`` is something; cheaper where it is a step's own."""
        lap, turn = self.lap(index)
        return self.busy(rank, index) if turn else lap > 0 and bool(self.carried(rank, lap - 1))

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
        """32 bytes that are equal exactly when two ranks hold the same plan; names do not count.

        No topology and one of one domain are told apart.
        """
        mask = [[[b.q0, b.q1, b.k0, b.k1, b.lo, b.hi] for b in bands] for bands in self.mask.rows]
        shardings = [
            [[[c.start, c.count, c.stride] for c in shard.chunks] for shard in sharding.shards]
            for sharding in (self.q_sharding, self.k_sharding)
        ]
        seqs = [self.mask.seq_q, self.mask.seq_k]
        domains = None if self.topology is None else self.topology.domains
        return hashlib.sha256(json.dumps([seqs, mask, shardings, domains]).encode()).digest()

    def _build(self, rank: int, index: int) -> Step:
        owner, source = self.owner(rank, index), self.source(rank, index)
        assert self.asker(source, index) == rank, "the sources of a step are a permutation"
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
        ranges, (lap, turn) = _records(spans), self.lap(index)
        held = self.carried(rank, lap) if lap and turn == 0 else ranges
        return Step(index, owner, source, ranges, tuple(tasks), held)

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


def shared_plan(
    mask: Mask, q_sharding: Sharding, k_sharding: Sharding, topology: Topology | None = None
) -> Plan:
    """The plan of equal arguments, kept for the last few: layers and calls share its steps.

    Equal, not identical: two masks made from clones of one ``cu_seqlens`` are planned once.
    """
    return _plan_named(mask, q_sharding, k_sharding, topology, mask.name)


@lru_cache(maxsize=8)
def _plan_named(
    mask: Mask, q_sharding: Sharding, k_sharding: Sharding, topology: Topology | None, name: str
) -> Plan:
    """Names do not make masks unequal, but ranks compare them: each has a plan of its own."""
    return Plan(mask, q_sharding, k_sharding, topology)


def _records(spans: dict[int, tuple[int, int]]) -> tuple[RecordRange, ...]:
    """Chunk -> tokens needed, as whole records in chunk order."""
    return tuple(
        RecordRange(chunk, k0 // RECORD, -(-k1 // RECORD))
        for chunk, (k0, k1) in sorted(spans.items())
    )
