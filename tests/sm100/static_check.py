"""The SM100 kernel under sentryward, a static verifier of PTX: every schedule of one launch.

It proves that barriers behave alike in every schedule (no deadlock) and that conflicting accesses
to shared, tensor and global memory are ordered. Control flow must not depend on memory, and this
kernel walks tables: so the tables of the launch are written into the PTX, each read of a line
becoming constants (one item, one band, all rows written; the same for every work of the launch).
V holds no NaN: what the guard finds is a constant too (marking takes atomics, which the verifier
does not know). Whether references move depends on data, so that is one of the launch's choices; for
what else does, the verifier takes one side (its assumption "representative branches").

Needs nvidia-cutlass-dsl and sentryward; a launch takes minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ringfa4.kernels.cute.compile import Compiled, compile_kernel
from ringfa4.kernels.sm100.launch import Arguments, tensor_maps
from ringfa4.kernels.sm100.specs import ATOM, EMULATED, ROWS, WRITE, ForwardSpec
from ringfa4.kernels.sm100.worklist import UNBOUNDED

POINTERS = ("q_records", "kv_records", "acc", "max", "sum", "items", "segments", "modes")
TYPES = {"q": "u64", "i": "u32", "f": "f32"}


@dataclass(frozen=True)
class Shape:
    """``rows`` <= 256 ``ctas`` queries, one K/V head; a work for each of ``heads``, on ``teams``
    thread blocks, or pairs of them where ``ctas`` is 2.

    ``moves``: some row's reference moves in each record, rather than none in any.
    """

    dk: int = 64
    dv: int = 64
    rows: int = 256
    keys: int = 256
    heads: int = 1
    teams: int = 1
    ctas: int = 1
    causal: bool = False
    moves: bool = True

    @property
    def spec(self) -> ForwardSpec:
        return ForwardSpec(self.dk, self.dv, EMULATED["sm_100a"], self.ctas)

    @property
    def item(self) -> tuple[int, ...]:
        return 0, 0, -(-self.rows // (ROWS * self.ctas)), 0, 0, self.rows, 0, 1

    @property
    def segment(self) -> tuple[int, ...]:
        high = self.keys - self.rows if self.causal else UNBOUNDED
        return 0, 0, self.rows, 0, self.keys, -UNBOUNDED, high, 0

    @property
    def arguments(self) -> Arguments:
        """Addresses are far apart and otherwise free: the verifier knows objects, not addresses."""
        atoms = -(-self.dk // 128) * ATOM
        heads, rows, row = self.heads, self.rows, self.heads * self.dv * 4
        payloads = ROWS * (self.dk + self.dv)
        return Arguments(
            q_records=1 << 28, q_record_bytes=heads * (ROWS * self.dk + atoms), q_payload=0,
            q_scales=heads * ROWS * self.dk, n_q_records=-(-rows // ROWS),
            kv_records=2 << 28, kv_record_bytes=payloads + atoms + ATOM, k_payload=0,
            v_payload=ROWS * self.dk, k_scales=payloads, v_scales=payloads + atoms,
            n_kv_records=-(-self.keys // ROWS), batch=1, heads_q=heads, heads_kv=1,
            acc=3 << 28, max=4 << 28, sum=5 << 28, acc_b=rows * row, acc_s=row,
            row_b=heads * rows * 4, row_h=rows * 4,
            items=6 << 28, segments=7 << 28, modes=8 << 28, modes_row=rows,
            n_items=1, scale=0.125, ctas=self.ctas * self.teams,
        )  # fmt: skip


@lru_cache(maxsize=8)
def compiled(spec: ForwardSpec) -> Compiled:
    return compile_kernel(spec, "sm_100a")


def program(shape: Shape) -> str:
    """The kernel's PTX with what a launch's control flow depends on in it, in words the verifier
    knows.
    """
    ptx = baked(compiled(shape.spec).ptx, shape.item, shape.segment)
    ptx, scans = NAN_BYTES.subn(r"mov.b32 \1, 0;", ptx)
    assert scans, "the kernel looks for NaN of V in another way"
    # It does not know barriers that reduce; what they would find is the launch's choice.
    ptx, meetings = REDUCING.subn(rf"bar.sync \1; mov.b32 \2, {int(shape.moves)};", ptx)
    assert meetings, "the warps of the same rows meet in another way"
    # It orders a product behind the copy of its scales (9.7.16.6.2: behind any) where they begin at
    # the same column; those of keys 64 to 127 begin two columns on.
    scales = {found[1] for found in PRODUCT_SCALES.finditer(ptx)}
    ptx = CONSTANT_ADDED.sub(
        lambda x: f"{x[1]}{int(x[3]) // 4 * 4};" if x[2] in scales else x[0], ptx
    )
    # It follows the address of tensor memory through an addition, not through this instruction.
    ptx = MULTIPLY_ADD.sub(
        r"{ .reg .b32 product; mul.lo.s32 product, \2, \3; add.s32 \1, \4, product; }", ptx
    )
    # It does not know this hint of a matrix product, which says nothing of order.
    ptx = ptx.replace(".collector::a::discard", "")
    if shape.ctas == 1:
        return ptx
    # Between thread blocks it asks for the scope that the manual asks for, also where the arrival
    # hands over nothing but tensor memory and what a unit reads in place.
    ptx = ptx.replace("arrive.shared::cluster", "arrive.release.cluster.shared::cluster")
    return ptx.replace("parity.shared.b64", "parity.acquire.cluster.shared::cta.b64")


NAN_BYTES = re.compile(
    r"\{ \.reg \.b32 t; and\.b32 t, %r\d+, 0x7f7f7f7f; [^}]*and\.b32 (%r\d+), t, 0x01010101; \}"
)
REDUCING = re.compile(r"bar\.red\.or\.pred q, (%r\d+, \d+), p; selp\.b32 (%r\d+), 1, 0, q;")
PRODUCT_SCALES = re.compile(r"tcgen05\.mma\.[^;]*, \[(%r\d+)\], p;")
CONSTANT_ADDED = re.compile(r"(add\.s32\s+(%r\d+), %r\d+, )(\d+);")
MULTIPLY_ADD = re.compile(r"mad\.lo\.s32\s+(%r\d+), (%r\d+), (-?\d+|%r\d+), (%r\d+);")


def verify(shape: Shape, ptx: str, folder: Path, timeout: float) -> dict[str, Any]:
    """The verifier's report of a launch of ``ptx``."""
    from sentryward import verify as run

    (folder / "kernel.ptx").write_text(ptx)
    (folder / "launch.json").write_text(json.dumps(configuration(shape, ptx)))
    report: dict[str, Any] = run(
        folder / "kernel.ptx", input=folder / "launch.json", timeout_seconds=timeout
    )
    return report


