"""launch/ring.py from end to end: in process on virtual ranks, and once under torchrun."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringfa4 import mask as masks
from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.reference import ReferenceKernel
from ringfa4.launch import runs
from ringfa4.launch.console import Console, Progress
from ringfa4.launch.probes import SLICE, slices
from ringfa4.launch.ring import main
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.testing.oracles import attention

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def report(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, object]:
    """What ``main`` says as JSON; it must succeed."""
    assert main([*text.split(), "--json", "-"]) == 0, capsys.readouterr().err
    body: dict[str, object] = json.loads(capsys.readouterr().out)
    return body


@pytest.mark.parametrize(
    "text",
    [
        "--seq 2K --virtual-ranks 3 --backward --check",
        "--seq 700 --backward --check --dtype fp32 --sink",
        "--seq 700 --virtual-ranks 2 --sharding striped --window 100 --check --dtype fp16",
        "--virtual-ranks 3 --documents 300,0,41,200 --backward --check --sink",
        "--seq 4099 --virtual-ranks 3 --sharding balanced --check",
        "--seq 3 --virtual-ranks 5 --backward --check",
        "--seq 600 --virtual-ranks 2 --wire mxfp8 --precondition both --backward --check --sink",
        "--seq 500 --virtual-ranks 2 --wire mxfp8-1x32 --kernel reference-mxfp8 --backward --check",
        "--seq 300 --seq-k 200 --mask full --virtual-ranks 2 --check --v-head-dim 32 --batch 2",
    ],
)
def test_checked_runs(capsys: pytest.CaptureFixture[str], text: str) -> None:
    body = report(capsys, text)
    names = [verdict["name"] for verdict in body["verdicts"]]
    expected = ["out", "lse"] + ["dq", "dk", "dv"] * ("--backward" in text)
    assert names == expected + ["dsink"] * ("--sink" in text and "--backward" in text)
    assert body["passed"] is True
    assert list(body["passes"]) == ["forward", "backward"][: 1 + ("--backward" in text)]
    assert body["peak_bytes"] > 50 << 20  # torch alone is more


def test_what_people_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seq", "1K", "--virtual-ranks", "2", "--check"]) == 0
    said = capsys.readouterr().out
    for part in ("1K (1,024)", "default on cpu", "kernel cpu (auto", "TFLOP/s", "check passed"):
        assert part in said
    assert "524,800 pairs a head" in said


def test_bytes_moved_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Full attention over 2 ranks: each reads the other's half, and returns bf16 dK/dV of it."""
    shape = "--seq 1K --mask full --virtual-ranks 2 --heads 1 --kv-heads 1 --head-dim 128"
    plain = report(capsys, f"{shape} --backward --wire bf16")["passes"]
    keys_values = 1024 * (128 + 128)
    assert plain["forward"]["moved_bytes"] == plain["forward"]["kv_bytes"] == keys_values * 2
    assert plain["backward"]["moved_bytes"] == keys_values * (2 + 2)
    assert plain["forward"]["kv_share"] == 1

    body = report(capsys, f"{shape} --backward")
    assert body["settings"]["wire"] == "mxfp8"
    for name, p in body["passes"].items():
        assert p["kv_bytes"] == p["kv_share"] * plain[name]["kv_bytes"]
        assert 0.5 < p["kv_share"] < 0.55  # a byte an element, and the scales


def test_what_mxfp8_cannot_carry_travels_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    wires = {
        arguments: report(capsys, f"--seq 256 --heads 1 {arguments}")["settings"]["wire"]
        for arguments in ("--head-dim 64", "--head-dim 80", "--dtype fp64")
    }
    assert list(wires.values()) == ["mxfp8", "bf16", "fp64"]


class _Wrong(ReferenceKernel):
    """Forgets the first task of every call."""

    def forward(self, queries, shard, tasks, scale, state):  # type: ignore[no-untyped-def]
        super().forward(queries, shard, tasks[1:], scale, state)


