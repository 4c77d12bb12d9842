"""Opcode families that touch only registers and predicates."""

from __future__ import annotations

from .lowering import (
    FAMILIES,
    FLAG,
    ROUNDING,
    TABLES,
    TYPE,
    Encoded,
    Family,
    Lowering,
    family,
    finish,
    immediate,
    take,
    width_of,
)
from .parser import (
    WIDTHS,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Vector,
)

# -- arithmetic -----------------------------------------------------------------------------------

_MATH_FLAGS = {
    "ftz": FLAG["FTZ"],
    "sat": FLAG["SAT"],
    "NaN": FLAG["NAN"],
    "relu": FLAG["RELU"],
    "approx": 0,
    "full": 0,
}


def _arithmetic(name: str) -> Family:
    def lower(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
        mods = list(mods)
        flags = take(mods, _MATH_FLAGS)
        rounding = take(mods, ROUNDING)
        sub = take(mods, {"lo": 0, "hi": 1, "wide": 2})
        encoded_op = "FMA" if name == "MAD" and mods[0].startswith("f") else name
        kind = mods.pop(0)
        narrow = mods.pop(0) if mods and mods[0] in ("bf16", "f16") else ""
        finish(mods)
        width = width_of(kind)
        wide_result = sub == 2 and kind[0] in "us"
        d = self.destination(operands[0])
        args = [d]
        for position, operand in enumerate(operands[1:], 1):
            size = 2 * width if wide_result and position == 3 else width
            # Mixed precision: a is 16-bit, and b too for fma.
            if narrow and (position == 1 or (encoded_op == "FMA" and position == 2)):
                size = 2
            args.append(self.source(operand, size))
        if narrow:
            sub = TYPE[narrow.upper()]
        type2 = 0 if kind[0] in "us" else rounding
        if kind[0] in "us" and flags & FLAG["SAT"]:
            raise ValueError("saturating integer arithmetic")
        return Encoded(encoded_op, args, TYPE[kind.upper()], type2, sub, flags)

    return lower


for _name in ("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs"):
    FAMILIES[_name] = _arithmetic(_name.upper())


def _function(name: str) -> Family:
    def lower(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
        mods = list(mods)
        flags = take(mods, _MATH_FLAGS)
        rounding = take(mods, ROUNDING)
        (kind,) = mods
        args = [self.destination(operands[0]), self.source(operands[1], width_of(kind))]
        return Encoded(name, args, TYPE[kind.upper()], rounding, 0, flags)

    return lower


for _name in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"):
    FAMILIES[_name] = _function(_name.upper())


def _logic(name: str, amount: bool = False) -> Family:
    def lower(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
        (kind,) = mods
        if kind == "pred":
            return Encoded("P" + name, [self.predicate(o) for o in operands])
        width = width_of(kind)
        args = [self.destination(operands[0]), self.source(operands[1], width)]
        if len(operands) > 2:
            args.append(self.source(operands[2], 4 if amount else width))
        return Encoded(name, args, TYPE[kind.upper()])

    return lower


for _name in ("and", "or", "xor", "not"):
    FAMILIES[_name] = _logic(_name.upper())
FAMILIES["copysign"] = _logic("COPYSIGN")
for _name in ("shl", "shr"):
    FAMILIES[_name] = _logic(_name.upper(), amount=True)


@family("shf")
def _shf(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    side, mode, kind = mods
    args = [self.destination(operands[0])] + [self.source(o, 4) for o in operands[1:]]
    flags = {"wrap": FLAG["WRAP"], "clamp": 0}[mode]
    return Encoded("SHF", args, TYPE[kind.upper()], sub={"l": 0, "r": 1}[side], flags=flags)


@family("lop3")
def _lop3(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m != "b32"])
    args = [self.destination(operands[0])] + [self.source(o, 4) for o in operands[1:4]]
    return Encoded("LOP3", [*args, immediate(operands[4])])


@family("prmt")
def _prmt(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    finish([m for m in mods if m != "b32"])
    args = [self.destination(operands[0])] + [self.source(o, 4) for o in operands[1:]]
    return Encoded("PRMT", args)


@family("bfe", "bfi")
def _bit_field(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    (kind,) = mods
    name = "BFE" if len(operands) == 4 else "BFI"
    values = len(operands) - 3
    args = [self.destination(operands[0])]
    args += [self.source(o, width_of(kind)) for o in operands[1 : 1 + values]]
    args += [self.source(o, 4) for o in operands[1 + values :]]
    return Encoded(name, args, TYPE[kind.upper()])


def _bit_query(name: str) -> Family:
    def lower(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
        mods = list(mods)
        flags = take(mods, {"shiftamt": FLAG["SHIFT_AMOUNT"]})
        (kind,) = mods
        args = [self.destination(operands[0]), self.source(operands[1], width_of(kind))]
        return Encoded(name, args, TYPE[kind.upper()], flags=flags)

    return lower


for _name in ("bfind", "clz", "popc", "brev"):
    FAMILIES[_name] = _bit_query(_name.upper())


# -- moves, predicates, conversions ---------------------------------------------------------------


@family("mov")
def _mov(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    (kind,) = mods
    to, frm = operands
    if kind == "pred":
        return Encoded("PMOV", [self.predicate(to), self.predicate(frm)])
    width = width_of(kind)
    if isinstance(frm, Vector):
        items = [self.source(item, width // len(frm.items)) for item in frm.items]
        args = [self.destination(to), len(items), *items]
        return Encoded("PACK", args, TYPE[kind.upper()])
    if isinstance(to, Vector):
        items = [self.optional(item) for item in to.items]
        return Encoded("UNPACK", [self.source(frm, width), len(items), *items], TYPE[kind.upper()])
    if isinstance(frm, Special) and frm.name in ("%clock", "%clock64", "%globaltimer"):
        return Encoded("CLOCK", [self.destination(to)], TYPE["U64" if width == 8 else "U32"])
    return Encoded("MOV", [self.destination(to), self.source(frm, width)], TYPE[kind.upper()])


@family("selp")
def _selp(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    (kind,) = mods
    args = [self.destination(operands[0])]
    args += [self.source(o, width_of(kind)) for o in operands[1:3]]
    return Encoded("SELP", [*args, self.predicate(operands[3])], TYPE[kind.upper()])


@family("setp")
def _setp(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    comparison = mods.pop(0)
    unsigned_names = {"lo": "LT", "ls": "LE", "hi": "GT", "hs": "GE"}
    sub = TABLES["compare"][unsigned_names.get(comparison, comparison.upper())]
    flags = take(mods, {"ftz": FLAG["FTZ"]})
    combined = take(mods, ("and", "or", "xor")) > 0
    if combined:
        flags |= {"and": 0, "or": FLAG["COMBINE_OR"], "xor": FLAG["COMBINE_XOR"]}[
            self.instruction.opcode.split(".")[2]
        ]
    (kind,) = mods
    to = operands[0]
    p, q = (to.first, to.second) if isinstance(to, Pair) else (to, Sink())
    args = [self.predicate(p), -1 if isinstance(q, Sink) else self.predicate(q)]
    args += [self.source(o, width_of(kind)) for o in operands[1:3]]
    c = -1
    if combined:
        operand = operands[3]
        if isinstance(operand, Negated):
            flags |= FLAG["NEGATE_COMBINE"]
            operand = operand.register
        c = self.predicate(operand)
    return Encoded("SETP", [*args, c], TYPE[kind.upper()], sub=sub, flags=flags)


_PAIRS = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2", "ue8m0x2")


@family("cvt")
def _cvt(self: Lowering, mods: list[str], operands: tuple[Operand, ...]) -> Encoded:
    mods = list(mods)
    flags = take(
        mods,
        {
            "ftz": FLAG["FTZ"],
            "sat": FLAG["SAT"],
            "satfinite": FLAG["FINITE"],
            "relu": FLAG["RELU"],
        },
    )
    to_integer_value = any(m in mods for m in ("rni", "rzi", "rmi", "rpi"))
    rounding = take(mods, ROUNDING)
    to, frm = mods
    if to in _PAIRS:
        if frm == "f32":
            args = [self.destination(operands[0])] + [self.source(o, 4) for o in operands[1:]]
            if len(args) != 3:
                raise ValueError("a packed conversion takes two sources")
            if to.startswith("e4m3") and not flags & FLAG["FINITE"]:
                raise ValueError("e4m3 needs .satfinite")
            return Encoded("CVT2", args, TYPE[to.upper()], sub=rounding, flags=flags)
        if frm in _PAIRS and ("f16x2" in (to, frm) or "bf16x2" in (to, frm)):
            args = [self.destination(operands[0]), self.source(operands[1], 4)]
            return Encoded("CVT2F", args, TYPE[to.upper()], TYPE[frm.upper()], rounding, flags)
        raise ValueError(f"conversion {frm} -> {to}")
    if to not in WIDTHS or frm not in WIDTHS:
        raise ValueError(f"conversion {frm} -> {to}")
    if to_integer_value and to.startswith(("f", "bf")):
        flags |= FLAG["INTEGER_ROUND"]
    # Registers may be wider than the types; an immediate takes the width of its type.
    a = operands[1]
    if isinstance(a, Register):
        source, from_wide = self.register(a), a.width == 8
    else:
        from_wide = width_of(frm) == 8
        source = self.source(a, 8 if from_wide else 4)
    d = operands[0]
    if not isinstance(d, Register):
        raise ValueError("the destination is no register")
    args = [self.register(d), source, int(from_wide), int(d.width == 8), int(d.width >= 4)]
    return Encoded("CVT", args, TYPE[to.upper()], TYPE[frm.upper()], rounding, flags)
