"""The pull protocol keeps the transport contract, on lanes that are threads and late at random.

Two ways of signalling run: events, as for virtual ranks on one GPU, and words in memory with a
watchdog, as for NVSHMEM and torch symmetric memory. Only copies and waits are the CPU's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transport_contract as contract
from fake_streams import Done, event_transport, word_transport
from rings import Case, run
from test_transports import InThreads

from ringfa4.comm import signals
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.lanes import Flag
from ringfa4.comm.local import LocalTransport, LocalWorld, run_ranks
from ringfa4.comm.pull import PullTransport
from ringfa4.context import Context
from ringfa4.errors import ContextBrokenError, PeerError
from ringfa4.mask import causal

Maker = Callable[..., PullTransport]


def runner(make: Maker, late_s: float) -> Callable[..., list[Any]]:
    """run_ranks over ``make``'s transports."""

    def run_them(
        world: int, fn: Callable[[int, Transport, Control], Any], timeout_s: float = 60.0
    ) -> list[Any]:
        def main(rank: int, local: LocalTransport, control: Control) -> Any:
            transport = make(local.shared, rank, late_s)
            try:
                return fn(rank, transport, control)
            except BaseException as error:
                transport.abort(f"{type(error).__name__}: {error}")
                raise

        return run_ranks(world, main, timeout_s)

    return run_them


