"""The control channel of a process group: small messages before every call, and failures.

    gather     every rank sends its message to every other one: one hop, and who is missing is known
    report     the n-th failure goes to the group's store as failure/<n> = "<rank>:<reason>"
    failure    looks for failure/1, the first in time; a rank does not count its own

The store is asked whether a key exists and never waited for, because its client is shared and
blocks everybody while one thread waits; a thread asks, because a store may never answer
(:mod:`ringfa4.comm.asker`). When the store is gone or silent nothing can be learnt from it:
connections break then or waits time out, and that is noticed.

:class:`SoloControl` is the channel of a process that is alone; it needs no torch.distributed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringfa4.comm.asker import Asker
from ringfa4.comm.gloo import MAX_TAG, GlooLink, Posted
from ringfa4.comm.interface import MESSAGE_BYTES, Control, require_message
from ringfa4.errors import ContextBrokenError, PeerError

_LENGTH_BYTES = 4
_FRAME_BYTES = _LENGTH_BYTES + MESSAGE_BYTES
_REASON_CHARACTERS = 2000

PATIENCE_S = 2.0
"""How long the store may take to say whether somebody failed. It answers within a millisecond."""


def open_control(group: dist.ProcessGroup | None, timeout_s: float) -> Control:
    """The control channel of ``group``; None is this process alone. Collective.

    Raises ValueError when this process is not in the group, PeerError when a rank does not arrive.
    """
    if group is None:
        return SoloControl(timeout_s)
    if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
        raise ValueError(f"this process is not in the group {group!r}")
    return SoloControl(timeout_s) if group.size() == 1 else StoreControl(group, timeout_s)


class SoloControl(Control):
    """World 1: there is nobody to hear from."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = 0, 1, timeout_s

    def gather(self, message: bytes) -> list[bytes]:
        require_message(message)
        return [message]

    def report(self, reason: str) -> None:
        """Nobody listens."""

    def failure(self) -> tuple[int, str] | None:
        return None

    def close(self) -> None:
        """Nothing to release."""


class StoreControl(Control):
    """Control channel over a group's store and gloo connections of its own."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._link = GlooLink(group, "control", timeout_s)
        self.rank, self.world, self.timeout_s = self._link.rank, self._link.world, timeout_s
        self._store, self._asker = self._link.store, Asker(min(PATIENCE_S, timeout_s))
        self._messages = 0
        self._broken: str | None = None

    def gather(self, message: bytes) -> list[bytes]:
        require_message(message)
        if self._broken is not None:
            raise ContextBrokenError(f"the control channel cannot be used: {self._broken}")
        self._messages += 1
        tag = self._messages % MAX_TAG
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        content = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        frame[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        frames = {peer: torch.empty_like(frame) for peer in self._others()}
        posted = Posted()
        for peer, buffer in frames.items():
            self._link.receive(posted, buffer, peer, tag)
        for peer in frames:
            self._link.send(posted, frame, peer, tag)
        try:
            self._link.settle(posted, self, f"answer to message {self._messages}")
        except PeerError as error:
            self._broken = str(error)
            raise
        frames[self.rank] = frame
        return [_content(frames[peer]) for peer in range(self.world)]

    def _others(self) -> list[int]:
        """Peers, the next one first: nobody is the first to be written to by everybody."""
        return [(self.rank + hop) % self.world for hop in range(1, self.world)]

    def report(self, reason: str) -> None:
        """After this the channel is closed: connections break, so that no peer waits in vain."""
        if self._broken is None:
            self._broken = reason
        self._asker.ask(lambda: self._tell(reason))
        self._link.abort()

    def _tell(self, reason: str) -> None:
        number = self._store.add("failures", 1)
        self._store.set(f"failure/{number}", f"{self.rank}:{reason[:_REASON_CHARACTERS]}")

    def failure(self) -> tuple[int, str] | None:
        return self._asker.ask(self._look)

    def _look(self) -> tuple[int, str] | None:
        number = 1
        while self._store.check([f"failure/{number}"]):
            rank, _, reason = self._store.get(f"failure/{number}").decode().partition(":")
            if int(rank) != self.rank:
                return int(rank), reason
            number += 1
        return None

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._link.close()
        self._asker.close()


def _content(frame: torch.Tensor) -> bytes:
    raw = bytes(frame.numpy())
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]
