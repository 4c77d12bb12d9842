"""The contract of every kernel for a forward-only one: its backward is the rounding oracle's.

So every case of the contract runs as it stands, and shows on the way that gradients computed by
another kernel from this one's out and lse are right: what ``kernel="auto"`` does on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from test_kernel_double import LowPrecisionContract
from torch import Tensor

from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.reference_mxfp8 import ReferenceMxfp8Kernel
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import Grads, State
from ringfa4.wire import EncodedShard


class Paired(BlockKernel):
    """``forward`` of one kernel, ``backward`` of the oracle."""

    name = "paired"

    def __init__(self, forward: BlockKernel) -> None:
        self._forward, self._backward = forward, ReferenceMxfp8Kernel(integer=True)

    def supports(self, spec: KernelSpec) -> str | None:
        return self._backward.supports(spec)

    def prepare(self, q: Tensor, shard: Shard) -> Queries:
        return self._forward.prepare(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Queries:
        return self._backward.prepare_backward(q, shard, out, dout, lse, dlse)

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        self._forward.forward(queries, shard, tasks, scale, state)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        self._backward.backward(queries, shard, tasks, scale, grads)


class ForwardContract(LowPrecisionContract):
    wire = "mxfp8"
    head_dims = (64, 64)
    heads_and_dims = ((8, 2, 128, 128), (4, 1, 128, 64), (2, 2, 64, 128), (1, 1, 192, 128))

    def kernel_forward(self) -> BlockKernel:
        """The kernel under test."""
        raise NotImplementedError

    def make(self) -> BlockKernel:
        return Paired(self.kernel_forward())
