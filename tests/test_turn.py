"""Virtual ranks on one GPU work in turn: from their agreement on, until they have to wait.

Threads of the CPU stand for the ranks, lanes of the CPU for streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transport_contract as contract
from fake_streams import Done, HostLane, event_transport
from transport_contract import LONG_S

from ringfa4 import ContextParallel
from ringfa4.comm.cuda_local import EventSignals, SharedSpace
from ringfa4.comm.interface import Control
from ringfa4.comm.local import LocalControl, LocalTransport, LocalWorld, run_ranks
from ringfa4.comm.turn import Turn
from ringfa4.context import Context
from ringfa4.errors import ContextBrokenError, PeerError
from ringfa4.ring import forward


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on without the turn because a machine is slow."""
    monkeypatch.setattr("ringfa4.comm.local.TURN_POLL_S", 10.0)


def in_turn(ranks: int, fn: Callable[[int, LocalControl, Turn], Any]) -> list[Any]:
    """``fn(rank, control, turn)`` in threads."""
    world, turn = LocalWorld(ranks, LONG_S), Turn(ranks)
    world.turn = turn
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(fn, rank, world.control(rank), turn) for rank in range(ranks)]
        return [future.result(LONG_S) for future in futures]


def until_waiting(turn: Turn, *ranks: int) -> None:
    deadline = time.monotonic() + LONG_S
    while not turn._waiting.keys() >= set(ranks):
        assert time.monotonic() < deadline, f"{ranks} do not wait"
        time.sleep(0.001)


def test_the_turn_passes_over_who_is_not_ready() -> None:
    turn, events, order = Turn(3), set[int](), list[int]()

    def rank(number: int) -> None:
        while not turn.take(number, 5.0, lambda: number in events):
            pass
        order.append(number)
        turn.give_up(number)

    assert turn.take(0, 0.0)
    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    until_waiting(turn, 1, 2)
    events.add(2)
    turn.give_up(0)  # to 2, though 1 is the next
    threads[1].join(5.0)
    assert (order, turn.holder) == ([2], None)
    events.add(1)
    turn.changed(0)  # nobody has it, and 1 sleeps
    threads[0].join(1.0)
    assert (order, turn.holder) == ([2, 1], None)


# ---- agreements ---------------------------------------------------------------------------------


def test_ranks_come_out_of_an_agreement_in_turn(patient: None) -> None:
    """Who comes last goes first; the others follow upwards, each when the one before lets it."""
    order = []

    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 2:
            until_waiting(turn, 0, 1, 3)
        said = control.gather_to_open(b"%d" % number)
        assert (said, turn.holder) == ([b"0", b"1", b"2", b"3"], number)
        order.append(number)
        control.decline()

    in_turn(4, rank)
    assert order == [2, 3, 0, 1]


def test_who_is_passed_by_the_last_one_waits_for_the_turn(patient: None) -> None:
    """Rank 1 comes last just when rank 0 has spoken and is about to sleep."""
    spoken, held = threading.Event(), threading.Event()

    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 1:
            assert spoken.wait(LONG_S)
            control.gather_to_open(b"")
            held.set()
            until_waiting(turn, 0)
            control.decline()
            return
        say = control._say

        def say_and_be_passed(message: bytes) -> dict[int, bytes]:
            said = say(message)
            spoken.set()
            assert held.wait(LONG_S)
            return said

        control._say = say_and_be_passed  # type: ignore[method-assign]
        control.gather_to_open(b"")
        assert turn.holder == 0

    in_turn(2, rank)


def test_who_only_gathers_lets_those_go_who_want_the_turn(patient: None) -> None:
    """Rank 1 has bad input, say, and opens nothing."""

    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 1:
            until_waiting(turn, 0)
            assert control.gather(b"") == [b"", b""]
            return
        control.gather_to_open(b"")
        assert turn.holder == 0

    in_turn(2, rank)


def test_nobody_sleeps_with_the_turn(patient: None) -> None:
    """Rank 0 has it and waits for rank 1, which is not out of the agreement."""

    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 0:
            until_waiting(turn, 1)
        control.gather_to_open(b"")
        assert turn.holder == number
        control.gather(b"grow")

    in_turn(2, rank)


def test_an_agreement_that_fails_gives_the_turn_back(patient: None) -> None:
    """And the context stays usable."""

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        context = Context(event_transport(local.shared, rank), control)
        turn = local.shared.turn
        assert turn is not None
        bad = ValueError("no such head") if rank == 1 else None
        for about, error in (({}, bad), ({"rank": rank}, None)):
            with pytest.raises(ValueError, match=r"rank 1: no such head|disagree about rank"):
                context.agree(about, error=error, opens=True)
            assert turn.holder != rank
        context.agree({}, opens=True)
        assert turn.holder == rank
        control.decline()

    run_ranks(3, main, LONG_S)


