"""The ring on virtual ranks of one GPU, against dense fp64 attention and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ring_bodies import late_copies
from rings import Case, dense, run
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4.comm.local import run_ranks
from ringfa4.context import Context
from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.native import NativeKernel
from ringfa4.kernels.registry import load_kernel
from ringfa4.mask import causal, window
from ringfa4.testing.tolerances import bound, plain_attention

pytestmark = [
    pytest.mark.gpu,
    # flash-attn-4 uses names that the DSL is about to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

WORLDS = (1, 2, 3, 8)


def on_gpu(world: int, fn: Callable[[Context], Any]) -> list[Any]:
    return run_ranks(world, lambda rank, t, c: fn(Context(t, c)), 120.0, "cuda")


def exact(world: int, **more: Any) -> Case:
    """fp64 throughout, by the reference kernel: what is left is the order of sums."""
    return Case(
        mask=causal(128 * 2 * world),
        world=world,
        heads=(4, 2),
        dims=(32, 16),
        batch=2,
        dtype=torch.float64,
        sink=True,
        dlse=True,
        options={"kernel": "reference"},
        device="cuda",
        **more,
    )


@pytest.mark.parametrize("world", WORLDS)
def test_fp64_ring_equals_dense_attention(world: int) -> None:
    case = exact(world)
    got, want = run(case, on_gpu), dense(case)
    for name, tensor in got.items():
        # Sums of up to 2048 products in fp64: 2^-53 * sqrt(2048) relative, with room for exp.
        assert torch.allclose(tensor, want[name].cpu(), rtol=1e-11, atol=1e-11), name


@pytest.mark.parametrize("world", WORLDS)
def test_late_copies_leave_the_bits_alone(world: int) -> None:
    """Delays on the copy streams, three times; a missing order of streams would show."""
    case = exact(world)
    want = run(case, on_gpu)
    for seed in range(3):
        with late_copies(seed):
            got = run(case, on_gpu)
        assert all(torch.equal(got[name], want[name]) for name in want), seed


def fast(world: int, **more: Any) -> Case:
    return Case(
        mask=causal(1024 * world),
        world=world,
        heads=(4, 2),
        dims=(64, 64),
        dtype=torch.bfloat16,
        options={"kernel": "cuda_aten"},
        device="cuda",
        **more,
    )


@pytest.mark.parametrize("world", WORLDS)
def test_bf16_ring_is_as_good_as_plain_bf16_attention(world: int) -> None:
    case = fast(world)
    got, want, x = run(case, on_gpu), dense(case), case.tensors()
    plain = plain_attention(x["q"], x["k"], x["v"], case.mask, x["dout"])
    for name in ("out", "dq", "dk", "dv"):
        truth = want[name].cpu()
        error = float((got[name].double() - truth).abs().max())
        baseline: Tensor = getattr(plain, name)
        assert error <= bound(baseline.cpu(), truth, case.dtype), name


@pytest.mark.parametrize("world", (2, 8))
def test_bf16_ring_repeats_to_the_bit_on_late_copies(world: int) -> None:
    case = fast(world)
    torch.use_deterministic_algorithms(True)
    try:
        want = run(case, on_gpu)
        for seed in range(3):
            with late_copies(seed):
                got = run(case, on_gpu)
            assert all(torch.equal(got[name], want[name]) for name in want), seed
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["cuda_aten", "fa4"])
def test_contributions_in_bf16_give_the_bits_of_fp32_ones(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of causal zigzag is one call, whose dK/dV are bf16: they arrive as they are."""
    try:
        load_kernel(kernel)
    except MissingLibraryError as error:
        pytest.skip(str(error))
    case = replace(fast(8), options={"kernel": kernel})
    torch.use_deterministic_algorithms(True)
    try:
        got = run(case, on_gpu)
        monkeypatch.setattr(NativeKernel, "gradient_dtype", BlockKernel.gradient_dtype)
        want = run(case, on_gpu)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_window_skips_hops() -> None:
    """Ranks without work in a step make no transfer, and nobody waits for one."""
    case = replace(exact(8), mask=window(2048, left=100, right=0))
    got, want = run(case, on_gpu), dense(case)
    for name, tensor in got.items():
        assert torch.allclose(tensor, want[name].cpu(), rtol=1e-11, atol=1e-11), name


def test_layers_share_a_context_through_autograd() -> None:
    """Two layers, forward and backward by autograd in the rank's own thread, as a model does."""
    case = fast(4)
    whole = case.tensors()

    def layers(context: Context) -> tuple[Tensor, Tensor]:
        cp = ContextParallel(context, mask=case.mask, kernel="cuda_aten")
        q, k, v = (cp.shard(whole[n], dim=1).requires_grad_() for n in "qkv")
        once = cp.attention(q, k, v)
        twice = cp.attention(once, k, v)
        (grad,) = torch.autograd.grad(twice.float().square().sum(), q)
        return cp.unshard(twice.detach(), dim=1), cp.unshard(grad, dim=1)

    alone = run_ranks(1, lambda r, t, c: layers(Context(t, c)), 60.0, "cuda")[0]
    spread = on_gpu(4, layers)
    for out, grad in spread:
        # Both round out and dK/dV to bf16 between the layers; 2 ** -7 is two roundings of that.
        for mine, theirs in ((out, alone[0]), (grad, alone[1])):
            scale = theirs.float().abs().max()
            assert (mine.float() - theirs.float()).abs().max() <= 2**-6 * scale
