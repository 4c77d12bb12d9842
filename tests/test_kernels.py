"""The kernels that run on any machine, held to the contract; and what is particular to each."""

from __future__ import annotations

import torch
from kernel_contract import KernelContract


class TestReference(KernelContract):
    kernel = "reference"
    dtypes = (torch.float32, torch.float64, torch.bfloat16)


class TestCpu(KernelContract):
    kernel = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
