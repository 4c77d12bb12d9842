"""Pull transport over NVSHMEM's symmetric heap (nvshmem4py).

    allocate   nv.buffer (collective over all PEs) -> nv.get_peer_buffer(pe) for every peer

Only the mapping is NVSHMEM's: copies and flags are :mod:`ringfa4.comm.pull`'s, which issue what
NVSHMEM's own host calls issue between peers of one NVLink domain (a copy, a 64-bit stream write).
Several processes may share a GPU under MPS, which torch's symmetric memory refuses.

NVSHMEM is started once a process, over the ranks of the first group that asks: allocation is
collective over all of them, so a process can have transports over that group only. It stays up
until the process ends, since ending it is collective, and would hang behind a rank that died.

Left out: peers on other networks (NVSHMEM's get and put would reach them); torch_p2p is for those.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ringfa4.comm.interface import Control
from ringfa4.comm.lanes import Memory
from ringfa4.comm.pull import PullTransport
from ringfa4.comm.reach import require_reachable
from ringfa4.comm.signals import memory_transport
from ringfa4.comm.streams import CudaEngine, keep_multicast_off

_started: tuple[list[int], torch.device] | None = None
"""The global ranks and the device NVSHMEM was started with in this process."""


class NvshmemMemory(Memory):
    """The symmetric heap; PE numbers are group ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._buffers: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> list[Tensor]:
        nv = import_module("nvshmem.core")

        buffer = nv.buffer(nbytes)
        own = nv.my_pe()
        everyones = [
            buffer if pe == own else nv.get_peer_buffer(buffer, pe) for pe in range(self._world)
        ]
        with torch.inference_mode(False):
            pieces = [from_dlpack(one).view(torch.uint8) for one in everyones]
        self._buffers[pieces[own].data_ptr()] = buffer
        return pieces

    def free(self, pieces: list[Tensor]) -> None:
        nv = import_module("nvshmem.core")

        buffer = self._buffers.pop(pieces[nv.my_pe()].data_ptr())
        pieces.clear()
        nv.free(buffer)


def nvshmem_transport(
    group: dist.ProcessGroup | None, device: torch.device, control: Control
) -> PullTransport:
    """Transport of this rank. Collective.

    MissingLibraryError without nvshmem4py; ValueError when the ranks cannot reach one another's
    memory, or NVSHMEM already runs over other ranks.
    """
    keep_multicast_off()
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    require_reachable(
        control,
        device,
        "nvshmem",
        missing=_missing(),
        obstacle=_obstacle(ranks, device),
        several_on_one_gpu=True,
    )
    engine = CudaEngine(device)
    _start(ranks, engine.device, control)
    return memory_transport("nvshmem", control, engine, NvshmemMemory(control.world))


def _missing() -> str | None:
    try:
        import_module("nvshmem.core")
    except ImportError as error:
        return f"nvshmem4py cannot be imported ({error}); pip install 'ringfa4[nvshmem]'"
    return None


def _obstacle(ranks: list[int], device: torch.device) -> str | None:
    if _started is None or device.type != "cuda":
        return None
    if _started == (ranks, CudaEngine(device).device):
        return None
    return (
        f"NVSHMEM runs once a process and already spans ranks {_started[0]} on {_started[1]}; "
        f"for ranks {ranks} on {device} use symm_mem or torch_p2p"
    )


def _start(ranks: list[int], device: torch.device, control: Control) -> None:
    """Start NVSHMEM over the group, unless it runs. Its id travels over the control channel.

    The caller made sure that there is a driver: without one NVSHMEM ends the process.
    """
    global _started
    if _started is not None:
        return
    nv = import_module("nvshmem.core")
    torch.cuda.set_device(device)
    gpu = import_module("cuda.core").Device(device.index)
    gpu.set_current()
    uid = nv.get_unique_id(empty=control.rank != 0)
    data = uid._data.view("u1")
    first = control.gather(bytes(data) if control.rank == 0 else b"")[0]
    data[...] = numpy.frombuffer(first, dtype=numpy.uint8).reshape(data.shape)
    nv.init(device=gpu, uid=uid, rank=control.rank, nranks=control.world, initializer_method="uid")
    _started = (ranks, device)
