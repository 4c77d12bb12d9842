"""Plans: every allowed pair is computed once, and what moves is what the tasks need."""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import allowed, pairs, plans, task_pairs

from ringfa4 import mask as masks
from ringfa4 import shard as sharding
from ringfa4.mask import Band, Mask, document_cuts
from ringfa4.plan import Plan, RecordRange, Task
from ringfa4.shard import RECORD, Sharding

Maker = Callable[[int, int], Sharding]


def computed(plan: Plan) -> list[Counter[tuple[int, int]]]:
    """How often all ranks and steps together compute each pair, by row of the mask."""
    rows = [Counter[tuple[int, int]]() for _ in range(plan.mask.batch)]
    for rank in range(plan.world):
        for step in plan.steps(rank):
            for task in step.tasks:
                rows[task.batch or 0].update(task_pairs(plan, rank, step, task))
    return rows


def covered(plan: Plan) -> bool:
    """Whether every allowed pair is computed once, and nothing else."""
    expected = [Counter(allowed(plan.mask, row)) for row in range(plan.mask.batch)]
    return computed(plan) == expected


# ---- properties, for any mask under any shardings -----------------------------------------------


@settings(max_examples=400)
@given(plans())
def test_every_allowed_pair_is_computed_once_and_nothing_else(plan: Plan) -> None:
    assert covered(plan)


@settings(max_examples=200)
@given(plans())
def test_tasks_are_what_they_say(plan: Plan) -> None:
    """One task a row and pair of chunks, in order; tight bounding ranges; no empty band."""
    for rank in range(plan.world):
        for step in plan.steps(rank):
            keys = [(task.batch or 0, task.q_chunk, task.k_chunk) for task in step.tasks]
            assert keys == sorted(set(keys))
            for task in step.tasks:
                assert (task.batch is None) == (plan.mask.batch == 1)
                exact = set().union(*map(pairs, task.bands))
                rows, columns = {a for a, _ in exact}, {b for _, b in exact}
                assert task.q == (min(rows), max(rows) + 1)
                assert task.k == (min(columns), max(columns) + 1)
                assert task.area == len(exact) == sum(band.area for band in task.bands)
                assert all(band.trimmed() == band for band in task.bands)


def test_tasks_and_ranges_come_in_chunk_order_whatever_the_bands_order() -> None:
    """The first band reaches the second chunk only."""
    mask = Mask(4, 8, ((Band(0, 2, 4, 8), Band(2, 4, 0, 4)),))
    fresh, plan = (Plan(mask, sharding.contiguous(4, 1), sharding.zigzag(8, 1)) for _ in range(2))
    step = plan.step(0, 0)
    assert [task.k_chunk for task in step.tasks] == [r.chunk for r in step.ranges] == [0, 1]
    assert fresh.ranges(0, 0) == step.ranges


def test_bounding_ranges_span_all_bands_whatever_their_order() -> None:
    """In the second k chunk the first band (j <= i) begins below the second one (j > i)."""
    mask = Mask(8, 8, ((Band(0, 8, 0, 8, None, 0), Band(1, 8, 0, 8, 1, None)),))
    step = Plan(mask, sharding.contiguous(8, 1), sharding.zigzag(8, 1)).step(0, 0)
    assert [(task.q, task.k) for task in step.tasks] == [((0, 8), (0, 4)), ((1, 8), (0, 4))]
    mask = Mask(4, 8, ((Band(0, 2, 4, 8), Band(2, 4, 0, 4)),))
    (task,) = Plan(mask, sharding.contiguous(4, 1), sharding.contiguous(8, 1)).step(0, 0).tasks
    assert (task.q, task.k) == ((0, 4), (0, 8))


@pytest.mark.parametrize("near", [0, 384])
def test_records_span_the_needs_of_all_q_chunks(near: int) -> None:
    """Two q chunks need the first and the last of four records, in either order."""
    far = 384 - near
    mask = Mask(256, 512, ((Band(0, 128, near, near + 128), Band(128, 256, far, far + 128)),))
    fresh, plan = (
        Plan(mask, sharding.zigzag(256, 1), sharding.contiguous(512, 1)) for _ in range(2)
    )
    assert plan.step(0, 0).ranges == fresh.ranges(0, 0) == (RecordRange(0, 0, 4),)


@settings(max_examples=200)
@given(plans())
def test_every_transfer_has_both_ends(plan: Plan) -> None:
    """What r reads from s in step t is what s expects its reader of step t to ask for."""
    ranks = range(plan.world)
    for t in ranks:
        assert sorted(plan.owner(rank, t) for rank in ranks) == list(ranks), "nobody is read twice"
        for rank in ranks:
            step = plan.step(rank, t)
            assert step.index == t and step.source == step.owner == plan.owner(rank, t)
            assert plan.reader(step.source, t) == rank
            fresh = Plan(plan.mask, plan.q_sharding, plan.k_sharding)
            assert fresh.ranges(plan.reader(step.source, t), t) == step.ranges
    assert all(plan.owner(rank, 0) == rank for rank in ranks), "step 0 is local"


