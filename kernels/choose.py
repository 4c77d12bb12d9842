"""Which kernel computes a problem: by table and predicate, and said aloud.

``auto`` walks the table of the device from best to most general and takes the first kernel that
supports the problem; every better one that refused is named with its reason. A kernel asked for by
name is taken or refused with its reason, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.kernels.registry import KERNELS, load_kernel

PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("sm100", "fa4", "cuda_aten", "reference"),
}
"""Kernels that ``auto`` tries on each device type, best first."""


@dataclass(frozen=True)
class Choice:
    """The kernel taken and, best first, the better ones that refused, with their reasons."""

    kernel: BlockKernel
    asked: str
    refusals: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.asked != "auto":
            return f"kernel {self.kernel.name} (asked for)"
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refusals)
        return f"kernel {self.kernel.name} (auto; {why or 'the best for this device'})"


@lru_cache(maxsize=256)
def choose_kernel(asked: str, spec: KernelSpec) -> Choice:
    """The kernel for ``spec``; ``asked`` is a registered name or "auto".

    Raises ValueError for an unknown name, or when nothing (or not what was asked for) supports the
    problem. MissingLibraryError when a kernel asked for by name needs a library that is not
    installed.
    """
    if asked != "auto":
        kernel = load_kernel(asked)
        reason = kernel.supports(spec)
        if reason is not None:
            raise ValueError(f"kernel {asked!r} refuses: {reason}")
        return Choice(kernel, asked)
    refusals: list[tuple[str, str]] = []
    for name in PREFERENCE[spec.device]:
        assert name in KERNELS
        try:
            kernel = load_kernel(name)
        except MissingLibraryError as error:
            refusals.append((name, str(error)))
            continue
        reason = kernel.supports(spec)
        if reason is None:
            return Choice(kernel, asked, tuple(refusals))
        refusals.append((name, reason))
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise ValueError(f"no kernel supports this problem: {why}")
