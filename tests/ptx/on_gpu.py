"""Compare saved executions with the same kernels on a GPU: how many bits agree.

    python -m ptx.known sm_90a attention --dim 128 --causal --backward --truncate --save fa4.pt
    python on_gpu.py fa4.pt --causal         # on an H100 or H200; the line above runs anywhere

The same for ``ptx.known sm_90a gemm``, whose saved options say how to call it. Needs torch with
CUDA, flash-attn-4, quack-kernels and the CuTe DSL; nothing of this repository. For each output it
prints the share of identical elements, the largest difference in units of the last place, and the
signal to difference ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import types
from typing import Any

import torch


def _let_quack_import() -> None:
    if importlib.util.find_spec("triton") is None:  # quack/__init__ wants it, its submodules do not
        spec = importlib.util.find_spec("quack")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("quack")
        package = types.ModuleType("quack")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["quack"] = package


def attention(saved: dict[str, torch.Tensor], causal: bool) -> dict[str, torch.Tensor]:
    """flash-attn-4's outputs for the saved inputs."""
    from flash_attn.cute import interface

    q, k, v, dout = (saved[name].cuda() for name in ("q", "k", "v", "dout"))
    out, lse = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    got = {"out": out, "lse": lse}
    if "dq" in saved:
        # From the executor's own forward results, so that only the backward is compared.
        grads = interface._flash_attn_bwd(
            q, k, v, saved["out"].cuda(), dout, saved["lse"].cuda(), causal=causal
        )
        got |= dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))
    return got


def gemm(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """quack-kernels' D = A @ B^T for the saved operands, tile and cluster."""
    from quack.gemm import gemm as quack_gemm

    a, b = saved["a"].cuda(), saved["b"].cuda()
    d = torch.empty_like(saved["out"], device="cuda")
    quack_gemm(a, b, d, None, None, *saved["tile"], saved["cluster"], 1)
    return {"out": d}


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that neighbours differ by 1."""
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    bits = x.contiguous().view(integer).to(torch.int64)
    magnitude = bits & (2 ** (8 * x.element_size() - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("saved")
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    saved = torch.load(options.saved, weights_only=True)
    _let_quack_import()
    got = gemm(saved) if "a" in saved else attention(saved, options.causal)
    torch.cuda.synchronize()
    print(torch.cuda.get_device_name(), options.saved)
    for name, x in got.items():
        here, there = x.cpu(), saved[name]
        gap = (ordered(here) - ordered(there)).abs()
        equal = (gap == 0).double().mean().item()
        error = (here.double() - there.double()).square().sum().item()
        ratio = 10 * math.log10(there.double().square().sum().item() / error) if error else math.inf
        print(f"{name:4} identical {equal:8.4%}  within {gap.max().item()} ulp  {ratio:.1f} dB")


if __name__ == "__main__":
    main()
