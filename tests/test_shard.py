"""Shardings: every position has one owner, and `balanced` balances."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import allowed, any_mask

from ringfa4 import mask as masks
from ringfa4 import shard as sharding
from ringfa4.mask import Band, Mask
from ringfa4.plan import Plan
from ringfa4.shard import RECORD, Chunk, Shard, Sharding

EVEN = [sharding.contiguous, sharding.zigzag, sharding.striped]


def tokens(found: Sharding) -> list[int]:
    return [len(shard) for shard in found.shards]


def positions(found: Sharding) -> list[int]:
    return [p for shard in found.shards for p in shard.positions()]


# ---- chunks and shards --------------------------------------------------------------------------


def test_a_chunk_is_a_range() -> None:
    chunk = Chunk(3, 4, 5)
    assert list(chunk.positions()) == [3, 8, 13, 18]
    assert (len(chunk), chunk.stop, chunk.records) == (4, 19, 1)
    assert Chunk(3, 0, 5).stop == 3
    assert [Chunk(0, n).records for n in (0, 1, 128, 129, 7984)] == [0, 1, 1, 2, 63]


def test_a_shard_counts_tokens_and_records_by_chunk() -> None:
    shard = Shard((Chunk(0, 130), Chunk(500, 0), Chunk(200, 7)))
    assert shard.chunks == (Chunk(0, 130), Chunk(200, 7)), "empty chunks are dropped"
    assert (shard.offsets, len(shard)) == ((0, 130, 137), 137)
    assert (shard.record_base, shard.records) == ((0, 2, 3), 3)
    assert list(shard.positions()) == [*range(130), *range(200, 207)]
    empty = Shard(())
    assert (len(empty), empty.records, list(empty.positions())) == (0, 0, [])


@settings(max_examples=200)
@given(
    st.integers(0, 9),
    st.integers(1, 25),
    st.integers(1, 5),
    st.lists(st.integers(-2, 90), max_size=6),
)
def test_split_cuts_there_and_nowhere_else(
    start: int, count: int, stride: int, cuts: list[int]
) -> None:
    whole = Shard((Chunk(start, count, stride),))
    split = whole.split(cuts)
    assert list(split.positions()) == list(whole.positions())
    sides = [{sum(cut <= p for cut in cuts) for p in c.positions()} for c in split.chunks]
    assert all(len(side) == 1 for side in sides), "a chunk holds tokens from both sides of a cut"
    assert all(a != b for a, b in pairwise(sides)), "a chunk was cut where no cut is"


# ---- shardings ----------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.sampled_from(EVEN), st.integers(0, 40), st.integers(1, 9))
def test_every_position_has_one_owner(make: object, seq: int, world: int) -> None:
    """Any length and any number of ranks, fewer tokens than ranks included (cases.md 22)."""
    assert callable(make)
    found = make(seq, world)
    assert found.world == world
    assert sorted(positions(found)) == list(range(seq))
    assert max(tokens(found)) - min(tokens(found)) <= (2 if found.name == "zigzag" else 1)


def test_the_shardings_by_example() -> None:
    own = lambda found: [list(s.positions()) for s in found.shards]  # noqa: E731
    assert own(sharding.contiguous(7, 3)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert own(sharding.zigzag(8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert own(sharding.striped(7, 3)) == [[0, 3, 6], [1, 4], [2, 5]]
    assert own(sharding.uneven([3, 0, 2])) == [[0, 1, 2], [], [3, 4]]
    assert own(sharding.contiguous(2, 4)) == [[0], [1], [], []]
    assert [s.chunks for s in sharding.zigzag(2, 4).shards] == [
        (Chunk(0, 1),),
        (Chunk(1, 1),),
        (),
        (),
    ]


def test_stride_is_one_for_a_whole_sharding() -> None:
    assert sharding.striped(2, 4).stride == 4
    assert sharding.zigzag(40, 4).stride == 1
    assert sharding.striped(0, 4).stride == 1


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[Chunk(0, 4)], [Chunk(5, 4)]], "8 tokens of 9"),
        ([[Chunk(0, 4)], [Chunk(3, 5)]], "where 4 was due"),
        ([[Chunk(1, 9)], []], "where 0 was due"),
        ([[Chunk(0, 5, 2)], [Chunk(1, 3, 2), Chunk(7, 1)]], r"one stride, got \[1, 2\]"),
        ([[Chunk(0, 6, 2)], [Chunk(1, 3, 2)]], "leaves sharding.seq=9"),
        ([[Chunk(0, 5, 2)], [Chunk(1, 2, 2), Chunk(3, 2, 2)]], "where 5 was due"),
        ([], "at least one rank"),
    ],
)
def test_what_is_not_a_partition_is_refused(chunks: list[list[Chunk]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding("mine", 9, tuple(Shard(tuple(c)) for c in chunks))


def test_stripes_in_pieces_are_a_partition() -> None:
    shards = (Shard((Chunk(0, 5, 2), Chunk(7, 1, 2))), Shard((Chunk(1, 3, 2),)))
    assert sorted(positions(Sharding("mine", 9, shards))) == list(range(9))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Chunk(-1, 2), ["start=-1"]),
        (lambda: Chunk(0, -2), ["count=-2"]),
        (lambda: Chunk(0, 2, 0), ["stride=0"]),
        (lambda: sharding.contiguous(4, 0), ["seq=4", "world=0"]),
        (lambda: sharding.striped(-4, 2), ["seq=-4", "world=2"]),
        (lambda: sharding.uneven([3, -1]), ["[3, -1]"]),
        (lambda: sharding.uneven([]), ["at least one rank"]),
        (lambda: sharding.balanced(masks.full(4), 2, side="v"), ["side='v'"]),
        (lambda: sharding.balanced(masks.full(4), 2, block=0), ["block=0"]),
        (lambda: sharding.balanced(masks.full(4), 0), ["world=0"]),
    ],
)
def test_bad_shardings_are_refused_with_the_values(make: object, names: list[str]) -> None:
    assert callable(make)
    with pytest.raises(ValueError) as caught:
        make()
    for name in names:
        assert name in str(caught.value)


# ---- balanced -----------------------------------------------------------------------------------


@settings(max_examples=150)
@given(any_mask(), st.integers(1, 5), st.sampled_from("qk"), st.none() | st.integers(1, 6))
def test_balanced_deals_equal_tokens(mask: Mask, world: int, side: str, block: int | None) -> None:
    seq = mask.seq_q if side == "q" else mask.seq_k
    found = sharding.balanced(mask, world, side=side, block=block)
    assert found == sharding.balanced(mask, world, side=side, block=block)
    assert sorted(positions(found)) == list(range(seq))
    if block is not None:
        assert max(tokens(found)) - min(tokens(found)) <= block
    for shard in found.shards:
        for a, b in pairwise(shard.chunks):
            assert a.stop < b.start, "neighbours are one chunk, and chunks ascend"


@pytest.mark.parametrize("side", ["q", "k"])
def test_balanced_is_longest_first_by_area(side: str) -> None:
    """Blocks of 2: areas 8 8 4 4 (two blocks of a document of 4, two documents of 2)."""
    mask = masks.documents([0, 4, 6, 8], causal=False)
    found = sharding.balanced(mask, 2, side=side, block=2)
    assert [s.chunks for s in found.shards] == [
        (Chunk(0, 2), Chunk(4, 2)),
        (Chunk(2, 2), Chunk(6, 2)),
    ]


def test_balanced_counts_keys_on_the_k_side() -> None:
    """Causal: early keys are seen most, late queries see most; each side folds its own way."""
    mask = masks.causal(8, 4)  # query areas 1 2 3 4 4 4 4 4, key areas 8 7 6 5
    q, k = (sharding.balanced(mask, 2, side=side, block=1) for side in "qk")
    for found, axis in ((q, 0), (k, 1)):
        load = [sum(p[axis] in set(s.positions()) for p in allowed(mask, 0)) for s in found.shards]
        assert load == [13, 13]


def test_balanced_sums_the_batch_rows() -> None:
    """Each row alone is lopsided and has to be cut; together they are flat."""
    first = Mask(8192, 8192, ((Band(0, 4096, 0, 8192),),))
    second = Mask(8192, 8192, ((Band(4096, 8192, 0, 8192),),))
    for mask, chunks in ((masks.stack([first, second]), 1), (first, 2), (second, 2)):
        found = sharding.balanced(mask, 4)
        assert [len(s.chunks) for s in found.shards] == [chunks] * 4
        assert Plan(mask, found, found).balance == 1.0


def packed(seq: int, number: int, seed: int = 0) -> Mask:
    """``number`` causal documents of random lengths."""
    inner = random.Random(seed).sample(range(1, seq), number - 1)
    return masks.documents([0, *sorted(inner), seq])


def test_balanced_evens_out_packed_documents() -> None:
    mask = packed(1 << 20, 1000)
    found = sharding.balanced(mask, 72)
    assert Plan(mask, found, found).balance <= 1.01
    assert max(tokens(found)) * 72 <= 1.01 * (1 << 20)
    zigzag = sharding.zigzag(1 << 20, 72)
    assert Plan(mask, zigzag, zigzag).balance > 2, "the case is one that needs balancing"
    assert max(len(s.chunks) for s in found.shards) <= 32


@pytest.mark.parametrize(("mask", "chunks"), [(masks.full(1 << 20), 1), (masks.causal(1 << 20), 2)])
def test_balanced_cuts_no_finer_than_it_must(mask: Mask, chunks: int) -> None:
    found = sharding.balanced(mask, 72)
    assert max(len(s.chunks) for s in found.shards) == chunks
    assert Plan(mask, found, found).balance <= 1.01


def test_balanced_keeps_the_best_when_nothing_is_even() -> None:
    """5 tokens on 3 ranks, areas 1 1 1 2 3: single tokens do worse than the pairs tried before."""
    mask = masks.documents([0, 1, 2, 5])
    pairs, single = (sharding.balanced(mask, 3, block=block) for block in (2, 1))
    assert Plan(mask, pairs, pairs).balance < Plan(mask, single, single).balance
    assert sharding.balanced(mask, 3) == pairs


@pytest.mark.parametrize("world", [2, 3, 8])
def test_balanced_blocks_are_whole_records_when_there_are_many(world: int) -> None:
    mask = packed(100_003, 50)
    found = sharding.balanced(mask, world)
    chunks = [c for s in found.shards for c in s.chunks]
    assert all(c.start % RECORD == 0 for c in chunks)
    assert [c.stop for c in chunks if c.count % RECORD] == [100_003]


def test_balanced_with_fewer_tokens_than_ranks() -> None:
    """cases.md 22."""
    assert tokens(sharding.balanced(masks.causal(2), 4)) == [1, 1, 0, 0]
    assert tokens(sharding.balanced(masks.causal(0), 4)) == [0, 0, 0, 0]
    assert tokens(sharding.balanced(masks.documents([0], seq_q=6), 3)) == [2, 2, 2]
