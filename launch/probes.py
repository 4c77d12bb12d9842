"""Two kernels that stand around or in for a real one, to see what a run does.

    Paced   hands its kernel slices of tasks and reports the pairs done: progress within a step
    Idle    computes nothing: what is left of a call is encoding and moving

Both keep the name of the kernel they stand for, so ranks agree as they would without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard

SLICE = 1 << 31
"""Pairs (over batch rows and heads) of a slice: a few seconds of one CPU core."""


def slices(task: Task, batch: int, heads: int) -> Iterator[Task]:
    """``task`` cut into runs of query rows of about :data:`SLICE` pairs; itself when not larger."""
    rows = batch if task.batch is None else 1
    parts = -(-task.area * rows * heads // SLICE)
    if parts <= 1:
        yield task
        return
    q0, q1 = task.q
    # A causal box has most of its pairs in the last rows: twice as many slices keep those small.
    step = max(128, -(-(q1 - q0) // (2 * parts)))
    for a in range(q0, q1, step):
        b = min(a + step, q1)
        cut = [band.within(a, b, band.k0, band.k1) for band in task.bands]
        bands = tuple(band for band in cut if band is not None)
        if bands:
            q = min(band.q0 for band in bands), max(band.q1 for band in bands)
            k = min(band.k0 for band in bands), max(band.k1 for band in bands)
            yield replace(task, q=q, k=k, bands=bands)


class _Around(BlockKernel):
    """Another kernel's name, predicate, operands and dtype of gradients."""

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel, self.name = kernel, kernel.name

    def supports(self, spec: KernelSpec) -> str | None:
        return self.kernel.supports(spec)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.kernel.gradient_dtype(dtype)

    def prepare(self, q: Tensor, shard: Shard) -> Queries:
        return self.kernel.prepare(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Queries:
        return self.kernel.prepare_backward(q, shard, out, dout, lse, dlse)


class Paced(_Around):
    """``done(pairs)`` after each slice. For kernels whose calls return when they have computed."""

    def __init__(self, kernel: BlockKernel, done: Callable[[int], None]) -> None:
        super().__init__(kernel)
        self.done = done

    def _slices(self, queries: Queries, tasks: Sequence[Task]) -> Iterator[Task]:
        batch, _, heads, _ = queries.q.shape
        for task in tasks:
            for part in slices(task, batch, heads):
                yield part
                self.done(part.area * heads * (batch if part.batch is None else 1))

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        for part in self._slices(queries, tasks):
            self.kernel.forward(queries, shard, [part], scale, state)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        for part in self._slices(queries, tasks):
            self.kernel.backward(queries, shard, [part], scale, grads)


class Idle(_Around):
    """Neither computes nor writes."""

    def prepare(self, q: Tensor, shard: Shard) -> Queries:
        return Queries(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Queries:
        return Queries(q, shard)

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        """The state stays unwritten: finalise gives (0, -inf)."""

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        """The gradients stay unwritten, and travel as zeros."""
