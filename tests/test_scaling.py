"""launch/bench.py --scaling: its rows, what is measured, and how a run survives a bad row."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from distributed.pool import gloo_pool
from rings import Case, check
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4.context import close_contexts, context_for
from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.native import NativeKernel, Rows
from ringfa4.launch import scaling, scaling_journal, scaling_rivals, scaling_runs
from ringfa4.launch.bench import main
from ringfa4.launch.peers import Alone
from ringfa4.launch.scaling_journal import DIED, LATE_EXIT, Journal
from ringfa4.launch.scaling_local import recorded
from ringfa4.launch.scaling_rivals import CpuLibrary, Share
from ringfa4.launch.scaling_rows import Grid, Problem, Row, Setup, selected
from ringfa4.launch.scaling_runs import Bench, measure
from ringfa4.launch.scaling_table import compare, table
from ringfa4.launch.spans import STANDING, DeviceRecorder, seconds
from ringfa4.mask import Band
from ringfa4.testing.oracles import attention
from ringfa4.trace import Span

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


# ---- rows ---------------------------------------------------------------------------------------


def test_a_problem_is_written_as_it_is_read() -> None:
    problem = Problem.parse("256K/64:8/full")
    assert problem == Problem(1 << 18, 64, 8, "full") and str(problem) == "256K/64:8/full"
    assert str(Problem.parse("1000/2:1/causal")) == "1000/2:1/causal"
    assert Problem(4, 3, 1, "causal").flops("forward", 8) == 10 * 3 * 4 * 8
    assert Problem(4, 3, 1, "full").flops("backward", 8) == 16 * 3 * 4 * 8 * 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("256K", "'256K' is no problem"),
        ("256K/16/causal", "'256K/16/causal' is no problem"),
        ("256K/16:0/causal", "is no problem"),
        ("256K/16:x/causal", "is no problem"),
        ("256K/16:8/prefix", "'prefix' is none of causal, full"),
        ("2X/16:8/full", "'2X' is not a size"),
    ],
)
def test_what_is_no_problem_is_quoted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem.parse(text)


GRID = Grid(
    problems=[Problem(seq, 2, 2, "causal") for seq in (1024, 2048, 4096)],
    transports=["one", "two"],
    wires=["mxfp8", "bf16"],
    kernels=["fast", "steady"],
    rivals=["a", "b", "c"],
    dtype="bf16",
)


def test_rows_come_by_importance() -> None:
    rows = GRID.rows()
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) == 3 * 2 * (2 + 2 * 2 + 3)
    first = [name.removeprefix("1K/2:2/causal/") for name in names[:6]]
    assert first == [
        "local/mxfp8/fast", "local/bf16/fast", "ring/one/mxfp8/fast", "ring/one/bf16/fast",
        "rival/a/bf16/fast", "rival/b/bf16/fast",
    ]  # fmt: skip

    def at(name: str) -> int:
        return names.index(name)

    # The second problem shares the first round; variants of the first problem wait for it.
    assert at("2K/2:2/causal/rival/b/bf16/fast") < at("1K/2:2/causal/ring/two/mxfp8/fast")
    assert at("1K/2:2/causal/ring/two/mxfp8/fast") < at("4K/2:2/causal/local/mxfp8/fast")
    assert at("4K/2:2/causal/rival/b/bf16/fast") < at("1K/2:2/causal/local/mxfp8/steady")
    for row in rows:
        assert row.local in names and at(row.local) <= at(row.name), row.name


def test_rows_are_selected_by_pattern() -> None:
    rows = GRID.rows()
    assert selected(rows, []) == rows
    found = selected(rows, ["1K/*/ring/two/*", "*/rival/c/*"])
    assert [row for row in rows if row in found] == found
    assert len(found) == 2 * 2 + 3 * 2
    with pytest.raises(ValueError, match=r"'\*/ring/three/\*' matches none of 54 rows: 1K/2:2"):
        selected(rows, ["*", "*/ring/three/*"])


# ---- the journal --------------------------------------------------------------------------------


def test_a_journal_goes_on_behind_what_ended_it(tmp_path: Path) -> None:
    path = str(tmp_path / "out.json")
    first = Journal(path, {"torch": "w"}, resume=True)  # there is nothing yet
    first.note("a", "done", result={"x": 1})
    first.note("b", "refused", why="no")
    first.note("c", "left out", why="no time")
    first.note("d", "begun")
    assert json.loads(Path(path).read_text())["rows"] == first.rows
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    again = Journal(path, {"torch": "x"}, resume=True)
    assert again.about == {"torch": "x"}
    assert again.rows["a"] == {"state": "done", "result": {"x": 1}} and "b" in again
    assert again.rows["d"] == {"state": "late", "why": DIED}
    assert "c" not in again  # there may be time now
    assert Journal(path, {}, resume=False).rows == {}
    assert Journal(None, {}, resume=True).rows == {}


def test_a_row_past_its_limit_ends_the_process_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import threading

    ended, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(scaling_journal.os, "_exit", leave)
    journal = Journal(str(tmp_path / "out.json"), {}, resume=False)
    with journal.limit("quick", 30.0):
        pass
    with journal.limit("slow", 0.01):
        assert ended.wait(20.0)
    assert codes == [LATE_EXIT]
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == {
        "slow": {"state": "late", "why": "not done within 0.01 s"}
    }
    assert "bench.py: slow: not done within 0.01 s" in capfd.readouterr().err


# ---- the work without transfers -----------------------------------------------------------------


def test_a_still_ring_computes_over_its_own_keys() -> None:
    """Keys that come P times change no softmax: out is that of the own keys, lse log P above it.

    dK and dV of the own step are 1/P of those over the own keys; what peers would add is zeros.
    """
    with gloo_pool(3) as pool:
        results = pool.run("distributed.scaling_work:still_ring", {"seq": 96})
    for x in results:
        leaves = [x[n].clone().requires_grad_() for n in "qkv"]
        out, lse = attention(*leaves, masks.full(32), scale=0.25)
        dq, dk, dv = torch.autograd.grad((out * x["dout"]).sum(), leaves)
        want = {"out": out, "lse": lse + math.log(3), "dq": dq, "dk": dk / 3, "dv": dv / 3}
        for name, true in want.items():
            # fp64 sums of 96 terms.
            assert torch.allclose(x[name].double(), true, rtol=1e-6 if name == "lse" else 1e-12)
    assert not torch.equal(results[0]["out"], results[1]["out"])


class _Recorded(NativeKernel):
    """Native calls by the oracle; counts them."""

    name = "counts"

    def __init__(self) -> None:
        self.boxes: list[Band] = []

    def supports(self, spec: KernelSpec) -> str | None:
        return None

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.boxes.append(box)
        out, lse = attention(q, k, v, masks.full(box.q1, box.k1), scale=scale)
        return out.to(q.dtype), lse.float()

    def differentiate(
        self, box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("forward only")


def test_library_calls_are_kept_and_can_be_made_again() -> None:
    kernel = _Recorded()
    twin, calls = recorded(kernel)
    assert isinstance(twin, NativeKernel) and twin is not kernel and twin.name == "counts"
    x = torch.randn(1, 8, 1, 4)
    boxes = [Band(0, 8, 0, 8), Band(0, 4, 0, 8)]
    first = [twin.attend(box, 0.5, x[:, : box.q1], x, x)[0] for box in boxes]
    assert kernel.boxes == boxes and len(calls) == 2
    again = [call()[0] for call in calls]  # type: ignore[index]
    assert kernel.boxes == boxes * 2 and len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    kernel.attend(boxes[0], 0.5, x, x, x)
    assert len(calls) == 2, "the kernel itself is not watched"


def test_a_kernel_without_library_calls_is_taken_as_it_is() -> None:
    from ringfa4.kernels.registry import load_kernel

    kernel = load_kernel("cpu")
    assert recorded(kernel) == (kernel, [])


# ---- spans --------------------------------------------------------------------------------------


def test_seconds_are_summed_by_kind() -> None:
    spans = [Span("wait", 1, 0.0, 1.0), Span("compute", 1, 1.0, 4.0), Span("reduce", 2, 4.0, 4.5)]
    assert seconds(spans, STANDING) == 1.5 and seconds(spans, ("compute",)) == 3.0
    assert seconds(spans, ("finish",)) == 0.0


class _FakeEvent:
    """A CUDA event on a device whose clock goes on by 10 ms for each event recorded."""

    now_ms: ClassVar[float] = 0.0
    waited_ms: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _FakeEvent.now_ms += 10.0
        self.at_ms = _FakeEvent.now_ms

    def synchronize(self) -> None:
        _FakeEvent.waited_ms = max(_FakeEvent.waited_ms, self.at_ms)

    def elapsed_time(self, later: _FakeEvent) -> float:
        assert max(self.at_ms, later.at_ms) <= self.waited_ms, "the host has not waited for it"
        return later.at_ms - self.at_ms


def test_device_spans_are_put_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    began = time.perf_counter()
    recorder = DeviceRecorder()
    with recorder.span("compute", 0):
        pass
    with pytest.raises(KeyError), recorder.span("wait", 1):
        raise KeyError
    spans = recorder.spans
    assert [(s.kind, s.step) for s in spans] == [("compute", 0), ("wait", 1)]
    assert [round(s.seconds, 6) for s in spans] == [0.01, 0.01]
    assert spans[0].start - began >= 0.01, "an event after the origin"
    assert spans[1].start - spans[0].stop == pytest.approx(0.01)


@pytest.mark.gpu
def test_a_wait_on_the_device_is_seen_as_long_as_it_is() -> None:
    """A side stream is busy for 40 ms or so, and the current one waits for it in a span.

    Both begin behind 100 ms of the current stream's, by which the host has enqueued everything: on
    a card that others use it may be held up in between.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    recorder = DeviceRecorder()
    torch.cuda._sleep(200_000_000)
    before.record(here)
    side.wait_event(before)
    with torch.cuda.stream(side):
        torch.cuda._sleep(80_000_000)
        after.record()
    with recorder.span("wait", 1):
        here.wait_event(after)
    with recorder.span("compute", 1):
        pass
    wait, compute = recorder.spans
    slept = 1e-3 * before.elapsed_time(after)
    assert (wait.kind, wait.step, compute.kind) == ("wait", 1, "compute")
    assert 0.8 * slept < wait.seconds < 1.2 * slept, "events of two streams, one after the other"
    assert compute.seconds < 0.1 * slept and compute.start >= wait.stop


