"""Where the time of a ring call goes, on the clock of the device that computes.

    CPU     ringfa4.trace.Recorder: the host computes, and its clock says when
    CUDA    an event on the current stream at both ends of each span

A span of a stream lasts from when the work before it is done until its own is: a ``wait`` for bytes
that are there lasts nothing, one for bytes that are not lasts as long as the device stands idle.
Where the host is late the device idles too, in whatever span the host was late in. An event takes
the stream some 2 us and no multiprocessor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from ringfa4.trace import NAMED, Observer, Recorder, Span

STANDING = ("publish", "fetch", "wait", "grads", "reduce")
"""Spans in which bytes are moved, added up or waited for."""


class Timeline(Observer, Protocol):
    """An observer that has seen a call."""

    @property
    def spans(self) -> Sequence[Span]:
        """In the order in which they ended, on ``time.perf_counter``'s clock."""
        ...


class DeviceRecorder:
    """Spans of one call as the current stream sees them. ``spans`` waits for the device."""

    def __init__(self, inner: Observer = NAMED) -> None:
        self.inner = inner
        self._events: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin = _event()
        self._origin.synchronize()
        self._began = time.perf_counter()

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        return _OnStream(self, kind, step)

    def ended(self, kind: str, step: int, start: torch.cuda.Event) -> None:
        self._events.append((kind, step, start, _event()))

    @property
    def spans(self) -> list[Span]:
        found = []
        for kind, step, start, stop in self._events:
            stop.synchronize()
            ends = (
                self._began + 1e-3 * self._origin.elapsed_time(event) for event in (start, stop)
            )
            found.append(Span(kind, step, *ends))
        return found


class _OnStream:
    __slots__ = ("_inner", "_kind", "_recorder", "_start", "_step")

    def __init__(self, recorder: DeviceRecorder, kind: str, step: int) -> None:
        self._recorder, self._kind, self._step = recorder, kind, step
        self._inner = recorder.inner.span(kind, step)

    def __enter__(self) -> None:
        self._start = _event()
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        self._recorder.ended(self._kind, self._step, self._start)


def _event() -> torch.cuda.Event:
    """Recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timeline(device: torch.device) -> Timeline:
    """An observer for one call on ``device``; on a GPU it first waits for the device."""
    return DeviceRecorder() if device.type == "cuda" else Recorder()


def seconds(spans: Sequence[Span], kinds: Sequence[str]) -> float:
    """Total length of the spans of ``kinds``."""
    return sum(span.seconds for span in spans if span.kind in kinds)
