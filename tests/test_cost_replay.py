"""The replay of softmax loops beside the matrix unit, on loops made by hand that can be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ringfa4.launch import cost_replay
from ringfa4.launch.cost_products import EARLY, LATE, Order, Product
from ringfa4.launch.cost_replay import Kernel, Op, Policy, Replay, Timing, replay, rescaling

FAIR = Policy(greedy=False, queue=0)


def cycles(kernel: Kernel, timing: Timing, policy: Policy = FAIR) -> float:
    return Replay(kernel, timing, policy).run()


def loop(*between: Op, warps: int = 1, **options: Any) -> Kernel:
    """A wait for S, ``between``, a publication of all of P."""
    return Kernel(((S, *between, P),) * warps, (1.0,), False, **options)


def timing(products: float, handshake: float = 0) -> Timing:
    """Both products take as long."""
    return Timing(8, products, products, handshake)


S, P, LOADED, MEET = (Op("other", 1, event=event) for event in ("S", "P", "loaded", "pair"))
QUICK = timing(1)


# ---- the replay ---------------------------------------------------------------------------------


def test_an_op_reads_what_it_writes() -> None:
    for op in (Op("exp", 3, 1, 2, 5), Op("load", 1, registers=32), P, Op("shared", 2, event="S")):
        assert Op.read(str(op)) == op
    with pytest.raises(ValueError, match="'sine'"):
        Op.read("sine/1/7/7/0")


def test_products_alone_bound_a_loop_that_does_nothing() -> None:
    assert cycles(loop(), timing(100, 20)) == pytest.approx(200)


def test_the_chain_of_a_tile_bounds_when_the_handshake_is_long() -> None:
    """P follows S by 1 cycle; both products and the handshake until S again; two tiles at once."""
    assert cycles(loop(), timing(100, 1000)) == pytest.approx((1 + 2 * 100 + 1000) / 2)


def test_a_busy_unit_bounds_and_both_tiles_share_it() -> None:
    kernel = loop(*[Op("exp", 1)] * 100)
    for policy in cost_replay.POLICIES:
        assert cycles(kernel, QUICK, policy) == pytest.approx(800, rel=0.01)
    two = loop(*[Op("exp", 1)] * 50, warps=2)
    assert cycles(two, QUICK) == pytest.approx(800, rel=0.01)


def test_a_scheduler_issues_one_instruction_a_cycle() -> None:
    assert cycles(loop(*[Op("other", 1)] * 298), QUICK) == pytest.approx(300, rel=0.01)


def test_stall_counts_and_scoreboards_hold_a_warp() -> None:
    stalled = loop(*[Op("other", 10)] * 50)
    assert cycles(stalled, QUICK) == pytest.approx((50 * 10 + 3) / 2, abs=2)
    exp, use = Op("exp", 1, results=0), Op("alu", 1, waits=1)
    assert cycles(loop(*[exp, use] * 20), QUICK) == pytest.approx((20 * (18 + 1) + 3) / 2, rel=0.05)


def test_a_part_of_p_starts_its_share_of_the_product() -> None:
    """Three quarters of a product of 100 cycles run while the rest of P is made."""
    long = [Op("other", 10)] * 50
    whole = cycles(loop(*long), timing(100))
    parts = Kernel(((S, P, *long, P),), (0.75, 0.25), False)
    assert whole - cycles(parts, timing(100)) == pytest.approx(75 / 2, abs=1)


def test_rescaling_holds_the_product_of_p() -> None:
    factor = Op("other", 1, event="factor")
    with_it, without = loop(factor, rescaling=rescaling(128)), loop(factor)
    assert cycles(with_it, timing(100, 400)) > cycles(without, timing(100, 400)) + 50


def test_the_scales_of_one_tile_wait_until_the_other_is_loaded() -> None:
    """S of either tile follows the loads of the other, so loads of 1,000 cycles take turns."""
    late = [Op("other", 10)] * 100
    loops = ((S, P, *late, LOADED),)
    free, bound = (cycles(Kernel(loops, (1.0,), shared), timing(10)) for shared in (False, True))
    assert free == pytest.approx(1000 / 2, rel=0.05) and bound == pytest.approx(1000, rel=0.05)


WORK = [Op("exp", 1)] * 10
AT_ONCE, AFTERWARDS = (S, MEET, *WORK, *WORK, P), (S, *WORK, *WORK, MEET, P)


@pytest.mark.parametrize(
    "loops", [((S, *WORK, MEET, *WORK, P),) * 2, (AT_ONCE, AFTERWARDS)], ids=["same", "own"]
)
def test_warps_of_a_tile_meet(loops: tuple[tuple[Op, ...], ...]) -> None:
    """Neither passes the barrier before the other has come to it."""
    run = Replay(Kernel(loops, (1.0,), False), QUICK, FAIR)
    issue, met = run._issue, []

    def watched(warp: Any, now: float) -> None:
        if warp.loop[warp.at] is MEET:
            (other,) = (w for w in run.warps if w.tile == warp.tile and w is not warp)
            met.append((other.turn, other.at) >= (warp.turn, other.loop.index(MEET)))
        issue(warp, now)

    run._issue = watched  # type: ignore[method-assign]
    run.run(turns=6)
    assert len(met) >= 20 and all(met)
    with pytest.raises(ValueError, match="meet"):
        loop(MEET)
    with pytest.raises(ValueError, match="meet"):
        Kernel((AT_ONCE, (S, P)), (1.0,), False)


# ---- S in halves --------------------------------------------------------------------------------


def order(**changes: Any) -> list[Product]:
    made = Order(
        parts=(0.75, 0.25), publications=(2, 1), halves=True, shared_scales=True, rescaled=False,
        values=100, logits=60,
    )  # fmt: skip
    return replace(made, **changes).products(turns=2)


def made(products: Sequence[Product]) -> list[str]:
    """What they are, e.g. "S0 late" or "O 75"."""
    names = {LATE: "late", EARLY: "early"}
    return [
        f"S{p.logits[0][0]} {names[p.logits[0][1]]}" if p.logits else f"O {p.cycles:g}"
        for p in products
    ]


def test_products_of_halves_come_in_the_order_of_the_kernel() -> None:
    products = order()
    assert made(products[:5]) == ["S0 late", "S0 early", "S1 late", "S1 early", "S0 early"]
    turn = ["O 75", "O 25", "S0 late", "S1 early", "O 75", "O 25", "S1 late", "S0 early"]
    assert made(products[5:]) == 2 * turn
    assert {p.cycles for p in products if p.logits} == {60}


def test_products_of_halves_wait_for_what_they_overwrite_and_use() -> None:
    """Of the second turn."""
    ready, rest, late0, early1, ready1, rest1, late1, early0 = (p.after for p in order()[-8:])
    # Both warps' first publications, then the late one's second: it makes two a turn, the other 1.
    assert ready == (("P", 0, LATE, 2), ("P", 0, EARLY, 1))
    assert rest == (("P", 0, LATE, 3), ("P", 0, EARLY, 1))
    assert (ready1, rest1) == (
        (("P", 1, LATE, 2), ("P", 1, EARLY, 1)), (("P", 1, LATE, 3), ("P", 1, EARLY, 1)),
    )  # fmt: skip
    # Its scales: in the late half of the other tile, of this record (tile 1) or the one before.
    assert late0 == (("loaded", 1, LATE, 1),) and late1 == (("loaded", 0, LATE, 2),)
    # Its scales: in the tile's own late half; itself: over the tile's early half.
    assert early1 == (("loaded", 1, LATE, 1), ("loaded", 1, EARLY, 1))
    assert early0 == (("loaded", 0, LATE, 2), ("loaded", 0, EARLY, 2))


def test_whole_products_wait_as_they_did() -> None:
    products = order(halves=False, publications=(2, 2), rescaled=True)
    assert made(products[:2]) == ["S0 late", "S1 late"]
    assert made(products[2:]) == 2 * ["O 75", "O 25", "S0 late", "O 75", "O 25", "S1 late"]
    assert products[2].after == (("P", 0, 0, 0), ("P", 0, 1, 0), ("O", 0, 0, 0))
    assert products[4].after == (("loaded", 1, 0, 0), ("loaded", 1, 1, 0))
    assert products[4].logits == ((0, 0), (0, 1))


def halves(late: Sequence[Op], early: Sequence[Op], shared_scales: bool = True) -> Kernel:
    return Kernel(((S, *late), (S, *early)), (1.0,), shared_scales, halves=True)


def test_products_of_halves_alone_bound_loops_that_do_nothing() -> None:
    kernel = halves((LOADED, P), (LOADED, P))
    assert cycles(kernel, Timing(8, 100, 60, handshake=20)) == pytest.approx(100 + 2 * 60)


def test_the_early_half_is_not_in_the_chain() -> None:
    """From O to O: 100 of O, 60 of the late half, 102 from S to P, the handshake; the early half is
    multiplied as soon as S is loaded, 100 cycles before P. The whole S would be 60 more. A warp may
    find the scheduler taken by three others.
    """
    work = [Op("other", 10)] * 10
    kernel = halves((LOADED, *work, P), (LOADED, *work, P), shared_scales=False)
    slow = Timing(8, 100, 60, handshake=1000)
    assert cycles(kernel, slow) == pytest.approx((100 + 60 + 102 + 1000) / 2, abs=3)
    whole = replace(kernel, halves=False)
    assert cycles(whole, replace(slow, logits=120)) == pytest.approx(
        (100 + 120 + 102 + 1000) / 2, abs=3
    )


def test_only_the_late_half_holds_up_the_other_tile() -> None:
    """The scales of a late half lie in the other tile's: loads of 1,000 cycles of late halves take
    turns, those of early halves do not.
    """
    slow, quick = (P, *[Op("other", 10)] * 100, LOADED), (LOADED, P)
    assert cycles(halves(slow, quick), timing(10)) == pytest.approx(1000, rel=0.05)
    assert cycles(halves(quick, slow), timing(10)) == pytest.approx(1000 / 2, rel=0.05)


def test_chain_is_counted_from_the_late_half() -> None:
    """Both warps publish 300 cycles after the late half; the early one has come long before."""
    work = [Op("other", 10)] * 30
    kernel = halves((LOADED, MEET, *work, P), (LOADED, MEET, *work, P))
    found = replay(kernel, Timing(8, 100, 60, handshake=100), [FAIR])
    assert found.chain == pytest.approx(300, abs=10)


def test_events_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="publications"):
        loop(P)
    with pytest.raises(ValueError, match="publications"):
        Kernel(((S, P), (S,)), (1.0,), False)
    with pytest.raises(ValueError, match="sum to 1"):
        Kernel(((S, P),), (0.5,), False)
    with pytest.raises(ValueError, match="begins with its wait"):
        Kernel(((P,),), (1.0,), False)
    for options in ({"shared_scales": True}, {"shared_scales": False, "halves": True}):
        with pytest.raises(ValueError, match="'loaded'"):
            Kernel(((S, P), (S, LOADED, P)), (1.0,), **options)
    with pytest.raises(ValueError, match="halves"):
        Kernel(((S, LOADED, P),), (1.0,), False, halves=True)
    with pytest.raises(ValueError, match="'factor'"):
        loop(rescaling=rescaling(16))
    never = (Op("other", 1, event="factor"),)
    with pytest.raises(RuntimeError, match="nothing can go on"):
        cycles(loop(Op("other", 1, event="factor"), rescaling=never), QUICK)
