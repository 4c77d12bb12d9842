"""What users and profilers see of the ring on a GPU: the kernel that is chosen, compile,
checkpointing, NVTX ranges and the trace; and NCCL as far as one card goes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.processes import Job, run_processes
from rings import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringfa4 import ContextParallel
from ringfa4.comm.local import run_ranks
from ringfa4.context import Context
from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.registry import load_kernel
from ringfa4.launch.gpu_time import kind_of
from ringfa4.launch.gpu_trace import COMPUTE, COPIES
from ringfa4.mask import causal
from ringfa4.trace import Recorder

pytestmark = [
    pytest.mark.gpu,
    # flash-attn-4 uses names that the DSL is about to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "ring.py"


def ranks(world: int, fn: Callable[[Context], Any]) -> list[Any]:
    return run_ranks(world, lambda rank, t, c: fn(Context(t, c)), 120.0, "cuda")


def case_of(world: int) -> Case:
    return Case(
        causal(512 * world), world, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, device="cuda"
    )


def leaves(cp: ContextParallel, case: Case) -> list[Tensor]:
    whole = case.tensors()
    return [cp.shard(whole[n], 1).requires_grad_() for n in "qkv"]


def test_auto_takes_the_best_kernel_there_is_and_says_so() -> None:
    case = case_of(2)
    try:
        load_kernel("fa4")
        best = "fa4"
    except MissingLibraryError:
        best = "cuda_aten"

    def rank(context: Context) -> str:
        cp = ContextParallel(context, mask=case.mask)
        cp.attention(*leaves(cp, case)).float().sum().backward()
        return "\n".join(cp.explain())

    for said in ranks(2, rank):
        assert f"kernel {best} (auto; " in said, said
        assert best == "fa4" or "fa4: " in said, "why not the better one"


def test_compile_takes_the_layer_whole() -> None:
    """Case 52 on a GPU: fullgraph, forward and backward."""
    case = case_of(1)

    def rank(context: Context) -> list[tuple[Tensor, ...]]:
        cp = ContextParallel(context, mask=case.mask, kernel="cuda_aten")

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = cp.attention(q * 2, k, v, return_lse=True)
            return out * torch.sigmoid(lse.transpose(1, 2).unsqueeze(-1)).to(out.dtype)

        results = []
        for fn in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            inputs = leaves(cp, case)
            out = fn(*inputs)
            results.append((out.detach(), *torch.autograd.grad(out.float().sum(), inputs)))
        return results

    torch.use_deterministic_algorithms(True)
    try:
        [(eager, compiled)] = ranks(1, rank)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_checkpointing_runs_the_forward_ring_again() -> None:
    """Case 53 on a GPU: the gradients are those without, to the bit."""
    case, world = case_of(2), 2

    def rank(context: Context) -> tuple[int, Tensor, Tensor]:
        recorder = Recorder()
        cp = ContextParallel(context, mask=case.mask, kernel="cuda_aten", observer=recorder)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cp.attention(q, k, v).sin()

        plain, again = leaves(cp, case), leaves(cp, case)
        layer(*plain).float().sum().backward()
        before = sum(span.kind == "compute" for span in recorder.spans)
        checkpoint(layer, *again, use_reentrant=False).float().sum().backward()
        hops = sum(span.kind == "compute" for span in recorder.spans) - before
        assert plain[0].grad is not None and again[0].grad is not None
        return hops, plain[0].grad, again[0].grad

    torch.use_deterministic_algorithms(True)
    try:
        for hops, plain, again in ranks(world, rank):
            assert hops == 3 * world  # forward, again, backward
            assert torch.equal(plain, again)
    finally:
        torch.use_deterministic_algorithms(False)


def test_spans_are_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: names.append(name) or push(name)
    )
    case = case_of(2)

    def rank(context: Context) -> None:
        cp = ContextParallel(context, mask=case.mask, kernel="cuda_aten")
        cp.attention(*(x.detach() for x in leaves(cp, case)))

    ranks(2, rank)
    for name in ("ring/step0/encode", "ring/step0/compute", "ring/step1/wait"):
        assert names.count(name) == 2, name


@pytest.mark.parametrize("world", [1, 3])
def test_a_trace_shows_what_the_gpu_did_for_every_rank(world: int, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    run = [
        sys.executable,
        str(LAUNCH),
        "--seq",
        str(2048 * world),
        "--heads",
        "4",
        "--kv-heads",
        "2",
    ]
    run += ["--head-dim", "64", "--wire", "bf16", "--kernel", "cuda_aten", "--backward"]
    run += ["--trace", str(file), *(["--virtual-ranks", str(world)] if world > 1 else [])]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(file.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(world):
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        named = {row: [e for e in own if rows[rank, e["tid"]] == row] for row in rows.values()}
        computed = [e for e in named[COMPUTE] if kind_of(e["name"]) == "attention"]
        assert len(computed) >= 2 * world, "a call forward and one backward in every step"
        begin = min(e["ts"] for e in named["call"])
        assert all(e["ts"] > begin - 1000 for e in computed), "clocks agree to a millisecond"
        if world > 1:
            copies = [e for e in named[COPIES] if kind_of(e["name"]) == "transfers"]
            assert len(copies) >= world - 1


def test_torch_p2p_over_nccl_alone() -> None:
    """NCCL wants a GPU for every rank: on one card a world of one."""
    jobs = [
        Job("random_calls", {"seed": 0, "calls": 8, "drift_s": 0.0}),
        Job("messages"),
        Job("many_calls", {"calls": 50}),
        Job("ring_as_on_virtual_ranks"),
    ]
    (told,) = run_processes("torch_p2p", 1, jobs)
    assert [line.error for line in told] == [None] * len(jobs), told
