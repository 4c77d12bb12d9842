"""The tables of a launch, read as their docstring says, pair by pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from plan_cases import plans, task_pairs

from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.kernels.sm100 import worklist
from ringfa4.kernels.sm100.specs import LEAVE, MERGE, WRITE
from ringfa4.kernels.sm100.worklist import UNBOUNDED, WorkList, work_list
from ringfa4.mask import Band, Mask
from ringfa4.plan import Plan, RecordRange, Step, Task
from ringfa4.shard import Chunk, Shard
from ringfa4.wire import RecordMap
from ringfa4.written import Written

SMALL = 4
"""Tokens in a record of the property tests, so that short sequences have many."""


@contextmanager
def small_records() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("shard", "plan", "wire", "kernels.sm100.worklist"):
            patch.setattr(f"ringfa4.{module}.RECORD", SMALL)
        yield


def walked(work: WorkList) -> Iterator[tuple[int, int, int, int, int]]:
    """(batch, local row, packed record, token in it, number of the segment) of every pair."""
    segments = work.segments.tolist()
    for batch, _, _, row, first, rows, seg0, seg1 in work.items.tolist():
        for number in range(seg0, seg1):
            record, q0, q1, k0, k1, lo, hi, _ = segments[number]
            for i in range(max(q0, first), min(q1, first + rows)):
                for j in range(k0, k1):
                    if lo <= j - i <= hi:
                        yield batch, row + i - first, record + j // SMALL, j % SMALL, number


def keys_at(plan: Plan, step: Step) -> dict[tuple[int, int], int]:
    """Global position of each token that the step's records hold, by packed record and place."""
    shard, found, at = plan.k_sharding.shards[step.owner], {}, 0
    for here in step.ranges:
        positions = shard.chunks[here.chunk].positions()
        for record in range(here.start, here.stop):
            for token in range(SMALL):
                if record * SMALL + token < len(positions):
                    found[at, token] = positions[record * SMALL + token]
            at += 1
    return found


@settings(max_examples=150)
@given(plans(), st.integers(1, 3), st.integers(1, 2), st.data())
def test_every_allowed_pair_is_in_one_segment_of_one_item(
    plan: Plan, copies: int, ctas: int, data: st.DataObject
) -> None:
    with small_records():
        rank = data.draw(st.integers(0, plan.world - 1))
        step = plan.step(rank, data.draw(st.integers(0, plan.world - 1)))
        batch = copies if plan.mask.batch == 1 else plan.mask.batch
        queries = plan.q_sharding.shards[rank]
        keys = RecordMap(plan.k_sharding.shards[step.owner], step.ranges)
        work = work_list(step.tasks, queries, keys, batch, ctas)
        rows, tokens = list(queries.positions()), keys_at(plan, step)
        found = Counter(
            (b, rows[row], tokens[record, token]) for b, row, record, token, _ in walked(work)
        )
        wanted = Counter(
            (b, *pair)
            for task in step.tasks
            for pair in task_pairs(plan, rank, step, task)
            for b in (range(batch) if task.batch is None else [task.batch])
        )
        assert found == wanted
        assert max(found.values(), default=1) == 1, "bands are disjoint"
        seeing = {(b, row) for b, row, *_ in walked(work)}
        marked = work.claim(Written(batch), len(rows))
        assert {tuple(at) for at in marked.nonzero().tolist()} == seeing
        check_items(work, queries, batch, ctas)


