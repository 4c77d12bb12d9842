"""Preconditioning is exact: in fp64, with it and without it attention and every gradient agree."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.reference import ReferenceKernel
from ringfa4.mask import Mask, causal, documents, full, window
from ringfa4.plan import Plan
from ringfa4.precondition import (
    Precondition,
    hadamard_block,
    rotate,
    rotate_back,
    row_sums,
    shift,
    sign,
)
from ringfa4.shard import Sharding, uneven
from ringfa4.state import State
from ringfa4.testing.oracles import Truth, attention_gradients
from ringfa4.wire import Geometry, RecordMap, wire_format

NAMES = ["none", "hadamard", "k-mean", "both"]
F64 = torch.float64


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def simulated(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    shardings: tuple[Sharding, Sharding],
    dout: Tensor,
    dlse: Tensor | None,
    sink: Tensor | None,
) -> Truth:
    """All ranks one after another, as the executor orders it, with the fp64 kernel and wire."""
    pre, kernel, wire = Precondition.parse(name), ReferenceKernel(), wire_format(None, F64)
    plan, scale = Plan(mask, *shardings), q.shape[-1] ** -0.5
    geometry = Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], F64)
    index_q, index_k = (
        [torch.tensor(list(s.positions()), dtype=torch.long) for s in sharding.shards]
        for sharding in shardings
    )
    contributions: list[Tensor] = []
    for own in index_k:
        pre.mean(k[:, own], lambda x: contributions.append(x) or x)
    total = sum(contributions) if contributions else torch.zeros(())
    outboxes, means = [], []
    for rank, own in enumerate(index_k):
        means.append(pre.mean(k[:, own], lambda _: total))
        shard = plan.k_sharding.shards[rank]
        box = torch.empty(shard.records * wire.record_bytes(geometry, "forward"), dtype=torch.uint8)
        wire.encode(pre.keys(k[:, own], means[rank]), v[:, own], shard, box, "forward")
        outboxes.append(wire.view(geometry, RecordMap.whole(shard), box, "forward"))
    out, dq = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dsink = None if sink is None else torch.zeros_like(sink)
    for rank, own in enumerate(index_q):
        mu, shard = means[rank], shardings[0].shards[rank]
        q_own, dout_own = q[:, own], dout[:, own]
        queries = pre.queries(q_own)
        state = State(*q_own.shape[:3], v.shape[3], device=q.device, dtype=F64)
        for step in plan.steps(rank):
            kernel.forward(
                kernel.prepare(queries, shard), outboxes[step.owner], step.tasks, scale, state
            )
        if mu is not None:
            state.max += shift(q_own, mu, scale)
        out_own, lse_own = state.finalise(F64, sink)
        out[:, own], lse[:, :, own] = out_own, lse_own
        dlse_own = None if dlse is None else dlse[:, :, own]
        inner = lse_own if mu is None else lse_own - shift(q_own, mu, scale)
        prepared = kernel.prepare_backward(queries, shard, out_own, dout_own, inner, dlse_own)
        grads = Grads(*q_own.shape, device=q.device, dtype=F64)
        for step in plan.steps(rank):
            records = outboxes[step.owner]
            size = records.map.records * wire.record_bytes(geometry, "backward")
            box = torch.empty(size, dtype=torch.uint8)
            sums = wire.view(geometry, records.map, box, "backward")
            grads.begin(sums)
            kernel.backward(prepared, records, step.tasks, scale, grads)
            grads.end()
            for chunk, start, stop in records.map.tokens():
                where = index_k[step.owner][
                    records.map.shard.offsets[chunk] + start : records.map.shard.offsets[chunk]
                    + stop
                ]
                for into, value in zip((dk, dv), sums.keys_values(chunk, start, stop), strict=True):
                    into[:, where] += value
        delta = (out_own * dout_own).sum(-1).transpose(1, 2)
        delta = delta if dlse_own is None else delta - dlse_own
        sums_of_rows = row_sums(delta, lse_own, dlse_own, sink)
        dq[:, own] = pre.query_gradient(grads.finish(), mu, sums_of_rows, scale)
        if sink is not None:
            dsink -= (torch.exp(sink.view(1, -1, 1) - lse_own) * delta).sum((0, 2))
    return Truth(out, lse, dq, pre.key_gradient(dk), dv, dsink)


MASKS = {
    "full": full(12, 9),
    "causal": causal(12, 9, align="bottom-right"),  # the first rows see no key
    "window": window(12, 9, left=2, right=1),
    "documents": documents([0, 5, 12], [0, 4, 9]),
}
SHARDINGS = {
    "one": (uneven([12]), uneven([9])),
    "three": (uneven([5, 3, 4]), uneven([4, 0, 5])),
}


@pytest.mark.parametrize("ranks", SHARDINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_with_sinks_and_gradients_into_lse(name, mask, ranks):
    q, k = randn(2, 12, 4, 96, seed=0), randn(2, 9, 2, 96, seed=1) + 3 * randn(1, 1, 2, 96, seed=2)
    v, dout = randn(2, 9, 2, 32, seed=3), randn(2, 12, 4, 32, seed=4)
    for some_dlse, some_sink in product((None, randn(2, 4, 12, seed=5)), (None, randn(4, seed=6))):
        got = simulated(name, q, k, v, MASKS[mask], SHARDINGS[ranks], dout, some_dlse, some_sink)
        due = attention_gradients(q, k, v, MASKS[mask], dout, some_dlse, sink=some_sink)
        for field in ("out", "lse", "dq", "dk", "dv", "dsink"):
            a, b = getattr(got, field), getattr(due, field)
            if b is None:
                assert a is None
                continue
            torch.testing.assert_close(
                a, b, rtol=1e-10, atol=1e-10, msg=lambda m, f=field: f"{f}: {m}"
            )


def test_names():
    assert [Precondition.parse(name).name for name in NAMES] == NAMES
    with pytest.raises(ValueError, match="unknown precondition 'k_mean'"):
        Precondition.parse("k_mean")


def test_softcap_is_refused_where_it_is_not_exact():
    assert "softcap=30.0" in (Precondition.parse("both").refuses(softcap=30.0) or "")
    assert Precondition.parse("hadamard").refuses(softcap=30.0) is None
    assert Precondition.parse("both").refuses() is None


# ---- the rotation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "block"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64)])
def test_rotation_is_orthogonal_and_block_diagonal(d, block):
    assert hadamard_block(d) == block
    matrix = rotate(torch.eye(d, dtype=F64))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(d, dtype=F64), rtol=0, atol=1e-14)
    inside = torch.block_diag(*[torch.ones(block, block)] * (d // block)).bool()
    assert torch.equal(matrix != 0, inside)
    assert torch.allclose(matrix[inside].abs(), torch.tensor(block**-0.5, dtype=F64))
    x = randn(3, d, seed=0)
    torch.testing.assert_close(rotate_back(rotate(x)), x, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotate(x), x @ matrix, rtol=0, atol=1e-13)


def test_signs_are_fixed():
    """Peers of other versions must agree on them: written out once, and balanced enough."""
    assert [sign(i) for i in range(16)] == [1, 1, -1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1, -1, -1, 1]
    for d in (32, 64, 128, 192):
        assert abs(sum(sign(i) for i in range(d))) <= 3 * math.sqrt(d)


def test_many_rows_are_rotated_like_one():
    """Across the border of the blocks in which a CPU works."""
    x = randn(1, 1025, 2, 64, seed=1)
    whole = rotate(x)
    for token in (0, 511, 512, 1024):
        assert torch.equal(whole[:, token], rotate(x[:, token]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_kept_and_work_is_fp32(dtype):
    x = randn(64, 128, seed=2).to(dtype)
    for name, change in (("rotate", rotate), ("back", rotate_back)):
        exact, got = change(x.to(F64)), change(x)
        assert got.dtype == dtype, name
        spacing = torch.finfo(dtype).eps * exact.abs().max()
        assert (got - exact).abs().max() <= spacing / 2 + 7 * torch.finfo(torch.float32).eps * 4


# ---- the mean -----------------------------------------------------------------------------------


def test_the_mean_is_over_all_ranks_tokens():
    k = randn(2, 10, 3, 32, seed=3)
    pre = Precondition(k_mean=True)
    shards = [k[:, :7], k[:, 7:7], k[:, 7:]]  # the second rank owns nothing
    seen: list[Tensor] = []
    for own in shards:
        pre.mean(own, lambda x: seen.append(x) or x)
    total = sum(seen)
    for own in shards:
        mu = pre.mean(own, lambda _: total)
        torch.testing.assert_close(mu, k.mean(1), rtol=1e-13, atol=1e-13)
    assert Precondition(hadamard=True).mean(k, lambda x: x) is None


def test_one_bad_key_does_not_reach_the_others():
    k = randn(1, 6, 1, 32, seed=4).float()
    k[0, 2, 0, 5], k[0, 3, 0, 6] = math.nan, math.inf
    pre = Precondition(k_mean=True)
    mu = pre.mean(k, lambda x: x)
    assert mu is not None and torch.isfinite(mu).all()
    changed = pre.keys(k, mu)
    assert (~torch.isfinite(changed)).nonzero().tolist() == [[0, 2, 0, 5], [0, 3, 0, 6]]


def test_no_tokens_at_all_give_a_mean_of_zero():
    mu = Precondition(k_mean=True).mean(torch.empty(1, 0, 2, 32), lambda x: x)
    assert mu is not None and torch.equal(mu, torch.zeros(1, 2, 32))


def test_rows_without_keys_have_no_row_sum():
    delta, lse = torch.ones(1, 1, 2), torch.tensor([[[-math.inf, 0.0]]])
    assert row_sums(delta, lse, None, None).tolist() == [[[0.0, 0.0]]]
    assert row_sums(delta, lse, torch.full((1, 1, 2), 5.0), None).tolist() == [[[0.0, 5.0]]]
