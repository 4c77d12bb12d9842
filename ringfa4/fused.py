"""One door to the fused GPU kernels, for the state, the gradients and the wires.

``fused(device)`` is the module :mod:`ringfa4.kernels.cute.host`, or None where it cannot run: on
CPUs, before SM80, or without the CuTe DSL. Callers then compute the same with PyTorch's operators;
encoding gives the same bytes either way, merging the same values to rounding. :func:`why_not` has
the reason, for reports.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def fused(device: torch.device) -> ModuleType | None:
    """The fused kernels for ``device``, or None."""
    if device.type != "cuda":
        return None
    from ringfa4.kernels.cute import host

    return host if host.unavailable(device) is None else None


def assign(into: Tensor, x: Tensor) -> None:
    """Copy x (b, n, h, d), rounded to ``into``'s dtype where it is another.

    Rows lie in records with others between them: PyTorch's copy takes several times as long there.
    """
    kernels = fused(into.device)
    if kernels is not None and kernels.adds(into, None, [x]):
        kernels.add(into, None, [x])
    else:
        into.copy_(x)


def why_not(device: torch.device) -> str | None:
    """None, or why ``device`` has no fused kernels."""
    from ringfa4.kernels.cute import host

    return host.unavailable(device)