def check_items(work: WorkList, queries: Shard, batch: int, ctas: int) -> None:
    """Records are in the queries, in one item at most, and each has a row that sees a key."""
    owner: set[tuple[int, int]] = set()
    seeing = {(b, row) for b, row, *_ in walked(work)}
    costs = []
    for b, q_record, tiles, row, first, rows, seg0, seg1 in work.items.tolist():
        chunk = next(c for c in range(len(queries.chunks)) if queries.record_base[c + 1] > q_record)
        assert first == (q_record - queries.record_base[chunk]) * SMALL
        assert row == queries.offsets[chunk] + first
        records = -(-rows // SMALL)
        assert q_record + records <= queries.record_base[chunk + 1], "an item stays in its chunk"
        assert rows == min(SMALL * records, queries.chunks[chunk].count - first)
        assert tiles == -(-records // ctas) in (1, 2) and 0 <= b < batch and seg0 < seg1
        for n in range(records):
            assert (b, q_record + n) not in owner
            owner.add((b, q_record + n))
            own = range(row + SMALL * n, row + min(rows, SMALL * (n + 1)))
            assert any((b, r) in seeing for r in own)
        visited = [visits(work, n, first, rows) for n in range(seg0, seg1)]
        assert min(visited) > 0, "a segment that the item's rows do not touch"
        costs.append(tiles * sum(visited))
    assert costs == sorted(costs, reverse=True)


def visits(work: WorkList, number: int, first: int, rows: int) -> int:
    """Records that the item's rows see in a segment."""
    _, q0, q1, k0, k1, lo, hi, _ = work.segments[number].tolist()
    keys = {
        j
        for i in range(max(q0, first), min(q1, first + rows))
        for j in range(k0, k1)
        if lo <= j - i <= hi
    }
    return len({j // SMALL for j in range(min(keys), max(keys) + 1)}) if keys else 0


@settings(max_examples=100)
@given(plans(), st.data())
def test_segments_keep_the_order_of_the_tasks(plan: Plan, data: st.DataObject) -> None:
    """A row meets its keys task by task, band by band."""
    with small_records():
        rank = data.draw(st.integers(0, plan.world - 1))
        step = plan.step(rank, data.draw(st.integers(0, plan.world - 1)))
        queries = plan.q_sharding.shards[rank]
        keys = RecordMap(plan.k_sharding.shards[step.owner], step.ranges)
        work = work_list(step.tasks, queries, keys, plan.mask.batch)
        rows, tokens = list(queries.positions()), keys_at(plan, step)
        order = {
            (task.batch or 0, *pair): n
            for n, pair, task in (
                (n, pair, task)
                for n, task in enumerate(step.tasks)
                for pair in task_pairs(plan, rank, step, task)
            )
        }
        last: dict[tuple[int, int], int] = {}
        for b, row, record, token, _ in walked(work):
            at = order[b, rows[row], tokens[record, token]]
            assert last.get((b, row), -1) <= at
            last[b, row] = at


def test_rows_are_written_once_and_merged_after_that() -> None:
    """The modes of two steps: what the first wrote, the second merges; the rest stays."""
    queries, keys = Shard((Chunk(0, 300),)), Shard((Chunk(0, 300),))

    def modes(band: Band, written: Written) -> list[int]:
        plan = Plan(
            Mask(300, 300, ((band,),)),
            shardings.Sharding("one", 300, (queries,)),
            shardings.Sharding("one", 300, (keys,)),
        )
        work = work_list(plan.step(0, 0).tasks, queries, RecordMap.whole(keys), 2)
        got = work.claim(written, 300)
        assert got[0].tolist() == got[1].tolist(), "a task without a batch row is for all"
        return got[0].tolist()

    written = Written(2)
    first = modes(Band(10, 200, 0, 300), written)
    assert first == [LEAVE] * 10 + [WRITE] * 190 + [LEAVE] * 100
    second = modes(Band(100, 250, 0, 300), written)
    assert second == [LEAVE] * 100 + [MERGE] * 100 + [WRITE] * 50 + [LEAVE] * 50


def test_the_line_of_an_item_and_of_a_segment() -> None:
    """Written out: a causal corner of the second chunk, of keys whose first record is not here."""
    queries = Shard((Chunk(0, 200), Chunk(200, 400)))
    keys = Shard((Chunk(0, 100), Chunk(100, 500)))
    band = Band(130, 400, 260, 500, None, 120)
    task = Task(1, 1, 1, (140, 400), (260, 500), (band,))
    where = RecordMap(keys, (RecordRange(0, 0, 1), RecordRange(1, 2, 4)))
    work = work_list([task], queries, where, 2)
    # Row i sees keys up to i + 120, so from row 140 on; chunk 1 begins at record 2 and row 200.
    assert work.items.tolist() == [
        [1, 3, 2, 328, 128, 256, 0, 1],
        [1, 5, 1, 584, 384, 16, 0, 1],
    ]
    # Record 2 of chunk 1 is packed record 1.
    assert work.segments.tolist() == [[-1, 140, 400, 260, 500, -UNBOUNDED, 120, 0]]
    assert work.seen == ((), ((340, 600),))
    # A pair's thread blocks have two records and one: records 1 and 3, and 2.
    pairs = work_list([task], queries, where, 2, ctas=2)
    assert pairs.items.tolist() == [[1, 3, 2, 328, 128, 272, 0, 1]]
    assert pairs.segments.tolist() == work.segments.tolist() and pairs.seen == work.seen


def test_items_walk_no_segment_of_other_rows() -> None:
    """Rows from 256 on see the first and the third of three chunks: a list of their own."""
    queries, keys = Shard((Chunk(0, 1024),)), Shard(tuple(Chunk(n, 1) for n in range(3)))
    bands = Band(0, 1024, 0, 1), Band(0, 256, 0, 1), Band(0, 1024, 0, 1)
    tasks = [Task(None, 0, n, (band.q0, band.q1), (0, 1), (band,)) for n, band in enumerate(bands)]
    work = work_list(tasks, queries, RecordMap.whole(keys), 1)
    lists = {
        first: [segment[0] for segment in work.segments[seg0:seg1].tolist()]
        for _, _, _, _, first, _, seg0, seg1 in work.items.tolist()
    }
    assert lists == {0: [0, 1, 2], 256: [0, 2], 512: [0, 2], 768: [0, 2]}
    assert len(work.segments) == 5, "three items share one copy"


def test_a_step_is_built_once() -> None:
    plan = Plan(masks.causal(512), shardings.zigzag(512, 2), shardings.zigzag(512, 2))
    step = plan.step(0, 0)
    queries, keys = plan.q_sharding.shards[0], RecordMap.whole(plan.k_sharding.shards[0])
    first = work_list(step.tasks, queries, keys, 1)
    assert work_list(step.tasks, queries, keys, 1) is first
    assert work_list(step.tasks, queries, keys, 2) is not first
    assert work_list(step.tasks, queries, keys, 1, ctas=2) is not first
    assert work_list(list(step.tasks), queries, keys, 1) is not first


def test_lengths_beyond_32_bits_are_not_taken() -> None:
    count = UNBOUNDED + 1
    shard = Shard((Chunk(0, count),))
    plan = Plan(
        Mask(count, count, ((Band(0, count, 0, 1),),)),
        shardings.Sharding("one", count, (shard,)),
        shardings.Sharding("one", count, (shard,)),
    )
    with pytest.raises(AssertionError, match="q1=1073741825"):
        worklist._build(plan.step(0, 0).tasks, shard, RecordMap.whole(shard), 1, 1)


MILLION = 1 << 20
SHORT = tuple(Band(a, a + 7, a, a + 7) for a in range(0, MILLION // 8, 10))


@pytest.mark.parametrize(
    ("mask", "sharding", "items", "segments"),
    [
        (masks.causal(MILLION), "zigzag", 512, 3),
        (masks.documents([*range(0, MILLION, 10), MILLION]), "contiguous", 512, 13108),
        (Mask(MILLION, MILLION, (SHORT,)), "contiguous", 512, 13108),
    ],
    ids=["1M causal", "documents of 10 tokens", "documents with gaps"],
)
def test_tables_of_a_million_tokens(mask: Mask, sharding: str, items: int, segments: int) -> None:
    """One of 8 ranks, own keys: tables do not grow with anything but what is there."""
    queries = shardings.by_name(sharding, mask, 8, "q")
    keys = shardings.by_name(sharding, mask, 8, "k").split(masks.document_cuts(mask))
    step = Plan(mask, queries, keys).step(0, 0)
    where = RecordMap.whole(keys.shards[0])
    work = work_list(step.tasks, queries.shards[0], where, 1)
    assert (len(work.items), len(work.segments)) == (items, segments)
    written = Written(1)
    rows = sum(stop - start for start, stop in work.seen[0])
    for mode in (WRITE, MERGE):
        assert int((work.claim(written, MILLION // 8) == mode).sum()) == rows
