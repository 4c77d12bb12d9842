"""What ranks run in tests/distributed/test_p2p.py: the contract's bodies, over the group of a
pool process."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transport_contract as contract

from ringfa4.comm.control import StoreControl, open_control
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.registry import open_transport
from ringfa4.errors import ContextBrokenError, PeerError

CPU = torch.device("cpu")


def opened(timeout_s: float, group: dist.ProcessGroup | None = None) -> tuple[Transport, Control]:
    return open_transport("torch_p2p", group or dist.group.WORLD, CPU, timeout_s)


def run_body(body: str, timeout_s: float, kwargs: dict[str, Any]) -> Any:
    """A body of the contract on a fresh transport."""
    transport, control = opened(timeout_s)
    result = getattr(contract, body)(transport.rank, transport, control, **kwargs)
    transport.close()
    control.close()
    return result


def run_reopened(body: str, times: int, kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    """(threads, open files) after every cycle, and when they are no more than after the third: a
    socket goes when the peer has let go of it too."""

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    seen = []
    for _ in range(times):
        run_body(body, contract.LONG_S, kwargs)
        dist.barrier()
        seen.append(held())
    _wait_while(lambda: any(map(operator.gt, held(), seen[2])))
    return [*seen, held()]


def _wait_while(busy: Callable[[], object]) -> None:
    """20 s at most: what is asked next tells."""
    deadline = time.monotonic() + 20.0
    while busy() and time.monotonic() < deadline:
        time.sleep(0.05)


def first_operation_of_a_sub_group() -> list[int]:
    """Ranks 0 and 2, and nobody else: group ranks are not global ranks."""
    ranks = [0, 2]
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    transport, control = opened(contract.LONG_S, group)
    contract.random_calls(transport.rank, transport, control, seed=3, calls=6, drift_s=0.0)
    said = [int(m) for m in control.gather(str(dist.get_rank()).encode())]
    transport.close()
    control.close()
    return said


def not_a_member() -> str:
    """The message with which a process outside the group is refused."""
    group = dist.new_group([0])
    try:
        transport, control = opened(contract.LONG_S, group)
    except ValueError as error:
        return str(error)
    transport.close()
    control.close()
    return "opened"


def beside_traffic_of_the_caller() -> int:
    """The caller's own messages on the group, with any tag, neither disturb nor are disturbed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport, control = opened(contract.LONG_S)
    peer = (rank + 1) % world
    inbound = torch.zeros(8)
    works = [
        dist.irecv(inbound, (rank - 1) % world, tag=0),
        dist.isend(torch.full((8,), float(rank)), peer, tag=0),
    ]
    contract.random_calls(rank, transport, control, seed=8, calls=5, drift_s=0.0)
    for work in works:
        work.wait()
    assert inbound.tolist() == [float((rank - 1) % world)] * 8
    transport.close()
    control.close()
    return rank


def killed(culprit: int, where: str) -> float:
    """``culprit`` dies by SIGKILL; the others get an error. The returned seconds never come."""
    transport, control = opened(contract.LONG_S)
    rank, world = transport.rank, transport.world
    plans = contract.full(world, 1 << 20, backward=True)
    try:
        contract.make_call(transport, control, plans, 0)
        if rank == culprit and where == "gather":
            os.kill(os.getpid(), signal.SIGKILL)
        control.gather(b"header")
        exchange = transport.open(plans[rank])
        exchange.publish()
        handle = exchange.fetch(1)
        if rank == culprit and where == "mid-call":
            os.kill(os.getpid(), signal.SIGKILL)
        for t in range(1, world):
            handle.wait()
            handle = exchange.fetch(t + 1) if t + 1 < world else handle
            exchange.grad_slot(t)
            exchange.send_grads(t)
            for contribution in exchange.contributions(t):
                contribution.release()
        exchange.finish()
        control.gather(b"next call")
    except Exception as error:
        control.report(f"{type(error).__name__}: {error}")
        transport.abort(str(error))
        raise
    raise AssertionError("nobody noticed")


def left_thread_after(body: str, timeout_s: float, kwargs: dict[str, Any]) -> list[str]:
    """Threads of this body's links that stay after its failure."""
    before = set(threading.enumerate())  # earlier bodies' links, on other groups, may still be open

    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if "link" in t.name and t not in before]

    with contextlib.suppress(Exception):
        run_body(body, timeout_s, kwargs)
    _wait_while(left)
    return left()


