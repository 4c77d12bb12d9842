"""The examples run as they are: what people copy must work."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringfa4 import close_contexts

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    names = [file.stem for file in EXAMPLES.glob("*.py")]
    assert names and all(f'"{name}"' in text for name in names)


def test_a_transformer_block_trains_alike_on_one_rank_and_on_two() -> None:
    """Under torchrun as its docstring says; the losses are those of one process."""
    one = load("transformer_block").main()
    close_contexts()
    assert one[-1] < one[0]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLES / "transformer_block.py")],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 rank(s), 512 tokens, losses ")
    two = [float(x) for x in re.findall(r"\d\.\d{5}", done.stdout)]
    assert two == pytest.approx(one, abs=2e-5)  # five digits are printed


def test_packed_and_padded_documents_agree() -> None:
    assert load("packed_documents").main() < 1e-5  # fp32, sums of up to 1,900 terms
    close_contexts()


def test_plans_print(capsys: pytest.CaptureFixture[str]) -> None:
    plan = load("plan_printing").main()
    said = capsys.readouterr().out
    assert "rank 3, step 1: 45,150 pairs with 3 records of rank 2" in said
    assert said.count("its own K/V") == plan.world


def test_balanced_shares_out_real_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """On whatever Python's own sources are like here; contiguous and zigzag are not even close."""
    header, *rows = load("packed_balance").main(["--seq", "65536", "--ranks", "4"])
    assert "documents, 65,536 tokens" in capsys.readouterr().out
    busiest = {row[header.index("sharding")]: float(row[2]) for row in rows}
    assert busiest["balanced"] <= 1.02 < min(busiest["contiguous"], busiest["zigzag"])
