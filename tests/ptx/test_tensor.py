"""tcgen05 and wgmma against NumPy: operand layouts, accumulator layouts, scales, synchronisation.

Operands are laid out from what a TMA box leaves in shared memory (rows of one swizzle span, moved
by the XOR), not from the descriptor formulas of the core.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ptx import build
from ptx.encode import descriptor, instruction, scaled_instruction, swizzled
from ptx.machine import ADVERSARIAL, ExecutionError, Schedule
from ptx.snippets import execute

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the core")

SHARED = ".extern .shared .align 1024 .b8 smem[];"
LATE = Schedule("late", "forward")
schedules = pytest.mark.parametrize("schedule", ADVERSARIAL, ids=lambda s: f"{s.timing}-{s.order}")
RNG = np.random.default_rng(11)


def wait(barrier: str, parity: int = 0) -> str:
    return (
        f"{{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{barrier}], {parity};"
        " @!P bra AGAIN; }\n"
    )


def values(rows: int, depth: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(values as float64, their bytes as an array of rows x depth elements)."""
    dtype, view = {
        "bf16": (torch.bfloat16, torch.int16),
        "f16": (torch.float16, torch.int16),
        "e4m3": (torch.float8_e4m3fn, torch.uint8),
        "e5m2": (torch.float8_e5m2, torch.uint8),
    }[kind]
    x = torch.from_numpy(RNG.standard_normal((rows, depth))).to(dtype)
    return x.double().numpy(), x.view(view).numpy()


@dataclass
class Operand:
    """Bytes in shared memory, the descriptor without its address, and bytes from one K step on."""

    data: np.ndarray
    descriptor: int
    offsets: list[int]


