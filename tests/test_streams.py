"""What of the CUDA lanes can be checked without a GPU: the driver's structure, and refusals."""

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
