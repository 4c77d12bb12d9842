"""The algebra of partials: State against merge by definition, Written against sets, Grads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.shard import Chunk, Shard
from ringfa4.state import State
from ringfa4.testing.oracles import merge_partials
from ringfa4.testing.tolerances import RING_GROWTH_FP32
from ringfa4.wire import PLAIN, Geometry, PlainShard, RecordMap
from ringfa4.written import Written

CPU = torch.device("cpu")
B, S, H, D = 2, 3, 2, 4

# ---- which rows were written --------------------------------------------------------------------

interval = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@given(st.lists(interval, max_size=8), interval)
def test_written_is_a_set(claims: list[list[int]], asked: list[int]) -> None:
    written, rows = Written(1), set[int]()
    for start, stop in claims:
        pieces = written.claim(0, start, stop)
        assert [i for a, b, _ in pieces for i in range(a, b)] == list(range(start, stop))
        for a, b, seen in pieces:
            assert a < b
            assert all((i in rows) == seen for i in range(a, b))
        rows |= set(range(start, stop))
    gaps = [i for a, b in written.gaps(0, *asked) for i in range(a, b)]
    assert gaps == [i for i in range(*asked) if i not in rows]


# ---- merging ------------------------------------------------------------------------------------


def partial(seed: int, *, dead: float = 0.0, spread: float = 20.0) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp32; a share ``dead`` of the rows has lse = -inf and NaN or inf in out."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(B, S, H, D, generator=generator)
    lse = torch.randn(B, H, S, generator=generator) * spread
    none = torch.rand(B, H, S, generator=generator) < dead
    payload = math.nan if seed % 2 else math.inf
    out = out.masked_fill(none.transpose(1, 2).unsqueeze(-1), payload)
    return out, lse.masked_fill(none, -torch.inf)


def uninitialised(dtype: torch.dtype = torch.float32) -> State:
    """A state whose memory holds NaN: reading it before writing shows."""
    state = State(B, S, H, D, device=CPU, dtype=dtype)
    for x in (state.acc, state.max, state.sum):
        x.fill_(math.nan)
    return state


def merged(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype = torch.float32) -> State:
    state = uninitialised(dtype)
    for out, lse in parts:
        state.merge(None, slice(0, S), out, lse)
    return state


def result(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return merged(parts).finalise(torch.float32)


def by_definition(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = parts[0][0].double().clone(), parts[0][1].double()
    out = out.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0)
    for more, more_lse in parts[1:]:
        out, lse = merge_partials(out, lse, more.double(), more_lse.double())
    return out, lse


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], merges: int) -> None:
    """A merge rounds a handful of times, and its weights are e^x with x off by an ulp of lse."""
    magnitude = max(1.0, float(want[1].masked_fill(want[1] == -torch.inf, 0).abs().max()))
    limit = 4 * (merges + 1) * magnitude * 2.0**-23
    for a, b in zip(got, want, strict=True):
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        torch.testing.assert_close(a.double(), b.double(), rtol=limit, atol=limit)


seeds = st.lists(st.integers(0, 1000), min_size=1, max_size=6)


@given(seeds, st.sampled_from([0.0, 0.3, 1.0]))
def test_state_is_the_merge_by_definition(numbers: list[int], dead: float) -> None:
    parts = [partial(n, dead=dead) for n in numbers]
    assert_close(result(parts), by_definition(parts), len(parts))


@given(seeds, st.randoms(use_true_random=False))
def test_order_matters_to_rounding_only(numbers: list[int], random: object) -> None:
    parts = [partial(n, dead=0.3) for n in numbers]
    other = parts.copy()
    random.shuffle(other)  # type: ignore[attr-defined]
    assert_close(result(parts), tuple(x.double() for x in result(other)), len(parts))


@given(seeds, st.integers(0, 5))
def test_grouping_matters_to_rounding_only(numbers: list[int], cut: int) -> None:
    """A state is itself a partial: (p1 .. pi) + (pi+1 .. pn) = p1 + ... + pn."""
    parts = [partial(n, dead=0.3) for n in numbers]
    left, right = parts[: cut % len(parts)], parts[cut % len(parts) :]
    state, other = merged(left), merged(right)
    state.merge_state(None, slice(0, S), other.acc, other.max, other.sum)
    want = tuple(x.double() for x in result(parts))
    assert_close(state.finalise(torch.float32), want, len(parts))


@pytest.mark.parametrize("first", [True, False])
def test_a_dead_partial_changes_nothing(first: bool) -> None:
    """cases.md 3, 4: identity, to the bit, whatever the payload."""
    alive, dead = partial(0), (torch.full((B, S, H, D), math.nan), torch.full((B, H, S), -math.inf))
    got = result([dead, alive] if first else [alive, dead])
    for a, b in zip(got, result([alive]), strict=True):
        assert torch.equal(a, b)
    out, lse = result([dead, dead])
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())


def test_small_cases_by_hand() -> None:
    """cases.md 2, 3: (0, -inf) + (2, 1) = (2, 1); lse -60 and 40 give 40, either way round."""

    def constant(out: float, lse: float) -> tuple[Tensor, Tensor]:
        return torch.full((B, S, H, D), out), torch.full((B, H, S), lse)

    out, lse = result([constant(0, -math.inf), constant(2, 1)])
    assert bool((out == 2).all()) and bool((lse == 1).all())
    for pair in ([constant(7, -60), constant(3, 40)], [constant(3, 40), constant(7, -60)]):
        out, lse = result(pair)
        assert bool((out == 3).all()) and bool((lse == 40).all())
    out, lse = result([constant(1, 0), constant(3, 0)])
    assert bool((out == 2).all())
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)))


def test_gradients_of_the_merge_are_finite_where_a_side_is_dead() -> None:
    """cases.md 3, gradients too: logaddexp(-inf, -inf) alone has a NaN gradient."""
    lse1 = torch.tensor([[[0.5, -math.inf, -math.inf, 1.0]]], dtype=torch.float64)
    lse2 = torch.tensor([[[0.1, 0.2, -math.inf, -math.inf]]], dtype=torch.float64)
    outs = [torch.randn(1, 4, 1, 2, dtype=torch.float64) for _ in range(2)]
    leaves = [outs[0], lse1, outs[1], lse2]
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = merge_partials(*leaves)
    (out.sum() + lse[torch.isfinite(lse)].sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all())
    assert float(lse1.grad[0, 0, 1]) == 0 and float(lse1.grad[0, 0, 2]) == 0
    live = [x.detach()[:, :, :1].requires_grad_() for x in (lse1, lse2)]
    assert torch.autograd.gradcheck(
        lambda a, b: merge_partials(outs[0].detach()[:, :1], a, outs[1].detach()[:, :1], b), live
    )


def test_72_partials_cost_at_most_a_fifth_more_than_one() -> None:
    """cases.md 1: the error does not grow with the ranks; that of a running (out, lse) does."""
    generator = torch.Generator().manual_seed(0)
    n, keys, d = 128, 72 * 64, 64
    q = torch.randn(n, d, generator=generator)
    k = torch.randn(keys, d, generator=generator)
    v = torch.randn(keys, d, generator=generator)

    def attend(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = (q.to(dtype) @ k.to(dtype).T) * d**-0.5
        out, lse = torch.softmax(logits, -1) @ v.to(dtype), torch.logsumexp(logits, -1)
        return out.view(1, n, 1, d), lse.view(1, 1, n)

    truth = attend(k, v, torch.float64)[0]

    def error(out: Tensor) -> float:
        return float((out - truth).square().mean().sqrt())

    whole = error(attend(k, v, torch.float32)[0])
    for ranks in (1, 2, 8, 32, 72):
        state, running = State(1, n, 1, d, device=CPU), None
        for part in zip(k.chunk(ranks), v.chunk(ranks), strict=True):
            partial = attend(*part, torch.float32)
            state.merge(None, slice(0, n), *partial)
            running = partial if running is None else merge_partials(*running, *partial)
        assert error(state.finalise(torch.float32)[0]) <= RING_GROWTH_FP32 * whole, ranks
    assert error(running[0]) > RING_GROWTH_FP32 * whole


# ---- rows, batch rows, sinks --------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([None, 0, 1]), interval), max_size=6))
def test_rows_and_batch_rows_are_independent(calls: list[tuple[int | None, list[int]]]) -> None:
    """Any ranges of any batch rows, on memory full of NaN, give row by row what the rows saw."""
    seq = 12
    state = State(B, seq, H, D, device=CPU)
    for x in (state.acc, state.max, state.sum):
        x.fill_(math.nan)
    seen: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    generator = torch.Generator().manual_seed(0)
    for batch, (a, b) in calls:
        members = list(range(B)) if batch is None else [batch]
        out = torch.randn(len(members), b - a, H, D, generator=generator)
        lse = torch.randn(len(members), H, b - a, generator=generator)
        state.merge(batch, slice(a, b), out, lse)
        for m, i in enumerate(members):
            for row in range(a, b):
                own = (
                    out[m : m + 1, row - a : row - a + 1],
                    lse[m : m + 1, :, row - a : row - a + 1],
                )
                seen.setdefault((i, row), []).append(own)
    out, lse = state.finalise(torch.float32)
    for i in range(B):
        for row in range(seq):
            got = out[i : i + 1, row : row + 1], lse[i : i + 1, :, row : row + 1]
            if (i, row) in seen:
                parts = seen[i, row]
                assert_close(got, by_definition(parts), len(parts))
            else:
                assert bool((got[0] == 0).all()) and bool((got[1] == -math.inf).all())


def test_a_sink_is_one_more_partial() -> None:
    parts = [partial(3), partial(5)]
    sink = torch.tensor([1.5, -math.inf])
    column = torch.zeros(B, S, H, D), sink.view(1, -1, 1).expand(B, H, S)
    got = merged(parts).finalise(torch.float32, sink)
    assert_close(got, by_definition([*parts, column]), 3)
    out, lse = uninitialised().finalise(torch.float32, sink)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, column[1])


def test_dtypes() -> None:
    out, lse = partial(0)
    half, log = merged([(out.bfloat16(), lse)]).finalise(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and log.dtype == torch.float32
    assert torch.equal(half, out.bfloat16())
    double, log = merged([(out.double(), lse.double())] * 2, torch.float64).finalise(torch.float64)
    assert double.dtype == log.dtype == torch.float64
    assert torch.equal(double, out.double())


# ---- gradient sums ------------------------------------------------------------------------------


def rows_of(shard: Shard, dtype: torch.dtype, batch: int = B) -> PlainShard:
    """dK (b, n, 1, 3) and dV (b, n, 1, 2) of a whole shard in ``dtype``, on memory full of NaN."""
    geometry, whole = Geometry(batch, 1, 3, 2, torch.bfloat16), RecordMap.whole(shard)
    size = whole.records * PLAIN[dtype].record_bytes(geometry, "backward")
    buffer = torch.full((size,), 255).to(torch.uint8)
    return PLAIN[dtype].view(geometry, whole, buffer, "backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from([None, 0, 1]), interval, st.booleans()), max_size=5),
    st.integers(0, 100),
)
def test_gradients_are_sums(
    dtype: torch.dtype, calls: list[tuple[int | None, list[int], bool]], seed: int
) -> None:
    """dq, dk, dv of any ranges add up, on memory full of NaN; what nothing reached is 0. Where
    dK/dV travel in bf16, sums are rounded once: parts are 8 bits long, sums up to 11.
    """
    kv = rows_of(Shard((Chunk(0, 5), Chunk(5, 12))), dtype)
    grads = Grads(B, 12, H, D, device=CPU)
    grads.dq.total.fill_(math.nan)
    grads.begin(kv)
    dq, dk, dv = torch.zeros(B, 12, H, D), torch.zeros(B, 12, 1, 3), torch.zeros(B, 12, 1, 2)
    generator = torch.Generator().manual_seed(seed)
    for batch, (a, b), wide in calls:
        where = slice(None) if batch is None else slice(batch, batch + 1)
        size = B if batch is None else 1
        more = [
            torch.randint(-255, 256, (size, b - a, *x.shape[2:]), generator=generator).float()
            for x in (dq, dk, dv)
        ]
        if wide:  # more bits than bf16 has
            more[1] += 1 / 16
        grads.add_dq(batch, slice(a, b), more[0])
        grads.add_dkv(batch, 1, a, b, more[1] if wide else more[1].bfloat16(), more[2].bfloat16())
        for total, part in zip((dq, dk, dv), more, strict=True):
            total[where, a:b] += part  # exact in fp32
    grads.end()
    assert torch.equal(grads.finish(), dq)
    for got, want in zip(kv.keys_values(1, 0, 12), (dk, dv), strict=True):
        assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    for got in kv.keys_values(0, 0, 5):
        assert torch.equal(got, torch.zeros_like(got))


def test_a_sum_that_is_rounded_twice_would_show() -> None:
    """By hand: 256 + 1 + 1 is 258 in bf16, and 256 when each sum on the way is rounded."""
    kv = rows_of(Shard((Chunk(0, 4),)), torch.bfloat16, batch=1)
    grads = Grads(1, 4, H, D, device=CPU)
    for _ in range(2):  # nothing is left of the step before
        grads.begin(kv)
        for value, rows in ((256.0, (0, 4)), (1.0, (0, 3)), (1.0, (1, 2))):
            part = torch.full((1, rows[1] - rows[0], 1, 3), value, dtype=torch.bfloat16)
            grads.add_dkv(None, 0, *rows, part, part[..., :2])
        grads.end()
        for got in kv.keys_values(0, 0, 4):
            want = torch.tensor([256.0, 258.0, 256.0, 256.0]).bfloat16()  # 257 is a tie
            assert torch.equal(got, want.view(1, 4, 1, 1).expand_as(got))


def test_one_part_travels_as_it_is() -> None:
    """Every bf16 number, infinities and NaN included, beside rows that are summed."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(1, -1, 1, 1)
    count = every.shape[1]
    kv = rows_of(Shard((Chunk(0, count + 1),)), torch.bfloat16, batch=1)
    grads = Grads(1, 8, H, D, device=CPU)
    grads.begin(kv)
    grads.add_dkv(None, 0, 0, count, every.expand(-1, -1, 1, 3), every.expand(-1, -1, 1, 2))
    one = torch.ones(1, 1, 1, 3, dtype=torch.bfloat16)
    for _ in range(3):
        grads.add_dkv(None, 0, count, count + 1, one, one[..., :2])
    grads.end()
    for got in kv.keys_values(0, 0, count):
        bits = (x.contiguous().view(torch.int16) for x in (got, every.expand_as(got)))
        assert torch.equal(*bits)
    assert bool((kv.keys_values(0, count, count + 1)[0] == 3).all())


