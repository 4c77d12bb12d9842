"""Topologies: the order of steps, what is carried, how dK/dV come home; and the ring under them.

The properties hold for any mask and sharding under any domains; transports are held to them by
``transport_contract.py``, here the ring runs on the adversarial double.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import any_mask, unit_sharding
from rings import Case, check, ranks, run

from ringfa4 import ContextParallel
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.comm.control import SoloControl
from ringfa4.comm.gloo import Posted
from ringfa4.comm.interface import Schedule
from ringfa4.comm.torch_p2p import Operation, TorchP2PTransport, _Mover
from ringfa4.errors import PeerError, PlanMismatchError
from ringfa4.launch.ring import main
from ringfa4.mask import Mask
from ringfa4.plan import Plan, RecordRange
from ringfa4.schedule import schedule
from ringfa4.topology import Topology
from ringfa4.wire import PLAIN, Direction, Geometry, RecordMap

Operations = Sequence[Operation]

PAIRS = Topology(((0, 1), (2, 3)))

# ---- domains ------------------------------------------------------------------------------------


def test_even_domains_and_domains_by_label() -> None:
    assert Topology.even(6, 3).domains == ((0, 1), (2, 3), (4, 5))
    assert Topology.of(["a", "b", "a", "b"]).domains == ((0, 2), (1, 3))
    assert Topology([[1], [0]]) == Topology(((1,), (0,)))  # type: ignore[arg-type]
    topology = Topology(((0, 3), (2, 1)))
    assert (topology.world, topology.size, topology.count) == (4, 2, 2)
    assert topology.places == ((0, 0), (1, 1), (1, 0), (0, 1))
    assert topology.together(0, 3) and not topology.together(0, 2)


@pytest.mark.parametrize(
    ("domains", "words"),
    [
        (((0, 1), (1, 2)), r"each rank of 0\.\.3 once"),
        (((0, 1), (2, 4)), r"each rank of 0\.\.3 once"),
        (((-1, 0),), r"each rank of 0\.\.1 once"),
        (((0, 1, 2), (3,)), r"one size, they have \[3, 1\] ranks"),
        (((0,), ()), r"one size, they have \[1, 0\] ranks"),
        ((), "lists of ranks"),
        (((0, 1.0),), "lists of ranks"),
        (((False, True),), "lists of ranks"),
    ],
)
def test_bad_domains_are_refused_with_the_values(domains: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Topology(domains)


@pytest.mark.parametrize(("world", "count"), [(5, 2), (4, 0), (0, 1), (2, 4)])
def test_ranks_that_do_not_divide_are_refused(world: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{world} ranks do not make {count} domains"):
        Topology.even(world, count)


def test_a_topology_of_another_world_is_refused() -> None:
    two = shardings.contiguous(8, 2)
    with pytest.raises(ValueError, match="of 4 ranks, the shardings of 2"):
        Plan(masks.full(8), two, two, PAIRS)


def test_the_digest_covers_the_domains() -> None:
    made, mask = shardings.contiguous(8, 4), masks.causal(8)
    several = [None, PAIRS, Topology(((0, 2), (1, 3))), Topology(((1, 0), (2, 3)))]
    plans = [Plan(mask, made, made, topology) for topology in several]
    assert len({plan.digest for plan in plans}) == len(several)
    assert len({hash(plan) for plan in plans}) > 1


# ---- the order of steps -------------------------------------------------------------------------


def test_two_domains_of_two_by_hand() -> None:
    """Lap 0 at home; in lap 1 the opposite number's records come over, then the neighbour's."""
    made = shardings.contiguous(512, 4)
    plan = Plan(masks.full(512), made, made, PAIRS)
    read = [[(s.owner, s.source) for s in plan.steps(rank)] for rank in range(4)]
    assert read == [
        [(0, 0), (1, 1), (2, 2), (3, 1)],
        [(1, 1), (0, 0), (3, 3), (2, 0)],
        [(2, 2), (3, 3), (0, 0), (1, 3)],
        [(3, 3), (2, 2), (1, 1), (0, 2)],
    ]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    size, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(size * count)))
    return Topology(tuple(tuple(order[d * size : (d + 1) * size]) for d in range(count)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any mask and shardings under any topology; also shards of many records."""
    topology = draw(topologies())
    if draw(st.booleans()):
        seq = draw(st.integers(1, 4000))
        cuts = sorted(draw(st.lists(st.integers(0, seq), max_size=3)))
        kinds = [masks.documents([0, *cuts, seq], causal=False), masks.window(seq, left=seq // 7)]
        mask = draw(st.sampled_from([masks.causal(seq), *kinds]))
        makers = [shardings.contiguous, shardings.zigzag, shardings.striped]
        q = k = draw(st.sampled_from(makers))(seq, topology.world)
    else:
        mask = draw(any_mask(12))
        q, k = (draw(unit_sharding(mask, side, topology.world)) for side in "qk")
    return Plan(mask, q, k, topology)


def straddling() -> Plan:
    """Rank 0 needs the first record of rank 1, and carries the second for rank 2."""
    made = shardings.contiguous(1024, 4)
    mask = masks.documents([0, 300, 450, 1024], causal=False)
    return Plan(mask, made, made, Topology(((0, 2), (1, 3))))


def test_a_peer_may_need_another_part_of_what_is_carried() -> None:
    plan = straddling()
    assert plan.step(0, 2).ranges == (RecordRange(0, 0, 1),)
    assert plan.step(0, 2).held == plan.carried(0, 1) == (RecordRange(0, 0, 2),)
    assert (plan.step(2, 3).source, plan.step(2, 3).ranges) == (0, (RecordRange(0, 1, 2),))


def records(ranges: tuple[RecordRange, ...]) -> set[tuple[int, int]]:
    return {(r.chunk, n) for r in ranges for n in range(r.start, r.stop)}


@settings(max_examples=150)
@given(plans())
def test_every_pair_of_ranks_meets_once_and_sources_are_permutations(plan: Plan) -> None:
    everybody = list(range(plan.world))
    for rank in everybody:
        assert sorted(plan.owner(rank, t) for t in everybody) == everybody
        assert plan.step(rank, 0).owner == rank
    for t in everybody:
        assert sorted(plan.owner(rank, t) for rank in everybody) == everybody
        assert sorted(plan.source(rank, t) for rank in everybody) == everybody
        for rank in everybody:
            assert plan.reader(plan.owner(rank, t), t) == rank
            assert plan.asker(plan.source(rank, t), t) == rank
    assert sum(step.area for rank in everybody for step in plan.steps(rank)) == plan.mask.area


@settings(max_examples=150)
@given(plans())
@example(straddling())
def test_what_is_read_is_there_and_crosses_once(plan: Plan) -> None:
    """Sources inside the domain hold what is asked of them; across, each owner's records go to one
    rank of a domain, and are what the domain needs, filled up within a chunk.
    """
    order = plan.order
    crossed = Counter[tuple[int, int]]()
    needed = defaultdict[tuple[int, int], set[tuple[int, int]]](set)
    for rank in range(plan.world):
        domain = order.places[rank][0]
        for step in plan.steps(rank):
            lap, turn = plan.lap(step.index)
            if not order.together(rank, step.owner):
                needed[domain, step.owner] |= records(step.ranges)
            if order.together(rank, step.source):
                at = records(plan.carried(step.source, lap)) if lap else None
                assert at is None or records(step.ranges) <= at, "the peer has not got it"
                assert lap or step.source == step.owner
            else:
                assert turn == 0 and step.source == step.owner
                assert step.held == plan.carried(rank, lap) and records(step.ranges) <= records(
                    step.held
                )
                crossed[domain, step.owner] += bool(step.held)
            if not (lap and turn == 0):
                assert step.held == step.ranges
    assert all(count <= 1 for count in crossed.values())
    for (domain, owner), wanted in needed.items():
        lap = (domain - order.places[owner][0]) % order.count
        carrier = order.peer(owner, lap, 0)
        assert order.places[carrier][0] == domain
        carried = plan.carried(carrier, lap)
        assert records(carried) >= wanted
        for r in carried:
            chunk = [n for c, n in wanted if c == r.chunk]
            assert (r.start, r.stop) == (min(chunk), max(chunk) + 1), "more than it must"


GEOMETRY = Geometry(1, 1, 8, 8, torch.float32)
GIVEN = torch.bfloat16
"""Of dK/dV as a kernel might give them; where ranks add them up, they are in fp32."""


def schedules(plan: Plan, way: Direction) -> list[Schedule]:
    """With the capacities that ranks would agree on."""
    made = [
        schedule(plan, rank, PLAIN[GEOMETRY.dtype], GEOMETRY, way, GIVEN)
        for rank in range(plan.world)
    ]
    names = ("fetch_bytes", "grad_bytes", "carry_bytes")
    most = {name: max(getattr(s, name) for s in made) for name in names}
    return [replace(s, **most) for s in made]


@settings(max_examples=100)
@given(plans())
@example(straddling())
def test_every_transfer_has_both_ends_and_the_right_bytes(plan: Plan) -> None:
    """Followed byte by byte from the outboxes: what arrives is what the step needs."""
    record = PLAIN[torch.float32].record_bytes(GEOMETRY, "backward")
    made = schedules(plan, "backward")
    for rank, own in enumerate(made):
        own.require_valid(rank, plan.world)
    copies: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def cut(whole: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]) -> list:
        out = []
        for offset, nbytes in spans:
            assert offset % record == 0 and nbytes % record == 0
            out += whole[offset // record : (offset + nbytes) // record]
        return out

    def outbox(rank: int) -> list[tuple[int, int]]:
        chunks = plan.k_sharding.shards[rank].chunks
        return [(c, n) for c, chunk in enumerate(chunks) for n in range(chunk.records)]

    steps = range(1, len(made[0].steps))
    for t in steps:
        for rank, own in enumerate(made):
            carry = own.steps[t].carry
            if carry is None:
                continue
            assert not plan.order.together(rank, carry.peer)
            lent = made[carry.peer].steps[t].lend
            assert lent is not None and (lent.peer, lent.spans) == (rank, carry.spans)
            copies[rank, carry.lap] = cut(outbox(carry.peer), carry.spans)
            readers = {
                peer
                for peer, other in enumerate(made)
                for s in other.steps
                if s.receive and (s.receive.peer, s.receive.lap) == (rank, carry.lap)
                if peer != rank
            }
            assert set(carry.readers) == readers
    for t in steps:
        for rank, own in enumerate(made):
            moves = own.steps[t]
            if t == plan.world:
                assert moves.receive is None and moves.send is None
                continue
            step, receive = plan.step(rank, t), moves.receive
            assert (receive is None) == (not step.tasks)
            if receive is None:
                continue
            assert plan.order.together(rank, receive.peer), "only a carry crosses"
            if receive.peer != rank:
                sent = made[receive.peer].steps[t].send
                assert sent is not None
                assert (sent.peer, sent.spans, sent.lap) == (rank, receive.spans, receive.lap)
            whole = outbox(step.owner) if receive.lap is None else copies[receive.peer, receive.lap]
            got = cut(whole, receive.spans)
            assert got == [(r.chunk, n) for r in step.held for n in range(r.start, r.stop)]
    assert sum(bool(s.lend) for own in made for s in own.steps) == len(copies)


@settings(max_examples=100)
@given(plans())
@example(straddling())
def test_gradients_reach_their_owner_once(plan: Plan) -> None:
    """Each step's dK/dV flow to the owner, directly or through who carried, every record counted
    once; contributions have both ends and are numbered in order.
    """
    made = schedules(plan, "backward")
    due, home = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    sums: dict[tuple[int, int], Counter] = defaultdict(Counter)
    for rank in range(plan.world):
        for step in plan.steps(rank):
            count = Counter((step.owner, *r) for r in records(step.ranges))
            due += count
            if step.index == 0:
                home += count
            elif plan.lap(step.index)[1] == 0:
                sums[rank, step.owner] += count
    part, added = (PLAIN[d].record_bytes(GEOMETRY, "backward") for d in (GIVEN, torch.float32))
    for t in range(1, len(made[0].steps)):
        arrived = []
        for rank, own in enumerate(made):
            given, said = own.steps[t].grad_out, plan.returns(rank, t)
            assert (given is None) == (said is None)
            if given is None or said is None:
                continue
            back = added if said.summed else part
            assert (given.peer, given.nbytes) == (said.peer, len(records(said.ranges)) * back)
            coming = made[given.peer].steps[t].grad_in
            assert coming is not None
            assert (coming.peer, coming.index, coming.nbytes) == (rank, given.index, given.nbytes)
            assert said.summed == (plan.lap(t)[1] == 0 and plan.order.size > 1)
            if plan.lap(t)[1] == 0:
                count = sums.pop((rank, said.owner))
                assert set(count) <= {(said.owner, *r) for r in records(said.ranges)}
                assert not plan.order.together(rank, said.peer)
            else:
                assert plan.order.together(rank, said.peer), "only a sum crosses"
                count = Counter((said.owner, *r) for r in records(said.ranges))
            arrived.append((said, count))
        for said, count in arrived:
            if said.peer == said.owner:
                home += count
            else:
                sums[said.peer, said.owner] += count
    assert home == due and not any(sums.values())


# ---- bytes across domains -----------------------------------------------------------------------


def crossing(plan: Plan, way: Direction) -> tuple[int, int]:
    """Bytes of K/V and of dK/dV between ranks of different domains."""
    moves = [(r, s) for r, own in enumerate(schedules(plan, way)) for s in own.steps]
    order = TWO_OF_FOUR
    kv = sum(
        x.nbytes
        for rank, s in moves
        for x in (s.receive, s.carry)
        if x and not order.together(rank, x.peer)
    )
    grads = sum(
        s.grad_out.nbytes
        for rank, s in moves
        if s.grad_out and not order.together(rank, s.grad_out.peer)
    )
    return kv, grads


TWO_OF_FOUR = Topology.even(8, 2)


def test_bytes_across_domains_shrink_by_the_size_of_a_domain() -> None:
    """Full attention, 8 ranks of 4 records: without domains every reader of the other side takes a
    copy of its own, and returns dK/dV of its own. Those are half as long as the sums that domains
    return in their place.
    """
    made = shardings.contiguous(8 * 512, 8)
    record = PLAIN[torch.float32].record_bytes(GEOMETRY, "backward")
    flat, relayed = (
        crossing(Plan(masks.full(8 * 512), made, made, t), "backward") for t in (None, TWO_OF_FOUR)
    )
    assert flat == (8 * 4 * 4 * record, 8 * 4 * 4 * record // 2)
    assert relayed == (8 * 4 * record, 8 * 4 * record)


def test_bytes_across_domains_of_a_causal_zigzag() -> None:
    """Each shard's early run is needed on the other side, the late one by those behind it."""
    made = shardings.zigzag(8 * 512, 8)
    flat, relayed = (
        crossing(Plan(masks.causal(8 * 512), made, made, t), "forward")[0]
        for t in (None, TWO_OF_FOUR)
    )
    record = PLAIN[torch.float32].record_bytes(GEOMETRY, "forward")
    # Ranks 0..3 own runs 0..3 and 15..12, ranks 4..7 own 4..7 and 11..8; two records a run.
    assert relayed == (4 * 2 + 4 * 4) * record
    assert flat == 4 * relayed


def test_a_window_carries_its_halo_only() -> None:
    """Contiguous, one rank back: only the first rank of a domain needs something from outside."""
    made = shardings.contiguous(8 * 512, 8)
    plan = Plan(masks.window(8 * 512, left=200), made, made, TWO_OF_FOUR)
    carried = {rank: plan.carried(rank, 1) for rank in range(8) if plan.carried(rank, 1)}
    # Rank 4 needs the end of rank 3, which rank 7, its opposite number, brings over.
    assert carried == {7: (RecordRange(0, 2, 4),)}
    assert not plan.step(7, 4).tasks and plan.step(4, 5).source == 7


# ---- two-sided transports: what is started only after what --------------------------------------


class _Written(_Mover):
    """Writes down what is started and awaited; nothing moves."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Posted, list[int]]] = []

    def post(self, sends: Operations, receives: Operations, tag: int) -> tuple[Posted, Posted]:
        pair = Posted(), Posted()
        for what, posted, batch in zip(("send", "receive"), pair, (sends, receives), strict=True):
            self.log.append((what, posted, [data.data_ptr() for _, data in batch]))
        return pair

    def settle(self, posted: Posted, what: str, step: int | None) -> None:
        self.log.append(("settle", posted, []))

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing to release."""


@pytest.mark.parametrize("mask", [masks.full(8 * 512), masks.window(8 * 512, left=1100)])
def test_copies_are_sent_when_complete_and_written_when_sent(mask: Mask) -> None:
    """Four domains, so that slots are used again; under the window some carry for others only."""
    made = shardings.contiguous(8 * 512, 8)
    plan = Plan(mask, made, made, Topology.even(8, 4))
    sent = 0
    for rank, own in enumerate(schedules(plan, "forward")):
        transport = TorchP2PTransport(None, torch.device("cpu"), SoloControl(1.0))
        transport.rank, transport.world, transport.mover = rank, 8, _Written()
        exchange = transport.open(own)
        exchange.publish()
        for t in range(1, 8):
            exchange.fetch(t).wait()
        exchange.finish()
        here = {transport.copies.take(lap, own.carry_bytes).data_ptr() for lap in range(2)}
        under_way: dict[Posted, tuple[int, str]] = {}  # into or out of the copies
        for what, posted, where in transport.mover.log:
            if what == "settle":
                under_way.pop(posted, None)
                continue
            for slot in here:
                if not any(slot <= at < slot + own.carry_bytes for at in where):
                    continue
                assert (slot, "receive") not in under_way.values(), "a copy that is not there"
                assert what == "send" or (slot, "send") not in under_way.values(), "still sent"
                under_way[posted] = (slot, what)
                sent += what == "send"
    assert sent


# ---- the ring -----------------------------------------------------------------------------------

CASES = {
    "causal": (masks.causal(700), "zigzag"),
    "skewed": (masks.causal(700), "contiguous"),
    "window": (masks.window(800, left=200), "contiguous"),
    "documents": (masks.documents([0, 130, 130, 400, 650, 700]), "balanced"),
    "straddling": (straddling().mask, "contiguous"),
    "rows": (masks.stack([masks.causal(300), masks.full(300)]), "zigzag"),
}


def case(name: str, topology: Topology | None, world: int, **how: object) -> Case:
    mask, sharding = CASES[name]
    options = {"sharding": sharding, "topology": topology}
    usual = {"heads": (4, 2), "batch": mask.batch, "sink": True, "dlse": True}
    return Case(mask, world=world, options=options, **{**usual, **how})


@pytest.mark.parametrize("domains", [((0, 2), (1, 3)), ((0, 4, 2), (5, 3, 1))])
@pytest.mark.parametrize("name", CASES)
def test_the_ring_under_a_topology(name: str, domains: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology(domains)
    problem = case(name, topology, topology.world)
    check(problem, run(problem))


@pytest.mark.parametrize("domains", [((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_where_the_order_is_that_of_the_flat_ring_so_are_the_bits(
    name: str, domains: tuple[tuple[int, ...], ...]
) -> None:
    got, want = run(case(name, Topology(domains), 4)), run(case(name, None, 4))
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_two_runs_are_equal_to_the_bit() -> None:
    """dK/dV are added up on the way, in plan order, however ranks drift."""
    problem = case("causal", Topology.even(6, 3), 6, dtype=torch.bfloat16)
    first, second = run(problem), run(problem)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_quantised_records_are_carried_as_they_are() -> None:
    """MXFP8: the same bytes reach every rank, so only the order of sums differs."""
    mask = masks.causal(900)
    flat, under = (
        run(
            Case(
                mask, world=4, heads=(2, 1), dims=(64, 64), options={"wire": "mxfp8", "topology": t}
            )
        )
        for t in (None, PAIRS)
    )
    for name, want in flat.items():
        difference = (under[name] - want).abs().max()
        assert difference <= 2e-5 * want.abs().max(), name


class _Fails:
    """An observer that ends the call where ``step`` would be computed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def span(self, kind: str, step: int) -> AbstractContextManager[None]:
        if kind == "compute" and step == self.step:
            raise ZeroDivisionError("deliberate")
        return nullcontext()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_rank_that_fails_before_or_after_it_carried_is_named(step: int) -> None:
    """Every rank ends, at once, whether it waits for a copy, for its readers, or for the call."""

    def rank(context: object) -> tuple[str, int | None]:
        observer = {"observer": _Fails(step)} if context.rank == 1 else {}
        cp = ContextParallel(context, seq_len=2048, mask="full", topology=PAIRS, **observer)
        x = torch.ones(1, 512, 1, 32)
        try:
            for _ in range(3):
                cp.attention(x, x, x)
        except (ZeroDivisionError, PeerError) as error:
            return type(error).__name__, getattr(error, "rank", None)
        raise AssertionError("nobody noticed")

    said = ranks(4, rank, timeout_s=60.0)
    assert said[1] == ("ZeroDivisionError", None)
    assert {said[r] for r in (0, 2, 3)} == {("PeerError", 1)}


def test_ranks_with_other_domains_disagree_before_anything_moves() -> None:
    def rank(context: object) -> None:
        topology = PAIRS if context.rank else Topology(((0, 2), (1, 3)))
        with pytest.raises(PlanMismatchError, match="ranks disagree about plan"):
            ContextParallel(context, seq_len=64, topology=topology)

    ranks(4, rank)


def test_a_topology_that_does_not_fit_is_the_same_error_on_every_rank() -> None:
    def rank(context: object) -> str:
        with pytest.raises(ValueError) as caught:
            ContextParallel(context, seq_len=64, topology=PAIRS)
        return str(caught.value)

    said = ranks(2, rank)
    assert len(set(said)) == 1 and "the topology is of 4 ranks" in said[0]


def test_the_launcher_takes_domains(capsys: pytest.CaptureFixture[str]) -> None:
    """Checked against fp64; fewer bytes move than where nobody carries is the plan's business."""
    how = "--seq 1K --heads 1 --kv-heads 1 --head-dim 32 --virtual-ranks 4 --backward --check"
    assert main([*how.split(), "--domains", "2"]) == 0
    out = capsys.readouterr().out
    assert "check passed" in out and any(
        line.split() == ["domains", "2"] for line in out.split("\n")
    )
    assert main([*how.split(), "--domains", "3"]) == 1
    assert "4 ranks do not make 3 domains" in capsys.readouterr().err


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None);"
        "from ringfa4 import Topology; print(Topology.even(4, 2).domains)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_spans_inside_a_copy_are_joined_where_they_touch() -> None:
    """Two whole chunks of a copy are one span; a part begins where it lies in the copy."""
    from ringfa4.schedule import _inside

    shard = shardings.zigzag(8 * 128 * 2, 2).shards[0]
    held = RecordMap(shard, (RecordRange(0, 1, 4), RecordRange(1, 0, 3)))
    assert _inside(held, held.ranges, 10) == ((0, 60),)
    assert _inside(held, (RecordRange(0, 2, 3), RecordRange(1, 1, 2)), 10) == ((10, 10), (40, 10))
