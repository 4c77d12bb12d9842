"""A transformer block over a sequence that is spread over ranks: copy what you need.

    torchrun --standalone --nproc-per-node 2 examples/transformer_block.py      CPU or GPU

Everything but attention works token by token, so a rank runs the block on its own tokens; attention
sees all of them. Three things to get right around it, all below: rotary positions are global,
labels are shifted before they are sharded, and the loss is a sum over ranks divided by the number
of labels on all ranks. So loss and gradients are those of one process, whatever the ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringfa4 import ContextParallel, close_contexts


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of (b, s, h, d) by angles of ``positions`` (s,) or (b, s)."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(-2)  # (.., s, 1, half)
    a, b = x.float().split(half, -1)
    turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
    return torch.cat(turned, -1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and MLP on this rank's tokens, (b, s, width) to the same."""

    def __init__(self, cp: ContextParallel, width: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.cp, self.heads, self.heads_kv, self.d = cp, heads, heads_kv, width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * heads_kv) * self.d, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.d))
        q, k, v = heads.split([self.heads, self.heads_kv, self.heads_kv], dim=2)
        positions = self.cp.position_ids()
        attended = self.cp.attention(rotary(q, positions), rotary(k, positions), v)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, cp: ContextParallel, vocabulary: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(cp, width, heads=4, heads_kv=2) for _ in range(2)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def loss_and_gradients(model: Model, cp: ContextParallel, tokens: Tensor) -> Tensor:
    """The mean loss over all labels of all ranks, equal everywhere; gradients likewise.

    With FSDP or DDP over these ranks, which average gradients, multiply the loss by their number.
    """
    labels = cp.shift_labels(tokens)
    logits = model(cp.shard(tokens, dim=1))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    if cp.world > 1:
        dist.all_reduce(count)
    (total / count).backward()
    loss = total.detach() / count
    if cp.world > 1:
        dist.all_reduce(loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    return loss


def main(seq: int = 512, steps: int = 3) -> list[float]:
    """Train on one random sequence; the losses."""
    cp = ContextParallel(seq_len=seq, mask="causal")  # one object for all layers
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model = Model(cp).to(cp.context.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(64, (2, seq)).to(cp.context.device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss_and_gradients(model, cp, tokens).item())
        optimizer.step()
    if cp.rank == 0:
        print(f"{cp.world} rank(s), {seq} tokens, losses {', '.join(f'{x:.5f}' for x in losses)}")
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
    main()
    close_contexts()
    if dist.is_initialized():
        dist.destroy_process_group()
