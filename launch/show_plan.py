"""Show who reads what when, before anything runs: pairs and bytes by rank and step, as text or PNG.

    python launch/show_plan.py --seq 1M --ranks 8                        the table
    python launch/show_plan.py --seq 1M --ranks 8 --png plan.png         the picture
    python launch/show_plan.py --documents 1K,7K,8K --ranks 3 --sharding balanced --rank 1

The plan is the one that the ring executes (:mod:`ringfa4.plan`); torch is not loaded. Exit codes: 0
done, 1 refused, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ringfa4.launch import plan_picture
from ringfa4.launch.console import Console
from ringfa4.launch.masks import build_mask, document_starts
from ringfa4.launch.options import (
    SHARDINGS,
    Parser,
    add_domains_option,
    add_mask_options,
    exit_code_of_plan_tool,
    require_folders,
    typed,
)
from ringfa4.launch.plan_numbers import WIRES, Numbers, Shape, gradient_wire
from ringfa4.launch.sizes import bytes_text, parse_size, seconds_text, size_text
from ringfa4.shard import by_name
from ringfa4.topology import Topology

USUAL_SEQ = 1 << 17

LISTED = 16
"""Up to so many ranks have rows of their own, unless --all."""

EPILOG = """\
examples:
  python launch/show_plan.py --seq 1M --ranks 8 --png plan.png
  python launch/show_plan.py --seq 1M --ranks 72 --window 64K --sharding contiguous --rank 40
  python launch/show_plan.py --seq 256K --documents 100 --ranks 8 --sharding balanced
  python launch/show_plan.py --seq 1M --ranks 8 --domains 2 --rank 5 --backward
"""


def parser() -> Parser:
    made = Parser(
        prog="show_plan.py",
        description="Show a plan: who reads what when. Sizes take K, M, G (binary).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size, count = typed(parse_size, 0), typed(parse_size, 1)
    usual = Shape()
    what = made.add_argument_group("the problem")
    what.add_argument("--seq", type=size, metavar="N", help="tokens in all (default 128K)")
    what.add_argument("--seq-k", type=size, metavar="N", help="keys, if not as many as queries")
    what.add_argument("--ranks", type=count, default=8, metavar="N", help="default 8")
    what.add_argument("--batch", type=count, default=usual.batch, metavar="N")
    what.add_argument("--heads", type=count, default=usual.heads, metavar="N", help="default 32")
    what.add_argument("--kv-heads", type=count, metavar="N", help="default 8, or as --heads")
    what.add_argument("--head-dim", type=count, default=usual.dk, metavar="N", help="default 128")
    what.add_argument("--v-head-dim", type=count, metavar="N", help="of values (as --head-dim)")
    add_mask_options(made)
    how = made.add_argument_group("how it is computed")
    how.add_argument("--sharding", choices=SHARDINGS, default="zigzag")
    how.add_argument("--wire", choices=WIRES, default="mxfp8", help="of K and V (default mxfp8)")
    add_domains_option(how)
    how.add_argument("--backward", action="store_true", help="the backward pass, not the forward")
    shown = made.add_argument_group("what comes out")
    shown.add_argument("--rank", type=size, metavar="R", help="the steps of one rank")
    shown.add_argument("--all", action="store_true", help=f"every rank, also beyond {LISTED}")
    shown.add_argument("--png", metavar="FILE", help="a picture (needs matplotlib)")
    shown.add_argument("--json", metavar="FILE", help="everything as JSON ('-': standard output)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; ``argv`` None is the command line."""
    return exit_code_of_plan_tool("show_plan.py", parser(), show, argv)


def show(options: argparse.Namespace, command: str) -> None:
    """Print the plan that ``options`` describe, and write what files they name."""
    console = Console(sys.stderr if options.json == "-" else sys.stdout, speaks=True)
    require_folders(png=options.png, json=options.json)
    numbers = build(options, _progress(console, options.ranks))
    if options.rank is not None and options.rank >= numbers.world:
        raise ValueError(f"--rank {options.rank} is not within 0..{numbers.world - 1}")
    console.say(f"launch/show_plan.py {command}")
    console.table(summary(numbers), numbers=False)
    console.say()
    if options.rank is not None:
        console.say(f"rank {options.rank}, step by step")
        console.table(steps_of(numbers, options.rank))
    else:
        console.table(ranks_table(numbers, every=options.all))
        if numbers.world > LISTED and not options.all:
            console.say(
                f"the least, the middle and the most loaded of {numbers.world} (--all: all)"
            )
        if numbers.world <= LISTED:
            console.say()
            console.say("whose K/V each rank reads in each step, and its share of the rank's pairs")
            console.table(schedule_table(numbers))
    if options.png is not None:
        plan_picture.save(numbers, options.png, title(numbers), headline(numbers))
        console.say(f"wrote {options.png}")
    if options.json == "-":
        print(as_json(numbers, command))
    elif options.json is not None:
        Path(options.json).write_text(as_json(numbers, command) + "\n")
        console.say(f"wrote {options.json}")


