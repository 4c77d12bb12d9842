"""The cost model: its arithmetic on counts made by hand, how loops are read from SASS, and what it
says of published kernels. No number here was measured. The replay: test_cost_replay.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ptx import build, counts, sass

from ringfa4.launch import cost_model, cost_tables
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
    petaflops,
    published_cycles,
    rescaled_share,
    units,
)
from ringfa4.launch.cost_replay import Replayed
from ringfa4.launch.cost_units import RATES, instructions, memory_cycles

# ---- counts to cycles ---------------------------------------------------------------------------


OPS = "other/1/7/7/0//S exp/1/7/7/0 fma2/1/7/7/0 pack/1/7/7/0 other/1/7/7/0//P"


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
        "loops": [OPS],
        "parts": [1.0],
        "shared_scales": False,
        "halves": False,
        "rescales": False,
    }
    return made | changes


def test_products_of_a_tile_take_flop_over_rate() -> None:
    kernel = counted("x", entry())
    assert flop(kernel) == FLOP
    assert kernel.mma == FLOP / 8192 == 1024 == sum(kernel.products)
    eight = {"mma mxf8f6f4 M256 N128": 4, "mma f8f6f4 M128 N128 A in tensor memory": 8}
    assert counted("x", entry(dtype="mxfp8", more=eight)).mma == 512


def flop(kernel: Counted) -> float:
    return sum(x.flop * count for x, count in instructions(kernel.tile))


def test_narrow_products_take_as_long_as_their_operands_from_shared_memory() -> None:
    """Four steps of 32 keys deep: (128 + 64) x 32 bytes each, at 128 a clock; of a pair, (256 + 64)
    x 32 bytes from two shared memories.
    """
    of_p = "mma mxf8f6f4 M{} N128 A in tensor memory"
    one = {"mma mxf8f6f4 M128 N64": 8 * 2, of_p.format(128): 4 * 2}
    pair = {"mma mxf8f6f4 M256 N64": 4 * 2, of_p.format(256): 2 * 2}
    for more, half in ((one, 192), (pair, 160)):
        kernel = counted("x", entry(dtype="mxfp8", more=more, halves=True, loops=[OPS, OPS]))
        assert flop(kernel) == FLOP and kernel.mma == 512
        assert kernel.products == (256, 2 * half)
        timing = cost_model.timing_of(kernel)
        assert (timing.values, timing.logits) == (256, half)
        whole = cost_model.timing_of(replace(kernel, halves=False))
        assert whole.logits == 2 * half


def test_products_are_a_floor_like_the_fullest_unit() -> None:
    loop = "other/1/7/7/0//S other/1/7/7/0//loaded other/1/7/7/0//P"
    more = {"mma mxf8f6f4 M128 N64": 16, "mma mxf8f6f4 M128 N128 A in tensor memory": 8}
    kernel = counted("x", entry(dtype="mxfp8", more=more, halves=True, loops=[loop, loop]))
    assert cost_model.modelled(kernel).low >= 640 > max(units(kernel).values())


def test_units_are_instructions_times_what_they_take() -> None:
    found = units(counted("x", entry()))
    assert found["exp"] == 8 and found["fma"] == 2 and found["pack"] == 4 and found["alu"] == 2
    assert found["issue"] == 5
    assert units(counted("x", entry(arch="sm_103a")))["exp"] == 4
    two = units(counted("x", entry(loops=[OPS, OPS])))
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
    (code,) = sass.loops(sass.parse(listing(*LOOP)), "MUFU", 2)
    assert sass.tally(code)["MUFU"] == 2 and "FSEL" not in sass.tally(code)
    with pytest.raises(ValueError, match="3 MUFU"):
        sass.loops(sass.parse(listing(*LOOP)), "MUFU", 3)


def test_the_shortest_way_has_fewest_instructions_not_blocks() -> None:
    two_ways = (
        *(".L_x_0:", "LDTM.x32 R4, tmem[UR5]", "@P1 BRA `(.L_x_1)"),
        *(*["FSEL R4, R4, -INF, P2"] * 9, "BRA `(.L_x_3)"),
        *(".L_x_1:", "NOP", ".L_x_2:", "NOP"),
        *(".L_x_3:", "MUFU.EX2 R4, R4", "BRA.U UP0, `(.L_x_0)", "EXIT"),
    )
    (code,) = sass.loops(sass.parse(listing(*two_ways)), "MUFU", 1)
    assert "FSEL" not in sass.tally(code)


def test_a_stream_begins_at_the_wait_for_s_and_knows_its_events() -> None:
    (code,) = sass.loops(sass.parse(listing(*LOOP)), "MUFU", 2)
    ops = counts.stream(code)
    assert [op.event for op in ops if op.event] == ["S", "P"]
    assert ops[0].event == "S" and [op.kind for op in ops].count("exp") == 2
    (load,) = (op for op in ops if op.kind == "load")
    assert (load.registers, load.results) == (32, 2)


def half(number: int, masked: int, *middle: str) -> tuple[str, ...]:
    """A loop with a copy for masked tiles, ``masked`` instructions longer, and a way out."""
    wait, copy, join = (f".L_x_{10 * number + n}" for n in range(3))
    load = "LDTM.x32 R4, tmem[UR5]"
    return (
        *(f"{wait}:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R5", f"@P1 BRA `({copy})"),
        *(load, "SYNCS.ARRIVE.TRANS64 RZ, [UR6], RZ", *middle, f"BRA `({join})"),
        *(f"{copy}:", load, *["FSEL R4, R4, -INF, P2"] * masked, *middle),
        *(f"{join}:", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], RZ", f"BRA.U UP0, `({wait})"),
    )


EXPS = ["MUFU.EX2 R4, R4"] * 8
MEET, PUBLISH = "BAR.SYNC R1, 0x40", ["STTM.x8 tmem[UR5], R4", "FENCE.VIEW.ASYNC.T"]
EARLY_HALF = half(1, 9, *EXPS, *EXPS, MEET, *PUBLISH)
LATE_HALF = half(2, 12, MEET, *EXPS, *PUBLISH, "NOP", *EXPS, *PUBLISH)


@pytest.mark.parametrize("code", [(*EARLY_HALF, *LATE_HALF), (*LATE_HALF, *EARLY_HALF)])
def test_both_halves_are_found_and_the_late_one_is_first(
    code: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a half and its masked copy, which is shorter than the other half's."""
    monkeypatch.setattr(sass, "disassembled", lambda _: listing(*code, "EXIT"))
    made = counts.of_loops(b"", 14, halves=True)
    assert not any("FSEL" in tally for tally in made["sass"])
    assert [loop.count("/P") for loop in made["loops"]] == [2, 1]
    assert [loop.count("/loaded") for loop in made["loops"]] == [1, 1]
    assert counts.shares(made["loops"]) == [0.75, 0.25]


