"""The contract of every kernel, kept by the SM100 kernel: its own PTX, executed on the CPU.

Everything from tasks to the merged state is what runs on a GPU, but for the driver. Kernels are
compiled in this process, for either architecture; nothing is asked of a GPU. Launches take turns
through the executor's adversarial schedules.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from ptx import build

from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.sm100.kernel import Sm100Kernel
from sm100.forward_contract import ForwardContract

MISSING = [name for name in ("cutlass", "tvm_ffi") if find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the PTX executor"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


class ExecutedContract(ForwardContract):
    arch_name = "sm_100a"

    close_db = 48.0
    """Some of the exponentials are polynomials with a relative error of 8.6e-5 at most, which moves
    one of their P in 1,000 or so across a rounding of E4M3, by 2^-4 at most and half of that in the
    mean: -57 dB if all were. 9 dB are left to short sums."""

    lse = 2.0**-13
    """The error of one exponential, 8.6e-5, when a sum is little more than it."""

    def kernel_forward(self) -> BlockKernel:
        from sm100.executed_launch import ExecutedLauncher

        return Sm100Kernel(ExecutedLauncher(self.arch_name))


@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_in_short(mask: str) -> None:
    """What runs by default where the DSL is installed: all of the masks' machinery, one kernel."""
    contract = ExecutedContract()
    contract.test_masks(mask)


def test_in_short_merges() -> None:
    contract = ExecutedContract()
    contract.test_merges_into_what_the_state_holds()
    contract.test_any_scale(-0.2)
    contract.test_one_key_takes_all()


@pytest.mark.slow
class TestTiles(ExecutedContract):
    pass


@pytest.mark.slow
class TestOneBy32(ExecutedContract):
    wire = "mxfp8-1x32"


@pytest.mark.slow
class TestSm103(ExecutedContract):
    """Pairs of thread blocks. No polynomials: held as tightly as the reading of the tables in NumPy
    is.
    """

    arch_name = "sm_103a"
    close_db, lse = ForwardContract.close_db, ForwardContract.lse
