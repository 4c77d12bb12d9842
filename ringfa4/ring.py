"""The ring: one loop each way over the steps of a plan.

    forward, rank r     state <- merge over steps t of kernel(Q_r, K/V of owner (r - t) % P)
                        out, lse = finalise(state, sink)
    backward, rank r    dQ_r <- sum over steps t
                        dK/dV of step t go to the owner, who adds them in plan order; under a
                        topology to who carried the records, who does, and hands the sum on

The transfer of step t + 1 runs while step t computes; dK/dV of step t travel while step t + 1
computes. Neither autograd nor torch.distributed is used here: kernels compute, transports move,
this module only orders them. The order of every sum is fixed by the plan, so results repeat to the
bit.

A sink is merged once, at the end, by every rank for its own rows; its gradient,
-sum exp(sink - lse) * delta, is summed over ranks once. Shapes: q (b, sq, heads_q, dk),
k (b, sk, heads_kv, dk), v (b, sk, heads_kv, dv), lse (b, heads_q, sq).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ringfa4.comm.interface import Exchange, Handle, Schedule
from ringfa4.context import Context
from ringfa4.grads import Grads
from ringfa4.homecoming import Homecoming
from ringfa4.kernels.interface import BlockKernel
from ringfa4.plan import Plan, Step
from ringfa4.precondition import NONE, Precondition, row_sums, shift
from ringfa4.schedule import schedule
from ringfa4.state import State
from ringfa4.trace import NAMED, Observer
from ringfa4.wire import (
    PLAIN,
    Direction,
    EncodedShard,
    Geometry,
    PlainWire,
    RecordMap,
    WireFormat,
    sum_dtype,
)

_AGREED = ("fetch_bytes", "grad_bytes", "carry_bytes")
"""Capacities of a schedule that are the maxima over ranks."""


@dataclass(frozen=True)
class Ring:
    """One attention problem on one rank: what is computed, by which kernel, over which transport.

    Frozen and cheap to keep: layers of one model share it. ``about`` is what all ranks must agree
    on before a call.
    """

    context: Context
    plan: Plan
    wire: WireFormat
    kernel: BlockKernel
    geometry: Geometry
    heads_q: int
    precondition: Precondition = NONE

    @property
    def rank(self) -> int:
        return self.context.rank

    @cached_property
    def about(self) -> Mapping[str, str | int]:
        g, plan = self.geometry, self.plan
        return {
            "mask": plan.mask.name,
            "seq_q": plan.mask.seq_q,
            "seq_k": plan.mask.seq_k,
            "sharding": plan.q_sharding.name,
            "batch": g.batch,
            "heads_q": self.heads_q,
            "heads_kv": g.heads_kv,
            "head_dim": g.dk,
            "v_head_dim": g.dv,
            "dtype": str(g.dtype),
            "wire": self.wire.name,
            "precondition": self.precondition.name,
            "kernel": self.kernel.name,
            "plan": plan.digest.hex(),
        }

    @cached_property
    def _schedules(self) -> dict[Direction, Schedule]:
        return {}

    @cached_property
    def _agreed(self) -> dict[tuple[Direction, tuple[int, ...]], Schedule]:
        """With capacities; all ranks' maxima are the same in every call, so there are two."""
        return {}

    def schedule(self, direction: Direction) -> Schedule:
        """This rank's own transfers (capacities not yet agreed). Cached."""
        if direction not in self._schedules:
            self._schedules[direction] = schedule(
                self.plan, self.rank, self.wire, self.geometry, direction, self.contribution.dtype
            )
        return self._schedules[direction]

    @cached_property
    def contribution(self) -> PlainWire:
        """How the dK/dV of one step look on their way: in the dtype that the kernel says."""
        return PLAIN[self.kernel.gradient_dtype(self.geometry.dtype)]

    @cached_property
    def sums(self) -> PlainWire:
        """How dK/dV look where they are added up."""
        return PLAIN[sum_dtype(self.geometry.dtype)]

    @cached_property
    def busy_steps(self) -> int:
        """In how many steps this rank computes."""
        return sum(bool(step.tasks) for step in self.plan.steps(self.rank))

    @cached_property
    def _maps(self) -> dict[tuple[int, bool], RecordMap]:
        return {}

    def records(self, step: Step, *, returned: bool = False) -> RecordMap:
        """Where the records lie that this rank has in ``step``, or those whose dK/dV it returns.
        Cached.
        """
        key = step.index, returned
        if key not in self._maps:
            shard = self.plan.k_sharding.shards[step.owner]
            self._maps[key] = (
                RecordMap.whole(shard)
                if step.index == 0
                else RecordMap(shard, step.ranges if returned else step.held)
            )
        return self._maps[key]

    @cached_property
    def _given(self) -> dict[int, tuple[torch.dtype, tuple[tuple[int, int], ...]]]:
        return {}

    def given(self, t: int) -> tuple[torch.dtype, tuple[tuple[int, int], ...]]:
        """Of the dK/dV that reach this rank in step ``t``: their dtype, and where they belong in
        the sum, as (offset, count) in elements. Cached.
        """
        if t not in self._given:
            plan, (lap, turn) = self.plan, self.plan.lap(t)
            back = plan.returns(plan.giver(self.rank, t), t)
            assert back is not None and back.peer == self.rank, "what came was due"
            begun = plan.step(self.rank, t - turn if lap and turn else 0)
            wire = self.sums if back.summed else self.contribution
            record = wire.record_bytes(self.geometry, "backward") // wire.dtype.itemsize
            self._given[t] = wire.dtype, self.records(begun).inside(back.ranges, record)
        return self._given[t]

    def agree(self, direction: Direction, call: Mapping[str, str | float | bool]) -> Schedule:
        """Agree with the peers on ``about`` and ``call``; this rank's transfers. Collective."""
        own = self.schedule(direction)
        needs = self.context.agree(
            {"call": direction, **self.about, **call},
            values={name: getattr(own, name) for name in _AGREED},
            opens=True,
        )
        fetch, grads, carry = most = tuple(max(rank[name] for rank in needs) for name in _AGREED)
        if (direction, most) not in self._agreed:
            self._agreed[direction, most] = replace(
                own, fetch_bytes=fetch, grad_bytes=grads, carry_bytes=carry
            )
        return self._agreed[direction, most]


