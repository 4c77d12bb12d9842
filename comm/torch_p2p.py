"""Two-sided transport over torch.distributed: gloo on the CPU, NCCL on GPUs.

    fetch(t)       starts in one batch   sends of send(t) from the outbox, or from what was carried,
                                         receives of receive(t)
                   and in another one    sends of lend(t) from the outbox, receives of carry(t)
    send_grads(t)  starts in one batch   send of grad_out(t) from its slot, receive of grad_in(t)
                                         into inbox[index % 2]

Both ends of a transfer start it in the same step, so the order of starts is the same everywhere and
neither backend can deadlock; a rank without work in a step starts nothing. Transfers run while the
caller computes. The receive of contribution i starts after contribution i - 2 was released, and a
send does not leave before it: that is the back-pressure.

A copy is sent on only when all of it is here, and its slot is received into again when it was sent
to all its readers: both ends of that are earlier steps. gloo moves a carry beside the transfers of
the lap; NCCL does one batch after the other, so there the next fetch waits for it.

One outbox is enough: ``finish`` waits until everything was sent, so the next call may overwrite it.
Transfers of several spans are one operation a span; records arrive packed. An operation's tag holds
the call number, so that nothing left over is taken for data of this call.

On the CPU messages use connections of our own (:mod:`ringfa4.comm.gloo`), and every wait is bounded
and polls for failures. On NCCL the caller's group is used and waits are ordered on the stream: the
host runs on, and a watchdog of ours says who is gone (:mod:`ringfa4.comm.nccl_watch`). Left out:
relaying NCCL errors to Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4.comm.arena import Slots
from ringfa4.comm.gloo import GlooLink, Posted
from ringfa4.comm.interface import (
    Carry,
    Contribution,
    Control,
    Exchange,
    Handle,
    Schedule,
    StepTransfers,
    Transfer,
    Transport,
    require_gather_arguments,
)
from ringfa4.comm.nccl_watch import WorkWatch
from ringfa4.comm.streams import CudaEngine
from ringfa4.errors import ContextBrokenError, PeerError

Operation = tuple[int, Tensor]
"""Peer and the bytes sent to it or received from it."""

_CALLS, _STEPS = 1 << 15, 1 << 15
"""Tags have 31 bits: call number, step, and whether it is K/V or dK/dV."""


def _tag(call: int, step: int, grads: bool) -> int:
    assert step < _STEPS, f"{step=}"
    return ((call % _CALLS) * _STEPS + step) * 2 + grads


class _Mover(ABC):
    """Starts and awaits operations on one backend."""

    @abstractmethod
    def post(
        self, sends: Sequence[Operation], receives: Sequence[Operation], tag: int
    ) -> tuple[Posted, Posted]:
        """Start all operations as one batch; what was sent, and what is received."""

    @abstractmethod
    def settle(self, posted: Posted, what: str, step: int | None) -> None:
        """After this, work on the current stream comes after ``posted``. PeerError as in
        Control."""

    @abstractmethod
    def abort(self) -> None:
        """Wake who waits here. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is under way any more."""


class _GlooMover(_Mover):
    def __init__(self, group: dist.ProcessGroup, control: Control) -> None:
        self._link, self._control = GlooLink(group, "data", control.timeout_s), control

    def post(
        self, sends: Sequence[Operation], receives: Sequence[Operation], tag: int
    ) -> tuple[Posted, Posted]:
        sent, received = Posted(), Posted()
        for peer, data in receives:
            self._link.receive(received, data, peer, tag)
        for peer, data in sends:
            self._link.send(sent, data, peer, tag)
        return sent, received

    def settle(self, posted: Posted, what: str, step: int | None) -> None:
        self._link.settle(posted, self._control, what, step)

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()


class _NcclMover(_Mover):
    def __init__(self, group: dist.ProcessGroup, device: torch.device, control: Control) -> None:
        self._group = group
        self._watch = WorkWatch(control, CudaEngine(device).enter_thread)
        # A communicator whose first operation is point-to-point must hear from all ranks in it.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(
        self, sends: Sequence[Operation], receives: Sequence[Operation], tag: int
    ) -> tuple[Posted, Posted]:
        operations = [
            dist.P2POp(start, data, group=self._group, group_peer=peer, tag=tag)
            for start, batch in ((dist.isend, sends), (dist.irecv, receives))
            for peer, data in batch
        ]
        sent, received = Posted(), Posted()
        self._watch.require_peers()
        if operations:
            # One work may stand for the whole batch: whoever waits for a part waits for all of it.
            works = dist.batch_isend_irecv(operations)
            for posted, batch in ((sent, sends), (received, receives)):
                posted.works = [(work, peer, data) for peer, data in batch for work in works]
        return sent, received

    def settle(self, posted: Posted, what: str, step: int | None) -> None:
        self._watch.require_peers()
        for work, peer, _ in posted.works:
            work.wait()
            self._watch.watch([work], peer, what, step)
        posted.drop()

    def abort(self) -> None:
        """The group is the caller's; its watchdog ends what is stuck."""

    def close(self) -> None:
        """The group is the caller's."""
        self._watch.close()


