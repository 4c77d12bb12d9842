"""The check of launch/ring.py: its fp64 is the oracle's, and planted errors do not pass it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.comm.local import run_ranks
from ringfa4.launch.checks import WORST_LIMIT, Checker, Tensors, Verdict, judge
from ringfa4.launch.peers import Alone, Threads
from ringfa4.launch.samples import membership, sample_positions
from ringfa4.mask import Mask
from ringfa4.testing.oracles import allowed, attention

SCALE = 0.3


def problem(
    mask: Mask, dtype: torch.dtype, *, heads: tuple[int, int] = (4, 2), batch: int = 1
) -> tuple[Tensors, Tensor]:
    """Inputs of ``dtype``, and what fp64 autograd makes of them, rounded; and the sink.

    A backward pass knows out rounded: delta is off by rowsum((out - rounded) * dout), which is what
    a gradient into lse does to it.
    """
    gen = torch.Generator().manual_seed(7)
    (hq, hkv), (dk, dv) = heads, (16, 8)
    shapes = [(mask.seq_q, hq, dk), (mask.seq_k, hkv, dk), (mask.seq_k, hkv, dv)]
    q, k, v = (torch.randn(batch, *s, generator=gen).to(dtype) for s in shapes)
    sink = torch.randn(hq, generator=gen)
    x = [t.double().requires_grad_() for t in (q, k, v, sink)]
    out, lse = attention(*x[:3], mask, scale=SCALE, sink=x[3])
    dout = torch.randn(out.shape, generator=gen).to(dtype)
    off = ((out - out.to(dtype)) * dout).sum(-1).transpose(1, 2).detach()
    lost = torch.where(lse == -torch.inf, 0, lse * off).sum()
    dq, dk_, dv_, dsink = torch.autograd.grad((out * dout).sum() + lost, x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rounded = (t.detach().to(dtype) for t in (dq, dk_, dv_))
    tensors = Tensors(
        q, k, v, out.detach().to(dtype), lse.detach().to(wide), dout, *rounded, dsink.to(wide)
    )
    return tensors, sink


def check(mask: Mask, tensors: Tensors, sink: Tensor, rows: int = 16) -> dict[str, Verdict]:
    shards = shardings.contiguous(mask.seq_q, 1), shardings.contiguous(mask.seq_k, 1)
    checker = Checker(Alone(), mask, shards, tensors, scale=SCALE, sink=sink, rows=rows)
    return {verdict.name: verdict for verdict in checker.run()}


MASKS = {
    "causal": masks.causal(200),
    "full-cross": masks.full(120, 90),
    "window": masks.window(200, left=30, right=5),
    "documents": masks.documents([0, 50, 50, 130], seq_q=150),
    "prefix": masks.prefix_lm(100, 30),
    "per-row": masks.stack([masks.causal(64), masks.chunked(64, 16)]),
}


@pytest.mark.parametrize("name", MASKS)
def test_it_computes_what_the_oracle_computes(name: str) -> None:
    mask = MASKS[name]
    tensors, sink = problem(mask, torch.float64, batch=2)
    verdicts = check(mask, tensors, sink)
    assert list(verdicts) == ["out", "lse", "dq", "dk", "dv", "dsink"]
    # Two fp64 computations of the same sums: 300 dB is 1e-15.
    assert {n: v.sqnr_db for n, v in verdicts.items() if v.sqnr_db < 285} == {}
    assert all(v.passed for v in verdicts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_correctly_rounded_results_pass(dtype: torch.dtype) -> None:
    mask = MASKS["causal"]
    verdicts = check(mask, *problem(mask, dtype))
    assert [v.name for v in verdicts.values() if not v.passed] == []


def _spoil_row(row: int) -> Callable[[Tensor], Tensor]:
    """Another row's values in ``row``: what a wrong chunk or a missed merge looks like."""

    def spoil(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, row] = x[:, row - 20]
        return x

    return spoil


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_row_fails(name: str, dtype: torch.dtype) -> None:
    mask = MASKS["causal"]
    row = sample_positions(shardings.contiguous(200, 1), 16)[9]
    tensors, sink = problem(mask, dtype)
    wrong = dataclasses.replace(tensors, **{name: _spoil_row(row)(getattr(tensors, name))})
    verdict = check(mask, wrong, sink)[name]
    assert not verdict.passed and verdict.worst_position == row


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dsink"])
def test_one_per_cent_fails_in_fp32(name: str) -> None:
    mask = MASKS["causal"]
    tensors, sink = problem(mask, torch.float32)
    wrong = dataclasses.replace(tensors, **{name: getattr(tensors, name) * 1.01})
    failed = [v.name for v in check(mask, wrong, sink).values() if not v.passed]
    assert name in failed


