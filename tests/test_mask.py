"""Bands and masks against their definitions, pair by pair."""

from __future__ import annotations

import itertools
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import allowed, any_mask, bands, cu_seqlens, pairs, where

from ringfa4 import mask as masks
from ringfa4.mask import Band, Intervals, Mask, document_cuts
from ringfa4.shard import contiguous

# ---- the algebra of bands -----------------------------------------------------------------------


@settings(max_examples=200)
@given(bands())
def test_a_band_is_its_inequalities(band: Band) -> None:
    exact = pairs(band)
    assert band.area == len(exact)
    for i in range(-6, 16):
        keys = {j for a, j in exact if a == i}
        assert set(range(*band.keys_of(i))) == keys
        assert {j for j in range(-6, 16) if band.contains(i, j)} == keys


@settings(max_examples=300)
@given(bands())
def test_trimming_keeps_the_pairs_and_nothing_more(band: Band) -> None:
    exact, trimmed = pairs(band), band.trimmed()
    if not exact:
        assert trimmed is None
        return
    assert trimmed is not None and pairs(trimmed) == exact
    rows, columns = {i for i, _ in exact}, {j for _, j in exact}
    assert (trimmed.q0, trimmed.q1) == (min(rows), max(rows) + 1)
    assert (trimmed.k0, trimmed.k1) == (min(columns), max(columns) + 1)
    box = Band(trimmed.q0, trimmed.q1, trimmed.k0, trimmed.k1)
    for side, bound in (("lo", trimmed.lo), ("hi", trimmed.hi)):
        if bound is not None:
            alone = Band(box.q0, box.q1, box.k0, box.k1, **{side: bound})
            assert alone.area < box.area, f"{side} of {trimmed} excludes nothing"


@settings(max_examples=300)
@given(bands(), st.integers(-3, 3), st.integers(-3, 3))
def test_trimmed_bands_are_equal_exactly_when_their_pairs_are(band: Band, lo: int, hi: int) -> None:
    """Bounds moved a little often change nothing, and then must not show."""
    other = Band(
        band.q0,
        band.q1,
        band.k0,
        band.k1,
        None if band.lo is None else band.lo + lo,
        None if band.hi is None else band.hi + hi,
    )
    assert (band.trimmed() == other.trimmed()) == (pairs(band) == pairs(other))


@settings(max_examples=200)
@given(bands(), bands())
def test_within_is_the_intersection_with_a_box(band: Band, other: Band) -> None:
    box = (other.q0, other.q1, other.k0, other.k1)
    found = band.within(*box)
    assert (set() if found is None else pairs(found)) == pairs(band) & pairs(Band(*box))
    assert found is None or found == found.trimmed()


@settings(max_examples=100)
@given(bands(), st.integers(-9, 9), st.integers(-9, 9))
def test_shifted_moves_every_pair(band: Band, dq: int, dk: int) -> None:
    assert pairs(band.shifted(dq, dk)) == {(i + dq, j + dk) for i, j in pairs(band)}


@settings(max_examples=300)
@given(bands(), st.integers(0, 6), st.integers(0, 6), st.integers(1, 5))
def test_strided_rewrites_a_band_in_stripes(band: Band, q: int, k: int, stride: int) -> None:
    exact, found = pairs(band), band.strided(q, k, stride)
    grid = [(a, b) for a in range(-12, 20) for b in range(-12, 20)]
    assert pairs(found) == {(a, b) for a, b in grid if (q + stride * a, k + stride * b) in exact}


@settings(max_examples=100)
@given(bands(), st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), st.integers(1, 5))
def test_a_box_may_be_striped_differently_on_each_side(
    band: Band, q: int, k: int, q_stride: int, k_stride: int
) -> None:
    box = Band(band.q0, band.q1, band.k0, band.k1)
    exact, found = pairs(box), box.strided(q, k, q_stride, k_stride)
    grid = [(a, b) for a in range(-12, 20) for b in range(-12, 20)]
    assert pairs(found) == {
        (a, b) for a, b in grid if (q + q_stride * a, k + k_stride * b) in exact
    }


@settings(max_examples=200)
@given(bands(), st.integers(-8, 12), st.integers(0, 12), st.integers(1, 6))
def test_area_of_some_rows(band: Band, start: int, count: int, step: int) -> None:
    rows = range(start, start + step * count, step)
    assert band.rows_area(rows) == sum(i in rows for i, _ in pairs(band))


