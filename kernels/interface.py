"""What a block kernel is: local Q against records of one owner, into a running state.

    forward    state <- state (+) partial(softmax over the keys of the tasks); (+) is State.merge
    backward   P = exp(scale Q K^T - lse), 0 where lse = -inf
               dS = P (dO V^T - delta),  delta = rowsum(O dO) - dlse
               dQ += scale dS K,  dK += scale dS^T Q,  dV += P^T dO

lse, out, dout are those of the *merged* attention, so P may be as small as 1/N: a kernel that
rounds P must not scale it by a constant. Shapes: q (b, s, heads_q, dk); out, dout
(b, s, heads_q, dv); lse, dlse (b, heads_q, s), fp32, natural log. Query head h reads K/V head
h // (heads_q // heads_kv); K and V are never expanded.

Rules every kernel keeps (tests/kernel_contract.py checks them):
- all work is on the current stream; operands live until the caller drops them;
- tasks are computed in list order, and within a call one work item owns a q tile's state (in
  backward a k tile's dK/dV): results repeat to the bit;
- state and gradients are written on first use and never read before: State and Grads track it;
- rows and keys outside the ranges of the tasks are not touched;
- NaN in the data reaches what depends on it and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard, sum_dtype


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What is asked of a kernel, complete: choosing depends on nothing else.

    ``device`` is "cpu" or "cuda", ``arch`` the compute capability there (None on CPU);
    ``features`` is ``Mask.features``.
    """

    device: str
    arch: tuple[int, int] | None
    dtype: torch.dtype
    wire: str
    heads_q: int
    heads_kv: int
    dk: int
    dv: int
    features: frozenset[str]
    backward: bool


class Queries:
    """Operands prepared once a call and used in every step; kernels subclass it and add their own.

    ``shard`` maps chunks to rows of ``q``. In backward ``dout``, ``lse``, ``delta`` are set.
    """

    def __init__(self, q: Tensor, shard: Shard) -> None:
        self.q, self.shard = q, shard

    def rows(self, chunk: int, q0: int, q1: int) -> slice:
        """Rows of the local tensors that hold [q0, q1) of ``chunk``."""
        base = self.shard.offsets[chunk]
        return slice(base + q0, base + q1)


class BlockKernel(ABC):
    """One implementation. Stateless between calls; ``name`` is what users write."""

    name: str

    @abstractmethod
    def supports(self, spec: KernelSpec) -> str | None:
        """None, or the reason for refusing: what was asked, and what is supported."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a step's dK and dV of inputs in ``dtype`` are handed over, to another rank
        or to this one's own sum: all that the kernel's results hold, or as wide as sums (the
        default).

        Single parts may be given wider; they are rounded once a step, after they are added up. It
        must have the range of sums: what is finite there may not overflow on the way.
        """
        return sum_dtype(dtype)

    @abstractmethod
    def prepare(self, q: Tensor, shard: Shard) -> Queries:
        """Operands of the forward pass. q (b, s, heads_q, dk), any strides."""

    @abstractmethod
    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Queries:
        """Operands of the backward pass; ``lse`` and ``out`` are merged over all keys, sink too."""

    @abstractmethod
    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        """Merge the partial attention of ``tasks`` into ``state``."""

    @abstractmethod
    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        """Add dQ, dK, dV of ``tasks`` into ``grads``."""
