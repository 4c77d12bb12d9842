"""Run the ring on virtual ranks (threads) and compare it with dense fp64 attention: for many tests.

case = Case(mask=causal(64), world=3, heads=(4, 2), dims=(32, 32))
got = run(case)                    # whole tensors, put together from the ranks' shards
want = dense(case)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringfa4 import ContextParallel, Mask
from ringfa4.comm.interface import Control, Transport
from ringfa4.context import Context
from ringfa4.ring import backward, forward
from ringfa4.testing.doubles.transport import run_adversarial
from ringfa4.testing.oracles import allowed
from ringfa4.testing.oracles import attention as oracle


@dataclass(frozen=True)
class Case:
    """One problem: inputs are drawn from ``seed`` and do not depend on world or sharding."""

    mask: Mask
    world: int = 2
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (32, 32)
    batch: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    sink: bool = False
    dlse: bool = False
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, dout (b, s, h, d) and, if asked for, sink (h,) and dlse (b, h, s); whole."""
        gen = torch.Generator().manual_seed(self.seed)
        (hq, hkv), (dk, dv), b = self.heads, self.dims, self.batch
        sq, sk = self.mask.seq_q, self.mask.seq_k
        shapes: dict[str, tuple[int, ...]] = {
            "q": (b, sq, hq, dk),
            "k": (b, sk, hkv, dk),
            "v": (b, sk, hkv, dv),
            "dout": (b, sq, hq, dv),
            "sink": (hq,),
            "dlse": (b, hq, sq),
        }
        drawn = {n: torch.randn(s, generator=gen, dtype=torch.float64) for n, s in shapes.items()}
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        cast = {
            n: x.to(self.device, wide if n in ("sink", "dlse") else self.dtype)
            for n, x in drawn.items()
        }
        if not self.sink:
            del cast["sink"]
        if not self.dlse:
            del cast["dlse"]
        return cast


