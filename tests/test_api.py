"""ContextParallel and ring_attention as users meet them: gradients, strides, compile,
checkpointing, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rings import Case, check, dense, ranks
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ringfa4 import (
    ContextBrokenError,
    ContextParallel,
    PeerError,
    PlanMismatchError,
    ring_attention,
)
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.context import Context
from ringfa4.kernels.cpu import CpuKernel
from ringfa4.trace import Recorder


def shards(cp: ContextParallel, case: Case, *names: str) -> list[Tensor]:
    """This rank's shards of the case's tensors, as leaves that require gradients."""
    whole = case.tensors()
    side = {"q": "q", "dout": "q", "k": "k", "v": "k"}
    return [cp.shard(whole[n], 1, side=side[n]).requires_grad_() for n in names]


# ---- gradients ----------------------------------------------------------------------------------


def test_shard_attention_unshard_is_attention() -> None:
    """Case 30: the whole way round, with whole tensors as leaves; every rank gets every
    gradient."""
    case = Case(masks.causal(50), heads=(4, 2), sink=True, dlse=True)

    def rank(context: Context) -> dict[str, Tensor]:
        cp = ContextParallel(context, mask=case.mask)
        x = {n: t.requires_grad_(n in ("q", "k", "v", "sink")) for n, t in case.tensors().items()}
        q, k, v = (cp.shard(x[n], 1) for n in "qkv")
        out, lse = cp.attention(q, k, v, sink=x["sink"], return_lse=True)
        # Whole tensors and a loss that every rank computes alike: unshard's backward takes a slice.
        out, lse = cp.unshard(out, 1), cp.unshard(lse, 2)
        ((out * x["dout"]).sum() + (lse * x["dlse"]).sum()).backward()
        grads = {f"d{n}": x[n].grad for n in ("q", "k", "v", "sink")}
        return {"out": out.detach(), "lse": lse.detach(), **grads}

    for result in ranks(case.world, rank):
        check(case, result)


def test_gradcheck() -> None:
    """Case 51: all gradients, sink and lse included, against finite differences in fp64."""
    case = Case(masks.causal(7), world=1, heads=(2, 1), dims=(8, 8), dtype=torch.float64)

    def rank(context: Context) -> bool:
        cp = ContextParallel(context, mask=case.mask)
        inputs = [*shards(cp, case, "q", "k", "v"), torch.zeros(2).double().requires_grad_()]
        return torch.autograd.gradcheck(
            lambda q, k, v, sink: cp.attention(q, k, v, sink=sink, return_lse=True), inputs
        )

    assert ranks(1, rank) == [True]


@pytest.mark.parametrize("world", [1, 3])
def test_lse_is_the_natural_log_sum_exp_and_has_a_gradient(world: int) -> None:
    """Cases 9 and 10: lse = logsumexp(scale q k^T), and lse.mean().backward() is that of it."""
    case = Case(masks.full(24), world=world, heads=(2, 2))
    x = {n: case.tensors()[n].double().requires_grad_() for n in "qk"}
    logits = torch.einsum("bqhd,bkhd->bhqk", x["q"], x["k"]) * case.dims[0] ** -0.5
    want = torch.logsumexp(logits, -1)
    want.mean().backward()

    def rank(context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cp = ContextParallel(context, mask=case.mask)
        q, k, v = shards(cp, case, "q", "k", "v")
        _, lse = cp.attention(q, k, v, return_lse=True)
        (lse.sum() / want.numel()).backward()
        return lse.detach(), q.grad, k.grad, cp.positions()

    for lse, dq, dk, where in ranks(world, rank):
        torch.testing.assert_close(lse.double(), want.detach()[:, :, where], rtol=1e-6, atol=1e-6)
        for got, name in ((dq, "q"), (dk, "k")):
            torch.testing.assert_close(got.double(), x[name].grad[:, where], rtol=1e-5, atol=1e-8)


def test_one_rank_is_plain_attention() -> None:
    """Case 39: world 1 sends nothing to itself and equals torch's attention."""
    case = Case(masks.causal(40), world=1)
    whole = case.tensors()
    got = ring_attention(whole["q"], whole["k"], whole["v"])
    want = torch.nn.functional.scaled_dot_product_attention(
        *(whole[n].transpose(1, 2) for n in "qkv"), is_causal=True
    )
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_strides_do_not_matter() -> None:
    """Inputs cut out of larger tensors, transposed, expanded: the same bits as contiguous
    copies."""
    base = torch.randn(2, 3, 40, 3, 64)  # b, qkv, s, h, d: strides of a fused projection
    q, k, v = base.unbind(1)
    expanded = v[:, :, :1].expand(-1, -1, 3, -1)
    transposed = k.transpose(1, 2).contiguous().transpose(1, 2)
    got = ring_attention(q, transposed, expanded, seq_len=40)
    want = ring_attention(q.contiguous(), k.contiguous(), expanded.contiguous(), seq_len=40)
    assert torch.equal(got, want)


