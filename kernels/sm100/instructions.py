"""What the SM100 kernel says to the hardware, as PTX; each name is that of the instruction or unit.

Shared-memory addresses, tensor-memory addresses and descriptors' low words are Int32. Bits of
matrix and instruction descriptors are those of the PTX ISA, sections 9.7.16.4.1 and 9.7.16.4.2.
A pair is two fp32 in one Int64, the first in the low half: an operand of packed arithmetic.

Arithmetic may be moved and shared by the compiler; everything else stays in program order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm

_LETTERS = {Int32: "r", Int64: "l", Float32: "f"}


def _asm(code: str, results: Sequence[Any], *arguments: Any, pure: bool = False) -> Any:
    """$0, $1, ... are the results, then the arguments; returns a value, a list, or None."""
    letters = ["=" + _LETTERS[kind] for kind in results]
    letters += [_LETTERS[type(x)] for x in arguments]
    kinds = [kind.mlir_type for kind in results]
    several = len(kinds) > 1
    found = llvm.inline_asm(
        llvm.StructType.get_literal(kinds) if several else kinds[0] if kinds else None,
        [x.ir_value() for x in arguments],
        code,
        ",".join(letters),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if several:
        return [
            kind(llvm.extractvalue(mlir, found, [n]))
            for n, (kind, mlir) in enumerate(zip(results, kinds, strict=True))
        ]
    return results[0](found) if kinds else None


def constant(x: float) -> str:
    """An fp32 immediate."""
    return "0f" + struct.pack(">f", x).hex().upper()


# Arithmetic


def pair(low: Float32, high: Float32) -> Any:
    return _asm("mov.b64 $0, {$1, $2};", [Int64], low, high, pure=True)


def constant_pair(x: float) -> Any:
    """The same number twice."""
    word = int.from_bytes(struct.pack("<f", x), "little")
    return Int64(word << 32 | word)


def halves(x: Int64) -> Any:
    return _asm("mov.b64 {$0, $1}, $2;", [Float32, Float32], x, pure=True)


def fma(x: Float32, y: Float32, z: Float32) -> Any:
    return _asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], x, y, z, pure=True)


def fma_saturated(x: Float32, y: Float32, z: Float32) -> Any:
    """Clamped to [0, 1]; NaN gives 0."""
    return _asm("fma.rn.sat.f32 $0, $1, $2, $3;", [Float32], x, y, z, pure=True)


def multiply(x: Float32, y: Float32) -> Any:
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], x, y, pure=True)


def add(x: Float32, y: Float32) -> Any:
    return _asm("add.rn.f32 $0, $1, $2;", [Float32], x, y, pure=True)


def subtract(x: Float32, y: Float32) -> Any:
    return _asm("sub.rn.f32 $0, $1, $2;", [Float32], x, y, pure=True)


def add_constant(x: Float32, y: float) -> Any:
    return _asm(f"add.rn.f32 $0, $1, {constant(y)};", [Float32], x, pure=True)


def fma_constants(x: Float32, y: float, z: float) -> Any:
    code = f"fma.rn.f32 $0, $1, {constant(y)}, {constant(z)};"
    return _asm(code, [Float32], x, pure=True)


def magnitude(x: Float32) -> Any:
    return _asm("abs.f32 $0, $1;", [Float32], x, pure=True)


def fma_up(x: Float32, y: Float32, z: float) -> Any:
    """Rounded towards +inf."""
    return _asm(f"fma.rp.f32 $0, $1, $2, {constant(z)};", [Float32], x, y, pure=True)


def scaled(x: Float32, by: float) -> Any:
    return _asm(f"mul.rn.f32 $0, $1, {constant(by)};", [Float32], x, pure=True)


def maximum(*values: Float32) -> Any:
    """Of two or three; NaN if any is."""
    operands = ", ".join(f"${n}" for n in range(len(values) + 1))
    return _asm(f"max.NaN.f32 {operands};", [Float32], *values, pure=True)


def maximum_constant(x: Float32, y: float) -> Any:
    return _asm(f"max.NaN.f32 $0, $1, {constant(y)};", [Float32], x, pure=True)


def exp2(x: Float32) -> Any:
    return _asm("ex2.approx.ftz.f32 $0, $1;", [Float32], x, pure=True)


def fma_pair(x: Int64, y: Int64, z: Int64, rounding: str = "rn") -> Any:
    return _asm(f"fma.{rounding}.f32x2 $0, $1, $2, $3;", [Int64], x, y, z, pure=True)


def subtract_pair(x: Int64, y: Int64) -> Any:
    return _asm("sub.rn.f32x2 $0, $1, $2;", [Int64], x, y, pure=True)


def add_pair(x: Int64, y: Int64) -> Any:
    return _asm("add.rn.f32x2 $0, $1, $2;", [Int64], x, y, pure=True)


def multiply_pair(x: Int64, y: Int64) -> Any:
    return _asm("mul.rn.f32x2 $0, $1, $2;", [Int64], x, y, pure=True)


def to_e4m3(x: Sequence[Any]) -> Any:
    """Four fp32 to a word of E4M3, the first in the lowest byte; nearest even, at most 448."""
    return _asm(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        [Int32],
        *x,
        pure=True,
    )


def bits(x: Float32) -> Any:
    return _asm("mov.b32 $0, $1;", [Int32], x, pure=True)


def from_bits(x: Int32) -> Any:
    return _asm("mov.b32 $0, $1;", [Float32], x, pure=True)


def shift_left(x: Int32, by: int) -> Any:
    return _asm(f"shl.b32 $0, $1, {by};", [Int32], x, pure=True)


def shift_add(x: Int32, by: int, y: Int32) -> Any:
    """(x << by) + y."""
    code = f"{{ .reg .b32 t; shl.b32 t, $1, {by}; add.s32 $0, t, $2; }}"
    return _asm(code, [Int32], x, y, pure=True)


def ones(predicate: Int32) -> Any:
    """255 where the predicate is not 0, else 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, 255, 0, p; }"
    return _asm(code, [Int32], predicate, pure=True)


