"""The SM100 kernel alone, with tables made by hand: rounding, masks, states, NaN, synchronisation.

Held to the oracle with integer references, which rounds where the kernel rounds. Without polynomial
exponentials only the order of fp32 sums and the last bit of an exponential are left, and a rounding
of P that they tip over now and then: EXACT. With them, relative errors of 8.6e-5 tip one P in some
hundred by half a unit of E4M3: CLOSE, as in test_contract.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ptx import build
from ptx.machine import ADVERSARIAL, ExecutionError
from torch import Tensor

from ringfa4.kernels.sm100.specs import LEAVE, MERGE, WRITE, Barriers, ForwardSpec
from ringfa4.mask import Band
from ringfa4.state import State, merge_weights
from ringfa4.testing.compare import sqnr_db
from sm100 import executed
from sm100.executed import UNBOUNDED, Case, gaussian

MISSING = [name for name in ("cutlass", "tvm_ffi") if find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the PTX executor"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

EXACT, CLOSE = 90.0, 48.0
"""dB: a sum of 1,000 fp32 terms has 130, one P in 10,000 that is tipped costs 30 more."""

LSE = 2.0**-13

SHAPES = [(64, 64), (128, 128), (192, 128), (128, 64), (64, 128)]


def filled(case: Case, value: float = math.nan) -> State:
    state = case.state()
    for x in (state.acc, state.max, state.sum):
        x.fill_(value)
    return state


def bits(state: State) -> list[Tensor]:
    return [x.view(torch.int32).clone() for x in (state.acc, state.max, state.sum)]


def check(case: Case, db: float, **options: Any) -> None:
    """One launch into a state of NaN, against the oracle."""
    got, want = filled(case), case.state()
    case.execute(got, **options)
    case.expected(want)
    got.written = want.written
    (out, lse), (true_out, true_lse) = (s.finalise(torch.float32) for s in (got, want))
    assert torch.equal(torch.isneginf(lse), torch.isneginf(true_lse))
    finite = ~torch.isneginf(true_lse)
    assert float((lse - true_lse)[finite].abs().max()) <= LSE
    assert sqnr_db(out, true_out) >= db


def test_same_bits_under_every_schedule():
    """Eight records through rings of three slots; items of two tiles, and one of one."""
    case = gaussian(600, 900, heads_q=2, bands=[Band(0, 600, 0, 900, None, 300)], teams=2)
    found = []
    for schedule in ADVERSARIAL:
        state = filled(case)
        case.execute(state, schedule=schedule)
        found.append(bits(state))
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True))


def test_relies_on_nothing_that_the_manual_does_not_promise():
    check(gaussian(256, 300), CLOSE, strict=True)


@pytest.mark.parametrize(("dk", "dv"), SHAPES)
def test_head_dimensions(dk, dv):
    check(gaussian(256, 300, dk=dk, dv=dv, emulated=0), EXACT)


@pytest.mark.parametrize("emulated", [0, 4])
def test_maxima_from_reduced_loads(emulated):
    """SM103: tcgen05.ld.red where nothing is masked, and instructions where something is."""
    case = gaussian(256, 700, emulated=emulated, bands=[Band(0, 256, 0, 700, None, 300)])
    check(replace(case, arch="sm_103a"), CLOSE if emulated else EXACT)


def test_sqnr_to_fp64():
    case = gaussian(256, 1024)
    state = filled(case)
    case.execute(state)
    q, k, v = (x.double().transpose(1, 2) for x in (case.q, case.k, case.v))
    want = torch.softmax(case.scale * (q @ k.mT), -1) @ v
    out = state.acc / state.sum.transpose(1, 2)[..., None]
    assert sqnr_db(out.transpose(1, 2), want) >= 24.5


BANDS = {
    "causal": [Band(0, 300, 0, 300, None, 0)],
    "window": [Band(0, 300, 0, 300, -50, 0)],
    "right of the diagonal": [Band(0, 300, 0, 300, 10, 70)],
    "one key": [Band(0, 300, 255, 256)],
    "two documents": [Band(0, 130, 0, 140), Band(130, 300, 140, 300, None, 10)],
    "disjoint bands of a tile": [Band(0, 300, 0, 20), Band(0, 300, 40, 300, None, 0)],
    "some rows see nothing": [Band(40, 290, 0, 300, -30, -10)],
}


@pytest.mark.parametrize("name", BANDS)
def test_masks(name):
    check(gaussian(300, 300, heads_q=2, bands=BANDS[name], emulated=0), EXACT)


def test_groups_of_heads_and_batch_rows():
    case = gaussian(130, 260, b=2, heads_q=6, heads_kv=2, bands=[Band(0, 130, 0, 260, None, 130)])
    check(case, CLOSE)


@pytest.mark.parametrize("scale", [0.0, -0.1, 3.0])
def test_scales(scale):
    check(gaussian(200, 300, scale=scale, bands=[Band(0, 200, 0, 300, None, 100)]), CLOSE)


def test_reference_moves_far():
    """Logits that rise from record to record by 2^0 to 2^400, and fall as far elsewhere."""
    case = gaussian(128, 640, scale=1.0, emulated=0)
    case.q[...] = 0.0
    case.q[..., 0] = 1.0
    case.q[:, 64:, :, 0] = -1.0
    case.k[..., 0] = torch.arange(640).div(128, rounding_mode="floor")[None, :, None] * 96.0
    check(case, EXACT)


def test_modes_of_rows():
    """Merged, written and left rows side by side, held to the state's algebra."""
    case = gaussian(200, 300, heads_q=2)
    g = torch.Generator().manual_seed(1)
    modes = torch.randint(3, (1, 200), generator=g, dtype=torch.uint8)
    old, new, got = case.state(), filled(case), case.state()
    old.acc.normal_(generator=g)
    old.max.normal_(0, 3, generator=g)
    old.sum.uniform_(0.5, 2, generator=g)
    case.execute(new)
    for x, y in zip((got.acc, got.max, got.sum), (old.acc, old.max, old.sum), strict=True):
        x.copy_(y)
    case.execute(got, modes)
    top, of_old, of_new = merge_weights(old.max, new.max)
    merged = (
        old.acc * of_old.mT[..., None] + new.acc * of_new.mT[..., None],
        top,
        old.sum * of_old + new.sum * of_new,
    )
    for x, y, before, after in zip(
        (got.acc, got.max, got.sum), merged,
        (old.acc, old.max, old.sum), (new.acc, new.max, new.sum), strict=True,
    ):  # fmt: skip
        rows = 1 if x.dim() == 4 else 2
        for mode, want in ((LEAVE, before), (WRITE, after), (MERGE, y)):
            here = (modes[0] == mode).nonzero()[:, 0]
            a, b = x.index_select(rows, here), want.index_select(rows, here)
            # A weight is 2^x with x below 40: its argument has errors of 2^-19 at most.
            assert (
                torch.allclose(a, b, rtol=2.0**-18, atol=1e-5)
                if mode == MERGE
                else torch.equal(a, b)
            )


