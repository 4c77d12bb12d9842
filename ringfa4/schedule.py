"""From a plan to the data movement of one rank: records become byte spans.

    receive     spans of step(rank, t).ranges at the source: in its outbox, or in what it carried
    send        the same of the rank that reads here in step t
    carry       lap's records for the domain, from their owner; begun in the lap before, step 1
    lend        the same of the rank that carries this one's records
    grad_out    gradient records of returns(rank, t), to the owner or to who carried
    grad_in     gradient records of what the giver of step t returns

A gradient record is in the dtype in which the kernel gives dK/dV, in that of sums where ranks have
added them up.

Contribution numbers count, per receiver, the steps in which somebody has dK/dV for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ringfa4.comm.interface import Carry, GradTransfer, Schedule, StepTransfers, Transfer
from ringfa4.plan import Plan, RecordRange
from ringfa4.wire import PLAIN, Direction, Geometry, RecordMap, WireFormat, sum_dtype


def schedule(
    plan: Plan,
    rank: int,
    wire: WireFormat,
    geometry: Geometry,
    direction: Direction,
    gradients: torch.dtype,
) -> Schedule:
    """The transfers of ``rank`` for one call; ``gradients``: of dK/dV that one rank computed.

    ``fetch_bytes``, ``carry_bytes`` and ``grad_bytes`` are this rank's own needs: the context
    replaces them by the maxima over the ranks, which travel in the call's header (an exact maximum
    would cost world**2 plan look-ups).
    """
    moves = _Moves(plan, rank, wire.record_bytes(geometry, direction))
    dtypes = {False: gradients, True: sum_dtype(geometry.dtype)}
    record = {n: PLAIN[dtype].record_bytes(geometry, direction) for n, dtype in dtypes.items()}
    steps = [StepTransfers()]
    given = 0
    for t in range(1, plan.world + (direction == "backward" and plan.order.count > 1)):
        made = moves.of(t) if t < plan.world else StepTransfers()
        if direction == "backward":
            out, giver = plan.returns(rank, t), plan.giver(rank, t)
            back = plan.returns(giver, t)
            if out is not None:
                number = plan.contributions(out.peer).index(t)
                nbytes = _records(out.ranges) * record[out.summed]
                made = replace(made, grad_out=GradTransfer(out.peer, number, nbytes))
            if back is not None:
                assert back.peer == rank, "dK/dV have one receiver"
                nbytes = _records(back.ranges) * record[back.summed]
                made = replace(made, grad_in=GradTransfer(giver, given, nbytes))
                given += 1
        steps.append(made)
    fetched = [s.receive.nbytes for s in steps if s.receive and s.receive.peer != rank]
    carried = [s.carry.nbytes for s in steps if s.carry]
    grads = [g.nbytes for s in steps for g in (s.grad_out, s.grad_in) if g]
    return Schedule(
        rank=rank,
        world=plan.world,
        own_bytes=moves.shards[rank].records * moves.record,
        outbox_bytes=max(s.records for s in moves.shards) * moves.record,
        fetch_bytes=max(fetched, default=0),
        grad_bytes=max(grads, default=0),
        steps=tuple(steps),
        carry_bytes=max(carried, default=0),
    )


class _Moves:
    """Records that ``rank`` moves, in bytes; ``record`` is how many one has."""

    def __init__(self, plan: Plan, rank: int, record: int) -> None:
        self.plan, self.rank, self.record = plan, rank, record
        self.shards = plan.k_sharding.shards

    def of(self, t: int) -> StepTransfers:
        """What moves in step ``t`` in 1..world - 1, apart from dK/dV."""
        plan, rank, size = self.plan, self.rank, self.plan.order.size
        receive = send = carry = lend = None
        lap, turn = plan.lap(t)
        if lap == 0 or turn:
            asker = plan.asker(rank, t)
            receive, send = self._read(rank, t, plan.source(rank, t)), self._read(asker, t, asker)
        elif plan.busy(rank, t):  # the copy is here: it was begun a lap ago
            held = _records(plan.carried(rank, lap))
            receive = Transfer(rank, ((0, held * self.record),), lap)
        coming, begun = divmod(t - 1, size)
        if begun == 0 and coming + 1 < plan.order.count:
            first = (coming + 1) * size
            carry = self._carry(rank, plan.owner(rank, first), coming + 1)
            reader = plan.reader(rank, first)
            theirs = self._carry(reader, rank, coming + 1)
            lend = None if theirs is None else Transfer(reader, theirs.spans)
        return StepTransfers(receive, send, carry=carry, lend=lend)

    def _read(self, reader: int, t: int, peer: int) -> Transfer | None:
        """What ``reader`` reads in step ``t`` from its source; None: nothing. ``peer`` as given."""
        plan = self.plan
        ranges, (lap, _) = plan.ranges(reader, t), plan.lap(t)
        if not ranges:
            return None
        shard = self.shards[plan.owner(reader, t)]
        if lap == 0:
            return Transfer(peer, RecordMap(shard, ranges).spans(self.record))
        held = RecordMap(shard, plan.carried(plan.source(reader, t), lap))
        return Transfer(peer, _inside(held, ranges, self.record), lap)

    def _carry(self, rank: int, owner: int, lap: int) -> Carry | None:
        """What ``rank`` brings over from ``owner``, and which peers read it."""
        plan = self.plan
        ranges = plan.carried(rank, lap)
        if not ranges:
            return None
        spans = RecordMap(self.shards[owner], ranges).spans(self.record)
        first = lap * plan.order.size
        turns = range(1, plan.order.size)
        peers = ((plan.order.peer(rank, 0, turn), first + turn) for turn in turns)
        readers = tuple(peer for peer, t in peers if plan.busy(peer, t))
        return Carry(owner, spans, lap, readers)


_inside = RecordMap.inside


def _records(ranges: Sequence[RecordRange]) -> int:
    return sum(len(r) for r in ranges)