def missing_at_start(timeout_s: float, culprit: int) -> str:
    """``culprit`` never opens a transport; the message the others get.

    On a group of its own: one on which ranks disagree about what they opened is lost.
    """
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier()  # the others begin together
    if dist.get_rank() == culprit:
        return ""
    try:
        opened(timeout_s, group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def stuck() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("deliberate")


def reports() -> list[Any]:
    """Ranks 1 and 2 fail one after the other; whom each rank hears of."""
    control = open_control(dist.group.WORLD, contract.LONG_S)
    assert control.failure() is None
    dist.barrier()  # nobody reports before all have looked
    for rank, reason in ((1, "cause é"), (2, "echo")):
        if dist.get_rank() == rank:
            control.report(reason)
        dist.barrier()
    failed = control.failure()
    assert failed is not None
    dist.barrier()
    control.close()
    return list(failed)


def two_channels() -> bool:
    """A failure on one channel of a group leaves another one as it was."""
    broken = open_control(dist.group.WORLD, contract.LONG_S)
    sound = open_control(dist.group.WORLD, contract.LONG_S)
    if dist.get_rank() == 0:
        broken.report("only here")
    dist.barrier()
    untouched = sound.failure() is None and sound.gather(b"x") == [b"x"] * dist.get_world_size()
    broken.close()
    sound.close()
    return untouched


class _LostStore:
    """The store after its host died: every request fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def without_a_store() -> str:
    """Rank 0 fails while nobody can reach the store."""
    control = open_control(dist.group.WORLD, contract.LONG_S)
    assert isinstance(control, StoreControl)
    dist.barrier()
    control._store = _LostStore()
    if dist.get_rank() == 0:
        control.report("nobody will read this")
        control.close()
        return "reported"
    try:
        control.gather(b"")
    except PeerError as error:
        return str(error)
    finally:
        control.close()
    return "nothing happened"


class _SilentStore:
    """Takes questions and never answers: its host is stopped, or the way to it is cut."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.let_go.wait()
        raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        return bool(self.add("", 0))


def _told_in_a_gather(control: Control) -> str:
    """What ended it, reported to the others as well."""
    try:
        control.gather(b"")
    except PeerError as error:
        control.report(str(error))
        return str(error)
    return "it ended well"


def with_a_silent_store() -> str:
    """Rank 0 does not come, and nobody's store answers; what rank 1 is told."""
    control = open_control(dist.group.WORLD, contract.LONG_S)
    assert isinstance(control, StoreControl)
    dist.barrier()
    control._store = store = _SilentStore()
    control.timeout_s = 1.0
    told = "did not come" if dist.get_rank() == 0 else _told_in_a_gather(control)
    dist.barrier()
    control.close()
    store.let_go.set()
    return told


def beside_a_silent_rank() -> str:
    """Rank 1 says nothing and keeps its connections. Rank 0 gives it up and closes its own; rank 2,
    which waits for rank 1 too, hears of it and leaves. What each is told."""
    control = open_control(dist.group.WORLD, contract.LONG_S)
    rank = dist.get_rank()
    if rank == 0:
        control.timeout_s = 0.3
    told = "" if rank == 1 else _told_in_a_gather(control)
    dist.barrier()
    control.close()
    return told


def gather_after_report() -> str:
    control = open_control(dist.group.WORLD, contract.LONG_S)
    control.report("it hurts")
    try:
        control.gather(b"")
    except ContextBrokenError as error:
        return str(error)
    finally:
        control.close()
    return "gathered"


def blamed() -> str:
    """Rank 2 blames rank 0, which waits for the contribution of rank 1; what rank 0 says then."""
    transport, control = opened(contract.LONG_S)
    exchange = transport.open(contract.full(3, 256, backward=True)[transport.rank])
    exchange.publish()
    exchange.fetch(1).wait()
    dist.barrier()
    said = ""
    if transport.rank == 2:
        control.report("rank 0: no K/V records within 1 s")
    if transport.rank == 0:
        exchange.grad_slot(1)
        exchange.send_grads(1)
        try:
            next(exchange.contributions(1))
        except PeerError as error:
            said = str(error)
    dist.barrier()
    transport.abort("it was blamed")
    control.close()
    return said


def report_only(culprit: int) -> str:
    """``culprit`` reports a failure but keeps its data connections; what a rank waiting there
    gets."""
    transport, control = opened(contract.LONG_S)
    exchange = transport.open(contract.full(transport.world, 256, backward=False)[transport.rank])
    exchange.publish()
    if transport.rank == culprit:
        control.report("out of memory")
        dist.barrier()
        transport.abort("out of memory")
        control.close()
        return "reported"
    try:
        exchange.fetch(1).wait()
    except PeerError as error:
        dist.barrier()
        transport.abort(str(error))
        control.close()
        return str(error)
    return "nothing happened"