def test_payload_under_an_empty_row_is_ignored():
    case = gaussian(128, 128, emulated=0)
    state = filled(case)
    state.max.fill_(-math.inf)
    case.execute(state, MERGE)
    want = filled(case)
    case.execute(want, WRITE)
    assert all(torch.equal(a, b) for a, b in zip(bits(state), bits(want), strict=True))


def test_rows_without_keys_are_empty():
    case = gaussian(128, 128, bands=[Band(100, 128, 0, 128)])
    state = filled(case)
    case.execute(state)
    assert not state.acc[:, :100].any() and not state.sum[:, :, :100].any()
    assert torch.isneginf(state.max[:, :, :100]).all()
    assert torch.isfinite(state.acc[:, 100:]).all()


def test_first_records_that_were_not_fetched():
    """Segments count records from the chunk's first, which may lie before the buffer."""
    case = gaussian(128, 512, bands=[Band(0, 128, 300, 500)])
    items, segments = case.tables()
    segments[:, 0] = -2
    whole, part = filled(case), filled(case)
    case.execute(whole)
    case.execute(part, tables=(items, segments), drop=2)
    assert all(torch.equal(a, b) for a, b in zip(bits(whole), bits(part), strict=True))


@pytest.mark.parametrize("teams", [1, 2, 5])
def test_any_number_of_thread_blocks(teams):
    """Works of one and two tiles follow one another on a block, in an order that mixes them."""
    case = gaussian(700, 300, heads_q=2, bands=[Band(0, 700, 0, 300, None, 0)], teams=teams)
    _, segments = case.tables()
    lines = [(0, 5, 1, 640, 640, 60), (0, 0, 2, 0, 0, 256), (0, 4, 1, 512, 512, 128)]
    lines += [(0, 2, 2, 256, 256, 256)]
    items = torch.tensor([(*line, 0, 1) for line in lines], dtype=torch.int32)
    assert segments.tolist() == [[0, 0, 700, 0, 300, -UNBOUNDED, 0, 0]]
    check(case, CLOSE, tables=(items, segments), schedule=ADVERSARIAL[-1])


