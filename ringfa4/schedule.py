"""From a plan to the data movement of one rank: records become byte spans.

    receive     spans of step(rank, t).ranges in the owner's outbox
    send        spans of step(reader, t).ranges in the own outbox, for who reads it in step t
    grad_out    fp32 records of step(rank, t).ranges, to the owner
    grad_in     fp32 records of step(reader, t).ranges, from the reader

Contribution numbers count, per owner, the steps in which somebody has dK/dV for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringfa4.comm.interface import GradTransfer, Schedule, StepTransfers, Transfer
from ringfa4.plan import Plan, RecordRange
from ringfa4.wire import Direction, Geometry, RecordMap, WireFormat, gradient_wire


def schedule(
    plan: Plan, rank: int, wire: WireFormat, geometry: Geometry, direction: Direction
) -> Schedule:
    """The transfers of ``rank`` for one call.

    ``fetch_bytes`` and ``grad_bytes`` are this rank's own needs: the context replaces them by the
    maxima over the ranks, which travel in the call's header (an exact maximum would cost world**2
    plan look-ups).
    """
    record = wire.record_bytes(geometry, direction)
    backward = direction == "backward"
    grad_record = gradient_wire(geometry.dtype).record_bytes(geometry, direction)
    shards = plan.k_sharding.shards
    steps = [StepTransfers()]
    given = 0
    for t in range(1, plan.world):
        owner, reader = plan.owner(rank, t), plan.reader(rank, t)
        wanted, asked = plan.ranges(rank, t), plan.ranges(reader, t)
        grad_out = grad_in = None
        if backward and wanted:
            number = plan.contributions(owner).index(t)
            grad_out = GradTransfer(owner, number, _records(wanted) * grad_record)
        if backward and asked:
            grad_in = GradTransfer(reader, given, _records(asked) * grad_record)
            given += 1
        receive, send = (
            Transfer(peer, RecordMap(shard, ranges).spans(record)) if ranges else None
            for peer, shard, ranges in (
                (owner, shards[owner], wanted),
                (reader, shards[rank], asked),
            )
        )
        steps.append(StepTransfers(receive, send, grad_out, grad_in))
    transfers = [s.receive.nbytes for s in steps if s.receive]
    grads = [g.nbytes for s in steps for g in (s.grad_out, s.grad_in) if g]
    return Schedule(
        rank=rank,
        world=plan.world,
        own_bytes=shards[rank].records * record,
        outbox_bytes=max(s.records for s in shards) * record,
        fetch_bytes=max(transfers, default=0),
        grad_bytes=max(grads, default=0),
        steps=tuple(steps),
    )


def _records(ranges: Sequence[RecordRange]) -> int:
    return sum(len(r) for r in ranges)