def forward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    observer: Observer = NAMED,
) -> tuple[Tensor, Tensor]:
    """out (b, sq, heads_q, dv) in q's dtype and lse (b, heads_q, sq) fp32, of this rank's queries.
    Collective.

    ``sink`` (heads_q,): logit of one more key per head, with value 0, the same on all ranks. Inputs
    are taken as valid: :mod:`ringfa4.ops` checks them.
    """
    with observer.span("agree", 0):
        agreed = ring.agree("forward", {"scale": scale, "sink": sink is not None})
    with ring.context.guard():
        exchange, mu = _send_off(ring, agreed, k, v, "forward", observer)
        queries = ring.kernel.prepare(
            ring.precondition.queries(q), ring.plan.q_sharding.shards[ring.rank]
        )
        batch, seq, heads, _ = q.shape
        state = State(batch, seq, heads, v.shape[-1], device=q.device, dtype=sum_dtype(q.dtype))
        for step, records in _steps(ring, exchange, "forward", observer):
            if records is not None:
                with observer.span("compute", step.index):
                    ring.kernel.forward(queries, records, step.tasks, scale, state)
        with observer.span("finish", 0):
            result = state.finalise(q.dtype, sink, None if mu is None else shift(q, mu, scale))
        exchange.finish()  # last: until then no other virtual rank's host gets in between
        return result


