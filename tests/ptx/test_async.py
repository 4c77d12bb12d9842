"""mbarriers and asynchronous copies: results under every schedule, missing synchronisation."""

from __future__ import annotations

import numpy as np
import pytest

from ptx import build
from ptx.encode import swizzled, tensor_map
from ptx.machine import ADVERSARIAL, ExecutionError, Launch, Memory, Result, Schedule, pack, run
from ptx.snippets import execute, program

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the core")

SHARED = ".extern .shared .align 1024 .b8 smem[];"
schedules = pytest.mark.parametrize("schedule", ADVERSARIAL, ids=lambda s: f"{s.timing}-{s.order}")
RNG = np.random.default_rng(3)


def wait(barrier: str, parity: str) -> str:
    return (
        f"{{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{barrier}], {parity};"
        " @!P bra AGAIN; }\n"
    )


def fails(kind: str, body: str, arrays: dict[str, np.ndarray], **launch) -> ExecutionError:
    """The body must fail with `kind` under every schedule."""
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError) as caught:
            execute(body, arrays, shared=SHARED, schedule=schedule, **launch)
        assert caught.value.kind == kind, caught.value
    return caught.value


# Warp 0 produces four values in turn through a one-slot buffer, warp 1 consumes them.
# Barriers: full at smem+0, empty at smem+8, slot at smem+128.
PIPELINE = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5; and.b32 %r3, %r0, 31;
  shl.b32 %r4, %r3, 2; add.u32 %r4, %r4, %r1;
  setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
  mbarrier.init.shared.b64 [%r1], 32; mbarrier.init.shared.b64 [%r1+8], 32;
READY: bar.sync 0;
  mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 1;
  setp.eq.u32 %p2, %r2, 1; @%p2 bra CONSUME;
PRODUCE:
  {wait("%r1+8", "%r7")} xor.b32 %r7, %r7, 1;
  add.u32 %r8, %r5, %r3; st.shared.b32 [%r4+128], %r8;
  mbarrier.arrive.shared.b64 _, [%r1];
  add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 4; @%p3 bra PRODUCE; bra END;
CONSUME:
  {wait("%r1", "%r6")} xor.b32 %r6, %r6, 1;
  ld.shared.b32 %r8, [%r4+128]; mad.lo.u32 %r9, %r9, 10, %r8;
  mbarrier.arrive.shared.b64 _, [%r1+8];
  add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 4; @%p3 bra CONSUME;
  mul.wide.u32 %d0, %r3, 4; add.u64 %d0, %d0, out; st.global.b32 [%d0], %r9;
