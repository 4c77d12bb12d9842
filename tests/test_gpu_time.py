"""Where a GPU's time goes: shares of overlapping kernels add up to the wall clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfa4.launch.gpu_time import KINDS, Ran, kind_of, shares, table
from ringfa4.launch.gpu_trace import rows_of


def test_names_of_kernels_have_their_kind() -> None:
    names = {
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_": (
            "attention"
        ),
        "kernel_cutlass_kernel_flash_bwd_preprocessFlashAttentionBackwardPreprocess_object_at_": (
            "attention, before and after"
        ),
        "void pytorch_flash::flash_bwd_convert_dq_kernel<>": "attention, before and after",
        "void pytorch_flash::flash_fwd_kernel<>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "kernel_cutlass_kernel_ringfa4kernelscutemergeMerge_object_at___0": "merges",
        "Memcpy DtoD (Device -> Device)": "transfers",
        "void at::native::vectorized_elementwise_kernel<4>": "other",
    }
    assert {name: kind_of(name) for name in names} == names


def test_kernels_side_by_side_share_their_time() -> None:
    times = shares(
        [
            Ran("flash_fwd", 0, 1000),
            Ran("Merge_object", 500, 1500),
            Ran("flash_fwd", 2000, 2100),
        ]
    )
    want = {"attention": (850e-9, 2), "merges": (750e-9, 1), "idle": (500e-9, 0)}
    assert list(times) == ["attention", "merges", "idle"]
    for kind, (seconds, count) in want.items():
        assert times[kind] == (pytest.approx(seconds), count)
    assert "together" in table(times) and "850" not in table({"idle": (1.0, 0)})


spans = st.tuples(st.sampled_from([parts[0] for parts in KINDS.values()]), st.integers(0, 50))


@given(st.lists(st.tuples(spans, st.integers(1, 20)), min_size=1, max_size=8))
def test_shares_add_up_to_the_wall_clock(given: list[tuple[tuple[str, int], int]]) -> None:
    events = [Ran(name, start, start + length) for (name, start), length in given]
    wall = max(x.stop for x in events) - min(x.start for x in events)
    times = shares(events)
    assert sum(seconds for seconds, _ in times.values()) == pytest.approx(wall * 1e-9)
    assert sum(count for _, count in times.values()) == len(events)


def test_rows_of_virtual_ranks_are_told_apart_by_thread_and_stream() -> None:
    """Rank 3's thread is 30, rank 5's is 50; a thread nobody knows is left out."""
    events = [
        Ran("flash_fwd", 2_000, 3_000, stream=7, thread=30),
        Ran("Memcpy DtoD", 1_500, 2_500, stream=8, thread=30),
        Ran("Memcpy DtoD", 2_500, 2_600, stream=9, thread=30),
        Ran("flash_fwd", 3_000, 4_000, stream=20, thread=50),
        Ran("flash_fwd", 3_500, 4_000, stream=1, thread=99),
    ]
    rows = rows_of(events, {30: 3, 50: 5}, shift_ns=1_000)
    assert [(row.rank, row.name) for row in rows] == [
        (3, "GPU compute"),
        (3, "GPU copies"),
        (3, "GPU copies 2"),
        (5, "GPU compute"),
    ]
    assert rows[0].spans == [("flash_fwd", pytest.approx(1e-6), pytest.approx(2e-6))]
    (alone,) = rows_of(events[-1:], {30: 3}, shift_ns=0)
    assert (alone.rank, alone.name) == (3, "GPU compute")  # launched by a thread of autograd, say
