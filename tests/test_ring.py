"""The ring against dense fp64 attention: masks, shardings, ranks, kernels; and to the bit where
maths promises it.

Every case here runs forward and backward on virtual ranks.
"""

from __future__ import annotations

import math

import pytest
import torch
from rings import Case, check, dense, ranks, run

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.mask import Mask
from ringfa4.trace import Recorder

SHARDINGS = ("contiguous", "zigzag", "striped", "balanced")
MASKS = {
    "full": masks.full(150),
    "causal": masks.causal(150),
    "window": masks.window(400, left=150),
    "documents": masks.documents([0, 130, 130, 160, 289, 300], causal=True),
    "prefix": masks.prefix_lm(150, 40),
    "chunked": masks.chunked(300, 70),
    "rows": masks.stack([masks.causal(140), masks.window(140, left=9), masks.full(140)]),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_on_every_sharding(name: str, sharding: str) -> None:
    mask = MASKS[name]
    case = Case(
        mask,
        world=3,
        heads=(4, 2),
        batch=mask.batch,
        sink=True,
        dlse=True,
        options={"sharding": sharding},
    )
    check(case, run(case))


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_kernels_and_dtypes(world: int, kernel: str, dtype: torch.dtype) -> None:
    case = Case(
        masks.causal(257), world=world, heads=(4, 1), dtype=dtype, options={"kernel": kernel}
    )
    got = run(case)
    assert got["dq"].dtype == got["dk"].dtype == got["dv"].dtype == got["out"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    check(case, got)


CROSS = {
    "case 33: uneven keys, full": (masks.full(10), (5, 5), (7, 3)),
    "case 33: uneven keys, bottom-right": (masks.causal(10, 10, "bottom-right"), (5, 5), (7, 3)),
    "more queries than keys": (masks.causal(12, 5, "bottom-right"), (7, 5), (5, 0)),
    "more keys than queries": (masks.causal(5, 300, "bottom-right"), (2, 3), (100, 200)),
    "top-left": (masks.causal(9, 300), (4, 5), (10, 290)),
}


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_with_shards_of_any_length(name: str) -> None:
    mask, q_lengths, k_lengths = CROSS[name]
    case = Case(
        mask,
        options={
            "sharding": shardings.uneven(q_lengths),
            "sharding_k": shardings.uneven(k_lengths),
        },
    )
    check(case, run(case))


@pytest.mark.parametrize(
    ("seq", "world"), [(4, 2), (3, 4), (9, 2), (2, 4), (1, 3), (1031, 3)], ids=str
)
def test_any_length_on_any_number_of_ranks(seq: int, world: int) -> None:
    """Cases 15, 18, 22: short, odd, fewer tokens than ranks."""
    case = Case(masks.causal(seq), world=world, heads=(1, 1), dims=(32, 32))
    check(case, run(case))


def test_no_token_at_all() -> None:
    got = run(Case(masks.causal(0), world=2))
    assert [got[n].shape[1] for n in ("out", "dq", "dk", "dv")] == [0, 0, 0, 0]


def test_the_last_token_of_a_padded_document_counts() -> None:
    """Case 13: cu = [0, 7] padded to 8 is seven tokens, not six; the padding sees nothing."""
    case = Case(masks.documents([0, 7], seq_q=8), world=2)
    got = run(case)
    check(case, got)
    assert got["lse"][0, :, 6].isfinite().all() and (got["lse"][0, :, 7] == -math.inf).all()
    assert (got["out"][0, 7] == 0).all() and (got["dv"][0, 6] != 0).any()


def test_a_rank_that_holds_only_padding() -> None:
    """Case 17: zeros there, and nobody hangs."""
    case = Case(masks.documents([0, 60], seq_q=128), world=2, options={"sharding": "contiguous"})
    got = run(case)
    check(case, got)
    assert all((got[n][:, 64:] == 0).all() for n in ("out", "dq", "dk", "dv"))


def test_a_trailing_empty_document_changes_nothing() -> None:
    """Case 21."""
    without = run(Case(masks.documents([0, 30, 64]), world=2))
    trailing = run(Case(masks.documents([0, 30, 64, 64]), world=2))
    assert all(torch.equal(without[n], trailing[n]) for n in without)


def test_grouped_heads_with_unlike_head_dimensions() -> None:
    """Case 27: 8 query heads on 2 K/V heads, 192 / 128."""
    case = Case(masks.causal(140), world=2, heads=(8, 2), dims=(192, 128))
    check(case, run(case))


def test_a_window_is_not_ignored() -> None:
    """Case 31: S = 64 over 4 ranks, window 8; different from plain causal."""
    case = Case(masks.window(64, left=8), world=4)
    got = run(case)
    check(case, got)
    causal = dense(Case(masks.causal(64), world=4))
    assert (got["out"][:, 9:] - causal["out"][:, 9:]).abs().amax((0, 2, 3)).min() > 1e-3


def test_without_a_causal_mask_zigzag_shards_are_full_attention() -> None:
    """Case 29."""
    case = Case(masks.full(96), world=4, options={"sharding": "zigzag"})
    check(case, run(case))


def test_backward_uses_every_ranks_own_keys() -> None:
    """Case 8: K/V of each rank at another scale, so that reading hop 0's again would show."""
    case = Case(masks.full(64), world=2, options={"sharding": "contiguous"})
    got = run(case)
    check(case, got)
    assert not torch.equal(got["dk"][:, :32], got["dk"][:, 32:])


def test_bf16_gradients_are_as_good_as_flash() -> None:
    """Case 6: bf16, d 64, 8 heads: max error of dq <= 2.5 x plain + 2e-3, over 8 ranks."""
    from rings import plain

    case = Case(masks.causal(512), world=8, heads=(8, 8), dims=(64, 64), dtype=torch.bfloat16)
    got, want, yardstick = run(case), dense(case), plain(case)
    for name in ("dq", "dk", "dv", "out"):
        error = (got[name].double() - want[name]).abs().max()
        base = (yardstick[name].double() - want[name]).abs().max()
        assert error <= 2.5 * base + 2e-3, name


def _rms(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], name: str) -> float:
    return float((got[name].double() - want[name]).square().mean().sqrt())


def test_the_error_does_not_grow_with_the_ring() -> None:
    """Case 1: fp32 against fp64 for 2, 8, 32, 72 ranks, at most 1.2x the error of one rank
    (rms).
    """
    mask = masks.causal(720)

    def make(world: int) -> Case:
        options = {"sharding": "contiguous"}  # one chunk a rank: as many merges, fewer tasks
        return Case(mask, world=world, heads=(1, 1), dims=(32, 32), options=options)

    want, alone = dense(make(1)), run(make(1))
    for world in (2, 8, 32, 72):
        got = run(make(world))
        for name in want:
            assert _rms(got, want, name) <= 1.2 * _rms(alone, want, name), (world, name)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_two_runs_are_equal_to_the_bit(kernel: str) -> None:
    case = Case(
        masks.documents([0, 200, 333, 500]),
        world=5,
        heads=(4, 2),
        dtype=torch.bfloat16,
        sink=True,
        dlse=True,
        options={"kernel": kernel},
    )
    first, second = run(case), run(case)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_steps_without_tasks_compute_and_wait_for_nothing() -> None:
    """A window of one shard: each rank computes its own step and one more, whatever the ring's
    size.
    """
    mask, seen = masks.window(1024, left=100), []

    def rank(context: object) -> None:
        recorder = Recorder()
        cp = ContextParallel(context, mask=mask, sharding="contiguous", observer=recorder)
        x = torch.randn(1, 128, 1, 32)
        cp.attention(x, x, x)
        seen.append((cp.rank, {s.step for s in recorder.spans if s.kind == "compute"}))

    ranks(8, rank)
    assert dict(seen) == {r: {0, 1} if r else {0} for r in range(8)}


def test_nan_in_a_key_reaches_only_those_who_see_it() -> None:
    """Plain wires isolate to the bit: queries before the key keep theirs."""
    mask: Mask = masks.causal(96)
    clean = Case(mask, world=3)
    tensors = clean.tensors()

    class Poisoned(Case):
        def tensors(self) -> dict[str, torch.Tensor]:
            k = tensors["k"].clone()
            k[:, 50] = math.nan
            return {**tensors, "k": k}

    got, want = run(Poisoned(mask, world=3)), run(clean)
    assert torch.equal(got["out"][:, :50], want["out"][:, :50])
    assert got["out"][:, 50:].isnan().all()
