"""Kernels that nobody here wrote, compiled without a GPU and executed: the executor's own proof.

Each is called through its package's public interface on CPU tensors; `cute.compile` is replaced, so
that what it returns captures its launches and executes them (capture.py). Results are compared
with float64.

The DSL fixes the architecture when it is imported, so this is a program of its own:

    python -m ptx.known sm_100a attention --dtype bf16 --dim 128 --causal --backward --seq 256
    python -m ptx.known sm_100a mxfp8_gemm --cluster 2 --shape 256 256 256
    python -m ptx.known sm_90a gemm --dtype fp8 --cluster 2

prints one JSON object: errors, executed instructions, seconds, remarks. `--save FILE` keeps the
inputs and outputs (torch.save) for a run of the same kernels on a GPU (on_gpu.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

from .machine import ADVERSARIAL, Schedule

SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}


def _prepare(arch: str) -> None:
    """What the packages ask a GPU or its driver for, answered from `arch`."""
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        FLASH_ATTENTION_ARCH=arch,
        FLASH_ATTENTION_NUM_SMS=str(SMS[arch]),
        QUACK_ARCH=arch.removesuffix("a"),
        QUACK_CACHE_ENABLED="0",
    )
    import torch

    spec = importlib.util.find_spec("quack")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("quack")
    quack = types.ModuleType("quack")  # quack/__init__ imports triton; its submodules do not
    quack.__path__ = list(spec.submodule_search_locations)
    sys.modules["quack"] = quack
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0)

    import cutlass
    import cutlass.utils.hardware_info as hardware_info

    class Hardware:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def get_max_active_clusters(self, size: int = 1, *_: Any, **__: Any) -> int:
            return SMS[arch] // size

        def get_device_multiprocessor_count(self, *_: Any) -> int:
            return SMS[arch]

    cutlass.utils.HardwareInfo = hardware_info.HardwareInfo = Hardware
    # Outputs start as NaN, so that what a kernel leaves out shows.
    torch.use_deterministic_algorithms(True)


class Compiler:
    """Stands in for `cute.compile`; its kernels run as `schedule` says."""

    def __init__(self, arch: str, schedules: Sequence[Schedule], truncate: bool = False) -> None:
        import cutlass.cute as cute

        self.arch = arch
        self.truncate = truncate
        self.schedules = tuple(schedules)
        self.schedule = self.schedules[0]
        self.kernels: list[Any] = []
        self.seconds = 0.0
        self._compile = cute.compile
        cute.compile = self

    def __getitem__(self, options: Any) -> Compiler:
        raise NotImplementedError(f"cute.compile[{options}]")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ptx.capture import Captured

        kwargs["options"] = (kwargs.get("options") or "") + " --keep-ptx"
        captured = Captured(self._compile(*args, **kwargs), SMS[self.arch])
        self.kernels.append(captured)

        def call(*values: Any) -> None:
            start = time.perf_counter()
            captured(*values, schedule=self.schedule, truncate=self.truncate)
            self.seconds += time.perf_counter() - start

        return call

    def report(self, counts: bool) -> dict[str, Any]:
        results = [r for k in self.kernels for r in k.results]
        counted = {
            "counts": {
                next(iter(k.module.kernels))[:80]: k.results[-1].by_opcode | k.results[-1].work
                for k in self.kernels
                if k.results
            }
        }
        return (counted if counts else {}) | {
            "steps": [r.steps for r in results],
            "seconds": round(self.seconds, 2),
            "remarks": sorted({text for r in results for text in r.remarks}),
        }


def under_all(compiler: Compiler, run: Any) -> tuple[dict[str, Any], list[str]]:
    """Outputs under the first schedule, and the names of those that are the same under all."""
    import torch

    first: dict[str, Any] = {}
    same: set[str] = set()
    for schedule in compiler.schedules:
        compiler.schedule = schedule
        outputs = run()
        if not first:
            first, same = outputs, set(outputs)
        same -= {
            name
            for name, x in outputs.items()
            if not torch.equal(x.view(torch.uint8), first[name].view(torch.uint8))
        }
    return first, sorted(same)


def plant(compiler: Compiler, run: Any, right: dict[str, Any], limit: int) -> dict[str, Any]:
    """Mutate the main kernel, of a backward when there is one; see mutate.py."""
    from .mutate import survivors

    kernel = max(compiler.kernels, key=lambda k: ("FlashAttentionBackwardSm" in k.ptx, len(k.ptx)))
    original = kernel.ptx
    executed = set().union(*(r.by_line for r in kernel.results))
    usual = {text for r in kernel.results for text in r.remarks}

    def still_right(ptx: str, schedule: Schedule) -> bool:
        compiler.schedule = schedule
        kernel.use(ptx)
        outputs = run()
        if set(kernel.results[-1].remarks) - usual:
            return False
        # Sums in another order change an output far below 60 dB; a fault in a tile far above.
        return all(decibels(outputs[n], right[n].double()) > 60 for n in right)

    counts, alive = survivors(original, executed, still_right, limit)
    return {
        "caught": {kind: f"{a}/{b}" for kind, (a, b) in counts.items()},
        "survivors": [f"{m.kind}, line {m.line}: {m.before.strip()}" for m in alive],
    }


def decibels(got: Any, want: Any) -> float:
    """Signal to error ratio; NaN anywhere gives NaN."""
    error = ((got.double() - want) ** 2).sum().item()
    return 10 * math.log10((want**2).sum().item() / error) if error else math.inf


def dtype_of(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[name]


def attention(compiler: Compiler, options: argparse.Namespace) -> dict[str, Any]:
    """flash-attn-4's forward, and with --backward its three backward kernels."""
    import quack.dsl  # noqa: F401  # patches CuTe tensor indexing on import
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = dtype_of(options.dtype)
    b, s, h, d = 1, options.seq, options.heads, options.dim
    kv = options.kv_heads or h

    def shapes() -> list[tuple[int, ...]]:
        return [(b, s, h, d), (b, s, kv, d), (b, s, kv, d)]

    with FakeTensorMode():  # compile: tensors of this mode may claim any device
        q, k, v = (torch.empty(x, dtype=dtype, device="cuda") for x in shapes())
        out, lse = interface._flash_attn_fwd(q, k, v, causal=options.causal, return_lse=True)[:2]
        if options.backward:
            interface._flash_attn_bwd(q, k, v, out, out, lse, causal=options.causal)
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.manual_seed(options.seed)
    q, k, v = (torch.randn(x).to(dtype) for x in shapes())
    dout = torch.randn(b, s, h, d).to(torch.bfloat16 if options.dtype == "fp8" else dtype)

    def run() -> dict[str, Any]:
        out, lse = interface._flash_attn_fwd(q, k, v, causal=options.causal, return_lse=True)[:2]
        outputs = {"out": out, "lse": lse}
        if options.backward:
            grads = interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=options.causal)
            outputs |= dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))
        return outputs

    outputs, same = under_all(compiler, run)
    if options.mutants:
        return plant(compiler, run, outputs, options.mutants)

    wide = [x.double().transpose(1, 2).requires_grad_(True) for x in (q, k, v)]
    kk, vv = (x.repeat_interleave(h // kv, 1) for x in wide[1:])
    scores = wide[0] @ kk.transpose(-1, -2) / math.sqrt(d)
    if options.causal:
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    want = scores.softmax(-1) @ vv
    report = {
        "same": same,
        "out": decibels(outputs["out"].transpose(1, 2), want.detach()),
        "lse": (outputs["lse"].double() - scores.logsumexp(-1)).abs().max().item(),
    }
    if options.backward:
        want.backward(dout.double().transpose(1, 2))
        for name, x in zip(("dq", "dk", "dv"), wide, strict=True):
            report[name] = decibels(outputs[name].transpose(1, 2), x.grad)
    if options.save:
        torch.save({"q": q, "k": k, "v": v, "dout": dout} | outputs, options.save)
    return report


def mxfp8_gemm(compiler: Compiler, options: argparse.Namespace) -> dict[str, Any]:
    """quack-kernels' block-scaled GEMM, D = (A * SFA) @ (B * SFB)^T with 1x32 E8M0 scales."""
    import torch

    torch.Tensor.is_cuda = property(lambda _: True)
    from quack.gemm import gemm as quack_gemm

    m, n, k = options.shape
    torch.manual_seed(options.seed)

    def operand(rows: int) -> tuple[Any, Any, Any]:
        payload = torch.randn(1, rows, k).to(torch.float8_e4m3fn)
        scale = torch.randint(120, 134, (1, rows, k // 32), dtype=torch.uint8)
        # Atom of 128 rows x 4 k blocks: [row % 32][row // 32 % 4][k block % 4] (9.7.16.10.7).
        atoms = scale.view(1, rows // 128, 4, 32, k // 128, 4).permute(0, 1, 4, 3, 2, 5)
        wide = payload.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        return payload, atoms.contiguous().view(torch.float8_e8m0fnu), wide

    (a, sfa, wide_a), (b, sfb, wide_b) = operand(m), operand(n)

    def run() -> dict[str, Any]:
        d = torch.empty(1, m, n, dtype=torch.float32)
        quack_gemm(
            a, b, d, None, None, options.tile[0], options.tile[1], options.cluster, 1,
            SFA=sfa, SFB=sfb, bs_format_a="mxfp8_e4m3", bs_format_b="mxfp8_e4m3",
        )  # fmt: skip
        return {"out": d}

    outputs, same = under_all(compiler, run)
    if options.mutants:
        return plant(compiler, run, outputs, options.mutants)
    return {"same": same, "out": decibels(outputs["out"], wide_a @ wide_b.transpose(1, 2))}


def gemm(compiler: Compiler, options: argparse.Namespace) -> dict[str, Any]:
    """quack-kernels' dense GEMM, D = A @ B^T."""
    import torch

    torch.Tensor.is_cuda = property(lambda _: True)
    from quack.gemm import gemm as quack_gemm

    m, n, k = options.shape
    torch.manual_seed(options.seed)
    dtype = dtype_of(options.dtype)
    a, b = (torch.randn(1, rows, k).to(dtype) for rows in (m, n))

    def run() -> dict[str, Any]:
        d = torch.empty(1, m, n, dtype=torch.float32)
        quack_gemm(a, b, d, None, None, *options.tile, options.cluster, 1)
        return {"out": d}

    outputs, same = under_all(compiler, run)
    if options.mutants:
        return plant(compiler, run, outputs, options.mutants)
    if options.save:
        how = {"tile": list(options.tile), "cluster": options.cluster}
        torch.save({"a": a, "b": b} | how | outputs, options.save)
    return {
        "same": same,
        "out": decibels(outputs["out"], a.double() @ b.double().transpose(1, 2)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ptx.known")
    parser.add_argument("arch", choices=sorted(SMS))
    parser.add_argument("kernel", choices=("attention", "gemm", "mxfp8_gemm"))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp8"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=0)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--shape", type=int, nargs=3, default=(256, 256, 256))
    parser.add_argument("--tile", type=int, nargs=2, default=(128, 128))
    parser.add_argument("--cluster", type=int, default=1)
    parser.add_argument("--timing", default="late")
    parser.add_argument("--order", default="forward")
    parser.add_argument("--adversarial", action="store_true", help="under all four schedules")
    parser.add_argument("--sms", type=int, default=0, help="few: a persistent CTA gets many tiles")
    parser.add_argument("--mutants", type=int, default=0, help="plant so many faults of a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counts", action="store_true", help="executed opcodes and unit work")
    parser.add_argument("--truncate", action="store_true", help="numerics nearer to hardware's")
    parser.add_argument("--save")
    options = parser.parse_args(arguments)
    if options.sms:
        SMS[options.arch] = options.sms
    _prepare(options.arch)
    one = Schedule(options.timing, options.order, options.seed)
    compiler = Compiler(
        options.arch, ADVERSARIAL if options.adversarial else (one,), options.truncate
    )
    kernel = {"attention": attention, "gemm": gemm, "mxfp8_gemm": mxfp8_gemm}[options.kernel]
    report = kernel(compiler, options)
    print(json.dumps(report | compiler.report(options.counts)))


if __name__ == "__main__":
    main()
