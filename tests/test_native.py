"""What kernels on library calls share (ringfa4.kernels.native), held to the contract on the CPU.

The library is a double: dense attention that aligns windows bottom-right and has the libraries'
habits, NaN leaking through masked pairs and an lse of -inf for rows whose logits hold NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_contract import Case, KernelContract, shard
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4.kernels import native
from ringfa4.kernels.cuda_aten import CudaAtenKernel
from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.kernels.native import (
    Call,
    NativeKernel,
    Rows,
    _joined,
    aligned,
    masks_pairs,
    window,
)
from ringfa4.mask import Band, Mask
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.wire import RecordMap, wire_format

Passes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def allowed(box: Band) -> Tensor:
    left, right = window(box)
    away = torch.arange(box.k1) - torch.arange(box.q1).unsqueeze(1) - (box.k1 - box.q1)
    inside = torch.ones_like(away, dtype=torch.bool)
    if left is not None:
        inside &= away >= -left
    if right is not None:
        inside &= away <= right
    return inside


class Library(NativeKernel):
    """Dense attention, (b, h, n, m) at once, in fp64."""

    name = "library double"

    def supports(self, spec: KernelSpec) -> str | None:
        return "heads_q is no multiple of heads_kv" if spec.heads_q % spec.heads_kv else None

    @staticmethod
    def logits(box: Band, scale: float, q: Tensor, k: Tensor) -> Tensor:
        wide = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
        logits = scale * torch.einsum("bihd,bjhd->bhij", q.double(), wide)
        return logits.masked_fill(~allowed(box), -torch.inf)

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(box, scale, q, k)
        lse = torch.logsumexp(logits, -1)
        p = torch.exp(logits - lse.unsqueeze(-1))
        wide = v.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
        out = torch.einsum("bhij,bjhd->bihd", p, wide)
        return out.to(q.dtype), lse.masked_fill(torch.isnan(lse), -torch.inf).float()

    def differentiate(
        self, box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(box, scale, rows.q, k)
        group = rows.q.shape[2] // k.shape[2]
        wide_k, wide_v = (x.double().repeat_interleave(group, 2) for x in (k, v))
        dout = rows.dout.double()
        delta = (rows.out.double() * dout).sum(-1).transpose(1, 2)
        if rows.dlse is not None:
            delta = delta - rows.dlse
        p = torch.exp(logits - rows.lse.unsqueeze(-1))
        ds = scale * p * (torch.einsum("bihd,bjhd->bhij", dout, wide_v) - delta.unsqueeze(-1))
        ds = ds.masked_fill(~allowed(box), 0)
        dq = torch.einsum("bhij,bjhd->bihd", ds, wide_k)
        dk = torch.einsum("bhij,bihd->bjhd", ds, rows.q.double())
        dv = torch.einsum("bhij,bihd->bjhd", p, dout)
        dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
        return dq, dk, dv


class TestNative(KernelContract):
    kernel = "library double"
    dtypes = (torch.bfloat16, torch.float16)

    def make(self) -> BlockKernel:
        return Library()


@given(
    rows=st.integers(1, 12),
    keys=st.integers(1, 12),
    lo=st.none() | st.integers(-14, 14),
    hi=st.none() | st.integers(-14, 14),
)
def test_every_trimmed_band_is_a_window(rows: int, keys: int, lo: int | None, hi: int | None):
    band = Band(0, rows, 0, keys, lo, hi).trimmed()
    if band is None:
        return
    box = band.shifted(-band.q0, -band.k0)
    inside = allowed(box)
    assert bool(inside.any(1).all()), "every row of a call sees a key"
    assert masks_pairs(box) == (not bool(inside.all()))
    for i in range(box.q1):
        for j in range(box.k1):
            assert bool(inside[i, j]) == band.contains(band.q0 + i, band.k0 + j)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_aligned_copies_only_what_is_not(dtype: torch.dtype):
    x = torch.zeros(2, 6, 4, 32, dtype=dtype)
    assert aligned(x[:, 1:, ::2]).data_ptr() == x[:, 1:, ::2].data_ptr()
    for odd in (x[..., ::2], x[..., 1:17], x.transpose(1, 3)):
        assert aligned(odd).is_contiguous() and torch.equal(aligned(odd), odd)


class Counting(Library):
    """Notes the box of each call."""

    def __init__(self) -> None:
        self.boxes: list[Band] = []

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.boxes.append(box)
        return super().attend(box, scale, q, k, v)

    def differentiate(
        self, box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.boxes.append(box)
        return super().differentiate(box, scale, rows, k, v)


class Halves(Counting):
    """Cuts every box into its upper and lower rows, as a library with narrower masks has to."""

    def cut(self, band: Band) -> Iterator[Band]:
        middle = (band.q0 + band.q1) // 2
        for a, b in ((band.q0, middle), (middle, band.q1)):
            part = band.within(a, b, band.k0, band.k1)
            if part is not None:
                yield part


class TestJoined(KernelContract):
    """Neighbouring tasks in one call, where chunks fill their records."""

    kernel = "library double"
    dtypes = (torch.bfloat16,)
    library: type[Counting] = Counting

    def make(self) -> BlockKernel:
        self.made = self.library()
        return self.made

    def boxes(self, mask: Mask, q: Shard, k: Shard) -> list[Band]:
        case = replace(self.case(mask, batch=1), q_shard=q, k_shard=k)
        self.check(case)
        return self.made.boxes

    def test_a_causal_shard_is_one_call(self) -> None:
        for lengths in ((128, 128), (128, 256, 72)):
            own, total = shard(*lengths), sum(lengths)
            assert self.boxes(masks.causal(total), own, own) == [Band(0, total, 0, total, None, 0)]

    def test_full_chunks_are_one_rectangle(self) -> None:
        own = shard(128, 128)
        assert self.boxes(masks.full(256), own, own) == [Band(0, 256, 0, 256)]
        assert self.boxes(masks.full(256), shard(56, 200), own) == [Band(0, 256, 0, 256)]

    def test_padding_between_chunks_keeps_them_apart(self) -> None:
        own = shard(100, 100)
        assert len(self.boxes(masks.causal(200), own, own)) == 3

    def test_documents_and_windows_stay_apart(self) -> None:
        own = shard(128, 128)
        apart = masks.documents([0, 128, 256])
        assert self.boxes(apart, own, own) == [Band(0, 128, 0, 128, None, 0)] * 2
        assert all(b.lo is not None for b in self.boxes(masks.window(256, left=9), own, own))


class TestJoinedThenCut(TestJoined):
    """Parts of joined calls find their keys and rows again."""

    library = Halves

    def test_a_causal_shard_is_one_call(self) -> None:
        own = shard(128, 128)
        boxes = self.boxes(masks.causal(256), own, own)
        assert boxes == [Band(0, 128, 0, 128, None, 0), Band(0, 128, 0, 256, None, 128)]

    def test_full_chunks_are_one_rectangle(self) -> None:
        own = shard(128, 128)
        assert self.boxes(masks.full(256), own, own) == [Band(0, 128, 0, 256)] * 2

    def test_padding_between_chunks_keeps_them_apart(self) -> None:
        own = shard(100, 100)
        assert len(self.boxes(masks.causal(200), own, own)) == 6

    def test_documents_and_windows_stay_apart(self) -> None:
        own = shard(128, 128)
        assert len(self.boxes(masks.documents([0, 128, 256]), own, own)) == 4


def flash_sees(box: Band) -> set[tuple[int, int]]:
    """The pairs that PyTorch's flash attention computes for the window of a box.

    As mha_fwd and mha_bwd (aten, flash_api.cpp) read a window: a side of at least as many keys as
    there are is unbounded, and an unbounded side beside a bounded one reaches as many as there are.
    """
    rows, keys = box.q1, box.k1
    left, right = (-1 if side is None or side >= keys else side for side in window(box))
    if left < 0 and right < 0:
        return {(i, j) for i in range(rows) for j in range(keys)}
    left, right = keys if left < 0 else left, keys if right < 0 else right
    middle = keys - rows
    return {
        (i, j)
        for i in range(rows)
        for j in range(max(0, i + middle - left), min(keys, i + middle + right + 1))
    }


class Small(Counting):
    """Takes tensors of few elements only."""

    most_elements = 40 * 4 * 64

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert q.numel() <= self.most_elements
        assert k.numel() <= self.most_elements
        return super().attend(box, scale, q, k, v)


class TestSmallCalls(KernelContract):
    """Calls cut by batch row and then by length give what whole ones give."""

    kernel = "library double"
    dtypes = (torch.bfloat16,)

    def make(self) -> BlockKernel:
        return Small()


@given(
    rows=st.integers(1, 40),
    keys=st.integers(1, 12),
    lo=st.none() | st.integers(-40, 4),
    hi=st.none() | st.integers(-4, 14),
)
@example(rows=300, keys=20, lo=-40, hi=5)
@example(rows=14, keys=12, lo=-3, hi=None)
@example(rows=13, keys=12, lo=-2, hi=None)
def test_cuda_aten_cuts_into_what_flash_masks_rightly(
    rows: int, keys: int, lo: int | None, hi: int | None
):
    """Parts are disjoint, cover the band, and flash sees just their pairs."""
    band = Band(0, rows, 0, keys, lo, hi).trimmed()
    if band is None:
        return
    box = band.shifted(-band.q0, -band.k0)
    seen: list[tuple[int, int]] = []
    for part in CudaAtenKernel().cut(box):
        own = flash_sees(part.shifted(-part.q0, -part.k0))
        seen += [(part.q0 + i, part.k0 + j) for i, j in own]
    whole = [(i, j) for i in range(box.q1) for j in range(box.k1) if box.contains(i, j)]
    assert sorted(seen) == whole


def pairs(call: Call) -> set[tuple[int, int, int]]:
    """(row, chunk, key) of a call."""
    keys = [(chunk, k) for chunk, k0, k1 in call.keys for k in range(k0, k1)]
    assert len(keys) == call.box.k1 == call.k.shape[1]
    return {
        (call.rows.start + i, *keys[j])
        for i in range(call.box.q1)
        for j in range(call.box.k1)
        if call.box.contains(i, j)
    }


@given(st.data())
def test_joined_calls_compute_the_same_pairs(data: st.DataObject):
    """Whatever is joined: rows above or the same, keys the same, a prefix, or beside each other."""
    store = torch.zeros(1, 12, 1, 8)

    def call(start: int, first_key: int) -> Call | None:
        rows, keys = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        hi = data.draw(st.none() | st.integers(-3, 8))
        band = Band(0, rows, 0, keys, None, hi).trimmed()
        if band is None or band.q0 or band.k1 + first_key > 12:
            return None
        held = store[:, first_key : first_key + band.k1]
        runs = ((0, first_key, min(first_key + band.k1, 6)), (1, max(first_key - 6, 0), 0))
        own = [runs[0]] if runs[0][1] < runs[0][2] else []
        if first_key + band.k1 > 6:
            own.append((1, runs[1][1], first_key + band.k1 - 6))
        box = band.shifted(0, -band.k0)
        return Call(None, slice(start, start + band.q1), box, tuple(own), held, held)

    first = call(0, 0)
    if first is None:
        return
    below = data.draw(st.booleans())
    second = call(first.rows.stop if below else 0, 0 if below else first.box.k1)
    if second is None:
        return
    both = _joined(first, second)
    if both is not None:
        assert both.box == both.box.trimmed()
        assert pairs(both) == pairs(first) | pairs(second)
        assert both.k.data_ptr() == first.k.data_ptr()


def test_what_is_joined_and_what_not():
    k = torch.zeros(1, 8, 1, 8)

    def call(rows: slice, box: Band, *keys: tuple[int, int, int]) -> Call:
        return Call(None, rows, box, keys, k[:, : box.k1], k[:, : box.k1])

    clipped = call(slice(0, 6), Band(0, 6, 0, 4, None, 0), (0, 0, 4))
    goes_on = call(slice(6, 8), Band(0, 2, 0, 8, None, 6), (0, 0, 4), (1, 0, 4))
    assert _joined(clipped, goes_on) is None, "rows 4 and 5 would see keys of chunk 1"
    square = call(slice(0, 4), Band(0, 4, 0, 4, None, 0), (0, 0, 4))
    below = call(slice(4, 8), Band(0, 4, 0, 8, None, 4), (0, 0, 4), (1, 0, 4))
    both = _joined(square, below)
    assert both is not None and both.box == Band(0, 8, 0, 8, None, 0)
    others = call(slice(4, 8), Band(0, 4, 0, 8, None, 4), (2, 0, 4), (1, 0, 4))
    assert _joined(square, others) is None, "other keys"


def passes(kernel: NativeKernel, case: Case, tasks: tuple[Task, ...], map: RecordMap) -> Passes:
    """out, lse, dq, dk, dv of one step, on the case's records in new memory."""
    records = case.encoded()
    records = wire_format(None, case.k.dtype).view(case.geometry, map, records.buffer, "forward")
    state, grads = case.state(), case.grads(kernel.gradient_dtype(case.q.dtype))
    kernel.forward(kernel.prepare(case.q, case.q_shard), records, tasks, case.scale, state)
    out, lse = state.finalise(case.q.dtype)
    queries = kernel.prepare_backward(case.q, case.q_shard, out, case.dout, lse, case.dlse)
    kernel.backward(queries, records, tasks, case.scale, grads.sums)
    grads.sums.end()
    return out, lse, grads.sums.finish(), *grads.dkv()