def test_backward_works_when_the_object_is_gone() -> None:
    q = torch.randn(1, 12, 1, 32, requires_grad=True)
    ring_attention(q, q, q, seq_len=12).sum().backward()
    assert q.grad.isfinite().all()


def test_backward_of_the_backward_is_refused() -> None:
    q = torch.randn(1, 12, 1, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(ring_attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        grad.sum().backward()


# ---- torch.compile and checkpointing ------------------------------------------------------------


def _hops(recorder: Recorder) -> int:
    return sum(span.kind == "compute" for span in recorder.spans)


def test_compile_takes_the_layer_whole() -> None:
    """Case 52: fullgraph, forward and backward, equal to eager to the bit."""
    case = Case(masks.causal(64), world=1)

    def rank(context: Context) -> list[tuple[Tensor, ...]]:
        cp = ContextParallel(context, mask=case.mask)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = cp.attention(q * 2, k, v, return_lse=True)
            return out * torch.sigmoid(lse.transpose(1, 2).unsqueeze(-1))

        results = []
        for fn in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            inputs = shards(cp, case, "q", "k", "v")
            out = fn(*inputs)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), inputs)))
        return results

    [(eager, compiled)] = ranks(1, rank)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op == torch.ops.ringfa4.attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_counts_its_hops(selective: bool) -> None:
    """Case 53: full checkpointing runs the forward ring twice; a selective one that saves it,
    once."""
    case, world = Case(masks.full(64), world=2), 2

    def rank(context: Context) -> tuple[int, Tensor]:
        recorder = Recorder()
        cp = ContextParallel(context, mask=case.mask, observer=recorder)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cp.attention(q, k, v).sin()

        inputs = shards(cp, case, "q", "k", "v")
        how: dict[str, Any] = {"use_reentrant": False}
        if selective:
            how["context_fn"] = lambda: create_selective_checkpoint_contexts(_save_attention)
        out = checkpoint(layer, *inputs, **how)
        assert _hops(recorder) == world
        out.sum().backward()
        return _hops(recorder), inputs[0].grad

    def without(context: Context) -> Tensor:
        cp = ContextParallel(context, mask=case.mask)
        q, k, v = shards(cp, case, "q", "k", "v")
        cp.attention(q, k, v).sin().sum().backward()
        return q.grad

    for (hops, grad), want in zip(ranks(2, rank), ranks(2, without), strict=True):
        assert hops == world * (2 if selective else 3)  # forward, (again,) backward
        assert torch.equal(grad, want)


# ---- bad input: the same ValueError on every rank, and the context stays usable ------------------

GOOD = {"q": (1, 8, 4, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)}


def _bad_call(**changes: Any) -> Callable[[ContextParallel], Any]:
    """A call in which rank 1 alone deviates from GOOD."""

    def call(cp: ContextParallel) -> Any:
        mine = changes if cp.rank == 1 else {}
        options = {n: mine[n] for n in ("scale", "sink") if n in mine}
        tensors = []
        for name in "qkv":
            x = torch.zeros(*mine.get(name, GOOD[name]))
            tensors.append(x.to(mine.get(f"{name}_dtype", torch.float32)))
        return cp.attention(*tensors, **options)

    return call


BAD_CALLS = {
    "dtypes differ": (_bad_call(k_dtype=torch.bfloat16), "one dtype.*bfloat16"),
    "integers": (
        _bad_call(q_dtype=torch.int32, k_dtype=torch.int32, v_dtype=torch.int32),
        "int32",
    ),
    "three dimensions": (_bad_call(q=(8, 4, 16)), r"q must be \(b, s, h, d\).*\(8, 4, 16\)"),
    "heads no multiple": (_bad_call(q=(1, 8, 3, 16)), r"multiple.*\(1, 8, 3, 16\)"),
    "k and v heads": (_bad_call(v=(1, 8, 4, 16)), r"agree in length and heads.*\(1, 8, 4, 16\)"),
    "head dimensions": (_bad_call(q=(1, 8, 4, 32)), r"one head dimension.*\(1, 8, 4, 32\)"),
    "batch": (_bad_call(q=(2, 8, 4, 16)), r"batch sizes differ.*\(2, 8, 4, 16\)"),
    "length": (_bad_call(q=(1, 9, 4, 16)), r"shard of q has 8 tokens .*got 9"),
    "zero heads": (_bad_call(q=(1, 8, 0, 16)), "must not be 0"),
    "scale nan": (_bad_call(scale=math.nan), "scale=nan must be finite"),
    "scale inf": (_bad_call(scale=math.inf), "scale=inf must be finite"),
    "sink shape": (_bad_call(sink=torch.zeros(3)), r"per query head \(4\).*\(3,\)"),
    "sink dtype": (_bad_call(sink=torch.zeros(4, dtype=torch.int64)), "int64"),
}