def test_what_all_have_said_is_heard_though_one_failed_since() -> None:
    """Rank 0 fails with the turn: rank 1 knows what was agreed, and hears of it when it opens."""
    heard = threading.Event()

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        transport, plans = event_transport(local.shared, rank), contract.full(2, 64, backward=False)
        contract.make_call(transport, control, plans, 0)
        turn = local.shared.turn
        assert turn is not None
        if rank == 0:
            until_waiting(turn, 1)
        assert control.gather_to_open(b"%d" % rank) == [b"0", b"1"]
        if rank == 0:
            control.report("out of memory")
            assert heard.wait(LONG_S) and turn.holder == 0
            return
        with pytest.raises(PeerError, match="rank 0: out of memory"):
            transport.open(plans[rank])
        heard.set()

    run_ranks(2, main, LONG_S)


def test_an_agreement_names_who_is_late() -> None:
    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 1:
            return
        control.timeout_s = 0.2
        with pytest.raises(PeerError, match=r"rank 1: no answer to message 1 within 0\.2 s"):
            control.gather_to_open(b"")
        assert (turn.holder, turn._waiting) == (None, {})

    in_turn(2, rank)


def test_an_agreement_ends_when_a_peer_fails() -> None:
    def rank(number: int, control: LocalControl, turn: Turn) -> None:
        if number == 2:
            until_waiting(turn, 0)
            control.report("out of memory")
        if number == 0:
            with pytest.raises(PeerError, match="rank 2: out of memory") as told:
                control.gather_to_open(b"")
            assert (told.value.rank, told.value.awaited) == (2, 1)

    in_turn(3, rank)


def test_a_call_begins_at_once_with_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SharedSpace(LocalWorld(2, LONG_S))
    signals = EventSignals(space, 0)
    assert space.turn.take(0, 0.0)

    def never(*arguments: object) -> bool:
        raise AssertionError("it waits for what it has")

    monkeypatch.setattr(space.turn, "take", never)
    signals.begin()
    assert space.turn.holder == 0


# ---- the executor -------------------------------------------------------------------------------


class Turns:
    """Observer: who had the turn since when, as each span began."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self.seen = turn, dict[tuple[str, int], tuple[int | None, float]]()

    @contextmanager
    def span(self, kind: str, step: int) -> Iterator[None]:
        self.seen[kind, step] = self._turn.holder, self._turn.since
        yield


def test_a_rank_computes_on_its_own_keys_before_it_waits(patient: None) -> None:
    """One turn from the agreement to the first kernel, on every rank; also on the first, whose
    peers have not published.
    """

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        context = Context(event_transport(local.shared, rank), control)
        cp = ContextParallel(context, seq_len=4 * 32, kernel="reference")
        q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
        ring, turn = cp.problem.ring(q, k, v, backward=False), local.shared.turn
        assert turn is not None
        for call in range(4):
            turns = Turns(turn)
            forward(ring, q, k, v, scale=1.0, observer=turns)
            assert turns.seen["encode", 0][0] == rank
            if call > 0:  # the first one lets all grow their arenas
                assert turns.seen["compute", 0] == turns.seen["encode", 0]

    run_ranks(4, main, LONG_S)


# ---- pulls that begin when they are waited for --------------------------------------------------


class Numbered(HostLane):
    """A current lane whose marks are kept."""

    def __init__(self) -> None:
        self.marks: list[Done] = []

    def record(self) -> Done:
        self.marks.append(Done(reached=True))
        return self.marks[-1]


def test_a_fetch_does_not_wait_for_the_peer_to_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``wait`` does, and the pull then begins where it would have: before what was computed
    meanwhile.
    """
    opened, fetched = threading.Event(), threading.Event()
    plans, bytes_of = contract.full(2, 1024, backward=False), [3, 5]

    def main(rank: int, local: LocalTransport, control: Control) -> None:
        transport, here = event_transport(local.shared, rank), Numbered()
        contract.make_call(transport, control, plans, 0)
        monkeypatch.setattr(transport.engine, "current", lambda: here)
        if rank == 1:
            assert opened.wait(LONG_S)
        exchange = transport.open(plans[rank])  # rank 1: not before rank 0 waits
        opened.set()
        assert rank == 0 or fetched.is_set()
        exchange.outbox().fill_(bytes_of[rank])
        exchange.publish()
        awaited = list[Any]()
        monkeypatch.setattr(transport.pull, "after", awaited.append)
        handle = exchange.fetch(1)
        fetched.set()
        assert bool(awaited) == (rank == 1), "rank 1 finds what it reads and begins"
        begun = here.marks[-1]
        here.record()
        view = handle.wait()
        assert view is not None and handle.wait() is view
        assert view.tolist() == [bytes_of[1 - rank]] * 1024
        assert awaited[0] is begun and len(awaited) == 2, "then for the peer's publication"
        exchange.finish()

    run_ranks(2, main, LONG_S)


def test_a_fetch_that_did_not_begin_ends_with_its_transport() -> None:
    def main(rank: int, local: LocalTransport, control: Control) -> None:
        transport, plans = event_transport(local.shared, rank), contract.full(2, 64, backward=False)
        contract.make_call(transport, control, plans, 0)
        if rank == 0:
            exchange = transport.open(plans[rank])
            exchange.publish()
            handle = exchange.fetch(1)
            transport.abort("changed its mind")
            with pytest.raises(ContextBrokenError, match="changed its mind"):
                handle.wait()
            assert local.shared.turn is not None and local.shared.turn.holder is None

    run_ranks(2, main, LONG_S)