def dense(case: Case) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv (and dsink) by fp64 autograd through the oracle, on the case's rounded
    inputs.
    """
    x = {
        n: t.double().requires_grad_(n in ("q", "k", "v", "sink"))
        for n, t in case.tensors().items()
    }
    out, lse = oracle(x["q"], x["k"], x["v"], case.mask, scale=case.scale, sink=x.get("sink"))
    loss = (out * x["dout"]).sum()
    if case.dlse:
        loss = loss + torch.where(lse == -math.inf, 0, lse * x["dlse"]).sum()
    names = ["q", "k", "v", *(["sink"] if case.sink else [])]
    grads = torch.autograd.grad(loss, [x[n] for n in names])
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        **{f"d{n}": g for n, g in zip(names, grads, strict=True)},
    }


def ranks(world: int, fn: Callable[[Context], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """``fn(context)`` on every virtual rank; results by rank.

    The transport is the adversarial double: random delays and drift, buffers poisoned before and
    after their validity, overwritten slots and broken rules detected.
    """

    def main(rank: int, transport: Transport, control: Control) -> Any:
        return fn(Context(transport, control))

    return run_adversarial(world, main, timeout_s)


def run(case: Case, runner: Callable[..., list[Any]] = ranks) -> dict[str, Tensor]:
    """What the ring makes of ``case``: forward and backward without autograd; whole, on the CPU.

    ``runner`` runs a function of a context on every rank, as :func:`ranks` does.
    """
    whole = case.tensors()

    def rank(context: Context) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        cp = ContextParallel(context, mask=case.mask, **case.options)
        qpos, kpos = cp.positions(side="q"), cp.positions(side="k")
        q, dout = whole["q"][:, qpos], whole["dout"][:, qpos]
        k, v = whole["k"][:, kpos], whole["v"][:, kpos]
        dlse = whole["dlse"][:, :, qpos] if case.dlse else None
        scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
        sink = whole.get("sink")
        ring = cp.problem.ring(q, k, v, backward=True)
        out, lse = forward(ring, q, k, v, scale=scale, sink=sink)
        dq, dk, dv, dsink = backward(ring, q, k, v, out, lse, dout, dlse, scale=scale, sink=sink)
        local = {"out": out, "lse": lse.transpose(1, 2), "dq": dq, "dk": dk, "dv": dv}
        if dsink is not None:
            local["dsink"] = dsink
        return local, qpos, kpos

    results = runner(case.world, rank)
    first = results[0][0]
    made: dict[str, Tensor] = {}
    for name, part in first.items():
        if name == "dsink":
            made[name] = part.cpu()
            continue
        side = 2 if name in ("dk", "dv") else 1
        seq = case.mask.seq_k if side == 2 else case.mask.seq_q
        made[name] = torch.full((part.shape[0], seq, *part.shape[2:]), math.nan, dtype=part.dtype)
        for result in results:
            made[name][:, result[side].cpu()] = result[0][name].cpu()
    made["lse"] = made["lse"].transpose(1, 2)
    return made


def plain(case: Case) -> dict[str, Tensor]:
    """As :func:`dense`, computed in the case's own dtype with torch's dense operators: the
    yardstick.
    """
    x = {n: t.requires_grad_(n in ("q", "k", "v", "sink")) for n, t in case.tensors().items()}
    q, k, v = (x[n].transpose(1, 2) for n in "qkv")
    group = case.heads[0] // case.heads[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    logits = (scale * (q @ k.mT)).masked_fill(~allowed(case.mask).unsqueeze(1), -math.inf)
    if case.sink:
        column = x["sink"].to(q.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    lse = torch.logsumexp(logits.float() if q.dtype != torch.float64 else logits, -1)
    weights = torch.exp(logits - torch.where(lse == -math.inf, 0, lse).unsqueeze(-1)).to(v.dtype)
    out = (weights @ v).transpose(1, 2)
    loss = (out * x["dout"]).sum()
    if case.dlse:
        loss = loss + torch.where(lse == -math.inf, 0, lse * x["dlse"]).sum()
    names = ["q", "k", "v", *(["sink"] if case.sink else [])]
    grads = torch.autograd.grad(loss, [x[n] for n in names])
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        **{f"d{n}": g for n, g in zip(names, grads, strict=True)},
    }


def magnitudes(case: Case) -> dict[str, float]:
    """Largest sum of the absolute values of the terms that make up an element, for each tensor.

    Gradients cancel (dS = P * (dP - delta) is 0 for a lone key), so a rounding counts against the
    terms, not against their sum.
    """
    x = {n: t.double() for n, t in case.tensors().items()}
    truth = dense(case)
    group = case.heads[0] // case.heads[1]
    q, k, v, dout, out = (
        t.transpose(1, 2) for t in (x["q"], x["k"], x["v"], x["dout"], truth["out"])
    )
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    lse = truth["lse"].nan_to_num(neginf=math.inf).unsqueeze(-1)
    logits = scale * (q @ k.mT)
    weights = torch.exp(logits - lse).masked_fill(~allowed(case.mask).unsqueeze(1), 0)
    delta = (out * dout).abs().sum(-1, keepdim=True)
    if case.dlse:
        delta = delta + x["dlse"].abs().unsqueeze(-1)
    ds = weights * (dout.abs() @ v.abs().mT + delta)

    def over_group(per_head: Tensor) -> Tensor:
        return per_head.unflatten(1, (case.heads[1], group)).sum(2)

    terms = {
        "out": weights @ v.abs(),
        "lse": torch.stack([logits.abs().max(), lse[lse.isfinite()].abs().max()])
        if lse.isfinite().any()
        else logits.abs(),
        "dq": scale * (ds @ k.abs()),
        "dk": over_group(scale * (ds.mT @ q.abs())),
        "dv": over_group(weights.mT @ dout.abs()),
    }
    if case.sink:
        share = torch.exp(x["sink"].view(1, -1, 1, 1) - lse)
        terms["dsink"] = (share * delta).sum((0, 2))
    return {n: float(t.max()) if t.numel() else 0.0 for n, t in terms.items()}


def check(case: Case, got: dict[str, Tensor]) -> None:
    """Every tensor of ``got`` against :func:`dense`: positions of -inf first, then the error.

    The error may be twice that of :func:`plain` (the field's rule for flash kernels), plus four
    roundings of :func:`magnitudes`: out, lse, delta and the result are each stored once on the way,
    where the yardstick, by luck, may be exact.
    """
    want, yardstick, size = dense(case), plain(case), magnitudes(case)
    assert set(got) == set(want)
    for name, truth in want.items():
        value, base = got[name].double(), yardstick[name].double()
        assert torch.equal(value == -math.inf, truth == -math.inf), f"{name}: other rows are empty"
        finite = truth != -math.inf
        if not finite.any():
            continue
        value, base, truth = value[finite], base[finite], truth[finite]
        assert value.isfinite().all(), f"{name} is not finite"
        eps = torch.finfo(torch.float32 if name == "lse" else got[name].dtype).eps
        bound = 2 * (base - truth).abs().max() + 4 * eps * size[name]
        error = (value - truth).abs().max()
        assert error <= bound, f"{name}: error {error:.3g} past {bound:.3g}"
