"""Load a cubin and launch its kernel, through the CUDA driver that PyTorch already uses.

Libraries of the driver (``cuLibraryLoadData``) belong to no context, so one load serves every
device of an architecture. A launch is a handful of microseconds of ctypes and goes to the stream it
is given.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

import torch

from ringfa4.errors import RingError

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
"""CU_LAUNCH_PARAM_*: arguments as one packed buffer, which is several times as fast as one by one.
"""


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RingError(f"{what} failed: CUDA driver error {code} ({reason})")


class Kernel:
    """A loaded kernel. ``signature`` has a letter for each argument: "q" 64 bits, "i" 32 bits."""

    def __init__(self, cubin: bytes, entry: str, signature: str, threads: int) -> None:
        cuda = _cuda()
        self._arguments = struct.Struct("@" + signature)  # aligned as the kernel's parameters are
        self._threads = threads
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
        self, grid: tuple[int, int, int], device: int, stream: int, arguments: Sequence[int]
    ) -> None:
        """On ``stream`` (a handle) of the current device, ``device``."""
        _bind_context(device)
        packed = self._arguments.pack(*arguments)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        size = ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), _END
        )
        code = _cuda().cuLaunchKernel(
            self._kernel, *grid, self._threads, 1, 1, 0, ctypes.c_void_p(stream), None, extra
        )
        _check(code, "launching a fused kernel")


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
