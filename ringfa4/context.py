"""One process group on one device: its transport, its control channel, and the agreement before
every call.

    every call:  header = {call number, what is computed, error or null, values}
                 all ranks gather all headers  ->  all raise the same ValueError, or all go on

A header is at most 4 KiB of JSON. Because every rank sees all headers before anything moves, bad
input on one rank ends the call on all of them with one message, and the context stays usable. After
any other failure (a lost peer, a kernel error) ranks no longer know which call the others are in:
the context is broken and says why.

Contexts are shared: one arena and one call counter for all layers of a model. Every rank must make
every call in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ringfa4.comm.interface import MESSAGE_BYTES, Control, Transport
from ringfa4.comm.registry import open_transport
from ringfa4.errors import ContextBrokenError, PlanMismatchError

DEFAULT_TIMEOUT_S = 300.0
"""How long a rank waits for another one before it gives up."""


@dataclass(frozen=True, slots=True)
class Header:
    """What one rank says before a call: ``about`` must be equal on all ranks, ``values`` may
    differ.
    """

    call: int
    about: Mapping[str, str | int | float | bool | None]
    values: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None

    def encode(self) -> bytes:
        body = {
            "call": self.call,
            "about": dict(self.about),
            "values": dict(self.values),
            "error": None if self.error is None else self.error[: MESSAGE_BYTES // 4],
        }
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, message: bytes) -> Header:
        body = json.loads(message)
        return cls(body["call"], body["about"], body["values"], body["error"])


def settle(headers: list[Header]) -> None:
    """Raises, alike on every rank, what the headers add up to; nothing when all agree.

    ValueError when a rank had bad input (the lowest such rank is quoted); PlanMismatchError when
    ranks compute different things.
    """
    for rank, header in enumerate(headers):
        if header.error is not None:
            raise ValueError(header.error if len(headers) == 1 else f"rank {rank}: {header.error}")
    first = headers[0]
    for rank, header in enumerate(headers):
        if header.call != first.call:
            raise PlanMismatchError(
                f"ranks are in different calls: rank 0 in call {first.call}, "
                f"rank {rank} in call {header.call}"
            )
        if header.about == first.about:
            continue
        names = [*first.about, *(name for name in header.about if name not in first.about)]
        for name in names:
            mine, theirs = first.about.get(name), header.about.get(name)
            if mine != theirs:
                raise PlanMismatchError(
                    f"ranks disagree about {name}: rank 0 has {mine!r}, rank {rank} has {theirs!r}"
                )


@lru_cache(maxsize=16)
def _agreed(messages: tuple[bytes, ...]) -> tuple[Mapping[str, int], ...]:
    """Every rank's ``values``, from what all ranks said; raises as :func:`settle`.

    Virtual ranks are given the same messages: the first reads them for all. Ranks that have the
    same to say say it in the same bytes, which are read once.
    """
    read = {message: Header.decode(message) for message in set(messages)}
    headers = [read[message] for message in messages]
    settle(headers)
    return tuple(header.values for header in headers)


class Context:
    """Transport and control channel of one group on one device; create it with
    :func:`context_for`.
    """

    def __init__(self, transport: Transport, control: Control) -> None:
        if (transport.rank, transport.world) != (control.rank, control.world):
            raise ValueError(
                f"transport is rank {transport.rank} of {transport.world}, "
                f"control channel is rank {control.rank} of {control.world}"
            )
        self.transport, self.control = transport, control
        self.calls = 0
        self.broken: str | None = None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    @property
    def device(self) -> torch.device:
        return self.transport.device

    def agree(
        self,
        about: Mapping[str, str | int | float | bool | None],
        *,
        values: Mapping[str, int] | None = None,
        error: ValueError | None = None,
        opens: bool = False,
    ) -> list[Mapping[str, int]]:
        """Collective: exchange headers; returns every rank's ``values``.

        ``error``: what is wrong with this rank's input; every rank then raises it as a ValueError.
        ``opens``: this rank opens a call of the transport at once when all agree.
        Raises PlanMismatchError when ``about`` differs, PeerError when a rank is gone or late.
        """
        self.require_usable()
        self.calls += 1
        header = Header(self.calls, about, values or {}, None if error is None else str(error))
        gather = self.control.gather_to_open if opens else self.control.gather
        with self.guard():
            messages = gather(header.encode())
        try:
            return list(_agreed(tuple(messages)))
        except BaseException:
            self.control.decline()
            raise

    def require_usable(self) -> None:
        """Raises ContextBrokenError after a failure or after close."""
        if self.broken is not None:
            raise ContextBrokenError(
                f"this context failed and cannot be used again ({self.broken}); restart the group"
            )

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What goes wrong inside breaks the context and is reported to the peers."""
        try:
            yield
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def fail(self, reason: str) -> None:
        """Refuse further calls and tell the peers, once."""
        if self.broken is None:
            self.broken = reason
            self.control.report(reason)
            self.transport.abort(reason)

    def close(self) -> None:
        """Release buffers and the side channel. Collective after a clean run.

        Raises PeerError, on every rank, when the last call did not end well on one.
        """
        try:
            if self.broken is None:
                with self.guard():
                    self.transport.close()
                self.broken = "it was closed"
        finally:
            self.control.close()


_contexts: dict[tuple[Any, str, str], Context] = {}


def context_for(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    transport: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Context:
    """The context of ``group`` (None: the default group, or this process alone) on ``device``; made
    on first use.

    Collective on first use. ``device`` defaults to the current CUDA device for NCCL groups, else
    the CPU. ``timeout_s`` counts from the first use. Raises ValueError for unknown transports or a
    group this process is not in.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not timeout_s > 0:
        raise ValueError(f"{timeout_s=} must be positive")
    where = default_device(group) if device is None else torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(where)!r}, but torch.cuda.is_available() is false")
    key = (None if group is None else group, str(where), transport)
    known = _contexts.get(key)
    if known is None or known.broken is not None:
        known = Context(*open_transport(transport, group, where, timeout_s))
        _contexts[key] = known
    return known


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """The current CUDA device when the group's backend is NCCL, or alone with a GPU; else the
    CPU.
    """
    backend = None if group is None else dist.get_backend(group)
    if torch.cuda.is_available() and (backend is None or "nccl" in backend):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def close_contexts() -> None:
    """Close every context made by :func:`context_for`; call it before ``destroy_process_group``.
    Collective.
    """
    for context in _contexts.values():
        context.close()
    _contexts.clear()
