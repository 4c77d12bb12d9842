"""What an observer of a ring call sees: spans, each with a kind and a step.

The executor calls ``observer.span(kind, step)`` around everything that takes time. Kinds:

    agree    header exchange               publish  make the outbox readable
    encode   K/V into the outbox           fetch    start a transfer
    compute  block kernel                  wait     until its bytes are here
    grads    hand dK/dV over               reduce   add what peers returned
    finish   finalise, convert

:class:`Named`, the default, gives every span a name, "ring/step3/compute", where somebody looks: in
torch.profiler while one is active, else as an NVTX range once CUDA is in use. :class:`Recorder`
keeps times besides; launch/chrome_trace.py makes a trace of all ranks from them.

Invariant: spans of one rank never overlap. Host times only mean something where the host does the
work (CPU); on a GPU they show when work was enqueued, and the profiler shows when it ran.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function


class Observer(Protocol):
    """Anything with ``span(kind, step)`` returning a context manager."""

    def span(self, kind: str, step: int) -> AbstractContextManager[None]: ...


def span_name(kind: str, step: int) -> str:
    """The name under which profilers show a span."""
    return f"ring/step{step}/{kind}"


class Named:
    """Names spans for profilers; keeps nothing.

    record_function costs 6 us also when nobody records, asking whether somebody does 0.05 us. The
    question covers emit_nvtx, which makes an NVTX range of what record_function names.
    """

    _nothing = nullcontext()

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        if _profiler_enabled():
            return record_function(span_name(kind, step))
        if torch.cuda.is_initialized():
            return _NvtxRange(span_name(kind, step))
        return self._nothing


NAMED = Named()


class _NvtxRange:
    """torch.cuda.nvtx.range without its generator: 0.3 us where no tool listens."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)

    def __exit__(self, *error: object) -> None:
        torch.cuda.nvtx.range_pop()


class Span(NamedTuple):
    """One thing done: ``start`` and ``stop`` in seconds of ``time.perf_counter``.

    On Linux that is CLOCK_MONOTONIC: one clock for all processes of a machine.
    """

    kind: str
    step: int
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class Recorder:
    """Keeps every span of one rank, in the order in which they ended; ``inner`` sees them too."""

    def __init__(self, inner: Observer = NAMED) -> None:
        self.spans: list[Span] = []
        self.inner = inner

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        return _Timed(self, kind, step)

    def seconds(self, kind: str) -> float:
        """Total time in spans of ``kind``."""
        return sum(s.seconds for s in self.spans if s.kind == kind)


class _Timed:
    """One span under way. With slots and no generator: 1.6 us a span, not 2.9."""

    __slots__ = ("_inner", "_kind", "_recorder", "_start", "_step")

    def __init__(self, recorder: Recorder, kind: str, step: int) -> None:
        self._recorder, self._kind, self._step = recorder, kind, step
        self._inner = recorder.inner.span(kind, step)

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        stop = time.perf_counter()
        self._recorder.spans.append(Span(self._kind, self._step, self._start, stop))