def operand(x: np.ndarray, k_major: bool, bits: int, sm100: bool = True) -> Operand:
    """Lay out rows x depth elements; `bits` is the swizzle (0 to 3)."""
    rows, depth = x.shape
    size = x.itemsize
    span, step = 16 << bits, 32 // size  # bytes of a swizzle row, elements of a K step
    per = span // size
    steps = range(0, depth, step)
    if k_major and bits:
        blocks = [x[:, k : k + per] for k in range(0, depth, per)]
        offsets = [k // per * rows * span + k % per * size for k in steps]
        words = descriptor(16, 8 * span, bits, sm100)
    elif k_major:
        blocks = [x[:, k : k + per] for k in range(0, depth, per)]
        offsets = [k // per * rows * 16 for k in steps]
        words = descriptor(rows * 16, 128, 0, sm100)
    elif bits:
        blocks = [x[m : m + per].T for m in range(0, rows, per)]
        offsets = [k * span for k in steps]
        words = descriptor(depth * span, 8 * span, bits, sm100)
    else:
        blocks = [x[m : m + per].T for m in range(0, rows, per)]
        offsets = [k * 16 for k in steps]
        words = descriptor(128, 16 * depth, 0, sm100)
    data = [swizzled(np.ascontiguousarray(b), bits, 0) for b in blocks]
    # Blocks start at multiples of the swizzle's period only if their size does.
    assert not bits or all(d.size % 1024 == 0 for d in data)
    return Operand(np.concatenate(data), words, offsets)


def copies(sizes: list[int]) -> tuple[str, list[int]]:
    """Bulk copies of arrays in0, in1, ... into shared memory; and where they land."""
    places, at, text = [], 1024, f"mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {sum(sizes)};\n"
    for k, size in enumerate(sizes):
        text += (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [%r1+{at}], [%src{k}], {size}, [%r1];\n"
        )
        places.append(at)
        at += -(-size // 1024) * 1024
    return text, places


def loads(n: int, shape: str = "32x32b") -> str:
    """Read columns [0, n) of the accumulator of this warp's lanes into out, row by row."""
    text = ""
    for column in range(0, n, 8):
        registers = ", ".join(f"%r{100 + i}" for i in range(8 if shape == "32x32b" else 4))
        count = 8 if shape == "32x32b" else 4
        text += f"add.u32 %r50, %r40, {column};\n"
        text += f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{registers}}}, [%r50];\nWAIT_LD\n"
        for i in range(count):
            if shape == "32x32b":
                text += f"st.global.b32 [%d30+{4 * (column + i)}], %r{100 + i};\n"
            else:  # 16x64b: row t/4 + 8*(t%2), column (t/2)%2 + 2i
                text += f"st.global.b32 [%d30+{4 * (column + 2 * i)}], %r{100 + i};\n"
    return text


def run_mma(
    kind: str,
    m: int,
    n: int,
    idesc: list[int],
    a: list[Operand],
    b: list[Operand],
    *,
    group: int = 1,
    scales: list[np.ndarray] | None = None,
    shift_b: int = 0,
    a_in_tensor: np.ndarray | None = None,
    schedule: Schedule | None = LATE,
    change: tuple[str, str] = ("", ""),
    columns: int | None = None,
    truncate: bool = False,
) -> np.ndarray:
    """D of one accumulation over all K steps; `a`, `b`: one operand for each CTA of the group.

    `shift_b`: B's scales begin so many columns behind the first that they are copied to.
    D comes as the four warps of each CTA read it: group x 128 lanes x columns (M = 64: 64 rows).
    """
    columns = columns or n
    small = m // group == 64 and group == 1
    parts = [
        [a[v].data, b[v].data] + ([s[v] for s in scales] if scales else []) for v in range(group)
    ]
    inputs = [
        np.concatenate([p[k].reshape(-1).view(np.uint8) for p in parts])
        for k in range(len(parts[0]))
    ]
    sizes = [x.size // group for x in inputs]
    copy, places = copies(sizes)
    lanes = 64 if small else 128
    out = np.full((group, lanes, columns), np.nan, np.float32)
    arrays = {f"in{k}": x for k, x in enumerate(inputs)} | {"out": out}
    issue = ""
    if scales:
        for k, column in ((2, 256), (3, 260)):
            words = descriptor(0, 128, 0)
            issue += f"""
  add.u32 %r60, %r1, {places[k]}; shr.u32 %r60, %r60, 4; and.b32 %r60, %r60, 16383;
  cvt.u64.u32 %d20, %r60; or.b64 %d20, %d20, {words}; add.u32 %r61, %r41, {column};
  tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%r61], %d20;
"""
    for step in range(len(b[0].offsets)):
        issue += f"""
  add.u32 %r60, %r1, {places[0] + a[0].offsets[step]}; shr.u32 %r60, %r60, 4;
  and.b32 %r60, %r60, 16383; cvt.u64.u32 %d20, %r60; or.b64 %d20, %d20, {a[0].descriptor};
  add.u32 %r60, %r1, {places[1] + b[0].offsets[step]}; shr.u32 %r60, %r60, 4;
  and.b32 %r60, %r60, 16383; cvt.u64.u32 %d21, %r60; or.b64 %d21, %d21, {b[0].descriptor};
  mov.b32 %r62, {idesc[step % len(idesc)]}; add.u32 %r63, %r41, {128 + 8 * step};
"""
        source = "[%r63]" if a_in_tensor is not None else "%d20"
        extra = ""
        if scales:
            issue += (
                f"add.u32 %r64, %r41, {256 | step << 30};"
                f" add.u32 %r65, %r41, {(260 + shift_b) | step << 30};\n"
            )
            extra = " [%r64], [%r65],"
        suffix = ".block_scale.block32" if scales else ""
        issue += (
            f"tcgen05.mma.cta_group::{group}.kind::{kind}{suffix} [%r41], {source}, %d21, %r62,"
            f"{extra} {int(step > 0)};\n"
        )
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];"
    if group == 2:
        commit = (
            "mov.b16 %h1, 3; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [%r9], %h1;"
        )
    fill = ""
    if a_in_tensor is not None:
        cells = a_in_tensor.reshape(group * 128, -1)
        arrays["cells"] = cells
        width = cells.shape[1]
        fill += f"mul.wide.u32 %d22, %r34, {4 * width}; add.u64 %d22, %d22, cells;\n"
        for column in range(width):
            fill += (
                f"ld.global.b32 %r66, [%d22+{4 * column}]; add.u32 %r67, %r40, {128 + column};\n"
            )
            fill += "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r67], {%r66};\n"
        fill += "WAIT_ST\n"
    source = "".join(
        f".reg .b64 %src{k}; mul.wide.u32 %d23, %r8, {size}; add.u64 %src{k}, in{k}, %d23;\n"
        for k, size in enumerate(sizes)
    )
    row = "and.b32 %r33, %r0, 31;"
    if small:
        row = (  # 16x64b: lane t of warp w holds row 16w + t/4 + 8*(t%2), column (t/2)%2
            "and.b32 %r35, %r0, 31; shr.u32 %r33, %r35, 2; and.b32 %r36, %r35, 1;"
            "mad.lo.u32 %r33, %r36, 8, %r33; shr.u32 %r36, %r0, 5; mad.lo.u32 %r33, %r36, 16, %r33;"
            "shr.u32 %r36, %r35, 1; and.b32 %r36, %r36, 1; mad.lo.u32 %r37, %r8, 64, %r33;"
        )
    else:
        row += "mov.b32 %r36, 0; mad.lo.u32 %r37, %r8, 128, %r0;"
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mov.u32 %r8, %cluster_ctarank; add.u32 %r9, %r1, 8;
  shr.u32 %r2, %r0, 5; {source}
  setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p1, %r2, 0;
  @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r9], 1;
  {copy}
