"""The contract of every kernel for a forward-only one: its backward is the rounding oracle's.

So every case of the contract runs as it stands, and shows on the way that gradients computed by
another kernel from this one's out and lse are right: what ``kernel="auto"`` does on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from kernel_contract import Case
from test_kernel_double import LowPrecisionContract
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.reference_mxfp8 import ReferenceMxfp8Kernel
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.testing.compare import compare
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

    def both(
        self, case: Case, scale: float, state: State | None = None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(out, lse) of the kernel and of the oracle that rounds alike, each merged into a state
        that begins as ``state``.
        """
        results = []
        for kernel in (self.kernel_forward(), ReferenceMxfp8Kernel(integer=True)):
            own = case.state() if state is None else deepcopy(state)
            queries = kernel.prepare(case.q, case.q_shard)
            kernel.forward(queries, case.encoded(), case.tasks, scale, own)
            results.append(own.finalise(torch.float32))
        return results[0], results[1]

    def close(self, got: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor]) -> None:
        """out head by head, lse element by element."""
        result = compare(got[0], due[0])
        assert result.misplaced == 0 and result.worst_head_db > self.close_db, str(result)
        torch.testing.assert_close(got[1], due[1], rtol=2.0**-22, atol=self.lse)

    close_db = 55.0
    """Against the oracle that rounds where the kernel rounds. Where their fp32 logits differ by a
    few units, at most 2^-20 of P, a P moves across one of E4M3's 8 to 16 roundings an octave: 2^-16
    of them do, by 2^-4 each. That is -72 dB; the rest is left to short sums."""

    lse = 2.0**-19
    """Absolute error of lse against the same: a few units of fp32 sums."""

    gaussian_db = 24.5
    """SQNR against fp64 on Gaussian inputs; the oracle itself reaches 25.5."""

    @pytest.mark.parametrize(
        "dims", [(128, 128), (64, 64), (128, 64), (64, 128), (192, 128), (192, 64)], ids=str
    )
    def test_is_the_rounding_oracle(self, dims: tuple[int, int]) -> None:
        """Several tasks a row; long enough for tiles that every row sees whole."""
        case = self.case(masks.window(400, left=300), dims=dims, heads=(2, 1), batch=1)
        got, due = self.both(case, case.scale)
        self.close(got, due)
        result = compare(got[0], case.truth.out)
        assert result.sqnr_db > self.gaussian_db, str(result)

    @pytest.mark.parametrize("scale", [-0.2, 0.0, 1.0])
    def test_any_scale(self, scale: float) -> None:
        self.close(*self.both(self.case(masks.causal(self.seq), batch=1), scale))

    def test_references_move_when_maxima_grow(self) -> None:
        """Logits that grow by hundreds from record to record: every row rescales in each."""
        case = self.case(masks.full(130, 512), chunks=1, batch=1)
        steps = torch.arange(512, device=self.device).view(1, -1, 1, 1) // 128
        case = replace(case, q=case.q.abs() + 0.5, k=case.k * (1 + steps) + 40 * steps)
        got, due = self.both(case, case.scale)
        assert float(due[1].max()) > 1000
        self.close(got, due)

    def test_a_state_that_outweighs_the_keys(self) -> None:
        """Its lse lies 8.3 above that of the keys: they weigh 1/4000, and lose nothing by it."""
        case = self.case(masks.causal(self.seq), batch=1)
        (out, lse), _ = self.both(case, case.scale)
        for rise in (-8.3, 0.0, 8.3, 40.0):
            state, above = case.state(), lse + rise
            state.merge(None, slice(0, self.seq), torch.zeros_like(state.acc), above)
            got, due = self.both(case, case.scale, state)
            self.close(got, due)
            share = torch.sigmoid(lse.double() - above).transpose(1, 2).unsqueeze(-1)
            assert compare(got[0], out * share).sqnr_db > self.merged_db

    merged_db = 100.0
    """Merging is fp32: a weight is wrong by a unit or two of an lse below 64, 2^-18 at most."""

    def test_as_many_batch_rows_and_groups_as_asked(self) -> None:
        """Every (batch row, head) finds its own Q, K, V and state."""
        case = self.case(masks.causal(140), batch=3, heads=(6, 2))
        self.close(*self.both(case, case.scale))
