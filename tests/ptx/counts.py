"""What a forward step of the kernels under comparison costs, counted: the cost model's input.

    python -m ptx.counts                       # all, written to launch/sm100_counts.json
    python -m ptx.counts ours_100 ours_103     # these again, the others kept
    python -m ptx.counts --sweep sm_100a    # our kernel's loop at other shares of polynomials

Two counts of each kernel (d 128, no mask). Executed instructions and the work of units, by the
executor, at 1,024 and at 2,048 keys: the difference is what key tiles cost, the rest what a tile of
queries costs once. And the loop of a softmax warp as ptxas scheduled it (sass.py), which the model
replays (ringfa4.launch.cost_replay): two where S comes in halves, that of the late half first.

Each kernel is compiled in a process of its own, since the DSL fixes the architecture at import. The
FlashAttention kernels need flash-attn-4 and quack-kernels, ours this package; all need
nvidia-cutlass-dsl, apache-tvm-ffi and nvdisasm (nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfa4.launch.cost_model import COUNTS
from ringfa4.launch.cost_replay import Op

from . import sass

if TYPE_CHECKING:
    from ringfa4.kernels.sm100.specs import ForwardSpec

ROOT = Path(__file__).parents[1]
KEYS = (1024, 2048)
QUERIES = 512  # of one head: two thread blocks, or a pair


@dataclass(frozen=True)
class Source:
    """A kernel to count. ``ldred``: row maxima by tcgen05.ld.red where the architecture has it."""

    title: str
    arch: str
    dtype: str
    ldred: bool = True

    @property
    def ours(self) -> bool:
        return self.dtype == "mxfp8"


SOURCES = {
    "fa4_bf16_100": Source("FA4 bf16", "sm_100a", "bf16"),
    "fa4_bf16_103": Source("FA4 bf16", "sm_103a", "bf16"),
    "fa4_fp8_100": Source("FA4 fp8", "sm_100a", "fp8"),
    "fa4_fp8_103": Source("FA4 fp8", "sm_103a", "fp8"),
    "fa4_bf16_103_max": Source("FA4 bf16 without ld.red", "sm_103a", "bf16", ldred=False),
    "fa4_fp8_103_max": Source("FA4 fp8 without ld.red", "sm_103a", "fp8", ldred=False),
    "ours_100": Source("ours, MXFP8", "sm_100a", "mxfp8"),
    "ours_103": Source("ours, MXFP8", "sm_103a", "mxfp8"),
}

# What the model reads or a reader checks; moves and control flow are ptxas' to change.
KEPT = re.compile(
    r"(?:ex2|rcp|lg2|fma|max|min|cvt\.rn|tcgen05|cp\.async\.bulk\.tensor|cp\.async\.bulk\.shared"
    r"|fence|vote|st\.shared|ld\.shared)\b|(?:add|mul|sub)\.(?:r\w\.)?(?:sat\.)?f32"
    r"|mma |.*bytes|.*wavefronts"
)


def kept(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: n for name, n in sorted(counts.items()) if n and KEPT.match(name)}


def split(few: Mapping[str, int], many: Mapping[str, int], tiles: int) -> dict[str, Any]:
    """Counters at ``few`` and ``many`` key tiles of each query tile, ``tiles`` more in all.

    ``more`` is what those cost together, ``once`` what is left of ``few`` when as many as it had
    (as many again, KEYS being what they are) are taken away.
    """
    names = sorted({*few, *many})
    more = {n: many.get(n, 0) - few.get(n, 0) for n in names}
    once = {n: few.get(n, 0) - more[n] for n in names}
    return {"tiles": tiles, "more": _nonzero(more), "once": _nonzero(once)}


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {n: x for n, x in counts.items() if x}


# ---- the loop -----------------------------------------------------------------------------------

KINDS = {
    "exp": ("MUFU",),
    "fma2": ("FFMA2", "FADD2", "FMUL2", "HFMA2"),
    "fma": ("FFMA", "FADD", "FMUL"),
    "imad": ("IMAD",),
    "pack": ("F2FP",),
    "load": ("LDTM",),
    "store": ("STTM",),
    "shared": ("LDS", "STS"),
    "alu": (
        *("FMNMX", "FMNMX3", "FSEL", "FSETP", "SEL", "SHF", "LOP3", "LEA", "ISETP", "IADD3"),
        *("PRMT", "VIADD", "VIADDMNMX", "VOTE", "R2P", "MOV", "PLOP3"),
    ),
}
KIND = {mnemonic: kind for kind, names in KINDS.items() for mnemonic in names}


def stream(code: Sequence[sass.Instruction]) -> list[Op]:
    """The loop from its wait for S on, with what it waits for and publishes.

    S is waited for last before the first load of tensor memory; "loaded" is the first arrival after
    the loads; who arrives at a named barrier publishes the factor of O, who waits there meets the
    other warp of the same rows; P is published behind each wait for its stores.
    """
    first = next(n for n, x in enumerate(code) if x.mnemonic == "LDTM")
    waits = [n for n, x in enumerate(code) if x.opcode.startswith("SYNCS.PHASECHK")]
    begin = max([n for n in waits if n < first] or waits)
    ops: list[Op] = []
    stores, loads, given = 0, 0, False
    for x in (*code[begin:], *code[:begin]):
        event = "" if ops else "S"
        stores, loads = stores + (x.mnemonic == "STTM"), loads + (x.mnemonic == "LDTM")
        if x.opcode == "FENCE.VIEW.ASYNC.T" and stores:
            event = "P"
        elif x.opcode.startswith("BAR"):
            event = "factor" if ".ARV" in x.opcode else "pair"
        elif x.opcode.startswith("SYNCS.ARRIVE") and loads and not stores and not given:
            event, given = "loaded", True
        kind = KIND.get(x.mnemonic, "other")
        found = re.search(r"\.x(\d+)", x.opcode) if kind in ("load", "store") else None
        registers = int(found[1]) if found else 0
        ops.append(Op(kind, x.stall, x.results, x.operands, x.waits, registers, event))
    return ops


def of_loops(cubin: bytes, exps: int, warps: int = 1, halves: bool = False) -> dict[str, Any]:
    """What is kept of the loops that execute at least ``exps`` exponentials: of ``warps`` that
    share a tile all have the same, or with ``halves`` the two have one each.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = sass.parse(sass.disassembled(file.name))
    codes = sass.loops(listing, "MUFU", exps, 2 if halves else 1)
    if halves:
        before = [before_meeting(stream(code)) for code in codes]
        if before[0] == before[1]:
            raise ValueError(f"both halves meet after {before[0]} exponentials: which is late?")
        if before[0] > before[1]:
            codes.reverse()
    made = [" ".join(str(op) for op in stream(code)) for code in codes]
    return {
        "halves": halves,
        "sass": [sass.tally(code) for code in codes],
        "loops": made if halves else made * warps,
    }


