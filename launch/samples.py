"""Which rows a check looks at, how they come together, and which pairs the mask allows.

Nothing here knows of plans: the mask is the membership of (i, j) in its bands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringfa4.launch.peers import Peers
from ringfa4.mask import Mask
from ringfa4.shard import Shard, Sharding


def sample_positions(sharding: Sharding, count: int) -> list[int]:
    """About ``count`` global positions: both ends, edges of shards, and others spread evenly.

    The same on every rank; all positions when there are not more.
    """
    seq = sharding.seq
    if seq <= count:
        return list(range(seq))
    edges = sorted(
        {p for s in sharding.shards for c in s.chunks for p in (c.start, c.positions()[-1])}
    )
    most = max(2, count // 2)
    if len(edges) > most:  # as many, evenly chosen, the first and the last among them
        edges = [edges[i * (len(edges) - 1) // (most - 1)] for i in range(most)]
    chosen = {0, seq - 1, *edges}
    golden = (
        math.sqrt(5) - 1
    ) / 2  # its multiples fill [0, 1) evenly, and never in step with tiles
    n = 0
    while len(chosen) < count:
        n += 1
        chosen.add(int(n * golden % 1 * seq))
    return sorted(chosen)


def gather_rows(peers: Peers, shard: Shard, positions: list[int], x: Tensor) -> Tensor:
    """fp64 (b, n, h, d): rows of the global tensor of which ``x`` (b, s, h, d) is this shard's."""
    rows = torch.zeros(x.shape[0], len(positions), *x.shape[2:], dtype=torch.float64).to(x.device)
    for n, position in enumerate(positions):
        for offset, chunk in zip(shard.offsets, shard.chunks, strict=False):
            if position in chunk.positions():
                rows[:, n] = x[:, offset + chunk.positions().index(position)]
    return peers.sum(rows)


def membership(mask: Mask, i: Tensor, j: Tensor) -> Tensor:
    """Boolean (b or 1, n, m): whether query position i[n] sees key position j[m]."""
    rows = []
    for bands in mask.rows:
        seen = torch.zeros(len(i), len(j), dtype=torch.bool, device=i.device)
        if not len(i) or not len(j):
            rows.append(seen)
            continue
        ends = int(i.min()), int(i.max()) + 1, int(j.min()), int(j.max()) + 1
        difference = j.unsqueeze(0) - i.unsqueeze(1)
        for band in bands:
            if band.within(*ends) is None:
                continue  # holds none of these pairs: a packed batch has thousands of such bands
            q_in = (i >= band.q0) & (i < band.q1)
            inside = q_in.unsqueeze(1) & ((j >= band.k0) & (j < band.k1)).unsqueeze(0)
            if band.lo is not None:
                inside &= difference >= band.lo
            if band.hi is not None:
                inside &= difference <= band.hi
            seen |= inside
        rows.append(seen)
    return torch.stack(rows)