READY:
  @%p1 bra ALLOCATED;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1+16], 512;
ALLOCATED:
  bar.sync 0; {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
  ld.shared.b32 %r41, [%r1+16]; shl.b32 %r42, %r2, 21; add.u32 %r40, %r41, %r42;
  mad.lo.u32 %r34, %r8, 128, %r0;
  {wait("%r1")}
  {fill}
  bar.sync 0; {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
  @%p0 bra ISSUED; {"setp.ne.u32 %p2, %r8, 0; @%p2 bra ISSUED;" if group == 2 else ""}
  {issue}
  {commit}
ISSUED:
  {wait("%r9")}
  {row}
  mul.wide.u32 %d30, %r37, {4 * columns}; add.u64 %d30, %d30, out;
  mul.wide.u32 %d31, %r36, 4; add.u64 %d30, %d30, %d31;
  {loads(columns, "16x64b" if small else "32x32b")}
  bar.sync 0; {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
  @%p1 bra FREED;
  tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r41, 512;
FREED:
"""
    assert change[0] in body
    body = body.replace(*change) if change[0] else body
    body = body.replace("WAIT_LD", "tcgen05.wait::ld.sync.aligned;")
    body = body.replace("WAIT_ST", "tcgen05.wait::st.sync.aligned;")
    execute(
        body,
        arrays,
        shared=SHARED,
        schedule=schedule,
        block=(128, 1, 1),
        grid=(group, 1, 1),
        cluster=(group, 1, 1),
        dynamic_shared=1 << 17,
        truncate=truncate,
    )
    return out


def check(got: np.ndarray, want: np.ndarray, terms: int) -> None:
    """One rounding to fp32 in each K step; the bound is that of `terms` roundings of the sum."""
    scale = np.abs(want).max()
    assert np.abs(got - want).max() <= terms * scale * 2.0**-24 * 2


F16_CASES = [
    pytest.param(
        kind, k_a, k_b, bits, id=f"{kind}-{'k' if k_a else 'mn'}{'k' if k_b else 'mn'}-{bits}"
    )
    for kind in ("bf16", "e4m3")
    for k_a, k_b in ((True, True), (True, False), (False, True), (False, False))
    for bits in (0, 1, 2, 3)
]


@pytest.mark.parametrize(("kind", "k_a", "k_b", "bits"), F16_CASES)
def test_mma_operand_layouts(kind: str, k_a: bool, k_b: bool, bits: int) -> None:
    depth = 64 if kind == "bf16" else 128
    (x, xb), (y, yb) = values(128, depth, kind), values(128, depth, kind)
    f8 = kind == "e4m3"
    word = instruction(128, 128, 0 if f8 else 1, 0 if f8 else 1, mn_a=not k_a, mn_b=not k_b)
    a, b = operand(xb, k_a, bits), operand(yb, k_b, bits)
    got = run_mma("f8f6f4" if f8 else "f16", 128, 128, [word], [a], [b])[0]
    check(got, x @ y.T, len(a.offsets))


@schedules
def test_mma_with_64_rows(schedule: Schedule) -> None:
    (x, xb), (y, yb) = values(64, 64, "f16"), values(24, 64, "f16")
    word = instruction(64, 24, 0, 0)
    a, b = operand(xb, True, 3), operand(yb, True, 3)
    got = run_mma("f16", 64, 24, [word], [a], [b], schedule=schedule)[0]
    check(got, x @ y.T, 4)


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "e5m2"])
def test_mma_with_a_in_tensor_memory(kind: str) -> None:
    depth = 64 if kind == "bf16" else 128
    (x, xb), (y, yb) = values(128, depth, kind), values(64, depth, kind)
    code = {"bf16": 1, "e4m3": 0, "e5m2": 1}[kind]
    word = instruction(128, 64, code, code)
    b = operand(yb, True, 3)
    cells = np.ascontiguousarray(xb).view(np.uint32)  # 8 columns for each K step of 32 bytes
    a = operand(xb, True, 3)
    name = "f16" if kind == "bf16" else "f8f6f4"
    got = run_mma(name, 128, 64, [word], [a], [b], a_in_tensor=cells)[0]
    check(got, x @ y.T, 4)


@schedules
@pytest.mark.parametrize("m", [256, 128])
def test_mma_of_a_cta_pair(schedule: Schedule, m: int) -> None:
    """A rows and B rows are split between the CTAs; M = 128 puts column halves in lane halves."""
    n = 32
    (x, xb), (y, yb) = values(m, 64, "bf16"), values(n, 64, "bf16")
    word = instruction(m, n, 1, 1)
    a = [operand(p, True, 3) for p in np.split(xb, 2)]
    b = [operand(p, True, 3) for p in np.split(yb, 2)]
    columns = n if m == 256 else n // 2
    got = run_mma("f16", m, n, [word], a, b, group=2, columns=columns, schedule=schedule)
    if m == 256:
        d = got.reshape(256, n)
    else:
        d = np.concatenate([np.concatenate([p[:64], p[64:]], axis=1) for p in got])
    check(d, x @ y.T, 4)


def scale_atom(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random E8M0 codes rows x 4 k blocks, and the 512-byte atom that holds them."""
    codes = RNG.integers(120, 134, (rows, 4)).astype(np.uint8)
    atom = np.full((32, 4, 4), 255, np.uint8)  # rows that do not exist would poison
    for row in range(rows):
        atom[row % 32, row // 32] = codes[row]
    return codes, atom.reshape(-1)


@schedules
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [128, 64])
def test_block_scaled_mma(schedule: Schedule, group: int, n: int) -> None:
    rows = 128 * group
    (x, xb), (y, yb) = values(rows, 128, "e4m3"), values(n, 128, "e4m3")
    codes_a, atoms_a = zip(*(scale_atom(128) for _ in range(group)), strict=True)
    codes_b, atom_b = scale_atom(n)
    words = [scaled_instruction(rows, n, k) for k in range(4)]
    a = [operand(p, True, 3) for p in np.split(xb, group)]
    b = [operand(p, True, 3) for p in np.split(yb, group)]
    scales = [list(atoms_a), [atom_b] * group]
    got = run_mma("mxf8f6f4", rows, n, words, a, b, group=group, scales=scales, schedule=schedule)
    wide = [
        v * np.repeat(2.0 ** (c.astype(float) - 127), 32, axis=1)
        for v, c in ((x, np.concatenate(codes_a)), (y, codes_b))
    ]
    check(got.reshape(rows, n), wide[0] @ wide[1].T, 4)


@schedules
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("in_tensor", [False, True], ids=["shared", "tensor"])
def test_scales_of_the_second_half_of_an_atom(
    schedule: Schedule, group: int, in_tensor: bool
) -> None:
    """N = 64 with rows 64 to 127 of an atom of B's scales: two columns on (9.7.16.10.7).

    A pair's CTAs hold half of B's rows each, and the scales of all of them.
    """
    rows = 128 * group
    (x, xb), (y, yb) = values(rows, 128, "e4m3"), values(64, 128, "e4m3")
    codes_a, atoms_a = zip(*(scale_atom(128) for _ in range(group)), strict=True)
    codes_b, atom_b = scale_atom(128)
    words = [scaled_instruction(rows, 64, k) for k in range(4)]
    a = [operand(p, True, 3) for p in np.split(xb, group)]
    b = [operand(p, True, 3) for p in np.split(yb, group)]
    got = run_mma(
        "mxf8f6f4", rows, 64, words, a, b, group=group, schedule=schedule, shift_b=2,
        scales=[list(atoms_a), [atom_b] * group],
        a_in_tensor=np.ascontiguousarray(xb).view(np.uint32) if in_tensor else None,
    )  # fmt: skip
    wide = [
        v * np.repeat(2.0 ** (c.astype(float) - 127), 32, axis=1)
        for v, c in ((x, np.concatenate(codes_a)), (y, codes_b[64:]))
    ]
    check(got.reshape(rows, 64), wide[0] @ wide[1].T, 4)


@pytest.mark.parametrize(
    ("broken", "instead", "kinds"),
    [
        ("mov.b16 %h1, 3;", "mov.b16 %h1, 1;", ("deadlock",)),  # the other CTA hears nothing
        (", [%r65], 1;", ", [%r64], 1;", ()),  # scales of A for B: another result
        ("setp.ne.u32 %p2, %r8, 0;", "setp.eq.u32 %p2, %r8, 0;", ("protocol",)),  # not the leader
    ],
)  # fmt: skip
def test_pair_faults(broken: str, instead: str, kinds: tuple[str, ...]) -> None:
    (x, xb), (y, yb) = values(256, 128, "e4m3"), values(64, 128, "e4m3")
    a, b = ([operand(p, True, 3) for p in np.split(z, 2)] for z in (xb, yb))
    words = [scaled_instruction(256, 64, k) for k in range(4)]
    codes, atoms = zip(*(scale_atom(128) for _ in range(3)), strict=True)
    scales = [list(atoms[:2]), [atoms[2]] * 2]
    wide = [
        v * np.repeat(2.0 ** (c.astype(float) - 127), 32, axis=1)
        for v, c in ((x, np.concatenate(codes[:2])), (y, codes[2][:64]))
    ]
    want = wide[0] @ wide[1].T
    for schedule in ADVERSARIAL:
        try:
            got = run_mma(
                "mxf8f6f4", 256, 64, words, a, b, group=2, scales=scales, schedule=schedule,
                change=(broken, instead),
            )  # fmt: skip
        except ExecutionError as error:
            assert error.kind in kinds, error
        else:
            assert not kinds
            assert np.abs(got.reshape(256, 64) - want).max() > np.abs(want).max() / 100


@schedules
def test_a_cta_that_does_not_wait_for_a_commit_of_its_peer_is_remarked(schedule: Schedule) -> None:
    """Only shared memory of CTAs that have not exited may be signalled."""
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; mov.u32 %r8, %cluster_ctarank; mov.b16 %h1, 3;
  setp.ne.u32 %p0, %r0, 0; @%p0 bra READY; mbarrier.init.shared.b64 [%r1], 1;
READY:
  barrier.cluster.arrive; barrier.cluster.wait;
  setp.ne.u32 %p1, %r8, 0; @%p1 bra ISSUED; @%p0 bra ISSUED;
  tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
    [%r1], %h1;
ISSUED:
  barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra PEER;
  {wait("%r1")} bra DONE;
PEER: {wait("%r1")}
DONE:
"""
    pair = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "dynamic_shared": 64}
    arrays = {"out": np.zeros(1)}
    good = execute(body, arrays, shared=SHARED, schedule=schedule, **pair)
    assert not good.remarks
    deaf = body.replace(f"PEER: {wait('%r1')}", "PEER:")
    (remark,) = execute(deaf, arrays, shared=SHARED, schedule=schedule, **pair).remarks
    assert "exit" in remark and "CTA 1" in remark


def test_a_flipped_scale_bit_or_transpose_bit_shows() -> None:
    (x, xb), (y, yb) = values(128, 128, "e4m3"), values(128, 128, "e4m3")
    (ca, sa), (cb, sb) = scale_atom(128), scale_atom(128)
    wide = [
        v * np.repeat(2.0 ** (c.astype(float) - 127), 32, axis=1) for v, c in ((x, ca), (y, cb))
    ]
    want = wide[0] @ wide[1].T
    a, b = [operand(xb, True, 3)], [operand(yb, True, 3)]
    words = [scaled_instruction(128, 128, k) for k in range(4)]
    for flip in (1 << 29, 1 << 4, 1 << 16, 1 << 13, 1 << 7):
        wrong = [words[0] ^ flip, *words[1:]]
        got = run_mma("mxf8f6f4", 128, 128, wrong, a, b, scales=[[sa], [sb]])[0]
        assert np.abs(got - want).max() > np.abs(want).max() / 100
    sa = sa.copy()
    sa[5] = 255  # NaN poisons its row, and only that
    got = run_mma("mxf8f6f4", 128, 128, words, a, b, scales=[[sa], [sb]])[0]
    assert np.isnan(got).all(axis=1).sum() == 1 and np.isnan(got).any(axis=1).sum() == 1


@pytest.mark.parametrize(
    ("broken", "instead", "kinds"),
    [
        (wait("%r9"), "", ("race", "unwritten")),
        (wait("%r1"), "", ("race", "unwritten")),
        ("tcgen05.commit", "@%p0 tcgen05.commit", ("deadlock",)),
        (  # lane 1 commits what lane 0 issued
            "ISSUED:",
            "ISSUED: mov.u32 %r99, %tid.x; setp.eq.u32 %p9, %r99, 1; @%p9 tcgen05.commit"
            ".cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];",
            ("protocol",),
        ),
        ("%r41, 512;\nFREED", "%r41, 256;\nFREED", ("protocol",)),
        ("tcgen05.dealloc", "@%p0 tcgen05.dealloc", ("protocol",)),
        ("[%r1+16], 512", "[%r1+16], 96", ("protocol",)),
        ("[%r1+16], 512", "[%r1+16], 32", ("bounds",)),
    ],
)  # fmt: skip
def test_mma_faults(broken: str, instead: str, kinds: tuple[str, ...]) -> None:
    (_, xb), (_, yb) = values(128, 64, "bf16"), values(64, 64, "bf16")
    a, b, word = [operand(xb, True, 3)], [operand(yb, True, 3)], instruction(128, 64, 1, 1)
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError) as caught:
            run_mma("f16", 128, 64, [word], a, b, schedule=schedule, change=(broken, instead))
        assert caught.value.kind in kinds, caught.value


@schedules
def test_a_load_that_reduces(schedule: Schedule) -> None:
    """tcgen05.ld.red: the maximum of each lane's columns, beside the columns."""
    out = np.zeros((2, 32), np.float32)
    values_in = RNG.standard_normal((32, 4)).astype(np.float32)
    values_in[3, 1] = np.nan
    body = """
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r2, [%r1];
  mul.wide.u32 %d0, %r0, 16; add.u64 %d0, %d0, data; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0];
  tcgen05.st.sync.aligned.32x32b.x4.b32 [%r2], {%r4, %r5, %r6, %r7};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.red.sync.aligned.32x32b.x4.max.f32 {%r8, %r9, %r10, %r11}, %r12, [%r2];
  tcgen05.ld.red.sync.aligned.32x32b.x4.min.abs.f32 {%r8, %r9, %r10, %r11}, %r13, [%r2];
  mul.wide.u32 %d1, %r0, 4; add.u64 %d1, %d1, out;
  st.global.b32 [%d1], %r12; st.global.b32 [%d1+128], %r13;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""
    arrays = {"data": values_in, "out": out}
    execute(body, arrays, shared=SHARED, dynamic_shared=64, schedule=schedule)
    assert np.array_equal(out[0], np.nanmax(values_in, axis=1))
    assert np.array_equal(out[1], np.nanmin(np.abs(values_in), axis=1))


def test_a_missing_wait_st_is_found() -> None:
    (_, xb), (_, yb) = values(128, 64, "bf16"), values(64, 64, "bf16")
    a, b, word = [operand(xb, True, 3)], [operand(yb, True, 3)], instruction(128, 64, 1, 1)
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError) as caught:
            run_mma(
                "f16", 128, 64, [word], a, b,
                a_in_tensor=xb.view(np.uint32), schedule=schedule, change=("WAIT_ST", ""),
            )  # fmt: skip
        assert caught.value.kind in ("race", "unwritten"), caught.value


# -- wgmma ----------------------------------------------------------------------------------------


def run_wgmma(
    kind: str,
    n: int,
    a: Operand,
    b: Operand,
    immediates: str,
    *,
    registers: np.ndarray | None = None,
    schedule: Schedule | None = LATE,
    change: tuple[str, str] = ("", ""),
    truncate: bool = False,
) -> np.ndarray:
    """D (64 x n) of one warpgroup; `registers`: A fragments, threads x K steps x 4."""
    copy, places = copies([a.data.size, b.data.size])
    out = np.zeros((64, n), np.float32)
    arrays = {"in0": a.data, "in1": b.data, "out": out}
    d = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    k = 16 if kind in ("bf16", "f16") else 32
    issue = (
        "".join(f"mov.b32 %r{100 + i}, 0;" for i in range(n // 2)) + "wgmma.fence.sync.aligned;\n"
    )
    steps = len(b.offsets)
    if registers is not None:
        arrays["fragments"] = registers
        issue = f"mul.wide.u32 %d22, %r0, {16 * steps}; add.u64 %d22, %d22, fragments;\n" + "".join(
            f"ld.global.v4.b32 {{%r{60 + 4 * s}, %r{61 + 4 * s}, %r{62 + 4 * s}, %r{63 + 4 * s}}},"
            f" [%d22+{16 * s}];\n"
            for s in range(steps)
        ) + issue  # fmt: skip
    for step in range(steps):
        issue += f"""
  add.u32 %r50, %r1, {places[0] + (a.offsets[step])}; shr.u32 %r50, %r50, 4;
  and.b32 %r50, %r50, 16383; cvt.u64.u32 %d20, %r50; or.b64 %d20, %d20, {a.descriptor};
  add.u32 %r50, %r1, {places[1] + b.offsets[step]}; shr.u32 %r50, %r50, 4;
  and.b32 %r50, %r50, 16383; cvt.u64.u32 %d21, %r50; or.b64 %d21, %d21, {b.descriptor};
"""
        source = "%d20"
        if registers is not None:
            source = "{" + ", ".join(f"%r{60 + 4 * step + i}" for i in range(4)) + "}"
        issue += (
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{d}}}, {source}, %d21,"
            f" {int(step > 0)}, 1, 1{immediates};\n"
        )
    body = f"""
  mov.b32 %r1, smem; mov.u32 %r0, %tid.x; .reg .b64 %src<2>; mov.b64 %src0, in0; mov.b64 %src1, in1;
  setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
  mbarrier.init.shared.b64 [%r1], 1; {copy}
READY: bar.sync 0;
  {wait("%r1")}
  {issue}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  and.b32 %r2, %r0, 31; shr.u32 %r3, %r0, 5; shr.u32 %r4, %r2, 2; mad.lo.u32 %r4, %r3, 16, %r4;
  and.b32 %r5, %r2, 3; shl.b32 %r5, %r5, 3; mad.lo.u32 %r5, %r4, {4 * n}, %r5;
  cvt.u64.u32 %d0, %r5; add.u64 %d0, %d0, out;
"""
    for i in range(n // 2):
        at = 32 * n * (i // 2 % 2) + 4 * (i % 2) + 32 * (i // 4)
        body += f"st.global.b32 [%d0+{at}], %r{100 + i};\n"
    assert change[0] in body
    body = body.replace(*change) if change[0] else body
    execute(
        body,
        arrays,
        shared=SHARED,
        schedule=schedule,
        truncate=truncate,
        block=(128, 1, 1),
        dynamic_shared=1 << 16,
    )
    return out


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
@pytest.mark.parametrize(("k_a", "k_b"), [(True, True), (True, False), (False, True)])
def test_wgmma_operand_layouts(k_a: bool, k_b: bool, bits: int) -> None:
    (x, xb), (y, yb) = values(64, 64, "bf16"), values(64, 64, "bf16")
    a, b = operand(xb, k_a, bits, sm100=False), operand(yb, k_b, bits, sm100=False)
    got = run_wgmma("bf16", 64, a, b, f", {int(not k_a)}, {int(not k_b)}")
    check(got, x @ y.T, 4)


@schedules
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_wgmma_with_a_in_registers(schedule: Schedule, kind: str) -> None:
    """Register j of thread t: rows t/4 (+8 for odd j), columns from the fragment tables."""
    depth, per = (64, 2) if kind == "bf16" else (128, 4)
    (x, xb), (y, yb) = values(64, depth, kind), values(24, depth, kind)
    a, b = operand(xb, True, 3, sm100=False), operand(yb, True, 3, sm100=False)
    step = 8 * per
    fragments = np.zeros((128, 4, 4, per), xb.dtype)
    for t in range(128):
        for s in range(4):
            for j in range(4):
                row = 16 * (t // 32) + t % 32 // 4 + 8 * (j % 2)
                first = s * step + per * (t % 4) + 4 * per * (j // 2)
                fragments[t, s, j] = xb[row, first : first + per]
    registers = fragments.reshape(128, 16 * per).view(np.uint32)
    immediates = ", 0" if kind == "bf16" else ""
    got = run_wgmma(kind, 24, a, b, immediates, registers=registers, schedule=schedule)
    check(got, x @ y.T, 4)


def test_truncated_numerics_lose_what_hardware_loses() -> None:
    """One large product and one small: kept exactly, or cut at 25 (13 for Hopper FP8) bits."""
    ones = np.zeros((64, 32), np.float64)
    ones[:, 0] = 1
    cases = ((2.0**-7, 2.0**-6, True), (2.0**-7, 2.0**-7, False))  # products 2^-13 and 2^-14
    for small_a, small_b, kept in cases:
        a, b = ones.copy(), ones[:24].copy()
        a[:, 1], b[:, 1] = small_a, small_b
        bytes_a, bytes_b = (
            torch.from_numpy(np.tile(x, 4)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            for x in (a, b)
        )
        one = [operand(x, True, 3, sm100=False) for x in (bytes_a, bytes_b)]
        for x in one:
            x.offsets = x.offsets[:1]
        assert (run_wgmma("e4m3", 24, *one, "") == 1 + small_a * small_b).all()
        cut = run_wgmma("e4m3", 24, *one, "", truncate=True)
        assert (cut == (1 + small_a * small_b if kept else 1)).all()


def test_truncated_sums_round_toward_zero() -> None:
    """1 - 2^-25: halfway between two floats, so exact goes to 1; a cut leaves 1 - 2^-24."""
    x, y = torch.zeros(128, 64), torch.zeros(64, 64)
    x[:, :2] = torch.tensor([1, -(2.0**-12)])
    y[:, :2] = torch.tensor([1, 2.0**-13])
    xb, yb = (v.to(torch.bfloat16).view(torch.int16).numpy() for v in (x, y))
    a, b, word = [operand(xb, True, 3)], [operand(yb, True, 3)], instruction(128, 64, 1, 1)
    for truncate, want in ((False, 1.0), (True, 1 - 2.0**-24)):
        assert (run_mma("f16", 128, 64, [word], a, b, truncate=truncate) == want).all()


@pytest.mark.parametrize(
    ("broken", "instead"),
    [
        ("wgmma.wait_group.sync.aligned 0;", ""),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        (wait("%r1"), ""),
    ],
)
def test_wgmma_faults(broken: str, instead: str) -> None:
    (_, xb), (_, yb) = values(64, 64, "bf16"), values(24, 64, "bf16")
    a, b = operand(xb, True, 3, sm100=False), operand(yb, True, 3, sm100=False)
    for schedule in ADVERSARIAL:
        with pytest.raises(ExecutionError) as caught:
            run_wgmma("bf16", 24, a, b, ", 0, 0", schedule=schedule, change=(broken, instead))
        assert caught.value.kind in ("race", "unwritten"), caught.value