def low_bytes(words: Sequence[Any]) -> Any:
    """The lowest bytes of four words, the first lowest."""
    return _asm(
        "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040; "
        "prmt.b32 $0, low, high, 0x5410; }",
        [Int32],
        *words,
        pure=True,
    )


def nan_bytes(word: Int32) -> Any:
    """1 in each byte that is NaN in E4M3 (all ones but the sign), else 0."""
    return _asm(
        "{ .reg .b32 t; and.b32 t, $1, 0x7f7f7f7f; add.s32 t, t, 0x01010101; "
        "shr.u32 t, t, 7; and.b32 $0, t, 0x01010101; }",
        [Int32],
        word,
        pure=True,
    )


def low_ones(count: Int32) -> Any:
    """``count`` ones from the lowest bit on; none below 0, all from 32 on."""
    code = (
        "{ .reg .b32 n; max.s32 n, $1, 0; shl.b32 n, 1, n; sub.s32 $0, n, 1; }"  # shl clamps at 32
    )
    return _asm(code, [Int32], count, pure=True)


def keep(x: Float32, mask: Int32, bit: int) -> Any:
    """``x`` where the bit is set, else -inf."""
    return _asm(
        f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << bit}; setp.ne.b32 p, t, 0; "
        "selp.f32 $0, $1, 0fFF800000, p; }",
        [Float32],
        x,
        mask,
        pure=True,
    )


def select(predicate: Int32, yes: Float32, no: Float32) -> Any:
    return _asm(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.f32 $0, $2, $3, p; }",
        [Float32],
        predicate,
        yes,
        no,
        pure=True,
    )


def greater(x: Float32, y: Float32) -> Any:
    """1 where x > y, else 0; 0 if either is NaN."""
    code = "{ .reg .pred p; setp.gt.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }"
    return _asm(code, [Int32], x, y, pure=True)


def equal(x: Float32, y: float) -> Any:
    """1 where x == y, else 0; 0 for NaN."""
    code = f"{{ .reg .pred p; setp.eq.f32 p, $1, {constant(y)}; selp.b32 $0, 1, 0, p; }}"
    return _asm(code, [Int32], x, pure=True)