def _good(cp: ContextParallel) -> Tensor:
    return cp.attention(*(torch.ones(*GOOD[n]) for n in "qkv"))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_on_one_rank_is_a_value_error_on_all(name: str) -> None:
    call, message = BAD_CALLS[name]

    def rank(context: Context) -> str:
        cp = ContextParallel(context, seq_len=16)
        with pytest.raises(ValueError, match=message) as caught:
            call(cp)
        assert (_good(cp) == 1).all()  # nothing had moved; the next call is fine
        return str(caught.value)

    said = ranks(2, rank)
    assert said[0] == said[1] and said[0].startswith("rank 1: ")


BAD_OBJECTS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "seq_len, cu_seqlens or a Mask"),
    "mask name": ({"seq_len": 16, "mask": "casual"}, "mask='casual'"),
    "mask and window": ({"mask": masks.causal(16), "window": 3}, "16 x 16.*'window'"),
    "mask and length": ({"mask": masks.causal(16), "seq_len": 17}, "'seq_len'"),
    "right of causal": ({"seq_len": 16, "window": (3, 2)}, r"window=\(3, 2\)"),
    "window text": ({"seq_len": 16, "window": "3"}, "window='3'"),
    "negative window": ({"seq_len": 16, "window": -2}, "-2"),
    "falling cu": ({"cu_seqlens": [0, 9, 4, 16]}, "cu_seqlens_q"),
    "cu not from 0": ({"cu_seqlens": [1, 16]}, "start at 0"),
    "cu_k alone": ({"seq_len": 16, "cu_seqlens_k": [0, 16]}, "cu_seqlens_k needs"),
    "documents differ": ({"cu_seqlens": [0, 8, 16], "cu_seqlens_k": [0, 16]}, "2 query doc"),
    "cu past length": ({"cu_seqlens": [0, 20], "seq_len": 16}, "20"),
    "negative length": ({"seq_len": -1}, "-1"),
    "sharding": ({"seq_len": 16, "sharding": "zagzig"}, "'zagzig'"),
    "sharding world": ({"seq_len": 16, "sharding": shardings.zigzag(16, 3)}, "3 ranks"),
    "sharding length": ({"seq_len": 16, "sharding": shardings.zigzag(15, 2)}, "15"),
    "unlike strides": (
        {"seq_len": 16, "sharding": "striped", "sharding_k": "zigzag"},
        "one stride",
    ),
    "wire": ({"seq_len": 16, "wire": "fp4"}, "wire 'fp4'"),
    "align": ({"seq_len": 16, "align": "center"}, "align='center'"),
}


@pytest.mark.parametrize("name", BAD_OBJECTS)
def test_bad_construction_is_a_value_error_on_all_ranks(name: str) -> None:
    """Also when only rank 1 asks for it."""
    options, message = BAD_OBJECTS[name]

    def rank(context: Context) -> str:
        mine = options if context.rank == 1 else {"seq_len": 16}
        with pytest.raises(ValueError, match=message) as caught:
            ContextParallel(context, **mine)
        assert (_good(ContextParallel(context, seq_len=16)) == 1).all()
        return str(caught.value)

    said = ranks(2, rank)
    assert said[0] == said[1] and said[0].startswith("rank 1: ")


def test_an_unknown_kernel_or_a_wrong_wire_is_refused_at_the_call() -> None:
    x = torch.zeros(1, 16, 2, 32)
    with pytest.raises(ValueError, match=r"unknown kernel 'gpu'.*cpu.*reference"):
        ring_attention(x, x, x, seq_len=16, kernel="gpu")
    with pytest.raises(ValueError, match=r"'bf16' carries torch.bfloat16.*torch.float32"):
        ring_attention(x, x, x, seq_len=16, wire="bf16")
    with pytest.raises(ValueError, match=r"unknown transport 'pigeon'.*torch_p2p"):
        ring_attention(x, x, x, seq_len=16, transport="pigeon")


