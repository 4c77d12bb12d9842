"""The low-precision double keeps the contract, and the contract catches its planted fault."""

from __future__ import annotations

import pytest
import torch
from kernel_contract import Case, KernelContract
from torch import Tensor

from ringfa4.testing.compare import compare
from ringfa4.testing.doubles.kernel import LowPrecisionKernel, rounded, to_e4m3
from ringfa4.testing.tolerances import MXFP8_EXTERNAL_LSE_DB, MXFP8_SINK_DB, MXFP8_SQNR_DB


class LowPrecisionContract(KernelContract):
    """Judged by SQNR: what MXFP8 kernels are held to."""

    p_scale: float | None = None
    external_lse_db = MXFP8_EXTERNAL_LSE_DB

    def make(self) -> LowPrecisionKernel:
        return LowPrecisionKernel(self.p_scale)

    def least_db(self, case: Case) -> float:
        return MXFP8_SQNR_DB

    def rounding(self, case: Case) -> float:
        return 2.0**-4  # E4M3 has three bits after the leading one

    def judge(self, name: str, got: Tensor, case: Case) -> None:
        result = compare(got, getattr(case.truth, name))
        assert result.misplaced == 0, f"{name}: {result}"
        assert result.sqnr_db >= self.least_db(case), f"{name}: {result}"

    def judge_one_key(self, out: Tensor, case: Case) -> None:
        result = compare(out, case.truth.out)
        assert result.sqnr_db >= MXFP8_SINK_DB, str(result)


class TestLowPrecision(LowPrecisionContract):
    pass


@pytest.fixture
def faulty() -> LowPrecisionContract:
    contract = LowPrecisionContract()
    contract.p_scale = 256.0
    return contract


def test_a_constant_scale_passes_where_p_is_large(faulty: LowPrecisionContract) -> None:
    """Why the two checks below exist: on plain attention the fault cannot be seen."""
    faulty.test_masks("causal")


def test_inflated_lse_catches_a_constant_scale(faulty: LowPrecisionContract) -> None:
    with pytest.raises(AssertionError):
        faulty.test_external_lse()


def test_one_key_that_takes_all_catches_a_constant_scale(faulty: LowPrecisionContract) -> None:
    with pytest.raises(AssertionError):
        faulty.test_one_key_takes_all()


def test_e4m3() -> None:
    x = torch.tensor([448.0, 1e9, -1e9, 17.0, 18.0, 19.0, 2.0**-9, 2.0**-10, torch.nan])
    want = torch.tensor([448.0, 448.0, -448.0, 16.0, 18.0, 20.0, 2.0**-9, 0.0, torch.nan])
    assert torch.equal(torch.nan_to_num(to_e4m3(x), -1), torch.nan_to_num(want.double(), -1))


def test_rounding_moves_with_powers_of_two() -> None:
    """Scales are dynamic: what is rounded at 1 is rounded alike at 2^-40, each 32 on its own."""
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(rounded(x * 2.0**-40, -1), rounded(x, -1) * 2.0**-40)
    assert torch.equal(rounded(x, 0), rounded(x.T, -1).T)
    loud = x.clone()
    loud[:, :32] *= 1e6
    assert torch.equal(rounded(loud, -1)[:, 32:], rounded(x, -1)[:, 32:])
    assert compare(rounded(x, -1), x).sqnr_db > 30
