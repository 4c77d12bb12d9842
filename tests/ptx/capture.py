"""From a kernel compiled by the CuTe DSL to launches that `machine.run` executes, without a GPU.

The DSL exports its host code (argument checks, TMA descriptors, launch configuration) as an
object file; it is linked against capture_stub.c in place of the CUDA runtime and called with CPU
tensors that claim to be CUDA's. What it would launch, parameter bytes included, comes back. The
pointers in it are the tensors' host addresses.

Import this module only where nvidia-cutlass-dsl and apache-tvm-ffi are installed, with
CUTE_DSL_ARCH set.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from . import build
from .lower import Program, lower
from .machine import Launch, Memory, Result, Schedule, run
from .parser import parse

_KDL_CUDA = 2


class _Captured(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char * 4096),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("parameters", ctypes.c_uint8 * 8192),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _ClaimsCuda:
    """A CPU tensor whose DLPack capsule says: CUDA device 0."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_KDL_CUDA, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        address = _capsule_pointer(capsule, b"dltensor")
        # DLTensor: data pointer, then the device type and number.
        ctypes.c_int32.from_address(address + 8).value = _KDL_CUDA
        ctypes.c_int32.from_address(address + 12).value = 0
        return capsule


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(name)
    return Path(next(iter(spec.submodule_search_locations)))


def _dsl_root() -> Path:
    for parent in _package("cutlass").parents:
        if (parent / "cu13" / "lib").is_dir():
            return parent
    raise FileNotFoundError("the cu13 libraries of nvidia-cutlass-dsl")


def _convert(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return tvm_ffi.from_dlpack(_ClaimsCuda(value))
    if isinstance(value, (list, tuple)):
        items = [_convert(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Captured:
    """One compiled host function; calling it executes its kernels on the arguments' storage."""

    def __init__(self, compiled: Any, multiprocessors: int = 148) -> None:
        self.multiprocessors = multiprocessors
        self.results: list[Result] = []
        self.use(compiled.__ptx__)
        self._link(compiled)

    def use(self, ptx: str) -> None:
        """Execute this text instead of what was compiled (a mutant of it)."""
        self.ptx = ptx
        self.module = parse(ptx)
        self.programs: dict[str, Program] = {}

    def _link(self, compiled: Any) -> None:
        """Load the host code; a loaded library stays mapped, so its file may go at once."""
        tvm = _package("tvm_ffi") / "lib"
        archive = _dsl_root() / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
        with tempfile.TemporaryDirectory(prefix="capture-", dir=build.cache_directory()) as name:
            host, library = Path(name) / "kernel.o", Path(name) / "libkernel.so"
            compiled.export_to_c(str(host), function_name="kernel")
            # -Bsymbolic: the process may have loaded a real CUDA runtime, which must not answer.
            command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic", "-o", str(library)]
            command += [str(host), str(Path(__file__).parent / "capture_stub.c"), str(archive)]
            command += [f"-L{tvm}", "-ltvm_ffi", f"-Wl,-rpath,{tvm}", "-lpthread", "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
            self.function = tvm_ffi.load_module(str(library))["kernel"]
            self.stub = ctypes.CDLL(str(library))
        self.stub.capture_launch.restype = ctypes.POINTER(_Captured)

    def program(self, name: str) -> Program:
        if name not in self.programs:
            self.programs[name] = lower(self.module, name)
        return self.programs[name]

    def launches(self, *args: Any) -> tuple[list[tuple[str, Launch]], list[torch.Tensor]]:
        """What a call would launch, in order, and the tensors among its arguments."""
        self.stub.capture_reset(self.multiprocessors)
        for kernel in self.module.kernels.values():
            n = len(kernel.parameters)
            sizes = (ctypes.c_int32 * n)(*(p.size for p in kernel.parameters))
            offsets = (ctypes.c_int32 * n)(*(p.offset for p in kernel.parameters))
            if self.stub.capture_register(kernel.name.encode(), sizes, offsets, n):
                raise ValueError("too many kernels or parameters to capture")
        tensors: list[torch.Tensor] = []
        self.function(*(_convert(a, tensors) for a in args))
        found = []
        for k in range(self.stub.capture_count()):
            c = self.stub.capture_launch(k).contents
            launch = Launch(
                tuple(c.grid),
                tuple(c.block),
                tuple(c.cluster),
                c.shared,
                bytes(c.parameters[: c.bytes]),
            )
            found.append((c.kernel.decode(), launch))
        return found, tensors

    def __call__(
        self,
        *args: Any,
        schedule: Schedule | None = None,
        memory: Memory | None = None,
        strict: bool = False,
        truncate: bool = False,
    ) -> None:
        """Capture and execute; the keywords are those of `machine.run`."""
        launches, tensors = self.launches(*args)
        if memory is None:
            memory = memory_of(tensors)
        for name, launch in launches:
            program = self.program(name)
            result = run(program, launch, memory, schedule, strict=strict, truncate=truncate)
            self.results.append(result)


def memory_of(tensors: Iterable[torch.Tensor]) -> Memory:
    """The storages behind some tensors, each once."""
    memory, seen = Memory(), set()
    for k, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory.add(whole, f"tensor {k} {tuple(tensor.shape)}")
    return memory