def test_ranges_added_at_once_are_those_added_one_by_one() -> None:
    """Chunks that follow one another in the records, apart, and from the middle of one on."""
    for lengths, start in (((128, 128, 40), 0), ((128, 60, 40), 0), ((256, 128), 100)):
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        own = Shard(tuple(Chunk(a, n) for a, n in zip(starts, lengths, strict=True)))
        keys = [(c, start if c == 0 else 0, n) for c, n in enumerate(lengths)]
        total = sum(k1 - k0 for _, k0, k1 in keys)
        generator = torch.Generator().manual_seed(0)
        dk, dv = (torch.randn(B, total, 1, d, generator=generator) for d in (3, 2))
        got = []
        for at_once in (True, False):
            kv = rows_of(own, torch.float32)
            grads = Grads(B, 8, H, D, device=CPU)
            grads.begin(kv)
            for batch in (None, 1):  # assigned, then added to in one batch row
                rows = slice(None) if batch is None else slice(1, 2)
                if at_once:
                    grads.add_dkv_of(batch, keys, dk[rows], dv[rows])
                    continue
                at = 0
                for chunk, k0, k1 in keys:
                    here = slice(at, at + k1 - k0)
                    grads.add_dkv(batch, chunk, k0, k1, dk[rows, here], dv[rows, here])
                    at += k1 - k0
            grads.end()
            got.append([x for c, n in enumerate(lengths) for x in kv.keys_values(c, 0, n)])
        for a, b in zip(*got, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(got[0][0][0, start:], dk[0, : lengths[0] - start])
        assert torch.equal(got[0][0][1, start:], 2 * dk[1, : lengths[0] - start])
