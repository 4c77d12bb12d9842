"""What ranks of a pool do in test_scaling.py."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from rings import Case
from torch import Tensor

from ringfa4.comm.control import open_control
from ringfa4.comm.registry import open_transport
from ringfa4.context import Context
from ringfa4.launch import scaling
from ringfa4.launch.console import Console
from ringfa4.launch.peers import Processes
from ringfa4.launch.scaling_journal import Journal
from ringfa4.launch.scaling_rivals import RIVALS, Share
from ringfa4.launch.scaling_rows import Problem, Row, Setup
from ringfa4.launch.scaling_runs import Bench, measure
from ringfa4.ring import backward, forward
from ringfa4.shard import zigzag

CPU = torch.device("cpu")


def _positions(seq: int) -> Tensor:
    chunks = zigzag(seq, dist.get_world_size()).shards[dist.get_rank()].chunks
    return torch.cat([torch.tensor(chunk.positions()) for chunk in chunks])


def rival(name: str, case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Twice forward and backward: name -> (this rank's positions, its part) of the second time."""
    where, x = _positions(case.mask.seq_q), case.tensors()
    own = {n: t[:, where] for n, t in x.items()}
    with RIVALS[name](Share(**own, causal=case.mask.name == "causal"), "cpu") as made:
        for _ in range(2):
            out, lse = made.forward()
            dq, dk, dv = made.backward()
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {n: (where, part) for n, part in found.items()}


def bench(**more: Any) -> Bench:
    context = Context(*open_transport("torch_p2p", dist.group.WORLD, CPU, 20.0))
    usual = {
        "context": context, "peers": Processes(CPU), "head_dim": 32, "dtype": torch.float32,
        "backward": True, "repeat": 2, "burst": 2, "row_seconds": 60.0, "check_rows": 8, "seed": 0,
        "timeout_s": 60.0,
    }  # fmt: skip
    return Bench(**usual | more)  # type: ignore[arg-type]


def measured(rows: list[Row], traced: bool) -> list[dict[str, Any] | str]:
    """What each row gives: its numbers and how many ranks' timelines it has, or the refusal."""
    here = bench()
    found: list[dict[str, Any] | str] = []
    for row in rows:
        try:
            result = measure(here, row, traced=traced)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append({**result.as_json(), "parts": [p.rank for p in result.parts]})
    here.context.close()
    return found


def fails_on(rank: int, how: str) -> tuple[list[str], dict[str, Any]]:
    """Three rows, in the second of which one rank alone fails; the states noted, and why."""
    rows = [
        Row(Problem(seq, 1, 1, "causal"), Setup("ring", "torch_p2p", "fp32", "cpu"))
        for seq in (64, 128, 192)
    ]
    real, errors = scaling.measure, {"full memory": torch.OutOfMemoryError, "code": KeyError}

    def measured(bench: Bench, row: Row, *, traced: bool) -> Any:
        if row.problem.seq == 128 and dist.get_rank() == rank:
            raise errors[how]("deliberate")
        if row.problem.seq == 128:
            return None  # a rank that has not noticed
        return real(bench, row, traced=traced)

    scaling.measure = measured  # type: ignore[assignment]
    try:
        here, journal = bench(check_rows=0), Journal(None, {}, resume=False)
        console = Console(io.StringIO(), speaks=False)
        scaling._Run(scaling.parse_options([]), here, journal, console).all(rows)
        here.context.close()
    finally:
        scaling.measure = real
    return [entry["state"] for entry in journal.rows.values()], journal.rows[rows[1].name]


def still_ring(seq: int) -> dict[str, Tensor]:
    """Full attention over a still transport, and this rank's own attention, for comparison."""
    from ringfa4 import ContextParallel
    from ringfa4.launch.scaling_local import StillTransport

    rank, world = dist.get_rank(), dist.get_world_size()
    still = StillTransport(rank, world, CPU)
    context = Context(still, open_control(dist.group.WORLD, 20.0))
    cp = ContextParallel(context, seq_len=seq, mask="full", kernel="reference")
    gen = torch.Generator().manual_seed(rank)
    shape = 1, seq // world, 2, 16
    q, k, v, dout = (torch.randn(shape, generator=gen, dtype=torch.float64) for _ in range(4))
    ring = cp.problem.ring(q, k, v, backward=True)
    out, lse = forward(ring, q, k, v, scale=0.25)
    dq, dk, dv, _ = backward(ring, q, k, v, out, lse, dout, scale=0.25)
    context.close()
    return {
        "q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv
    }  # fmt: skip
