"""A launch of the SM100 kernel by the PTX executor, from its arguments alone: on CPU memory.

Stands where the GPU stands (ringfa4.kernels.sm100.launch.Launcher). The kernel may touch what the
arguments name and nothing else: regions are made from addresses, strides and counts, and only the
state's are writable. Launch after launch takes the next of the executor's adversarial schedules,
so equal calls are compared across schedules wherever a test calls twice. What only happens to work,
which the executor otherwise remarks on, is an error.
Needs nvidia-cutlass-dsl and apache-tvm-ffi.
"""

from __future__ import annotations

import ctypes
from itertools import cycle

import numpy as np
import torch
from ptx.machine import ADVERSARIAL, Memory, Schedule

from ringfa4.kernels.sm100.launch import Arguments
from ringfa4.kernels.sm100.specs import ForwardSpec
from sm100.executed import captured

SCHEDULES = cycle(ADVERSARIAL)


class ExecutedLauncher:
    """``schedule`` None: the next one."""

    def __init__(
        self, arch: str = "sm_100a", multiprocessors: int = 4, schedule: Schedule | None = None
    ) -> None:
        self._arch, self._multiprocessors, self.schedule = arch, multiprocessors, schedule

    def missing(self) -> str | None:
        return None

    def multiprocessors(self, device: torch.device) -> int:
        return self._multiprocessors

    def arch(self, device: torch.device) -> str:
        return self._arch

    def __call__(self, spec: ForwardSpec, device: torch.device, arguments: Arguments) -> None:
        schedule = next(SCHEDULES) if self.schedule is None else self.schedule
        kernel, stream = captured(spec, self._arch), 0
        kernel(*arguments, stream, memory=memory_of(arguments), schedule=schedule, strict=True)


def memory_of(a: Arguments) -> Memory:
    """What a launch may read and write."""
    memory = Memory()

    def add(name: str, address: int, size: int, writable: bool = False) -> np.ndarray:
        array = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        memory.add(array, name, writable=writable)
        return array

    add("queries", a.q_records, a.n_q_records * a.q_record_bytes)
    add("keys", a.kv_records, a.n_kv_records * a.kv_record_bytes)
    items = add("items", a.items, a.n_items * 32).view(np.int32).reshape(-1, 8)
    add("segments", a.segments, int(items[:, 7].max()) * 32)
    add("modes", a.modes, a.batch * a.modes_row)
    add("acc", a.acc, a.batch * a.acc_b, writable=True)
    add("max", a.max, a.batch * a.row_b, writable=True)
    add("sum", a.sum, a.batch * a.row_b, writable=True)
    return memory
