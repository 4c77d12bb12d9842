"""`parser.Kernel` -> flat arrays for the core: opcodes as numbers, operands as register slots.

Every operand becomes a slot: immediates, special registers and symbol addresses are registers that
hold their value from the start. One table entry for each opcode family says which modifiers it
takes; an opcode or a modifier that no entry accepts raises `UnsupportedOpcode` with its PTX line,
also in code that would never run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .build import tables
from .parser import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)


class UnsupportedOpcode(NotImplementedError):
    """The executor does not know this instruction; the message holds the PTX line."""


TABLES = tables()
OP, TYPE, FLAG, SPACE = TABLES["op"], TABLES["type"], TABLES["flag"], TABLES["space"]
ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
ORDERING = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sc")
SCOPES = ("cta", "cluster", "gpu", "sys")
# Where a copy is kept changes no value.
CACHE_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified", "L1::no_allocate"),
    *("L1::evict_first", "L1::evict_last", "L1::evict_normal", "L2::evict_first"),
    *("L2::evict_last", "L2::64B", "L2::128B", "L2::256B"),
)


@dataclass
class Program:
    """What the core executes, and how to read its answers."""

    kernel: Kernel
    code: np.ndarray
    arguments: np.ndarray
    uses: np.ndarray
    initial: np.ndarray
    wide: np.ndarray
    predicates: int
    static_shared: int
    parameter_bytes: int
    lines: list[str]

    @property
    def slots(self) -> int:
        return len(self.wide)


INITIAL = np.dtype(
    [("slot", "<i4"), ("wide", "<i4"), ("special", "<i4"), ("unused", "<i4"), ("value", "<u8")]
)


@dataclass
class Encoded:
    """One instruction in the fields of core/tables.txt."""

    op: str
    args: list[int] = field(default_factory=list)
    type: int = 0
    type2: int = 0
    sub: int = 0
    flags: int = 0


class Lowering:
    """The state of lowering one kernel: slots given out so far, and the instruction under way."""

    def __init__(self, kernel: Kernel, lines: list[str]) -> None:
        self.kernel = kernel
        self.lines = lines
        self.slots: dict[object, int] = {}
        self.wide: list[int] = []
        self.predicates: dict[Register, int] = {}
        self.initial: list[tuple[int, int, int, int, int]] = []
        self.uses: set[int] = set()
        self.instruction = Instruction("", (), None, False, 0)
        self.shared_offsets, self.static_shared = self._lay_out_shared()

    def _lay_out_shared(self) -> tuple[dict[str, int], int]:
        """Static variables first, then the dynamic one, each aligned (as ptxas does)."""
        offsets, at = {}, 0
        for variable in sorted(self.kernel.shared, key=lambda v: v.size is None):
            at = -(-at // variable.align) * variable.align
            offsets[variable.name] = at
            at += variable.size or 0
        return offsets, at

    def fail(self, what: str) -> UnsupportedOpcode:
        line = self.instruction.line
        return UnsupportedOpcode(f"line {line}: {what}: {self.lines[line - 1].strip()!r}")

    # -- slots ----------------------------------------------------------------------------------

    def new_slot(self, wide: bool) -> int:
        slot = len(self.wide)
        self.wide.extend([1, 0] if wide else [0])
        return slot

    def initialised(self, key: object, wide: bool, special: str, value: int = 0) -> int:
        if key not in self.slots:
            slot = self.new_slot(wide)
            self.slots[key] = slot
            number = TABLES["special"][special]
            self.initial.append((slot, int(wide), number, 0, value & (2**64 - 1)))
        return self.slots[key]

    def register(self, register: Register) -> int:
        if register.width == 0:
            raise self.fail(f"{register.name} is a predicate")
        if register not in self.slots:
            self.slots[register] = self.new_slot(register.width == 8)
        self.uses.add(self.slots[register])
        return self.slots[register]

    def source(self, operand: Operand, width: int) -> int:
        """A slot that holds the operand as `width` bytes (2 counts as 4)."""
        wide = width == 8
        if isinstance(operand, Register):
            if (operand.width == 8) != wide:
                raise self.fail(f"{operand.name} has {operand.width} bytes, {width} expected")
            return self.register(operand)
        if isinstance(operand, Immediate):
            value = operand.value
            if operand.float_width == 8 and width == 4:
                value = struct.unpack("<I", struct.pack("<f", _as_double(value)))[0]
            elif operand.float_width == 4 and width == 8:
                value = struct.unpack("<Q", struct.pack("<d", _as_single(value)))[0]
            value &= 2 ** (8 * max(width, 4)) - 1 if width != 2 else 0xFFFF
            return self.initialised(("constant", value, wide), wide, "constant", value)
        if isinstance(operand, Special):
            name = operand.name[1:].replace(".", "_")
            if name not in TABLES["special"]:
                raise self.fail(f"unknown special register {operand.name}")
            return self.initialised((name, wide), wide, name)
        if isinstance(operand, Symbol):
            if operand.name in self.shared_offsets:
                offset = self.shared_offsets[operand.name]
                return self.initialised(("shared", offset, wide), wide, "shared_symbol", offset)
            offset = next(p.offset for p in self.kernel.parameters if p.name == operand.name)
            return self.initialised(("param", offset), True, "parameter_symbol", offset)
        raise self.fail(f"unexpected operand {operand}")

    def destination(self, operand: Operand) -> int:
        if not isinstance(operand, Register):
            raise self.fail(f"expected a register, found {operand}")
        return self.register(operand)

    def optional(self, operand: Operand) -> int:
        return -1 if isinstance(operand, Sink) else self.destination(operand)

    def predicate(self, operand: Operand) -> int:
        if isinstance(operand, Immediate):
            return 1 if operand.value else 0
        if not isinstance(operand, Register) or operand.width:
            raise self.fail(f"expected a predicate, found {operand}")
        return self.predicates.setdefault(operand, len(self.predicates) + 2)

    def address(self, operand: Operand) -> list[int]:
        """[slot, offset] of an address."""
        if not isinstance(operand, Address):
            raise self.fail(f"expected an address, found {operand}")
        base = operand.base
        if isinstance(base, Register):
            return [self.register(base), operand.offset]
        if isinstance(base, Symbol) and base.name in self.shared_offsets:
            return [self.source(base, 4), operand.offset]
        return [self.source(base, 8), operand.offset]

    # -- program --------------------------------------------------------------------------------

    def program(self) -> Program:
        code: list[tuple[int, ...]] = []
        arguments: list[int] = []
        uses: list[int] = []
        for instruction in self.kernel.instructions:
            self.instruction = instruction
            self.uses = set()
            encoded = self.lower(instruction)
            guard = -1 if instruction.guard is None else self.predicate(instruction.guard)
            code.append(
                (
                    OP[encoded.op],
                    encoded.type,
                    encoded.type2,
                    encoded.sub,
                    encoded.flags,
                    guard,
                    int(instruction.guard_negated),
                    instruction.line,
                    len(arguments),
                    len(encoded.args),
                    len(uses),
                    len(self.uses),
                )
            )
            arguments.extend(encoded.args)
            uses.extend(sorted(self.uses))
        parameters = self.kernel.parameters
        return Program(
            self.kernel,
            np.array(code, dtype=np.int32).reshape(-1, 12),
            np.array([*arguments, 0], dtype=np.int32),
            np.array([*uses, 0], dtype=np.int32),
            np.array(self.initial, dtype=INITIAL),
            np.array([*self.wide, 0], dtype=np.uint8),
            len(self.predicates) + 2,
            self.static_shared,
            max((p.offset + p.size for p in parameters), default=0),
            self.lines,
        )

    def lower(self, instruction: Instruction) -> Encoded:
        parts = instruction.opcode.split(".")
        for length in (3, 2, 1):
            entry = FAMILIES.get(".".join(parts[:length]))
            if entry is not None:
                try:
                    return entry(self, parts[length:], instruction.operands)
                except (ValueError, KeyError, IndexError) as error:
                    raise self.fail(f"cannot lower ({error!r})") from error
        raise self.fail("unknown opcode")


def _as_double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def _as_single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


Family = Callable[[Lowering, list[str], tuple[Operand, ...]], Encoded]
FAMILIES: dict[str, Family] = {}


def family(*names: str) -> Callable[[Family], Family]:
    """Register a function for opcodes that begin with one of `names`."""

    def register(function: Family) -> Family:
        for name in names:
            FAMILIES[name] = function
        return function

    return register


def take(mods: list[str], allowed: dict[str, int] | tuple[str, ...], default: int = 0) -> int:
    """Remove the modifiers in `allowed` from `mods`; the sum of their values."""
    found = [m for m in mods if m in allowed]
    mods[:] = [m for m in mods if m not in allowed]
    if isinstance(allowed, tuple):
        return len(found)
    return sum(allowed[m] for m in found) if found else default


def finish(mods: list[str]) -> None:
    """No modifier may be left over."""
    if mods:
        raise ValueError("modifiers " + " ".join("." + m for m in mods))


def width_of(name: str) -> int:
    """Bytes of a register that holds this type."""
    return 8 if name == "f32x2" else WIDTHS[name]


def immediate(operand: Operand) -> int:
    """The value of a constant operand."""
    if not isinstance(operand, Immediate):
        raise ValueError(f"expected a constant, found {operand}")
    return operand.value
