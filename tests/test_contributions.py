"""dK/dV on their way to the owner: in the dtype that the kernel gives, rounded at most once.

    contribution of rank r in step t:   c = sum of what the tasks give, in fp32;  travels as bf16(c)
    at the owner, in plan order:        own part (never rounded) + bf16(c) + ...

so with one task a row, of a kernel that returns bf16, nothing is rounded that was not already.
Every case runs on virtual ranks, over the adversarial transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rings import Case, check, ranks, run
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.context import Context
from ringfa4.errors import PlanMismatchError
from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, Queries
from ringfa4.kernels.reference import ReferenceKernel
from ringfa4.kernels.registry import load_kernel
from ringfa4.launch.probes import Idle, Paced
from ringfa4.plan import Plan, Task
from ringfa4.ring import Ring, backward, forward
from ringfa4.shard import Shard, Sharding
from ringfa4.topology import Topology
from ringfa4.wire import PLAIN, EncodedShard, Geometry, RecordMap

BF16, FP32 = torch.bfloat16, torch.float32


class _Rounded:
    """Grads that get dK and dV as a library returns them."""

    def __init__(self, grads: Grads) -> None:
        self.grads, self.add_dq = grads, grads.add_dq

    def add_dkv(self, *where: Any) -> None:
        *rows, dk, dv = where
        self.grads.add_dkv(*rows, dk.to(BF16), dv.to(BF16))


class Library(ReferenceKernel):
    """Rounds dK and dV of each task to bf16; hands them over in ``given``."""

    name = "library-double"

    def __init__(self, given: torch.dtype) -> None:
        self.given = given

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.given

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Any,
    ) -> None:
        super().backward(queries, shard, tasks, scale, _Rounded(grads))  # type: ignore[arg-type]


Chosen = Callable[[BlockKernel], None]

ONE_TASK_A_ROW = {
    "full": Case(masks.full(600), world=3, options={"sharding": "contiguous"}),
    "window": Case(masks.window(800, left=150), world=4, options={"sharding": "contiguous"}),
    "documents": Case(
        masks.documents([0, 130, 130, 160, 389, 700]), world=3, options={"sharding": "contiguous"}
    ),
    "uneven": Case(
        masks.causal(500), world=3, options={"sharding": shardings.uneven([310, 0, 190])}
    ),
    "batch rows": Case(
        masks.stack([masks.causal(300), masks.window(300, left=9)]),
        batch=2,
        options={"sharding": "contiguous"},
    ),
}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", ONE_TASK_A_ROW)
def test_one_task_a_row_gives_the_bits_of_fp32_contributions(
    name: str, dtype: torch.dtype, chosen: Chosen
) -> None:
    """fp32 inputs have results in fp32, where any rounding on the way would show."""
    case = replace(ONE_TASK_A_ROW[name], heads=(4, 2), dtype=dtype, dlse=True, sink=True)
    chosen(Library(BF16))
    got = run(case)
    chosen(Library(FP32))
    want = run(case)
    assert all(torch.equal(got[n], want[n]) for n in want)


# ---- several tasks a row ------------------------------------------------------------------------


def dealt(seq: int, world: int, rounds: int) -> Sharding:
    """Runs dealt out like cards: as many tasks a row as ``rounds`` (of two, a sum is rounded once
    wherever it is kept).
    """
    runs = [shard.chunks[0] for shard in shardings.contiguous(seq, world * rounds).shards]
    return Sharding("dealt", seq, tuple(Shard(tuple(runs[r::world])) for r in range(world)))


PAIRS = Topology(((2, 0), (1, 3)))
SEVERAL = {
    "dealt": (masks.full(900), dealt(900, 4, 3)),
    "causal": (masks.causal(900), "zigzag"),
    "striped": (masks.prefix_lm(500, 100), "striped"),
    "documents": (masks.documents([0, 130, 130, 160, 389, 700], causal=False), "balanced"),
    "rows": (masks.stack([masks.causal(400), masks.full(400)]), "zigzag"),
    "uneven": (masks.causal(500), shardings.uneven([310, 0, 150, 40])),
}


def several(name: str, topology: Topology | None, **more: Any) -> Case:
    mask, sharding = SEVERAL[name]
    options = {"sharding": sharding, "topology": topology}
    return Case(mask, world=4, heads=(4, 2), batch=mask.batch, options=options, **more)


def by_definition(case: Case, got: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """dk and dv of ``case``, whole, from the ring's out and lse: step by step as said above."""
    x, kernel = case.tensors(), Library(BF16)
    mask, sharding = case.mask, case.options["sharding"]
    if isinstance(sharding, str):
        sharding = shardings.by_name(sharding, mask, case.world, "k")
    plan = Plan(mask, sharding, sharding, case.options["topology"])
    geometry = Geometry(case.batch, case.heads[1], *case.dims, case.dtype)

    def positions(rank: int) -> Tensor:
        runs = [torch.arange(c.start, c.stop, c.stride) for c in sharding.shards[rank].chunks]
        return torch.cat([torch.empty(0, dtype=torch.int64), *runs])

    def part(rank: int, t: int) -> Tensor:
        """fp32 (b, n, h, dk + dv) of the owner's tokens."""
        own, step = positions(rank), plan.step(rank, t)
        shard, there = sharding.shards[step.owner], positions(step.owner)
        views = []
        for wire in (PLAIN[case.dtype], PLAIN[FP32]):
            size = shard.records * wire.record_bytes(geometry, "backward")
            buffer = torch.empty(size, dtype=torch.uint8)
            views.append(wire.view(geometry, RecordMap.whole(shard), buffer, "backward"))
        records, sums = views
        PLAIN[case.dtype].encode(
            x["k"][:, there], x["v"][:, there], shard, records.buffer, "backward"
        )
        grads = Grads(case.batch, len(own), case.heads[0], case.dims[0], device=own.device)
        queries = kernel.prepare_backward(
            x["q"][:, own], sharding.shards[rank], got["out"][:, own], x["dout"][:, own],
            got["lse"][:, :, own], None,
        )  # fmt: skip
        grads.begin(sums)
        kernel.backward(queries, records, step.tasks, case.dims[0] ** -0.5, grads)
        grads.end()
        chunks = [sums.keys_values(c, 0, chunk.count) for c, chunk in enumerate(shard.chunks)]
        none = torch.empty(case.batch, 0, case.heads[1], sum(case.dims))
        return torch.cat([none, *(torch.cat(pair, -1) for pair in chunks)], 1)

    whole = torch.zeros(case.batch, mask.seq_k, case.heads[1], sum(case.dims))
    laps, turns = plan.order.count, plan.order.size
    for rank in range(plan.world):
        parts = {t: part(plan.reader(rank, t), t) for t in range(plan.world)}
        rounded = {t: c.to(BF16).to(FP32) for t, c in parts.items()}
        total = torch.zeros_like(parts[0])
        for lap in range(laps):
            added = rounded[lap * turns]
            for t in range(lap * turns + 1, (lap + 1) * turns):
                added = added + rounded[t]
            total = total + added
        whole[:, positions(rank)] = total
    return whole[..., : case.dims[0]], whole[..., case.dims[0] :]


