"""What the ranks run for test_public_faults.py, in pools and on virtual ranks."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringfa4 import ContextParallel, close_contexts

VOCABULARY, WIDTH = 16, 32


class TinyModel(nn.Module):
    """Embedding, one attention layer with positions, head; equal weights on every rank."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.cp = cp
        shapes = {"embed": (VOCABULARY, WIDTH), "where": (64, WIDTH), "head": (WIDTH, VOCABULARY)}
        shapes["qkv"] = (WIDTH, 3 * WIDTH)
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=gen) / WIDTH**0.5
            self.register_parameter(name, nn.Parameter(drawn))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed[tokens] + self.where[self.cp.position_ids()]
        q, k, v = (x @ self.qkv).unflatten(-1, (3, 2, WIDTH // 2)).unbind(2)
        return (x + self.cp.attention(q, k, v).flatten(2)) @ self.head


def loss_of(
    model: TinyModel, cp: ContextParallel, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, int]:
    """Sum of this rank's losses, and how many there are."""
    own = cp.shift_labels(labels)
    logits = model(cp.shard(tokens, dim=1))
    total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    return total, int((own != -100).sum())


def gradients(cu: list[int] | None) -> dict[str, Any]:
    """Loss, gradients and their norm of one step, by the recipe of examples/: the same for any
    number of ranks."""
    cp = ContextParallel(cu_seqlens=cu, seq_len=64, timeout_s=60.0)
    tokens = (torch.arange(128) * 7 % VOCABULARY).view(2, 64)
    model = TinyModel(cp)
    total, count = loss_of(model, cp, tokens, tokens)
    counts = torch.tensor(count)
    if cp.world > 1:
        dist.all_reduce(counts)
    (total / counts).backward()
    loss = total.detach() / counts
    grads = [p.grad for p in model.parameters()]
    if cp.world > 1:
        for x in (loss, *grads):
            dist.all_reduce(x)
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    return {"loss": loss.item(), "norm": norm.item(), "grads": grads}


def cycles(count: int) -> dict[str, int]:
    """Contexts made, used and closed ``count`` times; what has grown since the first quarter."""
    x = torch.ones(1, 256, 2, 32, requires_grad=True)
    before: dict[str, int] = {}
    for cycle in range(count):
        if cycle == count // 4:
            before = _held()
        cp = ContextParallel(seq_len=512, timeout_s=60.0)
        cp.attention(x, x, x).sum().backward()
        close_contexts()
    return {name: value - before[name] for name, value in _held().items()}


def _held() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def compiled(backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a layer, eager and compiled as one graph."""
    cp = ContextParallel(seq_len=64, timeout_s=60.0)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (cp.shard(x, 1) for x in (q * 2, k, v))
        out, lse = cp.attention(q, k, v, return_lse=True)
        return cp.unshard(out * torch.sigmoid(lse.transpose(1, 2).unsqueeze(-1)), 1)

    gen = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 64, 2, 32, generator=gen) for _ in range(3)]
    results = []
    for fn in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        leaves = [x.clone().requires_grad_() for x in whole]
        out = fn(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    return results[0], results[1]
