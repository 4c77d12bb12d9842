"""What kernels on library calls share (ringfa4.kernels.native), held to the contract on the CPU.

The library is a double: dense attention that aligns windows bottom-right and has the libraries'
habits, NaN leaking through masked pairs and an lse of -inf for rows whose logits hold NaN.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_contract import KernelContract
from torch import Tensor

from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.kernels.native import NativeKernel, Rows, aligned, masks_pairs, window
from ringfa4.mask import Band


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
