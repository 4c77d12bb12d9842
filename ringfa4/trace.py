"""What an observer of a ring call sees: spans, each with a kind and a step.

The executor calls ``observer.span(kind, step)`` around everything that takes time; the default does
nothing. Kinds:

    agree    header exchange          encode   K/V into the outbox        publish  make the outbox
    readable fetch    start a transfer         wait     until its bytes are here   compute  block
    kernel grads    hand dK/dV over          reduce   add what peers returned    finish   finalise,
    convert

Host times only mean something where the host does the work (CPU); GPU time lines come from CUDA
events and the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol


class Observer(Protocol):
    """Anything with ``span(kind, step)`` returning a context manager."""

    def span(self, kind: str, step: int) -> AbstractContextManager[None]: ...


class Silent:
    """Observes nothing, costs nothing."""

    _nothing = nullcontext()

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        return self._nothing


SILENT = Silent()


@dataclass(frozen=True, slots=True)
class Span:
    """One thing done: ``start`` and ``stop`` in seconds of ``time.perf_counter``."""

    kind: str
    step: int
    start: float
    stop: float


@dataclass
class Recorder:
    """Keeps every span of one rank, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, kind: str, step: int) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(kind, step, start, time.perf_counter()))

    def seconds(self, kind: str) -> float:
        """Total time in spans of ``kind``."""
        return sum(s.stop - s.start for s in self.spans if s.kind == kind)
