"""Lower a parsed kernel with all opcode families."""

from __future__ import annotations

# The families register themselves in `lowering.FAMILIES`.
from . import opcodes_async, opcodes_memory, opcodes_registers  # noqa: F401
from .lowering import Lowering, Program, UnsupportedOpcode
from .parser import Module

__all__ = ["Program", "UnsupportedOpcode", "lower"]


def lower(module: Module, name: str | None = None) -> Program:
    """Lower one kernel of a module, by default its only one."""
    if name is None:
        if len(module.kernels) != 1:
            raise ValueError(f"name one of the kernels {sorted(module.kernels)}")
        (kernel,) = module.kernels.values()
    else:
        kernel = module.kernels[name]
    return Lowering(kernel, module.lines).program()