END:
""".replace("mov.b32 %r5, 0;", "mov.b32 %r5, 0; mov.b32 %r9, 0;")
PIPELINE_LAUNCH = {"block": (64, 1, 1), "dynamic_shared": 256}


@schedules
def test_mbarrier_pipeline(schedule: Schedule) -> None:
    out = np.zeros(32, np.uint32)
    execute(PIPELINE, {"out": out}, shared=SHARED, schedule=schedule, **PIPELINE_LAUNCH)
    lane = np.arange(32)
    assert np.array_equal(out, ((lane * 10 + lane + 1) * 10 + lane + 2) * 10 + lane + 3)


def test_pipeline_without_full_wait_empty_wait_or_arrivals() -> None:
    arrays = {"out": np.zeros(32, np.uint32)}
    full, empty = wait("%r1", "%r6"), wait("%r1+8", "%r7")
    for schedule in ADVERSARIAL:
        for broken in (PIPELINE.replace(full, ""), PIPELINE.replace(empty, "")):
            with pytest.raises(ExecutionError) as caught:
                execute(broken, arrays, shared=SHARED, schedule=schedule, **PIPELINE_LAUNCH)
            assert caught.value.kind in ("race", "unwritten", "protocol"), caught.value
    error = fails(
        "deadlock",
        PIPELINE.replace("mbarrier.arrive.shared.b64 _, [%r1];", ""),
        arrays,
        **PIPELINE_LAUNCH,
    )
    assert "(phase 0, 32 of 32 arrivals and 0 bytes pending)" in str(error)
    error = fails(
        "protocol",
        PIPELINE.replace("_, [%r1];", "_, [%r1]; mbarrier.arrive.shared.b64 _, [%r1];"),
        arrays,
        **PIPELINE_LAUNCH,
    )
    fails(
        "protocol",
        PIPELINE.replace("mbarrier.init.shared.b64 [%r1], 32;", ""),
        arrays,
        **PIPELINE_LAUNCH,
    )


def test_a_try_wait_must_be_repeated() -> None:
    """It may return false early: then what follows is not ordered."""
    once = PIPELINE.replace("@!P bra AGAIN;", "")
    kinds = set()
    for seed in range(8):
        try:
            execute(
                once,
                {"out": np.zeros(32, np.uint32)},
                shared=SHARED,
                schedule=Schedule("random", "random", seed),
                **PIPELINE_LAUNCH,
            )
        except ExecutionError as error:
            kinds.add(error.kind)
    assert kinds and kinds <= {"race", "unwritten", "protocol"}


def test_two_phases_without_a_wait_alias() -> None:
    body = (
        "mov.b32 %r1, smem; mbarrier.init.shared.b64 [%r1], 1;"
        + "mbarrier.arrive.shared.b64 _, [%r1];" * 2
    )
    error = fails("protocol", body, {"out": np.zeros(1)}, block=(1, 1, 1), dynamic_shared=64)
    assert "completes phase 2" in str(error)


def test_barrier_bytes_are_opaque() -> None:
    body = "mov.b32 %r1, smem; mbarrier.init.shared.b64 [%r1], 1; ld.shared.b32 %r2, [%r1];"
    fails("race", body, {"out": np.zeros(1)}, block=(1, 1, 1), dynamic_shared=64)


# -- tensor copies --------------------------------------------------------------------------------


def tma(
    body: str,
    maps: list[bytes],
    arrays: dict[str, np.ndarray],
    schedule: Schedule | None = None,
    strict: bool = False,
    **launch,
) -> Result:
    """Run a body with tensor maps %map0... and the addresses of `arrays`."""
    declare = ", ".join(
        [f".align 64 .b8 m{k}[128]" for k in range(len(maps))] + [f".u64 {n}_p" for n in arrays]
    )
    head = "".join(
        f".reg .b64 %map{k}; mov.b64 %map{k}, m{k}; cvta.param.u64 %map{k}, %map{k};\n"
        for k in range(len(maps))
    )
    head += "".join(f".reg .b64 {n}; ld.param.u64 {n}, [{n}_p];\n" for n in arrays)
    lowered = program(head + body, declare, SHARED)
    memory = Memory()
    addresses = [memory.add(a, n) for n, a in arrays.items()]
    settings = {"dynamic_shared": 1 << 16, **launch}
    parameters = pack(lowered, *maps, *addresses)
    return run(lowered, Launch(parameters=parameters, **settings), memory, schedule, strict=strict)


LOAD = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
  cp.async.bulk.tensor.RANKd.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r1+1024], [%map0, {{COORDINATES}}], [%r1];
READY: bar.sync 0;
  {wait("%r1", "0")}
  mov.b32 %r2, %r0;
COPY:
  setp.ge.u32 %p1, %r2, BYTES; @%p1 bra DONE;
  add.u32 %r3, %r1, %r2; ld.shared.u8 %h0, [%r3+1024];
  cvt.u64.u32 %d0, %r2; add.u64 %d0, %d0, out; st.global.u8 [%d0], %h0;
  add.u32 %r2, %r2, 64; bra COPY;
DONE:
"""


def load(kind: str, array: np.ndarray, box, at, swizzle: int = 0, **options) -> np.ndarray:
    """The bytes that a TMA load leaves in shared memory."""
    schedule = options.pop("schedule", None)
    size = int(np.prod(box)) * array.itemsize
    out = np.zeros(size, np.uint8)
    body = LOAD.replace("BYTES", str(size)).replace("RANK", str(array.ndim))
    body = body.replace("COORDINATES", ", ".join(str(x) for x in at))
    tma(
        body,
        [tensor_map(array, kind, box, swizzle, **options)],
        {"out": out, "array": array},
        schedule,
        block=(64, 1, 1),
    )
    return out


def window(array: np.ndarray, box, at, fill=0) -> np.ndarray:
    """What a box at coordinates `at` (innermost first) holds, out-of-bounds elements filled."""
    out = np.full(tuple(box[::-1]), fill, array.dtype)
    for index in np.ndindex(out.shape):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            out[index] = array[place]
    return out


@schedules
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_tensor_load_swizzles(schedule: Schedule, swizzle: int) -> None:
    array = RNG.integers(0, 2**16, (40, 64), dtype=np.uint16)
    box = [8 << swizzle, 24]
    got = load("bf16", array, box, [0, 8], swizzle, schedule=schedule)
    assert np.array_equal(got, swizzled(window(array, box, [0, 8]), swizzle))


