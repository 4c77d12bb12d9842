"""launch/simulate.py: its events by hand, its order that of the ring, its numbers said to be
modelled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa4 import grads, homecoming
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.context import Context
from ringfa4.launch.peers import Peers
from ringfa4.launch.plan_numbers import Numbers, Shape
from ringfa4.launch.simulate import last_true, main, results_table
from ringfa4.launch.simulate_check import Bench, Row, compare
from ringfa4.launch.simulate_check import Case as Measured
from ringfa4.launch.simulate_events import Link, Op, run
from ringfa4.launch.simulate_machine import MACHINES, RATES, Machine, Rate
from ringfa4.launch.simulate_ring import AT_ONCE, COMPUTE, ROOM, Outcome, Setting, simulate
from ringfa4.launch.world import virtual
from ringfa4.mask import Mask
from ringfa4.topology import Topology
from ringfa4.wire import Direction

ROOT = Path(__file__).resolve().parent.parent

# ---- events -------------------------------------------------------------------------------------


def test_work_waits_for_work() -> None:
    first = Op("a", 0, 0, seconds=2.0)
    second = Op("b", 0, 1, (first,), seconds=1.0)
    other = Op("c", 1, 0, seconds=5.0)
    both = Op("d", 1, 1, (second, other, None, other), seconds=0.5)
    assert run([both, second, other, first]) == 5.5
    assert (second.start, second.end, both.start) == (2.0, 3.0, 5.0)


def test_transfers_share_a_link_and_give_back_what_they_leave() -> None:
    """100 B/s: alone until 1, two from 1 on; the short one leaves at 2, the rest is alone again."""
    link = Link("wire", 100.0)
    long = Op("long", 0, 0, nbytes=300, links=[link])
    late = Op("late", 1, 0, seconds=1.0, nbytes=50, links=[link])
    assert run([long, late]) == pytest.approx(3.5)
    assert late.end == pytest.approx(2.0)
    assert link.busy_s == 3.5 and not link.active


def test_a_transfer_runs_at_its_least_share() -> None:
    out, narrow = Link("out", 100.0), Link("narrow", 10.0)
    slow = Op("slow", 0, 0, nbytes=20, links=[out, narrow])
    fast = Op("fast", 0, 0, nbytes=100, links=[out])
    run([slow, fast])
    assert slow.end == pytest.approx(2.0)
    assert fast.end == pytest.approx(2.0)  # half of out until then, though slow used a tenth


def test_work_that_waits_for_itself_is_told() -> None:
    first = Op("a", 0, 0)
    second = Op("b", 3, 7, (first,))
    first.after = (second,)
    second.before.append(first)
    first._waiting = 1
    with pytest.raises(AssertionError, match="2 ops wait for each other, a 0 of rank 0 first"):
        run([first, second])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Op], list[Link]]:
    links = [Link(str(n), draw(st.integers(1, 9))) for n in range(3)]
    ops: list[Op] = []
    for n in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.sampled_from(ops), max_size=3)) if ops else []
        crossed = draw(st.lists(st.sampled_from(links), max_size=2, unique=True))
        nbytes = draw(st.integers(0, 20)) if crossed else 0
        seconds = draw(st.integers(0, 3))
        ops.append(Op("op", n, 0, after, seconds=seconds, nbytes=nbytes, links=crossed))
    return ops, links


@settings(max_examples=200)
@given(graphs())
def test_nothing_starts_early_and_no_link_does_more_than_it_can(
    graph: tuple[list[Op], list[Link]],
) -> None:
    ops, links = graph
    total = run(ops)
    for op in ops:
        assert op.start == max((before.end for before in op.after), default=0.0)
        least = max((op.nbytes / link.bytes_per_s for link in op.links), default=0.0)
        assert op.end - op.start >= op.seconds + least - 1e-9
    for link in links:
        assert link.moved == sum(op.nbytes for op in ops if link in op.links)
        assert link.busy_s <= total + 1e-9


# ---- the ring -----------------------------------------------------------------------------------


def machine(**values: float) -> Machine:
    """Rates by hand: 1 TFLOP/s, links of 1 GB/s, copies that cost nothing worth mentioning."""
    usual = {
        "forward_mxfp8": 1.0, "backward_mxfp8": 1.0, "forward_bf16": 1.0, "backward_bf16": 1.0,
        "link_gbs": 1.0, "nic_gbs": 0.1, "copy_gbs": 1e12, "drag": 0.0, "agree_us": 0.0,
        "step_us": 0.0, "transfer_us": 0.0, "memory_gib": 1.0,
    }  # fmt: skip
    rates = {name: Rate(value, "by hand") for name, value in {**usual, **values}.items()}
    return Machine("by hand", 1000, rates)


def planned(
    mask: Mask,
    world: int,
    *,
    backward: bool = False,
    sharding: str = "contiguous",
    topology: Topology | None = None,
) -> Numbers:
    q, k = (shardings.by_name(sharding, mask, world, side) for side in "qk")
    shape = Shape(1, 2, 1, 64, 64)
    return Numbers.of(mask, q, k, "bf16", shape, backward=backward, topology=topology)


def test_two_ranks_by_hand() -> None:
    """Full over 2 x 512 tokens: each step 512^2 pairs x 2 heads x 256 FLOP = 134 us at 1 TFLOP/s;
    512 tokens x 256 B = 131 us at 1 GB/s. The transfer hides behind step 0, unless links are slow.
    """
    numbers, setting = planned(masks.full(1024), 2), Setting("bf16")
    kernel, wire = 512 * 512 * 2 * 256 / 1e12, 512 * 256 / 1e9
    assert wire < kernel
    found = simulate(numbers, machine(), setting)
    assert found.seconds == pytest.approx(2 * kernel, rel=1e-6)
    assert found.efficiency == pytest.approx(1.0, rel=1e-6)
    assert found.exposed == {"fetch": 0.0, "carry": 0.0, "grads": 0.0} and found.binds == "kernel"
    slow = simulate(numbers, machine(link_gbs=0.25), setting)
    assert slow.seconds == pytest.approx(4 * wire + kernel, rel=1e-6)
    assert slow.exposed["fetch"] == pytest.approx(4 * wire - kernel, rel=1e-6)
    assert slow.binds == "NVLink"
    dragged = simulate(numbers, machine(drag=0.5), setting)
    assert dragged.seconds == pytest.approx(2 * kernel + wire / 2, rel=1e-6)
    back = planned(masks.full(1024), 2, backward=True)
    costs = [simulate(back, machine(drag=d, link_gbs=9), setting).seconds for d in (0.0, 0.5)]
    # The records of step 1 slow step 0 down; dK/dV of step 1 have nothing beside them.
    assert costs[1] - costs[0] == pytest.approx(wire / 9 / 2, rel=1e-6)


def test_latencies_count_once_a_call_a_step_and_a_transfer() -> None:
    numbers, setting = planned(masks.full(1024), 2), Setting("bf16")
    kernel, wire = 512 * 512 * 2 * 256 / 1e12, 512 * 256 / 1e9
    found = simulate(numbers, machine(agree_us=7.0, step_us=3.0), setting)
    assert found.seconds == pytest.approx(7e-6 + 2 * (kernel + 3e-6), rel=1e-6)
    late = simulate(numbers, machine(transfer_us=1000.0), setting)
    assert late.seconds == pytest.approx(1e-3 + wire + kernel, rel=1e-6)


def test_ranks_of_different_domains_use_their_nics() -> None:
    numbers = planned(masks.full(1024), 2)
    found = simulate(numbers, replace(machine(), domain=1), Setting("bf16"))
    assert set(found.units) == {"kernel", "memory passes", "NIC"}
    assert found.units["NIC"] == pytest.approx(512 * 256 / 1e8)
    assert found.binds == "NIC"


def test_a_kernel_of_another_format_converts_on_arrival() -> None:
    numbers, slow = planned(masks.full(1024), 2), machine(copy_gbs=1.0)
    same, other = (simulate(numbers, slow, Setting(kernel)) for kernel in ("bf16", "mxfp8"))
    assert same.spent["convert"] == 0.0
    mx = 512 // 128 * (128 * 128 + 2 * 512)
    assert other.spent["convert"] == pytest.approx(2 * (512 * 256 + mx) / 1e9)


def test_merges_cost_their_bytes_unless_the_kernel_does_them() -> None:
    """Forward: 2 bytes an element of each partial, and 8 for four of them."""
    numbers, slow = planned(masks.full(1024), 4), machine(copy_gbs=1.0)
    apart = simulate(numbers, slow, Setting("bf16"))
    assert apart.spent["merge"] == pytest.approx(256 * 2 * 64 * (4 * 2 + 8) / 1e9)
    single = simulate(numbers, slow, Setting("bf16", at_once=1))
    assert single.spent["merge"] == pytest.approx(256 * 2 * 64 * 4 * 10 / 1e9)
    assert simulate(numbers, slow, Setting("bf16", fused=True)).spent["merge"] == 0.0


CASES = {
    "causal": (masks.causal(6000), "zigzag"),
    "skewed": (masks.causal(6000), "contiguous"),
    "window": (masks.window(6000, left=900), "contiguous"),
    "documents": (masks.documents([0, 40, 2500, 2600, 6000]), "zigzag"),
}


def flat(world: int) -> Topology:
    return Topology.even(world, 1)


def outcomes() -> Iterator[Outcome]:
    for mask, sharding in CASES.values():
        for backward in (False, True):
            for topology in (*map(flat, (1, 2, 5)), Topology.even(4, 4), Topology.even(8, 4)):
                numbers = planned(
                    mask, topology.world, backward=backward, sharding=sharding, topology=topology
                )
                for rates in ({}, {"link_gbs": 0.02, "copy_gbs": 50.0, "transfer_us": 50.0}):
                    for two_sided in (False, True):
                        for depth in (1, 3):
                            on = replace(machine(**rates), two_sided=two_sided)
                            yield simulate(numbers, on, Setting("bf16", depth=depth))


def test_every_call_keeps_the_order_of_the_ring() -> None:
    """Uneven steps, empty steps, slow links, both kinds of transport."""
    for found in outcomes():
        numbers, depth = found.numbers, found.setting.depth
        by = {(op.kind, op.rank, op.step): op for op in found.ops}
        ends = {}  # of the work on each rank's compute lane, by step
        for op in found.ops:
            if op.kind in ("kernel", "merge"):
                ends[op.rank, op.step] = max(op.end, ends.get((op.rank, op.step), 0.0))
        size = numbers.plan.order.size
        carried = {
            (op.rank, (op.step - 1) // size + 1): op for op in found.ops if op.kind == "carry"
        }
        for (rank, lap), op in carried.items():
            work = numbers.steps[rank][lap * size]
            assert op.nbytes == work.carried > 0
            assert op.start >= by["encode", work.owner, 0].end
        for rank, own in enumerate(numbers.steps):
            for t, work in enumerate(own):
                kernel, fetch = by.get(("kernel", rank, t)), by.get(("fetch", rank, t))
                assert (kernel is not None) == (work.tasks > 0)
                assert (fetch is not None) == (work.read > 0)
                if kernel is None or t == 0:
                    continue
                lap, turn = numbers.plan.lap(t)
                if lap and turn == 0:
                    assert kernel.start >= carried[rank, lap].end
                    continue
                assert fetch is not None and fetch.nbytes == work.read
                assert kernel.start >= fetch.end
                if lap:
                    assert fetch.start >= carried[work.source, lap].end, "read before it was there"
                    later = carried.get((work.source, lap + 2))
                    assert later is None or later.start >= fetch.end, "a copy was overwritten"
                assert fetch.start >= by["encode", work.owner, 0].end, "read before published"
                reused = ends.get((rank, t - 1 - depth), 0.0)
                assert fetch.start >= reused, "a buffer was overwritten before it was read"
        lanes: dict[int, list[Op]] = {}
        for op in found.ops:
            if op.kind in COMPUTE:
                lanes.setdefault(op.rank, []).append(op)
        for lane in lanes.values():
            assert all(a.end <= b.start for a, b in pairwise(lane))
        last = sum(found.spent.values()) + sum(found.exposed.values())
        assert last == pytest.approx(found.seconds)
        assert 0 < found.efficiency <= 1
        assert all(busy <= found.seconds + 1e-12 for busy in found.units.values())


def test_gradients_wait_for_a_free_slot_and_are_added_in_plan_order() -> None:
    for found in outcomes():
        if not found.numbers.backward:
            assert not any(op.kind in ("grads", "reduce") for op in found.ops)
            continue
        plan = found.numbers.plan
        sent = {(op.rank, op.step): op for op in found.ops if op.kind == "grads"}
        added: dict[int, list[Op]] = {rank: [] for rank in range(plan.world)}
        for op in found.ops:
            if op.kind == "reduce" and any(before.kind == "grads" for before in op.after):
                added[op.rank].append(op)
        for owner, adds in added.items():
            assert tuple(op.step for op in adds) == plan.contributions(owner)
            for n, op in enumerate(adds):
                given = sent[plan.giver(owner, op.step), op.step]
                assert op.start >= given.end
                assert n < 2 or given.start >= adds[n - 2].end, "a slot was overwritten"
        for (rank, t), op in sent.items():
            lap, turn = plan.lap(t)
            if turn == 0:  # a sum: all of the lap before has been added
                parts = [add for add in added[rank] if add.step // plan.order.size == lap - 1]
                parts = [add for add in parts if add.step % plan.order.size]
                assert all(op.start >= add.end for add in parts)
        assert len(sent) == sum(map(len, added.values()))


def test_carrying_keeps_readers_of_another_domain_from_one_narrow_link() -> None:
    """8 ranks in two domains, NICs a tenth of NVLink: directly, all read rank 3 when they cross."""
    on = replace(machine(), domain=4)
    two = Topology.even(8, 2)
    times = {
        topology: simulate(planned(masks.full(1 << 14), 8, topology=topology), on, Setting("bf16"))
        for topology in (None, two)
    }
    assert times[two].seconds < 0.7 * times[None].seconds
    for topology, found in times.items():
        over = sum(link.moved for (name, _), link in found.links.items() if name == "nic in")
        assert over == found.numbers.across(two), topology
    assert times[None].numbers.across(two) == 4 * times[two].numbers.across(two)


def test_slower_links_never_help() -> None:
    numbers = planned(masks.causal(20000), 5, sharding="zigzag")
    times = [simulate(numbers, machine(link_gbs=g), Setting("bf16")).seconds for g in (4, 1, 0.1)]
    assert times == sorted(times) and times[0] < times[-1]


def test_a_two_sided_transfer_waits_for_both_ends() -> None:
    """3 uneven ranks, full: the middle one has the queries; the others come to step 2 at once."""
    q, k = shardings.uneven([0, 1024, 0]), shardings.contiguous(1024 * 3, 3)
    numbers = Numbers.of(masks.full(1024, 1024 * 3), q, k, "bf16", Shape(1, 2, 1, 64, 64))
    for two_sided in (False, True):
        on = replace(machine(), two_sided=two_sided)
        found = simulate(numbers, on, Setting("bf16"))
        by = {(op.kind, op.rank, op.step): op for op in found.ops}
        assert by["fetch", 1, 2].start == pytest.approx(by["kernel", 1, 0].end)
    mirrored = Numbers.of(
        masks.full(1024 * 3, 1024), k, shardings.uneven([1024, 0, 0]), "bf16",
        Shape(1, 2, 1, 64, 64),
    )  # fmt: skip
    starts = []
    for two_sided in (False, True):
        found = simulate(mirrored, replace(machine(), two_sided=two_sided), Setting("bf16"))
        by = {(op.kind, op.rank, op.step): op for op in found.ops}
        starts.append((by["fetch", 2, 2].start, by["kernel", 0, 0].end))
    assert starts[0][0] == pytest.approx(0.0, abs=1e-12), "a pull needs the source's outbox only"
    assert starts[1][0] == pytest.approx(starts[1][1]), "the source computes step 0 first"


def test_memory_by_hand() -> None:
    """512 tokens a rank, 2:1 heads of 64, bf16; 4 records a shard, of 128 tokens x 128 x 2 B."""
    q, kv, lse, shard = 512 * 2 * 64 * 2, 512 * 128 * 2, 512 * 2 * 4, 4 * 128 * 128 * 2
    there = simulate(planned(masks.full(1024), 2), machine(), Setting("bf16"))
    plain = q + kv + q + lse + 4 * shard
    assert there.memory_bytes == plain + 2 * q + 2 * lse + 3 * q  # the state, and what waits
    fused = simulate(there.numbers, machine(), Setting("bf16", fused=True))
    assert fused.memory_bytes == there.memory_bytes - 3 * q
    back = simulate(planned(masks.full(1024), 2, backward=True), machine(), Setting("bf16"))
    parts = 2 * q + kv  # of two steps and the own one: no sums in fp32
    assert back.memory_bytes == plain + q + q + kv + parts + lse + 4 * shard
    many = simulate(planned(masks.full(4096), 8, backward=True), machine(), Setting("bf16"))
    sums = 2 * q + 2 * kv + 3 * q + kv
    assert many.memory_bytes == plain + q + q + kv + sums + lse + 4 * shard
    assert (AT_ONCE, ROOM) == (homecoming.AT_ONCE, grads.ROOM), "what needs torch has them too"
    assert there.memory_share == there.memory_bytes / 2**30


def test_a_rate_that_is_missing_or_wrong_is_named() -> None:
    numbers = planned(masks.full(256), 1)
    with pytest.raises(ValueError, match=r"'h200x8' has no rate 'forward_mxfp8'.*--rate"):
        simulate(numbers, MACHINES["h200x8"], Setting("mxfp8"))
    for name, value in (("link_gbs", 0.0), ("drag", -1.0)):
        with pytest.raises(ValueError, match=name):
            MACHINES["h200x8"].replaced({name: value})
    with pytest.raises(ValueError, match="'fp4'"):
        Setting("fp4")
    for wrong in ({"depth": 0}, {"at_once": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
            Setting(**wrong)


def test_every_machine_says_where_its_rates_are_from() -> None:
    words = ("measured", "nominal", "published", "assumed")
    for known in MACHINES.values():
        assert all(any(w in rate.source for w in words) for rate in known.rates.values())
        assert set(known.rates) <= set(RATES)


def test_where_something_stops_to_hold() -> None:
    for limit in range(8):
        assert last_true(lambda n, limit=limit: n <= limit, 7) == limit


# ---- beside what is measured --------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["fp32", "mxfp8"])
def test_a_measured_ring_and_its_prediction(wire: str) -> None:
    """On threads: both sides are there, from rates that are all measured; nothing is judged."""

    def rank(context: Context, peers: Peers) -> tuple[dict[Direction, Row], dict[str, float]]:
        return compare(Bench(Measured(384, wire, 2, 1, 32, "zigzag"), context, peers), 2)

    for rows, rates in virtual(3, "auto", rank, "cpu", 60.0):
        assert {"link_gbs", "agree_us", "drag", "copy_gbs", "step_us"} < set(rates) < set(RATES)
        for row in rows.values():
            assert len(row.predicted) == len(row.measured) == 2
            assert min(*row.predicted, *row.measured) > 0


def test_where_nothing_moves_every_step_still_computes() -> None:
    """The still ring gives each kernel call records of the right length, in both passes."""

    def rank(context: Context, peers: Peers) -> list[list[int]]:
        bench = Bench(Measured(1000, "bf16", 1, 1, 32, "zigzag"), context, peers)
        calls = [bench.call(bench.still(way), way)[1].spans for way in ("forward", "backward")]
        return [[s.step for s in spans if s.kind == "compute"] for spans in calls]

    assert virtual(4, "auto", rank, "cpu", 60.0) == [[[0, 1, 2, 3]] * 2] * 4


# ---- what people read ---------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert main(text.split()) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_table_says_that_it_is_modelled_and_from_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "--seq 64K --ranks 8 --wire mxfp8 --rate link_gbs=500")
    assert (
        "modelled, not measured: gb200-nvl72, domains of 72, causal, zigzag, 64:8 heads of 128"
        in text
    )
    assert "link_gbs        500" in text and "given: --rate" in text
    assert "published: cuDNN" in text and "assumed" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("64K")]
    assert [row[4] for row in rows] == ["forward", "backward"]


def test_json_trace_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the `plot` extra")
    files = {name: tmp_path / name for name in ("a.json", "a.png", "t.json")}
    said(
        capsys,
        f"--seq 32K,64K --ranks 2,4 --json {files['a.json']} --png {files['a.png']} "
        f"--trace {files['t.json']} --crossover",
    )
    body = json.loads(files["a.json"].read_text())
    assert body["modelled"] is True and body["rates"]["nic_gbs"]["source"].startswith("assumed")
    assert len(body["results"]) == 2 * 2 * 2 * 2
    assert all(0 < result["efficiency"] <= 1 for result in body["results"])
    assert {found["ranks"] for found in body["crossovers"]} == {2, 4}
    assert files["a.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads(files["t.json"].read_text())["traceEvents"]
    kernels = [e for e in events if e["name"].startswith("kernel")]
    assert {e["pid"] for e in kernels} == {0, 1} and all(e["dur"] > 0 for e in kernels)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("--rate speed=1", 2, "unknown rate 'speed'"),
        ("--rate link_gbs=fast", 2, "'fast' is not a number"),
        ("--wire fp4", 2, "unknown wire 'fp4'"),
        ("--machine h200x8 --ranks 2 --seq 1K", 1, "no rate 'forward_mxfp8'"),
        ("--ranks 0 --seq 1K", 1, "at least one"),
        ("--heads 5 --kv-heads 2", 1, "5 and 2"),
        ("--png /nowhere/at/all.png", 1, "there is no folder"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    text: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(text.split()) == code
    err = capsys.readouterr().err
    assert words in err.splitlines()[-1]


def test_the_columns_have_a_row_for_every_case() -> None:
    assert len({len(row) for row in results_table([])}) == 1


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = (
        "import sys, runpy; sys.modules.update(torch=None, numpy=None);"
        "sys.argv = ['launch/simulate.py', '--seq', '64K', '--ranks', '8'];"
        "runpy.run_path('launch/simulate.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "modelled" in done.stdout
