"""The ring in real processes over gloo: to the bit what virtual ranks compute, and failures that
end well."""

from __future__ import annotations

import pytest
import torch
from distributed.pool import gloo_pool
from rings import Case, check, run

from ringfa4 import Topology
from ringfa4 import mask as masks

CASES = {
    "causal": Case(masks.causal(300), heads=(4, 2), sink=True, dlse=True),
    "documents": Case(
        masks.documents([0, 40, 233, 300]), dtype=torch.bfloat16, options={"sharding": "balanced"}
    ),
    "window": Case(masks.window(640, left=30), options={"sharding": "contiguous"}),
    "fewer tokens than ranks": Case(masks.causal(1)),
}


def _together(case: Case, parts: list[dict]) -> dict[str, torch.Tensor]:
    """Whole tensors from what the ranks returned."""
    whole = {}
    for name in parts[0]:
        if name == "dsink":
            whole[name] = parts[0][name][1]
            continue
        dim = 2 if name == "lse" else 1
        where = torch.cat([p[name][0] for p in parts])
        whole[name] = torch.cat([p[name][1] for p in parts], dim).index_select(
            dim, torch.argsort(where)
        )
    return whole


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_processes_compute_the_bits_of_virtual_ranks(name: str, world: int) -> None:
    case = Case(**{**vars(CASES[name]), "world": world})
    with gloo_pool(world) as pool:
        got = _together(case, pool.run("distributed.ring_work:ring", {"case": case}))
    check(case, got)
    virtual = run(case)
    assert all(torch.equal(got[n], virtual[n]) for n in virtual)


def test_processes_carry_for_their_domain() -> None:
    """Two domains of two, ranks not in order; to the bit what virtual ranks compute."""
    options = {"topology": Topology(((0, 3), (2, 1)))}
    case = Case(masks.causal(300), world=4, heads=(4, 2), sink=True, options=options)
    with gloo_pool(4) as pool:
        got = _together(case, pool.run("distributed.ring_work:ring", {"case": case}))
    check(case, got)
    virtual = run(case)
    assert all(torch.equal(got[n], virtual[n]) for n in virtual)


def test_a_subgroup_counts_its_own_ranks() -> None:
    """Ranks 1 and 2 of three: group ranks, not global ones."""
    case = Case(masks.causal(100))
    with gloo_pool(3) as pool:
        results = pool.run("distributed.ring_work:subgroup", {"case": case, "ranks": [1, 2]})
    assert results[0] is None
    check(case, _together(case, results[1:]))


def test_a_mesh_axis_is_a_group() -> None:
    case = Case(masks.causal(100))
    with gloo_pool(2) as pool:
        check(case, _together(case, pool.run("distributed.ring_work:mesh_axis", {"case": case})))


def test_layers_share_a_context_that_can_be_closed_and_reopened() -> None:
    with gloo_pool(2) as pool:
        assert pool.run("distributed.ring_work:layers_and_objects", {"count": 3}) == [6, 6]


def test_bad_input_on_one_rank_is_told_to_all() -> None:
    with gloo_pool(3) as pool:
        said = pool.run("distributed.ring_work:bad_length")
    assert len(set(said)) == 1 and said[0].startswith("rank 1: ") and "got 9" in said[0]


@pytest.mark.parametrize(
    ("when", "end"), [("killed", "Killed"), ("late", None), ("raises", "FloatingPointError")]
)
def test_a_lost_rank_ends_the_call_on_the_others(when: str, end: str | None) -> None:
    """PeerError naming rank 1, and never a hang: the pool would say who is still busy."""
    with gloo_pool(3) as pool:
        outcomes = pool.outcomes("distributed.ring_work:dies", {"when": when})
        pool.close()  # a failed group is not used again
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerError", outcomes[rank]
        assert "rank 1" in outcomes[rank].message
    assert outcomes[1].error == end
