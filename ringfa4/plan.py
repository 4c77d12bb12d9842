"""Who computes what, when, and which records move for it.

    step t of rank r:   owner (r - t) mod P,   tasks = mask  restricted to  (q chunks of r) x (k chunks of owner)

A plan is data: frozen, pure Python, no torch. The executor, the simulator, the plan printer and the tests read the same
object; each rank materialises only its own view. Reading owner (r - t) rather than (r + t) matters under causal masks: with
empty steps skipped the other direction makes all ranks read rank 0 first.

Coordinates inside a task are chunk-local: row a of q chunk c is token ``q_shard.offsets[c] + a`` of the rank's
q, and key b of k chunk d is token b of that chunk on the owner. Bands are rewritten accordingly.

Invariants (asserted, and tested as properties): over all ranks and steps every allowed (i, j) is in exactly one band of one
task; the sources of a step are a partial permutation of the ranks (nobody is read twice in a step); a step without tasks
moves nothing; a step moves no record that no task of it needs, except between the first and the last needed record of a chunk.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ringfa4.mask import Band, Mask
from ringfa4.shard import RECORD, Chunk, Shard, Sharding


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
    """Step ``index`` of one rank: K/V of ``owner``, read from ``source`` (they differ only when a topology relays).

    ``ranges`` are the records the tasks need, at most one range a chunk, in chunk order; empty without tasks.
    They arrive packed: range after range, nothing between.
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


@dataclass(frozen=True)
class Plan:
    """The work of all ranks; :meth:`step` materialises one rank's step when asked.

    ``split_documents``: cut the owner's chunks where documents start, so that no record holds two documents
    (wires that quantise groups of tokens want this; see :meth:`ringfa4.wire.WireFormat.split_at`).
    """

    mask: Mask
    q_sharding: Sharding
    k_sharding: Sharding

    def __post_init__(self) -> None:
        """Raises ValueError when mask and shardings do not fit together."""
        raise NotImplementedError  # TODO(H1)

    @property
    def world(self) -> int:
        return self.q_sharding.world

    def step(self, rank: int, index: int) -> Step:
        """Step ``index`` in [0, world) of ``rank``. Cached per (rank, index)."""
        raise NotImplementedError  # TODO(H1)

    def steps(self, rank: int) -> tuple[Step, ...]:
        return tuple(self.step(rank, t) for t in range(self.world))

    def ranges(self, rank: int, index: int) -> tuple[RecordRange, ...]:
        """As ``step(rank, index).ranges``, without building the tasks: what a peer reads from its source."""
        raise NotImplementedError  # TODO(H1)

    def reader(self, rank: int, index: int) -> int:
        """The rank that reads from ``rank`` in step ``index`` (it may need no records)."""
        return (rank + index) % self.world

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal exactly when two ranks hold the same plan."""
        raise NotImplementedError  # TODO(H1)
