"""Who owns which positions.

A :class:`Chunk` is a run of global positions start, start + stride, ...; a :class:`Shard` is the
chunks of one rank, in the order in which its tokens lie in memory; a :class:`Sharding` gives every
rank a shard so that each position of [0, seq) has exactly one owner. Records (128 tokens, the unit
of transfer) are counted per chunk: a chunk of n tokens is ceil(n / 128) records, the last padded.

Which one: ``contiguous`` for full masks and windows (least moves), ``zigzag`` for causal ones,
``balanced`` for packed documents, ``striped`` when tokens must be dealt out one by one.

Pure integers: neither torch nor numpy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfa4.mask import Mask

RECORD = 128
"""Tokens in a record."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Global positions start + stride * a for 0 <= a < count."""

    start: int
    count: int
    stride: int = 1

    def __len__(self) -> int:
        return self.count

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 0 or self.stride < 1:
            raise ValueError(f"{self} needs start >= 0, count >= 0, stride >= 1")

    @property
    def stop(self) -> int:
        """One past the last position (``start`` when empty)."""
        return self.start + self.stride * (self.count - 1) + 1 if self.count else self.start

    @property
    def records(self) -> int:
        return -(-self.count // RECORD)

    def positions(self) -> range:
        return range(self.start, self.start + self.stride * self.count, self.stride)


@dataclass(frozen=True)
class Shard:
    """The chunks of one rank. Empty chunks are dropped; ``Shard(())`` owns nothing."""

    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(c for c in self.chunks if c.count > 0))

    def __len__(self) -> int:
        return self.offsets[-1]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Local index of each chunk's first token, and the shard's length at the end."""
        return (0, *accumulate(c.count for c in self.chunks))

    @cached_property
    def record_base(self) -> tuple[int, ...]:
        """Number of records before each chunk, and the shard's number of records at the end."""
        return (0, *accumulate(c.records for c in self.chunks))

    @property
    def records(self) -> int:
        return self.record_base[-1]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """(first local token, its row in records, tokens, rows of padding after them) of each run
        of tokens that follow one another in records too: of chunks with full records.
        """
        found, first = [], 0
        for c, chunk in enumerate(self.chunks):
            padding = chunk.records * RECORD - chunk.count
            if padding or c == len(self.chunks) - 1:
                start, stop = self.offsets[first], self.offsets[c + 1]
                found.append((start, self.record_base[first] * RECORD, stop - start, padding))
                first = c + 1
        return tuple(found)

    def positions(self) -> Iterator[int]:
        """Global positions in local order."""
        for chunk in self.chunks:
            yield from chunk.positions()

    def split(self, starts: Iterable[int]) -> Shard:
        """Cut chunks so that none holds tokens from both sides of any position of ``starts``."""
        cuts = sorted(starts)
        pieces = []
        for chunk in self.chunks:
            start, stride = chunk.start, chunk.stride
            inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, chunk.stop)]
            # Cuts that fall between the same two tokens of a stripe leave empty pieces: dropped.
            edges = [0, *(-(-(cut - start) // stride) for cut in inside), chunk.count]
            pieces += [Chunk(start + stride * a, b - a, stride) for a, b in pairwise(edges)]
        return Shard(tuple(pieces))


@dataclass(frozen=True)
class Sharding:
    """``shards[r]`` belongs to rank r; together they hold each position of [0, seq) once.

    Raises ValueError when they do not, or when chunks have different strides.
    """

    name: str
    seq: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("a sharding needs at least one rank")
        _require_partition(self)

    @property
    def world(self) -> int:
        return len(self.shards)

    @cached_property
    def stride(self) -> int:
        """The one stride of all chunks (1 when there are none)."""
        return next((c.stride for s in self.shards for c in s.chunks), 1)

    def split(self, starts: Iterable[int]) -> Sharding:
        """Every shard cut (:meth:`Shard.split`): same owners, same order of tokens, more chunks."""
        cuts = sorted(starts)
        if not cuts:
            return self
        return Sharding(self.name, self.seq, tuple(s.split(cuts) for s in self.shards))


def _require_partition(sharding: Sharding) -> None:
    """By residue class: unit-stride runs and stripes of one common stride tile [0, seq) exactly."""
    chunks = [c for s in sharding.shards for c in s.chunks]
    total = sum(c.count for c in chunks)
    if total != sharding.seq:
        raise ValueError(f"sharding {sharding.name!r} holds {total} tokens of {sharding.seq}")
    strides = {c.stride for c in chunks}
    if len(strides) > 1:
        raise ValueError(f"chunks of one sharding need one stride, got {sorted(strides)}")
    stride = strides.pop() if strides else 1
    ordered = sorted(chunks, key=lambda c: (c.start % stride, c.start))
    expected, residue = 0, 0
    for chunk in ordered:
        if chunk.start % stride != residue:
            residue = chunk.start % stride
            expected = residue
        if chunk.start != expected:
            raise ValueError(f"sharding {sharding.name!r}: {chunk} where {expected} was due")
        expected = chunk.start + chunk.stride * chunk.count
        if chunk.start + chunk.stride * (chunk.count - 1) >= sharding.seq:
            raise ValueError(f"sharding {sharding.name!r}: {chunk} leaves {sharding.seq=}")


def _runs(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(start, length) of consecutive runs."""
    runs, start = [], 0
    for length in lengths:
        runs.append((start, length))
        start += length
    return runs


def _even(total: int, parts: int) -> list[int]:
    """Lengths that differ by at most one, the longer ones first."""
    base, extra = divmod(total, parts)
    return [base + (i < extra) for i in range(parts)]


def _check(seq: int, world: int) -> None:
    if world < 1 or seq < 0:
        raise ValueError(f"need at least one rank and no negative length: {seq=}, {world=}")


def contiguous(seq: int, world: int) -> Sharding:
    """Rank r owns the r-th run of about seq / world tokens. Unbalanced under causal masks."""
    _check(seq, world)
    return Sharding(
        "contiguous", seq, tuple(Shard((Chunk(a, n),)) for a, n in _runs(_even(seq, world)))
    )


def uneven(lengths: Iterable[int]) -> Sharding:
    """Rank r owns the r-th run, of lengths[r] tokens: shards given by the caller."""
    sizes = [int(n) for n in lengths]
    if any(n < 0 for n in sizes):
        raise ValueError(f"shard lengths must not be negative: {sizes}")
    return Sharding("uneven", sum(sizes), tuple(Shard((Chunk(a, n),)) for a, n in _runs(sizes)))


def zigzag(seq: int, world: int) -> Sharding:
    """2 * world runs; rank r owns runs r and 2 * world - 1 - r. Balanced under causal masks."""
    _check(seq, world)
    runs = [Chunk(a, n) for a, n in _runs(_even(seq, 2 * world))]
    return Sharding(
        "zigzag", seq, tuple(Shard((runs[r], runs[2 * world - 1 - r])) for r in range(world))
    )


def striped(seq: int, world: int) -> Sharding:
    """Rank r owns r, r + world, r + 2 * world, ... Balanced to a row for causal masks, windows."""
    _check(seq, world)
    return Sharding(
        "striped",
        seq,
        tuple(Shard((Chunk(r, len(range(r, seq, world)), world),)) for r in range(world)),
    )


BLOCKS_PER_RANK = (1, 2, 4, 8, 16, 32, 64)
"""What ``balanced`` tries, in order: fewer blocks mean fewer chunks, tasks and padded records."""

GOOD_ENOUGH = 1.01
"""Most over mean, of tokens and of area, at which ``balanced`` stops cutting finer."""


def balanced(mask: Mask, world: int, *, side: str = "q", block: int | None = None) -> Sharding:
    """Tokens equal to a block, and areas as equal as a greedy solver gets them.

    The sequence (``side``: "q" or "k" of ``mask``) is cut into blocks; the largest areas (summed
    over the mask's rows) go first, each to the rank with the least area that still has room.
    Neighbouring blocks of a rank become one chunk. ``block`` None tries smaller and smaller blocks
    (whole records, once a rank has 16; else a rank gets at most some 30 blocks, since every pair of
    chunks is a task) until tokens and areas are within 1%, or keeps the best.
    """
    if side not in ("q", "k"):
        raise ValueError(f"{side=} is neither 'q' nor 'k'")
    seq = mask.seq_q if side == "q" else mask.seq_k
    _check(seq, world)
    if block is not None:
        if block < 1:
            raise ValueError(f"{block=} must be at least one token")
        return _deal(mask, world, side, block)[1]
    best: tuple[float, Sharding] | None = None
    for size in _block_sizes(seq, world):
        found = _deal(mask, world, side, size)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] <= GOOD_ENOUGH:
            break
    assert best is not None
    return best[1]


def by_name(name: str, mask: Mask, world: int, side: str = "q") -> Sharding:
    """The sharding called ``name`` of the queries ("q") or keys ("k") of ``mask``.

    Equal arguments get the same object for the last few: ``balanced`` weighs every band, and layers
    ask for it again and again. ValueError for unknown names.
    """
    if side not in ("q", "k"):
        raise ValueError(f"{side=} is neither 'q' nor 'k'")
    seq = mask.seq_q if side == "q" else mask.seq_k
    if name == "balanced":
        # Self-attention shards keys as queries: a token's q, k and v live together.
        return _balanced_again(mask, world, "q" if mask.seq_q == mask.seq_k else side)
    if name not in BY_LENGTH:
        raise ValueError(f"unknown sharding {name!r}; there are {sorted([*BY_LENGTH, 'balanced'])}")
    return BY_LENGTH[name](seq, world)


BY_LENGTH = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
"""Shardings that depend on nothing but the number of tokens and of ranks."""


@lru_cache(maxsize=8)
def _balanced_again(mask: Mask, world: int, side: str) -> Sharding:
    return balanced(mask, world, side=side)


def _block_sizes(seq: int, world: int) -> Iterator[int]:
    """For each octave of blocks a rank, the block size that spreads the tokens most evenly."""
    unit = RECORD
    while unit > 1 and seq < 16 * unit * world:
        unit //= 2
    share = max(1, -(-seq // (world * unit)))  # units of a rank

    def most_tokens(size: int) -> tuple[int, int]:
        return -(-seq // (world * size * unit)) * size, -size

    for blocks in BLOCKS_PER_RANK:
        sizes = range(share // (2 * blocks) + 1, share // blocks + 1)
        if sizes:
            yield min(sizes, key=most_tokens) * unit


def _deal(mask: Mask, world: int, side: str, block: int) -> tuple[float, Sharding]:
    """Longest-processing-time-first over blocks of ``block`` tokens; (worst imbalance, sharding).

    The first ``count % world`` ranks get one block more. A short last block goes to rank 0, which
    is one of those if there are any, so no two ranks differ by more than ``block`` tokens.
    """
    seq = mask.seq_q if side == "q" else mask.seq_k
    starts = range(0, seq, block)
    areas = _block_areas(mask, side, block, len(starts))
    room = _even(len(starts), world)
    owned: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    queue = list(range(len(starts)))
    if seq % block:
        owned[0].append(queue.pop())
        load[0] = areas[-1]
    queue.sort(key=lambda n: (-areas[n], n))
    heap = [(load[r], r) for r in range(world) if len(owned[r]) < room[r]]
    heapify(heap)
    for n in queue:
        area, r = heappop(heap)
        owned[r].append(n)
        load[r] = area + areas[n]
        if len(owned[r]) < room[r]:
            heappush(heap, (load[r], r))
    shards = tuple(_merged(sorted(blocks), block, seq) for blocks in owned)
    worst = max(
        (
            max(values) * world / total
            for values in (load, [len(s) for s in shards])
            if (total := sum(values))
        ),
        default=1.0,
    )
    return worst, Sharding("balanced", seq, shards)


def _merged(blocks: list[int], block: int, seq: int) -> Shard:
    """Blocks by number -> chunks, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for n in blocks:
        start, stop = n * block, min((n + 1) * block, seq)
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return Shard(tuple(Chunk(a, b - a) for a, b in runs))


def _block_areas(mask: Mask, side: str, block: int, count: int) -> list[int]:
    """Allowed pairs of each block of queries (keys), over all rows of the mask."""
    areas = [0] * count
    for band in (band for bands in mask.rows for band in bands):
        q, k = (band.q0, band.q1), (band.k0, band.k1)
        low, high = q if side == "q" else k
        for n in range(low // block, -(-high // block)):
            part = (max(low, n * block), min(high, (n + 1) * block))
            piece = band.within(*part, *k) if side == "q" else band.within(*q, *part)
            assert piece is not None, "a trimmed band reaches all of its box"
            areas[n] += piece.area
    return areas