# ---- rivals -------------------------------------------------------------------------------------


def _whole(parts: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from what the ranks returned."""
    found = {}
    for name in parts[0]:
        dim = 2 if name == "lse" else 1
        where = torch.cat([p[name][0] for p in parts])
        found[name] = torch.cat([p[name][1] for p in parts], dim).index_select(
            dim, torch.argsort(where)
        )
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_plain_ring_is_attention(mask: str, world: int) -> None:
    seq = 24 * world
    case = Case(masks.causal(seq) if mask == "causal" else masks.full(seq), world, heads=(4, 2))
    with gloo_pool(world) as pool:
        parts = pool.run("distributed.scaling_work:rival", {"name": "plain-ring", "case": case})
    check(case, _whole(parts))


PACKAGE = """
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
import torch

class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, None, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, None, ctx.causal)
        return *grads, None

def zigzag_ring_flash_attn_func(q, k, v, causal, return_attn_probs, group):
    return *Attend.apply(q, k, v, causal), None
"""
"""The calls that the real package makes, for one rank."""


def test_ring_flash_attn_runs_on_our_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name, whose __init__ must not run and whose library is not installed."""
    package = tmp_path / "ring_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('loads transformers')")
    (package / "zigzag_ring_flash_attn.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(scaling_rivals.dist.group, "_WORLD", None, raising=False)
    case = Case(masks.causal(20), world=1, heads=(4, 2))
    x = case.tensors()
    for _ in range(2):
        with scaling_rivals.ring_flash_attn(Share(**x, causal=True), "cpu") as rival:
            out, lse = rival.forward()
            dq, dk, dv = rival.backward()
        gone = ("ring_flash_attn", "flash_attn.flash_attn_interface")
        assert not [n for n in sys.modules if n.startswith(gone)]
        assert rival.note == "over the row's kernel"
    assert lse is not None
    check(case, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


def test_rivals_that_are_not_there_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ring_flash_attn", None)  # find_spec finds none then
    x = Case(masks.causal(8), world=1).tensors()
    with (
        pytest.raises(RuntimeError, match="pip install ring-flash-attn"),
        scaling_rivals.ring_flash_attn(Share(**x, causal=True), "cpu"),
    ):
        pass
    with pytest.raises(ValueError, match="'reference' is no library's call"):
        scaling_rivals.library_of("reference")
    assert isinstance(scaling_rivals.library_of("cpu"), CpuLibrary)


# ---- measuring ----------------------------------------------------------------------------------


class _Device:
    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)


def test_short_passes_are_made_in_a_row() -> None:
    """64K tokens on two H200 take 20 ms forward: five would fill 0.1 s, four are the most."""
    usual = dict.fromkeys(field.name for field in fields(Bench))
    usual |= {"context": _Device("cuda"), "head_dim": 128, "burst": 4}
    two = Bench(**{**usual, "peers": SimpleNamespace(world=2)})  # type: ignore[arg-type]
    counts = [two.in_a_row(Problem(k << 10, 16, 16, "causal")) for k in (16, 64, 128, 256, 1024)]
    assert counts == [4, 4, 2, 1, 1]


class _Scripted:
    """A bench whose clock is given: seconds of each timed call, in order."""

    device = torch.device("cpu")
    directions = ("forward", "backward")

    def __init__(self, taken: list[float], *, repeat: int, row_seconds: float, count: int) -> None:
        self.taken, self.repeat, self.row_seconds, self.count = taken, repeat, row_seconds, count

    def in_a_row(self, problem: Problem) -> int:
        return self.count

    def timed(self, call: Any) -> float:
        call()
        return self.taken.pop(0)

    def most(self, x: float) -> float:
        return x


class _Counts:
    """Every run has one span more than the one before."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, name: str, observer: Any) -> None:
        self.runs += 1
        observer.spans.extend([Span("compute", 0, 0.0, 1.0)] * self.runs)
        observer.spans.append(Span("wait", 0, 0.0, 0.5))


def test_the_median_repetition_is_reported_with_its_own_spans() -> None:
    """Forward takes 10, 2, 6 s and backward 1 s each, for two calls in a row."""
    bench = _Scripted([10, 1, 2, 1, 6, 1], repeat=3, row_seconds=100.0, count=2)
    problem = Problem(64, 1, 1, "causal")
    passes, lines = scaling_runs._repeat(bench, problem, _Counts())  # type: ignore[arg-type]
    assert passes["forward"].seconds == [5, 1, 3] and passes["forward"].reported_s == 3
    assert passes["backward"].seconds == [0.5] * 3
    # Calls 9 and 10 of twelve are the forward pass of the third repetition, 11 and 12 backward.
    assert passes["forward"].spans["compute"] == (9 + 10) / 2
    assert passes["backward"].spans["compute"] == (11 + 12) / 2
    assert passes["forward"].spans["standing"] == passes["forward"].spans["wait"] == 0.5
    assert len(lines["backward"].spans) == 12 + 1, "a trace shows the last call alone"


def test_long_rows_are_repeated_less_often() -> None:
    bench = _Scripted([3, 5] * 4, repeat=4, row_seconds=10.0, count=1)
    problem = Problem(64, 1, 1, "causal")
    passes, _ = scaling_runs._repeat(bench, problem, _Counts())  # type: ignore[arg-type]
    assert passes["forward"].seconds == [3, 3], "8 s after the first, 16 after the second"


def test_rows_are_measured_by_all_ranks_alike() -> None:
    problem = Problem(256, 2, 1, "causal")
    setups = [
        Setup("local", "", "fp32", "cpu"),
        Setup("ring", "torch_p2p", "fp32", "cpu"),
        Setup("ring", "torch_p2p", "mxfp8", "cpu"),
        Setup("rival", "plain-ring", "fp32", "cpu"),
        Setup("ring", "symm_mem", "fp32", "cpu"),
        Setup("ring", "torch_p2p", "morse", "cpu"),
    ]
    rows = [Row(problem, setup) for setup in setups]
    rows.append(Row(Problem(250, 1, 1, "causal"), setups[1]))
    with gloo_pool(2) as pool:
        first, second = pool.run(
            "distributed.scaling_work:measured", {"rows": rows, "traced": True}
        )
    for a, b in zip(first, second, strict=True):
        if isinstance(a, dict):  # why a transport was taken is each rank's own
            assert {**a, "notes": None} == {**b, "notes": None}
        else:
            assert a == b
    local, plain, quantised, rival, symm_mem, morse, odd = first
    assert "it moves CUDA tensors" in symm_mem and "morse" in morse
    assert odd == "250 tokens are no 2 x 2 equal chunks"
    for found in (local, plain, quantised, rival):
        for name in ("forward", "backward"):
            one = found["passes"][name]
            assert len(one["seconds"]) == 2 and one["reported_s"] in one["seconds"]
    for found in (plain, quantised):
        assert found["parts"] == [0, 1]
        one = found["passes"]["forward"]
        assert one["alone_s"] > 0 and one["library_s"] is None
        assert all(one["spans"][kind] > 0 for kind in ("compute", "wait", "encode"))
        assert one["spans"]["standing"] >= one["spans"]["wait"]
    assert (
        local["parts"] == [] == local["errors"] and local["passes"]["forward"]["moved_bytes"] == 0
    )
    # Rank 0 reads the whole other shard (128 tokens), rank 1 half of it; a record is 128 tokens.
    kv = 2 * 32 * 4
    assert plain["passes"]["forward"]["moved_bytes"] == 2 * 128 * kv
    assert quantised["passes"]["forward"]["moved_bytes"] < plain["passes"]["forward"]["moved_bytes"]
    for found in (plain, quantised, rival):
        verdicts = {e["name"]: e for e in found["errors"]}
        assert list(verdicts) == ["out", "lse", "dq", "dk", "dv"]
        assert all(e["passed"] for e in verdicts.values()), verdicts
    assert quantised["errors"][0]["sqnr_db"] < 40 < plain["errors"][0]["sqnr_db"]


@pytest.mark.parametrize("how", ["full memory", "code"])
def test_what_one_rank_cannot_do_is_told_and_the_next_row_runs(how: str) -> None:
    with gloo_pool(2) as pool:
        results = pool.run("distributed.scaling_work:fails_on", {"rank": 1, "how": how})
    name = {"full memory": "OutOfMemoryError", "code": "KeyError"}[how]
    for states, entry in results:
        assert states == ["done", "refused", "done"]
        assert entry["why"].startswith(f"rank 1: {name}: ") and "deliberate" in entry["why"]


def _gpu_kernel() -> str:
    return "fa4-nondeterministic" if find_spec("flash_attn") else "cuda_aten"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flash-attn-4
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")
def test_one_gpu_is_measured_on_its_own_clock() -> None:
    """One rank: the library's calls are found and repeated, and spans add up to the time."""
    context = context_for(device="cuda")
    bench = Bench(
        context=context, peers=Alone(), head_dim=64, dtype=torch.bfloat16, backward=True, repeat=2,
        burst=2, row_seconds=60.0, check_rows=8, seed=0, timeout_s=20.0,
    )  # fmt: skip
    problem = Problem(1 << 14, 4, 2, "causal")
    for setup in (
        Setup("local", "", "mxfp8", _gpu_kernel()),
        Setup("ring", "torch_p2p", "bf16", _gpu_kernel()),
        Setup("ring", "symm_mem", "mxfp8", _gpu_kernel()),
    ):
        found = measure(bench, Row(problem, setup), traced=setup.kind == "ring")
        for one in found.passes.values():
            assert 0 < one.spans["compute"] < one.reported_s
            parts = [t for kind, t in one.spans.items() if kind != "standing"]
            assert sum(parts) < 1.1 * one.reported_s
            assert (one.library_s is not None) == (setup.kind == "local")
        assert found.peak_bytes is not None and found.peak_bytes > 4 << 20
        assert all(error.passed for error in found.errors), found.errors
    close_contexts()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # other people's code
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", scaling_rivals.RIVALS)
def test_rivals_run_on_one_gpu(name: str, mask: str) -> None:
    """In a group of one: what they are told and what they give is understood.

    ring-flash-attn sends dK and dV to itself there, which torch refuses: forward only.
    """
    backward = name != "ring-flash-attn"
    if name == "ring-flash-attn" and find_spec("ring_flash_attn") is None:
        pytest.skip("ring-flash-attn is not installed")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bench = Bench(
            context=context_for(device="cuda"), peers=Alone(), head_dim=64, dtype=torch.bfloat16,
            backward=backward, repeat=1, burst=2, row_seconds=60.0, check_rows=8, seed=0,
            timeout_s=20.0,
        )  # fmt: skip
        row = Row(Problem(4096, 4, 2, mask), Setup("rival", name, "bf16", _gpu_kernel()))
        found = measure(bench, row, traced=False)
        assert {e.name for e in found.errors} >= {"out", *(("dq", "dk", "dv") if backward else ())}
        assert all(error.passed for error in found.errors), found.errors
        close_contexts()
    finally:
        dist.destroy_process_group()


# ---- the table ----------------------------------------------------------------------------------


def _passes(scale: float, compute: float, standing: float, library: float | None) -> dict[str, Any]:
    def one(factor: float) -> dict[str, Any]:
        spans = {"compute": factor * compute, "standing": factor * standing}
        return {
            "reported_s": factor * scale, "spans": spans, "alone_s": factor * 0.5,
            "library_s": None if library is None else factor * library,
        }  # fmt: skip

    return {"forward": one(1.0), "backward": one(3.0)}


def test_numbers_are_compared_with_the_local_row() -> None:
    problem = Problem(1 << 18, 16, 16, "causal")
    ring = Row(problem, Setup("ring", "symm_mem", "bf16", "fa4"))
    errors = [{"name": n, "sqnr_db": 50.0, "passed": n != "dk"} for n in ("out", "lse", "dq", "dk")]
    result = {
        "passes": _passes(1.1, 1.02, 0.07, None), "errors": errors, "peak_bytes": 3 << 30,
        "arena_bytes": 1 << 30,
    }  # fmt: skip
    local = {"passes": _passes(1.0, 1.0, 0.02, 0.99)}
    found = compare(ring, "backward", result, local, 2, 128)
    flops = 2.5 * 4 * 128 * 16 * (1 << 17) * ((1 << 18) + 1)
    assert found["TFLOP/s"] == pytest.approx(flops / 3.3 / 2 / 1e12)
    assert found["of kernel"] == pytest.approx(0.99 / 1.1)
    assert found["of local"] == pytest.approx(1 / 1.1)
    assert found["exposed"] == pytest.approx(3 * 0.05)
    assert found["slowed"] == pytest.approx(3 * 0.02)
    assert found["hidden"] == pytest.approx(0.9)
    assert [e["name"] for e in found["error"]] == ["dq", "dk"] and found["memory"] is None
    both = compare(ring, "both", result, local, 2, 128)
    assert both["s"] == pytest.approx(4.4) and both["memory"] == 4 << 30 and both["error"] is None
    without = compare(ring, "forward", result, None, 2, 128)
    assert without["of kernel"] is None and without["s"] == 1.1
    ours = {"passes": _passes(1.0, 1.0, 0.0, None)}  # a kernel that calls no library
    assert compare(ring, "forward", result, ours, 2, 128)["of kernel"] == pytest.approx(1 / 1.1)
    rival = Row(problem, Setup("rival", "plain-ring", "bf16", "fa4"))
    assert compare(rival, "forward", result, local, 2, 128)["exposed"] is None
    entries = {
        ring.name: {"state": "done", "result": result},
        ring.local: {"state": "refused", "why": "no"},
    }
    lines = table([ring], entries, 2, 128)
    assert [line[1] for line in lines] == ["pass", "forward", "backward", "both"]
    assert lines[1][0] == ring.name and lines[1][-1] == "out 50.0 dB, lse 50.0 dB"
    assert lines[2][-1] == "dq 50.0 dB, dk 50.0 dB, FAILED" and lines[3][-2] == "4.00 GiB"


# ---- the command --------------------------------------------------------------------------------

SMALL = "--problems 256/2:1/causal --head-dim 32 --check-rows 4 --repeat 1 --burst 1 --device cpu"


def test_the_rows_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"--scaling {SMALL} --rivals none --wire bf16 --kernel cpu --list".split()) == 0
    assert capsys.readouterr().out.split() == [
        "256/2:1/causal/local/bf16/cpu",
        "256/2:1/causal/ring/symm_mem/bf16/cpu",
        "256/2:1/causal/ring/nvshmem/bf16/cpu",
        "256/2:1/causal/ring/torch_p2p/bf16/cpu",
    ]


