"""What every transport must do: the contract suite of ringfa4.comm.interface.

Subclass :class:`TransportContract`, say how ranks are run, and every test here runs on that
transport. The bodies are plain functions of (rank, transport, control, **plain data), so that they
can run in threads and in processes.

Bytes are functions of (call, rank, step): every rank knows what it must receive without being told.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.comm.interface import (
    MESSAGE_BYTES,
    Control,
    Exchange,
    GradTransfer,
    Schedule,
    StepTransfers,
    Transfer,
    Transport,
)
from ringfa4.errors import ContextBrokenError
from ringfa4.plan import Plan
from ringfa4.schedule import schedule
from ringfa4.topology import Topology
from ringfa4.wire import PLAIN, Direction, Geometry

Domains = tuple[tuple[int, ...], ...]

WORLDS = (1, 2, 3, 5)
LONG_S = 60.0
"""Timeout of tests in which nobody may run into it."""


@dataclass(frozen=True)
class Ending:
    """How one rank ended: its value, or the error's type name and message."""

    value: Any = None
    error: str | None = None
    message: str = ""


# ------------------------------------------------------------------ schedules and their bytes


def schedules(world: int, seed: int, *, backward: bool, scale: int = 64) -> list[Schedule]:
    """A random schedule a rank, fitting together: steps read owner (r - t) % world or nothing.

    Up to three spans a transfer, with gaps; some ranks own nothing, some neither read nor are read.
    """
    draw = random.Random(seed)
    own = [draw.choice((0, 1, 2, 5)) * draw.randint(1, scale) for _ in range(world)]
    reads: list[list[tuple[tuple[int, int], ...]]] = [[() for _ in range(world)]]
    for t in range(1, world):
        reads.append([_spans(draw, own[(rank - t) % world]) for rank in range(world)])
    return _assemble(own, reads, [draw.randint(1, 4 * scale) for _ in range(world)], backward)


def causal(world: int, nbytes: int, *, backward: bool) -> list[Schedule]:
    """Contiguous shards under a causal mask: rank r reads only owners below it."""
    spans = ((0, nbytes),)
    reads = [[spans if t and rank - t >= 0 else () for rank in range(world)] for t in range(world)]
    return _assemble([nbytes] * world, reads, [nbytes] * world, backward)


def full(world: int, nbytes: int, *, backward: bool) -> list[Schedule]:
    """Everybody reads everybody."""
    reads = [[((0, nbytes),) if t else () for _ in range(world)] for t in range(world)]
    return _assemble([nbytes] * world, reads, [nbytes] * world, backward)


def carrying(domains: Domains, tokens: int, *, backward: bool) -> list[Schedule]:
    """Schedules of a causal plan whose ranks carry records for their domains."""
    topology = Topology(domains)
    sides = shardings.zigzag(tokens, topology.world)
    plan = Plan(masks.causal(tokens), sides, sides, topology)
    wire, geometry = PLAIN[torch.float32], Geometry(1, 1, 2, 2, torch.float32)
    way: Direction = "backward" if backward else "forward"
    given = torch.bfloat16  # dK/dV come in other sizes than their sums, which are in fp32
    made = [schedule(plan, rank, wire, geometry, way, given) for rank in range(plan.world)]
    names = ("fetch_bytes", "grad_bytes", "carry_bytes")
    most = {name: max(getattr(s, name) for s in made) for name in names}
    return [replace(s, **most) for s in made]


def _spans(draw: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    count = draw.randint(0, 3)
    if size < 2 * count or not count:
        return ()
    edges = sorted(draw.sample(range(size + 1), 2 * count))
    return tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True))


def _assemble(
    own: Sequence[int],
    reads: Sequence[Sequence[tuple[tuple[int, int], ...]]],
    grad_sizes: Sequence[int],
    backward: bool,
) -> list[Schedule]:
    """``reads[t][rank]``: spans that ``rank`` reads from owner (rank - t) in step t."""
    world = len(own)
    given = [0] * world
    steps = [[StepTransfers()] for _ in range(world)]
    for t in range(1, world):
        index = list(given)
        for rank in range(world):
            owner, reader = (rank - t) % world, (rank + t) % world
            mine, theirs = reads[t][rank], reads[t][reader]
            grad_out = grad_in = None
            if backward and mine:
                grad_out = GradTransfer(owner, index[owner], grad_sizes[owner])
            if backward and theirs:
                grad_in = GradTransfer(reader, index[rank], grad_sizes[rank])
                given[rank] += 1
            steps[rank].append(
                StepTransfers(
                    Transfer(owner, mine) if mine else None,
                    Transfer(reader, theirs) if theirs else None,
                    grad_out,
                    grad_in,
                )
            )
    fetch = max((s.receive.nbytes for row in steps for s in row if s.receive), default=0)
    grads = max((s.grad_in.nbytes for row in steps for s in row if s.grad_in), default=0)
    return [
        Schedule(rank, world, own[rank], max(own), fetch, grads, tuple(steps[rank]))
        for rank in range(world)
    ]


