"""The local transport keeps the contract, and so does it behind the adversarial double."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transport_contract as contract
from transport_contract import Ending, TransportContract

from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import LocalWorld, run_ranks
from ringfa4.comm.registry import TRANSPORTS, open_transport, transport_factory
from ringfa4.errors import PeerError
from ringfa4.testing.doubles.transport import run_adversarial

Runner = Callable[..., list[Any]]


class InThreads(TransportContract):
    """Ranks are threads; ``runner`` has the signature of run_ranks."""

    runner: Runner

    def run(self, world: int, body: Callable[..., Any], **kwargs: Any) -> list[Any]:
        def main(rank: int, transport: Transport, control: Control) -> Any:
            return body(rank, transport, control, **kwargs)

        return type(self).runner(world, main)

    def endings(
        self, world: int, timeout_s: float, body: Callable[..., Any], **kwargs: Any
    ) -> list[Ending]:
        def main(rank: int, transport: Transport, control: Control) -> Ending:
            try:
                return Ending(body(rank, transport, control, **kwargs))
            except Exception as error:
                return Ending(None, type(error).__name__, str(error))

        return type(self).runner(world, main, timeout_s)

    def run_reopened(self, world: int, times: int, body: Callable[..., Any], **kwargs: Any) -> None:
        def main(rank: int, transport: Transport, control: Control) -> None:
            body(rank, transport, control, **kwargs)
            transport.close()
            control.close()

        before = set(threading.enumerate())
        for _ in range(times):
            type(self).runner(world, main)
        assert set(threading.enumerate()) <= before


class TestLocal(InThreads):
    runner = staticmethod(run_ranks)


class TestAdversarial(InThreads):
    """The double must not find fault with a right transport and a right caller."""

    runner = staticmethod(run_adversarial)
    many_calls = 40


def test_world_of_72() -> None:
    """Every rank reads every other one, backward included."""
    plans = contract.full(72, 256, backward=True)
    run_ranks(72, lambda rank, t, c: contract.make_call(t, c, plans, 0))


def test_first_real_error_is_raised_not_its_echoes() -> None:
    def main(rank: int, transport: Transport, control: Control) -> None:
        if rank == 2:
            raise KeyError("the real one")
        control.gather(b"")

    with pytest.raises(KeyError, match="the real one"):
        run_ranks(4, main, 5.0)


def test_a_rank_that_leaves_without_a_word_is_late() -> None:
    def main(rank: int, transport: Transport, control: Control) -> None:
        if rank == 0:
            control.gather(b"")

    with pytest.raises(PeerError, match=r"rank 1: no answer to message 1 within 0\.2 s"):
        run_ranks(2, main, 0.2)


def test_threads_of_the_ranks_share_the_cores() -> None:
    before = torch.get_num_threads()
    inside = run_ranks(64, lambda rank, transport, control: torch.get_num_threads())
    assert inside == [1] * 64
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("world, timeout_s", [(0, 1.0), (2, 0.0), (2, float("nan"))])
def test_an_impossible_world_is_refused(world: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"world=.*timeout_s="):
        LocalWorld(world, timeout_s)


def test_unknown_transports_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown transport 'carrier-pigeon'") as refused:
        open_transport("carrier-pigeon", None, torch.device("cpu"), 1.0)
    assert all(name in str(refused.value) for name in (*TRANSPORTS, "auto"))


def test_every_name_in_the_table_can_be_loaded_or_says_what_is_missing() -> None:
    for name in TRANSPORTS:
        assert callable(transport_factory(name))


def test_auto_says_what_it_took_and_why() -> None:
    transport, control = open_transport("auto", None, torch.device("cpu"), 1.0)
    assert transport.name == "torch_p2p"
    assert transport.why == ("auto: tensors are on the CPU",)
    control.close()


def test_alone_no_process_group_is_needed() -> None:
    transport, control = open_transport("torch_p2p", None, torch.device("cpu"), 1.0)
    contract.random_calls(0, transport, control, seed=0, calls=3, drift_s=0.0)
    assert control.gather(b"me") == [b"me"]
    transport.close()
    control.close()
