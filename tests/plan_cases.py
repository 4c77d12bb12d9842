"""Masks and shardings for property tests, and what they mean pair by pair.

Small sizes only: every check enumerates the (i, j) pairs, from definitions that share no code with
:mod:`ringfa4.mask`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hypothesis import strategies as st

from ringfa4 import mask as masks
from ringfa4 import shard as sharding
from ringfa4.mask import Band, Mask
from ringfa4.plan import Plan, Step, Task
from ringfa4.shard import Sharding

Pair = tuple[int, int]


def pairs(band: Band) -> set[Pair]:
    """The pairs of a band, from its inequalities."""
    return {
        (i, j)
        for i in range(band.q0, band.q1)
        for j in range(band.k0, band.k1)
        if (band.lo is None or band.lo <= j - i) and (band.hi is None or j - i <= band.hi)
    }


def allowed(mask: Mask, row: int) -> set[Pair]:
    """What row ``row`` of a mask allows."""
    return {pair for band in mask.rows[row] for pair in pairs(band)}


def where(seq_q: int, seq_k: int, rule: Callable[[int, int], bool]) -> set[Pair]:
    """The pairs of a seq_q x seq_k attention for which ``rule`` holds."""
    return {(i, j) for i in range(seq_q) for j in range(seq_k) if rule(i, j)}


def task_pairs(plan: Plan, rank: int, step: Step, task: Task) -> Iterator[Pair]:
    """Global positions of a task's pairs, band by band (so twice, if two bands overlap)."""
    q = plan.q_sharding.shards[rank].chunks[task.q_chunk].positions()
    k = plan.k_sharding.shards[step.owner].chunks[task.k_chunk].positions()
    for band in task.bands:
        for a, b in pairs(band):
            yield q[a], k[b]


@st.composite
def bands(draw: st.DrawFn) -> Band:
    """Any band, empty ones and bounds that bind nowhere included."""
    q0, k0 = draw(st.integers(-5, 6)), draw(st.integers(-5, 6))
    q1, k1 = q0 + draw(st.integers(-1, 9)), k0 + draw(st.integers(-1, 9))
    near = st.none() | st.integers(-9, 9)  # of the diagonal through (q0, k0)
    lo, hi = (None if d is None else d + k0 - q0 for d in (draw(near), draw(near)))
    if lo is not None and hi is not None and draw(st.integers(0, 3)):
        lo, hi = min(lo, hi), max(lo, hi)
    return Band(q0, q1, k0, k1, lo, hi)


@st.composite
def cu_seqlens(draw: st.DrawFn, seq: int, documents: int) -> list[int]:
    """Cumulative lengths of ``documents`` documents that end at or before ``seq``."""
    inner = draw(st.lists(st.integers(0, seq), min_size=documents, max_size=documents))
    return [0, *sorted(inner)]


@st.composite
def single_masks(draw: st.DrawFn, seq_q: int, seq_k: int) -> Mask:
    """One row of any kind that takes these lengths."""
    align = draw(st.sampled_from(["top-left", "bottom-right"]))
    reach = st.none() | st.integers(0, 6)
    kinds = ["full", "causal", "window", "documents"]
    if seq_q == seq_k:
        kinds += ["prefix", "chunked"]
    match draw(st.sampled_from(kinds)):
        case "full":
            return masks.full(seq_q, seq_k)
        case "causal":
            return masks.causal(seq_q, seq_k, align)
        case "window":
            return masks.window(seq_q, seq_k, left=draw(reach), right=draw(reach), align=align)
        case "documents":
            number, causal = draw(st.integers(1, 5)), draw(st.booleans())
            return masks.documents(
                draw(cu_seqlens(seq_q, number)),
                draw(cu_seqlens(seq_k, number)),
                causal=causal,
                left=draw(reach),
                right=None if causal else draw(reach),
                align=align,
                seq_q=seq_q,
                seq_k=seq_k,
            )
        case "prefix":
            return masks.prefix_lm(seq_q, draw(st.integers(0, seq_q)))
        case _:
            return masks.chunked(seq_q, draw(st.integers(1, 9)), causal=draw(st.booleans()))


@st.composite
def any_mask(draw: st.DrawFn, longest: int = 20) -> Mask:
    """Self or cross attention, one shared row or a stack."""
    seq_q = draw(st.integers(0, longest))
    seq_k = seq_q if draw(st.booleans()) else draw(st.integers(0, longest))
    rows = draw(st.integers(1, 3))
    found = [draw(single_masks(seq_q, seq_k)) for _ in range(rows)]
    return found[0] if rows == 1 else masks.stack(found)


@st.composite
def unit_sharding(draw: st.DrawFn, mask: Mask, side: str, world: int) -> Sharding:
    """Any sharding of stride 1."""
    seq = mask.seq_q if side == "q" else mask.seq_k
    match draw(st.sampled_from(["contiguous", "zigzag", "uneven", "balanced"])):
        case "contiguous":
            return sharding.contiguous(seq, world)
        case "zigzag":
            return sharding.zigzag(seq, world)
        case "balanced":
            block = draw(st.none() | st.integers(1, 7))
            return sharding.balanced(mask, world, side=side, block=block)
        case _:
            cuts = draw(st.lists(st.integers(0, seq), min_size=world - 1, max_size=world - 1))
            edges = [0, *sorted(cuts), seq]
            return sharding.uneven(b - a for a, b in itertools.pairwise(edges))


@st.composite
def plans(draw: st.DrawFn, longest: int = 20) -> Plan:
    """Any mask under any pair of shardings that fits it, K cut at documents or not."""
    mask, world = draw(any_mask(longest)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        q, k = sharding.striped(mask.seq_q, world), sharding.striped(mask.seq_k, world)
    else:
        q, k = draw(unit_sharding(mask, "q", world)), draw(unit_sharding(mask, "k", world))
    if draw(st.booleans()):
        k = k.split(masks.document_cuts(mask, at_least=draw(st.integers(1, 6))))
    return Plan(mask, q, k)
