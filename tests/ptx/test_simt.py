"""Control flow, warp-wide operations, memories and barriers, and the faults to be found."""

from __future__ import annotations

import numpy as np
import pytest

from ptx import build
from ptx.lower import UnsupportedOpcode
from ptx.machine import ADVERSARIAL, ExecutionError, Schedule
from ptx.parser import PtxSyntaxError, parse
from ptx.snippets import execute, module, program

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the core")

LANE = "mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, 4; add.u64 %d0, %d0, out;\n"
SHARED = ".extern .shared .align 1024 .b8 smem[];"
schedules = pytest.mark.parametrize("schedule", ADVERSARIAL, ids=lambda s: f"{s.timing}-{s.order}")


def ints(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


@schedules
def test_divergent_loops_reconverge(schedule: Schedule) -> None:
    """Lane i runs i % 5 iterations; the aligned barrier and the shuffle need the whole warp."""
    out = ints(64)
    execute(
        LANE
        + """
  rem.u32 %r1, %r0, 5; mov.b32 %r2, 0;
LOOP:
  setp.eq.u32 %p0, %r1, 0; @%p0 bra AFTER;
  add.u32 %r2, %r2, %r0; sub.u32 %r1, %r1, 1; bra LOOP;
AFTER:
  bar.sync 0;
  shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
  st.global.b32 [%d0], %r3;
""",
        {"out": out},
        block=(64, 1, 1),
        schedule=schedule,
    )
    own = np.arange(64) % 5 * np.arange(64)
    assert np.array_equal(out, own[np.arange(64) ^ 1])


def test_inline_assembly_scopes_redeclare_names() -> None:
    out = ints(32)
    scope = """
  { .reg .pred P; .reg .b32 t; mov.b32 t, %r5;
    AGAIN: add.u32 t, t, 1; setp.lt.u32 P, t, 4; @P bra AGAIN; mov.b32 %r5, t; }
"""
    body = LANE + "mov.b32 %r5, 0;\n" + scope + "sub.u32 %r5, %r5, 2;\n" + scope
    execute(body + "st.global.b32 [%d0], %r5;", {"out": out})
    assert (out == 4).all()


def test_votes_shuffles_and_reductions() -> None:
    out = ints(32 * 5)
    execute(
        LANE
        + """
  setp.gt.u32 %p0, %r0, 27; vote.sync.ballot.b32 %r1, %p0, -1; st.global.b32 [%d0], %r1;
  shfl.sync.idx.b32 %r2, %r0, 3, 31, -1; st.global.b32 [%d0+128], %r2;
  shfl.sync.down.b32 %r3|%p1, %r0, 4, 31, -1; selp.b32 %r3, %r3, -1, %p1;
  st.global.b32 [%d0+256], %r3;
  shfl.sync.bfly.b32 %r4, %r0, 1, 0x1C1F, -1; st.global.b32 [%d0+384], %r4;
  redux.sync.add.s32 %r5, %r0, -1; st.global.b32 [%d0+512], %r5;
""",
        {"out": out},
    )
    rows = out.reshape(5, 32)
    lane = np.arange(32)
    assert (rows[0].view("u4") == 0xF0000000).all()
    assert (rows[1] == 3).all()
    assert np.array_equal(rows[2], np.where(lane < 28, lane + 4, -1))
    assert np.array_equal(rows[3], lane ^ 1)
    assert (rows[4] == 31 * 16).all()


@schedules
def test_elect_picks_one_lane_for_a_mask(schedule: Schedule) -> None:
    out = ints(32)
    execute(
        LANE
        + """
  elect.sync %r1|%p0, -1; elect.sync %r2|%p1, -1;
  selp.b32 %r3, 1, 0, %p0; @%p1 add.u32 %r3, %r3, 1; st.global.b32 [%d0], %r3;
""",
        {"out": out},
        schedule=schedule,
    )
    assert sorted(out.tolist()) == [0] * 31 + [2]


REDUCE = (
    LANE
    + """
  mov.b32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
  st.shared.b32 [%r2], %r0;
  BARRIER
  xor.b32 %r3, %r0, 96; shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3;
  ld.shared.b32 %r4, [%r3]; st.global.b32 [%d0], %r4;
"""
)


@schedules
def test_shared_memory_and_bar_sync(schedule: Schedule) -> None:
    out = ints(128)
    body = REDUCE.replace("BARRIER", "bar.sync 0;")
    execute(
        body, {"out": out}, shared=SHARED, block=(128, 1, 1), dynamic_shared=512, schedule=schedule
    )
    assert np.array_equal(out, np.arange(128) ^ 96)


@schedules
@pytest.mark.parametrize(
    ("operation", "threshold", "expected"),
    [("or", 63, 1), ("or", 128, 0), ("and", 0, 1), ("and", 1, 0)],
)
def test_reducing_barrier(
    schedule: Schedule, operation: str, threshold: int, expected: int
) -> None:
    """Of the predicates of all four warps; again, negated, and again where none is true."""
    out = ints(128)
    body = f"""
  setp.ge.u32 %p0, %r0, {threshold}; setp.lt.u32 %p2, %r0, 0;
  barrier.cta.red.{operation}.pred %p1, 3, 128, %p0; selp.b32 %r1, 1, 0, %p1;
  bar.red.{operation}.pred %p1, 3, 128, !%p2; @!%p1 trap;
  bar.red.{operation}.pred %p1, 3, 128, %p2; @%p1 trap;
  st.global.b32 [%d0], %r1;
"""
    execute(LANE + body, {"out": out}, block=(128, 1, 1), schedule=schedule)
    assert (out == expected).all()


def test_a_barrier_that_only_some_reduce_is_an_error() -> None:
    body = """
  setp.ge.u32 %p0, %r0, 32; @%p0 bra OTHER;
  bar.sync 1, 64; bra END;
OTHER: bar.red.or.pred %p1, 1, 64, %p0;
END:
"""
    with pytest.raises(ExecutionError, match="disagree on what it reduces"):
        execute(LANE + body, {"out": ints(64)}, block=(64, 1, 1))


@schedules
@pytest.mark.parametrize("instead", ["", "bar.sync 1, 64;", "bar.arrive 0, 128;"])
def test_a_missing_barrier_is_found(schedule: Schedule, instead: str) -> None:
    """Whatever the order: either the bytes are not there yet, or nobody promised that they are."""
    body = REDUCE.replace("BARRIER", instead)
    with pytest.raises(ExecutionError) as caught:
        execute(
            body,
            {"out": ints(128)},
            shared=SHARED,
            block=(128, 1, 1),
            dynamic_shared=512,
            schedule=schedule,
        )
    assert caught.value.kind in ("race", "unwritten", "deadlock")


def test_write_after_read_needs_a_barrier() -> None:
    body = REDUCE.replace("BARRIER", "bar.sync 0;") + "st.shared.b32 [%r2], %r4;"
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError, match=r"^race"):
            execute(
                body,
                {"out": ints(128)},
                shared=SHARED,
                block=(128, 1, 1),
                dynamic_shared=512,
                schedule=schedule,
            )


