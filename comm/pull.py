"""Pull transports: peers read an outbox in memory that everybody can address, ordered on streams.

    publish   call c complete:    set PUBLISHED[me] = c + 1 at every peer
    fetch     pull lane:          wait PUBLISHED[source] >= c + 1, copy from its outbox[c % 2]
    dK/dV i   push lane:          wait PUBLISHED[owner] >= c + 1, RELEASED[owner] >= (c, i - 2),
                                  copy to its inbox[i % slots], set DELIVERED[me] = (c, i) there
    owner     current lane:       wait DELIVERED[sender] >= (c, i), add,
                                  set RELEASED[me] = (c, i) at the sender of contribution i + 2
    carry     cross lane:         wait READ[readers of the copy before] >= theirs, PUBLISHED[owner],
                                  copy its outbox to copy[lap % 2], set CARRIED[me] = (c, lap) at
                                  the readers; theirs is a fetch that waits for it, and then sets
                                  READ[reader] = (c, lap) here
    open      current lane:       wait PUBLISHED[everybody] >= c; outbox[c % 2] may be written

The publications of a call are its barrier, taken apart: a rank *arrives* when it sets its flag, and
each wait names only those it needs. A rank sets PUBLISHED for call c + 1 after its last pull and
its last inbox read of call c, in stream order; so whoever has seen everybody's flag of call c - 1
may overwrite the outbox of call c - 2, and an owner whose flag is c + 1 has a free inbox.

A *lane* is a queue of work in order, as a CUDA stream is: "current" is where the caller computes,
pull, cross and push run beside it. The host waits for the device only to grow the arena and to
close. A view is reused by the second following fetch, which waits for what the current lane had
queued by then. What differs between backends is behind the classes of :mod:`ringfa4.comm.lanes`.

All waits of a rank are for something its peers enqueue strictly earlier in the order of the
protocol, so lanes may share a hardware queue without deadlock, one process a rank. What ends waits
for a peer that is gone needs a queue that none of them keeps (:mod:`ringfa4.comm.signals`).

Left out: peers that cannot be addressed (other hosts without NVLink between them); torch_p2p is for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from ringfa4.comm.arena import ALIGNMENT, Slots
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
from ringfa4.comm.lanes import Engine, Flag, Lane, Mark, Memory, Signals, reached, stamp
from ringfa4.errors import ContextBrokenError, PeerError

T = TypeVar("T")


class _Arena:
    """The symmetric part: two outboxes, ``slots`` inbox slots and two copies on every rank, one
    allocation."""

    def __init__(
        self, pieces: list[Tensor], outbox: int, inbox: int, copy: int, slots: int
    ) -> None:
        self.pieces, self.outbox_bytes, self.inbox_bytes = pieces, outbox, inbox
        self.copy_bytes, self.slots = copy, slots

    @classmethod
    def size(cls, outbox: int, inbox: int, copy: int, slots: int) -> int:
        return 2 * (outbox + copy) + slots * inbox

    def outbox(self, rank: int, call: int) -> Tensor:
        start = call % 2 * self.outbox_bytes
        return self.pieces[rank][start : start + self.outbox_bytes]

    def inbox(self, rank: int, index: int) -> Tensor:
        start = 2 * self.outbox_bytes + index % self.slots * self.inbox_bytes
        return self.pieces[rank][start : start + self.inbox_bytes]

    def copy(self, rank: int, lap: int) -> Tensor:
        """What ``rank`` carried in ``lap``."""
        inboxes = self.slots * self.inbox_bytes
        start = 2 * self.outbox_bytes + inboxes + lap % 2 * self.copy_bytes
        return self.pieces[rank][start : start + self.copy_bytes]


class PullTransport(Transport):
    """Data path of one rank; see the module."""

    def __init__(
        self, name: str, control: Control, engine: Engine, memory: Memory, signals: Signals
    ) -> None:
        self.name, self.rank, self.world = name, control.rank, control.world
        self.device, self.engine, self.signals = engine.device, engine, signals
        self._control, self._memory = control, memory
        self.peers = [r for r in range(self.world) if r != self.rank]
        self.pull, self.push, self.cross = engine.side(), engine.side(), engine.side()
        self.slots = min(2, max(1, self.world - 1))
        """Buffers of what is fetched, of contributions that leave, and of those that come. A call
        between two ranks has one of each, and one call's are done with before the next one's."""
        self.arena = _Arena([], 0, 0, 0, self.slots)
        self.fetched, self.outgoing = (Slots(self.slots, engine.device) for _ in range(2))
        self.pushed: list[Mark | None] = [None] * self.slots
        """When each outgoing slot was last read by a push."""
        self.last_reads: list[Mark] = []
        """What the next publication must come after."""
        self.readers: list[tuple[int, tuple[int, ...]]] = [(0, ()), (0, ())]
        """Of each copy slot: the stamp of what it holds, and who reads it."""
        self.calls = 0
        self.in_call = False
        self._broken: str | None = None

    def ready(self, schedule: Schedule) -> bool:
        return (
            schedule.outbox_bytes <= self.arena.outbox_bytes
            and schedule.grad_bytes <= self.arena.inbox_bytes
            and schedule.fetch_bytes <= self.fetched.capacity
            and schedule.grad_bytes <= self.outgoing.capacity
            and schedule.carry_bytes <= self.arena.copy_bytes
        )

    def open(self, schedule: Schedule) -> Exchange:
        self.require_usable()
        self.engine.require_no_capture()
        schedule.require_valid(self.rank, self.world)
        assert not self.in_call, "finish() of the last call comes first"
        if not self.ready(schedule):
            self._grow(schedule)
        call, self.calls = self.calls, self.calls + 1
        self.in_call = True
        self._or_break(self.signals.begin)
        if call >= 2:
            what = f"arrival in call {call - 1}"
            self.wait(self.engine.current(), Flag.PUBLISHED, self.peers, call, what)
        return PullExchange(self, schedule, call)

    def _grow(self, schedule: Schedule) -> None:
        """Replace the arena by one that is large enough. Every rank grows in the same call."""
        self._drain()
        self._meet("grow")
        self._free_arena()
        outbox = max(_aligned(schedule.outbox_bytes), self.arena.outbox_bytes)
        inbox = max(_aligned(schedule.grad_bytes), self.arena.inbox_bytes)
        copy = max(_aligned(schedule.carry_bytes), self.arena.copy_bytes)
        size = _Arena.size(outbox, inbox, copy, self.slots)
        pieces = self._memory.allocate(size) if size else []
        self.arena = _Arena(pieces, outbox, inbox, copy, self.slots)
        self.readers = [(0, ()), (0, ())]  # everybody has read what there was
        self.fetched.grow(schedule.fetch_bytes)
        self.outgoing.grow(schedule.grad_bytes)

    def _free_arena(self) -> None:
        pieces, self.arena.pieces = self.arena.pieces, []
        if pieces:
            self._memory.free(pieces)

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self.require_usable()
        require_gather_arguments(local, sizes, self.rank, self.world)
        sources = [(self.rank - t) % self.world for t in range(self.world)]
        steps = [
            StepTransfers(receive=Transfer(r, ((0, sizes[r]),)) if t and sizes[r] else None)
            for t, r in enumerate(sources)
        ]
        largest = max(sizes)
        exchange = self.open(
            Schedule(self.rank, self.world, local.numel(), largest, largest, 0, tuple(steps))
        )
        exchange.outbox().copy_(local)
        exchange.publish()
        parts = {self.rank: local.clone()}
        for t, source in enumerate(sources[1:], 1):
            view = exchange.fetch(t).wait()
            parts[source] = local.new_empty(0) if view is None else view.clone()
        exchange.finish()
        return [parts[r] for r in range(self.world)]

    def abort(self, reason: str) -> None:
        """Waits on the device pass from now on; what was computed behind them is undefined."""
        if self._broken is None:
            self._broken = reason
            self.signals.release()

    def close(self) -> None:
        if self._broken is None:
            self._drain()
            self._meet("close")
            self._free_arena()
            self.fetched, self.outgoing = (Slots(self.slots, self.device) for _ in range(2))
            self.signals.close()
        self._broken = self._broken or "it was closed"

    def require_usable(self) -> None:
        """Raises the PeerError of a lost peer once, ContextBrokenError after that."""
        if self._broken is not None:
            raise ContextBrokenError(f"the transport cannot be used: {self._broken}")
        if self.signals.lost is not None:
            self._broken = str(self.signals.lost)
            raise self.signals.lost

    def wait(
        self,
        lane: Lane,
        flag: Flag,
        peers: Sequence[int],
        value: int,
        what: str,
        step: int | None = None,
    ) -> None:
        """As :meth:`Signals.wait`; an error breaks this transport."""
        self._or_break(lambda: self.signals.wait(lane, flag, peers, value, what, step))

    def _or_break(self, do: Callable[[], T]) -> T:
        """``do()``; a lost peer breaks this transport."""
        try:
            return do()
        except PeerError as error:
            self.abort(str(error))
            raise

    def poison(self, lane: Lane, absent: Sequence[int], late: Sequence[int], call: int) -> None:
        """Make what a failed ``call`` still moves NaN: all-ones is NaN in every format on the wire.
        What this rank has yet to send becomes NaN at its peers, which may learn of the failure
        later than that.

        ``absent`` have not published it: what their outboxes of its parity hold is older, and all
        ranks have read that. ``late`` have not carried what this rank reads from them; the call
        fails on whoever reads that. Enqueued on ``lane``, from any thread.
        """
        if not self.arena.pieces:
            return
        targets = [self.arena.inbox(self.rank, i) for i in range(self.slots)]
        targets += [self.outgoing.take(i, self.outgoing.capacity) for i in range(self.slots)]
        targets += [self.arena.outbox(peer, call) for peer in absent]
        targets += [self.arena.copy(peer, lap) for peer in (self.rank, *late) for lap in range(2)]
        for target in targets:
            lane.fill(target, 0xFF)

    def _drain(self) -> None:
        """Wait on the host until this rank's lanes are empty, and the last call's current one.

        PeerError also when they are empty because the watchdog let them pass.
        """
        lanes = (self.engine.current(), self.pull, self.push, self.cross)
        for mark in (*self.last_reads, *(lane.record() for lane in lanes)):
            if not reached(mark, self._control.timeout_s, lambda: self.signals.lost is not None):
                self.require_usable()
                reason = f"the last call did not end within {self._control.timeout_s:g} s"
                self.abort(reason)
                raise PeerError(reason)
        self.require_usable()

    def _meet(self, what: str) -> None:
        messages = self._or_break(lambda: self._control.gather(f"{what} {self.calls}".encode()))
        assert len(set(messages)) == 1, f"ranks are in different calls: {messages}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copy(lane: Lane, into: Tensor, source: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """``spans`` of ``source``, packed, into the start of ``into``."""
    at = 0
    for offset, nbytes in spans:
        lane.copy(into[at : at + nbytes], source[offset : offset + nbytes])
        at += nbytes


class PullExchange(Exchange):
    """One call of one rank."""

    def __init__(self, transport: PullTransport, schedule: Schedule, call: int) -> None:
        self.transport, self.schedule, self.call = transport, schedule, call
        self._published = False
        self._taken = 0
        steps = schedule.steps
        self._turns = {t: n for n, t in enumerate(t for t, s in enumerate(steps) if s.grad_out)}
        """step -> how many contributions this rank sent before it."""
        self._givers = [s.grad_in.peer for s in steps if s.grad_in is not None]
        self._carried: dict[int, Mark] = {}
        """When the copy of each lap is complete."""

    def _step(self, step: int) -> StepTransfers:
        self.transport.require_usable()
        assert 1 <= step < len(self.schedule.steps), f"no step {step}"
        return self.schedule.steps[step]

    def outbox(self) -> Tensor:
        transport = self.transport
        transport.require_usable()
        if not transport.arena.pieces:  # no rank has records
            return transport.fetched.take(0, 0)
        return transport.arena.outbox(transport.rank, self.call)[: self.schedule.own_bytes]

    def publish(self) -> None:
        transport = self.transport
        transport.require_usable()
        here = transport.engine.current()
        for mark in transport.last_reads:
            here.after(mark)
        transport.signals.set(here, Flag.PUBLISHED, transport.peers, self.call + 1)
        self._published = True

    def fetch(self, step: int) -> Handle:
        transfers = self._step(step)
        assert self._published, "publish() comes before the first fetch"
        if transfers.carry is not None:
            self._carry(transfers.carry, step)
        receive, transport = transfers.receive, self.transport
        if receive is None:
            return PullHandle(self, None, None)
        if receive.peer == transport.rank:
            assert receive.lap is not None, "a rank reads nothing from itself but copies"
            copy = transport.arena.copy(transport.rank, receive.lap)[: receive.nbytes]
            return PullHandle(self, copy, self._carried[receive.lap])
        # What read the view of step - 2 is in the current lane by now.
        free = transport.engine.current().record()
        view = transport.fetched.take(step, receive.nbytes)
        pull = functools.partial(self._pull, receive, step, view, free)
        blocks = transport.signals.would_block
        if receive.lap is None and blocks(Flag.PUBLISHED, receive.peer, self.call + 1):
            # Enqueued once the host has to wait anyway; no peer waits for this pull in the call.
            return PullHandle(self, view, pull)
        return PullHandle(self, view, pull())

    def _pull(self, receive: Transfer, step: int, view: Tensor, free: Mark) -> Mark:
        """Copy what ``step`` receives into ``view``, from ``free`` on; when that is done."""
        transport, lane = self.transport, self.transport.pull
        assert transport.in_call and self.call == transport.calls - 1, "fetch waited for too late"
        lane.after(free)
        if receive.lap is None:
            published = self.call + 1
            self._wait(lane, Flag.PUBLISHED, receive.peer, published, "published records", step)
            _copy(lane, view, transport.arena.outbox(receive.peer, self.call), receive.spans)
        else:
            number, what = stamp(self.call, receive.lap), f"copy of lap {receive.lap}"
            self._wait(lane, Flag.CARRIED, receive.peer, number, what, step)
            _copy(lane, view, transport.arena.copy(receive.peer, receive.lap), receive.spans)
            transport.signals.set(lane, Flag.READ, [receive.peer], number)
        return lane.record()

    def _carry(self, carry: Carry, step: int) -> None:
        """Bring a copy over, once the one in its slot has been read, and tell its readers."""
        transport, lane, slot = self.transport, self.transport.cross, carry.lap % 2
        # What read the own copy of lap - 2 is in the current lane by now.
        lane.after(transport.engine.current().record())
        before, readers = transport.readers[slot]
        if readers:
            transport.wait(lane, Flag.READ, readers, before, "reader of an older copy", step)
        published = self.call + 1
        self._wait(lane, Flag.PUBLISHED, carry.peer, published, "published records", step)
        source = transport.arena.outbox(carry.peer, self.call)
        _copy(lane, transport.arena.copy(transport.rank, carry.lap), source, carry.spans)
        number = stamp(self.call, carry.lap)
        transport.signals.set(lane, Flag.CARRIED, carry.readers, number)
        transport.readers[slot] = (number, carry.readers)
        self._carried[carry.lap] = lane.record()

    def grad_slot(self, step: int) -> Tensor | None:
        out = self._step(step).grad_out
        if out is None:
            return None
        turn = self._turns[step]
        pushed = self.transport.pushed[turn % self.transport.slots]
        if pushed is not None:
            self.transport.engine.current().after(pushed)
        return self.transport.outgoing.take(turn, out.nbytes)

    def send_grads(self, step: int) -> None:
        out = self._step(step).grad_out
        if out is None:
            return
        transport, turn = self.transport, self._turns[step]
        lane = transport.push
        lane.after(transport.engine.current().record())
        self._wait(lane, Flag.PUBLISHED, out.peer, self.call + 1, "arrival in the call", step)
        assert out.index < transport.world - 1, "contributions of different ranks"
        if out.index >= 2:
            free = f"free slot for contribution {out.index}"
            self._wait(lane, Flag.RELEASED, out.peer, stamp(self.call, out.index - 2), free, step)
        inbox = transport.arena.inbox(out.peer, out.index)[: out.nbytes]
        lane.copy(inbox, transport.outgoing.take(turn, out.nbytes))
        transport.signals.set(lane, Flag.DELIVERED, [out.peer], stamp(self.call, out.index))
        transport.pushed[turn % transport.slots] = lane.record()

    def contributions(self, step: int) -> Iterator[Contribution]:
        given = self._step(step).grad_in
        if given is None:
            return
        transport, what = self.transport, f"contribution {given.index}"
        here = transport.engine.current()
        self._wait(here, Flag.DELIVERED, given.peer, stamp(self.call, given.index), what, step)
        view = transport.arena.inbox(transport.rank, given.index)[: given.nbytes]
        yield Contribution(given.peer, view, lambda: self._release(given.index))

    def _release(self, index: int) -> None:
        assert self._taken == index, f"contribution {index} released out of order"
        self._taken = index + 1
        if index + 2 < len(self._givers):
            transport, value = self.transport, stamp(self.call, index)
            here = transport.engine.current()
            transport.signals.set(here, Flag.RELEASED, [self._givers[index + 2]], value)

    def finish(self) -> None:
        transport = self.transport
        transport.require_usable()
        assert self._taken == len(self._givers), f"{self._taken} of {len(self._givers)} taken"
        lanes = (transport.engine.current(), transport.pull, transport.cross)
        transport.last_reads = [lane.record() for lane in lanes]
        transport.in_call = False
        transport.signals.end()

    def _wait(self, lane: Lane, flag: Flag, peer: int, value: int, what: str, step: int) -> None:
        self.transport.wait(lane, flag, [peer], value, what, step)


class PullHandle(Handle):
    """A pull under way, or one that ``wait`` starts; None for a step that receives nothing."""

    def __init__(
        self,
        exchange: PullExchange,
        view: Tensor | None,
        mark: Mark | Callable[[], Mark] | None,
    ) -> None:
        self._exchange, self._view, self._mark = exchange, view, mark

    def wait(self) -> Tensor | None:
        self._exchange.transport.require_usable()
        if callable(self._mark):
            self._mark = self._mark()
        if self._mark is not None:
            self._exchange.transport.engine.current().after(self._mark)
        return self._view
