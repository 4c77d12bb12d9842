"""The cost model: its arithmetic on counts and loops made by hand, and what it says of published
kernels. No number here was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ptx import build, counts, sass

from ringfa4.launch import cost_model, cost_replay, cost_tables
from ringfa4.launch.bench import main
from ringfa4.launch.cost_model import (
    ARCHS,
    COUNTS,
    ERROR,
    FLOP,
    HANDSHAKE,
    PROFILES,
    Counted,
    committed,
    counted,
    error,
    fitted,
    implied_clock_ghz,
    interval,
    memory_cycles,
    petaflops,
    published_cycles,
    rescaled_share,
    units,
)
from ringfa4.launch.cost_replay import Kernel, Op, Policy, Replay, Replayed, Timing, rescaling

FAIR = Policy(greedy=False, queue=0)


def cycles(kernel: Kernel, timing: Timing, policy: Policy = FAIR) -> float:
    return Replay(kernel, timing, policy).run()


def loop(*between: Op, parts: tuple[float, ...] = (1.0,), **options: Any) -> Kernel:
    """A wait for S, ``between``, a publication of all of P."""
    return Kernel((Op("other", 1, event="S"), *between, P), parts, False, **options)


P = Op("other", 1, event="P")
QUICK = Timing(exp=8, product=1, handshake=0)


# ---- counts to cycles ---------------------------------------------------------------------------


def entry(**changes: Any) -> dict[str, Any]:
    """Two tiles of 16-bit operands, all in one instruction shape, and one query tile."""
    made: dict[str, Any] = {
        "title": "by hand",
        "arch": "sm_100a",
        "dtype": "bf16",
        "tiles": 2,
        "query_tiles": 1,
        "more": {"mma f16 M128 N128": 16, "mma f16 M128 N128 A in tensor memory": 16},
        "once": {"bulk store bytes": 32768},
        "loop": "other/1/7/7/0//S exp/1/7/7/0 fma2/1/7/7/0 pack/1/7/7/0 other/1/7/7/0//P",
        "parts": [1.0],
        "shared_scales": False,
        "warps": 1,
        "rescales": False,
    }
    return made | changes


def test_products_of_a_tile_take_flop_over_rate() -> None:
    kernel = counted("x", entry())
    assert cost_model._flop(kernel.tile) == FLOP
    assert kernel.mma == FLOP / 8192 == 1024
    eight = {"mma mxf8f6f4 M256 N128": 4, "mma f8f6f4 M128 N128 A in tensor memory": 8}
    assert counted("x", entry(dtype="mxfp8", more=eight)).mma == 512


def test_units_are_instructions_times_what_they_take() -> None:
    found = units(counted("x", entry()))
    assert found["exp"] == 8 and found["fma"] == 2 and found["pack"] == 4 and found["alu"] == 2
    assert found["issue"] == 5
    assert units(counted("x", entry(arch="sm_103a")))["exp"] == 4
    two = units(counted("x", entry(warps=2)))
    assert (two["issue"], two["exp"], two["mma"]) == (10, 16, 1024)


def test_rescaling_by_another_warp_is_charged_as_often_as_a_maximum_is_new() -> None:
    assert rescaled_share(1) == 1.0  # the first tile holds every row's maximum
    assert rescaled_share(2) == pytest.approx((1 + 1 - 2**-32) / 2)
    plain, other = (units(counted("x", entry(rescales=r))) for r in (False, True))
    assert other["fma"] - plain["fma"] == pytest.approx(rescaled_share() * 64 * 2)


def test_memory_cycles_count_all_who_use_a_memory() -> None:
    found = memory_cycles(
        {
            "mma operand bytes from shared memory": 1280,
            "TMA load bytes into shared memory": 128,
            "cp.async.bulk bytes into shared memory": 128,
            "bulk store bytes": 128,
            "tcgen05.cp bytes": 128,
            "st.shared wavefronts": 3,
            "ld.shared wavefronts": 2,
            "tcgen05.ld bytes": 1024,
            "tcgen05.st bytes": 512,
        }
    )
    assert found == {"shared": 10 + 4 + 5, "tensor memory": 3 + 1}


def test_throughput_and_clock_are_inverse() -> None:
    arch = ARCHS["sm_100a"]
    assert petaflops(arch, 512) == pytest.approx(148 * 16384 * 1.85e9 * 1e-15)
    assert implied_clock_ghz(arch, 700.0, petaflops(arch, 700.0)) == pytest.approx(1.85)


def test_interval_is_the_wider_of_spread_and_error_and_no_better_than_the_floor() -> None:
    found = interval(Replayed(900, 1000, 1500, 700), floor=100, error=0.1)
    assert (found.low, found.middle, found.high) == (900, 1000, 1500)
    found = interval(Replayed(990, 1000, 1010, 700), floor=100, error=0.1)
    assert found.low == pytest.approx(1000 / 1.1) and found.high == pytest.approx(1000 / 0.9)
    found = interval(Replayed(900, 1000, 1100, 700), floor=1200, error=0.1)
    assert (found.low, found.middle, found.high) == (1200, 1200, 1200)
    found = interval(Replayed(900, 1000, 1500, 700), floor=100, error=0.1, block_scaled=True)
    assert (found.low, found.high) == (900, pytest.approx(1500 * 1.084))


# ---- the replay ---------------------------------------------------------------------------------


def test_an_op_reads_what_it_writes() -> None:
    for op in (Op("exp", 3, 1, 2, 5), Op("load", 1, registers=32), P, Op("shared", 2, event="S")):
        assert Op.read(str(op)) == op
    with pytest.raises(ValueError, match="'sine'"):
        Op.read("sine/1/7/7/0")


def test_products_alone_bound_a_loop_that_does_nothing() -> None:
    assert cycles(loop(), Timing(exp=8, product=100, handshake=20)) == pytest.approx(200)


def test_the_chain_of_a_tile_bounds_when_the_handshake_is_long() -> None:
    """P follows S by 1 cycle; both products and the handshake until S again; two tiles at once."""
    timing = Timing(exp=8, product=100, handshake=1000)
    assert cycles(loop(), timing) == pytest.approx((1 + 2 * 100 + 1000) / 2)


def test_a_busy_unit_bounds_and_both_tiles_share_it() -> None:
    kernel = loop(*[Op("exp", 1)] * 100)
    for policy in cost_replay.POLICIES:
        assert cycles(kernel, QUICK, policy) == pytest.approx(800, rel=0.01)
    two = loop(*[Op("exp", 1)] * 50, warps=2)
    assert cycles(two, QUICK) == pytest.approx(800, rel=0.01)


def test_a_scheduler_issues_one_instruction_a_cycle() -> None:
    assert cycles(loop(*[Op("other", 1)] * 298), QUICK) == pytest.approx(300, rel=0.01)


def test_stall_counts_and_scoreboards_hold_a_warp() -> None:
    stalled = loop(*[Op("other", 10)] * 50)
    assert cycles(stalled, QUICK) == pytest.approx((50 * 10 + 3) / 2, abs=2)
    exp, use = Op("exp", 1, results=0), Op("alu", 1, waits=1)
    assert cycles(loop(*[exp, use] * 20), QUICK) == pytest.approx((20 * (18 + 1) + 3) / 2, rel=0.05)


def test_a_part_of_p_starts_its_share_of_the_product() -> None:
    """Three quarters of a product of 100 cycles run while the rest of P is made."""
    long = [Op("other", 10)] * 50
    timing = Timing(exp=8, product=100, handshake=0)
    whole = cycles(loop(*long), timing)
    parts = Kernel((Op("other", 1, event="S"), P, *long, P), (0.75, 0.25), False)
    assert whole - cycles(parts, timing) == pytest.approx(75 / 2, abs=1)


def test_rescaling_holds_the_product_of_p() -> None:
    factor = Op("other", 1, event="factor")
    timing = Timing(exp=8, product=100, handshake=400)
    with_it = loop(factor, rescaling=rescaling(128))
    assert cycles(with_it, timing) > cycles(loop(factor), timing) + 50


def test_the_scales_of_one_tile_wait_until_the_other_is_loaded() -> None:
    """S of either tile follows the loads of the other, so loads of 1,000 cycles take turns."""
    late = [Op("other", 10)] * 100
    ops = (Op("other", 1, event="S"), P, *late, Op("other", 1, event="loaded"))
    timing = Timing(exp=8, product=10, handshake=0)
    free, bound = (cycles(Kernel(ops, (1.0,), shared), timing) for shared in (False, True))
    assert free == pytest.approx(1000 / 2, rel=0.05) and bound == pytest.approx(1000, rel=0.05)


def test_warps_of_a_tile_meet() -> None:
    """Neither passes the barrier before the other has come to it."""
    meet = Op("other", 1, event="pair")
    kernel = loop(*[Op("exp", 1)] * 10, meet, *[Op("exp", 1)] * 10, warps=2)
    run = Replay(kernel, QUICK, FAIR)
    issue, met = run._issue, []

    def watched(warp: Any, now: float) -> None:
        if kernel.loop[warp.at] is meet:
            (other,) = (w for w in run.warps if w.tile == warp.tile and w is not warp)
            met.append((other.turn, other.at) >= (warp.turn, warp.at))
        issue(warp, now)

    run._issue = watched  # type: ignore[method-assign]
    run.run(turns=6)
    assert len(met) >= 20 and all(met)
    assert len(run.events["P", 0]) <= 6, "P is published once a turn, by the later warp"
    with pytest.raises(ValueError, match="meet"):
        loop(meet)


def test_events_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="publications"):
        loop(P)
    with pytest.raises(ValueError, match="begins with its wait"):
        Kernel((P,), (1.0,), False)
    with pytest.raises(ValueError, match="'loaded'"):
        Kernel((Op("other", 1, event="S"), P), (1.0,), True)
    with pytest.raises(ValueError, match="'factor'"):
        loop(rescaling=rescaling(16))
    never = (Op("other", 1, event="factor"),)
    with pytest.raises(RuntimeError, match="nothing can go on"):
        cycles(loop(Op("other", 1, event="factor"), rescaling=never), QUICK)


# ---- SASS ---------------------------------------------------------------------------------------


def listing(*lines: str) -> str:
    """What nvdisasm prints; a line is a label or ``text | stall results operands waits``."""
    out, address = [], 0
    for line in lines:
        if line.endswith(":"):
            out.append(line)
            continue
        text, _, control = line.partition("|")
        stall, results, operands, waits = (int(n) for n in (control or "1 7 7 0").split())
        high = (stall | results << 5 | operands << 8 | waits << 11) << 41
        out.append(f"        /*{address:04x}*/    {text.strip()} ;    /* 0x{1:016x} */")
        out.append(f"                              /* 0x{high:016x} */")
        address += 16
    return "\n".join(out)


LOOP = (
    *(".L_x_0:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R5", "@!P0 BRA `(.L_x_0)"),
    *("LDTM.x32 R4, tmem[UR5] | 1 2 7 0", "@P1 BRA `(.L_x_1)"),
    *(["FSEL R4, R4, -INF, P2"] * 9),
    *(".L_x_1:", "MUFU.EX2 R4, R4 | 8 0 7 4", "MUFU.EX2 R5, R5", "STTM.x8 tmem[UR5], R4 | 2 7 1 1"),
    *("FENCE.VIEW.ASYNC.T", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], RZ", "BRA.U UP0, `(.L_x_0)", "EXIT"),
)


def test_scheduling_is_read_from_the_encoding() -> None:
    code = sass.parse(listing(*LOOP)).code
    exp = next(x for x in code if x.mnemonic == "MUFU")
    assert (exp.stall, exp.results, exp.operands, exp.waits) == (8, 0, 7, 4)
    assert code[1].target == ".L_x_0" and code[1].predicated
    with pytest.raises(ValueError, match="-hex"):
        sass.parse("nothing")


def test_the_loop_is_the_shortest_way_round() -> None:
    code = sass.loop(sass.parse(listing(*LOOP)), "MUFU", 2)
    assert sass.tally(code)["MUFU"] == 2 and "FSEL" not in sass.tally(code)
    with pytest.raises(ValueError, match="3 MUFU"):
        sass.loop(sass.parse(listing(*LOOP)), "MUFU", 3)


def test_the_shortest_way_has_fewest_instructions_not_blocks() -> None:
    two_ways = (
        *(".L_x_0:", "LDTM.x32 R4, tmem[UR5]", "@P1 BRA `(.L_x_1)"),
        *(*["FSEL R4, R4, -INF, P2"] * 9, "BRA `(.L_x_3)"),
        *(".L_x_1:", "NOP", ".L_x_2:", "NOP"),
        *(".L_x_3:", "MUFU.EX2 R4, R4", "BRA.U UP0, `(.L_x_0)", "EXIT"),
    )
    assert "FSEL" not in sass.tally(sass.loop(sass.parse(listing(*two_ways)), "MUFU", 1))


def test_a_stream_begins_at_the_wait_for_s_and_knows_its_events() -> None:
    ops = counts.stream(sass.loop(sass.parse(listing(*LOOP)), "MUFU", 2))
    assert [op.event for op in ops if op.event] == ["S", "P"]
    assert ops[0].event == "S" and [op.kind for op in ops].count("exp") == 2
    (load,) = (op for op in ops if op.kind == "load")
    assert (load.registers, load.results) == (32, 2)


def test_counts_split_into_tiles_and_once() -> None:
    made = counts.split({"a": 10, "b": 3}, {"a": 18, "b": 3}, 4)
    assert made == {"tiles": 4, "more": {"a": 8}, "once": {"a": 2, "b": 3}}


# ---- the committed counts -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(counts.SOURCES))
def kernel(request: pytest.FixtureRequest) -> Counted:
    return committed()[request.param]


def test_every_kernel_does_the_two_products_of_a_tile(kernel: Counted) -> None:
    assert cost_model._flop(kernel.tile) == FLOP
    assert kernel.mma == (1024 if kernel.bits == 16 else 512)


def test_the_loop_has_what_was_executed(kernel: Counted) -> None:
    """ptxas moves and packs, but a row's exponentials and conversions stay as many."""
    tile = kernel.tile
    exps = sum(count for name, count in tile.items() if name.startswith("ex2."))
    assert kernel.of_loop("exp") * 4 == exps
    packed = "cvt.rn.bf16x2.f32" if kernel.bits == 16 else "cvt.rn.satfinite.e4m3x2.f32"
    assert kernel.of_loop("pack") * 4 == tile[packed] == 128 * 128 / 2 / 32
    registers = sum(op.registers for op in kernel.loop if op.kind == "load") * kernel.warps
    assert registers == 128