def test_a_wrong_kernel_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pace(kernel: BlockKernel, done: object) -> BlockKernel:
        return _Wrong()

    monkeypatch.setattr(runs, "Paced", pace)
    text = "--seq 1K --virtual-ranks 2 --check --kernel reference"
    assert main(text.split()) == 1
    assert "check FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("--seq 1X", 2, "'1X' is not a size"),
        ("--seq 64 --kernel fastest", 1, "unknown kernel 'fastest'"),
        ("--seq 64 --wire morse", 1, "unknown wire 'morse'"),
        ("--seq 64 --precondition prayer", 1, "unknown precondition 'prayer'"),
        ("--seq 64 --transport pigeon", 1, "unknown transport 'pigeon'"),
        ("--seq 64 --transport pigeon --virtual-ranks 2", 1, "not 'pigeon'"),
        ("--seq 64 --heads 3 --kv-heads 2", 1, "multiple of K/V heads"),
        ("--seq 64 --heads 3 --kv-heads 2 --virtual-ranks 2", 1, "multiple of K/V heads"),
        ("--seq 64 --dtype bf16 --wire fp32", 1, "wire 'fp32'"),
        ("--input nowhere.safetensors", 1, "nowhere.safetensors"),
        ("--seq 64 --output no/such/folder", 1, "no/such/folder"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], text: str, code: int, message: str
) -> None:
    assert main(text.split()) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert len([line for line in said if line.startswith("ring.py: ")]) == 1


def test_a_users_tensors(tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(3)
    shapes = {"q": (1, 90, 4, 16), "k": (1, 90, 2, 16), "v": (1, 90, 2, 8), "dout": (1, 90, 4, 8)}
    given = {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}
    save_file(given, tmp_path / "in")
    argv = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--window", "20", "--virtual-ranks", "3", "--backward"]) == 0
    got = load_file(tmp_path / "out")
    x = {name: t.double().requires_grad_() for name, t in given.items()}
    out, lse = attention(x["q"], x["k"], x["v"], masks.window(90, left=20))
    grads = torch.autograd.grad((out * x["dout"]).sum(), [x["q"], x["k"], x["v"]])
    want = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    assert got.keys() == want.keys()
    for name, value in want.items():
        # fp32 sums of at most 90 terms: a few times 90 * 2**-24 of the largest value.
        assert (got[name] - value).abs().max() < 2e-5 * value.abs().max(), name
    assert not (tmp_path / "out.partial").exists()


def test_repeated_runs_repeat_to_the_bit(tmp_path: Path) -> None:
    text = "--seq 1000 --virtual-ranks 3 --backward --output"
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        assert main([*text.split(), str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "launch" / "ring.py"), *argv,
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_two_processes_and_two_threads_give_the_same_bytes(tmp_path: Path) -> None:
    text = ["--seq", "1500", "--backward", "--check", "--output"]
    done = torchrun(*text, str(tmp_path / "processes"))
    assert done.returncode == 0, done.stderr
    assert "check passed" in done.stdout and "transport torch_p2p" in done.stdout
    assert main([*text, str(tmp_path / "threads"), "--virtual-ranks", "2"]) == 0
    assert (tmp_path / "processes").read_bytes() == (tmp_path / "threads").read_bytes()


def test_two_processes_refuse_with_one_line() -> None:
    done = torchrun("--seq", "64", "--heads", "3", "--kv-heads", "2")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("ring.py")]
    assert len(said) == 1 and "multiple of K/V heads" in said[0]
    assert 'ring.py", line' not in done.stderr, "a traceback of ours"


# ---- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [Band(0, 5000, 0, 4000), Band(0, 5000, 0, 4000, -700, 3)])
def test_slices_hold_each_pair_once(band: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = band.trimmed()
    assert whole is not None
    task = Task(None, 0, 0, (whole.q0, whole.q1), (whole.k0, whole.k1), (whole,))
    assert list(slices(task, 1, 1)) == [task]
    heads = 4 * SLICE // task.area
    parts = list(slices(task, 1, heads))
    assert len(parts) > 4 and sum(p.area for p in parts) == task.area
    assert all(a.q[1] <= b.q[0] for a, b in pairwise(parts))
    assert max(p.area for p in parts) * heads <= 2 * SLICE


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_and_in_a_log(terminal: bool) -> None:
    now = [0.0]
    stream = _Terminal() if terminal else io.StringIO()
    console = Console(stream, speaks=True, clock=lambda: now[0])
    progress = Progress(console, "forward", 100)
    for seconds in (0.1, 10, 10.1, 40):
        now[0] = seconds
        progress.add(25)
    console.say("done")
    first = "forward:  50% of rank 0's pairs, 10.0 s gone, about 10.0 s left"
    last = "forward: 100% of rank 0's pairs, 40.0 s gone"
    if terminal:
        assert stream.getvalue() == f"\r{first}\x1b[K\r{last}\x1b[K\ndone\n"
    else:
        assert stream.getvalue() == f"{first}\n{last}\ndone\n"


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    console = Console(stream, speaks=False)
    Progress(console, "forward", 10).add(10)
    console.table([("a", "b")])
    assert stream.getvalue() == ""
