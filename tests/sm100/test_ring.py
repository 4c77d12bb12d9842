"""The SM100 kernel's host side in a ring: many steps into one state, records fetched in part.

The device code is read in NumPy (emulated_launch.py), the backward pass is the oracle's, and the
transport is the adversarial double.
"""

from __future__ import annotations

import pytest
import torch
from rings import Case, dense, run

from ringfa4 import mask as masks
from ringfa4.kernels.reference_mxfp8 import ReferenceMxfp8Kernel
from ringfa4.kernels.registry import KERNELS
from ringfa4.kernels.sm100.kernel import Sm100Kernel
from ringfa4.testing.compare import compare
from ringfa4.testing.tolerances import MXFP8_SQNR_DB
from sm100.emulated_launch import EmulatedLauncher
from sm100.forward_contract import ForwardContract, Paired


class Emulated(Paired):
    def __init__(self) -> None:
        super().__init__(Sm100Kernel(EmulatedLauncher()))


class Oracle(Paired):
    def __init__(self) -> None:
        super().__init__(ReferenceMxfp8Kernel(integer=True))


S = 900
CASES = {
    "causal": (masks.causal(S), "zigzag", 4),
    "a window's halo": (masks.window(1200, left=150), "contiguous", 2),  # records 3 and 4 of 5
    "documents": (masks.documents([0, 130, 300, 310, 700, S]), "balanced", 3),
    "striped": (masks.causal(S), "striped", 3),
    "unlike batch rows": (masks.stack([masks.causal(S), masks.window(S, left=99)]), "zigzag", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to the oracle in the same ring as in one launch, and MXFP8's distance from fp64."""
    mask, sharding, world = CASES[name]
    for kernel in (Emulated, Oracle):
        monkeypatch.setitem(KERNELS, kernel.__name__, f"{__name__}:{kernel.__name__}")

    def ring(kernel: str) -> tuple[Case, dict[str, torch.Tensor]]:
        options = {"sharding": sharding, "wire": "mxfp8", "kernel": kernel}
        case = Case(
            mask, world=world, heads=(2, 1), dims=(64, 64), batch=mask.batch,
            dtype=torch.bfloat16, sink=True, options=options,
        )  # fmt: skip
        return case, run(case)

    case, got = ring("Emulated")
    _, due = ring("Oracle")
    exact = dense(case)
    half = torch.finfo(torch.bfloat16).eps / 2  # out is rounded to it in both
    assert compare(got["out"], due["out"]).max_abs <= 4 * half * float(exact["out"].abs().max())
    torch.testing.assert_close(got["lse"], due["lse"], rtol=0, atol=ForwardContract.lse)
    for tensor, want in exact.items():
        result = compare(got[tensor], want)
        assert result.misplaced == 0 and result.sqnr_db > MXFP8_SQNR_DB, f"{tensor}: {result}"
