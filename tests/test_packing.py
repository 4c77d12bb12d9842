"""Packed documents as users bring them: lists and tensors, padded and not, positions and labels."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import Case, check, ranks, run
from torch import Tensor

from ringfa4 import ContextParallel, packing
from ringfa4 import mask as masks
from ringfa4.context import Context
from ringfa4.mask import Mask

CU = [0, 40, 40, 233, 300]
"""The second document is empty."""


# ---- cu_seqlens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, lambda x: torch.tensor(x).int()])
def test_cu_seqlens_come_in_any_form(make: Any) -> None:
    def rank(context: Context) -> Mask:
        return ContextParallel(context, cu_seqlens=make(CU), cu_seqlens_k=make(CU)).mask

    assert ranks(1, rank) == [masks.documents(CU)]


def test_cu_seqlens_of_lengths() -> None:
    assert packing.cu_seqlens([40, 0, 193, 67]) == CU
    assert packing.cu_seqlens(torch.tensor([40, 0, 193, 67])) == CU
    assert packing.cu_seqlens([]) == [0]


def test_queries_and_keys_with_documents_of_their_own() -> None:
    """Document n of the queries sees document n of the keys, from a list and a tensor."""
    cu_q, cu_k = [0, 5, 5, 30], [0, 9, 140, 200]
    mask = masks.documents(cu_q, cu_k, causal=False)
    options = {"sharding": "contiguous"}
    check(case := Case(mask, world=3, options=options), run(case))

    def rank(context: Context) -> tuple[Mask, Tensor, Tensor]:
        cp = ContextParallel(
            context, cu_seqlens=cu_q, cu_seqlens_k=torch.tensor(cu_k), mask="full", **options
        )
        return cp.mask, cp.position_ids(), cp.position_ids(side="k")

    results = ranks(3, rank)
    assert results[0][0] == mask
    for side, cu in ((1, cu_q), (2, cu_k)):
        got = torch.cat([result[side] for result in results], 1)
        assert got.tolist() == [[i for a, b in pairwise(cu) for i in range(b - a)]]


# ---- padded thd ---------------------------------------------------------------------------------

STARTS, LENGTHS, TOTAL = [0, 128, 256, 384], [100, 0, 128, 1], 512
"""Documents at strided offsets, with 28, 128, 0 and 127 tokens of padding behind them."""


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5), st.integers(0, 3))
@settings(max_examples=60)
def test_padding_sees_nothing_and_nothing_sees_it(
    documents: list[tuple[int, int]], tail: int
) -> None:
    starts, lengths, document_of, at = [], [], {}, 0
    for n, (length, padding) in enumerate(documents):
        starts.append(at)
        lengths.append(length)
        document_of |= {at + i: n for i in range(length)}
        at += length + padding
    mask = packing.padded_documents(starts, lengths, seq_len=at + tail)
    assert mask.seq_q == mask.seq_k == at + tail
    for i in range(mask.seq_q):
        for j in range(mask.seq_k):
            same = i in document_of and document_of[i] == document_of.get(j)
            assert mask.allowed(0, i, j) == (same and j <= i), (i, j)


def test_a_padded_cu_seqlens_gives_the_length() -> None:
    mask = packing.padded_documents([*STARTS, TOTAL], LENGTHS)
    assert mask == packing.padded_documents(torch.tensor(STARTS), LENGTHS, seq_len=TOTAL)
    assert packing.padded_documents(STARTS, LENGTHS).seq_q == 385


def test_padded_and_unpadded_are_the_same_attention() -> None:
    """To the rounding of the kernel; with NaN in the padding, which must not come near."""
    padded = packing.padded_documents(STARTS, LENGTHS, seq_len=TOTAL)
    cu = packing.cu_seqlens(LENGTHS)
    gen = torch.Generator().manual_seed(1)
    thd = [torch.randn(cu[-1], 2, 32, generator=gen) for _ in range(4)]
    wide = [packing.add_padding(x, STARTS, LENGTHS, TOTAL) for x in thd]
    outside = torch.ones(TOTAL, dtype=torch.bool)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        outside[start : start + length] = False
    for x in wide[:3]:
        x[outside] = math.nan

    def attend(mask: Mask, tensors: list[Tensor]) -> list[Tensor]:
        def rank(context: Context) -> list[Tensor]:
            cp = ContextParallel(context, mask=mask, sharding="balanced")
            leaves = [packing.to_bshd(x).clone().requires_grad_() for x in tensors[:3]]
            out = cp.unshard(cp.attention(*(cp.shard(x, 1) for x in leaves)), 1)
            out.backward(packing.to_bshd(tensors[3]))
            return [packing.to_thd(x) for x in (out.detach(), *(x.grad for x in leaves))]

        return ranks(2, rank)[0]

    for got, want in zip(attend(padded, wide), attend(masks.documents(cu), thd), strict=True):
        assert (got[outside] == 0).all()
        inside = packing.remove_padding(got, STARTS, LENGTHS)
        torch.testing.assert_close(inside, want, rtol=1e-5, atol=1e-5)


def test_removing_and_adding_padding_are_inverse_and_differentiable() -> None:
    x = torch.randn(TOTAL, 2, 4, dtype=torch.float64, requires_grad=True)
    packed = packing.remove_padding(x, STARTS, LENGTHS)
    assert packed.shape[0] == sum(LENGTHS)
    again = packing.add_padding(packed, STARTS, LENGTHS, TOTAL)
    again.sum().backward()
    kept = x.grad != 0
    assert torch.equal(again[kept], x[kept]) and kept[:, 0, 0].sum() == sum(LENGTHS)
    assert (again[~kept] == 0).all()
    batch_first = packing.remove_padding(x.transpose(0, 1), STARTS, LENGTHS, dim=1)
    assert torch.equal(batch_first.transpose(0, 1), packed)


def test_thd_and_bshd_are_views_of_each_other() -> None:
    x = torch.randn(7, 2, 4)
    assert packing.to_bshd(x).shape == (1, 7, 2, 4)
    assert packing.to_thd(packing.to_bshd(x)).data_ptr() == x.data_ptr()


# ---- positions within documents -----------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped", "balanced"])
def test_position_ids_restart_with_each_document(sharding: str) -> None:
    want = torch.tensor([i for a, b in pairwise([*CU, 310]) for i in range(b - a)])

    def rank(context: Context) -> None:
        cp = ContextParallel(context, cu_seqlens=CU, seq_len=310, sharding=sharding)
        assert torch.equal(cp.position_ids(), want[cp.positions()].unsqueeze(0))
        assert torch.equal(cp.position_ids(side="k"), cp.position_ids())

    ranks(3, rank)


def test_position_ids_of_one_document_are_its_positions() -> None:
    cp = ContextParallel(seq_len=9)
    assert cp.position_ids().tolist() == [list(range(9))]


def test_position_ids_have_a_row_for_each_row_of_the_mask() -> None:
    mask = masks.stack([masks.causal(6), masks.documents([0, 4, 6])])
    got = ContextParallel(mask=mask).position_ids()
    assert got.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]]


def test_stacked_rows_keep_the_documents_of_queries_and_of_keys_apart() -> None:
    crossed = masks.documents([0, 4, 6], [0, 1, 6])
    mask = masks.stack([masks.full(6), crossed])
    where = torch.arange(6)
    assert packing.position_ids(mask, where).tolist()[1] == [0, 1, 2, 3, 0, 1]
    assert packing.position_ids(mask, where, side="k").tolist()[1] == [0, 0, 1, 2, 3, 4]


# ---- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_labels_are_the_next_token_of_the_document(sharding: str) -> None:
    tokens = torch.arange(300).repeat(2, 1) + torch.tensor([[0], [1000]])
    want = tokens + 1
    want[:, [39, 232, 299]] = -7

    def rank(context: Context) -> None:
        cp = ContextParallel(context, cu_seqlens=CU, sharding=sharding)
        got = cp.shift_labels(tokens, ignore_index=-7)
        assert torch.equal(got, want[:, cp.positions()])

    before = tokens.clone()
    ranks(3, rank)
    assert torch.equal(tokens, before)


def test_labels_follow_the_documents_of_each_batch_row() -> None:
    mask = masks.stack([masks.causal(4), masks.documents([0, 2, 4])])
    got = packing.shift_labels(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), mask)
    assert got.tolist() == [[2, 3, 4, -100], [6, -100, 8, -100]]


def test_padding_is_not_the_label_of_the_last_token() -> None:
    mask = packing.padded_documents([0, 4], [3, 2], seq_len=8)
    got = packing.shift_labels(torch.tensor([1, 2, 3, -100, 5, 6, -100, -100]), mask)
    assert got.tolist() == [2, 3, -100, -100, 6, -100, -100, -100]


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_or_one(tokens: int) -> None:
    labels = torch.arange(tokens)
    assert packing.shift_labels(labels, masks.causal(tokens)).tolist() == [-100] * tokens
    assert packing.position_ids(masks.causal(tokens), labels).tolist() == [list(range(tokens))]
