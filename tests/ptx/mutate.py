"""Plant one fault at a time in a kernel's PTX; `survivors` says which the executor does not notice.

A mutant is caught when some schedule raises `ExecutionError` or changes an output (differently
rounded results do not count: the comparison allows what re-ordered sums may change). Only
instructions that the kernel executes are changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .machine import ADVERSARIAL, ExecutionError, Schedule


@dataclass(frozen=True)
class Mutant:
    """One changed line."""

    kind: str
    line: int
    before: str
    after: str

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)


def _flipped(match: re.Match[str], bit: int) -> str:
    return f"{match[1]}0x{int(match[2], 16) ^ 1 << bit:x};"


# kind -> (what the line must match, what replaces the match)
_RULES: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "drop commit": (r"(@\S+\s+)?tcgen05\.commit[^;]*;", ""),
    "drop wait": (r"mbarrier\.try_wait\S+\s+([^\s,]+),[^;]*;", r"mov.pred \1, 1;"),
    "drop arrive": (r"(@\S+\s+)?mbarrier\.arrive\.shared[^;]*;", ""),
    "drop proxy fence": (r"fence\.proxy\.async[^;]*;", ""),
    "drop wait::st": (r"tcgen05\.wait::st[^;]*;", ""),
    "drop barrier": (r"\bbar(rier)?\.sync\s[^;]*;", ""),
    "drop reducing barrier": (
        r"\bbar(?:rier)?(?:\.cta)?\.red\.\w+(?:\.aligned)?\.pred\s+(\S+),[^;]*,\s*(\S+);",
        r"mov.pred \1, \2;",
    ),
    "drop copy": (r"(@\S+\s+)?cp\.async\.bulk\.tensor[^;]*mbarrier[^;]*;", ""),
    "drop bulk wait": (r"cp\.async\.bulk\.wait_group[^;]*;", ""),
    "drop mma": (r"(@\S+\s+)?tcgen05\.mma[^;]*;", ""),
    "drop wgmma wait": (r"wgmma\.wait_group[^;]*;", ""),
    "relax wgmma wait": (r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;"),
    "drop wgmma": (r"wgmma\.mma_async[^;]*;", ""),
    "drop scale copy": (r"(@\S+\s+)?tcgen05\.cp[^;]*;", ""),
    # Bits of descriptors that the kernels build from constants.
    "flip descriptor stride": (r"0x40004040", "0x40004020"),
    "flip descriptor swizzle": (r"0x40004040", "0x80004040"),
    "flip transpose bit": (r"(idesc, )0x([0-9a-fA-F]+);", lambda m: _flipped(m, 16)),
    "flip type bit": (r"(idesc, )0x([0-9a-fA-F]+);", lambda m: _flipped(m, 7)),
}


def mutants(ptx: str, executed: Iterable[int], limit: int) -> Iterator[Mutant]:
    """At most `limit` of each kind, spread over the kernel."""
    lines = ptx.split("\n")
    live = set(executed)
    for kind, (pattern, replacement) in _RULES.items():
        found = []
        for number, text in enumerate(lines, 1):
            if number in live and re.search(pattern, text):
                after = re.sub(pattern, replacement, text, count=1)
                found.append(Mutant(kind, number, text, after))
        step = max(1, -(-len(found) // limit))
        yield from found[::step]


def survivors(
    ptx: str,
    executed: Iterable[int],
    run: Callable[[str, Schedule], bool],
    limit: int = 12,
) -> tuple[dict[str, list[int]], list[Mutant]]:
    """(kind -> [caught, planted], mutants that no schedule caught).

    `run(ptx, schedule)` executes a mutant and says whether its outputs are still right.
    """
    counts: dict[str, list[int]] = {}
    alive = []
    for mutant in mutants(ptx, executed, limit):
        text = mutant.apply(ptx)
        count = counts.setdefault(mutant.kind, [0, 0])
        count[1] += 1
        for schedule in ADVERSARIAL:
            try:
                right = run(text, schedule)
            except ExecutionError:
                right = False
            if not right:
                count[0] += 1
                break
        else:
            alive.append(mutant)
    return counts, alive