@pytest.mark.parametrize("at", [[-3, 5], [60, -2], [5, 38], [-100, 0], [0, 1000], [64, 40]])
def test_out_of_bounds_elements_are_zero(at: list[int]) -> None:
    array = RNG.integers(1, 2**16, (40, 64), dtype=np.uint16)
    got = load("u16", array, [16, 8], at)
    assert np.array_equal(got, window(array, [16, 8], at).reshape(-1).view(np.uint8))


def test_faults_of_an_operation_name_the_line_that_issued_it() -> None:
    """A copy from freed memory faults when it reads, long after it was issued."""
    body = BULK.replace("[source], 256", "[source+4096], 256")
    with pytest.raises(ExecutionError) as caught:
        arrays = {"source": np.zeros(64, np.float32), "target": np.zeros(64, np.float32)}
        execute(body, arrays, shared=SHARED, dynamic_shared=512)
    assert caught.value.kind == "bounds"
    assert "issued: 'cp.async.bulk.shared::cluster.global" in str(caught.value)


def test_out_of_bounds_fill_of_nan() -> None:
    array = RNG.standard_normal((4, 8)).astype(np.float32)
    got = load("f32", array, [8, 8], [4, 0], fill_nan=True).view(np.float32).reshape(8, 8)
    assert np.array_equal(np.isnan(got), np.isnan(window(array, [8, 8], [4, 0], np.nan)))


def test_rank_five() -> None:
    array = RNG.integers(0, 256, (3, 4, 2, 5, 32), dtype=np.uint8)
    box, at = [16, 3, 2, 2, 2], [16, 3, 0, 1, 2]
    assert np.array_equal(load("u8", array, box, at), window(array, box, at).reshape(-1))


def test_tensor_load_without_wait_expect_or_room() -> None:
    array = RNG.integers(0, 256, (8, 128), dtype=np.uint8)
    out = np.zeros(1024, np.uint8)
    maps = [tensor_map(array, "u8", [128, 8], 3)]
    good = LOAD.replace("BYTES", "1024").replace("RANK", "2").replace("COORDINATES", "0, 0")
    arrays = {"out": out, "array": array}
    for broken, kinds in (
        (good.replace(wait("%r1", "0"), ""), ("race",)),
        (good.replace("_, [%r1], 1024;", "_, [%r1], 512;"), ("race", "protocol", "deadlock")),
        (good.replace("_, [%r1], 1024;", "_, [%r1], 2048;"), ("deadlock",)),
        (good.replace("[%r1+1024], [%map0", "[%r1+1040], [%map0"), ("alignment",)),
        (good.replace("[%r1+1024], [%map0", "[%r1+65536], [%map0"), ("bounds",)),
    ):
        for schedule in ADVERSARIAL:
            with pytest.raises(ExecutionError) as caught:
                tma(broken, maps, arrays, schedule, block=(64, 1, 1))
            assert caught.value.kind in kinds, caught.value


STORE = """
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
  cvt.u64.u32 %d0, %r2; add.u64 %d0, %d0, data;
  ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0]; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
  FENCE
  bar.sync 0; setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;
  OPERATION [%map0, {COORDINATES}], [%r1];
  cp.async.bulk.commit_group; WAIT
DONE: bar.sync 0; TAIL
"""


def stored(operation: str = "cp", **change: str) -> str:
    names = {
        "cp": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
        "add": "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",
    }
    body = STORE.replace("OPERATION", names[operation])
    for key, default in (
        ("FENCE", "fence.proxy.async.shared::cta;"),
        ("WAIT", "cp.async.bulk.wait_group.read 0;"),
        ("COORDINATES", "0, 0"),
        ("TAIL", ""),
    ):
        body = body.replace(key, change.get(key, default))
    return body


@schedules
@pytest.mark.parametrize("operation", ["cp", "add"])
def test_tensor_store_and_reduce(schedule: Schedule, operation: str) -> None:
    """A 32 x 32 tile, 128-byte swizzle, half of it outside the tensor."""
    tile = RNG.standard_normal((32, 32)).astype(np.float32)
    target = RNG.standard_normal((24, 40)).astype(np.float32)
    want = target.copy()
    part = want[16:, 16:40]
    part[:] = tile[:8, :24] + (part if operation == "add" else 0)
    data = swizzled(tile, 3).view(np.float32)
    tma(
        stored(operation, COORDINATES="16, 16"),
        [tensor_map(target, "f32", [32, 32], 3)],
        {"data": data, "target": target},
        schedule,
        block=(256, 1, 1),
    )
    assert np.array_equal(target, want)