def test_area_of_a_million_tokens_is_exact() -> None:
    n = 1 << 20
    assert masks.causal(n).area == n * (n + 1) // 2
    assert masks.window(n, left=4095).area == n * 4096 - 4096 * 4095 // 2


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=7))
def test_intervals_find_every_overlap(drawn: list[tuple[int, int]]) -> None:
    (start, stop), *spans = [(a, a + n) for a, n in drawn]
    expected = {n for n, (a, b) in enumerate(spans) if a < stop and start < b}
    found = Intervals(spans).touching(start, stop)
    assert set(found) == expected and len(found) == len(expected)
    assert [spans[n] for n in found] == sorted(spans[n] for n in found)


# ---- masks --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(bands(), max_size=4))
def test_a_mask_takes_disjoint_bands_and_only_those(found: list[Band]) -> None:
    moved = [band.shifted(5, 5) for band in found]
    exact = [pairs(band) for band in moved]
    disjoint = sum(map(len, exact)) == len(set().union(*exact))
    if disjoint:
        mask = Mask(20, 20, (tuple(moved),))
        assert allowed(mask, 0) == set().union(*exact)
        assert mask.area == len(allowed(mask, 0))
        assert mask == Mask(20, 20, (tuple(reversed(moved)),))
        assert all(band == band.trimmed() for band in mask.rows[0])
    else:
        with pytest.raises(ValueError, match="overlap"):
            Mask(20, 20, (tuple(moved),))


def test_an_overlap_is_found_whatever_lies_between() -> None:
    """The first and the last overlap; the bands sorted between them touch neither."""
    long, last = Band(0, 9, 0, 3), Band(7, 9, 2, 4)
    between = (Band(1, 2, 4, 5), Band(2, 9, 8, 9), Band(3, 4, 5, 6))
    assert Mask(9, 9, ((long, *between),)).area == 27 + 1 + 7 + 1
    with pytest.raises(ValueError, match="overlap"):
        Mask(9, 9, ((long, *between, last),))


def test_the_order_of_bands_is_not_part_of_a_mask() -> None:
    found = (
        Band(0, 9, 0, 1),
        Band(0, 9, 1, 2),
        Band(0, 8, 2, 9, 3, None),
        Band(0, 8, 2, 9, None, 1),
        Band(0, 8, 2, 9, 2, 2),
    )
    assert len({Mask(9, 9, (order,)) for order in permutations(found)}) == 1


@settings(max_examples=50)
@given(any_mask())
def test_allowed_is_the_definition(mask: Mask) -> None:
    for row in range(mask.batch):
        found = where(mask.seq_q, mask.seq_k, lambda i, j, row=row: mask.allowed(row, i, j))
        assert found == allowed(mask, row)


SIZES = [(0, 0), (1, 1), (7, 7), (5, 9), (9, 5), (0, 3), (3, 0)]


@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_full_and_causal(sq: int, sk: int) -> None:
    assert allowed(masks.full(sq, sk), 0) == where(sq, sk, lambda i, j: True)
    assert allowed(masks.causal(sq, sk), 0) == where(sq, sk, lambda i, j: j <= i)
    last = masks.causal(sq, sk, "bottom-right")
    assert allowed(last, 0) == where(sq, sk, lambda i, j: j <= i + sk - sq)


@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
@pytest.mark.parametrize("right", [None, 0, 3])
@pytest.mark.parametrize("left", [None, 0, 2])
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_window(sq: int, sk: int, left: int | None, right: int | None, align: str) -> None:
    shift = 0 if align == "top-left" else sk - sq

    def seen(i: int, j: int) -> bool:
        back, ahead = i + shift - j, j - i - shift
        return (left is None or back <= left) and (right is None or ahead <= right)

    mask = masks.window(sq, sk, left=left, right=right, align=align)
    assert allowed(mask, 0) == where(sq, sk, seen)


def test_a_window_counts_the_token_itself_too() -> None:
    assert masks.window(64, left=8).rows[0][0].keys_of(20) == (12, 21)


