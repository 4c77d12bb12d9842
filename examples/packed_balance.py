"""How shardings share out packed documents of real lengths: balance and bytes, by arithmetic alone.

    python examples/packed_balance.py --seq 1048576 --ranks 8 72

The lengths are those of the Python files of this interpreter's standard library (without its tests
and site-packages), 4 bytes a token, shuffled by a fixed seed and cut at --seq: hundreds of short
ones and a few very long, as text corpora are. "To hide" is the rate at which a rank that computes
100 TFLOP/s (32 query heads) must read, so that transfers take no longer than work. Neither torch
nor a GPU.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ringfa4 import mask as masks
from ringfa4.launch.plan_numbers import Numbers
from ringfa4.launch.sizes import bytes_text
from ringfa4.shard import by_name

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BYTES_PER_TOKEN = 4


def text_lengths(folder: Path) -> list[int]:
    """Tokens of each non-empty *.py file below ``folder``, by path."""
    files = sorted(f for f in folder.rglob("*.py") if not LEFT_OUT & set(f.parts))
    sizes = (f.stat().st_size for f in files)
    return [-(-size // BYTES_PER_TOKEN) for size in sizes if size]


def cut(lengths: Sequence[int], seq: int) -> list[int]:
    """``lengths``, over and over if need be, up to ``seq`` tokens; the last one is cut."""
    taken, left = [], seq
    while left:
        for n in lengths:
            taken.append(min(n, left))
            left -= taken[-1]
            if not left:
                break
    return taken


def rows(seq: int, ranks: Sequence[int], lengths: list[int], wire: str) -> list[tuple[str, ...]]:
    """A row a sharding and number of ranks, a header first."""
    random.Random(0).shuffle(lengths)
    taken = cut(lengths, seq)
    edges = [0]
    for n in taken:
        edges.append(edges[-1] + n)
    mask = masks.documents(edges)
    middle = sorted(taken)[len(taken) // 2]
    print(f"{len(taken)} documents, {seq:,} tokens: median {middle:,}, longest {max(taken):,}")
    table = [
        (
            "ranks",
            "sharding",
            "busiest/mean",
            "tokens",
            "chunks",
            "read",
            "most of a rank",
            "to hide",
        )
    ]
    for world in ranks:
        for name in ("contiguous", "zigzag", "striped", "balanced"):
            sharding = by_name(name, mask, world)
            n = Numbers.of(mask, sharding, sharding, wire)
            chunks = max(len(shard.chunks) for shard in sharding.shards)
            shares = f"{n.balance:.3f}", f"{n.token_balance:.3f}"
            read, most = bytes_text(sum(n.read)), bytes_text(max(n.read))
            hide = f"{100 * (n.bytes_per_kflop or 0):.2f} GB/s"
            table.append((str(world), name, *shares, str(chunks), read, most, hide))
    return table


def main(argv: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Print the table and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=1 << 20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--wire", default="bf16", help="K and V of 8 heads of 128")
    options = parser.parse_args(argv)
    lengths = text_lengths(Path(sysconfig.get_paths()["stdlib"]))
    table = rows(options.seq, options.ranks, lengths, options.wire)
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))
    return table


if __name__ == "__main__":
    main()
