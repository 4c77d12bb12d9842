"""Run a lowered kernel on host memory: `run(program, launch, memory, schedule)`.

Device pointers are host addresses. Only memory that `Memory` knows may be touched; memory added
with
`initialised=False` may be read only where it has been written. A kernel that breaks a rule raises
`ExecutionError` with the kind of fault, the CTA, the warp and the PTX line.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import build
from .lowering import INITIAL, Program

KINDS = (
    "alignment",
    "arithmetic",
    "bounds",
    "deadlock",
    "limit",
    "protocol",
    "race",
    "trap",
    "unsupported",
    "unwritten",
)


class ExecutionError(RuntimeError):
    """A rule was broken; `kind` is one of `KINDS`."""

    def __init__(self, kind: str, message: str, line: int) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.line = line


@dataclass(frozen=True)
class Schedule:
    """Which of the allowed orders an execution takes.

    timing: when asynchronous operations complete, `early` (at issue), `late` (when no warp can go
    on), `random`. order: which warp runs, `forward` (the first that can, until it blocks),
    `backward`, `random`. It also chooses the lane of elect.sync: lowest, highest, any.
    """

    timing: str = "late"
    order: str = "forward"
    seed: int = 0


# Results of a correct kernel are the same under all of these.
ADVERSARIAL = (
    Schedule("early", "forward"),
    Schedule("late", "forward"),
    Schedule("late", "backward"),
    Schedule("random", "random", 1),
)


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with; `parameters` is the parameter space."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    parameters: bytes = b""


@dataclass
class Result:
    """Executed instructions of warps, by opcode and by PTX line, and what units did (`work`).

    `remarks`: practices beyond the manual (README, "Remarks").
    """

    steps: int
    by_opcode: Counter[str]
    by_line: Counter[int]
    work: Counter[str]
    remarks: tuple[str, ...] = ()


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("name", ctypes.c_char * 64),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("instructions", ctypes.c_int64),
        ("initials", ctypes.c_int64),
        ("slots", ctypes.c_int32),
        ("predicates", ctypes.c_int32),
        ("code", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("uses", ctypes.c_void_p),
        ("initial", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("static_shared", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("parameters", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("timing", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("step_limit", ctypes.c_uint64),
        ("strict", ctypes.c_uint64),
        ("truncate", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 16384),
        ("remarks", ctypes.c_char * 4096),
        ("work", ctypes.c_char * 8192),
        ("line", ctypes.c_int32),
        ("cta", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("steps", ctypes.c_uint64),
    )


@dataclass
class _Region:
    address: int
    size: int
    name: str
    writable: bool
    written: np.ndarray | None
    owner: Any


@dataclass
class Memory:
    """The global memory of a launch."""

    regions: list[_Region] = field(default_factory=list)

    def add(self, array: Any, name: str, *, writable: bool = True, initialised: bool = True) -> int:
        """Let kernels use the storage of a contiguous NumPy array or torch tensor; its address."""
        if isinstance(array, np.ndarray):
            if not array.flags.c_contiguous:
                raise ValueError(f"array {name!r} is not contiguous")
            address, size = array.ctypes.data, array.nbytes
        else:
            if not array.is_contiguous():
                raise ValueError(f"tensor {name!r} is not contiguous")
            address, size = array.data_ptr(), array.numel() * array.element_size()
        written = None if initialised else np.zeros(size, np.uint8)
        self.regions.append(_Region(address, size, name, writable, written, array))
        return address

    def empty(self, shape: tuple[int, ...] | int, dtype: Any, name: str) -> np.ndarray:
        """A new 256-byte aligned array that holds nothing yet."""
        array: np.ndarray = aligned(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        self.add(array, name, initialised=False)
        return array

    def unwritten(self, name: str) -> int:
        """How many bytes of an allocation no kernel has written."""
        (region,) = (r for r in self.regions if r.name == name)
        return 0 if region.written is None else int(region.size - region.written.sum())


def aligned(shape: tuple[int, ...] | int, dtype: Any) -> Any:
    """An uninitialised C-contiguous array at a multiple of 256 bytes, as cudaMalloc returns."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    buffer = np.empty(size + 256, np.uint8)
    start = -buffer.ctypes.data % 256
    return buffer[start : start + size].view(dtype).reshape(shape)