@settings(max_examples=200)
@given(plans())
def test_what_is_asked_about_a_step_agrees_with_its_tasks(plan: Plan) -> None:
    for rank in range(plan.world):
        steps = plan.steps(rank)
        assert [plan.busy(rank, step.index) for step in steps] == [bool(s.tasks) for s in steps]
        assert all(bool(step.ranges) == bool(step.tasks) for step in steps), (
            "empty steps move nothing"
        )
        assert plan.areas(rank) == tuple(step.area for step in steps)
        for step in steps:
            spans = defaultdict[tuple[int | None, int], list[int]](list)
            for task in step.tasks:
                spans[task.batch, task.q_chunk] += task.q
            rows = sum(max(edges) - min(edges) for edges in spans.values())
            expected = (step.area, len(step.tasks), step.records, rows)
            assert plan.tally(rank, step.index) == expected
        assert plan.work(rank) == sum(step.area for step in steps)
        readers = [(t, plan.step(plan.reader(rank, t), t)) for t in range(1, plan.world)]
        assert all(step.owner == rank for _, step in readers)
        assert plan.contributions(rank) == tuple(t for t, step in readers if step.tasks)
    assert sum(map(plan.work, range(plan.world))) == plan.mask.area


@st.composite
def long_plans(draw: st.DrawFn) -> Plan:
    """Shards of many records, so that which of them are read matters."""
    seq, world = draw(st.integers(1, 4000)), draw(st.integers(1, 4))
    inner = draw(st.lists(st.integers(0, seq), max_size=6))
    left = draw(st.none() | st.integers(0, 700))
    mask = masks.documents([0, *sorted(inner), seq], left=left)
    made = draw(st.sampled_from([sharding.contiguous, sharding.zigzag, sharding.striped]))(
        seq, world
    )
    keys = made.split(document_cuts(mask)) if draw(st.booleans()) else made
    return Plan(mask, made, keys)


@settings(max_examples=60)
@given(long_plans())
def test_a_step_reads_from_the_first_to_the_last_record_it_needs(plan: Plan) -> None:
    (bands,) = plan.mask.rows
    band_of = {i: band for band in bands for i in range(band.q0, band.q1)}  # documents: one each
    for rank in range(plan.world):
        edges = Counter[int]()
        for i in plan.q_sharding.shards[rank].positions():
            if i in band_of:
                start, stop = band_of[i].keys_of(i)
                edges.update([start])
                edges.subtract([stop])
        depth = list(accumulate(edges[j] for j in range(plan.mask.seq_k)))
        for step in plan.steps(rank):
            expected = []
            for number, chunk in enumerate(plan.k_sharding.shards[step.owner].chunks):
                seen = [b for b, j in enumerate(chunk.positions()) if depth[j]]
                if seen:
                    first, last = seen[0] // RECORD, seen[-1] // RECORD
                    expected.append(RecordRange(number, first, last + 1))
            assert step.ranges == tuple(expected)
            assert step.records == sum(r.stop - r.start for r in expected)


# ---- what moves, by example ---------------------------------------------------------------------


def test_a_window_fetches_its_halo_only() -> None:
    """4 ranks of 8 records, 200 tokens back: two records of the neighbour, none of the others."""
    four = sharding.contiguous(4096, 4)
    plan = Plan(masks.window(4096, left=200), four, four)
    for rank in range(4):
        local, near, *far = plan.steps(rank)
        assert local.ranges == (RecordRange(0, 0, 8),)
        assert near.ranges == ((RecordRange(0, 6, 8),) if rank else ())
        assert [step.records for step in far] == [0, 0]


def test_a_window_under_zigzag_fetches_the_halo_of_each_run() -> None:
    """8 runs of 4 records; rank 1 holds runs 1 and 6 and needs the ends of runs 0 and 5."""
    four = sharding.zigzag(4096, 4)
    plan = Plan(masks.window(4096, left=127), four, four)
    fetched = {step.owner: step.ranges for step in plan.steps(1)[1:]}
    assert fetched == {0: (RecordRange(0, 3, 4),), 2: (RecordRange(1, 3, 4),), 3: ()}


