"""What the ranks of a gloo pool run for test_ring_gloo.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from rings import Case
from torch import Tensor
from transport_contract import LONG_S, oversleep

from ringfa4 import ContextParallel, close_contexts
from ringfa4.ring import backward, forward


def ring(case: Case, group: Any = None) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's part of every tensor and its positions: name -> (positions, part)."""
    cp = ContextParallel(group, mask=case.mask, timeout_s=LONG_S, **case.options)
    whole = case.tensors()
    qpos, kpos = cp.positions(side="q"), cp.positions(side="k")
    q, dout = whole["q"][:, qpos], whole["dout"][:, qpos]
    k, v = whole["k"][:, kpos], whole["v"][:, kpos]
    dlse = whole["dlse"][:, :, qpos] if case.dlse else None
    scale = case.dims[0] ** -0.5
    made, sink = cp.problem.ring(q, k, v, backward=True), whole.get("sink")
    out, lse = forward(made, q, k, v, scale=scale, sink=sink)
    dq, dk, dv, dsink = backward(made, q, k, v, out, lse, dout, dlse, scale=scale, sink=sink)
    parts = {"out": (qpos, out), "lse": (qpos, lse), "dq": (qpos, dq)}
    parts |= {"dk": (kpos, dk), "dv": (kpos, dv)}
    return parts if dsink is None else {**parts, "dsink": (qpos, dsink)}


def subgroup(case: Case, ranks: list[int]) -> dict[str, tuple[Tensor, Tensor]] | None:
    """The ring on some ranks of the world; None on the others."""
    group = dist.new_group(ranks)
    return ring(case, group) if dist.get_rank() in ranks else None


def mesh_axis(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """The ring on the second axis of a 1 x world mesh."""
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    return ring(case, mesh["cp"])


def layers_and_objects(count: int) -> int:
    """Several objects on one group share its context: calls in order, then all closed and
    reopened."""
    x = torch.ones(1, 8, 1, 32)
    seq = 8 * dist.get_world_size()
    for _ in range(2):
        objects = [ContextParallel(seq_len=seq, mask=m) for m in ("causal", "full") * count]
        assert len({id(cp.context) for cp in objects}) == 1
        for cp in objects:
            assert (cp.attention(x, x, x) == 1).all()
        close_contexts()
    return len(objects)


def bad_length() -> str:
    """Rank 1 passes one token too many."""
    cp = ContextParallel(seq_len=8 * dist.get_world_size(), timeout_s=LONG_S)
    x = torch.ones(1, 8 + (dist.get_rank() == 1), 1, 32)
    try:
        cp.attention(x, x, x)
    except ValueError as error:
        return str(error)
    raise AssertionError("bad input was not refused")


def dies(when: str) -> str:
    """Rank 1 is killed, sleeps until rank 0 gives it up, or raises; what the others are told."""
    cp = ContextParallel(seq_len=64 * dist.get_world_size(), mask="full", timeout_s=LONG_S)
    control = cp.context.control
    x = torch.ones(1, 64, 1, 32)
    cp.attention(x, x, x)
    if dist.get_rank() == 1:
        if when == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "late":
            oversleep(control)
            return "slept"
        raise FloatingPointError("not today")
    if dist.get_rank() == 0 and when != "killed":
        control.timeout_s = 0.5  # it waits for the next rank first
    cp.attention(x, x, x)
    raise AssertionError("the call ended although rank 1 was not there")