@pytest.mark.parametrize("topology", [None, PAIRS, Topology.even(4, 4)], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_part_is_rounded_once_and_sums_never(
    name: str, topology: Topology | None, chosen: Chosen
) -> None:
    """To the bit, also where ranks add up for a domain; results in fp32 hide nothing."""
    chosen(Library(BF16))
    case = several(name, topology)
    got = run(case)
    for key, want in zip(("dk", "dv"), by_definition(case, got), strict=True):
        assert torch.equal(got[key], want), key


@pytest.mark.parametrize("domains", [((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_where_the_order_is_that_of_the_flat_ring_so_are_the_bits(
    name: str, domains: tuple[tuple[int, ...], ...], chosen: Chosen
) -> None:
    chosen(Library(BF16))
    got, want = run(several(name, Topology(domains))), run(several(name, None))
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize(
    ("kernel", "topology"), [("cpu", None), ("cpu", PAIRS), (None, None)], ids=str
)
@pytest.mark.parametrize("name", SEVERAL)
def test_bf16_gradients_are_within_the_bound_of_every_ring(
    name: str, kernel: str | None, topology: Topology | None, chosen: Chosen
) -> None:
    """Twice the error of plain bf16 attention, and a few roundings."""
    case = several(name, topology, dtype=BF16, dlse=True, sink=True)
    if kernel is None:
        chosen(Library(BF16))
    else:
        case.options["kernel"] = kernel
    check(case, run(case))


# ---- what kernels say, what ranks agree on, and how much moves -----------------------------------


def test_what_stands_around_a_kernel_says_what_it_says() -> None:
    for given in (BF16, FP32):
        for kernel in (Paced(Library(given), lambda pairs: None), Idle(Library(given))):
            assert kernel.gradient_dtype(BF16) == given


def test_kernels_that_compute_in_fp32_or_fp64_hand_that_over() -> None:
    """And nobody hands over fp16, whose range is soon passed by a sum of several results."""
    half = torch.float16
    for kernel, given in (("reference", FP32), ("reference-mxfp8", FP32), ("cpu", BF16)):
        made = load_kernel(kernel)
        assert [made.gradient_dtype(d) for d in (BF16, half, FP32)] == [given, FP32, FP32]
    assert load_kernel("reference").gradient_dtype(torch.float64) == torch.float64
    library = load_kernel("cuda_aten")
    assert [library.gradient_dtype(d) for d in (BF16, half)] == [BF16, FP32]


@pytest.mark.parametrize("topology", [None, PAIRS], ids=str)
def test_contributions_are_half_as_long_and_sums_as_long_as_before(
    topology: Topology | None, chosen: Chosen
) -> None:
    case = several("causal", topology)

    def moves(given: torch.dtype) -> list[Any]:
        chosen(Library(given))

        def rank(context: Context) -> Any:
            cp = ContextParallel(context, mask=case.mask, **case.options)
            n = len(cp.positions())
            q, kv = torch.zeros(1, n, 4, 32), torch.zeros(1, n, 2, 32)
            ring = cp.problem.ring(q, kv, kv, backward=True)
            own, agreed = ring.schedule("backward"), ring.agree("backward", {})
            return own.steps, own.grad_bytes, agreed.grad_bytes

        return ranks(4, rank)

    for (narrow, least, most), (wide, *before) in zip(moves(BF16), moves(FP32), strict=True):
        sums = 0
        for t, (now, then) in enumerate(zip(narrow, wide, strict=True)):
            added = topology is not None and t % topology.size == 0
            sums += added and now.grad_out is not None
            for a, b in ((now.grad_out, then.grad_out), (now.grad_in, then.grad_in)):
                assert (a is None) == (b is None)
                assert a is None or a.nbytes == (b.nbytes if added else b.nbytes // 2)
        assert bool(sums) == (topology is not None)
        assert [least, most] == (before if topology else [n // 2 for n in before])


def test_kernels_that_give_other_dtypes_are_refused_on_every_rank_before_anything_moves() -> None:
    """Under one name, as two versions of a library might."""
    case = ONE_TASK_A_ROW["full"]
    x = case.tensors()

    def rank(context: Context) -> tuple[str, bool]:
        cp = ContextParallel(context, mask=case.mask, **case.options)
        own = cp.positions()
        q, k, v, dout = (x[n][:, own] for n in ("q", "k", "v", "dout"))
        plain: Ring = cp.problem.ring(q, k, v, backward=True)
        out, lse = forward(plain, q, k, v, scale=1.0)

        def back(given: torch.dtype) -> tuple[Tensor, ...]:
            ring = replace(plain, kernel=Library(given))
            return backward(ring, q, k, v, out, lse, dout, scale=1.0)[:3]

        opened = context.transport.open
        context.transport.open = None  # type: ignore[method-assign, assignment]
        with pytest.raises(PlanMismatchError) as caught:
            back(FP32 if context.rank == 1 else BF16)
        context.transport.open = opened  # type: ignore[method-assign]
        return str(caught.value), all(bool(g.isfinite().all()) for g in back(BF16))

    said = ranks(3, rank)
    assert len({message for message, _ in said}) == 1 and all(usable for _, usable in said)
    assert said[0][0] == (
        "ranks disagree about gradients: rank 0 has 'torch.bfloat16', rank 1 has 'torch.float32'"
    )