def test_store_needs_the_proxy_fence_and_the_read_wait() -> None:
    tile = RNG.standard_normal((32, 32)).astype(np.float32)
    target = np.zeros((32, 32), np.float32)
    maps, arrays = [tensor_map(target, "f32", [32, 32], 3)], {"data": tile, "target": target}
    overwrite = "mov.b32 %r4, 0; st.shared.b32 [%r3], %r4;"
    tma(stored(TAIL=overwrite), maps, arrays, block=(256, 1, 1))
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError, match=r"without a fence\.proxy\.async"):
            tma(stored(FENCE=""), maps, arrays, schedule, block=(256, 1, 1))
        with pytest.raises(ExecutionError, match="without a synchronisation"):
            tma(stored(WAIT="", TAIL=overwrite), maps, arrays, schedule, block=(256, 1, 1))


def test_a_store_left_unawaited_is_remarked_or_with_strict_refused() -> None:
    tile, target = np.ones((32, 32), np.float32), np.zeros((32, 32), np.float32)
    maps, arrays = [tensor_map(target, "f32", [32, 32], 3)], {"data": tile, "target": target}
    late = Schedule("late", "forward")
    result = tma(stored(WAIT=""), maps, arrays, late, block=(256, 1, 1))
    assert len(result.remarks) == 1 and "has exited" in result.remarks[0] and (target == 1).all()
    with pytest.raises(ExecutionError, match="has exited"):
        tma(stored(WAIT=""), maps, arrays, late, strict=True, block=(256, 1, 1))
    assert not tma(stored(), maps, arrays, late, strict=True, block=(256, 1, 1)).remarks


@schedules
def test_registers_stored_to_a_peer(schedule: Schedule) -> None:
    """st.async of a vector register: 16 bytes and a transaction in the other CTA."""
    out = np.zeros(4, np.uint32)
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank;
  setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
READY:
  barrier.cluster.arrive; barrier.cluster.wait;
  setp.ne.u32 %p1, %r9, 0; @%p1 bra RECEIVE; @%p0 bra DONE;
  mapa.shared::cluster.u32 %r2, %r1, 1; add.u32 %r3, %r2, 64;
  {{ .reg .v4 .s32 all; mov.s32 all.x, 1; mov.s32 all.y, 2; mov.s32 all.z, 3; mov.s32 all.w, 4;
  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%r3], all, [%r2]; }}
  bra DONE;
RECEIVE:
  {wait("%r1", "0")} @%p0 bra DONE;
  ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1+64];
  st.global.v4.b32 [out], {{%r4, %r5, %r6, %r7}};
DONE:
  barrier.cluster.arrive; barrier.cluster.wait;
"""
    pair = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "dynamic_shared": 128}
    execute(body, {"out": out}, shared=SHARED, schedule=schedule, **pair)
    assert out.tolist() == [1, 2, 3, 4]


# Both CTAs store a word to the first one and arrive there; it adds the words up.
GATHER_WAIT = wait("%r1", "0").replace("parity", "parity.acquire.cluster")
GATHER = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank;
  setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p1, %r9, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 2;
READY:
  BEGIN
  mapa.shared::cluster.u32 %r2, %r1, 0; shl.b32 %r3, %r9, 2; add.u32 %r3, %r3, %r2;
  @%p0 bra SENT;
  add.u32 %r5, %r9, 7; st.shared::cluster.b32 [%r3+64], %r5;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
SENT:
  @%p1 bra DONE;
  {GATHER_WAIT}
  @%p0 bra DONE;
  ld.shared.b32 %r6, [%r1+64]; ld.shared.b32 %r7, [%r1+68]; add.u32 %r6, %r6, %r7;
  st.global.b32 [out], %r6;
DONE:
"""


def gather(schedule: Schedule, change: tuple[str, str] = ("", "")) -> int:
    out = np.zeros(1, np.uint32)
    assert change[0] in GATHER
    body = GATHER.replace(*change) if change[0] else GATHER
    body = body.replace("BEGIN", "barrier.cluster.arrive; barrier.cluster.wait;")
    pair = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "dynamic_shared": 128}
    execute(body, {"out": out}, shared=SHARED, schedule=schedule, **pair)
    return int(out[0])


