"""The operators as torch sees them: custom ops with fake kernels, so that torch.compile and
checkpointing treat them whole.

    ringfa4::attention(q, k, v, sink?, handle, scale) -> (out, lse)
    ringfa4::attention_backward(...) -> (dq, dk, dv, dsink)
    ringfa4::shard(x, handle, dim, side) <-> ringfa4::unshard: each is the other's backward

``handle`` names a :class:`ringfa4.problem.Problem` of this process. An autograd.Function would be
run a second time under checkpointing; an op can be saved by a selective policy (``MUST_SAVE`` on
``torch.ops.ringfa4.attention.default``), and then no second forward ring runs.

Saved for backward: q, k, v as given, out in q.dtype, lse. Differentiating the backward once more is
refused by torch, since it has no formula.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringfa4 import ring
from ringfa4.context import Context
from ringfa4.problem import Problem, check_sink, softmax_scale
from ringfa4.shard import Shard, Sharding
from ringfa4.wire import sum_dtype

_problems: WeakValueDictionary[int, Problem] = WeakValueDictionary()
_handles = itertools.count()
T = TypeVar("T")


def register(problem: Problem) -> int:
    """A handle by which the operators find ``problem`` for as long as it lives."""
    handle = next(_handles)
    _problems[handle] = problem
    return handle


def _problem(handle: int) -> Problem:
    # Once torch.compile has seen two handles it traces with a symbolic integer, which has no hash:
    # int() ties the graph to this one.
    problem = _problems.get(int(handle))
    if problem is None:
        raise RuntimeError(f"the ContextParallel object of handle {handle} is gone; keep it alive")
    return problem


def checked(context: Context, check: Callable[[], T]) -> T:
    """``check()``; a ValueError in it is raised by every rank, with this rank's message.

    The peers are in (or come to) their agreement for the same call, and find the error in this
    rank's header. So is any other way in which this rank cannot take part: it breaks the context
    and reaches the peers as a failure.
    """
    context.require_usable()
    try:
        return check()
    except ValueError as error:
        context.agree({}, error=error)
        raise AssertionError("agree() raises when given an error") from error
    except Exception as error:
        context.fail(f"{type(error).__name__}: {error}")
        raise


def gather_lengths(context: Context, q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Every rank's number of queries and keys, from q and k of shape (b, s, h, d). Collective."""

    def check() -> dict[str, int]:
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(
                f"q and k must be (b, s, h, d), got {tuple(q.shape)}, {tuple(k.shape)}"
            )
        return {"q": q.shape[1], "k": k.shape[1]}

    values = context.agree({"call": "lengths"}, values=checked(context, check))
    return [(v["q"], v["k"]) for v in values]


@torch.library.custom_op("ringfa4::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, handle: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out (b, sq, heads_q, dv) in q's dtype, lse (b, heads_q, sq) fp32. Collective."""
    problem = _problem(handle)

    def check() -> tuple[ring.Ring, float]:
        made = problem.ring(q, k, v, backward=False)
        check_sink(sink, q)
        return made, softmax_scale(scale, q.shape[-1])

    made, value = checked(problem.context, check)
    return ring.forward(made, q, k, v, scale=value, sink=sink, observer=problem.observer)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, handle: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s, dtype=sum_dtype(q.dtype))


@torch.library.custom_op("ringfa4::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    handle: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dsink (empty without a sink). Collective."""
    problem = _problem(handle)

    def check() -> tuple[ring.Ring, float]:
        return problem.ring(q, k, v, backward=True), softmax_scale(scale, q.shape[-1])

    made, value = checked(problem.context, check)
    dq, dk, dv, dsink = ring.backward(
        made, q, k, v, out, lse, dout, dlse, scale=value, sink=sink, observer=problem.observer
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


@attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    handle: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, ctx.handle, ctx.scale = inputs
    ctx.problem = _problem(ctx.handle)  # lives until backward, also when the caller dropped it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, *output)


def _attention_gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, sink, out, lse = ctx.saved_tensors
    dq, dk, dv, dsink = attention_backward(
        q,
        k,
        v,
        sink,
        out,
        lse,
        torch.zeros_like(out) if dout is None else dout,
        dlse,
        ctx.handle,
        ctx.scale,
    )
    return dq, dk, dv, None if sink is None else dsink, None, None


attention.register_autograd(_attention_gradients, setup_context=_save)


# ---- between a whole sequence and this rank's shard ---------------------------------------------


def _sharding(problem: Problem, side: str) -> Sharding:
    return problem.q_sharding if side == "q" else problem.k_sharding


def positions(shard: Shard, device: torch.device) -> Tensor:
    """Global positions (int64) of a shard's tokens, in local order."""
    runs = [
        torch.arange(c.start, c.start + c.stride * c.count, c.stride, device=device)
        for c in shard.chunks
    ]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


@torch.library.custom_op("ringfa4::shard", mutates_args=())
def shard(x: Tensor, handle: int, dim: int, side: str) -> Tensor:
    """This rank's positions of ``x`` along ``dim``. Local; its backward gathers from all ranks."""
    problem = _problem(handle)
    own = _sharding(problem, side).shards[problem.context.rank]
    return x.index_select(dim, positions(own, x.device))


@shard.register_fake
def _(x: Tensor, handle: int, dim: int, side: str) -> Tensor:
    problem = _problem(handle)
    shape = list(x.shape)
    shape[dim] = len(_sharding(problem, side).shards[problem.context.rank])
    return x.new_empty(shape)


@torch.library.custom_op("ringfa4::unshard", mutates_args=())
def unshard(x: Tensor, handle: int, dim: int, side: str) -> Tensor:
    """The whole sequence from every rank's shard along ``dim``, on every rank. Collective."""
    problem = _problem(handle)
    context, shards = problem.context, _sharding(problem, side).shards
    dim = dim % x.dim() if x.dim() else 0

    def check() -> None:
        if x.dim() == 0 or x.shape[dim] != len(shards[context.rank]):
            raise ValueError(
                f"this rank's shard has {len(shards[context.rank])} tokens, "
                f"got shape {tuple(x.shape)} with {dim=}"
            )

    checked(context, check)
    rest = [n for i, n in enumerate(x.shape) if i != dim]
    context.agree({"call": "unshard", "dim": dim, "other dims": str(rest), "dtype": str(x.dtype)})
    with context.guard():
        first = x.movedim(dim, 0).contiguous()
        width = x.element_size() * torch.Size(rest).numel()
        parts = context.transport.all_gather(
            first.view(-1).view(torch.uint8), [len(s) * width for s in shards]
        )
        whole = first.new_empty(_sharding(problem, side).seq, *rest)
        for rank, part in enumerate(parts):
            index = positions(_sharding(problem, side).shards[rank], x.device)
            whole[index] = part.view(x.dtype).view(-1, *rest)
        return whole.movedim(0, dim).contiguous()


@unshard.register_fake
def _(x: Tensor, handle: int, dim: int, side: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = _sharding(_problem(handle), side).seq
    return x.new_empty(shape)


def _save_dim(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.handle, ctx.dim, ctx.side = inputs


shard.register_autograd(
    lambda ctx, grad: (unshard(grad, ctx.handle, ctx.dim, ctx.side), None, None, None),
    setup_context=_save_dim,
)
unshard.register_autograd(
    lambda ctx, grad: (shard(grad, ctx.handle, ctx.dim, ctx.side), None, None, None),
    setup_context=_save_dim,
)
