"""Whether every rank can address every other rank's GPU memory, asked before a library starts.

    one GPU            only under MPS, and not for every library
    one host           peer access between the two GPUs
    every process      a hardware queue that waits for peers cannot take (comm/streams.py)
    different hosts    one NVLink domain: equal fabric cluster and clique (multi-node NVLink)

Each rank says who it is and what is wrong as it sees it; all ranks raise the same ValueError, or
none. The fabric is what NVML reports, when the module pynvml is there; without it different hosts
are refused. Multi-node NVLink was never at hand: that branch is written from NVML's documentation.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ringfa4.comm.interface import Control
from ringfa4.comm.streams import WAITING_LANES, queue_left
from ringfa4.errors import MissingLibraryError

_FABRIC_COMPLETED = 3
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits. ``fabric`` names its NVLink domain, None when there is none known;
    ``connections`` is what CUDA_DEVICE_MAX_CONNECTIONS says where waits for peers can take all
    hardware queues of the process, None where they cannot.
    """

    host: str
    boot: str
    gpu: str
    fabric: str | None
    mps: bool
    connections: str | None = None


def seat_of(device: torch.device) -> Seat:
    """Where this process sits, computing on ``device``."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    given = None if queue_left(device) else os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    return Seat(platform.node(), boot, gpu, _fabric(gpu), mps_is_on(), given)


def mps_is_on() -> bool:
    """Whether CUDA programs started here become clients of an MPS daemon."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()


def _fabric(gpu: str) -> str | None:
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        info = nvml.c_nvmlGpuFabricInfo_t()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode())
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except (nvml.NVMLError, AttributeError):  # an old driver or an old module: no such thing
        return None
    # The field is read as memory: ctypes would end it at the first zero byte.
    field = type(info).clusterUuid
    cluster = ctypes.string_at(ctypes.addressof(info) + field.offset, field.size)
    if info.state != _FABRIC_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}/{info.cliqueId}"


def objection(seats: list[Seat], rank: int, *, several_on_one_gpu: bool) -> str | None:
    """Why rank ``rank`` cannot address some other rank's memory and wait for it, None when it
    can.
    """
    mine = seats[rank]
    if mine.connections is not None and len(seats) > 1:
        return (
            f"rank {rank} could not end its waits for a lost peer: {WAITING_LANES} streams that "
            f"wait leave it no hardware queue of the GPU; set CUDA_DEVICE_MAX_CONNECTIONS to 8 or "
            f"more before CUDA starts (it is {mine.connections}; MPS gives 2 where it is unset)"
        )
    visible = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    for peer, theirs in enumerate(seats):
        if peer == rank:
            continue
        who = (
            f"rank {rank} ({mine.host}, GPU {mine.gpu[:8]}) and "
            f"rank {peer} ({theirs.host}, GPU {theirs.gpu[:8]})"
        )
        if mine.boot != theirs.boot:
            if mine.fabric is None or mine.fabric != theirs.fabric:
                return (
                    f"{who} are on different hosts and not in one NVLink domain "
                    f"(fabric {mine.fabric} and {theirs.fabric})"
                )
        elif mine.gpu == theirs.gpu:
            if not several_on_one_gpu:
                return f"{who} share a GPU; here every rank needs one of its own"
            if not mine.mps:
                return f"{who} share a GPU, which takes MPS (nvidia-cuda-mps-control -d)"
        elif theirs.gpu in visible and not torch.cuda.can_device_access_peer(
            visible[mine.gpu], visible[theirs.gpu]
        ):
            return f"{who} have no peer access to each other"
    return None


def require_reachable(
    control: Control,
    device: torch.device,
    name: str,
    *,
    missing: str | None = None,
    obstacle: str | None = None,
    several_on_one_gpu: bool = False,
) -> None:
    """Raises, alike on every rank, when transport ``name`` cannot work between these ranks.

    ``missing``: what this rank lacks (MissingLibraryError); ``obstacle``: what else is in its way
    (ValueError, as when memory is out of reach). Collective.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        obstacle = f"it moves CUDA tensors, and this rank computes on {device}"
    seat = seat_of(device) if missing is None and obstacle is None else None
    said = _everybody(
        control,
        {"missing": missing, "obstacle": obstacle, "seat": None if seat is None else asdict(seat)},
    )
    for rank, words in enumerate(said):
        if words["missing"] is not None:
            raise MissingLibraryError(f"transport {name!r}, rank {rank}: {words['missing']}")
        if words["obstacle"] is not None:
            raise ValueError(f"transport {name!r}, rank {rank}: {words['obstacle']}")
    seats = [Seat(**words["seat"]) for words in said]
    reason = objection(seats, control.rank, several_on_one_gpu=several_on_one_gpu)
    for other in _everybody(control, reason):
        if other is not None:
            raise ValueError(f"transport {name!r} reads peers' memory, but {other}")


def _everybody(control: Control, words: Any) -> list[Any]:
    return [json.loads(message) for message in control.gather(json.dumps(words).encode())]
