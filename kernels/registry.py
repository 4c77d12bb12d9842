"""Block kernels by name: a fixed table, so that no name on a command line imports anything else."""

from __future__ import annotations

from importlib import import_module

from ringfa4.kernels.interface import BlockKernel

KERNELS = {
    "reference": "ringfa4.kernels.reference:ReferenceKernel",
    "cpu": "ringfa4.kernels.cpu:CpuKernel",
    "cuda_aten": "ringfa4.kernels.cuda_aten:CudaAtenKernel",
    "fa4": "ringfa4.kernels.fa4:Fa4Kernel",
    "fa4-nondeterministic": "ringfa4.kernels.fa4:NondeterministicFa4Kernel",
    "sm100": "ringfa4.kernels.sm100.kernel:Sm100Kernel",
    "reference-mxfp8": "ringfa4.kernels.reference_mxfp8:ReferenceMxfp8Kernel",
}
"""name -> module:class. Classes take no arguments."""


def load_kernel(name: str) -> BlockKernel:
    """The kernel called ``name``.

    ValueError for unknown names; MissingLibraryError when its library is not installed.
    """
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; there are {sorted(KERNELS)} and 'auto'")
    module, attribute = KERNELS[name].split(":")
    kernel = getattr(import_module(module), attribute)()
    assert isinstance(kernel, BlockKernel)
    return kernel
