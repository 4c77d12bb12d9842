"""What ptxas made of a kernel: instructions with their scheduling, and the loop that matters.

    (code,) = loops(parse(disassembled("kernel.cubin")), "MUFU", least=100)

`nvdisasm -c -hex` (the nvidia-cuda-nvdisasm wheel) prints each instruction's 128 bits. ptxas has
scheduled it: bits 105-108 are the cycles to the warp's next instruction, bits 110-112 and 113-115
the scoreboards that its results and its operands hold (7: none), bits 116-121 those it waits for.
The layout is that of every architecture since Volta.

Executed instructions are counted in PTX (counts.py); ptxas packs, fuses and moves them, so a cost
model of issue slots and latencies needs these.
"""

from __future__ import annotations

import heapq
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

NONE = 7


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``target`` is the label that it may branch to."""

    opcode: str
    text: str
    predicated: bool
    target: str | None
    stall: int
    results: int
    operands: int
    waits: int

    @property
    def mnemonic(self) -> str:
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Listing:
    """Instructions in order, and where labels point."""

    code: Sequence[Instruction]
    labels: dict[str, int]


def disassembler() -> str | None:
    """Path of nvdisasm, or None."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = find_spec("nvidia")
    for root in () if spec is None else spec.submodule_search_locations or ():
        for path in sorted(Path(root).glob("*/bin/nvdisasm")):
            if os.access(path, os.X_OK):
                return str(path)
    return None


def disassembled(cubin: Path | str) -> str:
    program = disassembler()
    if program is None:
        raise FileNotFoundError("nvdisasm (pip install nvidia-cuda-nvdisasm)")
    command = [program, "-c", "-hex", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_CODE = re.compile(r"\s+/\*[0-9a-f]{4,6}\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/")
_HIGH = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def parse(text: str) -> Listing:
    """The listing of one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    pending: str | None = None
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.match(line):
            assert pending is None, line
            pending = found[1].strip()
        elif pending is not None and (high := _HIGH.match(line)):
            code.append(_instruction(pending, int(high[1], 16)))
            pending = None
    if not code:
        raise ValueError("no instruction in the listing; was it printed with -c -hex?")
    return Listing(code, labels)


def _instruction(text: str, high: int) -> Instruction:
    words = text.split()
    predicated = words[0].startswith("@")
    opcode = words[1] if predicated else words[0]
    target = _TARGET.search(text) if opcode.startswith(("BRA", "CALL", "BSYNC")) else None
    control = high >> 41
    # BRA.U UP0, `(label) takes its predicate as an operand.
    conditional = predicated or bool(re.search(r"BRA\S*\s+!?U?P\d", text))
    return Instruction(
        opcode,
        text,
        conditional,
        target[1] if target else None,
        stall=control & 15,
        results=control >> 5 & 7,
        operands=control >> 8 & 7,
        waits=control >> 11 & 63,
    )


def loops(listing: Listing, mnemonic: str, least: int, number: int = 1) -> list[list[Instruction]]:
    """The ``number`` shortest ways round that execute ``mnemonic`` at least ``least`` times, each
    in blocks of its own.

    So masked copies of a loop, rescaling and other excursions are left out: what is counted is the
    path of a full tile on which nothing rare happens.
    """
    blocks = _blocks(listing)
    starts = sorted(blocks)
    weight = {s: blocks[s][0] - s for s in starts}
    count = {s: sum(x.mnemonic == mnemonic for x in listing.code[s : blocks[s][0]]) for s in starts}
    found: list[list[int]] = []
    while len(found) < number:
        best: list[int] | None = None
        for root in starts:
            if not count[root]:
                continue
            cycle = _shortest_cycle(root, blocks, weight)
            if cycle is None or sum(count[s] for s in cycle) < least:
                continue
            if best is None or sum(weight[s] for s in cycle) < sum(weight[s] for s in best):
                best = cycle
        if best is None:
            raise ValueError(f"{len(found)} loops with {least} {mnemonic}, {number=}")
        found.append(best)
        # What they share, if anything, has none of the mnemonic.
        blocks = {s: x for s, x in blocks.items() if not (s in best and count[s])}
        starts = sorted(blocks)
    ends = _blocks(listing)
    return [[x for s in cycle for x in listing.code[s : ends[s][0]]] for cycle in found]


def _blocks(listing: Listing) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Basic blocks: start -> (end, starts of the blocks that may follow)."""
    code, labels = listing.code, listing.labels
    jumps = [n for n, x in enumerate(code) if x.target is not None or x.mnemonic == "EXIT"]
    cuts = sorted({0, len(code), *labels.values(), *(n + 1 for n in jumps)})
    blocks = {}
    for start, end in pairwise(cuts):
        last = code[end - 1]
        after: list[int] = []
        if last.target is not None and last.target in labels:
            after.append(labels[last.target])
        ends = last.mnemonic == "EXIT" or (last.mnemonic == "BRA" and last.target is not None)
        if (not ends or last.predicated) and end < len(code):
            after.append(end)
        blocks[start] = (end, tuple(after))
    return blocks


def _shortest_cycle(
    root: int, blocks: dict[int, tuple[int, tuple[int, ...]]], weight: dict[int, int]
) -> list[int] | None:
    queue: list[tuple[int, int, tuple[int, ...]]] = [(weight[root], root, (root,))]
    seen: set[int] = set()
    while queue:
        cost, block, path = heapq.heappop(queue)
        for after in blocks[block][1]:
            if after == root:
                return list(path)
            if after not in seen and after in blocks:
                seen.add(after)
                heapq.heappush(queue, (cost + weight[after], after, (*path, after)))
    return None


def tally(code: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by mnemonic, most frequent first."""
    counts: dict[str, int] = {}
    for x in code:
        counts[x.mnemonic] = counts.get(x.mnemonic, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
