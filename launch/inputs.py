"""Where q, k, v and dout come from: drawn at random, or a user's file.

A random tensor (b, s, h, d) is standard normal, drawn in blocks of 1024 global positions, each from
a seed of its own: blake2b(seed, tensor, block). So a rank draws only the blocks that it owns tokens
of, holds one block besides them, and the whole tensor is the same for any world and any sharding;
a longer sequence begins with the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from ringfa4.launch.tensorfile import TensorFile
from ringfa4.shard import Shard

BLOCK = 1024
"""Global positions drawn from one seed."""


class Inputs(Protocol):
    """Rows of the global tensors."""

    def rows(self, name: str, shard: Shard, heads: int, dim: int) -> Tensor:
        """(b, len(shard), heads, dim) on the CPU: what ``shard`` owns of tensor ``name``."""
        ...


def block_seed(seed: int, name: str, block: int) -> int:
    """63 bits that depend on all three and on nothing else."""
    digest = blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)  # consecutive chunks of a shard often share a block
def _drawn(seed: int, name: str, block: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(block_seed(seed, name, block))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@dataclass(frozen=True)
class RandomInputs:
    """Standard normal, rounded to ``dtype``; the same for any split over ranks."""

    seed: int
    batch: int
    dtype: torch.dtype

    def rows(self, name: str, shard: Shard, heads: int, dim: int) -> Tensor:
        out = torch.empty(self.batch, len(shard), heads, dim, dtype=self.dtype)
        shape = (self.batch, BLOCK, heads, dim)
        for offset, chunk in zip(shard.offsets, shard.chunks, strict=False):
            done = 0
            while done < chunk.count:
                position = chunk.start + chunk.stride * done
                block, first = divmod(position, BLOCK)
                count = min(-(-(BLOCK - first) // chunk.stride), chunk.count - done)
                drawn = _drawn(self.seed, name, block, shape, self.dtype)
                out[:, offset + done : offset + done + count] = drawn[:, first :: chunk.stride][
                    :, :count
                ]
                done += count
        return out

    def sink(self, heads: int) -> Tensor:
        """One logit for each head, fp32."""
        return _drawn(self.seed, "sink", 0, (heads,), torch.float32).clone()


@dataclass(frozen=True)
class FileInputs:
    """q, k, v of a file; dout too if it is there, else drawn."""

    file: TensorFile
    drawn: RandomInputs

    def rows(self, name: str, shard: Shard, heads: int, dim: int) -> Tensor:
        if name not in self.file:
            return self.drawn.rows(name, shard, heads, dim)
        return self.file.read(name, shard)