def over(run_them: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As ``rings.ranks``, on the ranks that ``run_them`` runs."""

    def ranks(world: int, fn: Callable[[Context], Any]) -> list[Any]:
        return run_them(world, lambda rank, transport, control: fn(Context(transport, control)))

    return ranks


class PullContract(InThreads):
    many_calls = 10

    def run_reopened(self, world: int, times: int, body: Callable[..., Any], **kwargs: Any) -> None:
        """Lanes end a moment after their transport, so they are waited for."""

        def main(rank: int, transport: Transport, control: Control) -> None:
            body(rank, transport, control, **kwargs)
            transport.close()

        before = set(threading.enumerate())
        for _ in range(times):
            type(self).runner(world, main)
        deadline = time.monotonic() + contract.LONG_S
        for thread in set(threading.enumerate()) - before:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert set(threading.enumerate()) <= before


class TestEvents(PullContract):
    impatience = ("open", 2.0)  # who is late keeps the turn: no other rank opens

    runner = staticmethod(runner(event_transport, 0.004))


class TestWords(PullContract):
    runner = staticmethod(runner(word_transport, 0.004))


@pytest.mark.parametrize("make", [event_transport, word_transport])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_late_copies_leave_the_ring_bit_identical(make: Maker, world: int) -> None:
    case = Case(mask=causal(256 * world), world=world, heads=(2, 1), dims=(16, 16))
    want = run(case)
    for late_s in (0.0, 0.005):
        got = run(case, over(runner(make, late_s)))
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_lost_peer_poisons_the_call_and_breaks_the_next() -> None:
    """The waits pass, what was to be read is NaN, and the error names who was missing."""
    told = threading.Event()

    def main(rank: int, local: LocalTransport, control: Control) -> tuple[bool, str]:
        transport = word_transport(local.shared, rank)
        plans = contract.full(2, 1024, backward=False)
        for call in range(2):
            contract.make_call(transport, control, plans, call)
        exchange = transport.open(plans[rank])
        if rank == 1:  # never publishes
            assert told.wait(contract.LONG_S)
            transport.abort("asleep")
            return True, ""
        control.timeout_s = 0.3
        exchange.publish()
        handle = exchange.fetch(1)
        view = handle._view
        assert view is not None and handle._mark is not None
        while not handle._mark.query():
            time.sleep(0.01)
        with pytest.raises(PeerError, match=r"rank 1: no published records within") as lost:
            handle.wait()
        with pytest.raises(ContextBrokenError):
            exchange.finish()
        told.set()
        return bool(torch.isnan(view.view(torch.bfloat16)).all()), str(lost.value)

    all_nan, message = run_ranks(2, main, contract.LONG_S)[0]
    assert all_nan and "step 1" in message


@pytest.mark.parametrize("what", ["close", "grow"])
def test_a_call_that_was_let_pass_does_not_end_well(what: str) -> None:
    """The lanes of rank 0 are empty, for its watchdog let them pass; nothing else has told it."""
    told = threading.Event()

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        transport = word_transport(local.shared, rank)
        plans = contract.full(2, 1024, backward=False)
        contract.make_call(transport, control, plans, 0)
        exchange = transport.open(plans[rank])
        if rank == 1:
            assert told.wait(contract.LONG_S)
            assert (control.failure() is not None) == (what == "close"), "the context reports it"
            transport.abort("asleep")
            return
        control.timeout_s = 0.3
        exchange.publish()
        mark = exchange.fetch(1)._mark  # type: ignore[attr-defined]
        exchange.finish()
        while not mark.query():
            time.sleep(0.01)
        control.timeout_s = contract.LONG_S
        larger = contract.full(2, 4096, backward=False)[rank]
        with pytest.raises(PeerError, match=r"rank 1: no published records within 0\.3 s"):
            Context(transport, control).close() if what == "close" else transport.open(larger)
        told.set()

    run_ranks(2, main, contract.LONG_S)


def test_a_peer_that_does_not_carry_poisons_what_is_read_from_it() -> None:
    """Rank 1 publishes and then carries nothing: rank 0, which reads its copy, gets NaN, and the
    error names rank 1.
    """
    all_published, told = threading.Barrier(4, timeout=contract.LONG_S), threading.Event()

    def main(rank: int, local: LocalTransport, control: Control) -> tuple[bool, str]:
        transport = word_transport(local.shared, rank)
        plans = contract.carrying(((0, 1), (2, 3)), 512, backward=False)
        for call in range(2):
            contract.make_call(transport, control, plans, call)
        exchange = transport.open(plans[rank])
        exchange.outbox().zero_()
        exchange.publish()
        all_published.wait()
        for t in (1, 2) if rank != 1 else ():
            exchange.fetch(t).wait()
        if rank:
            assert told.wait(contract.LONG_S)
            transport.abort("done")
            return True, ""
        control.timeout_s = 0.3
        handle = exchange.fetch(3)
        view = handle._view
        assert view is not None and handle._mark is not None
        while not handle._mark.query():
            time.sleep(0.01)
        with pytest.raises(PeerError, match=r"rank 1: no copy of lap 1 within") as lost:
            handle.wait()
        told.set()
        return bool(torch.isnan(view.view(torch.bfloat16)).all()), str(lost.value)

    all_nan, message = run_ranks(4, main, contract.LONG_S)[0]
    assert all_nan and "step 3" in message


@pytest.mark.parametrize("make", [LocalWorld.transport, event_transport, word_transport])
def test_who_is_blamed_while_it_waits_says_for_whom(make: Callable[..., Transport]) -> None:
    """Rank 2 gives up on rank 0, which itself waits for rank 1."""

    def main(rank: int, local: LocalTransport, control: Control) -> PeerError | None:
        transport, plans = make(local.shared, rank), contract.full(3, 1024, backward=False)
        contract.make_call(transport, control, plans, 0)
        if rank == 1:
            contract.oversleep(control)
            return None
        exchange = transport.open(plans[rank])
        exchange.publish()
        if rank == 2:
            exchange.finish()
            control.report("rank 0: no K/V records within 1 s")
            return None
        exchange.fetch(1).wait()
        with pytest.raises(PeerError) as told:
            exchange.fetch(2).wait()
            exchange.finish()
        return told.value

    told = run_ranks(3, main, contract.LONG_S)[0]
    assert (told.rank, told.step, told.awaited) == (2, 2, 1)
    noticed = "(noticed in step 2, waiting for rank 1)"
    assert str(told) == f"rank 2: rank 0: no K/V records within 1 s {noticed}"


@pytest.mark.parametrize("forgotten", list(Flag))
def test_each_flag_is_needed(forgotten: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for any one of the flags, bytes arrive wrong: the contract sees it."""
    real = PullTransport.wait

    def careless(self: PullTransport, lane: Any, flag: Flag, *rest: Any) -> None:
        if flag is not forgotten:
            real(self, lane, flag, *rest)

    plans = contract.full(5, 1024, backward=True)
    if forgotten in (Flag.CARRIED, Flag.READ):
        plans = contract.carrying(((0, 1), (2, 3), (4, 5), (6, 7)), 2048, backward=False)

    def calls(rank: int, transport: Transport, control: Control) -> None:
        for call in range(15):
            pace = contract.drifting(rank, call, 0.01)
            contract.make_call(transport, control, plans, call, pace=pace, agree=False)

    runner(word_transport, 0.01)(len(plans), calls, contract.LONG_S)
    monkeypatch.setattr(PullTransport, "wait", careless)
    with pytest.raises(AssertionError):
        runner(word_transport, 0.01)(len(plans), calls, contract.LONG_S)


def test_a_device_that_takes_no_work_for_a_lost_peer_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All queues wait: what would end that never starts, and who synchronises would hang."""
    ended, over = list[str](), threading.Event()
    monkeypatch.setattr(signals.stuck, "STUCK_S", 0.05)
    monkeypatch.setattr(
        signals.stuck, "end_process", lambda words: (ended.append(words), over.set())
    )

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        control.timeout_s = 0.05
        transport = word_transport(local.shared, rank)
        engine = transport.engine
        held = threading.Event()
        if rank == 1:
            side = engine.side()
            side.after(Held(held))  # type: ignore[arg-type]
            monkeypatch.setattr(engine, "side", lambda: side)
        transport.abort("the peer is gone")
        if rank == 1:
            assert over.wait(contract.LONG_S)
            assert len(ended) == 1 and "rank 1 ends" in ended[0]
        held.set()

    run_ranks(2, main, contract.LONG_S)


class Held(Done):
    """A mark that the test reaches."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event
