"""Load a cubin and launch its kernel, through the CUDA driver that PyTorch already uses.

Libraries of the driver (``cuLibraryLoadData``) belong to no context, so one load serves every
device of an architecture. A launch is a handful of microseconds of ctypes and goes to the stream it
is given.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import cache

import torch

from ringfa4.errors import RingError

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
"""CU_LAUNCH_PARAM_*: arguments as one packed buffer, which is several times as fast as one by one.

Its layout is the kernel's own. Where a parameter is aligned to more than the block of parameters,
as tensor maps are, the compiler leaves a gap before the first (48 bytes on SM90), so such kernels
are given their arguments one by one.
"""

_MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: more than 48 KB must be asked for."""

_CLUSTER = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""

_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
"""Span in bytes -> CUtensorMapSwizzle."""


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RingError(f"{what} failed: CUDA driver error {code} ({reason})")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Kernel:
    """A loaded kernel. ``signature`` is a format of :mod:`struct`: "q" 64 bits, "i" 32 bits, "f"
    fp32, "128s" a tensor map. ``shared``: bytes of dynamic shared memory; ``cluster``: thread
    blocks of a cluster, along the grid's x.
    """

    def __init__(
        self, cubin: bytes, entry: str, signature: str, threads: int, shared: int = 0,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        cuda = _cuda()
        self._arguments = struct.Struct("@" + signature)  # aligned as the kernel's parameters are
        self._offsets = _offsets(signature) if "s" in signature else ()
        self._threads, self._shared, self._cluster = threads, shared, cluster
        self._prepared: set[int] = set()
        self._cubin = cubin  # the driver may read it later
        library = ctypes.c_void_p()
        _check(
            cuda.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0),
            f"loading {entry}",
        )
        self._kernel = ctypes.c_void_p()
        _check(
            cuda.cuLibraryGetKernel(ctypes.byref(self._kernel), library, entry.encode()),
            f"finding {entry}",
        )

    def launch(
        self,
        grid: tuple[int, int, int],
        device: int,
        stream: int,
        arguments: Sequence[int | float | bytes],
    ) -> None:
        """On ``stream`` (a handle) of the current device, ``device``; ``grid[0]`` is a multiple of
        the cluster.
        """
        _bind_context(device)
        if self._shared and device not in self._prepared:
            code = _cuda().cuKernelSetAttribute(_MOST_SHARED, self._shared, self._kernel, device)
            _check(code, f"asking for {self._shared} bytes of shared memory")
            self._prepared.add(device)
        packed = self._arguments.pack(*arguments)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        start, size = ctypes.addressof(buffer), ctypes.c_size_t(len(packed))
        given = extra = None
        if self._offsets:
            given = (ctypes.c_void_p * len(self._offsets))(*(start + at for at in self._offsets))
        else:
            extra = (ctypes.c_void_p * 5)(
                _BUFFER_POINTER, start, _BUFFER_SIZE, ctypes.addressof(size), _END
            )
        block = self._threads, 1, 1
        if self._cluster == 1:
            code = _cuda().cuLaunchKernel(
                self._kernel, *grid, *block, self._shared, ctypes.c_void_p(stream), given, extra
            )
        else:
            cluster = _Attribute(_CLUSTER, 0, (self._cluster, 1, 1))
            launch = _Launch(grid, block, self._shared, stream, ctypes.pointer(cluster), 1)
            code = _cuda().cuLaunchKernelEx(ctypes.byref(launch), self._kernel, given, extra)
        _check(code, "launching a fused kernel")


def _offsets(signature: str) -> tuple[int, ...]:
    """Where each argument begins in a struct of this format."""
    pieces = re.findall(r"\d*[a-z]", signature)
    stops = [struct.calcsize("@" + "".join(pieces[: n + 1])) for n in range(len(pieces))]
    return tuple(
        stop - struct.calcsize("@" + piece) for stop, piece in zip(stops, pieces, strict=True)
    )


def tensor_map(
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """A tensor map over bytes, as a kernel's parameter.

    ``extents`` and ``box`` innermost first, ``strides`` (bytes) of all but the innermost;
    ``swizzle`` is a span in bytes, or 0. What lies outside of the extents reads as 0.
    """
    rank = len(extents)
    assert len(strides) == rank - 1 and len(box) == rank, (extents, strides, box)
    room = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(room) % 64  # the driver wants 64-byte alignment
    many, few = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    code = _cuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start), 0, ctypes.c_uint32(rank),
        ctypes.c_void_p(address), many(*extents), many(*strides), few(*box), few(*[1] * rank),
        0, _SWIZZLE[swizzle], 2, 0,  # bytes (above), no interleave; promotion to 128 bytes in L2
    )  # fmt: skip
    _check(code, f"describing {tuple(extents)} bytes at {address:#x}")
    return room.raw[start : start + 128]


def _bind_context(device: int) -> None:
    """Make the device's primary context (PyTorch's) current in this thread, if none is."""
    cuda = _cuda()
    current = ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(current)), "asking for the context")
    if current.value is None:
        _check(
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(current), device), "retaining the context"
        )
        _check(cuda.cuCtxSetCurrent(current), "setting the context")


def architecture(device: torch.device) -> str:
    """What kernels for ``device`` are compiled for: "sm_90a" on Hopper, "sm_100a" on B200, "sm_80"
    on A100.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
