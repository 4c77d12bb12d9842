"""What ranks of a pool do in test_trace.py and test_bench.py."""

from __future__ import annotations

from typing import Any

import torch

from ringfa4 import ContextParallel
from ringfa4.context import context_for
from ringfa4.launch.bench_runs import Common, Setup, Shape, direct_costs, ring_costs
from ringfa4.launch.chrome_trace import Call, document, gather
from ringfa4.launch.clocks import CpuClock
from ringfa4.launch.peers import Processes
from ringfa4.ring import backward, forward
from ringfa4.trace import Recorder


def traced(seq: int) -> dict[str, Any]:
    """The trace of one forward and backward, as this rank puts it together."""
    context = context_for(timeout_s=60.0)
    cp = ContextParallel(context, seq_len=seq)
    x = torch.randn(1, len(cp.positions()), 2, 32)
    ring = cp.problem.ring(x, x, x, backward=True)
    ahead, back = Recorder(), Recorder()
    out, lse = forward(ring, x, x, x, scale=0.2, observer=ahead)
    backward(ring, x, x, x, out, lse, x, scale=0.2, observer=back)
    calls = [
        Call("forward", "forward", ring, ahead.spans),
        Call("backward", "backward", ring, back.spans),
    ]
    return document([gather(context, calls)])


def benched(seq: int) -> tuple[Any, Any, list[int]]:
    """Costs of a direct call and of a traced ring, and whose events came along."""
    context = context_for(timeout_s=60.0)
    peers, clock = Processes(context.device), CpuClock()
    common = Common(
        head_dim=32,
        dtype=torch.float32,
        mask="causal",
        kernel="auto",
        precondition="none",
        device=context.device,
        backward=True,
        seed=0,
    )
    shape = Shape(seq, 2, 1)
    direct = direct_costs(common, shape, peers, clock)
    setup = Setup("fp32", "zigzag", peers.world, traced=True)
    ring = ring_costs(common, shape, setup, context, peers, clock)
    return direct, ring.costs, [part.rank for part in ring.parts]
