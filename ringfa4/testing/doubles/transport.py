"""A transport that is slow, uneven and suspicious, around any transport whose ranks are threads.

    Rank code  <->  private copies, poisoned when their validity ends  <->  the inner transport's
    buffers

What the protocol of :mod:`ringfa4.comm.interface` forbids is caught in both directions. The
*caller* gets private copies of every buffer, filled with 0xFF (NaN in every float format that
travels) before it writes them and after it may read them; calls out of order are AssertionErrors
that name the rule. The *inner transport* finds its buffers poisoned whenever their contents are
undefined, sleeps put in at random between any two operations, ranks that drift apart, and a
:class:`Ledger`, out of its reach, of every byte that was published or contributed: what arrives is
compared when it arrives, and again when its validity ends.

Delays are seeded and repeatable up to the scheduling of threads. Left out: CUDA streams (host order
only).
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringfa4.comm.arena import aligned_empty
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
)
from ringfa4.comm.local import run_ranks
from ringfa4.errors import ContextBrokenError

T = TypeVar("T")

POISON = 0xFF
KEPT_CALLS = 3
"""Calls for which the ledger remembers bytes; ranks are never further apart."""


def poisoned(nbytes: int) -> Tensor:
    """uint8 of ``nbytes`` that is NaN read as any float format."""
    return aligned_empty(nbytes, torch.device("cpu")).fill_(POISON)


def aligned_copy(data: Tensor) -> Tensor:
    return aligned_empty(data.numel(), torch.device("cpu")).copy_(data)


class Ledger:
    """What every rank published and contributed, kept apart from the transport under test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[tuple[int, int], Tensor] = {}
        self._contributed: dict[tuple[int, int, int], Tensor] = {}
        self._carries: dict[tuple[int, int, int], Carry] = {}

    def carry(self, call: int, rank: int, carry: Carry) -> None:
        with self._lock:
            self._carries[call, rank, carry.lap] = carry
            self._carries.pop((call - KEPT_CALLS, rank, carry.lap), None)

    def publish(self, call: int, rank: int, outbox: Tensor) -> None:
        with self._lock:
            self._published[call, rank] = outbox.clone()
            self._published.pop((call - KEPT_CALLS, rank), None)

    def contribute(self, call: int, owner: int, index: int, data: Tensor) -> None:
        with self._lock:
            self._contributed[call, owner, index] = data.clone()

    def published(self, call: int, rank: int, spans: Sequence[tuple[int, int]]) -> Tensor | None:
        """The bytes of ``spans``, packed; None when ``rank`` has not published ``call``."""
        with self._lock:
            outbox = self._published.get((call, rank))
        if outbox is None:
            return None
        return torch.cat([outbox[offset : offset + nbytes] for offset, nbytes in spans])

    def expected(self, call: int, receive: Transfer) -> Tensor | None:
        """The bytes that ``receive`` brings; None while they cannot be there."""
        if receive.lap is None:
            return self.published(call, receive.peer, receive.spans)
        with self._lock:
            carry = self._carries.get((call, receive.peer, receive.lap))
        copy = None if carry is None else self.published(call, carry.peer, carry.spans)
        if copy is None:
            return None
        return torch.cat([copy[offset : offset + nbytes] for offset, nbytes in receive.spans])

    def contributed(self, call: int, owner: int, index: int) -> Tensor | None:
        """Contribution ``index``, forgotten once it was asked for; None when it was never sent."""
        with self._lock:
            return self._contributed.pop((call, owner, index), None)