def test_a_run_says_what_it_found_and_what_it_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "out.json", tmp_path / "trace.json"
    argv = f"--scaling {SMALL} --wire bf16 --json {file} --trace {trace}"
    assert main(argv.split()) == 0
    said = capsys.readouterr().out
    body = json.loads(file.read_text())
    states = {name.removeprefix("256/2:1/causal/"): e["state"] for name, e in body["rows"].items()}
    assert states == {
        "local/bf16/cpu": "done", "ring/torch_p2p/bf16/cpu": "done",
        "ring/symm_mem/bf16/cpu": "refused", "ring/nvshmem/bf16/cpu": "refused",
        **{f"rival/{name}/bf16/cpu": "refused" for name in scaling_rivals.RIVALS},
    }  # fmt: skip
    assert "rival/plain-ring/bf16/cpu: refused: plain-ring takes a process group" in said
    assert any(line.split()[:2] == ["256/2:1/causal/ring/torch_p2p/bf16/cpu", "forward"]
               for line in said.splitlines())  # fmt: skip
    assert body["about"]["ranks"] == 1 and body["about"]["command"].endswith(argv)
    calls = {e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"}
    assert "256/2:1/causal/ring/torch_p2p/bf16/cpu backward" in calls


def test_a_run_that_is_resumed_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    argv = f"--scaling {SMALL} --wire bf16 --transport torch_p2p --rivals none --json {file}"
    measured, real = [], scaling.measure

    def measure(bench: Any, row: Row, *, traced: bool) -> Any:
        measured.append(row.setup.kind)
        return real(bench, row, traced=traced)

    monkeypatch.setattr(scaling, "measure", measure)
    assert main([*argv.split(), "--budget", "0"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert measured == [] and {e["state"] for e in rows.values()} == {"left out"}
    assert {e["why"] for e in rows.values()} == {"no time left of --budget 0"}
    assert main([*argv.split(), "--resume", "--rows", "*local*"]) == 0
    assert measured == ["local"]
    assert main([*argv.split(), "--resume"]) == 0
    assert measured == ["local", "ring"]
    assert {e["state"] for e in json.loads(file.read_text())["rows"].values()} == {"done"}


def _torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *run, str(ROOT / "launch" / "bench.py"), "--scaling", *argv]
    names = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, env=os.environ | names, capture_output=True, text=True, timeout=200
    )


def test_two_processes_go_on_behind_a_row_that_ended_them(tmp_path: Path) -> None:
    """The first row is far too long for its limit; the second run finds the others."""
    file = tmp_path / "out.json"
    rows = "--problems 256K/8:8/causal,256/2:1/causal --transport torch_p2p --wire bf16"
    more = f"--rivals plain-ring --head-dim 32 --check-rows 4 --repeat 1 --json {file}"
    argv = f"{rows} {more} --rows 256K/*/local/*,256/* --device cpu".split()
    first = _torchrun(*argv, "--row-limit", "3")
    assert first.returncode != 0 and "256K/8:8/causal/local/bf16/cpu: not done" in first.stderr
    second = _torchrun(*argv, "--resume")
    assert second.returncode == 0, second.stderr[-3000:]
    found = json.loads(file.read_text())["rows"]
    assert [(n.partition("causal/")[2], e["state"]) for n, e in found.items()] == [
        ("local/bf16/cpu", "late"), ("local/bf16/cpu", "done"),
        ("ring/torch_p2p/bf16/cpu", "done"), ("rival/plain-ring/bf16/cpu", "done"),
    ]  # fmt: skip
    assert "256K/8:8/causal/local/bf16/cpu: late: not done within 3 s" in second.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--problems 1K/2/causal", "'1K/2/causal' is no problem"),
        ("--transport pigeon", "'pigeon' is none of torch_p2p"),
        ("--rivals ours", "'ours' is none of plain-ring"),
        ("--repeat 0", "'0' is less than 1"),
        ("--budget=-1", "'-1' is less than 0"),
    ],
)
def test_usage_errors(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scaling", *text.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_pattern_without_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scaling", "--rows", "nothing", "--device", "cpu"]) == 1
    assert "--rows 'nothing' matches none of" in capsys.readouterr().err
