"""The block kernels of NVIDIA GPUs, held to the kernel contract on the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_contract import Case, GradSums, KernelContract, shard
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.cuda_aten import CUDNN_PAIRS, _for_cudnn
from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.registry import load_kernel
from ringfa4.mask import Band, Mask

pytestmark = [
    pytest.mark.gpu,
    # flash-attn-4 uses names that the DSL is about to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]


class OnCuda(KernelContract):
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)

    def test_supports_what_it_is_tested_on(self) -> None:
        spec = KernelSpec(
            "cuda", torch.cuda.get_device_capability(), self.dtypes[0], "bf16", *self.heads,
            *self.head_dims, frozenset({"lo", "hi", "many"}), True,
        )  # fmt: skip
        kernel = self.make()
        assert kernel.supports(spec) is None
        assert "heads_q" in (kernel.supports(replace(spec, heads_q=3)) or "")
        assert "float32" in (kernel.supports(replace(spec, dtype=torch.float32)) or "")
        assert "dk=84" in (kernel.supports(replace(spec, dk=84)) or "")
        assert "cpu" in (kernel.supports(replace(spec, device="cpu", arch=None)) or "")

    LARGE = (
        masks.causal(2304),
        masks.causal(520, 700, "bottom-right"),
        masks.causal(700, 520),
        masks.window(700, left=300),
        masks.window(700, left=200, right=150),
        masks.window(600, 700, left=50, right=None),
        masks.full(2048, 2176),
        masks.window(300, 20, left=40, right=5),
    )

    @pytest.mark.parametrize("mask", LARGE, ids=lambda m: f"{m.name} {m.seq_q} {m.seq_k}")
    def test_large(self, mask: Mask) -> None:
        """Several tiles each way in a call; the largest go to cuDNN in cuda_aten."""
        for dims in ((64, 64), (128, 128)):
            self.check(self.case(mask, batch=1, chunks=1, dims=dims))
        self.check(self.case(mask, batch=1, chunks=1, dlse=True))

    @pytest.mark.slow
    @pytest.mark.parametrize("batch, seq, keys", [(1, 2**21 + 4096, 4096), (3, 2**20, 2**20)])
    def test_past_two_billion_elements(self, batch: int, seq: int, keys: int) -> None:
        """q, out, dout and dq of more than 2^31 elements: rows all over are right, among them those
        around 2^29, 2^30 and 2^31 elements and the last.
        """
        if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
            pytest.skip("needs 100 GiB of GPU memory")
        near = 256
        mask = masks.full(seq, keys) if keys < seq else masks.window(seq, left=near)
        case = _long_case(mask, batch)
        out, lse = self.forward(case)
        dq, _, dv = KernelContract.backward(self, case, out, lse)
        for row in (0, batch - 1):
            for stop in (*range(near, seq, 2**18), *range(2**18, seq, 2**18), seq):
                rows = slice(stop - near, stop)
                first = 0 if keys < seq else max(0, rows.start - near)
                seen = slice(first, keys if keys < seq else rows.stop)
                at = slice(row, row + 1)
                part = (
                    masks.full(near, seen.stop - seen.start)
                    if keys < seq
                    else masks.window(near, seen.stop - seen.start, left=near, align="bottom-right")
                )
                small = replace(
                    case, mask=part,
                    q=case.q[at, rows], dout=case.dout[at, rows], k=case.k[at, seen],
                    v=case.v[at, seen], q_shard=shard(near), k_shard=shard(seen.stop - seen.start),
                )  # fmt: skip
                for name, got in (("out", out), ("dq", dq)):
                    self.judge(name, got[at, rows], small)
                self.judge("lse", lse[at, :, rows], small)
        assert bool(torch.isfinite(dv).all())

    def test_external_lse(self) -> None:
        """bf16 only: in fp16 the P of a merge over many keys is subnormal, whatever the library."""
        self.dtypes = (torch.bfloat16,)
        super().test_external_lse()


def _long_case(mask: Mask, batch: int) -> Case:
    """bf16 inputs drawn on the card: 8 heads that share one of K and V, d 128, one chunk."""

    def gaussian(seq: int, heads: int) -> Tensor:
        shape = batch, seq, heads, 128
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()

    torch.cuda.manual_seed(0)
    sizes = (mask.seq_q, 8), (mask.seq_k, 1), (mask.seq_k, 1), (mask.seq_q, 8)
    q, k, v, dout = (gaussian(*size) for size in sizes)
    return Case(mask, q, k, v, dout, None, shard(mask.seq_q), shard(mask.seq_k), None)


class TestCudaAten(OnCuda):
    kernel = "cuda_aten"

    def backward(
        self, case: Case, out: Tensor, lse: Tensor, grads: GradSums | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Under torch's switch, which this kernel's gradients need in order to repeat."""
        torch.use_deterministic_algorithms(True)
        try:
            return super().backward(case, out, lse, grads)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_cudnn_computes_gradients_without_the_switch(self) -> None:
        case = self.case(masks.causal(2304), batch=1, chunks=1)
        out, lse = self.forward(case)
        results = super().backward(case, out, lse)
        for name, got in zip(("dq", "dk", "dv"), results, strict=True):
            self.judge(name, got, case)

    def test_what_goes_to_cudnn(self) -> None:
        side = int(CUDNN_PAIRS**0.5)
        wide = torch.empty(1, 1, 1, 128)
        assert _for_cudnn(Band(0, side, 0, side), wide, wide)
        assert _for_cudnn(Band(0, side, 0, side, None, 0), wide, wide)
        assert not _for_cudnn(Band(0, side, 0, side + 1, None, 0), wide, wide)
        assert not _for_cudnn(Band(0, side, 0, side, -9, None), wide, wide)
        assert not _for_cudnn(Band(0, side - 1, 0, side), wide, wide)
        assert not _for_cudnn(Band(0, side, 0, side), wide, torch.empty(1, 1, 1, 192))


WIDTHS = range(8, 257, 8)


class TestFa4(OnCuda):
    kernel = "fa4"
    heads_and_dims = (
        *KernelContract.heads_and_dims,
        (4, 2, 72, 72),  # the library's own dQ is wrong here: it must be padded
        (2, 2, 192, 128),
        (4, 2, 104, 112),
    )

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("dk", WIDTHS)
    def test_every_head_dimension(self, dk: int) -> None:
        """All that the library is given: equal ones in steps of 8, with GQA and without, and
        (192, 128); whatever else is accepted is padded to one of these.
        """
        kernel, arch = self.make(), torch.cuda.get_device_capability()
        unlike = 128 if dk == 192 else dk % 256 + 8
        for heads_kv, dv in ((4, dk), (2, dk), (4, unlike), (2, unlike)):
            spec = KernelSpec(
                "cuda", arch, torch.bfloat16, "bf16", 4, heads_kv, dk, dv, frozenset(), True
            )
            assert kernel.supports(spec) is None
            for mask in (masks.causal(200, 330, "bottom-right"), masks.window(330, left=40)):
                self.check(self.case(mask, heads=(4, heads_kv), dims=(dk, dv), batch=1, chunks=1))

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        try:
            load_kernel(self.kernel)
        except MissingLibraryError as error:
            pytest.skip(str(error))


class TestFa4Nondeterministic(TestFa4):
    """The sum of dQ alone differs, and repeats to rounding only."""

    kernel = "fa4-nondeterministic"

    def test_repeats_to_the_bit(self) -> None:
        case = self.case(masks.window(self.seq, left=40))
        first, second = self.forward(case), self.forward(case)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