def test_write_after_two_unordered_reads() -> None:
    """Warps 0 and 1 read a word; warp 2, which waits for warp 1 only, overwrites it."""
    body = """
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5;
  setp.eq.u32 %p3, %r0, 64; @%p3 st.shared.b32 [%r1], %r0; bar.sync 0;
  setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r2, 1; setp.eq.u32 %p2, %r2, 2;
  @!%p2 ld.shared.b32 %r3, [%r1];
  WAIT
  @%p3 st.shared.b32 [%r1], %r0;
"""
    launch = {"shared": SHARED, "block": (96, 1, 1), "dynamic_shared": 64}
    for schedule in ADVERSARIAL:
        execute(body.replace("WAIT", "bar.sync 0;"), {"out": ints(1)}, schedule=schedule, **launch)
        some = body.replace("WAIT", "@%p1 bar.arrive 1, 64; @%p2 bar.sync 1, 64;")
        with pytest.raises(ExecutionError, match=r"^race"):
            execute(some, {"out": ints(1)}, schedule=schedule, **launch)


@schedules
def test_bytes_of_a_word_may_belong_to_different_warps(schedule: Schedule) -> None:
    out = ints(1)
    body = """
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; and.b32 %r2, %r0, 31; shr.u32 %r3, %r0, 5;
  setp.ne.u32 %p0, %r2, 0; add.u32 %r4, %r1, %r3; cvt.u16.u32 %h0, %r3;
  @!%p0 st.shared.u8 [%r4], %h0; BARRIER
  setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
  ld.shared.b32 %r5, [%r1]; st.global.b32 [out], %r5;
DONE:
"""
    launch = {"shared": SHARED, "block": (128, 1, 1), "dynamic_shared": 64, "schedule": schedule}
    execute(body.replace("BARRIER", "bar.sync 0;"), {"out": out}, **launch)
    assert out[0] == 0x03020100
    with pytest.raises(ExecutionError) as caught:
        execute(body.replace("BARRIER", ""), {"out": out}, **launch)
    assert caught.value.kind in ("race", "unwritten")


