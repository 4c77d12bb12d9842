"""CUDA streams as lanes: copies, events, and waits for a word of memory that use no multiprocessor.

    copy    cudaMemcpyAsync: between two GPUs the copy engine moves it, beside whatever computes
    wait    cuStreamWaitValue64 (GEQ), write: cuStreamWriteValue64 (after a system-wide fence)

Copies and memory operations come from CUDA's libraries themselves, through ctypes: torch binds the
write of 32 bits only, and a kernel that spins would hold a multiprocessor and wait for one behind a
full grid of attention; a copy by torch makes its stream the current one and back first, which costs
the host more than the copy.

A stream that waits for a word keeps one of the process's hardware queues, and work enqueued when
all are kept does not start, whatever its stream and priority (H200: 8 of them, 2 under MPS,
``CUDA_DEVICE_MAX_CONNECTIONS`` changes it). Waits that go well need no more, but those for a peer
that is gone end by work of this process: :func:`queue_left`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringfa4.comm.lanes import POLL_S, Engine, Lane, Mark, reached

SNAPSHOT_S = 1.0
"""How long :meth:`CudaEngine.host_copy` waits before it returns what it saw last."""

_BEFORE_COMPUTE = -1
"""Priority of side streams: copies that need multiprocessors get them before new blocks of the
compute kernels (0) do."""

WAITING_LANES = 4
"""Those of one transport that may wait for a word at once: current, pull, cross and push."""

QUEUE_S = 2.0
"""How long :func:`queue_left` waits for a write that takes microseconds."""

_WAIT_64, _WRITE_64 = 4, 5
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_GEQ = 0
_CAPTURE_RELAXED = 2
_MOST_OPERATIONS = 256

NO_MULTICAST = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Nothing here uses NVLink multicast, and a process that sets it up and dies can leave the switch
unusable for others."""


def keep_multicast_off() -> None:
    """Set the defaults of :data:`NO_MULTICAST`; what the user set stays. Before the libraries
    start."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, as the members for 64-bit waits and writes."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _runtime() -> ctypes.CDLL:
    """torch's. Profilers see who called it, but not who called the driver."""
    version = torch.version.cuda
    assert version is not None, "there is no GPU without it"
    return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")


def _check(status: int, what: str) -> None:
    if status != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        text = name.value.decode() if name.value else str(status)
        raise RuntimeError(f"{what} failed: {text}")


class CudaLane(Lane):
    """One stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert into.numel() == source.numel(), (into.shape, source.shape)
        status = _runtime().cudaMemcpyAsync(
            ctypes.c_void_p(into.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_size_t(into.numel()),
            ctypes.c_int(_ANY_DIRECTION),
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        _check(status, "cudaMemcpyAsync")

    def fill(self, into: Tensor, byte: int) -> None:
        status = _driver().cuMemsetD8Async(
            ctypes.c_uint64(into.data_ptr()),
            ctypes.c_ubyte(byte),
            ctypes.c_size_t(into.numel()),
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        _check(status, "cuMemsetD8Async")

    def record(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)

    def write(self, words: Sequence[Tensor], value: int) -> None:
        self._operate(_WRITE_64, words, value, 0)

    def wait(self, words: Sequence[Tensor], value: int) -> None:
        self._operate(_WAIT_64, words, value, _GEQ)

    def _operate(self, operation: int, words: Sequence[Tensor], value: int, flags: int) -> None:
        for start in range(0, len(words), _MOST_OPERATIONS):
            some = words[start : start + _MOST_OPERATIONS]
            batch = (_Operation * len(some))(
                *(_Operation(operation, word.data_ptr(), value, flags, 0, 0) for word in some)
            )
            status = _driver().cuStreamBatchMemOp_v2(
                ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_uint(len(some)), batch, 0
            )
            _check(status, "cuStreamBatchMemOp")


class CudaEngine(Engine):
    """Streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"pulling is done by a GPU, not by {device}")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    def current(self) -> Lane:
        return CudaLane(torch.cuda.current_stream(self.device))

    def side(self) -> Lane:
        return CudaLane(torch.cuda.Stream(self.device, priority=_BEFORE_COMPUTE))

    def require_no_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a ring attention call cannot be captured in a CUDA graph: which buffers it uses "
                "alternates from call to call, and the ranks agree on the host before each call"
            )

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        # A capture by the caller must not be spoilt by a look from this thread.
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        _check(
            _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
            "cuThreadExchangeStreamCaptureMode",
        )

    def host_copy(self, words: Tensor) -> Callable[[], list[list[int]]]:
        stream = torch.cuda.Stream(self.device, priority=_BEFORE_COMPUTE)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        pinned = torch.zeros(words.shape, dtype=words.dtype, pin_memory=True)
        event = torch.cuda.Event()
        seen: list[list[int]] = pinned.tolist()

        def copy() -> list[list[int]]:
            nonlocal seen
            if event.query():  # else the last copy is still under way
                with torch.cuda.stream(stream):
                    pinned.copy_(words, non_blocking=True)
                event.record(stream)
            deadline = time.monotonic() + SNAPSHOT_S
            while not (done := event.query()) and time.monotonic() < deadline:
                time.sleep(0.0005)
            if done:
                seen = pinned.tolist()
            return seen

        return copy


def queue_left(device: torch.device) -> bool:
    """Whether work starts on ``device`` while as many streams wait as those of a transport may.

    Asked once a process. Threads that ask at once would take each other's queues.
    """
    with _ASKING:
        return _queue_left(device)


_ASKING = threading.Lock()


@functools.cache
def _queue_left(device: torch.device) -> bool:
    """These wait for pinned memory, which the host writes: they end in either case."""
    words = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    awaited, written = words[0], words[1]
    engine = CudaEngine(device)
    *waiting, last = (engine.side() for _ in range(WAITING_LANES + 1))
    for lane in waiting:
        lane.wait([awaited], 1)
    last.write([written], 1)
    deadline = time.monotonic() + QUEUE_S
    while not int(written) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    left = bool(written)
    awaited.fill_(1)
    for lane in (*waiting, last):
        if not reached(lane.record(), QUEUE_S):
            raise RuntimeError(f"{device} does nothing within {QUEUE_S:g} s")
    return left