def test_halves_that_meet_alike_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    same = (*LATE_HALF, *half(3, 9, MEET, *EXPS, *EXPS, *PUBLISH), "EXIT")
    monkeypatch.setattr(sass, "disassembled", lambda _: listing(*same))
    with pytest.raises(ValueError, match="which is late"):
        counts.of_loops(b"", 14, halves=True)
    one = counts.of_loops(b"", 14, warps=2)
    assert not one["halves"] and one["loops"][0] == one["loops"][1] and len(one["sass"]) == 1


def test_shares_of_parts_follow_from_who_publishes_how_often() -> None:
    for published, shares in (
        ((1, 1), [1.0]), ((2, 2), [0.5, 0.5]), ((2, 1), [0.75, 0.25]), ((3, 3), [1 / 3] * 3),
    ):  # fmt: skip
        made = counts.shares(["other/1/7/7/0//P " * n for n in published])
        assert made == pytest.approx(shares) and len(made) == max(published)


def test_counts_split_into_tiles_and_once() -> None:
    made = counts.split({"a": 10, "b": 3}, {"a": 18, "b": 3}, 4)
    assert made == {"tiles": 4, "more": {"a": 8}, "once": {"a": 2, "b": 3}}


# ---- the committed counts -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(counts.SOURCES))
def kernel(request: pytest.FixtureRequest) -> Counted:
    return committed()[request.param]


def test_every_kernel_does_the_two_products_of_a_tile(kernel: Counted) -> None:
    assert flop(kernel) == FLOP
    assert kernel.mma == (1024 if kernel.bits == 16 else 512)


def test_operands_from_shared_memory_follow_from_the_shapes(kernel: Counted) -> None:
    """What the executor read is what :class:`Instruction` says: it makes the time of products."""
    read = sum(x.shared_bytes * count for x, count in instructions(kernel.tile))
    assert read == kernel.tile["mma operand bytes from shared memory"]
    assert sum(kernel.products) >= kernel.mma and (
        kernel.halves or sum(kernel.products) == kernel.mma
    )


def test_the_loop_has_what_was_executed(kernel: Counted) -> None:
    """ptxas moves and packs, but a row's exponentials and conversions stay as many."""
    tile = kernel.tile
    exps = sum(count for name, count in tile.items() if name.startswith("ex2."))
    assert kernel.of_loops("exp") * 4 == exps
    packed = "cvt.rn.bf16x2.f32" if kernel.bits == 16 else "cvt.rn.satfinite.e4m3x2.f32"
    assert kernel.of_loops("pack") * 4 == tile[packed] == 128 * 128 / 2 / 32
    loads = [op for loop in kernel.loops for op in loop if op.kind == "load"]
    assert sum(op.registers for op in loads) == 128


def test_our_kernel_is_counted_as_it_is_shipped() -> None:
    for name, source in counts.SOURCES.items():
        if source.ours:
            spec, kernel = counts.shipped(source.arch), committed()[name]
            again = f"count it again: python -m ptx.counts {name}"
            found = (kernel.emulated, kernel.pairs, kernel.halves)
            assert found == (spec.emulated, spec.ctas == 2, spec.early), again


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
    assert all(rate.source for rate in RATES.values())
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