def content(nbytes: int, *key: int) -> Tensor:
    """Bytes that differ for every key."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.randint(
        256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def packed(whole: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([whole[offset : offset + nbytes] for offset, nbytes in spans])


# ------------------------------------------------------------------ one call, as the executor makes
# it


def make_call(
    transport: Transport,
    control: Control,
    plans: Sequence[Schedule],
    call: int,
    *,
    pace: Callable[[], None] = lambda: None,
    agree: bool = True,
) -> list[tuple[int, int, Tensor]]:
    """One call through ``transport``, all bytes checked; (step, peer, bytes) of the contributions.

    ``pace`` is called where the executor computes. ``agree`` is the exchange of headers before a
    call. In even calls contributions are taken two at a time, as late as they may be, and released
    together; in odd ones each as soon as the next step's is sent.
    """
    rank = transport.rank
    schedule = plans[rank]
    if agree:
        assert control.gather(b"call %d" % call) == [b"call %d" % call] * transport.world
    # To look at a value is to wait for the device: all is made before the call and read after it.
    device = transport.device
    own = content(schedule.own_bytes, call, rank).to(device)
    outs = [(t, s.grad_out) for t, s in enumerate(schedule.steps) if s.grad_out]
    grads = {t: content(out.nbytes, call, rank, t).to(device) for t, out in outs}
    seen: list[tuple[int, Transfer, Tensor]] = []
    exchange = transport.open(schedule)
    outbox = exchange.outbox()
    assert outbox.dtype == torch.uint8 and outbox.numel() == schedule.own_bytes
    assert outbox.numel() == 0 or outbox.data_ptr() % 128 == 0
    outbox.copy_(own)
    exchange.publish()
    backward = any(s.grad_in or s.grad_out for s in schedule.steps)
    received: list[tuple[int, int, Tensor]] = []
    taken: list[int] = []
    last = len(schedule.steps) - 1
    coming = exchange.fetch(1) if last else None
    for t in range(1, last + 1):
        assert coming is not None
        view = coming.wait()
        coming = exchange.fetch(t + 1) if t < last else None
        pace()
        receive = schedule.steps[t].receive
        assert (view is None) == (receive is None)
        if receive is not None:
            seen.append((t, receive, view.clone()))
        if backward:
            if call % 2 == 0 and t - len(taken) > 2:
                received += _take(exchange, taken, t)
            slot = exchange.grad_slot(t)
            assert (slot is None) == (t not in grads)
            if slot is not None:
                slot.copy_(grads[t])
            exchange.send_grads(t)
            if call % 2:
                received += _take(exchange, taken, t)
    if backward:
        received += _take(exchange, taken, last + 1)
    exchange.finish()
    for t, receive, data in seen:
        want = source_of(plans, receive, call)
        assert torch.equal(data.cpu(), packed(want, receive.spans)), f"{call=} {rank=} step {t}"
    received = [(t, peer, data.cpu()) for t, peer, data in received]
    if backward:
        expected = [(t, s.grad_in) for t, s in enumerate(schedule.steps) if s.grad_in]
        assert [(t, peer) for t, peer, _ in received] == [(t, g.peer) for t, g in expected]
        for (t, peer, data), (_, grad) in zip(received, expected, strict=True):
            assert torch.equal(data, content(grad.nbytes, call, peer, t)), f"{call=} {rank=} {t=}"
    return received


def source_of(plans: Sequence[Schedule], receive: Transfer, call: int) -> Tensor:
    """What ``receive`` is read from: an outbox, or what its peer carried."""
    if receive.lap is None:
        return content(plans[receive.peer].own_bytes, call, receive.peer)
    carries = [s.carry for s in plans[receive.peer].steps if s.carry is not None]
    carry = next(c for c in carries if c.lap == receive.lap)
    return packed(content(plans[carry.peer].own_bytes, call, carry.peer), carry.spans)


def _take(exchange: Exchange, taken: list[int], stop: int) -> list[tuple[int, int, Tensor]]:
    """Contributions of the steps before ``stop`` that were not ``taken`` yet."""
    steps = range(len(taken) + 1, stop)
    given = [(t, c) for t in steps for c in exchange.contributions(t)]
    data = [(t, c.peer, c.view.clone()) for t, c in given]
    for _, contribution in given:
        contribution.release()
    taken += steps
    return data


def drifting(rank: int, seed: int, most_s: float) -> Callable[[], None]:
    """Sleeps of random length, some ranks slower than others."""
    draw = random.Random(seed * 1009 + rank)
    speed = draw.choice((0.0, 0.3, 1.0))
    return lambda: time.sleep(draw.random() * most_s * speed)


# ------------------------------------------------------------------ bodies: what one rank does


def random_calls(
    rank: int, transport: Transport, control: Control, *, seed: int, calls: int, drift_s: float
) -> int:
    """Calls of changing size, forward and backward in turn."""
    for call in range(calls):
        plans = schedules(
            transport.world,
            seed + call,
            backward=call % 3 > 0,
            scale=(16, 64, 256, 1024)[call % 4],
        )
        make_call(transport, control, plans, call, pace=drifting(rank, seed + call, drift_s))
    return calls


def carrying_calls(
    rank: int,
    transport: Transport,
    control: Control,
    *,
    domains: Domains,
    calls: int,
    drift_s: float,
) -> int:
    """Calls of changing size under a topology, with plain ones between, backward in turn."""
    for call in range(calls):
        backward = call % 2 == 1
        plans = carrying(domains, (2000, 5000, 300)[call % 3], backward=backward)
        if call % 4 == 3:
            plans = full(transport.world, 777, backward=backward)
        make_call(
            transport, control, plans, call, pace=drifting(rank, call, drift_s), agree=call % 5 > 0
        )
    return calls


def causal_calls(rank: int, transport: Transport, control: Control, *, calls: int) -> int:
    for call in range(calls):
        make_call(transport, control, causal(transport.world, 4096, backward=call % 2 == 1), call)
    return calls


def summed(rank: int, transport: Transport, control: Control, *, drift_seed: int) -> bytes:
    """The float sum of this rank's contributions, in the order in which they are given."""
    plans = full(transport.world, 4096, backward=True)
    pace = drifting(rank, drift_seed, 0.01)
    total = torch.zeros(1024)
    for _, _, data in make_call(transport, control, plans, 7, pace=pace):
        total += torch.log1p(data.view(torch.int32).float().abs())
    return total.numpy().tobytes()


