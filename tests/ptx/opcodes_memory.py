"""Opcode families of memory, control flow, warps, barriers and mbarriers."""

from __future__ import annotations

from .lowering import (
    CACHE_HINTS,
    FAMILIES,
    FLAG,
    ORDERING,
    SCOPES,
    SPACE,
    TABLES,
    TYPE,
    Encoded,
    Lowering,
    family,
    finish,
    take,
    width_of,
)
from .parser import (
    Address,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Target,
    Vector,
)

# -- memory ---------------------------------------------------------------------------------------

_STATE_SPACES = {
    "global": "GLOBAL",
    "shared": "SHARED",
    "shared::cta": "SHARED",
    "shared::cluster": "SHARED_CLUSTER",
    "param": "PARAM",
    "param::entry": "PARAM",
    "const": "GLOBAL",
}


def _space(mods: list[str]) -> int:
    for m in mods:
        if m in _STATE_SPACES:
            mods.remove(m)
            return SPACE[_STATE_SPACES[m]]
    return SPACE["GENERIC"]


@family("ld", "ldu")
def _ld(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    space = _space(mods)
    take(mods, ORDERING + SCOPES + CACHE_HINTS)
    take(mods, ("v2", "v4", "v8"))
    (kind,) = mods
    items = operands[0].items if isinstance(operands[0], Vector) else (operands[0],)
    destinations = [self.optional(item) for item in items]
    args = [space, len(items), width_of(kind), int(kind[0] == "s"), *self.address(operands[1])]
    return Encoded("LD", args + destinations, TYPE[kind.upper()])


@family("st")
def _st(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    space = _space(mods)
    take(mods, ORDERING + SCOPES + CACHE_HINTS)
    take(mods, ("v2", "v4", "v8"))
    (kind,) = mods
    width = width_of(kind)
    items = operands[1].items if isinstance(operands[1], Vector) else (operands[1],)
    sources = [
        self.register(item) if isinstance(item, Register) else self.source(item, max(width, 4))
        for item in items
    ]
    args = [space, len(items), width, *self.address(operands[0]), *sources]
    return Encoded("ST", args, TYPE[kind.upper()])


@family("st.async")
def _st_async(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    take(mods, ("weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4"))
    (kind,) = mods
    address, value, barrier = operands
    items = value.items if isinstance(value, Vector) else (value,)
    width = width_of(kind)
    sources = [self.source(item, width) for item in items]
    args = [*self.address(address), *self.address(barrier), len(items), width, *sources]
    return Encoded("ST_ASYNC", args, TYPE[kind.upper()])


@family("atom", "red")
def _atom(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    space = _space(mods)
    take(mods, ORDERING + SCOPES + ("noftz",))
    operation, kind = mods
    returns = self.instruction.opcode.startswith("atom")
    d = self.optional(operands[0]) if returns else -1
    rest = operands[1:] if returns else operands
    if isinstance(rest[1], Vector) or kind in ("f16x2", "bf16x2", "b128"):
        raise ValueError("vector atomics")
    width = width_of(kind)
    args = [space, *self.address(rest[0]), d, *(self.source(o, width) for o in rest[1:])]
    return Encoded("ATOM", args, TYPE[kind.upper()], sub=TABLES["reduction"][operation.upper()])


@family("cvta")
def _cvta(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    to = take(mods, ("to",))
    space = mods.pop(0)
    finish([m for m in mods if m != "u64"])
    if space.startswith("shared"):
        name = "CVTA_TO_SHARED" if to else "CVTA_SHARED"
        a = operands[1]
        source = self.register(a) if isinstance(a, Register) else self.source(a, 4)
        return Encoded(name, [self.destination(operands[0]), source])
    if space not in ("param", "global", "const"):
        raise ValueError(f"state space {space}")
    # Global, constant and parameter addresses are host addresses already.
    return Encoded("MOV", [self.destination(operands[0]), self.source(operands[1], 8)], TYPE["B64"])


@family("mapa")
def _mapa(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in ("shared::cluster", "u32", "u64")])
    a = operands[1]
    source = self.register(a) if isinstance(a, Register) else self.source(a, 4)
    return Encoded("MAPA", [self.destination(operands[0]), source, self.source(operands[2], 4)])


@family("getctarank")
def _getctarank(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in ("shared::cluster", "u32", "u64")])
    a = operands[1]
    source = self.register(a) if isinstance(a, Register) else self.source(a, 4)
    return Encoded("GETCTARANK", [self.destination(operands[0]), source])


@family("stmatrix", "ldmatrix")
def _matrix(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    count = take(mods, {"x1": 1, "x2": 2, "x4": 4})
    transposed = take(mods, ("trans",))
    take(mods, ("sync", "aligned", "m8n8", "shared", "shared::cta", "b16"))
    finish(mods)
    store = self.instruction.opcode.startswith("st")
    address, vector = operands if store else operands[::-1]
    items = vector.items if isinstance(vector, Vector) else (vector,)
    if len(items) != count:
        raise ValueError(f"{len(items)} registers for .x{count}")
    args = [count, transposed, *self.address(address), *(self.destination(i) for i in items)]
    return Encoded("STMATRIX" if store else "LDMATRIX", args, flags=FLAG["ALIGNED"])


# -- control flow and warp-wide operations --------------------------------------------------------


@family("bra")
def _bra(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m != "uni"])
    (target,) = operands
    if not isinstance(target, Target):
        raise ValueError("the target is no label")
    return Encoded("BRA", [target.index])


@family("ret", "exit")
def _exit(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m != "uni"])
    return Encoded("EXIT")


@family("trap")
def _trap(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("TRAP")


@family("shfl.sync")
def _shfl(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mode, kind = mods
    if kind != "b32":
        raise ValueError(kind)
    to = operands[0]
    d, p = (to.first, to.second) if isinstance(to, Pair) else (to, Sink())
    args = [self.destination(d), -1 if isinstance(p, Sink) else self.predicate(p)]
    args += [self.source(o, 4) for o in operands[1:]]
    return Encoded("SHFL", args, sub={"idx": 0, "up": 1, "down": 2, "bfly": 3}[mode])


@family("vote.sync")
def _vote(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mode, _kind = mods
    source, flags = operands[1], 0
    if isinstance(source, Negated):
        source, flags = source.register, FLAG["NEGATE_SOURCE"]
    d = self.destination(operands[0]) if mode == "ballot" else self.predicate(operands[0])
    args = [d, self.predicate(source), self.source(operands[2], 4)]
    sub = {"ballot": 0, "any": 1, "all": 2, "uni": 3}[mode]
    return Encoded("VOTE", args, sub=sub, flags=flags)


@family("elect.sync")
def _elect(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish(mods)
    to = operands[0]
    if not isinstance(to, Pair):
        raise ValueError("expected d|p")
    args = [self.optional(to.first), self.predicate(to.second), self.source(operands[1], 4)]
    return Encoded("ELECT", args)


@family("redux.sync")
def _redux(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    flags = take(mods, {"NaN": FLAG["NAN"], "abs": FLAG["ABS"]})
    operation, kind = mods
    args = [self.destination(operands[0])] + [self.source(o, 4) for o in operands[1:]]
    sub = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}[operation]
    return Encoded("REDUX", args, TYPE[kind.upper()], sub=sub, flags=flags)


@family("match.any")
def _match(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    sync, kind = mods
    finish([] if sync == "sync" else [sync])
    args = [self.destination(operands[0]), self.source(operands[1], width_of(kind))]
    return Encoded("MATCH", [*args, self.source(operands[2], 4)], TYPE[kind.upper()])


@family("activemask")
def _activemask(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("ACTIVEMASK", [self.destination(operands[0])])


@family("bar.warp")
def _warpsync(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m != "sync"])
    return Encoded("WARPSYNC", [self.source(operands[0], 4)])


@family("bar", "barrier")
def _named_barrier(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods, flags = list(mods), 0
    take(mods, ("cta", "aligned"))
    reduced = [-1, -1]
    if mods[0] == "red":
        action, kind = mods[1:]
        if kind != "pred":
            raise ValueError(f"a reduction to .{kind}")
        result, *operands, source = operands
        if isinstance(source, Negated):
            source, flags = source.register, FLAG["NEGATE_SOURCE"]
        reduced = [self.predicate(result), self.predicate(source)]
    else:
        (action,) = mods
    args = [self.source(operands[0], 4)]
    args.append(self.source(operands[1], 4) if len(operands) > 1 else -1)
    sub = {"sync": 0, "arrive": 1, "or": 2, "and": 3}[action]
    return Encoded("BARRIER", [*args, *reduced], sub=sub, flags=flags)


@family("barrier.cluster")
def _cluster(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    flags = FLAG["ALIGNED"] | take(mods, {"relaxed": FLAG["RELAXED"]})
    take(mods, ("aligned", "acquire", "release"))
    (action,) = mods
    return Encoded({"arrive": "CLUSTER_ARRIVE", "wait": "CLUSTER_WAIT"}[action], flags=flags)


def _nop(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    return Encoded("NOP")


# Fences between generic accesses: knowledge moves at barriers here, and a kernel that orders
# through memory alone is not checked (README, "Not modelled"). setmaxnreg and griddepcontrol change
# no value.
for _name in ("membar", "setmaxnreg.inc", "setmaxnreg.dec", "griddepcontrol", "prefetch"):
    FAMILIES[_name] = _nop
for _name in ("prefetchu", "discard", "nanosleep", "applypriority"):
    FAMILIES[_name] = _nop
for _name in ("acq_rel", "sc", "acquire", "release", "mbarrier_init"):
    FAMILIES["fence." + _name] = _nop


@family("fence.proxy")
def _fence_proxy(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    if mods[0] == "async" or mods[0].startswith("async::"):
        spaces = [mods[0].removeprefix("async::"), *mods[1:]]
        finish([m for m in spaces[1:] if m not in ("global", "shared::cta", "shared::cluster")])
        # Only shared memory is checked for races, so a fence for global memory alone does nothing.
        return Encoded("NOP" if "global" in spaces else "FENCE_ASYNC")
    if mods[0].startswith("tensormap"):
        return Encoded("NOP")
    raise ValueError("." + mods[0])


# -- mbarrier -------------------------------------------------------------------------------------

_MBARRIER_NOISE = ("shared", "shared::cta", "b64", "release", "acquire", "relaxed", *SCOPES)


@family("mbarrier.init")
def _mbar_init(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in _MBARRIER_NOISE])
    return Encoded("MBAR_INIT", [*self.address(operands[0]), self.source(operands[1], 4)])


@family("mbarrier.inval")
def _mbar_inval(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m not in _MBARRIER_NOISE])
    return Encoded("MBAR_INVAL", self.address(operands[0]))


@family("mbarrier.arrive", "mbarrier.expect_tx")
def _mbar_arrive(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    cluster = "shared::cluster" in mods
    expect = take(mods, ("expect_tx",))
    sub = 2 if self.instruction.opcode.startswith("mbarrier.expect_tx") else expect
    finish([m for m in mods if m not in (*_MBARRIER_NOISE, "shared::cluster")])
    # The returned state is opaque and no supported instruction reads it, so it is dropped.
    address = next(k for k, o in enumerate(operands) if isinstance(o, Address))
    count = operands[address + 1] if len(operands) > address + 1 else Immediate(1)
    if sub and len(operands) == address + 1:
        raise ValueError("no byte count")
    args = [-1, *self.address(operands[address]), self.source(count, 4), int(cluster)]
    return Encoded("MBAR_ARRIVE", args, sub=sub)


@family("mbarrier.try_wait", "mbarrier.test_wait")
def _mbar_wait(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    if not take(mods, ("parity",)):
        raise ValueError("a wait for a state, not a parity")
    finish([m for m in mods if m not in _MBARRIER_NOISE])
    args = [self.predicate(operands[0]), *self.address(operands[1]), self.source(operands[2], 4)]
    return Encoded("MBAR_TRY", args, sub=int("test_wait" in self.instruction.opcode))