def any_thread(barrier: Int32, threads: int, predicate: Int32) -> Any:
    """Meet so many threads at a named barrier; 1 if the predicate is not 0 in any of them."""
    return _asm(
        "{ .reg .pred p, q; setp.ne.s32 p, $2, 0; "
        f"bar.red.or.pred q, $1, {threads}, p; selp.b32 $0, 1, 0, q; }}",
        [Int32],
        barrier,
        predicate,
    )


def lane() -> Any:
    """Number of the thread in its warp, read anew."""
    return _asm("mov.u32 $0, %laneid;", [Int32])


def anew(x: Int32) -> Any:
    """``x``; what follows from it is not computed before this point, to be held in registers."""
    return _asm("mov.b32 $0, $1;", [Int32], x)


def wall() -> None:
    """End a basic block: ptxas reorders within one, also what is volatile here.

    A branch that is never taken, as a grid has blocks: an arrival or a fence stays before it.
    """
    _asm(
        "{ .reg .pred p; .reg .b32 blocks; NEVER: mov.u32 blocks, %nctaid.x; "
        "setp.eq.u32 p, blocks, 0; @p bra NEVER; }",
        [],
    )


# Memory


def load_words(address: Int64) -> Any:
    """Four Int32 of global memory that the launch does not write."""
    return _asm("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, address)


def load_floats(address: Int64, predicate: Int32, count: int) -> Any:
    """``count`` (1 or 4) fp32 of global memory, or zeros."""
    names = [f"${n}" for n in range(count)]
    target = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    found = _asm(
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} "
        f"@p ld.global{'' if count == 1 else '.v4'}.b32 {target}, [${count}]; }}",
        [Float32] * count,
        address,
        predicate,
    )
    return [found] if count == 1 else found


def store_floats(address: Int64, values: Sequence[Any], predicate: Int32) -> None:
    """1 or 4 fp32 to global memory."""
    count = len(values)
    names = [f"${n + 2}" for n in range(count)]
    source = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    _asm(
        f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        f"@p st.global{'' if count == 1 else '.v4'}.b32 [$0], {source}; }}",
        [],
        address,
        predicate,
        *values,
    )


def load_byte(address: Int64, predicate: Int32) -> Any:
    """A byte of global memory as Int32, or 0."""
    return _asm(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u8 $0, [$1]; }",
        [Int32],
        address,
        predicate,
    )


def load_shared(address: Int32, count: int) -> Any:
    """``count`` (2 or 4) fp32 of shared memory."""
    names = ", ".join(f"${n}" for n in range(count))
    return _asm(f"ld.shared.v{count}.b32 {{{names}}}, [${count}];", [Float32] * count, address)


def load_shared_float(address: Int32) -> Any:
    return _asm("ld.shared.b32 $0, [$1];", [Float32], address)


def load_shared_words(address: Int32) -> Any:
    """Four words of shared memory."""
    return _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, address)


def mark_shared(address: Int32, bits: Int32) -> None:
    """Set bits of a word of shared memory, whoever else does."""
    _asm("red.shared.or.b32 [$0], $1;", [], address, bits)


def store_shared(address: Int32, *values: Any) -> None:
    """1, 2 or 4 words to shared memory."""
    count = len(values)
    names = ", ".join(f"${n + 1}" for n in range(count))
    code = f"st.shared.b32 [$0], {names};"
    if count > 1:
        code = f"st.shared.v{count}.b32 [$0], {{{names}}};"
    _asm(code, [], address, *values)


def load_shared_word(address: Int32) -> Any:
    return _asm("ld.shared.b32 $0, [$1];", [Int32], address)


# Barriers


def mbarrier_init(barrier: Int32, arrivals: int) -> None:
    _asm(f"mbarrier.init.shared.b64 [$0], {arrivals};", [], barrier)


def fence_mbarrier_init() -> None:
    _asm("fence.mbarrier_init.release.cluster;", [])


def mbarrier_wait(barrier: Int32, parity: Int32) -> None:
    """Until the phase of this parity is complete; parity 1 passes on a fresh barrier."""
    _asm(
        "{ .reg .pred p; RETRY: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @!p bra RETRY; }",
        [],
        barrier,
        parity,
    )


def mbarrier_wait_cluster(barrier: Int32, parity: Int32) -> None:
    """The same, for arrivals that publish shared memory of another thread block."""
    _asm(
        "{ .reg .pred p; RETRY: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
        "p, [$0], $1; @!p bra RETRY; }",
        [],
        barrier,
        parity,
    )


