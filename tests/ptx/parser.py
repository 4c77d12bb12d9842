"""PTX text -> `Module`: kernels with parameters, shared symbols, registers and instructions.

The parser knows the grammar (PTX ISA 4, "Syntax"; 5, "State spaces, types, variables") and no
opcode. Names are resolved here: a register or label belongs to the innermost `{ }` that declares it
(inline assembly redeclares both), so every `Register` is unique and every branch target is an
instruction index.

Left out: `.func`, `call`, module-level `.global`/`.const` data. They raise `PtxSyntaxError`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TypeAlias


class PtxSyntaxError(ValueError):
    """The text is outside the grammar this parser accepts; the message holds the PTX line."""


WIDTHS = {
    "pred": 0,
    **{f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)},
    "b128": 16,
    "f16x2": 4,
    "bf16": 2,
    "bf16x2": 4,
}


@dataclass(frozen=True)
class Register:
    """One virtual register; `serial` tells redeclared names apart. `width` 0 is a predicate."""

    name: str
    width: int
    serial: int


@dataclass(frozen=True)
class Immediate:
    """An integer as written, or the bits of a float literal of `float_width` bytes."""

    value: int
    float_width: int = 0


@dataclass(frozen=True)
class Special:
    """A read-only register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a parameter or shared variable."""

    name: str


@dataclass(frozen=True)
class Sink:
    """`_`: the result is dropped."""


@dataclass(frozen=True)
class Negated:
    """`!p` as an operand."""

    register: Register


@dataclass(frozen=True)
class Target:
    """A branch target, an index into `Kernel.instructions`."""

    index: int


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, for tensor copies `[base, {coordinates}]`."""

    base: Operand
    offset: int
    coordinates: Vector | None = None


