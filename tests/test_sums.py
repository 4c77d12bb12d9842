"""Sums of parts that wait and are added at once are those of parts added one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rings import Case, run
from test_contributions import PAIRS, SEVERAL, Chosen, several
from test_in_place import InPlace, Rounding
from torch import Tensor

import ringfa4.grads
import ringfa4.problem
import ringfa4.sums
from ringfa4 import mask as masks
from ringfa4.grads import Grads
from ringfa4.sums import RowSum
from ringfa4.topology import Topology

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = (BF16, torch.float16, FP32)


class Operators:
    """What :mod:`ringfa4.kernels.cute.host` says of sums, by PyTorch's operators; ``passes`` counts
    calls, (parts, whether a sum was read).
    """

    PARTIALS = 4

    def __init__(self) -> None:
        self.passes: list[tuple[int, bool]] = []

    def joins(self, x: Tensor, dtype: torch.dtype) -> bool:
        return dtype == FP32 and x.dtype in DTYPES and x.shape[-1] % 8 == 0

    def rounds(self, dtype: torch.dtype) -> bool:
        return dtype in (BF16, FP32)

    def adds(self, into: Tensor, sum: Tensor | None, parts: Sequence[Tensor]) -> bool:
        return all(x.dtype in DTYPES for x in parts)

    def add(self, into: Tensor, sum: Tensor | None, parts: Sequence[Tensor]) -> None:
        assert 1 <= len(parts) <= self.PARTIALS and len({x.dtype for x in parts}) == 1
        assert all(x.shape == into.shape for x in parts)
        assert sum is None or (sum.dtype == FP32 and sum.shape == into.shape)
        exact = sum is None and len(parts) == 1 and into.dtype == parts[0].dtype
        assert exact or self.rounds(into.dtype)
        self.passes.append((len(parts), sum is not None))
        total, rest = (parts[0].float(), parts[1:]) if sum is None else (sum, parts)
        for x in rest:
            total = total + x.float()
        into.copy_(parts[0] if exact else total)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    kernels = Operators()
    monkeypatch.setattr(ringfa4.sums, "fused", lambda device: kernels)
    yield kernels


interval = st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True).map(sorted)
calls = st.lists(
    st.tuples(st.sampled_from([None, None, 0, 1]), interval, st.sampled_from(DTYPES)), max_size=9
)


def added(calls: list[tuple[int | None, list[int], torch.dtype]], result: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(calls))
    sums = RowSum(2, 12, 1, 8, device=torch.device("cpu"))
    for batch, (a, b), dtype in calls:
        rows = 2 if batch is None else 1
        sums.add(batch, slice(a, b), torch.randn(rows, b - a, 1, 8, generator=generator).to(dtype))
    return sums.result(result)


@given(calls, st.sampled_from(DTYPES))
def test_the_bits_are_those_of_parts_added_one_by_one(
    calls: list[tuple[int | None, list[int], torch.dtype]], result: torch.dtype
) -> None:
    want = added(calls, result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringfa4.sums, "fused", lambda device: kernels)
        kernels = Operators()
        got = added(calls, result)
    assert got.dtype == result and torch.equal(got, want)
    if not calls:
        assert not kernels.passes


def parts_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 12, 1, 8, generator=generator).to(BF16) for _ in range(count)]


@pytest.mark.parametrize(
    "count, passes",
    [
        (1, []),  # it is that part
        (2, [(2, False)]),
        (3, [(3, False)]),
        (5, [(4, False), (1, True)]),
        (7, [(4, False), (3, True)]),
    ],
)
def test_few_passes_do_and_few_parts_need_no_sum_in_memory(
    count: int, passes: list[tuple[int, bool]], operators: Operators
) -> None:
    parts = parts_of(count)
    sums = RowSum(1, 12, 1, 8, device=torch.device("cpu"))
    for part in parts:
        sums.add(None, slice(0, 12), part)
    got = sums.result(BF16)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    assert torch.equal(got, want.to(BF16)) and operators.passes == passes
    assert (sums._total is None) == (count <= 4)


def test_parts_wait_as_long_as_there_is_room(operators: Operators) -> None:
    parts = parts_of(6)
    sums = RowSum(1, 12, 1, 8, device=torch.device("cpu"), room=2 * parts[0].nbytes)
    for part in parts:
        sums.add(None, slice(0, 12), part)
    assert operators.passes == [(3, False), (3, True)]


@pytest.mark.parametrize("steps, passes", [(2, [(2, False)]), (3, [(1, False), (1, True)])])
def test_parts_of_two_steps_wait_in_any_case(
    steps: int, passes: list[tuple[int, bool]], operators: Operators, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ringfa4.grads, "ROOM", 0)
    grads = Grads(1, 12, 1, 8, device=torch.device("cpu"), steps=steps)
    first, second = parts_of(2)
    for part in (first, second):
        grads.add_dq(None, slice(0, 12), part)
    assert torch.equal(grads.finish(BF16), (first.float() + second.float()).to(BF16))
    assert operators.passes == passes


def test_after_settling_parts_may_change(operators: Operators) -> None:
    first, second, third = parts_of(3)
    want = (first.float() + second.float() + third.float()).to(BF16)
    sums = RowSum(1, 12, 1, 8, device=torch.device("cpu"))
    for part in (first, second):
        sums.add(None, slice(0, 12), part)
    sums.settle()
    for part in (first, second):
        part.fill_(math.nan)
    sums.add(None, slice(0, 12), third)
    assert torch.equal(sums.result(BF16), want)


def passes_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of a ring that adds at once; its results are, to the bit, those of one that does not."""
    want = run(case)
    kernels = Operators()
    monkeypatch.setattr(ringfa4.sums, "fused", lambda device: kernels)
    got = run(case)
    for n in want:
        assert torch.equal(got[n], want[n]), n
    return kernels.passes


@pytest.mark.parametrize("topology", [None, PAIRS, Topology.even(4, 4)], ids=str)
@pytest.mark.parametrize("dims", [(16, 24), (12, 8)], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["returned", "in place"])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_ring_that_adds_at_once_gives_the_same_bits(
    name: str,
    dims: tuple[int, int],
    in_place: bool,
    topology: Topology | None,
    chosen: Chosen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dQ, dK and dV of 4 ranks: padding between chunks, batch, grouped heads, rows of 24 bytes."""
    chosen(InPlace() if in_place else Rounding())
    case = replace(several(name, topology, dtype=BF16, dlse=True), dims=dims)
    passes = passes_of(case, monkeypatch)
    assert any(parts > 1 for parts, _ in passes), "nothing was added at once"


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6])
def test_however_many_contributions_are_left_for_the_last_pass(
    world: int, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, one or two of them, on a sum in fp32 or on the own part alone."""
    chosen(InPlace())
    case = Case(masks.causal(256 * world), world=world, heads=(4, 2), dims=(16, 24), dtype=BF16)
    passes = passes_of(case, monkeypatch)
    if world <= 3:
        assert not any(based for _, based in passes), "no sum was in memory in fp32"
