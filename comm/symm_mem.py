"""Pull transport over torch's symmetric memory: every rank maps every other rank's arena.

    allocate   symm_mem.empty -> rendezvous(group) -> get_buffer(peer) for every peer

Only the mapping is torch's: flags and copies are :mod:`ringfa4.comm.pull`'s, since torch's own
signals are kernels that wait for a multiprocessor, and do nothing on its NVSHMEM backend (2.13).
Works in any group whose ranks have a GPU each and reach one another (NVLink or PCIe peer access,
or one NVLink domain).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4.comm.interface import Control
from ringfa4.comm.lanes import Memory
from ringfa4.comm.pull import PullTransport
from ringfa4.comm.reach import require_reachable
from ringfa4.comm.signals import memory_transport
from ringfa4.comm.streams import CudaEngine, keep_multicast_off


class SymmetricMemory(Memory):
    """torch's, over ``group``; None: this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._handles: list[tuple[Tensor, object]] = []

    def allocate(self, nbytes: int) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symm

        with torch.inference_mode(False), torch.cuda.device(self._device):
            own = symm.empty(nbytes, dtype=torch.uint8, device=self._device)
            if self._group is None:
                return [own]
            handle = symm.rendezvous(own, self._group.group_name)
            pieces = [
                own if r == self._group.rank() else handle.get_buffer(r, (nbytes,), torch.uint8)
                for r in range(self._group.size())
            ]
        self._handles.append((own, handle))
        return pieces

    def free(self, pieces: list[Tensor]) -> None:
        """Memory goes when the last rank has dropped its mapping."""
        self._handles = [
            kept for kept in self._handles if all(kept[0] is not piece for piece in pieces)
        ]
        pieces.clear()


def symm_mem_transport(
    group: dist.ProcessGroup | None, device: torch.device, control: Control
) -> PullTransport:
    """Transport of this rank. ValueError when ranks cannot reach one another's memory. Collective.

    ``group`` may be None for a process that is alone.
    """
    keep_multicast_off()
    require_reachable(control, device, "symm_mem")
    engine = CudaEngine(device)
    memory = SymmetricMemory(group if control.world > 1 else None, engine.device)
    return memory_transport("symm_mem", control, engine, memory)