def pack(program: Program, *values: Any) -> bytes:
    """Parameter bytes of scalars (int, float32 float) and byte strings, in declaration order."""
    result = bytearray(program.parameter_bytes)
    parameters = program.kernel.parameters
    if len(values) != len(parameters):
        raise ValueError(f"{len(values)} values for {len(parameters)} parameters")
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(value, float):
            data = np.float32(value).tobytes()
        elif isinstance(value, (int, np.integer)):
            data = int(value).to_bytes(parameter.size, "little", signed=bool(value < 0))
        else:
            data = bytes(value)
        if len(data) != parameter.size:
            raise ValueError(f"{parameter.name} has {parameter.size} bytes, not {len(data)}")
        result[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(result)


_TIMINGS = ("early", "late", "random")
_ORDERS = ("forward", "backward", "random")


def run(
    program: Program,
    launch: Launch,
    memory: Memory,
    schedule: Schedule | None = None,
    *,
    step_limit: int = 2_000_000_000,
    strict: bool = False,
    truncate: bool = False,
) -> Result:
    """Execute every CTA of a launch; raises `ExecutionError` at the first broken rule.

    strict: remarks are errors. truncate: matrix products lose the bits that hardware is thought to
    lose (README, "Numerics"); by default they are exact and rounded once.
    """
    schedule = schedule or Schedule()
    required = program.kernel.required_threads
    if required and (*required, 1, 1)[:3] != tuple(launch.block):
        raise ValueError(f"the kernel is made for blocks {required}, {launch.block=}")
    if len(launch.parameters) != program.parameter_bytes:
        raise ValueError(
            f"{len(launch.parameters)} parameter bytes, {program.parameter_bytes} expected"
        )
    for grid, cluster in zip(launch.grid, launch.cluster, strict=True):
        if cluster < 1 or grid % cluster:
            raise ValueError(f"{launch.grid=} is no multiple of {launch.cluster=}")
    parameters = aligned(max(1, len(launch.parameters)), np.uint8)
    parameters[: len(launch.parameters)] = np.frombuffer(launch.parameters, np.uint8)

    regions = [
        *memory.regions,
        _Region(
            parameters.ctypes.data, parameters.nbytes, "the parameters", False, None, parameters
        ),
    ]
    allocations = (_Allocation * len(regions))()
    for record, region in zip(allocations, regions, strict=True):
        record.base, record.size = region.address, region.size
        record.written = 0 if region.written is None else region.written.ctypes.data
        record.writable = int(region.writable)
        record.name = region.name.encode()[:63]
    record = _Program(
        len(program.code),
        len(program.initial),
        program.slots,
        program.predicates,
        program.code.ctypes.data,
        program.arguments.ctypes.data,
        program.uses.ctypes.data,
        program.initial.ctypes.data,
        program.wide.ctypes.data,
    )
    settings = _Launch(
        launch.grid,
        launch.block,
        launch.cluster,
        program.static_shared,
        launch.dynamic_shared,
        parameters.ctypes.data,
        schedule.seed,
        _TIMINGS.index(schedule.timing),
        _ORDERS.index(schedule.order),
        step_limit,
        int(strict),
        int(truncate),
    )
    counts = np.zeros(len(program.code), np.uint64)
    report = _Report()
    core = build.load()
    structures = (_Program, _Launch, _Allocation, _Report)
    sizes = [*(ctypes.sizeof(s) for s in structures), INITIAL.itemsize]
    failed = core.ptx_run(
        (ctypes.c_int64 * 5)(*sizes),
        ctypes.byref(record),
        ctypes.byref(settings),
        allocations,
        ctypes.c_int64(len(regions)),
        ctypes.c_void_p(counts.ctypes.data),
        ctypes.byref(report),
    )
    if failed == 2:
        raise RuntimeError("machine.py and the PTX core disagree on their structures")
    if failed:
        message = report.message.decode(errors="replace")
        issuer = re.search(r"by what line (\d+) issued$", message)
        if issuer and int(issuer[1]):
            message += f": {program.lines[int(issuer[1]) - 1].strip()!r}"
        if report.line:
            place = f"CTA {report.cta} of its cluster, warp {report.warp}, line {report.line}"
            place += f" {program.lines[report.line - 1].strip()!r}"
            message = f"{message}\n  at {place}"
        raise ExecutionError(report.kind.decode(), message, report.line)
    by_opcode: Counter[str] = Counter()
    by_line: Counter[int] = Counter()
    for instruction, count in zip(program.kernel.instructions, counts.tolist(), strict=True):
        if count:
            by_opcode[instruction.opcode] += count
            by_line[instruction.line] += count
    remarks = tuple(report.remarks.decode(errors="replace").splitlines())
    work: Counter[str] = Counter()
    for line in report.work.decode().splitlines():
        count, name = line.split(" ", 1)
        work[name] = int(count)
    return Result(int(report.steps), by_opcode, by_line, work, remarks)
