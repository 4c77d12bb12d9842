"""Opcode families of asynchronous copies, tcgen05 and wgmma."""

from __future__ import annotations

from .lowering import (
    CACHE_HINTS,
    FLAG,
    TABLES,
    TYPE,
    Encoded,
    Lowering,
    family,
    finish,
    immediate,
    take,
)
from .parser import (
    Address,
    Operand,
    Vector,
)

# -- asynchronous copies --------------------------------------------------------------------------


@family("cp.async")
def _cp_async(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in (*CACHE_HINTS, "shared", "shared::cta", "global")])
    size = self.source(operands[3], 4) if len(operands) > 3 else -1
    args = [*self.address(operands[0]), *self.address(operands[1]), immediate(operands[2]), size]
    return Encoded("CP_ASYNC", args)


@family("cp.async.commit_group")
def _cp_commit(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("CP_ASYNC_COMMIT")


@family("cp.async.wait_group", "cp.async.wait_all")
def _cp_wait(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("CP_ASYNC_WAIT", [immediate(operands[0]) if operands else -1])


@family("cp.async.mbarrier")
def _cp_mbarrier(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in ("arrive", "noinc", "shared", "shared::cta", "b64")])
    return Encoded("CP_ASYNC_MBAR", self.address(operands[0]), sub=int("noinc" in mods))


def _bulk_reduction(mods: list[str], kinds: tuple[str, ...] = ()) -> tuple[int, int]:
    """(operation, element type) of `.add.f32` and the like; (0, 0) when absent."""
    operation, kind = 0, 0
    for m in list(mods):
        if m in ("add", "min", "max", "and", "or", "xor", "inc", "dec"):
            operation = TABLES["reduction"][m.upper()]
            mods.remove(m)
        elif m in kinds:
            kind = TYPE[m.upper()]
            mods.remove(m)
    return operation, kind


@family("cp.async.bulk", "cp.reduce.async")
def _bulk(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = [m for m in mods if m != "bulk"]
    reduces = self.instruction.opcode.startswith("cp.reduce")
    if mods[0] == "tensor":
        return _tensor_copy(self, mods[1:], operands, reduces)
    if mods[0] == "commit_group":
        return Encoded("BULK_COMMIT")
    if mods[0] == "wait_group":
        return Encoded("BULK_WAIT", [immediate(operands[0])], sub=int("read" in mods))
    if mods[0] == "prefetch":
        return Encoded("NOP")
    destination, source = mods[0], mods[1]
    mods = mods[2:]
    operation, kind = _bulk_reduction(
        mods, ("f32", "f64", "f16", "bf16", "u32", "s32", "u64", "s64")
    )
    take(mods, ("mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"))
    if "noftz" in mods and kind in (TYPE["F16"], TYPE["BF16"]):
        mods.remove("noftz")
    finish(mods)
    args = [*self.address(operands[0]), *self.address(operands[1]), self.source(operands[2], 4)]
    if destination == "global":
        return Encoded("BULK_S2G", args, kind, sub=operation)
    if reduces:
        raise ValueError("a reduction into shared memory")
    name = {"global": "BULK_G2S", "shared::cta": "BULK_S2S"}[source]
    return Encoded(name, args + self.address(operands[3]))


def _tensor_copy(
    self: Lowering, mods: list[str], operands: tuple[Operand, ...], reduces: bool
) -> Encoded:
    mods = list(mods)
    rank = int(mods.pop(0).rstrip("d"))
    destination, source = mods.pop(0), mods.pop(0)
    take(mods, ("tile", "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"))
    group = take(mods, {"cta_group::1": 1, "cta_group::2": 2})
    multicast = take(mods, ("multicast::cluster",))
    operation, _ = _bulk_reduction(mods)
    finish(mods)
    load = destination.startswith("shared")
    tensor = operands[1] if load else operands[0]
    shared = operands[0] if load else operands[1]
    if not isinstance(tensor, Address) or tensor.coordinates is None:
        raise ValueError("no coordinates")
    coordinates = [self.source(c, 4) for c in tensor.coordinates.items]
    if len(coordinates) != rank:
        raise ValueError(f"{len(coordinates)} coordinates for rank {rank}")
    args = [rank, *coordinates, *self.address(shared), self.source(tensor.base, 8)]
    if not load:
        if source != "shared::cta" or destination != "global" or bool(operation) != reduces:
            raise ValueError("not a store from shared::cta")
        return Encoded("TMA_STORE", args, sub=operation)
    mask = self.source(operands[3], 2) if multicast else -1
    return Encoded("TMA_LOAD", [*args, *self.address(operands[2]), mask], sub=group)


# -- tcgen05 --------------------------------------------------------------------------------------


def _cta_group(mods: list[str]) -> int:
    group = take(mods, {"cta_group::1": 1, "cta_group::2": 2})
    if not group:
        raise ValueError("no .cta_group")
    return group


@family("tcgen05.alloc")
def _t5_alloc(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    group = _cta_group(mods)
    finish([m for m in mods if m not in ("sync", "aligned", "shared::cta", "b32")])
    args = [*self.address(operands[0]), self.source(operands[1], 4)]
    return Encoded("T5_ALLOC", args, sub=group, flags=FLAG["ALIGNED"])


@family("tcgen05.dealloc")
def _t5_dealloc(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    group = _cta_group(mods)
    finish([m for m in mods if m not in ("sync", "aligned", "b32")])
    args = [self.source(o, 4) for o in operands]
    return Encoded("T5_DEALLOC", args, sub=group, flags=FLAG["ALIGNED"])


@family("tcgen05.relinquish_alloc_permit")
def _t5_relinquish(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("T5_RELINQUISH", flags=FLAG["ALIGNED"])


@family("tcgen05.ld", "tcgen05.st")
def _t5_transfer(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    reduces = take(mods, ("red",)) > 0
    flags = FLAG["ALIGNED"] | take(mods, {"abs": FLAG["ABS"], "NaN": FLAG["NAN"]})
    operation = take(mods, {"min": 1, "max": 2})
    kind = mods.pop() if reduces else "b32"
    take(mods, ("sync", "aligned", "b32"))
    shape, count = mods
    load = self.instruction.opcode.startswith("tcgen05.ld")
    reduced: list[int] = []
    if reduces:
        if shape != "32x32b" or not operation or kind not in ("f32", "u32", "s32"):
            raise ValueError(f"a reducing load of {shape}, {kind}")
        vector, register, address = operands
        reduced = [self.destination(register)]
    else:
        vector, address = operands if load else operands[::-1]
    items = vector.items if isinstance(vector, Vector) else (vector,)
    per = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]
    if len(items) != per * int(count[1:]):
        raise ValueError(f"{len(items)} registers")
    slots = [self.optional(i) if load else self.source(i, 4) for i in items]
    args = [TABLES["ld"][shape], len(items), *self.address(address), *slots, *reduced]
    name = "T5_LD" if load else "T5_ST"
    return Encoded(name, args, TYPE[kind.upper()], sub=operation, flags=flags)


@family("tcgen05.wait::ld")
def _t5_wait_ld(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("T5_WAIT_LD", flags=FLAG["ALIGNED"])


@family("tcgen05.wait::st")
def _t5_wait_st(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("T5_WAIT_ST", flags=FLAG["ALIGNED"])


@family("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _t5_fence(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("T5_FENCE", sub=int("after" in self.instruction.opcode))


@family("tcgen05.commit")
def _t5_commit(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    group = _cta_group(mods)
    multicast = take(mods, ("multicast::cluster",))
    finish([m for m in mods if m not in ("mbarrier::arrive::one", "shared::cluster", "b64")])
    mask = self.source(operands[1], 2) if multicast else -1
    return Encoded("T5_COMMIT", [*self.address(operands[0]), mask], sub=group)


@family("tcgen05.cp")
def _t5_cp(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    group = _cta_group(mods)
    shape = TABLES["cp"]["_".join(m.replace("warpx2::", "") for m in mods)]
    args = [*self.address(operands[0]), self.source(operands[1], 8)]
    return Encoded("T5_CP", args, type=shape, sub=group)


@family("tcgen05.mma")
def _t5_mma(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    group = _cta_group(mods)
    kind = next(m for m in mods if m.startswith("kind::"))
    mods.remove(kind)
    scaled = take(mods, ("block_scale",))
    # Collector hints change no result; .block32 and scale_vec::1X are the only layout of mxf8f6f4.
    take(mods, ("block32", "scale_vec::1X"))
    mods = [m for m in mods if not m.startswith("collector::")]
    finish(mods)
    number = TABLES["kind"][kind.removeprefix("kind::").upper()]
    if bool(scaled) != (kind == "kind::mxf8f6f4"):
        raise ValueError(kind)
    d, a, b, idesc, *rest = operands
    args = self.address(d)
    if isinstance(a, Address):
        args += [*self.address(a), 1]
    else:
        args += [self.source(a, 8), 0, 0]
    args += [self.source(b, 8), self.source(idesc, 4)]
    scales: list[int] = [-1, 0, -1, 0]
    disabled: list[int] = []
    if scaled:
        scales = [*self.address(rest[0]), *self.address(rest[1])]
        rest = rest[2:]
    elif isinstance(rest[0], Vector):
        disabled = [self.source(o, 4) for o in rest[0].items]
        rest = rest[1:]
    if len(rest) != 1:
        raise ValueError(f"{len(rest)} operands after the descriptors; scale-input-d is unknown")
    args += [self.predicate(rest[0]), *scales, len(disabled), *disabled]
    return Encoded("T5_MMA", args, type=number, sub=group)


# -- wgmma ----------------------------------------------------------------------------------------


@family("wgmma.fence")
def _wg_fence(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("WG_FENCE", flags=FLAG["ALIGNED"])


@family("wgmma.commit_group")
def _wg_commit(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("WG_COMMIT", flags=FLAG["ALIGNED"])


@family("wgmma.wait_group")
def _wg_wait(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("WG_WAIT", [immediate(operands[0])], flags=FLAG["ALIGNED"])


@family("wgmma.mma_async")
def _wg_mma(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    take(mods, ("sync", "aligned"))
    shape, d_type, a_type, b_type = mods
    if d_type != "f32" or not shape.startswith("m64n"):
        raise ValueError(f"{shape}.{d_type}")
    n, k = (int(x) for x in shape.removeprefix("m64n").split("k"))
    if k * (2 if a_type in ("bf16", "f16") else 4 if a_type == "tf32" else 1) != 32:
        raise ValueError(shape)
    d, a, b, scale_d, *immediates = operands
    if not isinstance(d, Vector) or len(d.items) != n // 2:
        raise ValueError("accumulator registers")
    negate_a, negate_b = (int(immediate(o) == -1) for o in immediates[:2])
    transposes = [immediate(o) for o in immediates[2:]]
    in_registers = isinstance(a, Vector)
    trans_a, trans_b = (0, 0)
    if in_registers and transposes:
        (trans_b,) = transposes
    elif transposes:
        trans_a, trans_b = transposes
    args = [n, k, int(in_registers), self.predicate(scale_d), negate_a, negate_b, trans_a, trans_b]
    args.append(self.source(b, 8))
    args += [self.source(i, 4) for i in a.items] if isinstance(a, Vector) else [self.source(a, 8)]
    args += [self.destination(i) for i in d.items]
    types = TYPE[a_type.upper()], TYPE[b_type.upper()]
    return Encoded("WG_MMA", args, *types, flags=FLAG["ALIGNED"])
