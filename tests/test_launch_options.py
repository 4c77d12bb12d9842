"""The command line: sizes, options, what they imply, and the messages of what is refused."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from ringfa4.launch.masks import document_starts
from ringfa4.launch.options import UsageError, parse_options
from ringfa4.launch.sizes import bytes_text, parse_size, parse_sizes, seconds_text, size_text
from ringfa4.launch.workload import DEFAULTS, Workload, build
from ringfa4.mask import Band


def workload(text: str) -> Workload:
    return build(parse_options(text.split()), "cpu")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("4099", 4099), ("64K", 65536), ("64k", 65536), ("1M", 1 << 20), ("2G", 2 << 30)],
)
def test_sizes_are_binary(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["1X", "", "K", "-1", "1.5K", "1KB", "1 K", "0x10", "1e6"])
def test_other_spellings_are_quoted_back(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_lists_of_sizes() -> None:
    assert parse_sizes("1K,512") == [1024, 512]


@pytest.mark.parametrize(
    ("n", "text"),
    [(1 << 20, "1M (1,048,576)"), (65536, "64K (65,536)"), (4099, "4099"), (70_000, "70,000")],
)
def test_counts_are_printed(n: int, text: str) -> None:
    assert size_text(n) == text


def test_quantities_as_people_read_them() -> None:
    assert [bytes_text(n) for n in (12, 1536, 3 << 20, 5 << 30)] == [
        "12 B", "1.5 KiB", "3 MiB", "5.00 GiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0.0421, 12.34, 425, 3725)] == [
        "0.042 s", "12.3 s", "7 min 05 s", "1 h 02 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--seq 1X", "argument --seq: '1X' is not a size"),
        ("--heads 0", "argument --heads: '0' is less than 1"),
        ("--mask blob", "argument --mask: invalid choice: 'blob'"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--sharding diagonal", "argument --sharding: invalid choice: 'diagonal'"),
        ("--documents 1K,x", "argument --documents: 'x' is not a size"),
        ("--mask window", "--mask window needs --window"),
        ("--mask full --window 8", "--window 8 has no meaning with --mask full"),
        ("--prefix 8 --window 8", "--window and --prefix belong to different masks"),
        ("--virtual-ranks 0", "argument --virtual-ranks: '0' is less than 1"),
        ("--timeout 0", "--timeout 0.0 must be positive"),
        ("--se 8", "unrecognized arguments: --se 8"),
    ],
)
def test_usage_errors_carry_the_value(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(text.split())
    assert message in str(caught.value)
    assert caught.value.usage.startswith("usage: ring.py")


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("", "causal"),
        ("--window 8", "window"),
        ("--documents 3", "documents"),
        ("--documents 3 --window 8", "documents"),
        ("--prefix 0", "prefix"),
        ("--chunk 16", "chunked"),
        ("--mask full", "full"),
    ],
)
def test_a_mask_is_implied_by_its_options(text: str, mask: str) -> None:
    assert parse_options(text.split()).mask == mask


def test_defaults_are_those_of_the_device() -> None:
    work, usual = workload(""), DEFAULTS["cpu"]
    assert (work.seq_q, work.heads, work.kv_heads) == (usual.seq, usual.heads, usual.kv_heads)
    assert (work.dk, work.dv, work.dtype) == (usual.head_dim, usual.head_dim, torch.bfloat16)
    assert work.scale == usual.head_dim**-0.5 and work.sink is None


@pytest.mark.parametrize(
    ("text", "bands"),
    [
        ("--seq 8 --mask full", [Band(0, 8, 0, 8)]),
        ("--seq 8", [Band(0, 8, 0, 8, None, 0)]),
        ("--seq 8 --window 2", [Band(0, 8, 0, 8, -2, 0)]),
        ("--seq 8 --seq-k 4 --mask full", [Band(0, 8, 0, 4)]),
        ("--documents 3,5", [Band(0, 3, 0, 3, None, 0), Band(3, 8, 3, 8, None, 0)]),
        ("--seq 9 --documents 3,5", [Band(0, 3, 0, 3, None, 0), Band(3, 8, 3, 8, None, 0)]),
        ("--seq 4 --documents 2", [Band(0, 2, 0, 2, None, 0), Band(2, 4, 2, 4, None, 0)]),
        ("--seq 8 --prefix 2", [Band(0, 8, 0, 2), Band(2, 8, 2, 8, None, 0)]),
        ("--seq 4 --chunk 2", [Band(0, 2, 0, 2, None, 0), Band(2, 4, 2, 4, None, 0)]),
    ],
)
def test_masks(text: str, bands: list[Band]) -> None:
    assert list(workload(text).mask.rows[0]) == bands


def test_documents_of_equal_length_differ_by_at_most_one() -> None:
    starts = document_starts((7,), 4099)
    lengths = [b - a for a, b in pairwise(starts)]
    assert len(lengths) == 7 and sum(lengths) == 4099 and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--seq 8 --documents 5,5", "past seq_q=8"),
        ("--seq 8 --documents 0", "--documents 0: there must be at least one"),
        ("--seq 8 --prefix 9", "prefix=9"),
        ("--seq 8 --seq-k 9 --chunk 2", "seq_q=8, seq_k=9"),
        ("--seq 8 --scale nan", "scale=nan"),
    ],
)
def test_values_that_do_not_fit_together(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        workload(text)


def test_flops_count_allowed_pairs() -> None:
    work = workload("--seq 4 --heads 3 --kv-heads 1 --batch 2 --head-dim 8 --v-head-dim 16")
    assert work.pairs == (4 + 3 + 2 + 1) * 3 * 2
    assert work.flops(backward=False) == work.pairs * 2 * (8 + 16)
    assert work.flops(backward=True) == 2.5 * work.flops(backward=False)
