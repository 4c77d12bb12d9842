"""The kernels that run on any machine, held to the contract; and what is particular to each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_contract import MASKS, KernelContract, shard

from ringfa4 import mask as masks
from ringfa4.kernels import cpu as cpu_module
from ringfa4.kernels import reference as reference_module
from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.pieces import ROWS, is_causal, is_full, is_masked, pieces
from ringfa4.kernels.registry import KERNELS, load_kernel
from ringfa4.mask import Band
from ringfa4.testing.compare import compare


class TestReference(KernelContract):
    kernel = "reference"
    dtypes = (torch.float32, torch.float64, torch.bfloat16)

    def test_blocks_of_rows_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = self.case(masks.window(self.seq, left=30), dlse=True)
        whole = self.backward(case, *self.forward(case))
        monkeypatch.setattr(reference_module, "BLOCK", 1)  # a row at a time
        for got, want in zip(self.backward(case, *self.forward(case)), whole, strict=True):
            assert compare(got, want).sqnr_db > 130  # fp32 sums of the same fp64 numbers


class TestCpu(KernelContract):
    kernel = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def test_k_and_v_are_packed_once_a_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not expanded for GQA, nor cast: each task's keys are copied once, heads apart."""
        case = self.case(masks.causal(self.seq), dtype=torch.bfloat16, heads=(8, 2), batch=1)
        operands = []

        def spy(at: int, native):  # type: ignore[no-untyped-def]
            def call(*args, **kwargs):  # type: ignore[no-untyped-def]
                operands.extend(args[at : at + 2])
                return native(*args, **kwargs)

            return call

        monkeypatch.setattr(cpu_module, "_forward", spy(1, cpu_module._forward))
        monkeypatch.setattr(cpu_module, "_backward", spy(2, cpu_module._backward))
        encoded = case.encoded()
        kernel = self.make()
        kernel.forward(
            kernel.prepare(case.q, case.q_shard), encoded, case.tasks, case.scale, case.state()
        )
        queries = kernel.prepare_backward(
            case.q, case.q_shard, case.plain.out, case.dout, case.plain.lse, None
        )
        grads = case.grads(kernel.gradient_dtype(case.q.dtype))
        kernel.backward(queries, encoded, case.tasks, case.scale, grads.sums)
        assert all(x.shape[1] == 2 and x.dtype == torch.bfloat16 for x in operands)
        assert all(x.stride(2) == x.shape[3] for x in operands)
        storages = {x.untyped_storage().data_ptr() for x in operands}
        assert encoded.buffer.untyped_storage().data_ptr() not in storages
        assert len(storages) <= 2 * 2 * len(case.tasks)  # K and V, forward and backward

    def test_error_does_not_grow_with_hops(self) -> None:
        """cases.md 6: dQ summed over 16 chunks is no worse than plain attention on all of them."""
        case = self.case(
            masks.full(256, 2048), dtype=torch.bfloat16, heads=(8, 8), dims=(64, 64), batch=1
        )
        case = replace(case, k_shard=shard(*[128] * 16))
        self.check(case)

    def test_a_large_group_is_summed_in_fp32(self) -> None:
        """dK and dV of 64 query heads on one K/V head are no worse than those of one."""

        def error(heads: int) -> list[float]:
            case = self.case(
                masks.full(32, 64), dtype=torch.bfloat16, heads=(heads, 1), dims=(32, 32)
            )
            _, dk, dv = self.backward(case, case.truth.out, case.truth.lse)
            pairs = ((dk, case.truth.dk), (dv, case.truth.dv))
            return [compare(got, want).sqnr_db for got, want in pairs]

        for one, many in zip(error(1), error(64), strict=True):
            assert many > one - 1

    def test_gradient_into_lse_is_exact(self) -> None:
        """cases.md 10: 24 bits of dlse arrive through 16-bit operands, at every magnitude."""
        exponent = torch.linspace(-30, 30, 1000)
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2**exponent
        for dtype in set(cpu_module.COMPUTE.values()):
            parts = cpu_module._summands(x, dtype)
            assert parts.dtype == dtype
            assert torch.equal(parts.double().sum(-1), x.double())

    def test_fp16_beyond_its_range(self) -> None:
        """P of a merge over very many keys lies below fp16's smallest number; cases.md 12."""
        case = self.case(masks.causal(self.seq), dtype=torch.float16)
        out, lse = case.truth.out, case.truth.lse
        near = self.backward(case, out, lse.float())
        far = self.backward(case, out, lse.float() + 20)
        for a, b in zip(far, near, strict=True):
            assert compare(a.double() * torch.e**20, b).sqnr_db > 60

    def test_refuses_with_reasons(self) -> None:
        spec = KernelSpec("cpu", None, torch.float32, "fp32", 4, 2, 64, 64, frozenset(), True)
        kernel = load_kernel("cpu")
        assert kernel.supports(spec) is None
        assert "cuda" in (kernel.supports(replace(spec, device="cuda")) or "")
        assert "float64" in (kernel.supports(replace(spec, dtype=torch.float64)) or "")


# ---- pieces -------------------------------------------------------------------------------------

bound = st.none() | st.integers(-14, 14)
stretch = st.lists(st.integers(0, 14), min_size=2, max_size=2, unique=True).map(sorted)


@settings(max_examples=500)
@given(stretch, stretch, bound, bound, st.sampled_from([2, 3, 256]))
def test_pieces_are_the_band(
    q: list[int], k: list[int], lo: int | None, hi: int | None, rows: int
) -> None:
    """Every pair once, in one of three kinds, and no row without a key."""
    band = Band(*q, *k, lo, hi)
    box = [(i, j) for i in range(15) for j in range(15)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringfa4.kernels.pieces.ROWS", rows)
        found = list(pieces(band))
    pairs = []
    for piece in found:
        assert piece.trimmed() == piece
        assert is_full(piece) + is_causal(piece) + is_masked(piece) == 1
        assert not is_masked(piece) or piece.q1 - piece.q0 <= rows
        own = [pair for pair in box if piece.contains(*pair)]
        assert {i for i, _ in own} == set(range(piece.q0, piece.q1))
        pairs += own
    assert sorted(pairs) == [pair for pair in box if band.contains(*pair)]


@pytest.mark.parametrize("offset", [-500, -1, 0, 1, 77, 999, 5000])
def test_a_causal_chunk_is_one_or_two_calls(offset: int) -> None:
    found = list(pieces(Band(0, 1000, 0, 1000, None, offset)))
    assert len(found) <= 2 and not any(is_masked(piece) for piece in found)


def test_a_wide_window_is_mostly_rectangles() -> None:
    mask = masks.window(1 << 16, left=8191)
    found = [piece for band in mask.rows[0] for piece in pieces(band)]
    masked = sum((p.q1 - p.q0) * (p.k1 - p.k0) for p in found if is_masked(p))
    assert masked <= mask.area * ROWS / 4096
    assert sum(p.area for p in found) == mask.area


# ---- the table ----------------------------------------------------------------------------------


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'os:system'"):
        load_kernel("os:system")
    assert load_kernel("reference").name == "reference"
    assert {"reference", "cpu"} <= KERNELS.keys()


def test_the_contract_has_every_mask_feature() -> None:
    features = [MASKS[name](150).features for name in MASKS]
    assert frozenset().union(*features) == {"lo", "hi", "many"}