def arrive_once(barrier: Int32, lane: Int32) -> None:
    """Lane 0 arrives for its warp."""
    _asm(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }",
        [],
        barrier,
        lane,
    )


def arrive_once_at(rank: int, barrier: Int32, lane: Int32, publishes: bool = False) -> None:
    """Lane 0 arrives for its warp, at the same barrier of a thread block of the cluster.

    ``publishes``: what was stored to another thread block's shared memory is there before. Only
    then of cluster scope, as in NVIDIA's own libraries: ptxas makes a fence for the whole GPU of
    that, and arrivals that hand over this thread block's own memories, to units that read them in
    place, do without.
    """
    scope = ".release.cluster" if publishes else ""
    _asm(
        "{ .reg .pred p; .reg .b32 there; setp.eq.s32 p, $1, 0; "
        f"mapa.shared::cluster.u32 there, $0, {rank}; "
        f"@p mbarrier.arrive{scope}.shared::cluster.b64 _, [there]; }}",
        [],
        barrier,
        lane,
    )


def mbarrier_expect(barrier: Int32, transfer: int) -> None:
    """Arrive, and expect so many bytes."""
    _asm(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {transfer};", [], barrier)


def fence_proxy_async() -> None:
    """What this thread wrote to shared memory is seen by asynchronous units."""
    _asm("fence.proxy.async.shared::cta;", [])


# Clusters


def cluster_rank() -> Any:
    """Number of the thread block in its cluster."""
    return _asm("mov.u32 $0, %cluster_ctarank;", [Int32], pure=True)


def cluster_barrier() -> None:
    """All threads of all thread blocks of the cluster meet."""
    _asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", [])


def store_shared_at(rank: Int32, address: Int32, values: Sequence[Any]) -> None:
    """Four words to the same address of a thread block of the cluster."""
    names = ", ".join(f"${n + 2}" for n in range(4))
    _asm(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $0; "
        f"st.shared::cluster.v4.b32 [there], {{{names}}}; }}",
        [],
        rank,
        address,
        *values,
    )


# Copies


def map_address(atom: Any) -> Any:
    """Address of a TMA atom's tensor map, a parameter of the kernel."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    pointer = cute_nvgpu.get_tma_desc_addr(kind, cute_nvgpu.atom_make_exec_tma(atom._trait.value))
    return Int64(pointer.toint())


def load_box(target: Int32, tensor_map: Int64, at: Sequence[Any], barrier: Int32) -> None:
    """A box of a rank-4 tensor map to shared memory, its bytes counted by the mbarrier."""
    _asm(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2, $3, $4, $5}], [$6];",
        [],
        target,
        tensor_map,
        *at,
        barrier,
    )


def load_bytes(target: Int32, source: Int64, count: int, barrier: Int32) -> None:
    """Consecutive bytes, a multiple of 16, to shared memory."""
    _asm(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], {count}, [$2];",
        [],
        target,
        source,
        barrier,
    )


# Tensor memory and the matrix unit; ``ctas``: of one thread block, or of a pair


def tmem_alloc(ctas: int, target: Int32, columns: int) -> None:
    """By a whole warp, of each thread block; the base address goes to shared memory."""
    _asm(
        f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [$0], {columns}; "
        f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;",
        [],
        target,
    )


def tmem_dealloc(ctas: int, base: Int32, columns: int) -> None:
    """By a whole warp, of each thread block."""
    _asm(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {columns};", [], base)


def tmem_load(address: Int32, columns: int) -> Any:
    """So many fp32 of the thread's lane (8, 16, or a multiple of 32), once they are there."""
    step = min(columns, 32)
    loads = []
    for first in range(0, columns, step):
        names = ", ".join(f"${n}" for n in range(first, first + step))
        loads.append(
            f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{names}}}, [${columns} + {first}];"
        )
    code = " ".join([*loads, "tcgen05.wait::ld.sync.aligned;"])
    return _asm(code, [Float32] * columns, address)