def test_deadlock_names_warps_and_barriers() -> None:
    body = "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 3, 64; bar.sync 5;"
    with pytest.raises(ExecutionError) as caught:
        execute(body, {"out": ints(1)}, block=(64, 1, 1))
    assert caught.value.kind == "deadlock"
    assert "warp 0" in str(caught.value) and "barrier 3 (32 of 64 threads)" in str(caught.value)
    assert "warp 1" in str(caught.value) and "barrier 5 (32 of 64 threads)" in str(caught.value)


def test_lanes_that_never_come_are_named() -> None:
    body = "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 4; @%p0 bra SKIP; bar.warp.sync -1;"
    body += "SKIP: bar.sync 0;"
    with pytest.raises(ExecutionError, match="waits for lanes 0xf"):
        execute(body, {"out": ints(1)})


def test_bounds_alignment_and_never_written() -> None:
    with pytest.raises(
        ExecutionError, match="outside every allocation; nearest: offset 4 of out"
    ) as caught:
        execute("st.global.b32 [out+4], 1;", {"out": ints(1)})
    assert caught.value.kind == "bounds"
    with pytest.raises(ExecutionError, match="alignment"):
        execute("ld.global.b32 %r0, [out+2];", {"out": ints(2)})
    with pytest.raises(ExecutionError, match="shared byte 12 of CTA 0, which nothing has written"):
        execute(
            "mov.b32 %r0, smem; ld.shared.b32 %r1, [%r0+12];",
            {"out": ints(1)},
            shared=SHARED,
            dynamic_shared=64,
        )
    with pytest.raises(ExecutionError, match="outside its 64 bytes"):
        execute(
            "mov.b32 %r0, smem; st.shared.b32 [%r0+64], 1;",
            {"out": ints(1)},
            shared=SHARED,
            dynamic_shared=64,
        )


def test_unknown_opcodes_and_modifiers_are_refused_with_their_line() -> None:
    with pytest.raises(
        UnsupportedOpcode, match=r"line 9: unknown opcode: 'frobnicate\.b32 %r0, %r1;'"
    ):
        program("\nfrobnicate.b32 %r0, %r1;")
    with pytest.raises(UnsupportedOpcode, match=r"modifiers \.sparkle"):
        program("add.sparkle.f32 %f0, %f1, %f2;".replace("sparkle.f32", "f32.sparkle"))
    with pytest.raises(PtxSyntaxError, match="unknown name 'NOWHERE'"):
        program("bra NOWHERE;")
    with pytest.raises(PtxSyntaxError, match=r"unsupported directive '\.func'"):
        parse(".version 9.0\n.target sm_90a\n.func f() { ret; }")


def test_a_runaway_loop_hits_the_limit() -> None:
    from ptx.machine import Launch, Memory, run

    with pytest.raises(ExecutionError, match="limit"):
        run(program("AGAIN: bra AGAIN;"), Launch(), Memory(), step_limit=10_000)


def test_atomics_add_once_for_each_lane() -> None:
    out = ints(2)
    execute(
        "mov.b32 %r1, 1; atom.global.add.u32 %r0, [out], %r1;"
        "atom.global.max.s32 %r2, [out+4], %r0;",
        {"out": out},
        block=(64, 1, 1),
        grid=(3, 1, 1),
    )
    assert out.tolist() == [192, 191]


