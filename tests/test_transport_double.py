"""The suspicious transport catches faulty transports and faulty callers, each by the rule it
breaks.

Every mutant below leaves out one precaution of the local transport. The right transport passes the
same runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transport_contract import carrying, causal, full, make_call, random_calls

from ringfa4.comm.arena import Slots
from ringfa4.comm.interface import Control, Exchange, Schedule, Transport
from ringfa4.comm.local import LocalExchange, LocalTransport, run_ranks
from ringfa4.testing.doubles.transport import POISON, AdversarialTransport, Ledger

Mutant = type[LocalTransport]


class Right(LocalTransport):
    """Nothing is left out."""


class NoBackPressure(LocalTransport):
    """dK/dV are sent although the owner has not released the slot."""

    def open(self, schedule: Schedule) -> Exchange:
        super().open(schedule)
        return _Rushing(self, schedule, self.calls - 1)

    def wait(self, on: int, ready: Any, what: str, **kwargs: Any) -> None:
        if what.startswith("contribution"):  # a later one in its place counts as well
            index = int(what.split()[1])
            super().wait(on, lambda at: at.delivered[index % 2] >= index, what, **kwargs)
        else:
            super().wait(on, ready, what, **kwargs)


class _Rushing(LocalExchange):
    def send_grads(self, step: int) -> None:
        out = self.schedule.steps[step].grad_out
        if out is None:
            return
        owner = self.transport.shared.ranks[out.peer]
        self.transport.wait(out.peer, lambda at: at.opened == self.call, "open")
        owner.inbox.take(out.index, out.nbytes).copy_(self.transport.outgoing.take(0, out.nbytes))
        with owner.changed:
            owner.delivered[out.index % 2] = out.index
            owner.changed.notify_all()


class OneOutbox(LocalTransport):
    """The outbox does not alternate, so the next call overwrites what slow ranks still read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own.outbox = Slots(1, self.device)


class NoBarrier(LocalTransport):
    """A call begins although peers may still read the outbox of the call before the last."""

    def wait(self, on: int, ready: Any, what: str, **kwargs: Any) -> None:
        if not what.startswith("end of call"):
            super().wait(on, ready, what, **kwargs)


class NoPublish(LocalTransport):
    """Records are read whether they were published or not."""

    def wait(self, on: int, ready: Any, what: str, **kwargs: Any) -> None:
        if what == "published records":
            super().wait(on, lambda at: at.opened >= self.calls - 1, what, **kwargs)
        else:
            super().wait(on, ready, what, **kwargs)


class OneFetchBuffer(LocalTransport):
    """A view is overwritten by the next fetch, not by the one after it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fetched = Slots(1, self.device)


class OneInboxSlot(LocalTransport):
    """Both contributions under way go to one slot."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own.inbox = Slots(1, self.device)


class WrongSpans(LocalTransport):
    """Only the first span of a transfer is read, as long as all of them together."""

    def open(self, schedule: Schedule) -> Exchange:
        exchange = super().open(schedule)
        assert isinstance(exchange, LocalExchange)
        steps = tuple(
            s
            if s.receive is None
            else replace(s, receive=replace(s.receive, spans=((0, s.receive.nbytes),)))
            for s in schedule.steps
        )
        exchange.schedule = replace(schedule, steps=steps)
        return exchange


class Deaf(LocalTransport):
    """all_gather returns the same bytes for every rank."""

    def all_gather(self, local: torch.Tensor, sizes: Any) -> list[torch.Tensor]:
        parts = super().all_gather(local, sizes)
        return [parts[0].clone() for _ in parts]


class NoReaders(LocalTransport):
    """A copy is written over although peers may still read it."""

    def wait(self, on: int, ready: Any, what: str, **kwargs: Any) -> None:
        if not what.startswith("reader of the copy"):
            super().wait(on, ready, what, **kwargs)


class EarlyCopy(LocalTransport):
    """A copy is read although it has not been carried."""

    def wait(self, on: int, ready: Any, what: str, **kwargs: Any) -> None:
        if not what.startswith("copy of lap"):
            super().wait(on, ready, what, **kwargs)


