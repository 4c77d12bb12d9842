"""What of the CUDA lanes can be checked without a GPU: structures and arguments, and refusals."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from ringfa4.comm import streams


def test_operations_have_the_layout_of_the_driver() -> None:
    """CUstreamBatchMemOpParams is a union padded to six 64-bit words; fields as in cuda.h."""
    operation = streams._Operation
    assert ctypes.sizeof(operation) == 48
    offsets = [getattr(operation, name).offset for name in ("address", "value", "flags", "alias")]
    assert offsets == [8, 16, 24, 32]


def test_only_gpus_pull() -> None:
    with pytest.raises(ValueError, match="not by cpu"):
        streams.CudaEngine(torch.device("cpu"))


def test_multicast_stays_off_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = streams.NO_MULTICAST
    monkeypatch.setenv(first, "the user's")
    for name in others:
        monkeypatch.setenv(name, "set, so that it is restored")
        monkeypatch.delenv(name)
    streams.keep_multicast_off()
    assert os.environ[first] == "the user's"
    assert {name: os.environ[name] for name in others} == {
        name: streams.NO_MULTICAST[name] for name in others
    }


class MovingRuntime:
    """cudaMemcpyAsync on the host's memory; ``status`` is what it returns."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.streams = status, list[int]()

    def cudaMemcpyAsync(
        self,
        into: ctypes.c_void_p,
        source: ctypes.c_void_p,
        nbytes: ctypes.c_size_t,
        direction: ctypes.c_int,
        stream: ctypes.c_void_p,
    ) -> int:
        assert direction.value == 4, "cudaMemcpyDefault: either may be a peer's"
        self.streams.append(stream.value or 0)
        ctypes.memmove(into.value, source.value, nbytes.value)  # type: ignore[arg-type]
        return self.status

    def cuGetErrorName(self, status: int, name: object) -> int:
        return 0


class Stream:
    cuda_stream = 0xABCD


def test_a_lane_copies_the_bytes_of_a_slice_on_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = MovingRuntime()
    monkeypatch.setattr(streams, "_runtime", lambda: runtime)
    lane = streams.CudaLane(Stream())
    source = torch.arange(100, dtype=torch.uint8)
    into = torch.zeros(100, dtype=torch.uint8)
    lane.copy(into[8:40], source[50:82])
    assert into.tolist() == [0] * 8 + list(range(50, 82)) + [0] * 60
    assert runtime.streams == [0xABCD]
    with pytest.raises(AssertionError):
        lane.copy(into[:4], source[:5])


def test_a_copy_that_is_refused_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_runtime", "_driver"):
        monkeypatch.setattr(streams, name, lambda: MovingRuntime(status=1))
    lane = streams.CudaLane(Stream())
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync failed: 1"):
        lane.copy(torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