@schedules
def test_arrivals_and_stores_of_a_peer(schedule: Schedule) -> None:
    assert gather(schedule) == 15


@schedules
@pytest.mark.parametrize(
    ("broken", "instead", "kinds"),
    [
        (GATHER_WAIT, "", ("race", "unwritten")),
        ("b64 [%r1], 2;", "b64 [%r1], 3;", ("deadlock",)),
        ("b64 [%r1], 2;", "b64 [%r1], 1;", ("race", "unwritten", "protocol")),
        ("BEGIN", "", ("race", "protocol")),  # its owner may not have made the barrier yet
        ("@%p1 bra DONE;", "bra DONE;", ("protocol",)),  # exits while a peer may be on its way
        ("mapa.shared::cluster.u32 %r2, %r1, 0;", "mov.b32 %r2, %r1;", ("deadlock",)),
    ],
)  # fmt: skip
def test_gathering_faults(
    schedule: Schedule, broken: str, instead: str, kinds: tuple[str, ...]
) -> None:
    with pytest.raises(ExecutionError) as caught:
        gather(schedule, (broken, instead))
    assert caught.value.kind in kinds, caught.value


@schedules
def test_multicast_reaches_every_cta(schedule: Schedule) -> None:
    array = RNG.integers(0, 256, (2, 128), dtype=np.uint8)
    out = np.zeros((2, 128), np.uint8)
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank;
  setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
READY:
  barrier.cluster.arrive; barrier.cluster.wait;
  setp.ne.u32 %p1, %r9, 1; @%p1 bra WAITING; @%p0 bra WAITING;
  mov.b16 %h1, 3;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r1+1024], [%map0, {{0, 1}}], [%r1], %h1;
WAITING:
  {wait("%r1", "0")}
  shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; ld.shared.b32 %r4, [%r3+1024];
  shl.b32 %r5, %r9, 7; add.u32 %r5, %r5, %r2; cvt.u64.u32 %d0, %r5; add.u64 %d0, %d0, out;
  st.global.b32 [%d0], %r4;
  barrier.cluster.arrive; barrier.cluster.wait;
"""
    tma(
        body,
        [tensor_map(array, "u8", [128, 1], 3)],
        {"out": out, "array": array},
        schedule,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )
    assert np.array_equal(out, array[[1, 1]])


BULK = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+128], [source], 256, [%r1];
READY: bar.sync 0; {wait("%r1", "0")}
  @%p0 bra DONE;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [target], [%r1+128], 256;
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
DONE:
"""


@schedules
def test_bulk_copy_and_reduction(schedule: Schedule) -> None:
    source, target = RNG.standard_normal((2, 64)).astype(np.float32)
    want = source + target
    result = execute(
        BULK,
        {"source": source, "target": target},
        shared=SHARED,
        dynamic_shared=512,
        schedule=schedule,
    )
    assert np.array_equal(target, want)
    assert result.work["cp.async.bulk bytes into shared memory"] == 256
    assert result.work["bulk reduction bytes"] == 256


CP_ASYNC = """
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
  cvt.u64.u32 %d0, %r2; add.u64 %d1, %d0, source; add.u64 %d2, %d0, out;
  and.b32 %r4, %r0, 12; cp.async.cg.shared.global [%r3], [%d1], 16, %r4;
  cp.async.commit_group; WAIT
  bar.sync 0; xor.b32 %r5, %r2, 16; add.u32 %r5, %r5, %r1;
  ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r5]; st.global.v4.b32 [%d2], {%r6, %r7, %r8, %r9};
"""


@schedules
def test_cp_async_fills_with_zero(schedule: Schedule) -> None:
    source = RNG.integers(1, 255, (64, 16), dtype=np.uint8)
    out = np.zeros_like(source)
    arrays, launch = {"source": source, "out": out}, {"block": (64, 1, 1), "dynamic_shared": 1024}
    body = CP_ASYNC.replace("WAIT", "cp.async.wait_group 0;")
    execute(body, arrays, shared=SHARED, schedule=schedule, **launch)
    valid = np.arange(64)[:, None] & 12
    want = np.where(np.arange(16)[None, :] < valid, source, 0)
    assert np.array_equal(out, want[np.arange(64) ^ 1])
    with pytest.raises(ExecutionError) as caught:
        execute(CP_ASYNC.replace("WAIT", ""), arrays, shared=SHARED, schedule=schedule, **launch)
    assert caught.value.kind == "race"