def gathered(rank: int, transport: Transport, control: Control, *, sizes: list[int]) -> int:
    for turn in range(3):
        local = content(sizes[rank], turn, rank).to(transport.device)
        parts = transport.all_gather(local, sizes)
        assert len(parts) == transport.world
        for peer, part in enumerate(parts):
            assert torch.equal(part.cpu(), content(sizes[peer], turn, peer))
    return rank


def messages(rank: int, transport: Transport, control: Control) -> list[bytes]:
    """Short, empty and longest messages, gathered often."""
    for turn in range(20):
        want = [bytes([turn, peer]) * (peer * turn) for peer in range(control.world)]
        assert control.gather(want[rank]) == want
    longest = [bytes([peer]) * MESSAGE_BYTES for peer in range(control.world)]
    assert control.gather(longest[rank]) == longest
    with pytest.raises(ValueError, match=str(MESSAGE_BYTES + 1)):
        control.gather(b"x" * (MESSAGE_BYTES + 1))
    return control.gather(b"after")


def bad_schedules(rank: int, transport: Transport, control: Control) -> int:
    """Refused with the values, before anything moves; the transport stays usable."""
    world = transport.world
    steps = (StepTransfers(),)
    for wrong, why in (
        (Schedule(rank, world + 1, 0, 0, 0, 0, steps), f"rank {rank} of {world + 1}"),
        (Schedule(rank + 1, world, 0, 0, 0, 0, steps), f"rank {rank + 1} of {world}"),
        (Schedule(rank, world, 9, 8, 0, 0, steps), "own_bytes=9"),
        (Schedule(rank, world, 0, 0, 0, 0, ()), "step 0"),
        (
            Schedule(rank, world, 9, 9, 9, 0, (*steps, StepTransfers(Transfer(rank, ((0, 9),))))),
            "step 1",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            transport.open(wrong)
    make_call(transport, control, causal(world, 100, backward=True), 0)
    return rank


def growing(rank: int, transport: Transport, control: Control) -> list[bool]:
    """ready() before and after a call that needs more than the arena has."""
    answers = []
    for call, nbytes in enumerate((1000, 1000, 5000, 2000)):
        plans = full(max(transport.world, 1), nbytes, backward=True)
        answers.append(transport.ready(plans[rank]))
        make_call(transport, control, plans, call)
    return answers


def aborted(rank: int, transport: Transport, control: Control) -> int:
    """After abort() everything is refused, saying why; close() does not wait for anybody."""
    plans = full(transport.world, 256, backward=True)
    make_call(transport, control, plans, 0)
    control.gather(b"all have ended the first call")
    exchange = transport.open(plans[rank])
    outbox = exchange.outbox()
    transport.abort("the lights went out")
    for refused in (
        lambda: transport.open(plans[rank]),
        lambda: transport.all_gather(outbox[:1], [1] * transport.world),
        exchange.outbox,
        exchange.publish,
        exchange.finish,
    ):
        with pytest.raises(ContextBrokenError, match="the lights went out"):
            refused()
    transport.close()
    return rank


def failing(
    rank: int, transport: Transport, control: Control, *, culprit: int, where: str
) -> float:
    """One rank fails at ``where``; the others find out. As ringfa4.context does, a failure is
    reported and the transport aborted."""
    try:
        _failing_call(rank, transport, control, culprit, where)
        control.gather(b"next call")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        control.report(reason)
        transport.abort(reason)
        with pytest.raises(ContextBrokenError):
            transport.open(full(transport.world, 256, backward=True)[rank])
        raise
    raise AssertionError("nobody noticed")


def _failing_call(
    rank: int, transport: Transport, control: Control, culprit: int, where: str
) -> None:
    def fail(now: str) -> None:
        if rank == culprit and where == now:
            raise ZeroDivisionError(f"deliberate, {where}")

    world = transport.world
    plans = full(world, 1 << 16, backward=True)
    make_call(transport, control, plans, 0)
    # A failure may spoil what is still under way elsewhere, so nobody fails before all have ended.
    control.gather(b"all have ended the first call")
    fail("before the call")
    control.gather(b"header")
    exchange = transport.open(plans[rank])
    exchange.outbox().zero_()
    fail("before publish")
    exchange.publish()
    for t in range(1, world):
        handle = exchange.fetch(t)
        if t == world - 1:
            fail("after fetch")
        handle.wait()
        exchange.grad_slot(t).zero_()
        if t == world - 1:
            fail("before send_grads")
        exchange.send_grads(t)
        for contribution in exchange.contributions(t):
            contribution.release()
    fail("before finish")
    exchange.finish()


def oversleep(control: Control) -> None:
    """Sleep until a peer has given up, however late it began to wait."""
    give_up = time.monotonic() + control.timeout_s
    while control.failure() is None and time.monotonic() < give_up:
        time.sleep(0.01)


def late(
    rank: int,
    transport: Transport,
    control: Control,
    *,
    culprit: int,
    where: str,
    impatient_at: str,
    patience_s: float,
) -> None:
    """One rank sleeps until another gives it up: rank 0, which loses its patience in
    ``impatient_at``, when it waits for the culprit and for nobody else.

    So it makes no difference how slow the others are.
    """

    def impatience(now: str) -> None:
        if rank == 0 and now == impatient_at:
            control.timeout_s = patience_s

    def sleep(now: str) -> None:
        if rank == culprit and now == where:
            oversleep(control)

    try:
        plans = full(transport.world, 256, backward=True)
        sleep("gather")
        impatience("gather")
        control.gather(b"header")
        impatience("open")
        exchange = transport.open(plans[rank])
        exchange.publish()
        sleep("fetch")
        for t in range(1, transport.world):
            exchange.fetch(t).wait()
            exchange.grad_slot(t)
            if t == 1:
                sleep("grads")
            exchange.send_grads(t)
            impatience("grads")
            for contribution in exchange.contributions(t):
                contribution.release()
        exchange.finish()
        control.gather(b"next call")
    except Exception as error:
        control.report(str(error))
        transport.abort(str(error))
        raise


# ------------------------------------------------------------------ the tests


class TransportContract:
    """Give :meth:`run` and :meth:`endings`; ``reopen`` is one more body, run by
    :meth:`run_reopen`."""

    many_calls = 200
    domains: tuple[Domains, ...] = (
        ((0, 1), (2, 3)),
        ((4, 1, 0), (2, 5, 3)),
        ((0,), (2,), (1,)),
        ((0, 1), (2, 3), (4, 5), (7, 6)),
    )
    """Of the tests in which ranks carry records for each other."""
    impatience: tuple[str, float] = ("grads", 0.3)
    """Where rank 0 waits for rank 1 alone, when that one is late in a call, and for how long."""

    def run(self, world: int, body: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """``body`` on every rank of a fresh transport and control channel; results by rank."""
        raise NotImplementedError

    def endings(
        self, world: int, timeout_s: float, body: Callable[..., Any], **kwargs: Any
    ) -> list[Ending]:
        """As :meth:`run`, for bodies that fail on some ranks."""
        raise NotImplementedError

    def run_reopened(self, world: int, times: int, body: Callable[..., Any], **kwargs: Any) -> None:
        """Open, ``body``, close, ``times`` times in the same processes."""
        raise NotImplementedError

    @pytest.mark.parametrize("world", WORLDS)
    @pytest.mark.parametrize("seed", [0, 1000])
    def test_random_schedules_deliver_every_byte(self, world: int, seed: int) -> None:
        self.run(world, random_calls, seed=seed, calls=8, drift_s=0.0)

    @pytest.mark.parametrize("world", [2, 3])
    def test_many_calls_of_changing_size(self, world: int) -> None:
        self.run(world, random_calls, seed=5, calls=self.many_calls, drift_s=0.0)

    def test_ranks_may_drift(self) -> None:
        self.run(3, random_calls, seed=50, calls=10, drift_s=0.01)

    @pytest.mark.parametrize("world", [2, 3])
    def test_skipped_causal_hops_do_not_hang(self, world: int) -> None:
        self.run(world, causal_calls, calls=6)

    @pytest.mark.parametrize("drift_s", [0.0, 0.01])
    def test_what_is_carried_arrives(self, drift_s: float) -> None:
        """Copies used again in the fourth lap, and from call to call."""
        for domains in self.domains:
            world = sum(map(len, domains))
            self.run(world, carrying_calls, domains=domains, calls=9, drift_s=drift_s)

    def test_sums_of_contributions_repeat_to_the_bit(self) -> None:
        first, again = (self.run(3, summed, drift_seed=seed) for seed in (1, 2))
        assert first == again
        assert len(set(first)) == 3, "ranks received the same contributions"

    @pytest.mark.parametrize("sizes", [[5], [4, 4], [0, 1000], [3, 0, 70_000]])
    def test_all_gather(self, sizes: list[int]) -> None:
        assert self.run(len(sizes), gathered, sizes=sizes) == list(range(len(sizes)))

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_control_messages(self, world: int) -> None:
        assert self.run(world, messages) == [[b"after"] * world] * world

    @pytest.mark.parametrize("world", [1, 2])
    def test_a_foreign_schedule_is_refused(self, world: int) -> None:
        assert self.run(world, bad_schedules) == list(range(world))

    @pytest.mark.parametrize("world", [1, 2])
    def test_ready_tells_whether_the_arena_suffices(self, world: int) -> None:
        assert self.run(world, growing) == [[False, True, False, True]] * world

    @pytest.mark.parametrize("world", [1, 2])
    def test_abort_refuses_everything(self, world: int) -> None:
        assert self.run(world, aborted) == list(range(world))

    def test_closed_and_opened_again(self) -> None:
        self.run_reopened(2, 20, causal_calls, calls=2)

    @pytest.mark.parametrize(
        "where",
        [
            "before the call",
            "before publish",
            "after fetch",
            "before send_grads",
            "before finish",
        ],
    )
    def test_a_failure_reaches_every_rank_with_its_reason(self, where: str) -> None:
        """By the report, not by a timeout: the reason would be another one then."""
        for world in (2, 3):
            culprit = world - 1
            endings = self.endings(world, LONG_S, failing, culprit=culprit, where=where)
            assert endings[culprit].error == "ZeroDivisionError", endings[culprit]
            for rank, ending in enumerate(endings):
                if rank != culprit:
                    assert ending.error == "PeerError", ending
                    assert f"deliberate, {where}" in ending.message, ending
                    assert f"rank {culprit}" in ending.message, ending

    @pytest.mark.parametrize("where", ["gather", "fetch", "grads"])
    def test_a_late_rank_is_named(self, where: str) -> None:
        """By rank 0, to which rank 1 owes its message or its first dK/dV, and so by all."""
        at, patience_s = ("gather", 0.3) if where == "gather" else self.impatience
        patience: dict[str, Any] = {"impatient_at": at, "patience_s": patience_s}
        endings = self.endings(3, LONG_S, late, culprit=1, where=where, **patience)
        for rank, ending in enumerate(endings):
            assert ending.error in ("PeerError", "ContextBrokenError"), (rank, ending)
        for ending in (endings[0], endings[2]):
            assert "rank 1: no " in ending.message, endings
            assert f"within {patience_s:g} s" in ending.message, endings
