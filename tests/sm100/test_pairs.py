"""Pairs of thread blocks: what one alone computes, to the bit, and what only a pair can get wrong.

A pair takes four records of queries at a time, its second thread block the odd ones; each holds
half of K's keys and of V's columns. Everything else about the kernel is in test_kernel.py.
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

from ringfa4.kernels.sm100.specs import MERGE, ForwardSpec
from ringfa4.mask import Band
from sm100 import executed
from sm100.executed import Case, gaussian
from sm100.test_kernel import EXACT, SHAPES, bits, check, filled

MISSING = [name for name in ("cutlass", "tvm_ffi") if find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the PTX executor"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def pairs(sq: int, sk: int, **options: Any) -> Case:
    return gaussian(sq, sk, **({"ctas": 2, "arch": "sm_103a", "emulated": 0} | options))


def alone(case: Case) -> Case:
    return replace(case, ctas=1)


def computed(case: Case, **options: Any) -> list[torch.Tensor]:
    state = filled(case)
    case.execute(state, **options)
    return bits(state)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_same_bits_under_every_schedule():
    """Works of four records, four and one, through rings that are used again."""
    case = pairs(1100, 900, heads_q=2, bands=[Band(0, 1100, 0, 900, None, 300)], teams=2)
    wanted = computed(alone(case))
    for schedule in ADVERSARIAL:
        assert same(computed(case, schedule=schedule), wanted), schedule


def test_relies_on_nothing_that_the_manual_does_not_promise():
    check(pairs(512, 300), EXACT, strict=True)


@pytest.mark.parametrize(
    ("dk", "dv", "arch"),
    [
        (128, 128, "sm_103a"),
        *(pytest.param(*dims, "sm_103a", marks=pytest.mark.slow) for dims in SHAPES),
        pytest.param(128, 128, "sm_100a", marks=pytest.mark.slow),
    ],
)
def test_head_dimensions(dk, dv, arch):
    case = pairs(512, 400, dk=dk, dv=dv, arch=arch)
    check(case, EXACT)
    assert same(computed(case), computed(alone(case)))


BANDS = {
    "causal": [Band(0, 600, 0, 600, None, 0)],
    "each tile sees other records": [Band(0, 600, 0, 600, -20, 0)],
    "a record sees nothing": [Band(0, 128, 0, 600), Band(256, 600, 0, 300)],
    "two documents": [Band(0, 130, 0, 140), Band(130, 600, 140, 600, None, 10)],
}


@pytest.mark.parametrize("name", BANDS)
def test_masks(name):
    case = pairs(600, 600, dk=64, dv=64, heads_q=2, bands=BANDS[name])
    check(case, EXACT)
    assert same(computed(case), computed(alone(case)))


@pytest.mark.parametrize("sq", [60, 128, 200, 300, 384, 700])
def test_odd_numbers_of_records(sq):
    """The second thread block's last tile is computed twice and stored once; a state of NaN, and
    one that is merged into, are touched in no other way.
    """
    case = pairs(sq, 200, dk=64, dv=64, bands=[Band(0, sq, 0, 200, None, 150)])
    check(case, EXACT)
    found = []
    for one in (case, alone(case)):
        state = one.state()
        state.acc.fill_(1.0), state.max.fill_(0.5), state.sum.fill_(2.0)
        one.execute(state, MERGE)
        found.append(bits(state))
    assert same(*found)


@pytest.mark.parametrize("teams", [1, 2, 4])
def test_any_number_of_pairs(teams):
    """Works of one tile and of two, of one record to four, follow one another on a pair."""
    case = pairs(1200, 300, dk=64, dv=64, heads_q=2, teams=teams)
    case.bands = [Band(0, 1200, 0, 300, None, 0)]
    lines = [(0, 8, 1, 1024, 1024, 176), (0, 0, 2, 0, 0, 512), (0, 7, 1, 896, 896, 128)]
    lines += [(0, 4, 2, 512, 512, 384)]
    items = torch.tensor([(*line, 0, 1) for line in lines], dtype=torch.int32)
    check(case, EXACT, tables=(items, case.tables()[1]), schedule=ADVERSARIAL[-1])


@pytest.mark.parametrize("column", [3, 35])
def test_nan_of_either_half_of_v_reaches_all_columns_in_both_thread_blocks(column):
    """Of rows that see the token; rows that do not, in both thread blocks, stay as they were."""
    case = pairs(512, 512, dk=64, dv=64, bands=[Band(0, 512, 0, 512, None, 0)])
    clean = filled(case)
    case.execute(clean)
    case.v[0, 200, 0, column] = math.nan
    for schedule in ADVERSARIAL:
        state = filled(case)
        case.execute(state, schedule=schedule)
        sees = torch.arange(512) >= 200  # from the middle of the second thread block's first tile
        nan = torch.isnan(state.acc[0, :, 0])
        assert torch.equal(nan.all(-1), sees) and torch.equal(nan.any(-1), sees)
        assert torch.equal(state.sum, clean.sum)


# ---- planted faults -----------------------------------------------------------------------------

REMOTE = r"mbarrier\.arrive\S*\.shared::cluster\.b64 _, \[there\];"
WAIT = r"RETRY: mbarrier\.try_wait\.parity\.shared[^}]*bra RETRY;"
FAULTS = {
    "the first thread block alone is told of products": (r"mov\.b16 both, 3;", "mov.b16 both, 1;"),
    "marks stay where they are": (r"st\.shared::cluster\.v4[^;]*;", ""),
    "a thread block leaves before the other": (
        r"barrier\.cluster\.arrive[^;]*; barrier\.cluster\.wait[^;]*;(?!.*barrier\.cluster)", "",
    ),
    "products of one thread block's rows": (
        r"tcgen05\.mma\.cta_group::2", "tcgen05.mma.cta_group::1",
    ),
}  # fmt: skip


@pytest.fixture
def causal():
    """Records with a mask and without, NaN to be found, slots used again."""
    case = pairs(512, 640, dk=64, dv=64, bands=[Band(0, 512, 0, 640, None, 128)], teams=1)
    case = replace(case, q=case.q.repeat(1, 1, 2, 1))
    case.v[0, 600, 0, 40] = math.nan
    return case


def is_caught(case: Case, ptx: str) -> bool:
    """Whether some schedule finds that this is not what was compiled."""
    kernel = executed.captured(case.spec, case.arch)
    wanted, original = computed(case, strict=True), kernel.ptx
    assert ptx != original
    kernel.use(ptx)
    try:
        for schedule in ADVERSARIAL:
            try:
                if not same(computed(case, schedule=schedule, strict=True), wanted):
                    return True
            except ExecutionError:
                return True
        return False
    finally:
        kernel.use(original)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name, causal):
    pattern, instead = FAULTS[name]
    ptx = executed.captured(causal.spec, causal.arch).ptx
    assert is_caught(causal, re.sub(pattern, instead, ptx, flags=re.S))


@pytest.mark.slow
def test_every_arrival_at_the_leader_is_needed(causal):
    """Of softmax, epilogue, relay and guard."""
    ptx = executed.captured(causal.spec, causal.arch).ptx
    found = list(re.finditer(REMOTE, ptx))
    assert len(found) > 10
    for arrival in found:
        mutant = ptx[: arrival.start()] + "mov.b32 there, 0;" + ptx[arrival.end() :]
        assert is_caught(causal, mutant), ptx[: arrival.start()].count("\n")


@pytest.mark.slow
def test_every_wait_of_the_relay_is_needed(causal):
    """Without it the leader multiplies what its peer may not have loaded."""
    ptx = executed.captured(causal.spec, causal.arch).ptx
    loop = ptx[ptx.rindex("tcgen05.mma") :]
    waits = list(re.finditer(WAIT + r"(?=(?:(?!" + WAIT + r").){1,600}" + REMOTE + ")", loop, re.S))
    assert len(waits) == 4, "Q of either tile, K, V"
    for wait in waits:
        at = len(ptx) - len(loop) + wait.start()
        mutant = ptx[:at] + ptx[at + len(wait[0]) :]
        assert is_caught(causal, mutant), ptx[:at].count("\n")


def test_one_thread_gives_products_of_both():
    ptx = executed.compiled(ForwardSpec(128, 128, 0, 2), "sm_103a").__ptx__
    assert ptx.count("tcgen05.mma.") == ptx.count("tcgen05.mma.cta_group::2.kind::mxf8f6f4")
    assert "cta_group::1" not in ptx and ".local" not in ptx