def tmem_load_reduced(address: Int32, columns: int, block: int) -> tuple[Any, Any]:
    """As :func:`tmem_load`, and the maximum of each ``block`` of them, NaN if any is; SM103."""
    loads = []
    for n in range(columns // block):
        names = ", ".join(f"${n * block + m}" for m in range(block))
        loads.append(
            f"tcgen05.ld.red.sync.aligned.32x32b.x{block}.max.NaN.f32 {{{names}}}, "
            f"${columns + n}, [${columns + columns // block} + {n * block}];"
        )
    code = " ".join([*loads, "tcgen05.wait::ld.sync.aligned;"])
    found = _asm(code, [Float32] * (columns + columns // block), address)
    return found[:columns], found[columns:]


def tmem_store(address: Int32, words: Sequence[Any]) -> None:
    """Words to consecutive columns of the thread's lane; :func:`tmem_wait_stores` ends it."""
    names = ", ".join(f"${n + 1}" for n in range(len(words)))
    code = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [$0], {{{names}}};"
    _asm(code, [], address, *words)


def tmem_wait_stores() -> None:
    _asm("tcgen05.wait::st.sync.aligned;", [])


def before_thread_sync() -> None:
    """Tensor-memory accesses of this thread come before its next arrival."""
    _asm("tcgen05.fence::before_thread_sync;", [])


def after_thread_sync() -> None:
    """Tensor-memory accesses of this thread come after its last wait."""
    _asm("tcgen05.fence::after_thread_sync;", [])


SCALES = 0x00004008
"""High word of the descriptor of a scale atom: no swizzle, 128 bytes from 8 rows to the next."""


def k_major(span: int) -> int:
    """High word of the descriptor of an operand whose rows are ``span`` swizzled bytes."""
    layout = {128: 2, 64: 4}[span]
    return layout << 29 | 1 << 14 | 8 * span >> 4


def matrix_descriptor(address: Int32, high: int) -> Any:
    """Of shared memory at an address; its low word may be advanced by bytes / 16."""
    return _asm(
        f"{{ .reg .b32 t, high; shr.u32 t, $1, 4; and.b32 t, t, 0x3fff; or.b32 t, t, 0x10000; "
        f"mov.b32 high, {high}; mov.b64 $0, {{t, high}}; }}",
        [Int64],
        address,
        pure=True,
    )


def product_descriptor(ctas: int, n: int) -> int:
    """Instruction descriptor: E4M3 operands, K-major, UE8M0 scales, 128 rows of D in each thread
    block, fp32 result.
    """
    return (n >> 3) << 17 | 1 << 23 | ctas << 27


NEGATE_A = 1 << 13


def scale_bytes(k: int) -> int:
    """Bits of the instruction descriptor: both operands' scales are byte ``k`` of their cells."""
    return k << 29 | k << 4


def copy_scales(ctas: int, target: Int32, descriptor: Int64) -> None:
    """An atom to four columns of tensor memory, in all four groups of lanes; each thread block's
    own, at the same addresses.
    """
    code = f"tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [$0], $1;"
    _asm(code, [], target, descriptor)


def product(
    ctas: int, d: Int32, a: Any, b: Int64, instruction: Int32, scales_a: Int32, scales_b: Int32,
    add: Int32,
) -> None:  # fmt: skip
    """D = A B, plus D where ``add`` is not 0; A a descriptor (Int64) or in tensor memory.

    Of a pair, each thread block has 128 rows of A and D and half of the N rows of B, at the same
    addresses, and scales of all N.
    """
    operand = "$1" if type(a) is Int64 else "[$1]"
    _asm(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0; "
        f"tcgen05.mma.cta_group::{ctas}.kind::mxf8f6f4.block_scale.block32 "
        f"[$0], {operand}, $2, $3, [$4], [$5], p; }}",
        [],
        d,
        a,
        b,
        instruction,
        scales_a,
        scales_b,
        add,
    )


def commit(ctas: int, barrier: Int32) -> None:
    """Arrive when all that this thread has given to the matrix unit is done, in each thread block
    of a pair.
    """
    code = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    if ctas == 1:
        code += ".b64 [$0];"
    else:
        code = f"{{ .reg .b16 both; mov.b16 both, 3; {code}.multicast::cluster.b64 [$0], both; }}"
    _asm(code, [], barrier)
