"""The SM100 kernel on an SM100 or SM103: the contract that its PTX keeps in the executor.

Nobody here has such a GPU: what runs elsewhere is tests/sm100. On one, run this first.
"""

from __future__ import annotations

import pytest
import torch
from sm100.forward_contract import ForwardContract
from sm100.test_contract import ExecutedContract

from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.sm100.kernel import ARCHITECTURES, Sm100Kernel

HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE not in ARCHITECTURES, reason=f"needs SM100 or SM103, not {HERE}"),
]


class TestOnTheCard(ForwardContract):
    device = "cuda"
    close_db, lse = ExecutedContract.close_db, ExecutedContract.lse

    def kernel_forward(self) -> BlockKernel:
        return Sm100Kernel()


class TestOnTheCardOneBy32(TestOnTheCard):
    wire = "mxfp8-1x32"
