"""Short PTX programs for the tests: a module around a body; one instruction on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .lower import Program, lower
from .machine import Launch, Memory, Result, Schedule, pack, run
from .parser import parse

_REGISTERS = """
  .reg .pred %p<16>; .reg .b16 %h<64>; .reg .b32 %r<256>; .reg .b32 %f<64>; .reg .b64 %d<64>;
"""


def module(body: str, parameters: str = "", shared: str = "", target: str = "sm_100a") -> str:
    """PTX text with one kernel; `parameters` are declarations without `.param`."""
    declared = ", ".join(f".param {p.strip()}" for p in parameters.split(",") if p.strip())
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n{shared}\n"
        f".visible .entry test({declared})\n{{{_REGISTERS}{body}\n  ret;\n}}\n"
    )


def program(body: str, parameters: str = "", shared: str = "") -> Program:
    """The lowered kernel of `module`."""
    return lower(parse(module(body, parameters, shared)))


def execute(
    body: str,
    arrays: dict[str, np.ndarray],
    *values: Any,
    declare: str = "",
    shared: str = "",
    schedule: Schedule | None = None,
    truncate: bool = False,
    **launch: Any,
) -> Result:
    """Run a body whose 64-bit registers named like `arrays` hold their addresses."""
    names = list(arrays)
    parameters = ", ".join([f".u64 {n}_param" for n in names] + ([declare] if declare else []))
    loads = "".join(f"  .reg .b64 {n}; ld.param.u64 {n}, [{n}_param];\n" for n in names)
    lowered = program(loads + body, parameters, shared)
    memory = Memory()
    addresses = [memory.add(array, name) for name, array in arrays.items()]
    settings = Launch(parameters=pack(lowered, *addresses, *values), **launch)
    return run(lowered, settings, memory, schedule, truncate=truncate)


_LOADS = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}
_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def apply(instruction: str, *inputs: Any, out: Any) -> Any:
    """`instruction` with %x, %y, %z of the inputs and result %o, for each element."""
    inputs = tuple(np.ascontiguousarray(x) for x in np.broadcast_arrays(*inputs))
    count = inputs[0].size
    arrays = {f"in{k}": x.reshape(-1) for k, x in enumerate(inputs)}
    arrays["out"] = np.zeros(count, out)
    body = """
  mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mad.lo.u32 %r2, %r0, 256, %r1;
  setp.ge.u32 %p0, %r2, count; @%p0 bra DONE;
""".replace("count", str(count))
    for k, x in enumerate(inputs):
        size, name = x.dtype.itemsize, "xyz"[k]
        body += f"""
  .reg .{_REGISTER[size]} %{name}; mul.wide.u32 %d0, %r2, {size}; add.u64 %d0, %d0, in{k};
  ld.global.{_LOADS[size]} %{name}, [%d0];
"""
    size = arrays["out"].dtype.itemsize
    body += f"""
  .reg .{_REGISTER[size]} %o; .reg .pred %q;
  {instruction}
  mul.wide.u32 %d0, %r2, {size}; add.u64 %d0, %d0, out; st.global.{_LOADS[size]} [%d0], %o;
DONE:
"""
    blocks = -(-count // 256)
    execute(body, arrays, block=(256, 1, 1), grid=(blocks, 1, 1))
    return arrays["out"].reshape(inputs[0].shape)