class OneCopy(LocalTransport):
    """The next lap's copy comes in over this lap's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own.copies = Slots(1, self.device)


def suspect(
    mutant: Mutant, world: int, fn: Callable[[int, Transport, Control], Any], seed: int
) -> list[Any]:
    ledger = Ledger()

    def main(rank: int, transport: LocalTransport, control: Control) -> Any:
        inner = mutant(transport.shared, rank)
        return fn(rank, AdversarialTransport(inner, ledger, seed=seed), control)

    return run_ranks(world, main, 10.0)


def crowded(rank: int, transport: Transport, control: Control) -> None:
    """Many contributions a call, and ranks that nothing but the transport holds together."""
    for call in range(6):
        make_call(transport, control, full(5, 4096, backward=True), call, agree=False)


def carried(rank: int, transport: Transport, control: Control) -> None:
    """Copies that are used again within a call, and peers that are slow to read them."""
    domains = ((0, 1), (2, 3), (4, 5), (6, 7))
    for call in range(4):
        plans = carrying(domains, 2048, backward=False)
        pace = (lambda: time.sleep(0.002)) if rank % 2 else (lambda: None)
        make_call(transport, control, plans, call, agree=False, pace=pace)


def runaway(rank: int, transport: Transport, control: Control) -> None:
    """Under a causal mask rank 0 waits for nobody: only the transport keeps it from running
    ahead."""
    for call in range(12):
        plans = causal(3, 4096, backward=False)
        pace = (lambda: time.sleep(0.002)) if rank else (lambda: None)
        make_call(transport, control, plans, call, agree=False, pace=pace)


def several_spans(rank: int, transport: Transport, control: Control) -> None:
    random_calls(rank, transport, control, seed=0, calls=12, drift_s=0.0)


def shared_bytes(rank: int, transport: Transport, control: Control) -> None:
    local = torch.full((4,), rank, dtype=torch.uint8)
    transport.all_gather(local, [4] * transport.world)


FAULTS = [
    (NoBackPressure, crowded, 5, "contribution|inbox slot"),
    (OneInboxSlot, crowded, 5, "contribution|inbox slot"),
    (OneFetchBuffer, crowded, 5, "fetch buffer of step . overwritten too early"),
    (OneOutbox, runaway, 3, "are not what it published"),
    (NoBarrier, runaway, 3, "are not what it published|read before publish"),
    (NoPublish, crowded, 5, "read before publish|are not what it published"),
    (WrongSpans, several_spans, 3, "are not what it published"),
    (Deaf, shared_bytes, 3, "own bytes"),
    (NoReaders, carried, 8, "are not what it published"),
    (EarlyCopy, carried, 8, "are not what it published|read before publish"),
    (OneCopy, carried, 8, "are not what it published|overwritten too early"),
]


@pytest.mark.parametrize("mutant, body, world, rule", FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_faulty_transport_is_caught(
    mutant: Mutant, body: Callable[..., None], world: int, rule: str
) -> None:
    with pytest.raises(AssertionError, match=f"transport fault: .*({rule})"):
        for seed in range(20):
            suspect(mutant, world, body, seed)


@pytest.mark.parametrize(
    "body, world", sorted({(f[1], f[2]) for f in FAULTS}, key=lambda f: f[0].__name__)
)
def test_the_right_transport_passes_the_same_runs(body: Callable[..., None], world: int) -> None:
    for seed in range(3):
        suspect(Right, world, body, seed)


# ------------------------------------------------------------------ callers that break the protocol


def _one_step(ex: Exchange, step: int) -> None:
    ex.fetch(step).wait()
    ex.grad_slot(step)
    ex.send_grads(step)


def obey(ex: Exchange) -> None:
    ex.publish()
    for step in (1, 2, 3):
        _one_step(ex, step)
        for contribution in ex.contributions(step):
            contribution.release()
    ex.finish()


def caller(fn: Callable[[Exchange, Schedule, Transport], None]) -> None:
    """``fn`` on rank 0 of a right transport of world 4; the others make their call properly."""
    plans = full(4, 64, backward=True)

    def main(rank: int, transport: Transport, control: Control) -> None:
        if rank:
            obey(transport.open(plans[rank]))
        else:
            fn(transport.open(plans[0]), plans[0], transport)

    suspect(Right, 4, main, seed=0)


def skips_a_fetch(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(2)


def fetches_too_far_ahead(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(1)
    ex.fetch(2)


def fetches_before_publishing(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.fetch(1)


def publishes_twice(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.publish()


def sends_out_of_order(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(1).wait()
    ex.send_grads(2)


def sends_without_a_slot(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(1).wait()
    ex.send_grads(1)


def takes_before_sending(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(1).wait()
    next(ex.contributions(1))


def keeps_a_contribution(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    """For longer than the inbox has room."""
    ex.publish()
    for step in (1, 2, 3):
        _one_step(ex, step)
        list(ex.contributions(step))


def finishes_with_a_contribution(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    for step in (1, 2, 3):
        _one_step(ex, step)
        for contribution in ex.contributions(step):
            if step < 3:
                contribution.release()
    ex.finish()


def releases_the_second_first(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    held = []
    for step in (1, 2):
        _one_step(ex, step)
        held += ex.contributions(step)
    held[1].release()


def releases_twice(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    _one_step(ex, 1)
    for contribution in ex.contributions(1):
        contribution.release()
        contribution.release()


def finishes_early(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.fetch(1).wait()
    ex.finish()


def leaves_contributions(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    for step in (1, 2, 3):
        _one_step(ex, step)
        if step < 3:
            for contribution in ex.contributions(step):
                contribution.release()
    ex.finish()


def opens_without_finishing(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    transport.open(schedule)


def gathers_inside_a_call(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    transport.all_gather(torch.zeros(1, dtype=torch.uint8), [1] * 4)


def writes_after_publishing(ex: Exchange, schedule: Schedule, transport: Transport) -> None:
    ex.publish()
    ex.outbox()[0] += 1
    for step in (1, 2, 3):
        _one_step(ex, step)
        for contribution in ex.contributions(step):
            contribution.release()
    ex.finish()


MISUSES = [
    (skips_a_fetch, r"fetch\(1\) is due, not fetch\(2\)"),
    (fetches_too_far_ahead, r"fetch\(2\) before step 1 was waited for"),
    (fetches_before_publishing, r"publish\(\) comes before the first fetch"),
    (publishes_twice, r"publish\(\) comes once"),
    (sends_out_of_order, r"send_grads\(1\) is due, not send_grads\(2\)"),
    (sends_without_a_slot, r"grad_slot\(1\) comes before send_grads"),
    (takes_before_sending, r"send_grads\(1\) comes before contributions"),
    (keeps_a_contribution, r"release\(\) what step 1 brought before send_grads\(3\)"),
    (finishes_with_a_contribution, r"release\(\) every contribution"),
    (releases_the_second_first, r"the contribution of step 1 is released first"),
    (releases_twice, r"release\(\) comes once"),
    (finishes_early, r"1 of 3 steps fetched"),
    (leaves_contributions, r"contributions\(\) in every step"),
    (opens_without_finishing, r"finish\(\) ends a call before the next open"),
    (gathers_inside_a_call, r"all_gather\(\) is called outside an exchange"),
    (writes_after_publishing, r"the outbox does not change after publish"),
]


@pytest.mark.parametrize("misuse, rule", MISUSES, ids=[m[0].__name__ for m in MISUSES])
def test_a_caller_that_breaks_a_rule_is_told_which(
    misuse: Callable[[Exchange, Schedule, Transport], None], rule: str
) -> None:
    with pytest.raises(AssertionError, match=f"rule broken: .*{rule}"):
        caller(misuse)


def test_buffers_are_poison_outside_their_validity() -> None:
    """0xFF is NaN in fp32, bf16, fp16 and e4m3: a value that is used too early or late shows."""
    plans = full(4, 64, backward=True)

    def main(rank: int, transport: Transport, control: Control) -> None:
        ex = transport.open(plans[rank])
        assert (ex.outbox() == POISON).all()
        ex.outbox().zero_()
        ex.publish()
        views, taken = [], []
        for step in (1, 2, 3):
            views.append(ex.fetch(step).wait())
            slot = ex.grad_slot(step)
            assert (slot == POISON).all()
            slot.zero_()
            ex.send_grads(step)
            assert (slot == POISON).all(), "the slot is the transport's once it is sent"
            for contribution in ex.contributions(step):
                assert not contribution.view.any()
                contribution.release()
                taken.append(contribution.view)
        assert (views[0] == POISON).all(), "valid until fetch(3)"
        assert not views[1].any() and not views[2].any()
        assert all((view == POISON).all() for view in taken)
        outbox = ex.outbox()
        ex.finish()
        assert (outbox == POISON).all()

    suspect(Right, 4, main, seed=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        poison = torch.full((4,), POISON, dtype=torch.uint8).view(dtype)
        assert poison.float().isnan().all()