# ---- NaN ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
@pytest.mark.parametrize("token", [61, 127, 200])
def test_nan_reaches_what_depends_on_it_only(poisoned, band, token):
    """Whether a polynomial or the exponential unit gets to see the token."""
    case = gaussian(256, 256, heads_q=2, bands=[Band(0, 256, 0, 256, None, band)], emulated=12)
    clean = filled(case)
    case.execute(clean)
    getattr(case, poisoned)[0, token, 0, 3] = math.nan
    state = filled(case)
    case.execute(state)
    rows = torch.arange(256)
    reached = rows == token if poisoned == "q" else (rows >= token) | torch.tensor(band is None)
    heads = torch.tensor([True, poisoned != "q"])
    spoilt = reached[:, None] & heads
    assert torch.equal(torch.isnan(state.acc[0]).any(-1), spoilt)
    assert torch.equal(torch.isnan(state.sum[0]).T, spoilt & torch.tensor(poisoned != "v"))
    assert torch.equal(state.sum[0].T[~spoilt], clean.sum[0].T[~spoilt])
    if poisoned == "q":  # in K and V a NaN also leaves its tile's scale to the others
        assert torch.equal(state.acc[0][~spoilt], clean.acc[0][~spoilt])


# ---- what was compiled --------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_both_products_are_block_scaled(arch):
    ptx = executed.compiled(ForwardSpec(128, 128, 12), arch).__ptx__
    # Four steps each: P of two tiles, and again behind the last item; of S of two tiles the late
    # half, and the early one of an item's first record and of others.
    assert len(re.findall(r"block_scale\.block32 +\[%r\d+\], \[", ptx)) == 16  # P, tensor memory
    assert len(re.findall(r"block_scale\.block32 +\[%r\d+\], %rd", ptx)) == 24  # Q, shared memory
    assert ptx.count("tcgen05.mma.") == ptx.count("kind::mxf8f6f4.block_scale.block32")
    assert ("tcgen05.ld.red" in ptx) == (arch == "sm_103a")
    assert ".local" not in ptx


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_fences_surround_the_meetings_of_the_warps(arch):
    """What the late half has read of S, and that O is done, reaches the early half through a named
    barrier; neither the executor nor the static verifier asks for the fences that tell tensor
    memory.
    """
    ptx = executed.compiled(ForwardSpec(128, 128, 12), arch).__ptx__
    meetings = [found.start() for found in re.finditer(r"\bbar\.red\.or", ptx)]
    assert len(meetings) == 4  # of either half, of records with and without masks
    for n in meetings:
        before, after = ptx.rindex("tcgen05.", 0, n), ptx.index("tcgen05.", n)
        assert ptx[before:].startswith("tcgen05.fence::before_thread_sync")
        assert ptx[after:].startswith("tcgen05.fence::after_thread_sync")


@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("half", [0, 1])
def test_no_product_overwrites_what_was_not_read(tile, half):
    """Without the waits for a half of a tile to be loaded, its S or the scales over it are lost."""
    case = gaussian(256, 640, dk=64, dv=64, teams=1)
    right = filled(case)
    case.execute(right, strict=True)
    kernel = executed.captured(case.spec, case.arch)
    original, spec = kernel.ptx, case.spec
    barrier = Barriers.of(spec).s_loaded + 2 * tile + half
    register = re.compile(rf"add\.s32 \t(%r\d+), %r\d+, {spec.shared.barriers + 8 * barrier};")
    waited = "|".join({found[1] for found in register.finditer(original)})
    waits = rf"mbarrier\.try_wait\S+ p, \[({waited})\], [^;]*;"
    mutant, dropped = re.subn(waits, "mov.pred p, 1;", original)
    assert dropped >= 2
    try:
        kernel.use(mutant)
        with pytest.raises(ExecutionError, match=r"race|complete"):
            for schedule in ADVERSARIAL:
                case.execute(filled(case), schedule=schedule)
    finally:
        kernel.use(original)


@pytest.mark.slow
def test_planted_faults_are_caught():
    """A commit, wait, arrival, fence, copy or product less. Survivors: waits for slots that were
    never filled, for barriers before an exit, and fences with nothing behind them.
    """
    from ptx.mutate import survivors

    case = gaussian(300, 900, dk=64, dv=64, bands=[Band(0, 300, 0, 900, None, 200)], teams=1)
    want = filled(case)
    result = case.execute(want)
    kernel = executed.captured(case.spec, case.arch)
    original, right = kernel.ptx, bits(want)

    def still_right(ptx: str, schedule: Any) -> bool:
        kernel.use(ptx)
        state = filled(case)
        case.execute(state, schedule=schedule)
        return all(torch.equal(a, b) for a, b in zip(bits(state), right, strict=True))

    try:
        counts, _ = survivors(original, result.by_line, still_right, limit=6)
    finally:
        kernel.use(original)
    always = ("drop commit", "drop arrive", "drop copy", "drop mma", "drop scale copy")
    for kind in (*always, "drop reducing barrier"):
        caught, planted = counts[kind]
        assert planted and caught == planted, (kind, counts)
    caught, planted = (sum(n[i] for n in counts.values()) for i in (0, 1))
    assert caught >= 0.85 * planted, counts