def build(options: argparse.Namespace, progress: Callable[[int], None]) -> Numbers:
    """ValueError when the options do not fit together."""
    seq = options.seq
    if seq is None:
        lengths = options.documents or ()
        seq = document_starts(lengths, 0)[-1] if len(lengths) > 1 else USUAL_SEQ
    mask = build_mask(options, seq, seq if options.seq_k is None else options.seq_k)
    usual_kv = Shape().heads_kv
    heads_kv = options.kv_heads or (usual_kv if options.heads % usual_kv == 0 else options.heads)
    dv = options.v_head_dim or options.head_dim
    shape = Shape(options.batch, options.heads, heads_kv, options.head_dim, dv)
    q_side, k_side = (by_name(options.sharding, mask, options.ranks, side) for side in "qk")
    domains = options.domains
    topology = None if domains is None else Topology.even(options.ranks, domains)
    return Numbers.of(
        mask, q_side, k_side, options.wire, shape,
        backward=options.backward, topology=topology, progress=progress,
    )  # fmt: skip


def _progress(console: Console, ranks: int) -> Callable[[int], None]:
    """Says how far planning is, once it has taken three seconds."""
    begin = time.monotonic()
    said = begin

    def done(count: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= 3 and count < ranks:
            said = now
            left = (now - begin) * (ranks / count - 1)
            console.rewrite(f"planned {count} of {ranks} ranks, about {seconds_text(left)} left")

    return done


# ---- text ---------------------------------------------------------------------------------------


def title(n: Numbers) -> str:
    tokens = size_text(n.mask.seq_q).split()[0]
    if n.mask.seq_k != n.mask.seq_q:
        tokens += f" x {size_text(n.mask.seq_k).split()[0]}"
    way = "backward" if n.backward else "forward"
    return f"{n.mask.name}, {tokens} tokens, {n.sharding.name} over {n.world} ranks: {way}"


def headline(n: Numbers) -> str:
    """The one line that says whether the plan is good."""
    moved = sum(n.read) + sum(n.returned)
    return (
        f"busiest rank {n.balance:.3f} of a fair share of pairs, {n.token_balance:.3f} of tokens; "
        f"{bytes_text(moved)} move as {n.wire}, {bytes_text(max(n.read, default=0))} read by one "
        "rank at most"
    )


def summary(n: Numbers) -> list[tuple[str, ...]]:
    """What is planned, and what comes of it."""
    shape = n.shape
    heads = f"{shape.heads} query, {shape.heads_kv} K/V; dim {shape.dk} (V: {shape.dv})"
    lengths = size_text(n.mask.seq_q)
    if n.mask.seq_k != n.mask.seq_q:
        lengths += f" queries, {size_text(n.mask.seq_k)} keys"
    ratio = n.bytes_per_kflop
    hide = "nothing to compute"
    if ratio is not None:
        hide = f"{100 * ratio:.3g} GB/s for each 100 TFLOP/s that a rank computes"
    rows: list[tuple[str, ...]] = [
        ("tokens", f"{lengths}, batch {shape.batch}"),
        ("heads", heads),
        ("mask", f"{n.mask.name}, {sum(n.work):,} pairs a head"),
        ("sharding", f"{n.sharding.name} over {n.world} rank(s)"),
        ("pass", "backward" if n.backward else "forward"),
        ("wire", f"{n.wire}, {bytes_text(sum(n.read))} read in all"),
        ("balance", f"{n.balance:.4f} (most pairs of a rank over the mean; 1 is perfect)"),
        ("in lockstep", f"{n.lockstep:.4f} (if all waited for the busiest in every step)"),
        ("tokens' balance", f"{n.token_balance:.4f}"),
        ("to hide reads", hide),
    ]
    if n.plan.topology is not None:
        flat = Numbers.of(
            n.mask, n.plan.q_sharding, n.plan.k_sharding, n.wire, n.shape, backward=n.backward
        )
        across, without = (x.across(n.plan.topology) for x in (n, flat))
        said = f"{n.plan.topology.count} of {n.plan.topology.size} ranks, {bytes_text(across)} "
        said += f"cross between them (without carrying: {bytes_text(without)})"
        rows.insert(4, ("domains", said))
    if n.backward:
        given, added = (gradient_wire(n.wire, summed=summed) for summed in (False, True))
        form = given if n.plan.order.size in (1, n.world) else f"{given}, sums of domains {added}"
        said = f"{bytes_text(sum(n.returned))} returned to their owners in all, in {form}"
        rows.insert(6, ("dK/dV", said))
    return rows


def ranks_table(n: Numbers, *, every: bool) -> list[tuple[str, ...]]:
    """A row a rank; beyond LISTED ranks the least and the most loaded one and the mean."""
    rows: list[tuple[str, ...]] = [
        ("rank", "tokens", "chunks", "steps", "tasks", "pairs", "of mean", "reads", "returns")
    ]
    listed = list(range(n.world))
    if n.world > LISTED and not every:
        order = sorted(listed, key=lambda r: (n.work[r], r))
        listed = sorted({order[0], order[n.world // 2], order[-1]})
    for rank in listed:
        own, shard = n.steps[rank], n.sharding.shards[rank]
        rows.append(
            (
                str(rank),
                str(len(shard)),
                str(len(shard.chunks)),
                str(sum(w.tasks > 0 for w in own)),
                str(sum(w.tasks for w in own)),
                f"{n.work[rank]:,}",
                f"{n.work[rank] / n.fair:.4f}" if n.fair else "-",
                bytes_text(n.read[rank]),
                bytes_text(n.returned[rank]) if n.backward else "-",
            )
        )
    return rows


def schedule_table(n: Numbers) -> list[tuple[str, ...]]:
    """Rank by step: the owner, and the step's share of the rank's pairs; '-' where nothing is."""
    rows = [("rank", *(f"step {t}" for t in range(n.world)))]
    for rank, own in enumerate(n.steps):
        total = n.work[rank] or 1
        cells = (
            f"{w.owner}: {100 * w.pairs / total:.0f}%" if w.tasks else "-" for w in own[: n.world]
        )
        rows.append((str(rank), *cells))
    return rows


def steps_of(n: Numbers, rank: int) -> list[tuple[str, ...]]:
    """The steps of one rank in which it computes or something moves.

    Under a topology also whom it reads from, and who gets its dK/dV.
    """
    relays = n.plan.order.count > 1
    rows: list[tuple[str, ...]] = [
        ("step", "K/V of", "records", "reads", "returns", "tasks", "pairs", "share")
    ]
    total = n.work[rank] or 1
    for t, w in enumerate(n.steps[rank]):
        if not (w.tasks or w.carried or w.returned):
            continue
        here = 0 < t < n.world
        read = f"{bytes_text(w.carried)} carried" if w.carried else bytes_text(w.read)
        given = bytes_text(w.returned) if n.backward and t else "-"
        rows.append(
            (
                str(t),
                f"rank {w.owner}" if here else "-" if t else "its own",
                str(w.records),
                f"{read} from {w.source}" if here and relays else read if here else "-",
                f"{given} to {w.taker}" if w.returned and relays else given,
                str(w.tasks),
                f"{w.pairs:,}",
                f"{100 * w.pairs / total:.1f}%",
            )
        )
    return rows


def as_json(n: Numbers, command: str) -> str:
    """Everything, for programs."""
    body = {
        "command": f"launch/show_plan.py {command}",
        "mask": n.mask.name,
        "seq_q": n.mask.seq_q,
        "seq_k": n.mask.seq_k,
        "sharding": n.sharding.name,
        "wire": n.wire,
        "domains": n.plan.topology.domains if n.plan.topology else None,
        "across": n.across(n.plan.topology) if n.plan.topology else None,
        "backward": n.backward,
        "shape": asdict(n.shape),
        "balance": n.balance,
        "lockstep": n.lockstep,
        "token_balance": n.token_balance,
        "pairs": list(n.work),
        "read": list(n.read),
        "returned": list(n.returned),
        "steps": [[asdict(w) for w in own] for own in n.steps],
    }
    return json.dumps(body, indent=1)


if __name__ == "__main__":
    sys.exit(main())