def backward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scale: float,
    sink: Tensor | None = None,
    observer: Observer = NAMED,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's tokens in the inputs' dtypes, and dsink (all ranks' sum; None
    without a sink). Collective.

    ``out`` and ``lse`` are what :func:`forward` returned; ``dlse`` is the gradient into lse, None
    for zero.
    """
    with observer.span("agree", 0):
        given = str(ring.contribution.dtype)
        agreed = ring.agree(
            "backward", {"scale": scale, "sink": sink is not None, "gradients": given}
        )
    with ring.context.guard():
        exchange, mu = _send_off(ring, agreed, k, v, "backward", observer)
        queries = ring.kernel.prepare_backward(
            ring.precondition.queries(q),
            ring.plan.q_sharding.shards[ring.rank],
            out,
            dout,
            lse if mu is None else lse - shift(q, mu, scale),
            dlse,
        )
        batch, seq, heads, dk_dim = q.shape
        sums, busy = sum_dtype(q.dtype), ring.busy_steps
        grads = Grads(batch, seq, heads, dk_dim, device=q.device, dtype=sums, steps=busy)
        home = Homecoming(ring, exchange, q.device, observer)
        for step, records in _steps(ring, exchange, "backward", observer):
            if records is not None:
                grads.begin(home.place(step))
                with observer.span("compute", step.index):
                    ring.kernel.backward(queries, records, step.tasks, scale, grads)
                grads.end()
            home.after(step)
        with observer.span("finish", 0):  # the last dK/dV are still on their way
            delta = None if sink is None and mu is None else row_delta(out, dout, dlse)
            total = None if delta is None else row_sums(delta, lse, dlse, sink)
            if ring.precondition.plain:
                dq = grads.finish(q.dtype)
            else:
                dq = ring.precondition.query_gradient(grads.finish(), mu, total, scale).to(q.dtype)
        dk, dv = home.end(k.dtype)
        exchange.finish()
        dsink = None
        if sink is not None and delta is not None:
            with observer.span("finish", 0):
                dsink = _sink_gradient(ring, sink, lse, delta)
    return dq, dk, dv, dsink


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta (b, heads_q, sq) = rowsum(out * dout) - dlse, in the dtype of sums."""
    dtype = sum_dtype(out.dtype)
    delta = torch.einsum("bshd,bshd->bhs", out.to(dtype), dout.to(dtype))
    return delta if dlse is None else delta - dlse


def _send_off(
    ring: Ring, agreed: Schedule, k: Tensor, v: Tensor, direction: Direction, observer: Observer
) -> tuple[Exchange, Tensor | None]:
    """Encode the own K/V once, into the outbox, and let the peers read it; also the keys' mean.

    The mean (b, heads_kv, dk), None unless the precondition takes it off, is the same on all ranks
    and in both directions: it is summed in rank order.
    """
    with observer.span("encode", 0):
        mu = ring.precondition.mean(k, lambda local: sum_over_ranks(ring.context, local))
        exchange = ring.context.transport.open(agreed)
        shard = ring.plan.k_sharding.shards[ring.rank]
        keys = ring.precondition.keys(k, mu)
        ring.wire.encode(keys, v, shard, exchange.outbox(), direction)
    with observer.span("publish", 0):
        exchange.publish()
    return exchange, mu


def _steps(
    ring: Ring, exchange: Exchange, direction: Direction, observer: Observer
) -> Iterator[tuple[Step, EncodedShard | None]]:
    """Each step with its records (None when it has no tasks); the next step's transfer is under
    way by then.
    """
    plan = ring.plan
    last = len(ring.schedule(direction).steps) - 1
    coming: Handle | None = None
    for t in range(plan.world):
        step = plan.step(ring.rank, t)
        if coming is None:
            buffer: Tensor | None = exchange.outbox()
        else:
            with observer.span("wait", t):
                buffer = coming.wait()
        if t < last:
            with observer.span("fetch", t + 1):
                coming = exchange.fetch(t + 1)
        if not step.tasks:
            yield step, None
            continue
        assert buffer is not None, "a step with tasks needs records"
        yield step, ring.wire.view(ring.geometry, ring.records(step), buffer, direction)
    if coming is not None:
        coming.wait()


def _sink_gradient(ring: Ring, sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum over (b, rows) of exp(sink - lse) * delta; summed over ranks."""
    local = -(torch.exp(sink.to(delta.dtype).view(1, -1, 1) - lse) * delta).sum((0, 2))
    return sum_over_ranks(ring.context, local).to(sink.dtype)


def sum_over_ranks(context: Context, local: Tensor) -> Tensor:
    """The sum of every rank's ``local`` (small, equal shapes), added in rank order. Collective."""
    if context.world == 1:
        return local
    message = local.contiguous().view(-1).view(torch.uint8)
    parts = context.transport.all_gather(message, [message.numel()] * context.world)
    total = torch.zeros_like(local)
    for part in parts:
        total += part.view(local.dtype).view(local.shape)
    return total