class AdversarialTransport(Transport):
    """``inner`` under suspicion. Ranks of one group share ``ledger``; ``delay_s`` bounds one
    sleep."""

    name = "adversarial"

    def __init__(
        self, inner: Transport, ledger: Ledger, *, seed: int = 0, delay_s: float = 0.002
    ) -> None:
        self.inner, self.ledger = inner, ledger
        self.rank, self.world, self.device = inner.rank, inner.world, inner.device
        self._random = random.Random(seed * 1009 + self.rank)
        self._delay_s = delay_s
        self._drift = 0.0
        self._calls = 0
        self._current: AdversarialExchange | None = None
        self._broken: str | None = None

    def sleep(self) -> None:
        """A random pause, longer on ranks that are slow in this call; often none."""
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self._delay_s * self._drift)

    def ready(self, schedule: Schedule) -> bool:
        return self.inner.ready(schedule)

    def open(self, schedule: Schedule) -> Exchange:
        self.require_usable()
        assert self._current is None or self._current.finished, (
            "rule broken: finish() ends a call before the next open()"
        )
        self._drift = self._random.choice((0.0, 0.3, 1.0))
        self.sleep()
        exchange = AdversarialExchange(self, self.inner.open(schedule), schedule, self._calls)
        self._calls += 1
        self._current = exchange
        return exchange

    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self.require_usable()
        assert self._current is None or self._current.finished, (
            "rule broken: all_gather() is called outside an exchange"
        )
        self.sleep()
        before = local.clone()
        gathered = self.inner.all_gather(local, sizes)
        assert torch.equal(local, before) and torch.equal(gathered[self.rank], before), (
            "transport fault: all_gather() changed this rank's own bytes"
        )
        return gathered

    def abort(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.inner.abort(reason)

    def require_usable(self) -> None:
        """After abort() the rules of a call no longer matter: everything is refused."""
        if self._broken is not None:
            raise ContextBrokenError(f"the transport cannot be used: {self._broken}")

    def close(self) -> None:
        self.inner.close()


class AdversarialExchange(Exchange):
    """One call under suspicion."""

    def __init__(
        self, transport: AdversarialTransport, inner: Exchange, schedule: Schedule, call: int
    ) -> None:
        self.transport, self.inner, self.schedule, self.call = transport, inner, schedule, call
        self.finished = False
        self._own: Tensor | None = None
        self._published: Tensor | None = None
        self._handles: list[AdversarialHandle] = []
        self._slot: Tensor | None = None
        self._sent = 0
        self._taken = 0
        self._unreleased: list[int] = []
        """Steps whose contribution was taken."""

    @property
    def _last(self) -> int:
        return len(self.schedule.steps) - 1

    def _step(self, step: int) -> StepTransfers:
        self.transport.require_usable()
        assert not self.finished, "rule broken: the call is over after finish()"
        assert 1 <= step <= self._last, f"rule broken: step {step} is not in 1..{self._last}"
        self.transport.sleep()
        return self.schedule.steps[step]

    def outbox(self) -> Tensor:
        self.transport.require_usable()
        assert not self.finished, "rule broken: the outbox is the transport's after finish()"
        if self._own is None:
            lent = self.inner.outbox()
            assert lent.dtype == torch.uint8 and tuple(lent.shape) == (self.schedule.own_bytes,), (
                f"transport fault: outbox of {lent.dtype} {tuple(lent.shape)}"
            )
            assert lent.data_ptr() % 128 == 0 or not lent.numel(), "transport fault: not aligned"
            lent.fill_(POISON)
            self._own = poisoned(self.schedule.own_bytes)
        return self._own

    def publish(self) -> None:
        assert self._published is None, "rule broken: publish() comes once a call"
        own = self.outbox()
        self.transport.sleep()
        self.inner.outbox().copy_(own)
        self._published = own.clone()
        self.transport.ledger.publish(self.call, self.transport.rank, own)
        self.inner.publish()

    def fetch(self, step: int) -> Handle:
        transfers = self._step(step)
        assert self._published is not None, "rule broken: publish() comes before the first fetch()"
        due = len(self._handles) + 1
        assert step == due, f"rule broken: fetch({due}) is due, not fetch({step})"
        if step >= 2:
            assert self._handles[step - 2].waited, (
                f"rule broken: fetch({step}) before step {step - 1} was waited for"
            )
        if step >= 3:
            self._handles[step - 3].end()
        if transfers.carry is not None:
            self.transport.ledger.carry(self.call, self.transport.rank, transfers.carry)
        handle = AdversarialHandle(self, self.inner.fetch(step), transfers, step)
        self._handles.append(handle)
        return handle

    def grad_slot(self, step: int) -> Tensor | None:
        out = self._step(step).grad_out
        assert step == self._sent + 1, (
            f"rule broken: grad_slot({self._sent + 1}) is due, not grad_slot({step})"
        )
        lent = self.inner.grad_slot(step)
        assert (lent is None) == (out is None), f"transport fault: grad_slot({step}) gave {lent}"
        if out is None or lent is None:
            return None
        assert lent.numel() == out.nbytes, f"transport fault: slot of {lent.numel()} for {out}"
        lent.fill_(POISON)
        self._slot = poisoned(out.nbytes)
        return self._slot

    def send_grads(self, step: int) -> None:
        out = self._step(step).grad_out
        assert step == self._sent + 1, (
            f"rule broken: send_grads({self._sent + 1}) is due, not send_grads({step})"
        )
        assert self._taken >= step - 2, (
            f"rule broken: contributions({step - 2}) are taken before send_grads({step})"
        )
        assert all(t > step - 2 for t in self._unreleased), (
            f"rule broken: release() what step {step - 2} brought before send_grads({step})"
        )
        if out is not None:
            slot, self._slot = self._slot, None
            assert slot is not None, f"rule broken: grad_slot({step}) comes before send_grads"
            lent = self.inner.grad_slot(step)
            assert lent is not None
            lent.copy_(slot)
            self.transport.ledger.contribute(self.call, out.peer, out.index, slot)
            slot.fill_(POISON)
        self._sent = step
        self.inner.send_grads(step)

    def contributions(self, step: int) -> Iterator[Contribution]:
        coming = self._step(step).grad_in
        assert step == self._taken + 1, (
            f"rule broken: contributions({self._taken + 1}) are due, not contributions({step})"
        )
        assert step <= self._sent, f"rule broken: send_grads({step}) comes before contributions"
        assert len(self._unreleased) < 2, "rule broken: release() every contribution"
        self._taken = step
        count = 0
        for given in self.inner.contributions(step):
            assert coming is not None, f"transport fault: step {step} brings no contribution"
            count += 1
            rank, ledger = self.transport.rank, self.transport.ledger
            want = ledger.contributed(self.call, rank, coming.index)
            what = f"contribution {coming.index} of step {step} to rank {rank}"
            assert given.peer == coming.peer, f"transport fault: {what} came from {given.peer}"
            assert want is not None, f"transport fault: {what} is here but was not sent"
            _same(given.view, want, f"{what} is not what was sent")
            copy = aligned_copy(given.view)
            self._unreleased.append(step)
            yield Contribution(
                given.peer, copy, functools.partial(self._release, step, given, want, copy)
            )
        assert count == (coming is not None), f"transport fault: step {step} lost a contribution"

    def _release(self, step: int, given: Contribution, want: Tensor, copy: Tensor) -> None:
        assert step in self._unreleased, "rule broken: release() comes once a contribution"
        assert step == self._unreleased[0], (
            f"rule broken: the contribution of step {self._unreleased[0]} is released first"
        )
        self.transport.sleep()
        _same(given.view, want, "inbox slot overwritten before release()")
        given.view.fill_(POISON)
        copy.fill_(POISON)
        self._unreleased.pop(0)
        given.release()

    def finish(self) -> None:
        self.transport.require_usable()
        assert not self.finished, "rule broken: finish() comes once a call"
        assert self._published is not None, "rule broken: every rank publishes, also 0 bytes"
        assert len(self._handles) == self._last and all(h.waited for h in self._handles), (
            f"rule broken: {len(self._handles)} of {self._last} steps fetched and waited for"
        )
        moves = [t for t, s in enumerate(self.schedule.steps) if s.grad_in or s.grad_out]
        assert self._sent >= max(moves, default=0), "rule broken: send_grads() in every step"
        assert self._taken >= max(moves, default=0), "rule broken: contributions() in every step"
        assert not self._unreleased, "rule broken: release() every contribution"
        self.transport.sleep()
        for handle in self._handles[-2:]:
            handle.end()
        own = self.outbox()
        _same(own, self._published, "rule broken: the outbox does not change after publish()", "")
        own.fill_(POISON)
        self.finished = True
        self.inner.finish()


class AdversarialHandle(Handle):
    """A fetch under suspicion."""

    def __init__(
        self, exchange: AdversarialExchange, inner: Handle, transfers: StepTransfers, step: int
    ) -> None:
        self._exchange, self._inner, self._transfers = exchange, inner, transfers
        self._step, self.waited = step, False
        self._theirs: Tensor | None = None
        self._want: Tensor | None = None
        self._view: Tensor | None = None

    def wait(self) -> Tensor | None:
        if self.waited:
            return self._view
        transport, receive = self._exchange.transport, self._transfers.receive
        transport.sleep()
        self._theirs = self._inner.wait()
        self.waited = True
        assert (self._theirs is None) == (receive is None), (
            f"transport fault: step {self._step} gave {self._theirs} for {receive}"
        )
        if receive is None or self._theirs is None:
            return None
        what = f"records of rank {receive.peer} in step {self._step}"
        self._want = transport.ledger.expected(self._exchange.call, receive)
        assert self._want is not None, f"transport fault: {what} read before publish()"
        _same(self._theirs, self._want, f"{what} are not what it published")
        self._view = aligned_copy(self._theirs)
        return self._view

    def end(self) -> None:
        """The view's validity ends: it must have held until now, and is poison from here on."""
        if self._theirs is None or self._want is None or self._view is None:
            return
        _same(self._theirs, self._want, f"fetch buffer of step {self._step} overwritten too early")
        receive = self._transfers.receive
        if receive is not None and receive.peer != self._exchange.transport.rank:
            self._theirs.fill_(POISON)  # but not an own copy, which peers may still read
        self._view.fill_(POISON)
        self._theirs = None


def _same(got: Tensor, want: Tensor, what: str, whose: str = "transport fault: ") -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{whose}{what}: {got.numel()} bytes, not {want.numel()}")
    wrong = int((got != want).sum())
    if wrong:
        poison = int(((got == POISON) & (want != POISON)).sum())
        raise AssertionError(f"{whose}{what}: {wrong} of {got.numel()} bytes, {poison} poisoned")


def run_adversarial(
    world: int,
    fn: Callable[[int, Transport, Control], T],
    timeout_s: float = 60.0,
    *,
    seed: int = 0,
    delay_s: float = 0.002,
) -> list[T]:
    """As :func:`ringfa4.comm.local.run_ranks`, with the local transport under suspicion."""
    ledger = Ledger()

    def main(rank: int, transport: Transport, control: Control) -> T:
        suspect = AdversarialTransport(transport, ledger, seed=seed, delay_s=delay_s)
        return fn(rank, suspect, control)

    return run_ranks(world, main, timeout_s)
