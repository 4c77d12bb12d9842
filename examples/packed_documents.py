"""Documents packed into one sequence, over the ranks of a group.

    torchrun --standalone --nproc-per-node 2 examples/packed_documents.py

Tensors are "thd", (tokens, heads, dim), as variable-length kernels take them. Once packed tightly,
found by ``cu_seqlens``; once padded, each document at the start of a slot of its own. Both give the
same attention, and no copy is made for either.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4 import ContextParallel, close_contexts, packing

LENGTHS = [700, 120, 0, 1900, 376]
SLOT = 2048


def attend(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """thd to thd, whole tensors on every rank; real code keeps its shards and never gathers."""
    shards = (cp.shard(packing.to_bshd(x), dim=1) for x in (q, k, v))
    return packing.to_thd(cp.unshard(cp.attention(*shards), dim=1))


def main() -> float:
    """The largest difference between the packed and the padded way."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), 4, 64) for _ in range(3))

    # "balanced" gives every rank the same tokens and nearly the same work.
    cu_seqlens = packing.cu_seqlens(LENGTHS)
    cp = ContextParallel(cu_seqlens=cu_seqlens, sharding="balanced")
    x = (t.to(cp.context.device) for t in (q, k, v))
    packed = attend(cp, *x)
    longest = cp.position_ids().max().item() + 1  # rotary embeddings restart in each document
    assert longest <= max(LENGTHS)

    starts, seq = [SLOT * n for n in range(len(LENGTHS))], SLOT * len(LENGTHS)
    mask = packing.padded_documents(starts, LENGTHS, seq_len=seq)
    cp = ContextParallel(mask=mask, sharding="balanced")
    wide = (packing.add_padding(t, starts, LENGTHS, seq).to(cp.context.device) for t in (q, k, v))
    padded = packing.remove_padding(attend(cp, *wide), starts, LENGTHS)

    difference = (packed - padded).abs().max().item()
    if cp.rank == 0:
        busiest = f"busiest rank {cp.plan.balance:.3f} of the mean"
        print(f"{cp.world} rank(s), {busiest}, difference {difference:.1e}")
    return difference


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
