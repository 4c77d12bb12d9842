"""What one rank does in tests of the ring between processes, on any transport and device.

Plain functions of (rank, transport, control, **plain data), like the bodies of
:mod:`transport_contract`: over gloo on the CPU in test_two_processes.py, over NVSHMEM, symmetric
memory and NCCL between GPUs in gpu/test_two_gpus.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rings import Case, dense, run
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4.comm import torch_p2p
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.comm.streams import CudaLane
from ringfa4.context import Context
from ringfa4.errors import PeerError
from ringfa4.shard import uneven
from ringfa4.testing.oracles import attention

KERNELS = {"cpu": "cpu", "cuda": "cuda_aten"}
"""A kernel of each device whose gradients repeat to the bit, with PyTorch's switch for it."""

SLEEP_CYCLES = 2_000_000
"""Longest pause before a copy on a GPU: about 1 ms."""

SLEEP_S = 0.002
"""Longest pause before a message on the CPU."""


def sizes(world: int, name: str) -> list[int]:
    """Shards of very different lengths; of "empty", rank 0 owns nothing."""
    first = {"lopsided": 140, "empty": 0}[name]
    return [first, *(3 + 40 * rank for rank in range(1, world))]


PROBLEMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda world: {"mask": masks.causal(80 * world)},
    "full": lambda world: {"mask": masks.full(80 * world)},
    "window": lambda world: {
        "mask": masks.window(150 * world, left=40),
        "options": {"sharding": "contiguous"},
    },
    "documents": lambda world: {
        "mask": masks.documents([0, 40, 133, 150 * world]),
        "options": {"sharding": "balanced"},
    },
    **{
        name: lambda world, name=name: {  # type: ignore[misc]
            "mask": masks.causal(sum(sizes(world, name))),
            "options": {"sharding": uneven(sizes(world, name))},
        }
        for name in ("lopsided", "empty")
    },
}
"""Name -> what a Case over so many ranks has beside the usual."""


def _device(transport: Transport) -> str:
    """As a Case wants it, the index included."""
    return str(transport.device)


def _mine(transport: Transport, control: Control) -> Callable[..., list[Any]]:
    """A runner for :func:`rings.run` that runs this rank, here; the others are elsewhere."""
    context = Context(transport, control)
    return lambda world, fn: [fn(context)]


def _owned(whole: Tensor) -> Tensor:
    """Where a tensor put together from one rank's rows has some."""
    return ~whole.isnan()


def exact_ring(rank: int, transport: Transport, control: Control, *, problem: str) -> int:
    """fp64 by the reference kernel: what is left beside dense attention is the order of sums."""
    made = PROBLEMS[problem](transport.world)
    options = {"kernel": "reference", **made.pop("options", {})}
    case = Case(
        **made, world=transport.world, heads=(4, 2), dims=(32, 16), batch=2,
        dtype=torch.float64, sink=True, dlse=True, options=options, device=_device(transport),
    )  # fmt: skip
    got, want = run(case, _mine(transport, control)), dense(case)
    seen = 0
    for name, tensor in got.items():
        here, truth = _owned(tensor), want[name].cpu()
        # Sums of up to 600 products in fp64: 2^-53 * sqrt(600) relative, with room for exp.
        assert torch.allclose(tensor[here], truth[here], rtol=1e-11, atol=1e-11), name
        seen += int(here.sum())
    return seen


def ring_as_on_virtual_ranks(
    rank: int, transport: Transport, control: Control, *, wire: str | None = None
) -> bool:
    """Forward and backward over processes give the bits that virtual ranks give."""
    world, device = transport.world, _device(transport)
    case = Case(
        mask=masks.causal(512 * world), world=world, heads=(4, 2), dims=(64, 64),
        dtype=torch.bfloat16, device=device,
        options={"kernel": KERNELS[transport.device.type], "wire": wire},
    )  # fmt: skip

    def all_here(world: int, fn: Callable[[Context], Any]) -> list[Any]:
        return run_ranks(world, lambda r, t, c: fn(Context(t, c)), 60.0, device)

    with deterministic():
        mine, everything = run(case, _mine(transport, control)), run(case, all_here)
    for name, whole in everything.items():
        here = _owned(mine[name])
        assert bool(here.any()) and torch.equal(mine[name][here], whole[here]), name
    return True