def test_prefix_lm_and_chunked() -> None:
    for prefix in range(8):
        rule = lambda i, j, p=prefix: j < p or j <= i  # noqa: E731
        assert allowed(masks.prefix_lm(7, min(prefix, 7)), 0) == where(7, 7, rule)
    for chunk in (1, 3, 7, 9):
        together = lambda i, j, c=chunk: i // c == j // c  # noqa: E731
        assert allowed(masks.chunked(7, chunk, causal=False), 0) == where(7, 7, together)
        past = {(i, j) for i, j in where(7, 7, together) if j <= i}
        assert allowed(masks.chunked(7, chunk), 0) == past


REACH = st.none() | st.integers(0, 4)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 5), st.booleans(), REACH, REACH, st.booleans())
def test_documents(
    data: st.DataObject, number: int, causal: bool, left: int | None, right: int | None, end: bool
) -> None:
    """Different q and k lengths, empty documents, padding at the end, windows inside documents."""
    cu_q, cu_k = data.draw(cu_seqlens(12, number)), data.draw(cu_seqlens(14, number))
    right = None if causal else right
    expected = set()
    for d in range(number):
        q, k = range(cu_q[d], cu_q[d + 1]), range(cu_k[d], cu_k[d + 1])
        shift = len(k) - len(q) if end else 0
        for a, i in enumerate(q):
            for b, j in enumerate(k):
                ahead = b - a - shift
                if causal and ahead > 0:
                    continue
                if (left is None or -ahead <= left) and (right is None or ahead <= right):
                    expected.add((i, j))
    mask = masks.documents(
        cu_q,
        cu_k,
        causal=causal,
        left=left,
        right=right,
        align="bottom-right" if end else "top-left",
        seq_q=12,
        seq_k=14,
    )
    assert allowed(mask, 0) == expected
    assert mask.documents == tuple(sorted({k for k in cu_k if 0 < k < 14}))


def test_trailing_and_inner_empty_documents_change_nothing() -> None:
    """cases.md 21."""
    assert masks.documents([0, 5, 9, 9]) == masks.documents([0, 5, 9])
    assert masks.documents([0, 5, 5, 9]) == masks.documents([0, 5, 9])
    assert masks.documents([0, 0, 5, 9]) == masks.documents([0, 5, 9])
    assert masks.documents([0]) == masks.full(0)


def test_padding_sees_nothing_and_nothing_sees_it() -> None:
    mask = masks.documents([0, 7], seq_q=8)
    assert (mask.seq_q, mask.seq_k, mask.area) == (8, 8, 28)
    assert not any(
        mask.allowed(0, 7, j) or mask.allowed(0, i, 7) for i in range(8) for j in range(8)
    )
    assert mask.documents == (7,)


def test_equal_lengths_give_equal_masks_whatever_holds_them() -> None:
    """cases.md 26: a plan cache keyed by the mask must hit for cloned cu_seqlens."""
    cu = [0, 300, 300, 1000]
    made = [
        masks.documents(kind(cu))
        for kind in (list, tuple, torch.tensor, lambda c: torch.tensor(c).int())
    ]
    assert len(set(made)) == 1
    assert masks.documents(cu) != masks.documents([0, 300, 301, 1000])
    assert masks.documents(cu) == masks.documents(cu, torch.tensor(cu).clone())
    assert all(type(band.q0) is int for mask in made for band in mask.rows[0])


def test_masks_of_the_same_bands_are_equal_whatever_their_name() -> None:
    assert masks.window(9, left=None) == masks.causal(9) == masks.prefix_lm(9, 0)
    assert masks.window(9, left=8, right=8) == masks.full(9)
    assert hash(masks.chunked(9, 9)) == hash(masks.causal(9))


def test_stack_keeps_rows_and_their_documents_apart() -> None:
    mask = masks.stack([masks.causal(9), masks.documents([0, 4, 9]), masks.full(9)])
    assert mask.batch == 3
    assert [allowed(mask, row) for row in range(3)] == [
        where(9, 9, lambda i, j: j <= i),
        where(9, 9, lambda i, j: j <= i and (i < 4) == (j < 4)),
        where(9, 9, lambda i, j: True),
    ]
    assert mask.starts == ((), (4,), ())
    assert mask.area == 45 + 10 + 15 + 81