def configuration(shape: Shape, ptx: str) -> dict[str, Any]:
    """What is launched, as sentryward's input (schema spverify.kernel-input/v1)."""
    names = re.findall(r"\.param [^\n]*?(\w+_param_\d+)", ptx[: ptx.index(")\n")])
    arguments = shape.arguments
    scalars = list(
        zip(names[3:], ForwardSpec.DEVICE, ForwardSpec.PARAMETERS.replace("128s", ""), strict=True)
    )
    maps = zip(names, ("q_records", "kv_records", "kv_records"), strict=False)
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": compiled(shape.spec).entry,
        "launch": {
            "grid_dim": [shape.ctas * shape.teams, 1, 1],
            "block_dim": [ForwardSpec.THREADS, 1, 1],
            "cluster_dim": [shape.ctas, 1, 1],
            "dynamic_shared_bytes": shape.spec.SHARED,
        },
        "arguments": [
            {"parameter": parameter, "type": TYPES[letter], "value": getattr(arguments, name)}
            for parameter, name, letter in scalars
            if name not in POINTERS
        ],
        "declarations": [
            {"parameter": parameter, "type": "pointer", "space": "global", "object": name}
            for parameter, name, _ in scalars
            if name in POINTERS
        ],
        "tma_descriptors": [
            {
                "parameter": parameter,
                "object": name,
                "element_type": "u8",
                "rank": len(m.extents),
                "global_shape": list(m.extents),
                "global_strides_bytes": list(m.strides),
                "box_shape": list(m.box),
                "element_strides": [1] * len(m.extents),
                "swizzle": f"{m.swizzle}B",
                "interleave": "none",
                "oob_fill": "zero",
            }
            for (parameter, name), m in zip(
                maps, tensor_maps(shape.spec, arguments), strict=True
            )
        ],
        "assumptions": {"representative_branches": True},
    }  # fmt: skip


TABLE = re.compile(r"ld\.global\.nc\.v4\.b32 \{([^}]*)\}, \[(%\w+)\];")
MODE = re.compile(
    r"\{ \.reg \.pred p; setp\.ne\.s32 p, (%r\d+), 0; mov\.b32 (%r\d+), 0; "
    r"@p ld\.global\.u8 \2, \[[^\]]*\]; \}"
)


def baked(ptx: str, item: Sequence[int], segment: Sequence[int]) -> str:
    """Reads of the tables as constants; a line is read in two halves, the lower one first."""
    definitions = _definitions(ptx)
    at = {str(3 + n): name for n, name in enumerate(ForwardSpec.DEVICE)}
    halves: list[str] = []

    def constants(read: re.Match[str]) -> str:
        tables = {at[n] for n in _parameters(read[2], definitions, set())} & {"items", "segments"}
        assert len(tables) == 1, f"{read[0]} reads one of the tables, not {tables}"
        (table,) = tables
        half = len(halves) % 2
        assert not half or halves[-1] == table, "a line is read in two halves"
        halves.append(table)
        values = (item if table == "items" else segment)[4 * half : 4 * half + 4]
        registers = (name.strip() for name in read[1].split(","))
        return "\n".join(
            f"mov.b32 {register}, {value};"
            for register, value in zip(registers, values, strict=True)
        )

    ptx = TABLE.sub(constants, ptx)
    ptx, modes = MODE.subn(rf"mov.b32 \2, {WRITE};", ptx)
    assert halves and modes, "the kernel reads its tables in another way"
    return ptx


def _definitions(ptx: str) -> dict[str, list[tuple[str, str]]]:
    """Register -> (opcode, sources) of the instructions that write it."""
    found: dict[str, list[tuple[str, str]]] = {}
    instruction = re.compile(
        r"(?:^|[;{]\s*|\t)(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|[%\w|]+)\s*,\s*([^;]*);", re.M
    )
    for opcode, written, sources in instruction.findall(ptx):
        for register in re.findall(r"%\w+", written):
            found.setdefault(register, []).append((opcode, sources))
    return found


def _parameters(
    register: str, definitions: dict[str, list[tuple[str, str]]], seen: set[str]
) -> set[str]:
    """Numbers of the parameters that an address is made of, but for what was read from memory."""
    if register in seen:
        return set()
    seen.add(register)
    found: set[str] = set()
    for opcode, sources in definitions.get(register, ()):
        if opcode.startswith("ld.param"):
            found |= set(re.findall(r"_param_(\d+)", sources))
        elif not opcode.startswith("ld."):
            for source in re.findall(r"%\w+", sources):
                found |= _parameters(source, definitions, seen)
    return found