@pytest.mark.parametrize("world", [2, 3, 8, 72])
def test_causal_steps_do_not_convoy(world: int) -> None:
    """Rank r reads its neighbour first; read the other way, every rank would begin with rank 0."""
    made = sharding.contiguous(world * 16, world)
    plan = Plan(masks.causal(world * 16), made, made)
    for rank in range(1, world):
        busy = [step for step in plan.steps(rank)[1:] if step.ranges]
        assert [step.source for step in busy] == list(range(rank - 1, -1, -1))
        assert busy[0].index == 1
    assert not any(step.ranges for step in plan.steps(0)[1:])


def test_a_record_never_holds_a_long_document_and_another() -> None:
    mask = masks.documents([0, 300, 310, 320, 700], seq_q=768)
    made = sharding.contiguous(768, 2)
    plan = Plan(mask, made, made.split(document_cuts(mask)))
    held = [(c.start, c.stop) for s in plan.k_sharding.shards for c in s.chunks]
    assert held == [(0, 300), (300, 320), (320, 384), (384, 700), (700, 768)]
    assert covered(plan)
    # Nor is rank 1's second chunk, the padding, ever read.
    assert not any(r.chunk == 1 for step in plan.steps(1) if step.owner == 1 for r in step.ranges)


# ---- faults reported in public trackers (cases.md) ----------------------------------------------


@pytest.mark.parametrize("make", [sharding.contiguous, sharding.zigzag, sharding.striped])
def test_a_rank_holding_only_padding_has_no_work(make: Maker) -> None:
    """cases.md 17."""
    made = sharding.contiguous(16, 4)
    plan = Plan(masks.documents([0, 5, 8], seq_q=16), made, made)
    for rank in (2, 3):
        assert not any(step.tasks or step.ranges for step in plan.steps(rank))
        assert plan.contributions(rank) == ()
    made = make(16, 4)
    assert covered(Plan(masks.documents([0, 5, 8], seq_q=16), made, made))


@pytest.mark.parametrize("make", [sharding.contiguous, sharding.zigzag, sharding.striped])
def test_a_trailing_empty_document_changes_nothing(make: Maker) -> None:
    """cases.md 21."""
    made = make(9, 3)
    with_it, without = (Plan(masks.documents(cu), made, made) for cu in ([0, 4, 9, 9], [0, 4, 9]))
    assert with_it == without and with_it.digest == without.digest
    assert covered(with_it)


@pytest.mark.parametrize("make", [sharding.contiguous, sharding.zigzag, sharding.striped])
def test_fewer_tokens_than_ranks(make: Maker) -> None:
    """cases.md 22 and 15."""
    for seq, world in ((2, 4), (3, 4), (4, 2), (0, 4)):
        made = make(seq, world)
        plan = Plan(masks.causal(seq), made, made)
        assert covered(plan)


def test_full_attention_on_zigzag_shards() -> None:
    """cases.md 29: the sharding must not bring a causal mask along."""
    made = sharding.zigzag(24, 3)
    assert covered(Plan(masks.full(24), made, made))


@pytest.mark.parametrize("make", [sharding.contiguous, sharding.zigzag, sharding.striped])
def test_a_window_is_kept_under_every_sharding(make: Maker) -> None:
    """cases.md 31: S=64, W=4, window 8."""
    made = make(64, 4)
    plan = Plan(masks.window(64, left=7), made, made)
    assert covered(plan)
    assert plan.mask.area == 64 * 8 - 28


def test_uneven_keys_in_cross_attention() -> None:
    """cases.md 33: keys [7, 3], 10 queries."""
    plan = Plan(masks.full(10), sharding.contiguous(10, 2), sharding.uneven([7, 3]))
    assert covered(plan)
    assert [plan.areas(rank) for rank in range(2)] == [(35, 15), (15, 35)]


# ---- speed, counted -----------------------------------------------------------------------------


def packed(seq: int, number: int) -> Mask:
    inner = random.Random(0).sample(range(1, seq), number - 1)
    return masks.documents([0, *sorted(inner), seq])


MILLION = 1 << 20


