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

TRANSPORTS = {
    "torch_p2p": "ringfa4.comm.torch_p2p:TorchP2PTransport",
}
"""name -> "module:factory"."""

AUTO = "torch_p2p"
"""What ``auto`` means: it works on every group."""


class TransportFactory(Protocol):
    """Makes the transport of this rank. ValueError when group and device do not fit it."""

    def __call__(
        self, group: dist.ProcessGroup | None, device: torch.device, control: Control
    ) -> Transport: ...


def transport_factory(name: str) -> TransportFactory:
    """The factory called ``name``. ValueError for unknown names."""
    name = AUTO if name == "auto" else name
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; there are {sorted(TRANSPORTS)} and 'auto'")
    module, attribute = TRANSPORTS[name].split(":")
    return cast(TransportFactory, getattr(import_module(module), attribute))


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