def test_a_missing_chunk_fails_on_an_mxfp8_wire() -> None:
    """Without the first 20 keys, out and lse are further off than blocks of E4M3 explain."""
    mask = MASKS["causal"]
    tensors, sink = problem(mask, torch.bfloat16)
    gone = masks.Mask(200, 200, ((masks.Band(0, 200, 20, 200, None, 0),),))
    out, lse = attention(tensors.q, tensors.k, tensors.v, gone, scale=SCALE, sink=sink)
    wrong = dataclasses.replace(tensors, out=out.to(torch.bfloat16), lse=lse.float())
    shards = (shardings.contiguous(200, 1),) * 2
    for given, passed in ((tensors, True), (wrong, False)):
        checker = Checker(Alone(), mask, shards, given, scale=SCALE, sink=sink, blocks=2.0**-4)
        assert {v.passed for v in checker.query_rows()[:2]} == {passed}


def test_a_missing_key_fails_in_bf16() -> None:
    """Row 60 attends to 61 keys; without one of them out is off by that key's share."""
    mask = MASKS["causal"]
    tensors, sink = problem(mask, torch.bfloat16)
    one_less = masks.Mask(200, 200, ((masks.Band(0, 200, 1, 200, None, 0),),))
    out, _ = attention(tensors.q, tensors.k, tensors.v, one_less, scale=SCALE, sink=sink)
    wrong = dataclasses.replace(tensors, out=out.to(torch.bfloat16))
    assert not check(mask, wrong, sink)["out"].passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_fail(value: float) -> None:
    mask = MASKS["causal"]
    tensors, sink = problem(mask, torch.float32)
    out = tensors.out.clone()
    out[0, 199, 1, 3] = value
    verdict = check(mask, dataclasses.replace(tensors, out=out), sink)["out"]
    assert not verdict.passed and verdict.worst_position == 199


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    mask = MASKS["documents"]  # positions 130.. are padding
    tensors, _ = problem(mask, torch.float32)
    x = [t.double() for t in (tensors.q, tensors.k, tensors.v)]
    out, lse = attention(*x, mask, scale=SCALE)
    bare = Tensors(*(t.float() for t in (*x, out, lse)))
    shards = (shardings.contiguous(150, 1),) * 2
    verdicts = Checker(Alone(), mask, shards, bare, scale=SCALE, rows=150).run()
    assert [v.passed for v in verdicts] == [True, True]
    bare.out[0, 140, 0, 0] = 1e-30
    assert not Checker(Alone(), mask, shards, bare, scale=SCALE, rows=150).run()[0].passed


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_ranks_together_find_what_one_finds(kind: str) -> None:
    mask = MASKS["window"]
    tensors, sink = problem(mask, torch.float32)
    world, sharding = 3, getattr(shardings, kind)(200, 3)
    peers = Threads(world, 30.0)

    def rank(rank: int, *_: object) -> list[Verdict]:
        rows = list(sharding.shards[rank].positions())
        local = {
            f.name: x if f.name == "dsink" else x[:, :, rows] if f.name == "lse" else x[:, rows]
            for f in dataclasses.fields(Tensors)
            if (x := getattr(tensors, f.name)) is not None
        }
        checker = Checker(
            peers.member(rank), mask, (sharding, sharding), Tensors(**local), scale=SCALE,
            sink=sink, rows=200,
        )  # fmt: skip
        return checker.run()

    of_ranks = run_ranks(world, rank)
    alone = check(mask, tensors, sink, rows=200)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    for verdict in of_ranks[0]:
        assert verdict.passed
        assert verdict.sqnr_db == pytest.approx(alone[verdict.name].sqnr_db, abs=1e-3)


@pytest.mark.parametrize("name", MASKS)
def test_membership_is_the_definition(name: str) -> None:
    mask = MASKS[name]
    i, j = torch.arange(0, mask.seq_q, 3), torch.arange(1, mask.seq_k, 2)
    assert torch.equal(membership(mask, i, j), allowed(mask)[:, i][:, :, j])


def test_samples_hold_ends_and_edges() -> None:
    sharding = shardings.zigzag(10_000, 2)
    rows = sample_positions(sharding, 32)
    edges = {0, 2499, 2500, 4999, 5000, 7499, 7500, 9999}
    assert len(rows) == 32 and edges <= set(rows) and rows == sorted(set(rows))
    assert sample_positions(shardings.contiguous(5, 3), 32) == [0, 1, 2, 3, 4]
    many = sample_positions(shardings.zigzag(1 << 20, 72), 32)
    assert len(many) == 32 and {0, (1 << 20) - 1} <= set(many)


def test_limits_are_at_the_limit() -> None:
    """An error of just under WORST_LIMIT sigma in one of many elements passes, just over fails."""
    want, variance = torch.ones(1, 100, 1, 1).double(), torch.full((1, 100, 1, 1), 1e-6).double()
    for factor, passed in ((0.99, True), (1.01, False)):
        got = want.clone()
        got[0, 42] += factor * WORST_LIMIT * 1e-3
        verdict = judge("x", list(range(100)), got, want, variance)
        assert (verdict.passed, verdict.worst_position) == (passed, 42)
    everywhere = want + 1.01e-3  # no element is far out, all together are
    assert not judge("x", list(range(100)), everywhere, want, variance).passed
