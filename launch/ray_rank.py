"""What one rank does on a Ray cluster: say where it is, meet the others, run a function.

    seat     node, process, GPU and build            before ranks are numbered
    settle   the node's GPUs become visible, -> NVLink domain, or the node where there is none
    host     rank 0 binds a port of its node's address and opens the group's store on it
    join     the default process group, over that store; nothing is asked of the user's environment
    run      fn(*args) inside the group -> Outcome, never an exception
    where    meanwhile, from another thread: the last span entered, and what was printed since

Sockets. The store listens on the node's own address, hence on loopback in a cluster on one
machine; it is bound before it is announced, so nobody can take the port in between. gloo is told
the interface of that address, because it would take that of the host's name, which often is
loopback.

GPUs. Ray shows an actor its own GPU only. Transports that read peers' memory tell GPUs apart by
their index, so the ranks of a node see all GPUs of the gang on it, each using its own.

This module imports no Ray: :mod:`ringfa4.launch.ray_gang` makes actors of :class:`Rank`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import platform
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringfa4.comm.reach import seat_of
from ringfa4.context import close_contexts
from ringfa4.errors import PeerError
from ringfa4.launch.ray_outcomes import ALIKE, Outcome, Spot
from ringfa4.trace import NAMED, Observer

PORTS = 16
"""How many ports rank 0 tries, from the one it is told on."""

STORE_S = 5.0
"""How long the group's store may take to answer, once the group is there. It is asked about
failures while a rank waits for others, also when the way to the store is what broke."""

LINGER_S = 30.0
"""How long a rank that failed waits to be killed."""

PACKAGES = ("ringfa4", "ringfa4.comm", "ringfa4.kernels", "ringfa4.launch")


class Whereabouts:
    """The span that this process entered last, for whoever asks from another thread."""

    def __init__(self) -> None:
        self.spot: Spot | None = None

    def watch(self, call: str) -> Observer:
        """An observer of the call named ``call``."""
        return _Watch(self, call)


@dataclass(frozen=True, slots=True)
class _Watch:
    whereabouts: Whereabouts
    call: str

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        self.whereabouts.spot = self.call, kind, step
        return NAMED.span(kind, step)


WHEREABOUTS = Whereabouts()
"""Of this process, which is one rank: functions run by a gang may hand ``WHEREABOUTS.watch(name)``
to the library as observer."""


class Printed(io.StringIO):
    """Text for the driver, who says whether people see it on a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def since(self, position: int) -> str:
        return self.getvalue()[position:]


class Rank:
    """One rank. Methods are called in the order of the module's table."""

    def __init__(self, node: str, address: str, gpu: str | None) -> None:
        self._node, self._address, self._gpu = node, address, gpu
        self._store: Any = None
        self._device = "cpu"
        self.rank = -1
        self.printed = Printed(terminal=False)

    def seat(self) -> dict[str, Any]:
        """Where this rank is and what it runs; a dict, so that other versions can be told."""
        return {
            "node": self._node,
            "address": self._address,
            "pid": os.getpid(),
            "gpu": self._gpu,
            "build": build(),
        }

    def settle(self, gpus: list[str]) -> str:
        """The name of this rank's domain, after the node's ``gpus`` have become visible to it."""
        if self._gpu is None:
            return self._node
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._device = f"cuda:{gpus.index(self._gpu)}"
        torch.cuda.set_device(self._device)
        return seat_of(torch.device(self._device)).fabric or self._node

    def host(self, first_port: int) -> int:
        """Opens the group's store; its port. ValueError as :func:`bind`."""
        bound = bind(self._address, first_port)
        port: int = bound.getsockname()[1]
        self._store = _tcp_store(self._address, port, is_master=True, fd=bound.detach())
        return port

    def join(
        self, rank: int, world: int, local: int, master: str, port: int, timeout_s: float
    ) -> None:
        """Enters the default group: NCCL for a rank with a GPU, else gloo. Collective."""
        self.rank = rank
        names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}
        os.environ.update({name: str(value) for name, value in names.items()})
        interface = interface_of(self._address)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = timedelta(seconds=timeout_s)
        store = self._store or _tcp_store(master, port, is_master=False)
        self._store = store
        dist.init_process_group(
            "nccl" if self._gpu is not None else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
        store.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], terminal: bool
    ) -> Outcome:
        """``fn(*args, **kwargs)``; with ``terminal``, prints as for one (:attr:`printed`)."""
        global current
        current = self
        self.printed = Printed(terminal)
        WHEREABOUTS.spot = None
        if self._gpu is not None:
            torch.cuda.set_device(self._device)
        try:
            value = fn(*args, **kwargs)
        except Exception as error:  # the driver says what it means for the gang
            peer = error if isinstance(error, PeerError) else None
            if type(error).__name__ not in ALIKE:
                self._end_by_itself()
            return Outcome(
                self.rank,
                error=type(error).__name__,
                message=str(error),
                details=traceback.format_exc(),
                blames=peer.rank if peer else None,
                step=peer.step if peer else None,
                spot=WHEREABOUTS.spot,
                awaited=peer.awaited if peer else None,
            )
        return Outcome(self.rank, value)

    @staticmethod
    def _end_by_itself() -> None:
        """A rank that failed is of no use any more; its driver kills it, unless cut off from it."""
        last = threading.Timer(LINGER_S, os._exit, (1,))
        last.daemon = True
        last.start()

    def where(self, seen: int) -> tuple[Spot | None, str]:
        """(last span, what was printed after the first ``seen`` characters)."""
        return WHEREABOUTS.spot, self.printed.since(seen)

    def leave(self) -> None:
        """Leaves the group, after everybody's functions returned. Collective."""
        close_contexts()
        dist.destroy_process_group()


current: Rank | None = None
"""The rank that this process is, while it runs a function."""


def printed() -> Printed:
    """Where a function run by a gang prints what the driver should show."""
    assert current is not None, "called outside a gang's run"
    return current.printed


def build() -> str:
    """What this process would run: versions, and a digest of ringfa4's sources."""
    sources: dict[str, bytes] = {}
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations, package
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in root.rglob("*.py"):
            sources[f"{package.replace('.', '/')}/{file.relative_to(root)}"] = file.read_bytes()
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + hashlib.sha256(sources[name]).digest())
    ours = "not installed"
    with suppress(PackageNotFoundError):
        ours = version("ringfa4")
    return (
        f"ringfa4 {ours} (sources {digest.hexdigest()[:12]}), torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def _tcp_store(address: str, port: int, *, is_master: bool, fd: int | None = None) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=is_master, wait_for_workers=False, master_listen_fd=fd
    )


def bind(address: str, first_port: int) -> socket.socket:
    """A listening socket on the first free port of ``address`` from ``first_port`` on; 0: any.

    ValueError when :data:`PORTS` of them are taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    last = first_port if first_port == 0 else min(first_port + PORTS - 1, 65535)
    for port in range(first_port, last + 1):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((address, port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listening
    raise ValueError(f"ports {first_port} to {last} of {address} are all taken; give another port")


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 ``address``; None when it cannot be told."""
    if address.startswith("127."):
        return "lo" if platform.system() == "Linux" else None
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    ask = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with ask:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(ask.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


_SIOCGIFADDR = 0x8915