class _NoMover(_Mover):
    """World 1: nothing ever moves."""

    def post(
        self, sends: Sequence[Operation], receives: Sequence[Operation], tag: int
    ) -> tuple[Posted, Posted]:
        assert not sends and not receives, "alone, yet something moves"
        return Posted(), Posted()

    def settle(self, posted: Posted, what: str, step: int | None) -> None:
        assert not posted.works

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing to release."""


def _mover(group: dist.ProcessGroup | None, device: torch.device, control: Control) -> _Mover:
    if group is None or group.size() == 1:
        return _NoMover()
    if device.type == "cpu":
        return _GlooMover(group, control)
    if device.type == "cuda" and "nccl" in dist.get_backend(group):
        return _NcclMover(group, device, control)
    raise ValueError(
        f"torch_p2p moves CPU tensors, and CUDA tensors over NCCL; not {device} over "
        f"{dist.get_backend(group)!r}"
    )


class TorchP2PTransport(Transport):
    """Data path of this rank. See the module."""

    name = "torch_p2p"

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, control: Control
    ) -> None:
        self.rank, self.world, self.device = control.rank, control.world, device
        self.control = control
        self.outbox, self.fetched = Slots(1, device), Slots(2, device)
        self.outgoing, self.inbox = Slots(2, device), Slots(2, device)
        self.copies = Slots(2, device)
        self.mover = _mover(group, device, control)
        self.open_call: int | None = None
        self._calls = 0
        self._broken: str | None = None

    def ready(self, schedule: Schedule) -> bool:
        return (
            schedule.outbox_bytes <= self.outbox.capacity
            and schedule.fetch_bytes <= self.fetched.capacity
            and schedule.grad_bytes <= self.inbox.capacity
            and schedule.carry_bytes <= self.copies.capacity
        )

    def open(self, schedule: Schedule) -> Exchange:
        self.require_usable()
        schedule.require_valid(self.rank, self.world)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("torch_p2p cannot be captured in a CUDA graph: its slots alternate")
        assert self.open_call is None, "finish() of the last call comes first"
        self.outbox.grow(schedule.outbox_bytes)
        self.fetched.grow(schedule.fetch_bytes)
        self.outgoing.grow(schedule.grad_bytes)
        self.inbox.grow(schedule.grad_bytes)
        self.copies.grow(schedule.carry_bytes)
        self.open_call = self._next_call()
        return _P2PExchange(self, schedule, self.open_call)

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self.require_usable()
        require_gather_arguments(local, sizes, self.rank, self.world)
        parts = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]
        parts[self.rank].copy_(local)
        others = [(self.rank + hop) % self.world for hop in range(1, self.world)]
        sent, received = self.mover.post(
            [(peer, parts[self.rank]) for peer in others if sizes[self.rank]],
            [(peer, parts[peer]) for peer in others if sizes[peer]],
            _tag(self._next_call(), 0, False),
        )
        self.settle(received, "data of all_gather")
        self.settle(sent, "reader of all_gather")
        return parts

    def settle(self, posted: Posted, what: str, step: int | None = None) -> None:
        """Wait for ``posted``; an error breaks this transport."""
        try:
            self.mover.settle(posted, what, step)
        except PeerError as error:
            self._broken = str(error)
            raise

    def abort(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.mover.abort()

    def close(self) -> None:
        if self._broken is None:
            # Whoever leaves closes connections: not before the others have stopped using them.
            self.control.gather(b"close")
            self.mover.close()
            self._broken = "it was closed"

    def require_usable(self) -> None:
        if self._broken is not None:
            raise ContextBrokenError(f"the transport cannot be used: {self._broken}")


class _P2PExchange(Exchange):
    """One call."""

    def __init__(self, transport: TorchP2PTransport, schedule: Schedule, call: int) -> None:
        self.transport, self.schedule, self.call = transport, schedule, call
        self._published = False
        self._sent: list[tuple[int, Posted]] = []
        self._carried: dict[int, Posted] = {}
        """What arrives in the copy of each lap."""
        self._lent: dict[int, list[tuple[int, Posted]]] = {}
        """What was sent from the copy of each lap, with its step."""
        self._slots = [Posted(), Posted()]
        self._contributed = 0
        self._coming: dict[int, Posted] = {}
        self._released = 0

    def _step(self, step: int) -> StepTransfers:
        self.transport.require_usable()
        assert self.transport.open_call == self.call, "the call is over"
        assert 1 <= step < len(self.schedule.steps), f"no step {step}"
        return self.schedule.steps[step]

    def outbox(self) -> Tensor:
        self.transport.require_usable()
        return self.transport.outbox.take(0, self.schedule.own_bytes)

    def publish(self) -> None:
        self.transport.require_usable()
        self._published = True

    def fetch(self, step: int) -> Handle:
        transfers = self._step(step)
        assert self._published, "publish() comes before the first fetch"
        sends = self._sends(transfers.send, step)
        view, receives, receive = None, [], transfers.receive
        if receive is not None and receive.peer != self.transport.rank:
            view = self.transport.fetched.take(step, receive.nbytes)
            receives = _parts(view, receive)
        tag = _tag(self.call, step, False)
        sent, received = self.transport.mover.post(sends, receives, tag)
        self._sent.append((step, sent))
        if transfers.send is not None and transfers.send.lap is not None:
            self._lent.setdefault(transfers.send.lap, []).append((step, sent))
        self._carry(transfers, step)
        if receive is not None and receive.peer == self.transport.rank:
            assert receive.lap is not None, "a rank reads nothing from itself but copies"
            received = self._carried[receive.lap]
            view = self.transport.copies.take(receive.lap, receive.nbytes)
        return _P2PHandle(self.transport, received, view, step)

    def _sends(self, send: Transfer | None, step: int) -> list[Operation]:
        """What the reader of ``step`` is sent: from the outbox, or from a copy, once it is here."""
        if send is None:
            return []
        if send.lap is None:
            source = self.transport.outbox.take(0, self.schedule.own_bytes)
        else:
            self.transport.settle(self._carried[send.lap], f"copy of lap {send.lap}", step)
            source = self.transport.copies.take(send.lap, self.transport.copies.capacity)
        return [(send.peer, source[offset : offset + nbytes]) for offset, nbytes in send.spans]

    def _carry(self, transfers: StepTransfers, step: int) -> None:
        """Start what this rank brings over, and what another one brings over from here."""
        carry, receives = transfers.carry, []
        if carry is None and transfers.lend is None:
            return
        if carry is not None:
            for at, sent in self._lent.pop(carry.lap - 2, ()):
                self.transport.settle(sent, f"reader of the copy of lap {carry.lap - 2}", at)
            copy = self.transport.copies.take(carry.lap, carry.nbytes)
            receives = _parts(copy, carry)
        sends = self._sends(transfers.lend, step)
        tag = _tag(self.call, step, False)
        sent, received = self.transport.mover.post(sends, receives, tag)
        self._sent.append((step, sent))
        if carry is not None:
            self._carried[carry.lap] = received

    def grad_slot(self, step: int) -> Tensor | None:
        out = self._step(step).grad_out
        if out is None:
            return None
        self.transport.settle(self._slots[self._contributed % 2], "reader of dK/dV", step)
        return self.transport.outgoing.take(self._contributed, out.nbytes)

    def send_grads(self, step: int) -> None:
        transfers = self._step(step)
        sends, receives = [], []
        if transfers.grad_out is not None:
            slot = self.transport.outgoing.take(self._contributed, transfers.grad_out.nbytes)
            sends = [(transfers.grad_out.peer, slot)]
        coming = transfers.grad_in
        if coming is not None:
            assert self._released >= coming.index - 1, f"contribution {coming.index - 2} not taken"
            receives = [(coming.peer, self.transport.inbox.take(coming.index, coming.nbytes))]
        sent, received = self.transport.mover.post(sends, receives, _tag(self.call, step, True))
        if sends:
            self._slots[self._contributed % 2] = sent
            self._contributed += 1
        self._coming[step] = received

    def contributions(self, step: int) -> Iterator[Contribution]:
        coming = self._step(step).grad_in
        received = self._coming.pop(step)
        if coming is None:
            return
        self.transport.settle(received, f"contribution {coming.index} of dK/dV", step)
        view = self.transport.inbox.take(coming.index, coming.nbytes)
        yield Contribution(coming.peer, view, lambda: self._release(coming.index))

    def _release(self, index: int) -> None:
        assert self._released == index, f"contribution {index} released out of order"
        self._released = index + 1

    def finish(self) -> None:
        self.transport.require_usable()
        due = sum(step.grad_in is not None for step in self.schedule.steps)
        assert self._released == due, f"{self._released} of {due} contributions taken"
        for step, sent in self._sent:
            self.transport.settle(sent, "reader of K/V", step)
        for sent in self._slots:
            self.transport.settle(sent, "reader of dK/dV")
        self.transport.open_call = None


def _parts(view: Tensor, transfer: Transfer | Carry) -> list[Operation]:
    """Receives of ``transfer`` into ``view``, one a span."""
    parts = view.split([nbytes for _, nbytes in transfer.spans])
    return [(transfer.peer, part) for part in parts]


class _P2PHandle(Handle):
    def __init__(
        self, transport: TorchP2PTransport, received: Posted, view: Tensor | None, step: int
    ) -> None:
        self._transport, self._received, self._view = transport, received, view
        self._step = step

    def wait(self) -> Tensor | None:
        self._transport.settle(self._received, "K/V records", self._step)
        return self._view