def test_features_name_only_what_excludes_something() -> None:
    assert masks.full(9).features == frozenset()
    assert masks.causal(9).features == {"hi"}
    assert masks.window(9, left=2).features == {"lo", "hi"}
    assert masks.window(9, left=9, right=None).features == frozenset()
    assert masks.documents([0, 4, 9], causal=False).features == {"many"}
    assert masks.stack([masks.causal(9), masks.full(9)]).features == {"hi"}


def _long(edges: tuple[int, ...], at_least: int) -> set[int]:
    """Numbers of the documents with at least ``at_least`` tokens."""
    return {n for n, (a, b) in enumerate(itertools.pairwise(edges)) if b - a >= at_least}


@settings(max_examples=200)
@given(any_mask(), st.integers(1, 8), st.integers(1, 3))
def test_cuts_isolate_long_documents_and_no_others(mask: Mask, at_least: int, world: int) -> None:
    cuts = document_cuts(mask, at_least)
    shards = contiguous(mask.seq_k, world).split(cuts).shards
    useful = set()
    for own in mask.starts:
        edges = (0, *own, mask.seq_k)
        owner = [n for n, (a, b) in enumerate(itertools.pairwise(edges)) for _ in range(a, b)]
        long = _long(edges, at_least)
        useful |= {edges[n] for n in long} | {edges[n + 1] for n in long}
        for chunk in (c for shard in shards for c in shard.chunks):
            held = {owner[j] for j in chunk.positions()}
            assert len(held) == 1 or not held & long
    assert set(cuts) == useful - {0, mask.seq_k}


def test_short_documents_are_not_cut() -> None:
    cu = [0, 100, 227, 355, 400, 450]
    assert document_cuts(masks.documents(cu)) == (227, 355)
    assert document_cuts(masks.documents(cu), at_least=127) == (100, 227, 355)
    assert document_cuts(masks.causal(450)) == ()


def test_another_rows_starts_do_not_hide_a_long_document() -> None:
    """Row 0 alone needs the cut at 200; the union of both rows' starts has short documents only."""
    short = masks.documents(range(0, 401, 100))
    assert document_cuts(short) == ()
    assert document_cuts(masks.stack([masks.documents([0, 200, 400]), short])) == (200,)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: masks.full(-1), ["seq_q=-1"]),
        (lambda: Mask(4, 4, ()), ["at least one row"]),
        (lambda: Mask(4, 4, ((Band(0, 5, 0, 4),),)), ["q1=5", "4 queries"]),
        (lambda: Mask(4, 4, ((Band(0, 4, -1, 4),),)), ["k0=-1"]),
        (lambda: Mask(4, 4, ((),), starts=((4,),)), ["1..3", "(4,)"]),
        (lambda: Mask(4, 4, ((),), starts=((3, 2),)), ["(3, 2)"]),
        (lambda: Mask(4, 4, ((),), starts=((), ())), ["1 rows", "2"]),
        (lambda: masks.causal(4, 4, "middle"), ["align='middle'"]),
        (lambda: masks.window(4, left=-1), ["left=-1", "right=0"]),
        (lambda: masks.prefix_lm(4, 5), ["prefix=5", "seq=4"]),
        (lambda: masks.chunked(4, 0), ["chunk=0"]),
        (lambda: masks.documents([]), ["cu_seqlens_q"]),
        (lambda: masks.documents([1, 4]), ["cu_seqlens_q", "[1, 4]"]),
        (lambda: masks.documents([0, 4], [0, 3, 2]), ["cu_seqlens_k", "[0, 3, 2]"]),
        (lambda: masks.documents([0, 4], [0, 2, 4]), ["1 query documents", "2 key"]),
        (lambda: masks.documents([0, 4], seq_q=3), ["q=4", "seq_q=3"]),
        (lambda: masks.documents([0, 4], right=1), ["causal=True", "right=1"]),
        (lambda: masks.documents([0, 4], left=-2), ["left=-2"]),
        (lambda: masks.stack([]), ["at least one mask"]),
        (lambda: masks.stack([masks.full(4), masks.full(5)]), ["(4, 4)", "(5, 5)"]),
        (lambda: masks.stack([masks.stack([masks.full(4)] * 2)]), ["batches=[2]"]),
    ],
)
def test_bad_masks_are_refused_with_the_values(make: object, names: list[str]) -> None:
    assert callable(make)
    with pytest.raises(ValueError) as caught:
        make()
    for name in names:
        assert name in str(caught.value)
