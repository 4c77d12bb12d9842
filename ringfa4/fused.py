"""One door to the fused GPU kernels, for the state and the wires.

``fused(device)`` is the module :mod:`ringfa4.kernels.cute.host`, or None where it cannot run: on
CPUs, before SM80, or without the CuTe DSL. Callers then compute the same with PyTorch's operators;
encoding gives the same bytes either way, merging the same values to rounding. :func:`why_not` has
the reason, for reports.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch


@lru_cache(maxsize=64)
def fused(device: torch.device) -> ModuleType | None:
    """The fused kernels for ``device``, or None."""
    if device.type != "cuda":
        return None
    from ringfa4.kernels.cute import host

    return host if host.unavailable(device) is None else None


def why_not(device: torch.device) -> str | None:
    """None, or why ``device`` has no fused kernels."""
    from ringfa4.kernels.cute import host

    return host.unavailable(device)
