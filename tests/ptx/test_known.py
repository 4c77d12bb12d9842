"""Kernels that nobody here wrote, executed under four schedules: right to rounding, bit for bit the
same, and planted faults are caught. They need nvidia-cutlass-dsl, flash-attn-4 and quack-kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ptx import build

MISSING = [
    name
    for name in ("cutlass", "tvm_ffi", "flash_attn", "quack")
    if not importlib.util.find_spec(name)
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the core"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

# Signal to error against float64, in dB. bf16: P and the output are rounded once each, relative
# error 2^-9 / sqrt(3) in the mean, 2 such errors give 55 dB; e4m3 P has 2^-4 / sqrt(3): 29 dB for
# one element and a little more for a sum of many; fp32 output of exact products: 2^-24.
BF16, FP8, FP32 = 50.0, 29.0, 135.0


def known(*arguments: str, module: str = "ptx.known") -> dict[str, Any]:
    """Run a module in a process of its own: the DSL fixes the architecture at import."""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_small_dsl_kernels(arch: str) -> None:
    errors = known(arch, module="ptx.dsl_examples")
    assert errors and not any(errors.values()), errors


ATTENTION = [
    ("sm_100a", "--dim 64 --seq 128"),
    ("sm_100a", "--dim 128 --seq 256 --backward"),
    ("sm_100a", "--dim 64 --seq 256 --causal --backward"),
    ("sm_100a", "--dim 128 --seq 300 --heads 4 --kv-heads 2 --causal --backward"),
    ("sm_100a", "--dim 128 --seq 384 --causal --dtype fp8"),
    ("sm_100a", "--dim 128 --seq 256 --dtype fp8"),
    ("sm_103a", "--dim 128 --seq 256 --causal"),
    ("sm_90a", "--dim 128 --seq 256 --backward"),
    ("sm_90a", "--dim 64 --seq 200 --causal --backward"),
    ("sm_90a", "--dim 96 --seq 192 --causal --backward"),
    ("sm_100a", "--dim 256 --seq 256"),
]


@pytest.mark.parametrize(("arch", "options"), ATTENTION)
def test_flash_attention_4(arch: str, options: str) -> None:
    result = known(arch, "attention", "--adversarial", *options.split())
    least = FP8 if "fp8" in options else BF16
    outputs = ["out", "lse", *(["dq", "dk", "dv"] if "--backward" in options else [])]
    assert sorted(result["same"]) == sorted(outputs)
    assert result["lse"] < 1e-4
    assert all(result[name] > least for name in outputs if name != "lse"), result


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("sm_90a", "--dtype bf16"),
        ("sm_90a", "--dtype fp8 --shape 384 256 320 --cluster 2"),
        ("sm_100a", "--dtype bf16 --shape 512 384 192 --tile 256 128 --cluster 2"),
        ("sm_100a", "--dtype fp8 --shape 200 136 272"),
    ],
)
def test_dense_gemm(arch: str, options: str) -> None:
    result = known(arch, "gemm", "--adversarial", *options.split())
    assert result["same"] == ["out"] and result["out"] > FP32


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--tile 128 192 --shape 256 384 256",
        "--tile 128 64",
        "--tile 256 128 --cluster 2",
        "--tile 256 256 --cluster 2 --shape 512 512 384",
        "--tile 256 64 --cluster 2 --shape 512 256 256",
    ],
)
def test_block_scaled_gemm(options: str) -> None:
    result = known("sm_100a", "mxfp8_gemm", "--adversarial", *options.split())
    assert result["same"] == ["out"] and result["out"] > FP32
    assert not result["remarks"]


# Kinds of which every planted fault must be caught; of the others most (README, "Planted faults").
FATAL = {
    "drop commit", "drop proxy fence", "drop wait::st", "drop copy", "drop mma", "drop scale copy",
    "flip descriptor stride", "flip descriptor swizzle",
    "drop wgmma wait", "relax wgmma wait",
}  # fmt: skip
PLANTED = [
    ("sm_100a", "mxfp8_gemm --shape 384 256 1024 --sms 1"),
    ("sm_100a", "attention --dim 64 --seq 512 --heads 3 --sms 1"),
    ("sm_90a", "attention --dim 64 --seq 256 --heads 2 --causal"),
]


@pytest.mark.parametrize(("arch", "options"), PLANTED)
def test_planted_faults_are_caught(arch: str, options: str) -> None:
    result = known(arch, *options.split(), "--mutants", "6")
    counts = {kind: tuple(map(int, x.split("/"))) for kind, x in result["caught"].items()}
    for kind in FATAL & counts.keys():
        assert counts[kind][0] == counts[kind][1], result["survivors"]
    caught, planted = (sum(c[i] for c in counts.values()) for i in range(2))
    assert planted > 25 and caught >= 0.7 * planted, result["survivors"]
