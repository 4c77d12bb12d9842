"""Kernels that write dK and dV where they travel from give the bits of those that return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_contract import KernelContract
from rings import Case, run
from test_contributions import ONE_TASK_A_ROW, SEVERAL, several
from test_native import Library
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.fa4 import Fa4Kernel
from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.native import Rows
from ringfa4.mask import Band
from ringfa4.shard import Chunk, Shard
from ringfa4.wire import PLAIN, Geometry, PlainShard, RecordMap

BF16 = torch.bfloat16


class Rounding(Library):
    """Returns gradients in the dtype of its inputs, as libraries do."""

    def differentiate(self, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        *_, k, v = operands
        dq, dk, dv = super().differentiate(*operands)
        return dq.to(k.dtype), dk.to(k.dtype), dv.to(v.dtype)


class InPlace(Rounding):
    """Writes them where it is told to; ``placed`` counts how often it was."""

    writes_in_place = True

    def __init__(self) -> None:
        self.placed = 0

    def differentiate(
        self,
        box: Band,
        scale: float,
        rows: Rows,
        k: Tensor,
        v: Tensor,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().differentiate(box, scale, rows, k, v)
        if into is None:
            return dq, dk, dv
        self.placed += 1
        for place, grad in zip(into, (dk, dv), strict=True):
            assert place.dtype == grad.dtype and place.shape == grad.shape
            place.copy_(grad)
        return dq, *into


class TestInPlace(KernelContract):
    """Among them: NaN that belongs into dK and dV is put where the kernel wrote them. In a ring the
    own step, which is copied, spoils the same keys.
    """

    kernel = "library double"
    dtypes = (BF16,)

    def make(self) -> BlockKernel:
        return InPlace()


class Spoilt(Case):
    """A key that is NaN; who must not see it must not get it."""

    def tensors(self) -> dict[str, Tensor]:
        drawn = super().tensors()
        drawn["k"][:, 7, 1, 3] = torch.nan
        return drawn


CASES = {**ONE_TASK_A_ROW, **{f"several, {name}": several(name, None) for name in SEVERAL}}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "NaN in K"])
def test_in_place_and_copied_are_the_same(
    name: str, spoilt: bool, chosen: Callable[[BlockKernel], None]
) -> None:
    case: Case = replace(CASES[name], heads=(4, 2), dtype=BF16, dlse=True, sink=True)
    if spoilt:
        case = Spoilt(**vars(case))
    chosen(Rounding())
    want = run(case)
    kernel = InPlace()
    chosen(kernel)
    got = run(case)
    assert kernel.placed > 0
    for n in want:
        assert torch.equal(got[n].nan_to_num(7.0), want[n].nan_to_num(7.0)), n


Range = tuple[int | None, int, int, int]
"""(batch row or all, chunk, k0, k1)"""


@given(
    ranges=st.lists(
        st.tuples(
            st.none() | st.integers(0, 1),
            st.integers(0, 1),
            st.integers(0, 99),
            st.integers(1, 100),
        ),
        max_size=6,
    )
)
def test_a_place_is_given_where_nothing_is_lost(ranges: list[Range]) -> None:
    """In any order of ranges, some of which overlap, with and without batch rows."""
    shard = Shard((Chunk(0, 100), Chunk(500, 64)))
    geometry = Geometry(2, 1, 16, 8, BF16)
    generator = torch.Generator().manual_seed(0)

    def sums(places: bool) -> list[Tensor]:
        generator.manual_seed(len(ranges))
        size = shard.records * PLAIN[BF16].record_bytes(geometry, "backward")
        buffer = torch.full((size,), 0xFF, dtype=torch.uint8)
        kv = PLAIN[BF16].view(geometry, RecordMap.whole(shard), buffer, "backward")
        assert isinstance(kv, PlainShard)
        grads = Grads(2, 4, 1, 16, device=torch.device("cpu"))
        grads.begin(kv)
        for batch, chunk, k0, count in ranges:
            k1 = min(k0 + count, shard.chunks[chunk].count)
            if k0 >= k1:
                continue
            keys = [(chunk, k0, k1)]
            rows = 2 if batch is None else 1
            given = [
                torch.randn(rows, k1 - k0, 1, d, generator=generator).to(BF16) for d in (16, 8)
            ]
            place = grads.place_dkv(batch, keys, BF16) if places else None
            if place is None:
                grads.add_dkv_of(batch, keys, given[0], given[1])
                continue
            for to, x in zip(place, given, strict=True):
                assert bool(to.isnan().all()), "nothing was there"
                to.copy_(x)
        grads.end()
        return [
            x for c, chunk in enumerate(shard.chunks) for x in kv.keys_values(c, 0, chunk.count)
        ]

    for one, other in zip(sums(True), sums(False), strict=True):
        assert torch.equal(one, other)


def test_no_place_is_given_in_another_dtype_or_for_rows_apart() -> None:
    shard = Shard((Chunk(0, 100), Chunk(500, 64)))
    for dtype, keys, want in (
        (BF16, [(0, 0, 64)], True),
        (BF16, [(0, 0, 100), (1, 0, 64)], False),  # padding between
        (torch.float16, [(0, 0, 64)], False),
    ):
        geometry = Geometry(1, 1, 16, 8, BF16)
        size = shard.records * PLAIN[BF16].record_bytes(geometry, "backward")
        kv = PLAIN[BF16].view(
            geometry, RecordMap.whole(shard), torch.empty(size, dtype=torch.uint8), "backward"
        )
        assert isinstance(kv, PlainShard)
        grads = Grads(1, 4, 1, 16, device=torch.device("cpu"))
        grads.begin(kv)
        assert (grads.place_dkv(None, keys, dtype) is not None) == want


class _Fa4:
    """The library's backward: checks what it is given as the real one does; ``given`` keeps it."""

    def __init__(self) -> None:
        self.given: list[bool] = []

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, dk: Any, dv: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.given.append(dk is not None)
        grads = []
        for into, x in ((dk, k), (dv, v)):
            to = torch.empty_like(x) if into is None else into
            assert to.shape == x.shape and to.dtype == x.dtype
            assert not to.data_ptr() % 16 and all(
                s * to.itemsize % 16 == 0 for s in to.stride()[:3]
            )
            grads.append(to.copy_(x + 1))
        return torch.zeros_like(q), grads[0], grads[1]


@pytest.mark.parametrize(
    ("d", "shift", "itself"),
    [(64, 0, True), (64, 1, False), (40, 0, False)],
    ids=["aligned", "off by 2 bytes", "padded to 64"],
)
def test_fa4_is_given_a_place_that_it_can_write(d: int, shift: int, itself: bool) -> None:
    """Another is copied to; the bits are the same."""
    kernel, library = Fa4Kernel.__new__(Fa4Kernel), _Fa4()
    kernel._library = library
    q, k, v = (torch.randn(1, 8, 1, d).to(BF16) for _ in range(3))
    rows = Rows(q, q, q, torch.zeros(1, 1, 8), None)
    memory = torch.zeros(8 * 2 * d + shift, dtype=BF16)[shift:].view(1, 8, 1, 2 * d)
    place = memory[..., :d], memory[..., d:]
    want = kernel.differentiate(Band(0, 8, 0, 8, None, None), 1.0, rows, k, v)
    got = kernel.differentiate(Band(0, 8, 0, 8, None, None), 1.0, rows, k, v, place)
    assert library.given == [False, itself]
    assert got[1] is place[0] and got[2] is place[1]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