@contextmanager
def deterministic() -> Iterator[None]:
    """PyTorch's switch, without which its GPU kernels sum dQ in any order."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def late_copies(seed: int) -> Iterator[None]:
    """Whatever moves starts late by a random time: copies between GPUs on the device's clock,
    messages over NCCL by a busy stream, messages over gloo by a sleeping host.
    """
    draw, copy = random.Random(seed), CudaLane.copy
    posts = {mover: mover.post for mover in (torch_p2p._GlooMover, torch_p2p._NcclMover)}

    def sleep_on_device() -> None:
        torch.cuda._sleep(int(draw.random() ** 2 * SLEEP_CYCLES))

    def late_copy(self: CudaLane, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            sleep_on_device()
        copy(self, into, source)

    def late_post(self: Any, *batch: Any) -> Any:
        if isinstance(self, torch_p2p._NcclMover):
            sleep_on_device()
        else:
            time.sleep(draw.random() ** 2 * SLEEP_S)
        return posts[type(self)](self, *batch)

    CudaLane.copy = late_copy  # type: ignore[method-assign]
    for mover in posts:
        mover.post = late_post  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaLane.copy = copy  # type: ignore[method-assign]
        for mover, post in posts.items():
            mover.post = post  # type: ignore[method-assign]


def ring_repeats(
    rank: int, transport: Transport, control: Control, *, calls: int, late: bool, wire: str = "bf16"
) -> int:
    """Forward and backward back to back, the same bits every time; ``late``: with delays.

    Three problems in turn, since buffers alternate in twos: what is read too late or overwritten
    too early is another problem's. The device is looked at only at the end: ranks drift as far as
    the transport lets them.
    """
    world, device = transport.world, transport.device
    cp = ContextParallel(
        Context(transport, control), seq_len=256 * world, wire=wire, kernel=KERNELS[device.type]
    )
    gen = torch.Generator(device).manual_seed(rank)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, 256, heads, 64, device=device, generator=gen).bfloat16()

    problems = [[drawn(4), *(drawn(2) for _ in range(2)), drawn(4)] for _ in range(3)]
    first: list[list[Tensor]] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(calls):
        *qkv, dout = problems[call % 3]
        leaves = [x.detach().requires_grad_() for x in qkv]
        with deterministic(), late_copies(rank + world * call) if late else nullcontext():
            out = cp.attention(*leaves)
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        if call < 3:
            first.append(found)
        for a, b in zip(first[call % 3], found, strict=True):
            wrong += (a.view(torch.int16) != b.view(torch.int16)).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements of {calls} calls differ from the first calls'"
    assert all(bool(x.isfinite().all()) and bool(x.any()) for found in first for x in found)
    return calls


def through_autograd(rank: int, transport: Transport, control: Control) -> bool:
    """Shard, two layers, unshard, and the gradient of whole tensors: as a model uses the ring."""
    world, device = transport.world, transport.device
    seq = 64 * world
    cp = ContextParallel(Context(transport, control), seq_len=seq, kernel="reference")
    gen = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, seq, 2, 16, generator=gen, dtype=torch.float64) for _ in range(3))

    def layers(attend: Callable[..., Tensor], whole: list[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in whole]
        out = attend(*leaves)
        return [
            out.detach().cpu(),
            *(x.cpu() for x in torch.autograd.grad(out.square().sum(), leaves)),
        ]

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
        return cp.unshard(cp.attention(cp.attention(q, k, v), k, v), dim=1)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masks.causal(seq)
        return attention(attention(q, k, v, mask)[0], k, v, mask)[0]

    got = layers(ring, [x.to(device) for x in (q, k, v)])
    want = layers(alone, [q, k, v])
    # The loss is every rank's own copy of the whole; each rank's gradient is of its own copy.
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(got, want, strict=True))
    return True


def ring_killed(rank: int, transport: Transport, control: Control, *, culprit: int) -> float:
    """One rank dies between two calls; the seconds until the others know, and whom."""
    cp = ContextParallel(
        Context(transport, control), seq_len=128 * transport.world, mask="full", kernel="reference"
    )
    x = torch.ones(1, 128, 1, 32, device=transport.device)
    assert bool((cp.attention(x, x, x) == 1).all())
    if rank == culprit:
        os._exit(9)
    since = time.monotonic()
    try:
        for _ in range(3):
            cp.attention(x, x, x)
    except PeerError as error:
        assert f"rank {culprit}" in str(error), error
        return time.monotonic() - since
    raise AssertionError("the call ended although a rank was not there")
