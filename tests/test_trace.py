"""Spans, their names in profilers, and the timeline of all ranks that launch/ring.py writes."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.pool import gloo_pool

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.launch.chrome_trace import ROWS, Part, document
from ringfa4.launch.ring import main
from ringfa4.mask import Mask
from ringfa4.plan import Plan
from ringfa4.trace import NAMED, Named, Recorder

# ---- spans and names ----------------------------------------------------------------------------


class _Log:
    """An observer that writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def span(self, kind: str, step: int) -> _Log:
        self.seen.append(f"{kind} {step}")
        return self

    def __enter__(self) -> None:
        self.seen.append("(")

    def __exit__(self, *error: object) -> None:
        self.seen.append(")")


def test_a_recorder_keeps_what_fails_and_passes_spans_on() -> None:
    inner = _Log()
    recorder = Recorder(inner)
    with recorder.span("encode", 0):
        pass
    with pytest.raises(ZeroDivisionError), recorder.span("compute", 3):
        raise ZeroDivisionError
    assert [(s.kind, s.step) for s in recorder.spans] == [("encode", 0), ("compute", 3)]
    assert recorder.spans[0].stop <= recorder.spans[1].start
    assert recorder.seconds("compute") == recorder.spans[1].seconds
    assert inner.seen == ["encode 0", "(", ")", "compute 3", "(", ")"]


def test_a_users_profiler_shows_steps_by_name() -> None:
    cp = ContextParallel(mask=masks.causal(64), device="cpu")
    q = torch.randn(1, 64, 2, 32, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cp.attention(q, q, q).sum().backward()
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("ring/")}
    kinds = ("agree", "encode", "publish", "compute")
    twice = {f"ring/step0/{kind}": 2 for kind in kinds}
    assert counts == twice | {"ring/step0/finish": 3}, "dQ, and dK and dV once they are home"


def test_nobody_is_told_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def loud(name: str) -> None:
        raise AssertionError(f"{name} was named for nobody")

    monkeypatch.setattr("ringfa4.trace.record_function", loud)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", loud)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with NAMED.span("compute", 1):
        pass


def test_nvtx_ranges_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    with pytest.raises(ZeroDivisionError), Named().span("wait", 7):
        raise ZeroDivisionError
    assert log == ["ring/step7/wait", "pop"]
    with torch.profiler.profile(), Named().span("wait", 7):
        assert len(log) == 2  # the profiler has the name; no range besides


# ---- the timeline -------------------------------------------------------------------------------


def require_sound(trace: dict[str, Any], plan: Plan, calls: list[str]) -> None:
    """Everything that a trace of ``calls`` (names, in order) over ``plan`` has to be."""
    found = trace["traceEvents"]
    slices = [e for e in found if e["ph"] == "X"]
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(plan.world)}
    for rank in range(plan.world):
        own = [e for e in slices if e["pid"] == rank]
        rows = {e["tid"]: e["args"]["name"] for e in found
                if e["name"] == "thread_name" and e["pid"] == rank}  # fmt: skip
        assert list(rows.values()) == list(ROWS)
        outer = [e for e in own if rows[e["tid"]] == "call"]
        assert [e["name"] for e in outer] == calls
        inner = sorted((e for e in own if rows[e["tid"]] != "call"), key=lambda e: e["ts"])
        # Times are microseconds of a clock near 1e10, so a double holds them to about 2e-6.
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-5 for a, b in pairwise(inner))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-5 for a, b in pairwise(outer))
        for call in outer:
            until = call["ts"] + call["dur"] + 1e-5
            within = [e for e in inner if call["ts"] - 1e-5 <= e["ts"] <= until]
            assert all(e["ts"] + e["dur"] <= until for e in within)
            computed = [e["args"] for e in within if rows[e["tid"]] == "compute"]
            expected = [s for s in plan.steps(rank) if s.tasks]
            assert [a["step"] for a in computed] == [s.index for s in expected]
            assert [a["owner"] for a in computed] == [s.owner for s in expected]
            assert [a["pairs"] for a in computed] == [s.area for s in expected]
            inner = [e for e in inner if e not in within]
        assert inner == []
    _require_sound_arrows(found, plan, calls)


