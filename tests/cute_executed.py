"""Run the fused kernels on CPU tensors: their own PTX, executed instruction by instruction.

:func:`on_cpu` puts the PTX executor (``ptx``) in the place of the driver, so that everything above
it, from ``ringfa4.fused`` down to the packing of arguments, is what runs on a GPU. Memory that no
tensor of the call owns must not be touched, and a misaligned access is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from ptx.lower import lower
from ptx.machine import Launch, Memory, run
from ptx.parser import parse
from torch import Tensor

import ringfa4.fused
import ringfa4.kernels.native
import ringfa4.mx.wire
import ringfa4.state
import ringfa4.sums
from ringfa4.kernels.cute import host
from ringfa4.kernels.cute.compile import compile_kernel
from ringfa4.kernels.cute.specs import Spec

ARCH = "sm_90a"


@lru_cache(maxsize=512)
def _program(spec: Spec) -> Any:
    return lower(parse(compile_kernel(spec, ARCH).ptx))


class _Executor:
    """Stands in for ``host._launch``; knows the tensors whose addresses were asked for."""

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}

    def address(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        self.storages[storage.data_ptr()] = flat
        return _data_ptr(x)

    def launch(
        self, spec: Spec, device: torch.device, grid: tuple[int, int, int], *args: int
    ) -> None:
        if 0 in grid:
            return
        memory = Memory()
        for n, flat in enumerate(self.storages.values()):
            memory.add(flat, f"tensor {n}")
        launch = Launch(
            grid, (spec.THREADS, 1, 1), parameters=struct.pack("@" + spec.SIGNATURE, *args)
        )
        run(_program(spec), launch, memory)


_data_ptr = Tensor.data_ptr


@contextmanager
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it CPU tensors go through the fused kernels."""
    executor = _Executor()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "data_ptr", lambda x: executor.address(x))
        patch.setattr(host, "_launch", executor.launch)
        patch.setattr(host, "_about", lambda device: (0, ARCH, True))
        users = ringfa4.state, ringfa4.sums, ringfa4.mx.wire, ringfa4.kernels.native
        for module in (ringfa4.fused, *users):
            patch.setattr(module, "fused", lambda device: host)
        yield
