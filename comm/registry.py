"""Transports by name: a fixed table, so that a name on a command line cannot import arbitrary code.

A factory takes (group, device, control) and returns this rank's transport; ``group`` None means
that this process is alone. Making one is collective. ``local`` is missing from the table on
purpose: its ranks are the threads of one process, which no process group describes; see
:func:`ringfa4.comm.local.run_ranks`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch
import torch.distributed as dist

from ringfa4.comm.control import open_control
from ringfa4.comm.interface import Control, Transport
from ringfa4.errors import MissingLibraryError

TRANSPORTS = {
    "torch_p2p": "ringfa4.comm.torch_p2p:TorchP2PTransport",
    "symm_mem": "ringfa4.comm.symm_mem:symm_mem_transport",
    "nvshmem": "ringfa4.comm.nvshmem:nvshmem_transport",
}
"""name -> "module:factory"."""

PULLING = ("symm_mem", "nvshmem")
"""What ``auto`` tries on GPUs, in order. Both pull at one rate; symmetric memory comes with torch
and works in any group, NVSHMEM spans one group a process and lets processes share a GPU."""


class TransportFactory(Protocol):
    """Makes the transport of this rank. ValueError when group and device do not fit it."""

    def __call__(
        self, group: dist.ProcessGroup | None, device: torch.device, control: Control
    ) -> Transport: ...


def transport_factory(name: str) -> TransportFactory:
    """The factory called ``name``. ValueError for unknown names."""
    if name == "auto":
        return choose
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; there are {sorted(TRANSPORTS)} and 'auto'")
    module, attribute = TRANSPORTS[name].split(":")
    return cast(TransportFactory, getattr(import_module(module), attribute))


def choose(group: dist.ProcessGroup | None, device: torch.device, control: Control) -> Transport:
    """What ``auto`` means: pull where every rank can read every other one's memory, else torch_p2p.

    Refusals are agreed between the ranks, so all take the same; ``why`` of the transport holds
    them.
    """
    why = []
    if device.type != "cuda":
        why.append("auto: tensors are on the CPU")
    elif control.world == 1:
        why.append("auto: one rank, nothing moves")
    else:
        for name in PULLING:
            try:
                taken = transport_factory(name)(group, device, control)
            except (MissingLibraryError, ValueError) as refusal:
                why.append(f"auto: not {name}: {refusal}")
            else:
                taken.why = (*why, f"auto: {name} pulls, no multiprocessor moves bytes")
                return taken
    taken = transport_factory("torch_p2p")(group, device, control)
    taken.why = tuple(why)
    return taken


def open_transport(
    name: str, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
) -> tuple[Transport, Control]:
    """Transport ``name`` and the control channel of ``group`` (None: this process alone).

    Collective. Raises ValueError for an unknown name, before anything is opened; PeerError when a
    rank does not arrive within ``timeout_s``.
    """
    factory = transport_factory(name)
    control = open_control(group, timeout_s)
    try:
        return factory(group, device, control), control
    except BaseException:
        control.close()
        raise
