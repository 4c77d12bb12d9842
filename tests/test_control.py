"""The control channels: agreement and failures, alone, between threads and between processes.

What every channel does is in the transport contract (messages, failures, late ranks); here is what
the store-based one does on its own.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from distributed.pool import gloo_pool
from transport_contract import LONG_S

from ringfa4.comm.asker import Asker
from ringfa4.comm.control import SoloControl, open_control
from ringfa4.comm.interface import MESSAGE_BYTES
from ringfa4.comm.local import LocalWorld, run_ranks
from ringfa4.errors import PeerError


def test_alone_there_is_nobody_to_fail() -> None:
    control = open_control(None, 1.0)
    assert isinstance(control, SoloControl)
    assert (control.rank, control.world) == (0, 1)
    assert control.gather(b"x") == [b"x"]
    control.report("nobody hears this")
    assert control.failure() is None
    with pytest.raises(ValueError, match=f"{MESSAGE_BYTES=}"):
        control.gather(b"x" * (MESSAGE_BYTES + 1))
    control.close()
    control.close()


def test_the_first_failure_in_time_counts_and_never_ones_own() -> None:
    world = LocalWorld(3, 1.0)
    first, second, third = (world.control(rank) for rank in range(3))
    second.report("cause")
    third.report("echo")
    assert first.failure() == (1, "cause")
    assert second.failure() == (2, "echo")
    assert third.failure() == (1, "cause")


def test_a_report_wakes_who_waits() -> None:
    """Long before the timeout, or this test would not end in time."""

    def main(rank, transport, control):
        if rank == 0:
            control.report("cannot go on")
            return
        with pytest.raises(PeerError, match="rank 0: cannot go on") as error:
            control.gather(b"")
        assert (error.value.rank, error.value.reason) == (0, "cannot go on")

    run_ranks(3, main, timeout_s=3600.0)


def test_the_first_failure_counts_between_processes() -> None:
    with gloo_pool(3) as pool:
        seen = pool.run("distributed.work_p2p:reports")
    assert seen == [[1, "cause é"], [2, "echo"], [1, "cause é"]]


def test_channels_of_one_group_do_not_hear_each_other() -> None:
    with gloo_pool(2) as pool:
        assert pool.run("distributed.work_p2p:two_channels") == [True, True]


def test_a_lost_store_does_not_hide_a_failure() -> None:
    """The broken connection tells that the peer is gone, though its reason is lost with the
    store."""
    with gloo_pool(2) as pool:
        said = pool.run("distributed.work_p2p:without_a_store")
    assert said[0] == "reported"
    assert said[1].startswith("rank 0: connection lost"), said


def test_a_store_that_never_answers_does_not_keep_anybody() -> None:
    """Waits still end after their timeout."""
    with gloo_pool(2) as pool:
        said = pool.run("distributed.work_p2p:with_a_silent_store")
    assert said[0] == "did not come"
    assert said[1].startswith("rank 0: no answer to message 1 within 1 s"), said


def test_who_hears_of_a_failure_leaves_at_once() -> None:
    """Though the rank it waits for is silent, and the next one's connection is closed already."""
    with gloo_pool(3) as pool:
        said = pool.run("distributed.work_p2p:beside_a_silent_rank", timeout_s=LONG_S / 2)
    late = "rank 1: no answer to message 1 within 0.3 s"
    assert said[:2] == [late, ""]
    assert said[2].startswith(f"rank 0: {late}"), said


def test_a_broken_channel_refuses() -> None:
    with gloo_pool(2) as pool:
        said = pool.run("distributed.work_p2p:gather_after_report")
    assert all("it hurts" in message for message in said), said


# ---- questions to a store -----------------------------------------------------------------------


def test_an_asker_gives_answers_and_forgets_errors() -> None:
    asker = Asker(10.0)

    def lost() -> int:
        raise RuntimeError("Broken pipe")

    assert (asker.ask(lambda: 3), asker.ask(lost), asker.ask(lambda: 4)) == (3, None, 4)
    thread = asker._thread
    assert thread is not None and thread.is_alive()
    asker.close()
    asker.close()
    assert not thread.is_alive()


def test_a_question_that_was_answered_keeps_nobody() -> None:
    """Who asks owns the asker: in a circle, its connections would stay open until a collection."""

    class Curious:
        def __init__(self) -> None:
            self.asker = Asker(10.0)

        def wonder(self) -> int:
            return 3

    curious = Curious()
    assert curious.asker.ask(curious.wonder) == 3
    gone = weakref.ref(curious)
    curious.asker.close()
    gc.disable()
    try:
        del curious
        assert gone() is None
    finally:
        gc.enable()


def test_an_unanswered_question_costs_its_patience_once() -> None:
    """The second question would wait for ever, if it were asked or waited for."""
    asker, let_go = Asker(0.05), threading.Event()
    assert asker.ask(let_go.wait) is None
    asker.patience_s = 3600.0
    asked = []
    assert asker.ask(lambda: asked.append(1)) is None
    assert asked == []
    let_go.set()
    while asker.ask(lambda: True) is None:
        assert asked == []
    asker.close()
