"""What a piece of work costs: wall time, and the time of the processors that did it.

    CpuClock     CPU seconds of this process, all its threads
    CudaClock    seconds between two events on the current stream

A machine that others share makes wall time noisy; busy time it touches only through caches and
clock rates. A clock is started and stopped around work that has ended by then, or on the stream
that it was enqueued on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the wall, and of processors (those of several ranks add up)."""

    wall_s: float
    busy_s: float


class Clock(Protocol):
    """``unit`` says what ``busy_s`` counts."""

    unit: str

    def start(self) -> None: ...

    def stop(self) -> Cost: ...


class CpuClock:
    """Of the whole process: who runs virtual ranks lets one of them hold the clock."""

    unit = "CPU s"

    def start(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.process_time()

    def stop(self) -> Cost:
        return Cost(time.perf_counter() - self._wall, time.process_time() - self._busy)


class CudaClock:
    """Of one GPU; ``stop`` waits for the current stream."""

    unit = "GPU s"

    def start(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._wall = time.perf_counter()
        self._begin.record()

    def stop(self) -> Cost:
        self._end.record()
        self._end.synchronize()
        wall = time.perf_counter() - self._wall
        return Cost(wall, self._begin.elapsed_time(self._end) * 1e-3)


CLOCKS: Mapping[str, Callable[[], Clock]] = {"cpu": CpuClock, "cuda": CudaClock}
"""Device type -> its clock."""
