"""What the CPU kernel does about its native backward: sums in bf16, threads that only spin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4.kernels import cpu
from ringfa4.kernels.pieces import boxes
from ringfa4.mask import Band

DECIBELS = 46.0
"""Of dQ, dK, dV. Rounding P or dS, a tile, the call's result and the result to bf16, 0.41 half ulps
each in root mean square, leaves 20 log10(2^8 / (0.41 * 2)) = 49.9 dB; four more dB allow for the
tiles of a call."""


def gradients(queries: int, keys: int) -> dict[str, float]:
    """SQNR (dB) of dq, dk, dv in bf16 against fp64 on the same inputs, out and lse."""
    gen = torch.Generator().manual_seed(0)
    shapes = {"q": queries, "k": keys, "v": keys, "dout": queries}
    x = {n: torch.randn(1, s, 1, 64, generator=gen).bfloat16() for n, s in shapes.items()}
    cp = ContextParallel(mask=masks.full(queries, keys), kernel="cpu", device="cpu")
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v")]
    out, lse = cp.attention(*leaves, return_lse=True)
    got = torch.autograd.grad(out, leaves, x["dout"])
    q, k, v, dout, o = (t.detach().double()[0, :, 0] for t in (*leaves, x["dout"], out))
    p = torch.exp(q @ k.T / 8 - lse.detach().double()[0, 0].unsqueeze(1))
    ds = p * (dout @ v.T - (dout * o).sum(1, keepdim=True))
    want = {"dq": ds @ k / 8, "dk": ds.T @ q / 8, "dv": p.T @ dout}
    noise = {n: (g.double()[0, :, 0] - want[n]) for n, g in zip(want, got, strict=True)}
    ratio = {n: want[n].square().sum() / noise[n].square().sum() for n in want}
    return {n: 10 * torch.log10(r).item() for n, r in ratio.items()}


@pytest.mark.parametrize(("queries", "keys"), [(256, 16384), (16384, 256)])
def test_errors_do_not_grow_with_length(queries: int, keys: int) -> None:
    assert {n: db for n, db in gradients(queries, keys).items() if db < DECIBELS} == {}


@pytest.mark.parametrize(("batch", "heads", "threads"), [(1, 1, 1), (2, 1, 2), (1, 8, 4)])
def test_no_thread_is_left_to_spin(
    monkeypatch: pytest.MonkeyPatch, batch: int, heads: int, threads: int
) -> None:
    """Native backward shares out batch rows and K/V heads, here among 4 threads at most."""
    seen = []

    def native(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return _backward(*args, **options)

    _backward = cpu._backward
    monkeypatch.setattr(cpu, "_backward", native)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        q = torch.randn(batch, 64, 8, 16, requires_grad=True)
        k, v = torch.randn(2, batch, 64, heads, 16).unbind()
        cp = ContextParallel(mask=masks.full(64), kernel="cpu", device="cpu")
        cp.attention(q, k, v).sum().backward()
        assert set(seen) == {threads}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


bounds = st.none() | st.integers(-60, 60)


@given(st.integers(0, 40), st.integers(1, 60), st.integers(0, 40), st.integers(1, 60), bounds,
       bounds, st.integers(1, 25))  # fmt: skip
def test_boxes_are_the_band(
    q0: int, n: int, k0: int, m: int, lo: int | None, hi: int | None, side: int
) -> None:
    band = Band(q0, q0 + n, k0, k0 + m, lo, hi)
    parts = list(boxes(band, side))
    assert all(p.q1 - p.q0 <= side and p.k1 - p.k0 <= side for p in parts)
    for i in range(q0, q0 + n):
        for j in range(k0, k0 + m):
            assert sum(p.contains(i, j) for p in parts) == band.contains(i, j)
