"""torch_p2p over gloo keeps the contract in real processes, and outlives faults of its peers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from distributed.pool import Outcome, RanksFailed, gloo_pool
from transport_contract import LONG_S, Ending, TransportContract


class TestGloo(TransportContract):
    many_calls = 200
    domains = (((0, 1), (2, 3)), ((0,), (2,), (1,)))  # the pools there are

    def run(self, world: int, body: Callable[..., Any], **kwargs: Any) -> list[Any]:
        arguments = {"body": body.__name__, "timeout_s": LONG_S, "kwargs": kwargs}
        with gloo_pool(world) as pool:
            return pool.run("distributed.work_p2p:run_body", arguments)

    def endings(
        self, world: int, timeout_s: float, body: Callable[..., Any], **kwargs: Any
    ) -> list[Ending]:
        arguments = {"body": body.__name__, "timeout_s": timeout_s, "kwargs": kwargs}
        with gloo_pool(world) as pool:  # who learns of a failure by the timeout is still busy then
            outcomes = pool.outcomes(
                "distributed.work_p2p:run_body", arguments, timeout_s=LONG_S / 2
            )
        return [Ending(o.value, o.error, o.message) for o in outcomes]

    def run_reopened(self, world: int, times: int, body: Callable[..., Any], **kwargs: Any) -> None:
        arguments = {"body": body.__name__, "times": times, "kwargs": kwargs}
        with gloo_pool(world) as pool:
            for seen in pool.run("distributed.work_p2p:run_reopened", arguments):
                assert not any(map(operator.gt, seen[-1], seen[2])), (
                    f"threads and open files by cycle: {seen}"
                )


def test_first_operation_of_a_sub_group_completes() -> None:
    with gloo_pool(3) as pool:
        said = pool.run("distributed.work_p2p:first_operation_of_a_sub_group")
    assert said == [[0, 2], [], [0, 2]]


def test_a_process_outside_the_group_is_refused() -> None:
    with gloo_pool(2) as pool:
        inside, outside = pool.run("distributed.work_p2p:not_a_member")
    assert inside == "opened"
    assert "not in the group" in outside


def test_the_caller_may_use_the_group_meanwhile() -> None:
    with gloo_pool(2) as pool:
        assert pool.run("distributed.work_p2p:beside_traffic_of_the_caller") == [0, 1]


@pytest.mark.parametrize("where", ["gather", "mid-call"])
def test_a_killed_peer_is_named(where: str) -> None:
    """As a lost connection, or as what a neighbour saw, and not as late."""
    culprit = 1
    with gloo_pool(3) as pool:
        outcomes = pool.outcomes(
            "distributed.work_p2p:killed", {"culprit": culprit, "where": where}
        )
    assert outcomes[culprit].error == "Killed"
    for outcome in outcomes:
        if outcome.rank != culprit:
            assert outcome.error == "PeerError", outcome
            assert f"rank {culprit}: connection lost" in outcome.message, outcome


def test_a_report_reaches_a_rank_that_waits_for_data() -> None:
    """By polling: the connection it waits on is sound."""
    with gloo_pool(2) as pool:
        said = pool.run("distributed.work_p2p:report_only", {"culprit": 0})
    assert said == ["reported", "rank 0: out of memory (noticed in step 1)"]


def test_who_is_blamed_while_it_waits_says_for_whom() -> None:
    """Rank 2 gives up on rank 0, which itself waits for rank 1."""
    with gloo_pool(3) as pool:
        said = pool.run("distributed.work_p2p:blamed")
    noticed = "(noticed in step 1, waiting for rank 1)"
    assert said == [f"rank 2: rank 0: no K/V records within 1 s {noticed}", "", ""]


def test_no_thread_stays_after_a_failure() -> None:
    """A wait in gloo lasts until its timeout unless the connections are closed."""
    arguments = {
        "body": "failing",
        "timeout_s": LONG_S,
        "kwargs": {"culprit": 1, "where": "after fetch"},
    }
    with gloo_pool(2) as pool:
        assert pool.run("distributed.work_p2p:left_thread_after", arguments) == [[], []]


def test_a_rank_that_never_opens_is_named() -> None:
    with gloo_pool(3) as pool:
        said = pool.run("distributed.work_p2p:missing_at_start", {"timeout_s": 2.0, "culprit": 2})
    assert said[2] == ""
    for message in said[:2]:
        assert message.startswith("PeerError: rank 2: did not open"), message


def test_the_pool_shows_where_a_stuck_rank_stands() -> None:
    with gloo_pool(2) as pool, pytest.raises(RanksFailed, match="work_p2p") as failed:
        pool.run("distributed.work_p2p:stuck", timeout_s=3.0)
    outcomes: list[Outcome] = failed.value.outcomes
    assert [o.error for o in outcomes] == [None, "Timeout"]
    assert "in stuck" in outcomes[1].details


def test_the_pool_shows_every_traceback() -> None:
    with gloo_pool(2) as pool, pytest.raises(RanksFailed, match="1 of 2 ranks failed") as failed:
        pool.run("distributed.work_p2p:fails_on", {"rank": 1})
    assert "rank 1: KeyError: 'deliberate'" in str(failed.value)
    assert "in fails_on" in str(failed.value)
    with gloo_pool(2) as pool:
        assert pool.run("distributed.work_p2p:fails_on", {"rank": 2}) == [None, None]
