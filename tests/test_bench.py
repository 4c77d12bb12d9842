"""launch/bench.py: what is measured, in which order, and what is made of it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.pool import gloo_pool

from ringfa4 import mask as masks
from ringfa4.launch import bench_plot
from ringfa4.launch.bench import comparison, main, parse_options, table
from ringfa4.launch.bench_runs import (
    WARM_UP,
    Common,
    Direct,
    Measured,
    Setup,
    Shape,
    base_of,
    grid,
    run,
    timed,
)
from ringfa4.launch.clocks import Cost, CpuClock
from ringfa4.launch.options import UsageError
from ringfa4.launch.peers import Threads
from ringfa4.shard import contiguous, zigzag
from ringfa4.testing.oracles import attention

COMMON = Common(
    head_dim=32,
    dtype=torch.float32,
    mask="causal",
    kernel="auto",
    precondition="none",
    device=torch.device("cpu"),
    backward=True,
    seed=0,
)


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


# ---- clocks -------------------------------------------------------------------------------------


def test_the_cpu_clock_counts_all_threads_and_no_sleep() -> None:
    """CPU time is asked for until it has passed, so the machine's load does not matter."""
    clock = CpuClock()

    def burn() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    clock.start()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert clock.stop().busy_s >= 0.02
    clock.start()
    time.sleep(0.2)
    slept = clock.stop()
    assert slept.wall_s >= 0.2 > 2 * slept.busy_s


class _FakeClock:
    """Says when it is started and stopped; each rank's costs something else."""

    unit = "s"

    def __init__(self, log: list[str], rank: int) -> None:
        self.log, self.rank = log, rank

    def start(self) -> None:
        time.sleep(0.02 * self.rank)  # the others would get ahead if nothing held them
        self.log.append("start")

    def stop(self) -> Cost:
        self.log.append("stop")
        return Cost(wall_s=float(self.rank), busy_s=10.0**self.rank)


def test_no_rank_works_while_a_clock_stands() -> None:
    log: list[str] = []
    threads, results = Threads(3, 20.0), {}

    def rank(number: int) -> None:
        clock = _FakeClock(log, number) if number != 1 else None

        def work() -> str:
            log.append("work")
            time.sleep(0.02 * number)
            log.append("work")
            return f"result {number}"

        results[number] = timed(threads.member(number), clock, work)

    workers = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert log == ["start"] * 2 + ["work"] * 6 + ["stop"] * 2
    assert results == {n: (Cost(2.0, 101.0), f"result {n}") for n in range(3)}


# ---- the order of measurements, and ratios -------------------------------------------------------


class _Scripted:
    """A stage whose costs are given: by row, one a repetition."""

    def __init__(self, costs: dict[Any, list[float]]) -> None:
        self.costs, self.log = costs, []

    def _next(self, shape: Shape, setup: Setup | None) -> dict[Any, Cost]:
        if shape.seq == WARM_UP:
            self.log.append("warm up")
            busy = 1e6
        else:
            self.log.append("direct" if setup is None else str(setup))
            busy = self.costs[setup].pop(0)
        return {name: Cost(2 * busy, busy) for name in COMMON.passes}

    def direct(self, common: Common, shape: Shape) -> dict[Any, Cost]:
        return self._next(shape, None)

    def ring(self, common: Common, shape: Shape, setup: Setup) -> Measured:
        if setup.wire == "morse":
            self.log.append("refused")
            raise ValueError("unknown wire 'morse'")
        return Measured(self._next(shape, setup), ["part"] if setup.traced else [])


def test_repetitions_are_interleaved_and_ratios_paired() -> None:
    """The machine slows down tenfold for the second repetition: no ratio notices."""
    shape, setup = Shape(4096, 4, 4), Setup("bf16", "zigzag", 2)
    traced = replace(setup, traced=True)
    rows = grid([shape], ["bf16"], ["zigzag"], [2], traced=True)
    assert [row.setup for row in rows] == [None, setup, traced]
    stage = _Scripted({None: [1, 10, 1.0], setup: [1.1, 11, 1.4], traced: [1.11, 22, 1.4]})
    parts = run(rows, COMMON, stage, 3, lambda row, repetition: None)
    assert stage.log == ["warm up"] * 3 + ["direct", str(setup), str(traced)] * 3
    assert parts == [["part"]]
    direct, ring, recorded = rows
    assert base_of(rows, direct) is None and comparison(rows, direct, "forward") is None
    found = comparison(rows, ring, "backward")
    assert found is not None and found["to"] == "direct call"
    assert found["busy"] == found["wall"] == pytest.approx(1.1)
    assert found["busy_range"] == pytest.approx((1.1, 1.4))
    found = comparison(rows, recorded, "forward")
    assert found is not None and found["to"] == "bf16, zigzag, 2 ranks"
    assert found["busy_range"] == pytest.approx((1.0, 2.0))
    assert found["busy"] == pytest.approx(1.11 / 1.1)
    assert ring.median("forward") == Cost(2.8, 1.4)
    assert [line[5] for line in table(rows, COMMON, "s")[1:]] == ["", ""] + ["1.100"] * 2 + [
        "1.009"
    ] * 2


