"""What a new user is told: bad inputs and the whole message of each, word for word.

A message names the value that was given and what would be right. The table is the review: whoever
changes a message sees here how it reads among the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringfa4 import Band, ContextParallel, Mask, close_contexts, packing, ring_attention
from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.comm.registry import TRANSPORTS
from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.registry import KERNELS
from ringfa4.launch import ring, show_plan
from ringfa4.plan import Plan

SIZES = "digits, then nothing, K, M or G (1K = 1024)"
SHARDINGS = "['balanced', 'contiguous', 'striped', 'zigzag']"
WIRES = "['bf16', 'fp16', 'fp32', 'fp64', 'mxfp8', 'mxfp8-1x32']"


def cp(**options: Any) -> ContextParallel:
    """On this process alone, 16 tokens."""
    return ContextParallel(**{"seq_len": 16, **options})


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*(shape or (1, 16, 4, 32)), dtype=dtype)


def attend(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options: Any) -> Tensor:
    call = {name: options.pop(name) for name in ("scale", "sink") if name in options}
    k = q if k is None else k
    return cp(**options).attention(q, k, k if v is None else v, **call)


# ---- making a ContextParallel -------------------------------------------------------------------

OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: ContextParallel(), "give seq_len, cu_seqlens or a Mask"),
    "a float": (lambda: cp(seq_len=16.5), "seq_len must be a number of tokens, got 16.5"),
    "text": (lambda: cp(seq_len="16"), "seq_len must be a number of tokens, got '16'"),
    "negative": (
        lambda: cp(seq_len=-1),
        "sequence lengths must not be negative: seq_q=-1, seq_k=-1",
    ),
    "mask": (lambda: cp(mask="casual"), "mask='casual' is neither 'causal', 'full' nor a Mask"),
    "mask and window": (
        lambda: cp(mask=masks.causal(16), window=3),
        "a Mask over 16 x 16 is complete; it conflicts with ['window']",
    ),
    "window": (
        lambda: cp(window=(1, 2, 3)),
        "window=(1, 2, 3) is neither a number of tokens nor (left, right)",
    ),
    "right of causal": (
        lambda: cp(window=(3, 2)),
        "a causal window sees nothing to the right: window=(3, 2)",
    ),
    "negative window": (
        lambda: cp(window=-2),
        "a window reaches a number of tokens >= 0 to each side: left=-2, right=0",
    ),
    "align": (
        lambda: cp(align="center"),
        "align='center' is neither 'top-left' nor 'bottom-right'",
    ),
    "lengths for cu_seqlens": (
        lambda: ContextParallel(cu_seqlens=[7, 9]),
        "cu_seqlens_q must be cumulative lengths, which start at 0 and never fall; "
        "it begins with [7, 9]",
    ),
    "a number for cu_seqlens": (
        lambda: ContextParallel(cu_seqlens=16),
        "cu_seqlens must be a sequence of integers, got 16",
    ),
    "floats for cu_seqlens": (
        lambda: ContextParallel(cu_seqlens=torch.tensor([0.0, 16.0])),
        "cu_seqlens must be one-dimensional and hold integers, got torch.float32 of shape (2,)",
    ),
    "documents past the end": (
        lambda: cp(cu_seqlens=[0, 20]),
        "documents end at q=20, k=20, past seq_q=16, seq_k=16",
    ),
    "more query documents": (
        lambda: ContextParallel(cu_seqlens=[0, 8, 16], cu_seqlens_k=[0, 16]),
        "2 query documents but 1 key documents",
    ),
    "cu_seqlens_k alone": (lambda: cp(cu_seqlens_k=[0, 16]), "cu_seqlens_k needs cu_seqlens"),
    "sharding": (
        lambda: cp(sharding="zagzig"),
        f"unknown sharding 'zagzig'; there are {SHARDINGS}",
    ),
    "sharding for others": (
        lambda: cp(sharding=shardings.zigzag(16, 3)),
        "the sharding is for 3 ranks, the group has 1",
    ),
    "sharding of another length": (
        lambda: cp(sharding=shardings.zigzag(15, 1)),
        "shardings of 15 queries and 15 keys do not fit a mask of 16 x 16",
    ),
    "strides": (
        lambda: Plan(masks.causal(16), shardings.striped(16, 2), shardings.zigzag(16, 2)),
        "mask 'causal' bounds j - i, which needs q and k sharded with one stride: "
        "q 'striped' has 2, k 'zigzag' has 1",
    ),
    "wire": (lambda: cp(wire="fp8"), f"unknown wire 'fp8'; there are {WIRES}"),
    "precondition": (
        lambda: cp(precondition="yes"),
        "unknown precondition 'yes'; there are ['none', 'hadamard', 'k-mean', 'both']",
    ),
    "transport": (
        lambda: cp(transport="nccl"),
        f"unknown transport 'nccl'; there are {sorted(TRANSPORTS)} and 'auto'",
    ),
    "timeout": (lambda: cp(timeout_s=0), "timeout_s=0 must be positive"),
    "a band outside": (
        lambda: Mask(8, 8, ((Band(0, 9, 0, 8),),)),
        "Band(q0=0, q1=9, k0=0, k1=8, lo=None, hi=None) of mask row 0 "
        "leaves the 8 queries x 8 keys",
    ),
    "bands that overlap": (
        lambda: Mask(8, 8, ((Band(0, 8, 0, 8), Band(2, 3, 2, 3)),)),
        "bands of mask row 0 overlap: Band(q0=0, q1=8, k0=0, k1=8, lo=None, hi=None) and "
        "Band(q0=2, q1=3, k0=2, k1=3, lo=None, hi=None)",
    ),
    "documents that overlap": (
        lambda: packing.padded_documents([0, 4], [5, 2]),
        "document 1 (start=4, length=2) must begin at or after 5, where the one before it ends, "
        "and have a length >= 0",
    ),
    "a document too long": (
        lambda: packing.padded_documents([0, 8], [5, 9], seq_len=16),
        "document 1 (start=8, length=9) leaves a tensor of 16 tokens",
    ),
    "too many starts": (
        lambda: packing.padded_documents([0, 4, 8, 12], [5, 2]),
        "2 lengths need as many starts (or one more), got 4",
    ),
    "two ends": (
        lambda: packing.padded_documents([0, 8, 20], [5, 9], seq_len=16),
        "seq_len=16 contradicts the last of starts, 20",
    ),
    "a negative length": (
        lambda: packing.cu_seqlens([3, -1]),
        "a document has a length >= 0, got -1",
    ),
}

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "three dimensions": (
        lambda: attend(x(16, 4, 32)),
        "q must be (b, s, h, d), got shape (16, 4, 32)",
    ),
    "heads before tokens": (
        lambda: attend(x(1, 4, 16, 32)),
        "this rank's shard of q has 16 tokens (zigzag, 16 in all), got 4: q (1, 4, 16, 32), "
        "k (1, 4, 16, 32), v (1, 4, 16, 32); as (b, h, s, d) it would fit: transpose(1, 2)",
    ),
    "length": (
        lambda: attend(x(1, 9, 4, 32), x()),
        "this rank's shard of q has 16 tokens (zigzag, 16 in all), got 9: q (1, 9, 4, 32), "
        "k (1, 16, 4, 32), v (1, 16, 4, 32)",
    ),
    "dtypes": (
        lambda: attend(x(), x(dtype=torch.bfloat16)),
        "q, k, v must have one dtype: torch.float32, torch.bfloat16, torch.bfloat16",
    ),
    "integers": (
        lambda: attend(x(dtype=torch.int32)),
        "q, k, v are torch.int32, which is none of "
        "['torch.bfloat16', 'torch.float16', 'torch.float32', 'torch.float64']",
    ),
    "heads": (
        lambda: attend(x(), x(1, 16, 3, 32)),
        "query heads must be a multiple of K/V heads: "
        "q (1, 16, 4, 32), k (1, 16, 3, 32), v (1, 16, 3, 32)",
    ),
    "k and v": (
        lambda: attend(x(), x(), x(1, 16, 2, 32)),
        "k and v must agree in length and heads: "
        "q (1, 16, 4, 32), k (1, 16, 4, 32), v (1, 16, 2, 32)",
    ),
    "batch rows of the mask": (
        lambda: ContextParallel(mask=masks.stack([masks.causal(16)] * 3)).attention(x(), x(), x()),
        "the mask has 3 batch rows, the inputs 1: "
        "q (1, 16, 4, 32), k (1, 16, 4, 32), v (1, 16, 4, 32)",
    ),
    "scale": (lambda: attend(x(), scale=math.nan), "scale=nan must be finite"),
    "sink": (
        lambda: attend(x(), sink=x(3)),
        "a sink is one floating-point logit per query head (4), got torch.float32 of shape (3,)",
    ),
    "kernel": (
        lambda: ring_attention(x(), x(), x(), seq_len=16, kernel="flash"),
        f"unknown kernel 'flash'; there are {sorted(KERNELS)} and 'auto'",
    ),
    "wire of another dtype": (
        lambda: attend(x(), wire="bf16"),
        "wire 'bf16' carries torch.bfloat16, the inputs are torch.float32",
    ),
    "head dimension of mxfp8": (
        lambda: attend(x(1, 16, 4, 40), wire="mxfp8"),
        "wire 'mxfp8' needs head dimensions that are multiples of 32: dk=40, dv=40",
    ),
    "shard along another dimension": (
        lambda: cp().shard(x(), 2),
        "dim=2 of shape (1, 16, 4, 32) should hold all 16 tokens",
    ),
    "unshard along another dimension": (
        lambda: cp().unshard(x(), 2),
        "this rank's shard has 16 tokens, got shape (1, 16, 4, 32) with dim=2",
    ),
    "side": (lambda: cp().positions(side="v"), "side='v' is neither 'q' nor 'k'"),
    "labels of a shard": (
        lambda: cp().shift_labels(torch.arange(8)),
        "labels of shape (8,) should hold all 16 tokens last",
    ),
    "labels of other rows": (
        lambda: packing.shift_labels(torch.zeros(3, 16), masks.stack([masks.causal(16)] * 2)),
        "labels of shape (3, 16) do not fit a mask of 2 batch rows",
    ),
    "packed with a batch": (
        lambda: packing.to_thd(x(2, 3, 4, 5)),
        "expected (1, t, h, d), got shape (2, 3, 4, 5)",
    ),
    "not packed": (
        lambda: packing.to_bshd(x()),
        "a packed tensor is (t, h, d), got shape (1, 16, 4, 32)",
    ),
    "padding of others": (
        lambda: packing.add_padding(x(3, 2, 4), [0, 4], [2, 2], 8),
        "the documents hold 4 tokens, x has 3 in dim=0",
    ),
}


@pytest.mark.parametrize("name", [*OBJECTS, *CALLS])
def test_the_library_says(name: str) -> None:
    make, message = (OBJECTS | CALLS)[name]
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError) as caught:
        cp(device="cuda")
    assert str(caught.value) == "device='cuda', but torch.cuda.is_available() is false"


def test_tables_do_not_hide_each_other() -> None:
    assert not OBJECTS.keys() & CALLS.keys()


# ---- the command lines --------------------------------------------------------------------------

RING = {
    "--seq 1X": (2, f"argument --seq: '1X' is not a size: {SIZES}"),
    "--seq -5": (2, f"argument --seq: '-5' is not a size: {SIZES}"),
    "--heads 0": (2, "argument --heads: '0' is less than 1"),
    "--documents 1K,x": (2, f"argument --documents: 'x' is not a size: {SIZES}"),
    "--documents 5,5 --seq 8": (1, "documents end at q=10, k=10, past seq_q=8, seq_k=8"),
    "--documents 0 --seq 64": (1, "--documents 0: there must be at least one"),
    "--mask window": (2, "--mask window needs --window"),
    "--mask full --window 8": (2, "--window 8 has no meaning with --mask full"),
    "--prefix 8 --window 8": (2, "--window and --prefix belong to different masks"),
    "--prefix 9 --seq 8": (1, "prefix=9 is not within 0..seq=8"),
    "--chunk 4 --seq 8 --seq-k 9": (
        1,
        "--mask chunked needs as many keys as queries: seq_q=8, seq_k=9",
    ),
    "--timeout 0": (2, "--timeout 0.0 must be positive"),
    "--sek 8": (2, "unrecognized arguments: --sek 8"),
    "--seq 64 --scale nan": (1, "scale=nan must be finite"),
    "--seq 64 --wire morse": (1, f"unknown wire 'morse'; there are {WIRES}"),
    "--seq 64 --wire fp32": (1, "wire 'fp32' carries torch.float32, the inputs are torch.bfloat16"),
    "--seq 64 --transport torch_p2p --virtual-ranks 2": (
        1,
        "virtual ranks move bytes by 'local', not 'torch_p2p'",
    ),
    "--seq 64 --output no/such/x": (1, "--output no/such/x: there is no folder 'no/such'"),
    "--seq 64 --json no/such/x": (1, "--json no/such/x: there is no folder 'no/such'"),
    "--input nowhere": (1, "[Errno 2] No such file or directory: 'nowhere'"),
}

PLAN = {
    "--seq 1X": (2, f"argument --seq: '1X' is not a size: {SIZES}"),
    "--ranks 0": (2, "argument --ranks: '0' is less than 1"),
    "--ranks 4 --rank 4": (1, "--rank 4 is not within 0..3"),
    "--heads 6 --kv-heads 4": (1, "query heads must be a multiple of K/V heads: 6 and 4"),
    "--mask full --prefix 4": (2, "--prefix 4 has no meaning with --mask full"),
    "--documents 3,4 --seq 5": (1, "documents end at q=7, k=7, past seq_q=5, seq_k=5"),
    "--png no/such/x.png": (1, "--png no/such/x.png: there is no folder 'no/such'"),
    "--head-dim 40": (
        1,
        "wire 'mxfp8' needs head dimensions that are multiples of 32: dk=40, dv=40",
    ),
}


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("tool", "text"),
    [("ring.py", text) for text in RING] + [("show_plan.py", text) for text in PLAN],
)
def test_the_command_lines_say(capsys: pytest.CaptureFixture[str], tool: str, text: str) -> None:
    """One line, last, behind the tool's name; usage errors end with 2 and show the usage first."""
    main, table = (ring.main, RING) if tool == "ring.py" else (show_plan.main, PLAN)
    code, message = table[text]
    assert main(text.split()) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"{tool}: {'error: ' if code == 2 else ''}{message}"
    assert lines[0].startswith("usage: ") if code == 2 else len(lines) == 1


def test_a_choice_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse quotes choices differently from version to version; the names are what matters."""
    assert show_plan.main(["--sharding", "zagzig"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("show_plan.py: error: argument --sharding: invalid choice: 'zagzig'")
    assert all(name in last for name in ("contiguous", "zigzag", "striped", "balanced"))


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (
            lambda: ring_attention(x(), x(), x(), seq_len=16, kernel="fa4"),
            "kernel 'fa4' needs flash-attn-4 (pip install 'ringfa4[fa4]'): ",
        ),
        (lambda: cp(transport="nvshmem"), "transport 'nvshmem'"),
    ],
)
def test_a_missing_library_says_how_to_get_it(make: Callable[[], Any], start: str) -> None:
    try:
        make()
    except MissingLibraryError as error:
        assert str(error).startswith(start) and "pip install 'ringfa4[" in str(error)
    except ValueError as error:
        pytest.skip(f"it is installed, and refuses this machine: {error}")
    else:
        pytest.skip("it is installed")
    finally:
        close_contexts()