Operand: TypeAlias = (
    Register | Immediate | Special | Symbol | Sink | Negated | Target | Vector | Pair | Address
)


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands;` with the line it stands on."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    line: int


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter at `offset` of the parameter space."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class SharedVariable:
    """A shared variable; `size` None is the dynamic one (`.extern`)."""

    name: str
    size: int | None
    align: int


@dataclass
class Kernel:
    """One `.entry`."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    shared: list[SharedVariable] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    required_threads: tuple[int, ...] | None = None


@dataclass
class Module:
    """A parsed PTX file; `lines` are for messages."""

    target: str
    kernels: dict[str, Kernel]
    lines: list[str]


_TOKEN = re.compile(
    r"\s+|//[^\n]*|/\*.*?\*/"  # skipped
    r'|(?P<string>"[^"\n]*")'
    r"|(?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)"
    r"|(?P<number>0[xX][0-9a-fA-F]+U?|\d+\.\d+|\d+U?)"
    r"|(?P<word>[.%$_a-zA-Z][\w$.]*(?:::\w[\w.]*)*)"
    r"|(?P<punctuation>[{}()\[\];:,@!|+\-<>=])",
    re.S,
)
_SKIPPED_DIRECTIVES = {".pragma", ".loc", ".file"}
_TUNING = {".maxntid", ".minnctapersm", ".maxnreg", ".maxclusterrank"}


@dataclass(frozen=True)
class _Label:
    """A branch target before its scope is closed."""

    name: str


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.families: dict[str, tuple[int, int]] = {}
        self.vectors: dict[str, Vector] = {}
        self.labels: dict[str, int] = {}


class _Parser:
    def __init__(self, text: str) -> None:
        # The DSL leaves NUL bytes in some symbol names.
        self.text = text.replace("\0", "")
        self.lines = self.text.split("\n")
        self.tokens: list[tuple[str, str, int]] = []
        position, line = 0, 1
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise PtxSyntaxError(f"line {line}: cannot read {self.lines[line - 1].strip()!r}")
            if match.lastgroup:
                self.tokens.append((match.lastgroup, match.group(), line))
            line += match.group().count("\n")
            position = match.end()
        self.at = 0
        self.serial = 0
        self.dynamic_shared: list[SharedVariable] = []

    # -- tokens ---------------------------------------------------------------------------------

    def fail(self, what: str) -> PtxSyntaxError:
        line = self.tokens[min(self.at, len(self.tokens) - 1)][2]
        return PtxSyntaxError(f"line {line}: {what}: {self.lines[line - 1].strip()!r}")

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index][1] if index < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise self.fail(f"expected {expected!r}, found {token!r}")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.at += 1
            return True
        return False

    def integer(self) -> int:
        negative = self.accept("-")
        token = self.take()
        try:
            value = int(token.rstrip("U"), 0)
        except ValueError:
            raise self.fail(f"expected an integer, found {token!r}") from None
        return -value if negative else value

    # -- module ---------------------------------------------------------------------------------

    def module(self) -> Module:
        target, kernels = "", {}
        while self.at < len(self.tokens):
            word = self.take()
            if word == ".target":
                target = self.take()
                while self.accept(","):
                    self.take()
            elif word in (".version", ".address_size"):
                if (value := self.take()) == "32":
                    raise self.fail("only 64-bit addresses are supported")
                del value
            elif word == ".entry":
                kernel = self.kernel()
                kernels[kernel.name] = kernel
            elif word == ".shared":
                self.dynamic_shared.append(self.shared_variable())
            elif word in (".visible", ".extern", ".weak"):
                continue
            elif word == ".section":
                self.skip_block()
            elif word in _SKIPPED_DIRECTIVES:
                self.skip_directive(self.tokens[self.at - 1][2])
            else:
                raise self.fail(f"unsupported directive {word!r}")
        return Module(target, kernels, self.lines)

    def skip_block(self) -> None:
        while self.take() != "{":
            continue
        while self.take() != "}":
            continue

    def skip_directive(self, line: int) -> None:
        """`.pragma "x";` ends at its semicolon; `.loc` and `.file` end with their line."""
        while self.at < len(self.tokens) and self.tokens[self.at][2] == line:
            if self.take() == ";":
                return

    def declared_type(self) -> tuple[int, int]:
        """`.align N .type` -> (width, align)."""
        align = 0
        while True:
            word = self.take()
            if word == ".align":
                align = self.integer()
            elif word in (".ptr", ".global", ".const"):
                continue
            elif word[1:] in WIDTHS:
                width = WIDTHS[word[1:]]
                return width, align or width
            else:
                raise self.fail(f"unknown type {word!r}")

    def array(self) -> int | None:
        """`[n][m]` -> n*m; `[]` -> None; nothing -> 1."""
        count = 1
        while self.accept("["):
            if self.accept("]"):
                return None
            count *= self.integer()
            self.take("]")
        return count

    def shared_variable(self) -> SharedVariable:
        width, align = self.declared_type()
        name = self.take()
        count = self.array()
        self.take(";")
        return SharedVariable(name, None if count is None else count * width, align)

    def kernel(self) -> Kernel:
        kernel = Kernel(self.take())
        offset = 0
        if self.accept("("):
            while not self.accept(")"):
                self.take(".param")
                width, align = self.declared_type()
                name = self.take()
                size = (self.array() or 1) * width
                offset = -(-offset // align) * align
                kernel.parameters.append(Parameter(name, offset, size, align))
                offset += size
                self.accept(",")
        while self.peek() != "{":
            word = self.take()
            if word == ".reqntid":
                kernel.required_threads = tuple(self.integers())
            elif word in _TUNING or word == ".reqnctapercluster":
                self.integers()
            elif word not in (".explicitcluster", ".blocksareclusters"):
                raise self.fail(f"unsupported directive {word!r}")
        kernel.shared.extend(self.dynamic_shared)
        self.take("{")
        self.statements(kernel, None)
        return kernel

    def integers(self) -> list[int]:
        values = [self.integer()]
        while self.accept(","):
            values.append(self.integer())
        return values

    # -- statements -----------------------------------------------------------------------------

    def statements(self, kernel: Kernel, parent: _Scope | None) -> None:
        scope = _Scope(parent)
        first = len(kernel.instructions)
        while not self.accept("}"):
            word = self.peek()
            if self.accept(";"):
                continue
            if self.accept("{"):
                self.statements(kernel, scope)
            elif word == ".reg":
                self.take()
                self.declare_registers(kernel, scope)
            elif word == ".shared":
                self.take()
                kernel.shared.append(self.shared_variable())
            elif word in _SKIPPED_DIRECTIVES:
                self.skip_directive(self.tokens[self.at][2])
            elif word.startswith("."):
                raise self.fail(f"unsupported directive {word!r}")
            elif self.peek(1) == ":":
                if word in scope.labels:
                    raise self.fail(f"label {word!r} is declared twice")
                scope.labels[word] = len(kernel.instructions)
                self.at += 2
            else:
                kernel.instructions.append(self.instruction(kernel, scope))
        for index in range(first, len(kernel.instructions)):
            kernel.instructions[index] = self.resolve(kernel.instructions[index], scope)

    def resolve(self, instruction: Instruction, scope: _Scope) -> Instruction:
        """Turn the `_Label` operands that `scope` declares into targets."""
        operands = []
        for operand in instruction.operands:
            if isinstance(operand, _Label):
                if operand.name in scope.labels:
                    operand = Target(scope.labels[operand.name])
                elif scope.parent is None:
                    raise PtxSyntaxError(f"line {instruction.line}: unknown name {operand.name!r}")
            operands.append(operand)
        return Instruction(
            instruction.opcode,
            tuple(operands),
            instruction.guard,
            instruction.guard_negated,
            instruction.line,
        )

    def declare_registers(self, kernel: Kernel, scope: _Scope) -> None:
        parts = {".v2": "xy", ".v4": "xyzw"}.get(self.peek(), "")
        if parts:
            self.take()
        width, _ = self.declared_type()
        while True:
            name = self.take()
            if parts:  # `.reg .v4 .s32 v` declares v.x to v.w; `v` is all of them
                items = tuple(self.new_register(kernel, f"{name}.{part}", width) for part in parts)
                scope.registers.update((item.name, item) for item in items)
                scope.vectors[name] = Vector(items)
            elif self.accept("<"):
                count = self.integer()
                self.take(">")
                # `%r<9>` declares %r0..%r8. Most are never used, so they are made on first use.
                scope.families[name] = (count, width)
            else:
                scope.registers[name] = self.new_register(kernel, name, width)
            if not self.accept(","):
                break
        self.take(";")

    def new_register(self, kernel: Kernel, name: str, width: int) -> Register:
        self.serial += 1
        register = Register(name, width, self.serial)
        kernel.registers.append(register)
        return register

    def find_register(self, kernel: Kernel, scope: _Scope | None, name: str) -> Register | None:
        stem = name.rstrip("0123456789")
        number = name[len(stem) :]
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            if number and stem in scope.families:
                count, width = scope.families[stem]
                if int(number) < count:
                    scope.registers[name] = self.new_register(kernel, name, width)
                    return scope.registers[name]
            scope = scope.parent
        return None

    def instruction(self, kernel: Kernel, scope: _Scope) -> Instruction:
        line = self.tokens[self.at][2]
        guard, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            guard = self.find_register(kernel, scope, self.take())
            if guard is None or guard.width:
                raise self.fail("the guard is not a predicate")
        opcode = self.take()
        operands: list[Operand] = []
        while not self.accept(";"):
            if operands:
                self.take(",")
            operands.append(self.operand(kernel, scope))
        return Instruction(opcode, tuple(operands), guard, negated, line)

    def operand(self, kernel: Kernel, scope: _Scope) -> Operand:
        if self.accept("["):
            base = self.scalar(kernel, scope)
            offset, coordinates = 0, None
            if self.accept("+") or self.peek() == "-":
                offset = self.integer()
            if self.accept(","):
                vector = self.operand(kernel, scope)
                if not isinstance(vector, Vector):
                    raise self.fail("expected coordinates in braces")
                coordinates = vector
            self.take("]")
            return Address(base, offset, coordinates)
        if self.accept("{"):
            items: list[Operand] = []
            while not self.accept("}"):
                if items:
                    self.take(",")
                items.append(self.scalar(kernel, scope))
            return Vector(tuple(items))
        if self.accept("!"):
            register = self.find_register(kernel, scope, self.take())
            if register is None:
                raise self.fail("expected a predicate after '!'")
            return Negated(register)
        first = self.scalar(kernel, scope)
        if self.accept("|"):
            return Pair(first, self.scalar(kernel, scope))
        return first

    def scalar(self, kernel: Kernel, scope: _Scope) -> Operand:
        kind, token, _ = self.tokens[self.at]
        if kind == "float":
            self.at += 1
            width = 4 if token[1] in "fF" else 8
            return Immediate(int(token[2:], 16), width)
        if kind == "number" and "." in token:
            self.at += 1
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 8)
        if kind == "number" or token == "-":
            return Immediate(self.integer())
        if kind != "word":
            raise self.fail(f"unexpected {token!r}")
        self.at += 1
        if token == "_":
            return Sink()
        register = self.find_register(kernel, scope, token)
        if register is not None:
            return register
        outer: _Scope | None = scope
        while outer is not None:
            if token in outer.vectors:
                return outer.vectors[token]
            outer = outer.parent
        if token.startswith("%"):
            return Special(token)
        if any(token == p.name for p in kernel.parameters) or any(
            token == v.name for v in kernel.shared
        ):
            return Symbol(token)
        return _Label(token)  # type: ignore[return-value]  # resolved when its scope closes


def parse(text: str) -> Module:
    """Parse one PTX file."""
    return _Parser(text).module()