def test_refusals_show_in_the_warm_up_and_stop_nothing() -> None:
    shapes = [Shape(4096, 4, 3), Shape(4096, 4, 2)]
    rows = grid(shapes, ["bf16", "morse"], ["zigzag"], [2], traced=False)
    setup = Setup("bf16", "zigzag", 2)
    stage = _Scripted({None: [1.0], setup: [1.5, 2.0]})
    run(rows, COMMON, stage, 1, lambda row, repetition: None)
    refused = [row.refused for row in rows]
    assert refused[0] == "4 query heads are not a multiple of 3 K/V heads" and refused[3] is None
    assert refused[1] is refused[4] is None
    assert refused[2] == refused[5] == "unknown wire 'morse'"
    warm_up = ["warm up", "refused", "warm up", "warm up", "refused"]
    assert stage.log == [*warm_up, str(setup), "direct", str(setup)]
    assert comparison(rows, rows[1], "forward") is None  # there is nothing to compare with
    found = comparison(rows, rows[4], "forward")
    assert found is not None and found["busy"] == 2.0


# ---- the direct call ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_direct_call_is_attention(mask: str, kv_heads: int) -> None:
    common, shape = replace(COMMON, mask=mask), Shape(70, 4, kv_heads)
    call = Direct(common, shape)
    out = call.forward()
    got = [x.transpose(1, 2).double() for x in (out, *call.backward(out))]
    q, k, v, dout = (
        x.detach().transpose(1, 2).double().requires_grad_()
        for x in (call.q, call.k, call.v, call.dout)
    )
    made = masks.causal(70) if mask == "causal" else masks.full(70)
    truth, _ = attention(q, k, v, made)
    want = [truth, *torch.autograd.grad((truth * dout).sum(), (q, k, v))]
    for value, true in zip(got, want, strict=True):
        # fp32 sums of at most 70 terms: a few times 70 * 2**-24 of the largest value.
        assert (value - true).abs().max() < 2e-5 * true.abs().max()


def test_direct_call_and_rings_get_the_same_tokens() -> None:
    whole = COMMON.rows(Shape(300, 2, 1), contiguous(300, 1).shards[0])
    for shard in zigzag(300, 3).shards:
        part = COMMON.rows(Shape(300, 2, 1), shard)
        index = torch.cat([torch.tensor(chunk.positions()) for chunk in shard.chunks])
        assert all(torch.equal(part[name], whole[name][:, index]) for name in whole)


# ---- the command --------------------------------------------------------------------------------


def test_a_small_grid_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'plot'")
    argv = "--seq 200,300 --heads 4 --kv-heads 2 --head-dim 32 --dtype fp32 --wire fp32,morse"
    files = {name: tmp_path / name for name in ("out.json", "plot.png", "trace.json")}
    argv += " --ranks 1,3 --repeat 2"
    for name, file in files.items():
        argv += f" --{name.split('.')[0].replace('out', 'json')} {file}"
    before = torch.get_num_threads()
    assert main(argv.split()) == 0
    assert torch.get_num_threads() == before
    said = capsys.readouterr().out
    assert "200 tokens, 4:2 heads of 32, float32, causal" in said
    assert "morse, zigzag, 1 rank: refused: unknown wire 'morse'" in said
    body = json.loads(files["out.json"].read_text())
    assert len(body["rows"]) == 2 * (1 + 2 * 2 * 2)  # shapes, direct and wires x ranks x traced
    for row in body["rows"]:
        if row["setup"] is not None and row["setup"]["wire"] == "morse":
            assert "unknown wire" in row["refused"] and not row["passes"]
            continue
        for name in ("forward", "backward"):
            measured = row["passes"][name]
            assert len(measured["costs"]) == 2
            assert all(cost["busy_s"] > 0 and cost["wall_s"] > 0 for cost in measured["costs"])
            assert (measured["ratio"] is None) == (row["setup"] is None)
    assert files["plot.png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace.json"].read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    calls = {e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0}
    assert len(calls) == 2 * 2 * 2  # seq, ranks, pass
    assert "backward, 300 tokens, fp32, zigzag, 3 ranks, traced" in calls


def test_processes_measure_together() -> None:
    with gloo_pool(2) as pool:
        results = pool.run("distributed.trace_work:benched", {"seq": 300})
    assert results[0] == results[1]
    direct, ring, ranks = results[0]
    assert ranks == [0, 1]
    for costs in (direct, ring):
        assert list(costs) == ["forward", "backward"]
        assert all(cost.busy_s > 0 and cost.wall_s > 0 for cost in costs.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--seq 1X", "'1X' is not a size"),
        ("--seq 0", "--seq must not be 0"),
        ("--kv-heads 2,0", "--kv-heads must not be 0"),
        ("--sharding zigzag,zagzig", "'zagzig' is none of contiguous, zigzag"),
        ("--repeat 0", "'0' is less than 1"),
    ],
)
def test_usage_errors(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(text.split())
    assert main(text.split()) == 2
    assert message in capsys.readouterr().err


def test_ranks_are_those_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--ranks", "2,4"]) == 1
    assert "--ranks [2, 4]: torchrun started 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot", "--trace"])
def test_a_file_that_cannot_be_written_is_said_first(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seq", "200", option, "no/such/file"]) == 1
    said = capsys.readouterr()
    assert f"{option} no/such/file: there is no folder 'no/such'" in said.err and said.out == ""


def test_a_missing_matplotlib_is_said_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_plot.importlib.util, "find_spec", lambda name: None)
    assert main(["--seq", "200", "--plot", "x.png"]) == 1
    said = capsys.readouterr()
    assert "pip install 'ringfa4[plot]'" in said.err and said.out == ""


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    argv = "--device cuda --seq 2K --heads 4 --head-dim 64 --ranks 1,2 --repeat 2 --json"
    assert main([*argv.split(), str(file)]) == 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["refused"] is None
        for measured in row["passes"].values():
            assert all(0 < cost["busy_s"] <= cost["wall_s"] for cost in measured["costs"])
