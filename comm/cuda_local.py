"""Virtual ranks on one GPU: all ranks are threads of one process, the streams are those of many
GPUs.

    set    record an event on the lane, note (value, event) at the peers
    wait   the host waits until the peer noted it, then the lane waits for the event

The protocol is :mod:`ringfa4.comm.pull`'s to the letter; only a flag is an event here instead of a
word in memory. Tens of streams share the few hardware queues of one GPU, and a stream that waits
for a word blocks whatever is behind it in its queue, perhaps the work that would set the word. An
event that was recorded before it is waited for cannot do that.

The host waits only for other hosts to enqueue, never for the device. A peer that fails is seen in
that wait, as PeerError; there is no watchdog.

Inside a call one rank's host works at a time, until it has to wait. They could not run side by side
anyway, for they share Python's lock; but every operator of torch lets go of that lock, and getting
it back from seven others each time cost more than the work (H200, 128K tokens, forward pass of 8
ranks: 234 ms side by side, 104 ms in turn). The turn (:mod:`ringfa4.comm.turn`) passes from a rank
to the next one up that waits for it: it reads that rank's records first, which are published by
then, and can go on. Who waits for a peer's event is given the turn when the event is there.

A call begins with its agreement: who comes last has the turn and goes on, the others sleep until it
is theirs. It has its own K/V encoded, published and attended to before it waits for a peer's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from ringfa4.comm.arena import aligned_empty
from ringfa4.comm.lanes import Engine, Flag, Lane, Mark, Memory, Signals
from ringfa4.comm.local import LocalWorld
from ringfa4.comm.pull import PullTransport
from ringfa4.comm.streams import CudaEngine, CudaLane
from ringfa4.comm.turn import TURN_POLL_S, Turn
from ringfa4.errors import ContextBrokenError, PeerError


class SharedSpace:
    """What the virtual ranks of one world share beside its control channel."""

    def __init__(self, world: LocalWorld) -> None:
        self.world = world
        ranks = range(world.world)
        self.flags: list[dict[tuple[Flag, int], tuple[int, Mark]]] = [{} for _ in ranks]
        """Of each rank: (flag, peer) -> value and when it was set; only that peer writes it."""
        self.pieces: list[list[Tensor | None]] = [[] for _ in ranks]
        """Of each rank: what it allocated, in order; None once it is freed."""
        self.turn = Turn(world.world)
        """Whose host works."""


class SharedMemory(Memory):
    """Ordinary memory of one device; everybody in the process can address it."""

    def __init__(self, space: SharedSpace, rank: int, device: torch.device) -> None:
        self._space, self._rank, self._device = space, rank, device

    def allocate(self, nbytes: int) -> list[Tensor]:
        world, pieces = self._space.world, self._space.pieces
        own = world.ranks[self._rank]
        number = len(pieces[self._rank])
        with own.changed:
            pieces[self._rank].append(aligned_empty(nbytes, self._device))
            own.changed.notify_all()
        found = []
        for peer in range(world.world):
            there = functools.partial(lambda p, _: len(pieces[p]) > number, peer)
            world.wait(self._rank, peer, there, "memory")
            piece = pieces[peer][number]
            assert piece is not None, f"rank {peer} freed allocation {number} before all had it"
            found.append(piece)
        return found

    def free(self, pieces: list[Tensor]) -> None:
        """The last reference does it."""
        mine = self._space.pieces[self._rank]
        at = next(i for i, piece in enumerate(mine) if piece is pieces[self._rank])
        mine[at] = None


class EventSignals(Signals):
    """Flags as events that were recorded before anybody waits for them."""

    def __init__(self, space: SharedSpace, rank: int) -> None:
        self.lost: PeerError | None = None
        self._space, self._rank = space, rank
        self._reason: str | None = None
        space.world.turn = space.turn

    def begin(self) -> None:
        """Nothing when this rank has had the turn since the agreement on the call.

        PeerError when the rank whose turn it is keeps it for too long, or a rank failed.
        """
        if self._space.turn.holder != self._rank:
            self._take_turn(lambda: True, self._kept)

    def _take_turn(
        self,
        ready: Callable[[], bool],
        late: Callable[[], PeerError],
        step: int | None = None,
    ) -> None:
        """Wait for the turn and ``ready``; raises ``late()`` when that takes too long."""
        turn, world = self._space.turn, self._space.world
        deadline = time.monotonic() + world.timeouts_s[self._rank]
        while True:
            if self._reason is not None:
                raise ContextBrokenError(self._reason)
            if turn.take(self._rank, TURN_POLL_S, ready):
                return
            if (failed := world.failure(besides=self._rank)) is not None:
                raise PeerError(failed[1], rank=failed[0], step=step, awaited=late().rank)
            if time.monotonic() > deadline:
                raise late()

    def end(self) -> None:
        self._space.turn.give_up(self._rank)

    def _kept(self) -> PeerError:
        patience, holder = self._space.world.timeouts_s[self._rank], self._space.turn.holder
        return PeerError(f"no turn given up within {patience:g} s", rank=holder)

    def set(self, lane: Lane, flag: Flag, peers: Sequence[int], value: int) -> None:
        mark = lane.record()
        for peer in peers:
            self._space.flags[peer][flag, self._rank] = (value, mark)
        self._space.turn.changed(self._rank)

    def wait(
        self, lane: Lane, flag: Flag, peers: Sequence[int], value: int, what: str, step: int | None
    ) -> None:
        flags = self._space.flags[self._rank]
        for peer in peers:
            if self.would_block(flag, peer, value):
                self.end()
                there = functools.partial(self._there, flag, peer, value)
                late = functools.partial(self._late, peer, there, what, step)
                self._take_turn(there, late, step)
            lane.after(flags[flag, peer][1])

    def would_block(self, flag: Flag, peer: int, value: int) -> bool:
        return not self._there(flag, peer, value)

    def _there(self, flag: Flag, peer: int, value: int) -> bool:
        flags = self._space.flags[self._rank]
        return (flag, peer) in flags and flags[flag, peer][0] >= value

    def _late(self, peer: int, there: Callable[[], bool], what: str, step: int | None) -> PeerError:
        """Who is late: ``peer``, unless it or this rank is for want of the turn."""
        turn, patience = self._space.turn, self._space.world.timeouts_s[self._rank]
        kept = time.monotonic() - turn.since >= patience / 2
        if there() or (kept and turn.holder not in (None, peer, self._rank)):
            return self._kept()
        return PeerError(f"no {what} within {patience:g} s", rank=peer, step=step)

    def release(self) -> None:
        self._reason = "the transport was aborted"
        self.end()
        self._space.world.wake()

    def close(self) -> None:
        """Events need no release."""


def local_pull_transport(space: SharedSpace, rank: int, engine: Engine) -> PullTransport:
    """Transport of virtual rank ``rank`` on the device of ``engine``."""
    memory = SharedMemory(space, rank, engine.device)
    control = space.world.control(rank)
    return PullTransport("local", control, engine, memory, EventSignals(space, rank))


def virtual_ranks(
    world: LocalWorld, device: torch.device
) -> Callable[[int], AbstractContextManager[PullTransport]]:
    """rank -> its transport, for use inside the rank's thread; called in the thread that made the
    inputs.

    Each rank computes on a stream of its own that starts after what the caller's stream holds now.
    Autograd runs in the rank's thread: its own thread of a device would run one rank's backward at
    a time, and the others' would never join it.
    """
    engine, space = CudaEngine(device), SharedSpace(world)
    before = engine.current().record()

    @contextmanager
    def stage(rank: int) -> Iterator[PullTransport]:
        torch.cuda.set_device(engine.device)
        stream = torch.cuda.Stream(engine.device)
        CudaLane(stream).after(before)
        try:
            with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                yield local_pull_transport(space, rank, engine)
        finally:
            torch.cuda.synchronize(engine.device)

    return stage