def test_static_and_dynamic_shared_layout() -> None:
    out = ints(32)
    body = (
        LANE
        + ".shared .align 4 .b8 fixed[16]; mov.b32 %r1, fixed; mov.b32 %r2, smem;"
        + "sub.u32 %r3, %r2, %r1; st.global.b32 [%d0], %r3;"
    )
    execute(body, {"out": out}, shared=SHARED, dynamic_shared=16)
    assert (out == 1024).all()


@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (128, 32), (0, 1), (132, 1)])
def test_bank_conflicts_are_counted(stride: int, passes: int) -> None:
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mad.lo.u32 %r2, %r0, {stride}, %r1;
  st.shared.b32 [%r2], 1;
"""
    result = execute(body, {"out": ints(1)}, shared=SHARED, dynamic_shared=1 << 13)
    assert result.work["st.shared wavefronts"] == passes
    assert result.by_opcode["st.shared.b32"] == 1


def test_stmatrix_and_ldmatrix_are_inverse() -> None:
    out = ints(64)
    body = (
        LANE
        + """
  mov.b32 %r1, smem; and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 4; add.u32 %r1, %r1, %r2;
  add.u32 %r3, %r0, 0x10000; add.u32 %r4, %r0, 0x20000;
  stmatrix.sync.aligned.m8n8.x2.TRANSshared.b16 [%r1], {%r3, %r4};
  ldmatrix.sync.aligned.m8n8.x2.TRANSshared.b16 {%r5, %r6}, [%r1];
  st.global.b32 [%d0], %r5; st.global.b32 [%d0+128], %r6;
"""
    )
    for transposed in ("", "trans."):
        execute(body.replace("TRANS", transposed), {"out": out}, shared=SHARED, dynamic_shared=256)
        assert np.array_equal(out[:32], np.arange(32) + 0x10000)
        assert np.array_equal(out[32:], np.arange(32) + 0x20000)


@schedules
def test_cluster_shared_memory(schedule: Schedule) -> None:
    """Each CTA of a pair reads the other's word after a cluster barrier."""
    out = ints(2)
    body = """
  mov.u32 %r0, %cluster_ctarank; mov.b32 %r1, smem; add.u32 %r2, %r0, 40; st.shared.b32 [%r1], %r2;
  barrier.cluster.arrive; barrier.cluster.wait;
  xor.b32 %r3, %r0, 1; mapa.shared::cluster.u32 %r4, %r1, %r3; ld.shared::cluster.b32 %r5, [%r4];
  mul.wide.u32 %d0, %r0, 4; add.u64 %d0, %d0, out; st.global.b32 [%d0], %r5;
  FINAL
"""
    launch = {
        "shared": SHARED,
        "dynamic_shared": 16,
        "grid": (2, 1, 1),
        "cluster": (2, 1, 1),
        "schedule": schedule,
    }
    done = "barrier.cluster.arrive; barrier.cluster.wait;"
    execute(body.replace("FINAL", done), {"out": out}, **launch)
    assert out.tolist() == [41, 40]


def test_a_peer_that_has_exited_is_out_of_reach() -> None:
    body = """
  mov.b32 %r1, smem; st.shared.b32 [%r1], 7; mov.u32 %r0, %cluster_ctarank;
  barrier.cluster.arrive; barrier.cluster.wait;
  setp.eq.u32 %p0, %r0, 0; @%p0 ret;
  mapa.shared::cluster.u32 %r4, %r1, 0; ld.shared::cluster.b32 %r5, [%r4];
"""
    with pytest.raises(ExecutionError, match="CTA 0, which has exited"):
        launch = {"dynamic_shared": 16, "grid": (2, 1, 1), "cluster": (2, 1, 1)}
        execute(
            body, {"out": ints(1)}, shared=SHARED, schedule=Schedule("late", "backward"), **launch
        )


def test_parser_keeps_lines_and_offsets() -> None:
    parsed = parse(module("mov.b32 %r0, 1;", ".align 64 .b8 map[128], .u8 flag, .u64 pointer"))
    kernel = parsed.kernels["test"]
    assert [(p.offset, p.size) for p in kernel.parameters] == [(0, 128), (128, 1), (136, 8)]
    assert kernel.instructions[0].opcode == "mov.b32" and kernel.instructions[0].line == 8