def test_our_kernel_is_counted_as_it_is_shipped() -> None:
    for name, source in counts.SOURCES.items():
        if source.ours:
            again = f"count it again: python -m ptx.counts {name}"
            assert committed()[name].emulated == counts.shipped(source.arch), again


def test_our_kernel_takes_its_fullest_unit_less_than_fa4_fp8_does() -> None:
    ours, theirs = (max(units(committed()[n]).values()) for n in ("ours_100", "fa4_fp8_100"))
    assert ours < theirs


# ---- what was published -------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.kernel)
def test_rates_of_exp_and_products_agree_with_profiles(profile: cost_model.Profile) -> None:
    """The same time from either unit's share: half a unit of the last digit published, of each."""
    kernels = committed()
    by_exp = units(kernels[profile.kernel])["exp"] / profile.exp
    rounding = 0.0005 / profile.tensor + 0.0005 / profile.exp
    by_products = published_cycles(profile, kernels)
    assert by_exp == pytest.approx(by_products, rel=2 * rounding)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.kernel)
def test_profiles_are_within_the_stated_error(profile: cost_model.Profile) -> None:
    assert abs(error(profile, committed())) <= ERROR


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_handshake_is_the_fit_and_the_error_that_of_leaving_one_out() -> None:
    kernels, grid = committed(), [25.0 * n for n in range(4, 15)]
    assert fitted(PROFILES, kernels, grid) == HANDSHAKE
    left_out = []
    for profile in PROFILES:
        others = [p for p in PROFILES if p is not profile]
        left_out.append(abs(error(profile, kernels, fitted(others, kernels, grid))))
    assert ERROR - 0.01 < max(left_out) <= ERROR