def test_dropout_is_refused() -> None:
    """Case 11: there is no dropout whose random state could be lost between forward and
    backward."""
    x = torch.zeros(1, 16, 2, 32)
    with pytest.raises(TypeError, match="dropout_p"):
        ring_attention(x, x, x, seq_len=16, dropout_p=0.1)


DISAGREEMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "mask": (lambda r: {"mask": "causal" if r else "full", "seq_len": 16}, "plan"),
    "wire": (lambda r: {"wire": "fp32" if r else None, "seq_len": 16}, "wire"),
    "window": (lambda r: {"window": 3 + r, "seq_len": 16}, "plan"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_build_different_things_are_told(name: str) -> None:
    options, field = DISAGREEMENTS[name]

    def rank(context: Context) -> str:
        with pytest.raises(PlanMismatchError, match=f"disagree about {field}") as caught:
            ContextParallel(context, **options(context.rank))
        return str(caught.value)

    said = ranks(2, rank)
    assert said[0] == said[1]


def test_ranks_that_call_different_things_are_told() -> None:
    """Scale, batch or dtype differ: the first field that differs is named, with both values."""

    def rank(context: Context) -> list[str]:
        cp, said = ContextParallel(context, seq_len=16), []
        r = context.rank
        for batch, scale, dtype, field in (
            (1, 0.5 + r, torch.float32, "scale: rank 0 has 0.5, rank 1 has 1.5"),
            (1 + r, 0.5, torch.float32, "batch: rank 0 has 1, rank 1 has 2"),
            (1, 0.5, torch.bfloat16 if r else torch.float32, "dtype"),
        ):
            x = torch.ones(batch, 8, 2, 32, dtype=dtype)
            with pytest.raises(PlanMismatchError, match=field) as caught:
                cp.attention(x, x, x, scale=scale)
            said.append(str(caught.value))
        return said

    said = ranks(2, rank)
    assert said[0] == said[1]


def test_lengths_are_asked_of_the_ranks() -> None:
    """ring_attention without seq_len: contiguous shards of any lengths, zigzag ones checked."""
    case = Case(masks.full(10), options={})
    whole = case.tensors()

    def rank(context: Context) -> Tensor:
        q = whole["q"][:, slice(0, 4) if context.rank == 0 else slice(4, 10)]
        k, v = (whole[n][:, slice(0, 7) if context.rank == 0 else slice(7, 10)] for n in "kv")
        with pytest.raises(ValueError, match=r"has 5 tokens .*zigzag, 10 in all.*got 4"):
            ring_attention(q, k, v, group=context, mask="full")
        return ring_attention(q, k, v, group=context, mask="full", sharding="contiguous")

    got = torch.cat(ranks(2, rank), 1)
    torch.testing.assert_close(got.double(), dense(case)["out"], rtol=1e-5, atol=1e-6)


def test_a_kernel_that_raises_ends_the_calls_everywhere_and_breaks_the_context() -> None:
    """The peer may finish the call it is in (all it needs was published), but no later one."""
    seen: dict[int, BaseException] = {}

    def main(rank: int, transport: Transport, control: Control) -> None:
        cp = ContextParallel(Context(transport, control), seq_len=16)
        x = torch.ones(1, 8, 1, 32)
        if rank == 1:
            ring = cp.problem.ring(x, x, x, backward=False)
            object.__setattr__(ring, "kernel", _Raises())
        try:
            for _ in range(2):
                cp.attention(x, x, x)
        except Exception as error:
            seen[rank] = error
        with pytest.raises(ContextBrokenError, match="the kernel raised"):
            cp.attention(x, x, x)

    run_ranks(2, main, 5.0)
    assert isinstance(seen[1], FloatingPointError)
    assert isinstance(seen[0], PeerError) and "the kernel raised" in str(seen[0])


class _Raises(CpuKernel):
    """Fails in its first step."""

    def prepare(self, *args: Any) -> Any:
        raise FloatingPointError("the kernel raised")


def test_explain_says_what_was_taken_and_why() -> None:
    cp = ContextParallel(seq_len=16)
    x = torch.zeros(1, 16, 2, 32)
    cp.attention(x, x, x)
    first, why, second = cp.explain()
    assert "transport torch_p2p" in first and "1 rank" in first
    assert why == "auto: tensors are on the CPU"
    assert second.startswith("kernel cpu (auto")
