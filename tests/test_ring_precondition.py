"""The executor's use of preconditions: attention stays what it is, over ranks, sinks, lse
gradients and GQA."""

from __future__ import annotations

import pytest
import torch
from rings import Case, check, ranks, run

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4.context import Context


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("precondition", ["hadamard", "k-mean", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preconditions_leave_attention_as_it_is(
    precondition: str, world: int, dtype: torch.dtype
) -> None:
    """Rows without keys and a biased K included; fp64 would show a term that fp32 hides."""
    case = Case(
        masks.documents([0, 30, 70], [0, 0, 64], seq_q=80),
        world=world,
        heads=(4, 2),
        dims=(96, 32),
        dtype=dtype,
        sink=True,
        dlse=True,
        options={"precondition": precondition, "sharding": "contiguous"},
    )
    check(case, run(case))


def test_ranks_must_agree_on_the_precondition() -> None:
    def rank(context: Context) -> None:
        with pytest.raises(ValueError, match="precondition: rank 0 has 'none', rank 1 has 'both'"):
            ContextParallel(context, seq_len=16, precondition="both" if context.rank else "none")
        with pytest.raises(ValueError, match="unknown precondition 'rotate'"):
            ContextParallel(context, seq_len=16, precondition="rotate")

    ranks(2, rank)
