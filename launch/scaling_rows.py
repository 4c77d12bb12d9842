"""What `bench.py --scaling` measures: problems, setups, and the rows that they span.

    problem   SEQ/HEADS:KV_HEADS/MASK              256K/16:16/causal
    setup     local/WIRE/KERNEL                    the ring's work on one rank, nothing transferred
              ring/TRANSPORT/WIRE/KERNEL           the ring
              rival/NAME/DTYPE/KERNEL              what others do on the same GPUs
    row       PROBLEM/SETUP                        256K/16:16/causal/ring/symm_mem/mxfp8/fa4

Rows go by importance, so that a run cut short has measured what matters most. Problems and names
are given in order of importance; a row's round is that of its problem (two problems a round) plus
that of its setup, rounds go one after the other, and a local row comes before the rings that are
compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ringfa4 import mask as masks
from ringfa4.launch.sizes import parse_size, size_text
from ringfa4.mask import Mask
from ringfa4.wire import Direction

MASKS = {"causal": masks.causal, "full": masks.full}

BACKWARD_FLOPS = 2.5
"""Matrix products of backward (S, dP, dV, dQ, dK) over those of forward (S, O)."""

PROBLEMS_A_ROUND = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention problem; batch 1."""

    seq: int
    heads: int
    kv_heads: int
    mask: str

    def __str__(self) -> str:
        return f"{size_text(self.seq).split()[0]}/{self.heads}:{self.kv_heads}/{self.mask}"

    @classmethod
    def parse(cls, text: str) -> Problem:
        """``"256K/64:8/causal"``. ValueError, quoting it, for anything else."""
        seq, _, rest = text.partition("/")
        heads, _, mask = rest.partition("/")
        counts = heads.split(":")
        if len(counts) != 2 or not all(n.isdecimal() and int(n) for n in counts):
            raise ValueError(f"{text!r} is no problem: SEQ/HEADS:KV_HEADS/MASK")
        if mask not in MASKS:
            raise ValueError(f"{text!r}: {mask!r} is none of {', '.join(MASKS)}")
        return cls(parse_size(seq), int(counts[0]), int(counts[1]), mask)

    def mask_of(self) -> Mask:
        return MASKS[self.mask](self.seq)

    def flops(self, direction: Direction, head_dim: int) -> float:
        """Of the allowed pairs: 4 head_dim a pair and query head, backward 2.5 times that."""
        forward = 4.0 * head_dim * self.heads * self.mask_of().area
        return forward * (BACKWARD_FLOPS if direction == "backward" else 1)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a problem is computed. ``name``: a transport (ring) or a rival; "" for local rows.

    Of rivals, ``wire`` is the inputs' dtype: their K and V travel as they are.
    """

    kind: str
    name: str
    wire: str
    kernel: str

    def __str__(self) -> str:
        return "/".join(x for x in (self.kind, self.name, self.wire, self.kernel) if x)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    problem: Problem
    setup: Setup

    @property
    def name(self) -> str:
        return f"{self.problem}/{self.setup}"

    @property
    def local(self) -> str:
        """Name of the row that this one is compared with."""
        return f"{self.problem}/{Setup('local', '', self.setup.wire, self.setup.kernel)}"


@dataclass(frozen=True)
class Grid:
    """All that is asked for, each in order of importance."""

    problems: Sequence[Problem]
    transports: Sequence[str]
    wires: Sequence[str]
    kernels: Sequence[str]
    rivals: Sequence[str]
    dtype: str

    def rows(self) -> list[Row]:
        """Most important first."""
        found = [
            (number // PROBLEMS_A_ROUND + later, number, Row(problem, setup))
            for number, problem in enumerate(self.problems)
            for later, setup in self._setups()
        ]
        found.sort(key=lambda entry: entry[:2])  # stable: setups stay in order
        return [row for _, _, row in found]

    def _setups(self) -> Iterable[tuple[int, Setup]]:
        """(round, setup): the first of each kind, then their variants, then other kernels."""
        for k, kernel in enumerate(self.kernels):
            later = 2 * k
            for wire in self.wires:
                yield later, Setup("local", "", wire, kernel)
            for t, transport in enumerate(self.transports):
                for wire in self.wires:
                    yield later + (t > 0), Setup("ring", transport, wire, kernel)
            for r, rival in enumerate(self.rivals):
                yield later + (r > 1), Setup("rival", rival, self.dtype, kernel)


def selected(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Rows whose name matches a pattern (``*`` matches anything). ValueError for one that none
    does.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            some = ", ".join(row.name for row in rows[:3])
            raise ValueError(f"--rows {pattern!r} matches none of {len(rows)} rows: {some}, ...")
    if not patterns:
        return list(rows)
    return [row for row in rows if any(fnmatchcase(row.name, p) for p in patterns)]