def _require_sound_arrows(found: list[dict[str, Any]], plan: Plan, calls: list[str]) -> None:
    """Each arrow has two ends, on slices, the earlier one first, between the plan's ranks."""
    ends: dict[str, list[dict[str, Any]]] = {}
    for e in found:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], []).append(e)
            place = [
                x
                for x in found
                if x["ph"] == "X"
                and x["pid"] == e["pid"]
                and x["tid"] == e["tid"]
                and x["ts"] <= e["ts"] <= x["ts"] + x["dur"] + 1e-5
            ]
            assert place, f"{e} is not on a slice"  # fmt: skip
    expected = {}
    for call in calls:
        for rank in range(plan.world):
            for step in plan.steps(rank)[1:]:
                if step.tasks:
                    expected[f"{call}/kv/{step.owner}/{step.index}"] = (step.owner, rank)
                    if call.startswith("backward"):
                        expected[f"{call}/dkv/{step.owner}/{step.index}"] = (rank, step.owner)
    made = {}
    for name, both in ends.items():
        start, finish = sorted(both, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["ts"] <= finish["ts"]
        made[name] = (start["pid"], finish["pid"])
    assert made == expected


@pytest.mark.parametrize(
    ("text", "mask", "world"),
    [
        ("--seq 600 --virtual-ranks 3 --backward", masks.causal(600), 3),
        ("--seq 1K --window 100 --virtual-ranks 4 --backward", masks.window(1024, left=100), 4),
        ("--seq 300", masks.causal(300), 1),
    ],
)
def test_a_traced_run(
    text: str, mask: Mask, world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Causal zigzag has work in every step; a window leaves most steps without."""
    file = tmp_path / "trace.json"
    sharding = "contiguous" if "--window" in text else "zigzag"
    argv = [*text.split(), "--sharding", sharding, "--trace", str(file), "--json", "-"]
    assert main(argv) == 0
    trace, body = json.loads(file.read_text()), json.loads(capsys.readouterr().out)
    cut = getattr(shardings, sharding)(mask.seq_q, world)
    calls = ["forward", "backward"][: 1 + ("--backward" in text)]
    require_sound(trace, Plan(mask, cut, cut), calls)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sum(e["args"]["pairs"] for e in slices if "pairs" in e["args"]) == mask.area * len(calls)
    moved = sum(body["passes"][name]["moved_bytes"] for name in calls)
    sent = [e for e in slices if e["name"].split()[0] in ("fetch", "grads")]
    assert sum(e["args"]["bytes"] for e in sent) == moved


def test_a_trace_that_cannot_be_written_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seq", "64", "--trace", "no/such/file"]) == 1
    said = capsys.readouterr()
    assert "--trace no/such/file: there is no folder 'no/such'" in said.err and said.out == ""


def test_processes_send_their_spans_to_rank_0() -> None:
    with gloo_pool(2) as pool:
        traces = pool.run("distributed.trace_work:traced", {"seq": 600})
    sharding = shardings.zigzag(600, 2)
    for trace in traces:  # every rank gets all parts, hence the same document
        require_sound(trace, Plan(masks.causal(600), sharding, sharding), ["forward", "backward"])
    assert traces[0] == traces[1]


def _part(rank: int, clock: str, ahead: float, late: tuple[float, ...]) -> Part:
    """Barriers at 10, 20, 30 s and one event at 40 s of true time, on a clock that is ahead."""
    stamps = tuple(10.0 * (n + 1) + ahead + x for n, x in enumerate(late))
    event = {"name": "x", "ph": "X", "pid": rank, "tid": 0, "ts": (40 + ahead) * 1e6, "dur": 1.0}
    return Part(rank, clock, stamps, [event])


def test_clocks_of_other_machines_are_aligned_at_barriers() -> None:
    """One late reading does not matter; within a machine no reading does."""
    parts = [
        _part(0, "here", 0.0, (0.0, 0.0, 0.0)),
        _part(1, "here", 0.0, (3.0, 3.0, 3.0)),
        _part(2, "there", -700.0, (0.0, 5.0, 0.0)),
    ]
    decoded = [Part.decode(part.encode()) for part in parts]
    assert decoded == parts
    at = [e["ts"] for e in document([decoded])["traceEvents"] if e["ph"] == "X"]
    assert at == pytest.approx([0.0, 0.0, 0.0], abs=1e-3)


def test_runs_of_one_trace_share_its_time() -> None:
    """Each run has parts of its own, whose clocks are aligned with its own rank 0."""
    early, late = _part(0, "here", 0.0, (0.0,) * 3), _part(0, "here", 2.0, (0.0,) * 3)
    events = document([[early], [late]])["traceEvents"]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [0.0, 2e6]
    assert len([e for e in events if e["name"] == "process_name"]) == 1


def test_recorders_of_threads_do_not_mix() -> None:
    """Virtual ranks record at the same time, each into its own list."""
    recorders = [Recorder() for _ in range(4)]

    def work(number: int) -> None:
        for step in range(200):
            with recorders[number].span("compute", step):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([s.step for s in r.spans] == list(range(200)) for r in recorders)
