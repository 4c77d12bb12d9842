"""All ranks in one process, one thread a rank; bytes are copied from buffer to buffer.

    fetch   the reader waits for  source.published >= call,  then copies from outbox[call % 2]
    carry   a copy of another domain's outbox stays here, in copies[lap % 2], after its readers of
            before have read it; the reader waits for  source.carried >= (call, lap)
    dK/dV   the sender waits for  owner.opened == call and owner.released >= index - 1,
            then copies into the owner's inbox[index % 2]
    open    waits until every rank has finished call - 2, whose outbox is about to be overwritten

A rank's progress is guarded by its own condition variable, on which those sleep who wait for it:
72 ranks do not wake each other for nothing, and nobody spins. Every wait ends after ``timeout_s``,
and at once when a peer reports a failure.

Left out: overlap (a copy runs in the reader's ``wait``, on the cores that compute). Virtual ranks
on one GPU overlap: they are :mod:`ringfa4.comm.cuda_local`, and :func:`run_ranks` runs both.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringfa4.comm.arena import Slots
from ringfa4.comm.interface import (
    Carry,
    Contribution,
    Control,
    Exchange,
    Handle,
    Schedule,
    StepTransfers,
    Transport,
    require_gather_arguments,
    require_message,
)
from ringfa4.comm.turn import TURN_POLL_S, Turn
from ringfa4.errors import ContextBrokenError, PeerError

T = TypeVar("T")


class _Rank:
    """What the others may know of one rank, guarded by ``changed``."""

    def __init__(self, device: torch.device) -> None:
        self.changed = threading.Condition()
        self.opened = -1
        self.published = -1
        self.finished = -1
        self.outbox = Slots(2, device)
        self.inbox = Slots(2, device)
        self.delivered = [-1, -1]
        """Contribution last written to each inbox slot in call ``opened``."""
        self.released = 0
        """Contributions of call ``opened`` that the owner has taken."""
        self.copies = Slots(2, device)
        """What this rank carried from another domain."""
        self.carried = (-1, -1)
        """(call, lap) of the last copy that is complete."""
        self.read: dict[int, tuple[int, int]] = {}
        """(call, lap) of the last copy that each peer has read."""
        self.gathers = 0
        self.shared: Tensor | None = None
        self.shares = 0
        self.shares_read = 0
        self.left = False


class LocalWorld:
    """The shared memory of ``world`` virtual ranks."""

    def __init__(self, world: int, timeout_s: float) -> None:
        if world < 1 or not timeout_s > 0:
            raise ValueError(
                f"need at least one rank and a positive timeout: {world=}, {timeout_s=}"
            )
        self.world, self.device = world, torch.device("cpu")
        self.timeouts_s = [timeout_s] * world
        """How long each rank waits."""
        self.ranks = [_Rank(self.device) for _ in range(world)]
        self.said = threading.Condition()
        """Guards ``rounds`` and each rank's ``gathers``."""
        self.rounds: dict[int, dict[int, bytes]] = {}
        """Of each gather by its number, until the next is complete: rank -> message."""
        self.turn: Turn | None = None
        """Whose host works in a call, where ranks work in turn."""
        self._failures: list[tuple[int, str]] = []

    def control(self, rank: int) -> LocalControl:
        return LocalControl(self, rank)

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)

    def fail(self, rank: int, reason: str) -> None:
        """Record a failure and wake everybody."""
        self._failures.append((rank, reason))
        self.wake()

    def wake(self) -> None:
        for condition in (self.said, *(peer.changed for peer in self.ranks)):
            with condition:
                condition.notify_all()

    def failure(self, besides: int) -> tuple[int, str] | None:
        return next((f for f in self._failures if f[0] != besides), None)

    def wait(
        self,
        rank: int,
        on: int,
        ready: Callable[[_Rank], bool],
        what: str,
        *,
        late: int | None = None,
        step: int | None = None,
        broken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Sleep until ``ready`` holds of rank ``on``.

        Raises PeerError when a peer failed or ``late`` (default: ``on``) is late. What is ready
        is taken even when somebody failed meanwhile: the failure shows in the next wait.
        """
        at = self.ranks[on]
        with at.changed:
            self.sleep(
                at.changed.wait,
                lambda: ready(at),
                rank,
                what,
                lambda: on if late is None else late,
                step=step,
                broken=broken,
            )

    def sleep(
        self,
        pause: Callable[[float], object],
        ready: Callable[[], bool],
        rank: int,
        what: str,
        late: Callable[[], int | None],
        *,
        step: int | None = None,
        broken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """As :meth:`wait`; ``pause`` returns after every change, or after at most as many seconds.

        Nobody sleeps with the turn.
        """
        timeout_s = self.timeouts_s[rank]
        deadline = time.monotonic() + timeout_s
        while not ready():
            reason = broken()
            if reason is not None:
                raise ContextBrokenError(reason)
            failed = self.failure(besides=rank)
            if failed is not None:
                raise PeerError(failed[1], rank=failed[0], step=step, awaited=late())
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerError(f"no {what} within {timeout_s:g} s", rank=late(), step=step)
            if self.turn is not None:
                self.turn.give_up(rank)
            pause(remaining)


class LocalControl(Control):
    """Control channel of one virtual rank."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._shared, self.rank, self.world = world, rank, world.world

    @property
    def timeout_s(self) -> float:
        return self._shared.timeouts_s[self.rank]

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._shared.timeouts_s[self.rank] = seconds

    def gather(self, message: bytes) -> list[bytes]:
        shared = self._shared
        with shared.said:
            said = self._say(message)
            if shared.turn is not None:
                shared.turn.changed(self.rank)
            return self._all(said, shared.said.wait)

    def gather_to_open(self, message: bytes) -> list[bytes]:
        """As :meth:`gather`; where ranks work in turn, it ends with this rank's turn.

        Who comes last has it, the others sleep until it is theirs: woken all at once, they would
        take Python's lock from the one that works. A turn that does not come soon is left to
        ``open``, which knows whom to blame.
        """
        turn = self._shared.turn
        if turn is None:
            return self.gather(message)
        said = self._say(message)

        def take(seconds: float) -> None:
            turn.take(self.rank, min(seconds, TURN_POLL_S), lambda: len(said) == self.world)

        turn.give_up(self.rank)
        take(TURN_POLL_S)  # also when all have spoken meanwhile: nobody leaves past who has it
        return self._all(said, take)

    def decline(self) -> None:
        if self._shared.turn is not None:
            self._shared.turn.give_up(self.rank)

    def _say(self, message: bytes) -> dict[int, bytes]:
        """Say ``message`` in this rank's next round; what has been said in it. Who comes last
        wakes the others, once.
        """
        require_message(message)
        shared = self._shared
        own = shared.ranks[self.rank]
        with shared.said:
            own.gathers = number = own.gathers + 1
            said = shared.rounds.setdefault(number, {})
            said[self.rank] = message
            if len(said) == self.world:
                shared.rounds.pop(number - 1, None)
                shared.said.notify_all()
        return said

    def _all(self, said: dict[int, bytes], pause: Callable[[float], object]) -> list[bytes]:
        """What all said, by rank, once they have."""
        ranks = range(self.world)
        self._shared.sleep(
            pause,
            lambda: len(said) == self.world,
            self.rank,
            f"answer to message {self._shared.ranks[self.rank].gathers}",
            lambda: next((r for r in ranks if r not in said), None),
        )
        return [said[r] for r in ranks]

    def report(self, reason: str) -> None:
        self._shared.fail(self.rank, reason)

    def failure(self) -> tuple[int, str] | None:
        return self._shared.failure(besides=self.rank)

    def close(self) -> None:
        """Nothing to release."""


class LocalTransport(Transport):
    """Data path of one virtual rank; only this rank's thread calls it."""

    name = "local"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.shared, self.rank, self.world, self.device = world, rank, world.world, world.device
        self.own = world.ranks[rank]
        self.fetched = Slots(2, world.device)
        self.outgoing = Slots(1, world.device)
        self.calls = 0
        self.readers: list[tuple[tuple[int, int], tuple[int, ...]]] = [((-1, -1), ())] * 2
        """(call, lap) of what each copy slot holds, and who reads it."""
        self._broken: str | None = None

    def ready(self, schedule: Schedule) -> bool:
        return (
            schedule.outbox_bytes <= self.own.outbox.capacity
            and schedule.fetch_bytes <= self.fetched.capacity
            and schedule.grad_bytes <= self.own.inbox.capacity
            and schedule.carry_bytes <= self.own.copies.capacity
        )

    def open(self, schedule: Schedule) -> Exchange:
        self.require_usable()
        schedule.require_valid(self.rank, self.world)
        assert self.own.finished == self.calls - 1, "finish() of the last call comes first"
        call, self.calls = self.calls, self.calls + 1
        for peer in range(self.world):
            self.wait(peer, lambda at: at.finished >= call - 2, f"end of call {call - 2}")
        # Both outboxes may only grow while nobody reads the other one.
        if schedule.outbox_bytes > self.own.outbox.capacity:
            for peer in range(self.world):
                self.wait(peer, lambda at: at.finished >= call - 1, f"end of call {call - 1}")
        if schedule.carry_bytes > self.own.copies.capacity:
            for slot in range(2):
                self.wait_for_readers(slot)
        self.fetched.grow(schedule.fetch_bytes)
        self.outgoing.grow(schedule.grad_bytes)
        with self.own.changed:
            self.own.outbox.grow(schedule.outbox_bytes)
            self.own.copies.grow(schedule.carry_bytes)
            self.own.inbox.grow(schedule.grad_bytes)
            self.own.delivered[:] = [-1, -1]
            self.own.released = 0
            self.own.opened = call
            self.own.changed.notify_all()
        return LocalExchange(self, schedule, call)

    def wait_for_readers(self, slot: int, step: int | None = None) -> None:
        """Until whoever reads what copy ``slot`` holds has read it."""
        number, readers = self.readers[slot]

        def has_read(peer: int, at: _Rank) -> bool:
            return at.read.get(peer, (-1, -1)) >= number

        for peer in readers:
            self.wait(
                self.rank,
                functools.partial(has_read, peer),
                f"reader of the copy of lap {number[1]}",
                late=peer,
                step=step,
            )

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self.require_usable()
        require_gather_arguments(local, sizes, self.rank, self.world)
        with self.own.changed:
            self.own.shared = local
            self.own.shares += 1
            self.own.changed.notify_all()
        number, gathered = self.own.shares, []
        for peer, size in enumerate(sizes):
            self.wait(peer, lambda at: at.shares >= number, f"data of all_gather {number}")
            data = self.shared.ranks[peer].shared
            assert data is not None and data.numel() == size, f"rank {peer} did not share {size} B"
            gathered.append(data.clone())
        with self.own.changed:
            self.own.shares_read = number
            self.own.changed.notify_all()
        for peer in range(self.world):
            self.wait(peer, lambda at: at.shares_read >= number, f"end of all_gather {number}")
        self.own.shared = None
        return gathered

    def abort(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.shared.wake()

    def close(self) -> None:
        """Waits for the peers, so that nobody reads a buffer that is going away."""
        if self._broken is None:
            with self.own.changed:
                self.own.left = True
                self.own.changed.notify_all()
            for peer in range(self.world):
                self.wait(peer, lambda at: at.left, "close()")
        self._broken = self._broken or "it was closed"

    def require_usable(self) -> None:
        if self._broken is not None:
            raise ContextBrokenError(f"the transport cannot be used: {self._broken}")

    def wait(
        self,
        on: int,
        ready: Callable[[_Rank], bool],
        what: str,
        *,
        late: int | None = None,
        step: int | None = None,
    ) -> None:
        """As :meth:`LocalWorld.wait`; an error breaks this transport."""
        try:
            self.shared.wait(
                self.rank, on, ready, what, late=late, step=step, broken=lambda: self._broken
            )
        except PeerError as error:
            self._broken = str(error)
            raise


class LocalExchange(Exchange):
    """One call of one virtual rank."""

    def __init__(self, transport: LocalTransport, schedule: Schedule, call: int) -> None:
        self.transport, self.schedule, self.call = transport, schedule, call
        self._own = transport.own

    def _step(self, step: int) -> StepTransfers:
        self.transport.require_usable()
        assert 1 <= step < len(self.schedule.steps), f"no step {step}"
        return self.schedule.steps[step]

    def outbox(self) -> Tensor:
        self.transport.require_usable()
        return self._own.outbox.take(self.call, self.schedule.own_bytes)

    def publish(self) -> None:
        self.transport.require_usable()
        with self._own.changed:
            self._own.published = self.call
            self._own.changed.notify_all()

    def fetch(self, step: int) -> Handle:
        self._step(step)
        assert self._own.published == self.call, "publish() comes before the first fetch"
        return LocalHandle(self, step)

    def read(self, step: int) -> Tensor | None:
        """Do what ``step`` carries, then wait for its source and copy what it receives."""
        carry, receive = self._step(step).carry, self._step(step).receive
        if carry is not None:
            self._carry(carry, step)
        if receive is None:
            return None
        if receive.lap is None:
            source = self._published(receive.peer, step)
            return self._copy(
                source, receive.spans, self.transport.fetched.take(step, receive.nbytes)
            )
        number = (self.call, receive.lap)
        peer = self.transport.shared.ranks[receive.peer]
        self.transport.wait(
            receive.peer, lambda at: at.carried >= number, f"copy of lap {receive.lap}", step=step
        )
        copy = peer.copies.take(receive.lap, peer.copies.capacity)
        if peer is self._own:
            return copy[: receive.nbytes]
        view = self.transport.fetched.take(step, receive.nbytes)
        self._copy(copy, receive.spans, view)
        with peer.changed:
            peer.read[self.transport.rank] = number
            peer.changed.notify_all()
        return view

    def _carry(self, carry: Carry, step: int) -> None:
        """Bring a copy over, once the one in its slot has been read."""
        source = self._published(carry.peer, step)
        self.transport.wait_for_readers(carry.lap % 2, step)
        self._copy(source, carry.spans, self._own.copies.take(carry.lap, carry.nbytes))
        number = (self.call, carry.lap)
        self.transport.readers[carry.lap % 2] = (number, carry.readers)
        with self._own.changed:
            self._own.carried = number
            self._own.changed.notify_all()

    def _published(self, peer: int, step: int) -> Tensor:
        """The outbox of ``peer``, once it is complete."""
        self.transport.wait(
            peer, lambda at: at.published >= self.call, "published records", step=step
        )
        outbox = self.transport.shared.ranks[peer].outbox
        return outbox.take(self.call, outbox.capacity)

    @staticmethod
    def _copy(source: Tensor, spans: Sequence[tuple[int, int]], into: Tensor) -> Tensor:
        at = 0
        for offset, nbytes in spans:
            into[at : at + nbytes].copy_(source[offset : offset + nbytes])
            at += nbytes
        return into

    def grad_slot(self, step: int) -> Tensor | None:
        out = self._step(step).grad_out
        return None if out is None else self.transport.outgoing.take(0, out.nbytes)

    def send_grads(self, step: int) -> None:
        out = self._step(step).grad_out
        if out is None:
            return
        self.transport.wait(
            out.peer,
            lambda at: at.opened == self.call and at.released >= out.index - 1,
            f"free slot for contribution {out.index}",
            step=step,
        )
        owner = self.transport.shared.ranks[out.peer]
        owner.inbox.take(out.index, out.nbytes).copy_(self.transport.outgoing.take(0, out.nbytes))
        with owner.changed:
            owner.delivered[out.index % 2] = out.index
            owner.changed.notify_all()

    def contributions(self, step: int) -> Iterator[Contribution]:
        coming = self._step(step).grad_in
        if coming is None:
            return
        self.transport.wait(
            self.transport.rank,
            lambda at: at.delivered[coming.index % 2] == coming.index,
            f"contribution {coming.index}",
            late=coming.peer,
            step=step,
        )
        view = self._own.inbox.take(coming.index, coming.nbytes)
        yield Contribution(coming.peer, view, lambda: self._release(coming.index))

    def _release(self, index: int) -> None:
        with self._own.changed:
            assert self._own.released == index, f"contribution {index} released out of order"
            self._own.released = index + 1
            self._own.changed.notify_all()

    def finish(self) -> None:
        self.transport.require_usable()
        due = sum(step.grad_in is not None for step in self.schedule.steps)
        assert self._own.released == due, f"{self._own.released} of {due} contributions taken"
        with self._own.changed:
            self._own.finished = self.call
            self._own.changed.notify_all()


class LocalHandle(Handle):
    """A read that happens when it is waited for."""

    def __init__(self, exchange: LocalExchange, step: int) -> None:
        self._exchange, self._step = exchange, step
        self._done = False
        self._view: Tensor | None = None

    def wait(self) -> Tensor | None:
        if not self._done:
            self._view = self._exchange.read(self._step)
            self._done = True
        return self._view


def run_ranks(
    world: int,
    fn: Callable[[int, Any, LocalControl], T],
    timeout_s: float = 60.0,
    device: torch.device | str = "cpu",
) -> list[T]:
    """``fn(rank, transport, control)`` in one thread a rank; the results by rank.

    On a GPU every rank computes on a stream of its own (:mod:`ringfa4.comm.cuda_local`); it starts
    after what the caller's stream holds, and the device is idle on return.

    A rank that raises is reported to the others. The first failure in time that is not the echo of
    another rank's is raised here, after every rank has ended or ``timeout_s`` has passed since.

    PyTorch keeps a pool of OpenMP threads for each thread that computes, so ranks would bring
    world x cores threads along. They share the cores instead: ``torch.set_num_threads`` binds the
    calling thread and is what threads that start later begin with. It is reset on return.
    """
    shared = LocalWorld(world, timeout_s)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    before = torch.get_num_threads()
    share = max(1, min(before, (os.cpu_count() or 1) // world))

    stage = _stage(shared, torch.device(device))

    def main(rank: int) -> None:
        control = shared.control(rank)
        try:
            with stage(rank) as transport:
                try:
                    results[rank] = fn(rank, transport, control)
                except BaseException as error:
                    transport.abort(f"{type(error).__name__}: {error}")
                    raise
        except BaseException as error:
            errors.append(error)
            control.report(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world)
    ]
    torch.set_num_threads(share)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(0.1)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(before)
    echoes = (PeerError, ContextBrokenError)
    if errors:
        raise next((e for e in errors if not isinstance(e, echoes)), errors[0])
    return [results[rank] for rank in range(world)]


def _stage(
    world: LocalWorld, device: torch.device
) -> Callable[[int], AbstractContextManager[Transport]]:
    """rank -> its transport, for use inside the rank's thread."""
    if device.type == "cpu":
        return lambda rank: nullcontext(world.transport(rank))
    from ringfa4.comm.cuda_local import virtual_ranks

    return virtual_ranks(world, device)
