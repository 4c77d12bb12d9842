"""From arguments to a running kernel: compiled once, loaded from disk, launched by the driver.

    device function(map of Q, map of K, map of V, scalars of ForwardSpec.DEVICE)
    grid (ctas, 1, 1), cluster (spec.ctas, 1, 1), block (THREADS, 1, 1), SHARED bytes of dynamic
    shared memory

A tensor map describes the payloads of all records: the contiguous axis, the other axis, batch row
and head together, record; the last has the bytes of a record as its stride. All elements are bytes.
What a launch does is behind :class:`Launcher`, so that tests put an executor of the kernel's PTX,
or a reading of the same tables in NumPy, in the place of a GPU.

Where the environment names a library built ahead of time (:mod:`ringfa4.kernels.sm100.build`),
nothing is compiled, and its own host code makes the maps.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from ringfa4.kernels.cute import driver, host
from ringfa4.kernels.sm100.specs import ROWS, ForwardSpec


class Arguments(NamedTuple):
    """What a launch is given, in the order of ``ForwardSpec.SIGNATURE``: addresses and strides in
    bytes, counts, and the softmax scale. :class:`ForwardSpec` says what each is.
    """

    q_records: int
    q_record_bytes: int
    q_payload: int
    q_scales: int
    n_q_records: int
    kv_records: int
    kv_record_bytes: int
    k_payload: int
    v_payload: int
    k_scales: int
    v_scales: int
    n_kv_records: int
    batch: int
    heads_q: int
    heads_kv: int
    acc: int
    max: int
    sum: int
    acc_b: int
    acc_s: int
    row_b: int
    row_h: int
    items: int
    segments: int
    modes: int
    modes_row: int
    n_items: int
    scale: float
    ctas: int


class Launcher(Protocol):
    """Runs the kernel for some tensors' device, in order after what was launched before."""

    def missing(self) -> str | None:
        """None, or what must be installed first."""

    def multiprocessors(self, device: torch.device) -> int:
        """How many thread blocks run at a time: one on each multiprocessor."""

    def arch(self, device: torch.device) -> str:
        """What is compiled for this device: "sm_100a" or "sm_103a"."""

    def __call__(self, spec: ForwardSpec, device: torch.device, arguments: Arguments) -> None:
        """Launch; asynchronous, on the current stream."""


class TensorMap(NamedTuple):
    """The arguments of :func:`ringfa4.kernels.cute.driver.tensor_map`."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def tensor_maps(spec: ForwardSpec, a: Arguments) -> tuple[TensorMap, TensorMap, TensorMap]:
    """The maps of Q, K and V; a box of K or V is what one thread block takes of a record."""
    span, rows_q, rows_kv = spec.span, a.batch * a.heads_q, a.batch * a.heads_kv
    return (
        TensorMap(
            a.q_records + a.q_payload,
            (spec.dk, ROWS, rows_q, a.n_q_records),
            (spec.dk, ROWS * spec.dk, a.q_record_bytes),
            (span, ROWS, 1, 1),
            span,
        ),
        TensorMap(
            a.kv_records + a.k_payload,
            (spec.dk, ROWS, rows_kv, a.n_kv_records),
            (spec.dk, ROWS * spec.dk, a.kv_record_bytes),
            (span, spec.k_box, 1, 1),
            span,
        ),
        TensorMap(
            a.kv_records + a.v_payload,
            (ROWS, spec.dv, rows_kv, a.n_kv_records),
            (ROWS, ROWS * spec.dv, a.kv_record_bytes),
            (ROWS, spec.v_rows, 1, 1),
            ROWS,
        ),
    )


LIBRARY = "RINGFA4_SM100_LIBRARY"
"""The environment variable with the path of a library that was built ahead of time."""


def function_name(arch: str, dk: int, dv: int) -> str:
    """Of a kernel in such a library."""
    return f"forward_{arch}_{dk}x{dv}"


def cuda_launcher() -> Launcher:
    """That of the library which the environment names, or else of the DSL."""
    path = os.environ.get(LIBRARY)
    return LibraryLauncher(path) if path else CudaLauncher()


class CudaLauncher:
    """The GPU: a binary from the on-disk cache or compiled now, launched on the current stream."""

    def missing(self) -> str | None:
        if find_spec("cutlass") is None:
            return "the CuTe DSL is not installed (pip install 'ringfa4[cuda]')"
        return None

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def arch(self, device: torch.device) -> str:
        return driver.architecture(device)

    def __call__(self, spec: ForwardSpec, device: torch.device, arguments: Arguments) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        kernel = host.kernel(spec, self.arch(device))
        with torch.cuda.device(index):
            maps = [driver.tensor_map(*m) for m in tensor_maps(spec, arguments)]
            scalars = [getattr(arguments, name) for name in spec.DEVICE]
            stream = torch.cuda.current_stream(device).cuda_stream
            kernel.launch((arguments.ctas, 1, 1), index, stream, [*maps, *scalars])


class LibraryLauncher(CudaLauncher):
    """The GPU: functions of a library at ``path``, which needs apache-tvm-ffi only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._functions: Any = None

    def missing(self) -> str | None:
        if find_spec("tvm_ffi") is None:
            return f"{LIBRARY} needs apache-tvm-ffi, which is not installed"
        if not os.path.isfile(self._path):
            return f"{LIBRARY}={self._path} is not there"
        return None

    def __call__(self, spec: ForwardSpec, device: torch.device, arguments: Arguments) -> None:
        if self._functions is None:
            self._functions = import_module("tvm_ffi").load_module(self._path)
        index = torch.cuda.current_device() if device.index is None else device.index
        function = self._functions[function_name(self.arch(device), spec.dk, spec.dv)]
        with torch.cuda.device(index):
            function(*arguments, torch.cuda.current_stream(device).cuda_stream)
