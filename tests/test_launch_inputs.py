"""Inputs: one global tensor whatever the ranks, a user's files, results written as a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ringfa4 import shard as shardings
from ringfa4.launch.inputs import BLOCK, RandomInputs
from ringfa4.launch.options import parse_options
from ringfa4.launch.tensorfile import TensorFile, create
from ringfa4.launch.workload import build
from ringfa4.shard import Sharding

SEQ = 3 * BLOCK + 77
INPUTS = RandomInputs(seed=5, batch=2, dtype=torch.bfloat16)


def whole(inputs: RandomInputs, name: str, seq: int) -> torch.Tensor:
    return inputs.rows(name, shardings.contiguous(seq, 1).shards[0], 2, 4)


def put_together(inputs: RandomInputs, name: str, sharding: Sharding) -> torch.Tensor:
    out = torch.full((inputs.batch, sharding.seq, 2, 4), torch.nan, dtype=inputs.dtype)
    for shard in sharding.shards:
        out[:, list(shard.positions())] = inputs.rows(name, shard, 2, 4)
    return out


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_tensor_does_not_depend_on_ranks(kind: str, world: int) -> None:
    sharding = getattr(shardings, kind)(SEQ, world)
    assert torch.equal(put_together(INPUTS, "k", sharding), whole(INPUTS, "k", SEQ))


@given(st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=5))
def test_nor_on_where_shards_begin(lengths: list[int]) -> None:
    sharding = shardings.uneven(lengths)
    got = put_together(INPUTS, "q", sharding)
    assert torch.equal(got, whole(INPUTS, "q", sharding.seq))


def test_a_longer_sequence_begins_with_the_shorter() -> None:
    assert torch.equal(whole(INPUTS, "q", SEQ)[:, :1000], whole(INPUTS, "q", 1000))


def test_blocks_tensors_and_seeds_differ() -> None:
    q = whole(INPUTS, "q", 2 * BLOCK)
    other_seed = whole(RandomInputs(6, 2, torch.bfloat16), "q", BLOCK)
    assert not torch.equal(q[:, :BLOCK], q[:, BLOCK:])
    assert not torch.equal(q, whole(INPUTS, "k", 2 * BLOCK))
    assert not torch.equal(q[:, :BLOCK], other_seed)
    assert not torch.equal(q[0], q[1])


def test_the_tensor_is_standard_normal() -> None:
    x = whole(RandomInputs(0, 1, torch.float64), "v", 16 * BLOCK)
    n = x.numel()  # standard errors: 1 / sqrt(n) of the mean, sqrt(2 / n) of the variance
    assert abs(x.mean()) < 5 * n**-0.5 and abs(x.var() - 1) < 5 * (2 / n) ** 0.5


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_a_safetensors_file(tmp_path: Path, dtype: torch.dtype) -> None:
    q = torch.randn(2, 50, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"odd": torch.zeros(3, dtype=torch.uint8), "q": q}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.shape("q") == (2, 50, 3, 4) and file.dtype("q") == dtype
    for sharding in (shardings.zigzag(50, 3), shardings.striped(50, 3)):
        for shard in sharding.shards:
            assert torch.equal(file.read("q", shard), q[:, list(shard.positions())])


def test_results_of_all_ranks_make_one_file(tmp_path: Path) -> None:
    out = torch.randn(2, 50, 3, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    lse = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(2))
    path = tmp_path / "y.safetensors"
    create(path, {"out": (out.dtype, tuple(out.shape)), "lse": (lse.dtype, tuple(lse.shape))})
    for shard in shardings.striped(50, 4).shards:
        rows = list(shard.positions())
        TensorFile(path).write("out", shard, out[:, rows])
        TensorFile(path).write("lse", shard, lse[:, :, rows], dim=2)
    got = load_file(path)
    assert torch.equal(got["out"], out) and torch.equal(got["lse"], lse)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"{]"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "z"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        TensorFile(path)


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}',
        '{"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}',
        '{"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}',
        '{"dtype": "F32", "shape": 4}',
    ],
)
def test_entries_that_lie_are_refused(tmp_path: Path, entry: str) -> None:
    header = f'{{"q": {entry}}}'.encode()
    path = tmp_path / "z"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match="'q'"):
        TensorFile(path)


def _saved(tmp_path: Path, **shapes: tuple[int, ...]) -> str:
    path = str(tmp_path / "in.safetensors")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path


def test_a_file_says_what_is_computed(tmp_path: Path) -> None:
    path = _saved(tmp_path, q=(1, 9, 4, 8), k=(1, 7, 2, 8), v=(1, 7, 2, 6))
    work = build(parse_options(["--input", path, "--mask", "full"]), "cpu")
    assert (work.seq_q, work.seq_k, work.heads, work.kv_heads) == (9, 7, 4, 2)
    assert (work.dk, work.dv, work.dtype) == (8, 6, torch.float32)


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ({"q": (1, 9, 4, 8)}, [], "has no ['k', 'v']"),
        ({"q": (9, 8), "k": (9, 8), "v": (9, 8)}, [], "must be (b, s, h, d)"),
        ({"q": (1, 9, 4, 8), "k": (1, 9, 4, 7), "v": (1, 9, 4, 8)}, [], "do not fit together"),
        (
            {"q": (1, 9, 4, 8), "k": (1, 9, 4, 8), "v": (1, 9, 4, 8)},
            ["--heads", "5"],
            "--heads 5 contradicts",
        ),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], more: list[str], message: str
) -> None:
    path = _saved(tmp_path, **shapes)
    with pytest.raises(ValueError, match=re.escape(message)):
        build(parse_options(["--input", path, *more]), "cpu")