class TestRemembered:
    """A kernel remembers the calls of a step, never what they were made on."""

    def cases(self, mask: Mask, own: Shard, batch: int) -> tuple[Case, Case]:
        """Two of one shape with other values."""
        case = replace(TestNative().case(mask, batch=batch), q_shard=own, k_shard=own)
        other = [x.flip(1) for x in (case.q, case.k, case.v, case.dout)]
        return case, replace(case, q=other[0], k=other[1], v=other[2], dout=other[3])

    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize("lengths", [(128, 128), (100, 156)], ids=str)
    @pytest.mark.parametrize("library", [Library, Halves, Small])
    def test_a_step_that_comes_round_again(
        self, library: type[NativeKernel], lengths: tuple[int, ...], batch: int
    ) -> None:
        total = sum(lengths)
        masks_ = (masks.causal(total), masks.full(total), masks.documents([0, 50, total]))
        own, kernel = shard(*lengths), library()
        where = RecordMap.whole(own)
        for mask in masks_:  # the same records and queries, other tasks
            first, second = self.cases(mask, own, batch)
            tasks = tuple(first.tasks)
            for case in (first, second, first):
                got = passes(kernel, case, tasks, where)
                for x, fresh in zip(got, passes(library(), case, tasks, where), strict=True):
                    assert torch.equal(x, fresh)

    def test_no_records_are_kept_and_few_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "MOST_OUTLINES", 3)
        kernel, own, made = Library(), shard(128, 128), []
        case, _ = self.cases(masks.causal(256), own, 1)
        queries, where = kernel.prepare(case.q, own), RecordMap.whole(own)
        for _ in range(5):
            records = case.encoded()
            made.append(weakref.ref(records))
            view = wire_format(None, case.k.dtype).view(
                case.geometry, where, records.buffer, "forward"
            )
            made.append(weakref.ref(view))
            kernel.forward(queries, view, tuple(case.tasks), case.scale, case.state())
            del records, view
        assert len(kernel._outlines._found) == 3
        assert all(ref() is None for ref in made)