def before_meeting(ops: Sequence[Op]) -> int:
    """Exponentials before the two warps of the same rows meet: many where S came early."""
    meeting = next(n for n, op in enumerate(ops) if op.event == "pair")
    return sum(op.kind == "exp" for op in ops[:meeting])


# ---- kernels ------------------------------------------------------------------------------------


def fa4(source: Source) -> dict[str, Any]:
    """flash-attn-4's forward of one head, as its package compiles it for long sequences."""
    from .known import SMS, Compiler, _prepare, dtype_of
    from .machine import Schedule

    SMS[source.arch] = 2
    _prepare(source.arch)
    import quack.dsl  # noqa: F401  # patches CuTe tensor indexing on import
    import torch
    from flash_attn.cute import flash_fwd_sm100, interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not source.ldred:
        kernel = flash_fwd_sm100.FlashAttentionForwardSm100
        init = kernel.__init__

        def without(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            self.use_ldred_rowmax = False

        kernel.__init__ = without

    cubins: list[bytes] = []

    class Keeping(Compiler):
        """Keeps the binaries too."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            inner = self._compile

            def compile_and_keep(*a: Any, **o: Any) -> Any:
                made = inner(*a, **o)
                cubins.append(bytes(made.__cubin__))
                return made

            self._compile = compile_and_keep
            with tempfile.TemporaryDirectory() as folder:
                options["options"] = (options.get("options") or "") + (
                    f" --keep-cubin --dump-dir={folder}"
                )
                try:
                    return super().__call__(*args, **options)
                finally:
                    self._compile = inner

    compiler = Keeping(source.arch, [Schedule()])
    dtype = dtype_of(source.dtype)

    def tensors(keys: int) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        lengths = (QUERIES, keys, keys)
        return [torch.randn(1, n, 1, 128, generator=generator).to(dtype) for n in lengths]

    with FakeTensorMode():  # compile: tensors of this mode may claim any device
        q, k, v = (torch.empty(1, n, 1, 128, dtype=dtype, device="cuda") for n in (1024,) * 3)
        interface._flash_attn_fwd(q, k, v, return_lse=True)
    torch.Tensor.is_cuda = property(lambda _: True)

    def run(keys: int) -> Mapping[str, int]:
        interface._flash_attn_fwd(*tensors(keys), return_lse=True)
        result = compiler.kernels[-1].results[-1]
        return result.by_opcode + result.work

    counts = executed(run)
    if len(cubins) != 1:
        raise RuntimeError(f"{len(cubins)} kernels compiled, one expected")
    about = {
        "parts": [0.75, 0.25],
        "shared_scales": False,
        "rescales": source.dtype == "fp8",
    }
    return about | counts | of_loops(cubins[0], 100)


def ours(source: Source, emulated: int | None = None) -> dict[str, Any]:
    """ringfa4.kernels.sm100."""
    import torch
    from sm100 import executed as cases

    from ringfa4.kernels.cute.compile import compile_kernel
    from ringfa4.state import State

    spec = shipped(source.arch)
    if emulated is not None:
        spec = replace(spec, emulated=emulated)
    # Warps that the softmax has for each tile on a scheduler, beside 8 for everything else.
    warps = (spec.THREADS // 32 - 8) // 8
    exps = (128 - 4 * spec.emulated) // warps
    cubin = compile_kernel(spec, source.arch).cubin
    loops = of_loops(cubin, exps * 9 // 10, warps, spec.early)
    about = {"emulated": spec.emulated, "parts": shares(loops["loops"])}
    about |= {"shared_scales": True, "rescales": False}
    captured = cases.captured(spec, source.arch)
    cases.captured = lambda *_: captured  # type: ignore[assignment]

    def run(keys: int) -> Mapping[str, int]:
        case = cases.gaussian(QUERIES, keys, emulated=spec.emulated, ctas=spec.ctas, teams=2)
        state = State(1, QUERIES, 1, 128, device=torch.device("cpu"))
        result = case.execute(state)
        return result.by_opcode + result.work  # type: ignore[no-any-return]

    return about | executed(run) | loops


def shares(loops: Sequence[str]) -> list[float]:
    """Of a product of P, whose publications allow them: every warp has as many blocks of it, and
    publishes them one after another or at once.
    """
    published = [loop.count("/P") for loop in loops]
    first = sum(1 / n for n in published) / len(published)
    later = max(published) - 1
    return [first, *((1 - first) / later for _ in range(later))]


def shipped(arch: str) -> ForwardSpec:
    """How our kernel is compiled for ``arch``, d 128."""
    from ringfa4.kernels.sm100.specs import ForwardSpec

    return ForwardSpec.of(128, 128, arch)


def executed(run: Callable[[int], Mapping[str, int]]) -> dict[str, Any]:
    """Both lengths; the query tiles of one head and 128 x 128 tiles between them."""
    few, many = (kept(Counter(run(keys))) for keys in KEYS)
    tiles = QUERIES // 128 * ((KEYS[1] - KEYS[0]) // 128)
    return {"query_tiles": QUERIES // 128} | split(few, many, tiles)


# ---- the command --------------------------------------------------------------------------------


def count(name: str, emulated: int | None = None) -> dict[str, Any]:
    """In this process; ``emulated`` instead of what our kernel is shipped with."""
    source = SOURCES[name]
    made = ours(source, emulated) if source.ours else fa4(source)
    return {"title": source.title, "arch": source.arch, "dtype": source.dtype} | made


def apart(*arguments: str) -> dict[str, Any]:
    """``python -m ptx.counts`` with these arguments, in a process of its own."""
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    command = [sys.executable, "-W", "ignore", "-m", "ptx.counts", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def about() -> dict[str, Any]:
    packages = ("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")
    return {
        "command": "python -m ptx.counts",
        "keys": list(KEYS),
        "queries": QUERIES,
        "packages": {name: version(name) for name in packages},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ptx.counts")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--print", action="store_true", help="one kernel, in this process")
    parser.add_argument("--emulated", type=int, help="with --print: of 32 exponentials of ours")
    parser.add_argument("--sweep", choices=("sm_100a", "sm_103a"), help="our kernel's loops")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in SOURCES:
            parser.error(f"{name!r} is none of {', '.join(SOURCES)}")
    if options.print:
        (name,) = options.names
        print(json.dumps(count(name, options.emulated)))
    elif options.sweep:
        sweep(options.sweep)
    else:
        kept_ones = json.loads(COUNTS.read_text())["kernels"] if options.names else {}
        made = {name: apart("--print", name) for name in options.names or SOURCES}
        kernels = {name: made.get(name) or kept_ones[name] for name in SOURCES}
        COUNTS.write_text(json.dumps({"about": about(), "kernels": kernels}, indent=1) + "\n")
        print(COUNTS)


def sweep(arch: str) -> None:
    """Cycles of a tile for each share of polynomials, as the cost model has them."""
    from ringfa4.launch.cost_model import counted, modelled

    name = next(n for n, s in SOURCES.items() if s.ours and s.arch == arch)
    print(f"{arch}: emulated of 32, modelled cycles of a 128x128 tile, low middle high")
    for emulated in range(0, 17, 2):
        made = apart("--print", name, "--emulated", str(emulated))
        cycles = modelled(counted(name, made))
        print(
            f"{emulated:3}  {cycles.low:6.0f} {cycles.middle:6.0f} {cycles.high:6.0f}", flush=True
        )


if __name__ == "__main__":
    main()
