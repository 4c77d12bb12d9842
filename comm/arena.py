"""Buffers of a transport: uint8, 128-byte aligned, grown on demand, kept between calls.

Records are multiples of 128 bytes, so every record starts aligned when the buffer does.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 128


def aligned_empty(nbytes: int, device: torch.device) -> Tensor:
    """1-D uint8 of ``nbytes``, contents undefined.

    Never an inference tensor: the buffer outlives the call that made it, and later calls write it
    in other modes.
    """
    with torch.inference_mode(False):
        raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        skip = -raw.data_ptr() % ALIGNMENT
        return raw[skip : skip + nbytes]


class Slots:
    """``count`` buffers of one capacity, used in turn."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._buffers = [aligned_empty(0, device) for _ in range(count)]
        self._device = device

    @property
    def capacity(self) -> int:
        return self._buffers[0].numel()

    def grow(self, nbytes: int) -> None:
        """Make every buffer at least ``nbytes`` long; contents are lost when it was shorter."""
        if nbytes > self.capacity:
            self._buffers = [aligned_empty(nbytes, self._device) for _ in self._buffers]

    def take(self, turn: int, nbytes: int) -> Tensor:
        """The first ``nbytes`` of buffer ``turn`` modulo the count."""
        return self._buffers[turn % len(self._buffers)][:nbytes]