@pytest.mark.parametrize(
    ("mask", "make"),
    [
        (masks.causal(MILLION), sharding.zigzag),
        (masks.window(MILLION, left=4096, right=4096), sharding.zigzag),
        (packed(MILLION, 1000), sharding.contiguous),
        (packed(MILLION, 1000), sharding.zigzag),
        (packed(MILLION, 1000), sharding.striped),
        (packed(MILLION, 1000), None),
    ],
    ids=[
        "causal-zigzag",
        "window-zigzag",
        "packed-contiguous",
        "packed-zigzag",
        "packed-striped",
        "packed-balanced",
    ],
)
def test_a_rank_tries_few_bands_that_it_does_not_compute(
    mask: Mask, make: Maker | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's view of 1M tokens on 72: intersections tried against those found to be there.

    All bands for all pairs of chunks would be 2 * 144 * 1,000 under zigzag, for 17 tasks.
    """
    made = sharding.balanced(mask, 72) if make is None else make(MILLION, 72)
    plan = Plan(mask, made, made)
    tried = 0
    within = Band.within

    def counted(self: Band, q0: int, q1: int, k0: int, k1: int) -> Band | None:
        nonlocal tried
        tried += 1
        return within(self, q0, q1, k0, k1)

    monkeypatch.setattr(Band, "within", counted)
    found = sum(len(task.bands) for step in plan.steps(7) for task in step.tasks)
    assert found <= tried <= 1.25 * found + 20


def test_asking_about_other_ranks_keeps_no_tasks() -> None:
    made = sharding.zigzag(4096, 8)
    plan = Plan(packed(4096, 40), made, made)
    mine = sum(len(step.tasks) for step in plan.steps(3))

    def alive() -> int:
        gc.collect()
        return sum(type(thing) is Task for thing in gc.get_objects())

    before = alive()
    assert before >= mine > 0
    for rank in range(8):
        plan.areas(rank), plan.work(rank), plan.contributions(rank)
        for t in range(8):
            plan.ranges(rank, t), plan.busy(rank, t)
    plan.balance, plan.digest  # noqa: B018
    assert alive() == before
    assert plan.step(3, 2) is plan.step(3, 2)


def test_balance_is_most_work_over_the_mean() -> None:
    """Causal, 4 tokens: work 1 + 2 and 3 + 4 contiguous, 1 + 4 and 2 + 3 zigzag."""
    two = sharding.contiguous(4, 2)
    assert Plan(masks.causal(4), two, two).balance == 7 / 5
    two = sharding.zigzag(4, 2)
    assert Plan(masks.causal(4), two, two).balance == 1.0
    assert Plan(masks.documents([0], seq_q=4), two, two).balance == 1.0


# ---- digest and refusals ------------------------------------------------------------------------


def test_the_digest_is_equal_exactly_for_equal_plans() -> None:
    two, mask = sharding.contiguous(8, 2), masks.documents([0, 3, 8])
    other_row = masks.stack([mask, masks.documents([0, 4, 8])])
    different = [
        Plan(mask, two, two),
        Plan(masks.documents([0, 4, 8]), two, two),
        Plan(masks.documents([0, 3, 8], causal=False), two, two),
        Plan(masks.documents([0, 3, 8], left=1), two, two),
        Plan(masks.stack([mask, mask]), two, two),
        Plan(other_row, two, two),
        Plan(mask, sharding.uneven([3, 5]), two),
        Plan(mask, two, sharding.uneven([3, 5])),
        Plan(mask, two, two.split([3])),
        Plan(mask, sharding.contiguous(8, 4), sharding.contiguous(8, 4)),
        Plan(mask, sharding.striped(8, 2), sharding.striped(8, 2)),
    ]
    assert len({plan.digest for plan in different}) == len(different)
    again = Plan(masks.documents((0, 3, 3, 8)), sharding.uneven([4, 4]), sharding.contiguous(8, 2))
    assert again.digest == different[0].digest and len(again.digest) == 32


@pytest.mark.parametrize(
    ("mask", "q", "k", "names"),
    [
        (masks.full(8), sharding.contiguous(8, 2), sharding.contiguous(8, 4), ["2", "4"]),
        (
            masks.full(8),
            sharding.contiguous(7, 2),
            sharding.contiguous(8, 2),
            ["7 queries", "8 x 8"],
        ),
        (masks.full(8), sharding.contiguous(8, 2), sharding.contiguous(9, 2), ["9 keys", "8 x 8"]),
        (
            masks.causal(8),
            sharding.striped(8, 2),
            sharding.contiguous(8, 2),
            ["'causal'", "'striped' has 2", "'contiguous' has 1"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_values(
    mask: Mask, q: Sharding, k: Sharding, names: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        Plan(mask, q, k)
    for name in names:
        assert name in str(caught.value)


def test_strides_may_differ_where_nothing_bounds_the_diagonal() -> None:
    mask = masks.documents([0, 4, 9], causal=False)
    assert covered(Plan(mask, sharding.striped(9, 3), sharding.zigzag(9, 3)))
    assert covered(Plan(mask, sharding.contiguous(9, 3), sharding.striped(9, 3)))


@pytest.mark.parametrize(("rank", "index"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_ranks_and_steps_that_are_not_there_are_refused(rank: int, index: int) -> None:
    two = sharding.contiguous(8, 2)
    with pytest.raises(ValueError, match=f"{rank=} and {index=}"):
        Plan(masks.full(8), two, two).step(rank, index)