# ---- what it prints -----------------------------------------------------------------------------


def test_bench_prints_the_model_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--model", "sm100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("MODELLED, not measured") and "ours, MXFP8" in text
    assert main(["--model", "sm100", "--json", str(tmp_path / "model.json")]) == 0
    document = json.loads((tmp_path / "model.json").read_text())
    assert set(document["modelled"]) == set(counts.SOURCES)
    for row in document["modelled"].values():
        low, middle, high = row["cycles"]
        assert max(row["units"].values()) <= low <= middle <= high
        assert row["pflops"] == sorted(row["pflops"])


def test_every_rate_has_a_source() -> None:
    assert all(rate.source for rate in cost_model.RATES.values())
    assert len(cost_tables.unit_rows(committed())) == 1 + len(counts.SOURCES)


# ---- counted again ------------------------------------------------------------------------------

MISSING = [name for name in ("cutlass", "tvm_ffi", "flash_attn", "quack") if not find_spec(name)]
MISSING += [] if sass.disassembler() else ["nvdisasm"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the PTX executor")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("name", ["ours_100", "ours_103", "fa4_fp8_100"])
def test_committed_counts_are_what_the_executor_counts(name: str) -> None:
    assert recounted([name, "--print"]) == json.loads(COUNTS.read_text())["kernels"][name]


def recounted(arguments: Sequence[str]) -> dict[str, Any]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-m", "ptx.counts", *arguments]
    environment = dict(os.environ, PYTHONPATH=path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
