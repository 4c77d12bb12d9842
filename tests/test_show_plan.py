"""launch/show_plan.py: its numbers are the wires' and the plan's, it needs no torch, it draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from ringfa4 import mask as masks
from ringfa4 import shard as shardings
from ringfa4.kernels.registry import load_kernel
from ringfa4.launch import plan_picture
from ringfa4.launch.plan_numbers import WIRES, Numbers, Shape, Work, gradient_bytes, record_bytes
from ringfa4.launch.show_plan import main
from ringfa4.launch.workload import DTYPES
from ringfa4.mask import Band, Mask
from ringfa4.plan import Plan
from ringfa4.schedule import schedule
from ringfa4.topology import Topology
from ringfa4.wire import PLAIN, Geometry, sum_dtype, wire_format

ROOT = Path(__file__).resolve().parent.parent

CASES = {
    "causal zigzag": (masks.causal(5000), "zigzag"),
    "documents balanced": (masks.documents([0, 700, 700, 760, 2500, 5000]), "balanced"),
    "documents striped": (masks.documents([0, 700, 760, 1500]), "striped"),
    "window contiguous": (masks.window(5000, left=600), "contiguous"),
    "rows": (masks.stack([masks.causal(900), masks.full(900)]), "zigzag"),
    "cross": (masks.full(300, 2000), "contiguous"),
    "fewer tokens than ranks": (masks.causal(2), "zigzag"),
    "empty": (masks.causal(0), "zigzag"),
}


def numbers(
    name: str, topology: Topology | None, wire: str = "bf16", backward: bool = False
) -> Numbers:
    (mask, sharding), world = CASES[name], 3 if topology is None else topology.world
    sides = (shardings.by_name(sharding, mask, world, side) for side in "qk")
    shape = Shape(2, 4, 2, 64, 96)
    return Numbers.of(mask, *sides, wire, shape, backward=backward, topology=topology)


# ---- the numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_a_record_are_the_wires_own(wire: str) -> None:
    dtype = DTYPES.get(wire, torch.bfloat16)
    format = wire_format(wire, dtype)
    kernel = load_kernel("reference" if wire == "fp64" else "cpu")
    for batch, heads, dk, dv in product((1, 3), (1, 2), (32, 128, 192), (64, 160)):
        geometry, shape = Geometry(batch, heads, dk, dv, dtype), Shape(batch, heads, heads, dk, dv)
        for direction in ("forward", "backward"):
            got = record_bytes(wire, shape, backward=direction == "backward")
            assert got == format.record_bytes(geometry, direction), (geometry, direction)
        given, sums = kernel.gradient_dtype(dtype), sum_dtype(dtype)
        for summed, back in ((False, given), (True, sums)):
            due = PLAIN[back].record_bytes(geometry, "backward")
            assert gradient_bytes(wire, shape, summed=summed) == due


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("topology", [None, Topology(((0, 3), (2, 1)))], ids=["flat", "domains"])
def test_what_is_shown_is_what_the_ring_would_do(
    name: str, wire: str, topology: Topology | None
) -> None:
    """Pairs of the tasks, and bytes of the schedule that transports execute."""
    shown = numbers(name, topology, wire=wire, backward=True)
    mask, format = shown.mask, wire_format(wire, torch.bfloat16)
    sharding = CASES[name][1]
    q, k = (shardings.by_name(sharding, mask, shown.world, side) for side in "qk")
    plan = Plan(mask, q, k.split(format.split_at(mask)), topology)
    geometry = Geometry(2, 2, 64, 96, torch.bfloat16)
    rows = 2 if mask.batch == 1 else 1
    for rank, own in enumerate(shown.steps):
        steps = plan.steps(rank)
        back, taker = own[-1].returned, own[-1].taker
        last = Work(rank, rank, 0, 0, 0, 0, 0, 0, back, taker, summed=back > 0)
        assert own[plan.world :] == (() if topology is None else (last,))
        here = own[: plan.world]
        assert [w.pairs for w in here] == [rows * step.area for step in steps]
        assert [(w.owner, w.source, w.tasks, w.records) for w in here] == [
            (step.owner, step.source, len(step.tasks), step.records) for step in steps
        ]
        moved = schedule(plan, rank, format, geometry, "backward", torch.bfloat16).steps
        read = [s.receive if s.receive and s.receive.peer != rank else None for s in moved]
        assert [w.read for w in own] == [x.nbytes if x else 0 for x in read]
        assert [w.source for w, x in zip(own, read, strict=True) if x] == [
            x.peer for x in read if x
        ]
        back = [s.grad_out for s in moved]
        assert [(w.taker, w.returned) for w in own] == [
            (x.peer, x.nbytes) if x else (None, 0) for x in back
        ]
        carries = {s.carry.lap * plan.order.size: s.carry for s in moved if s.carry}
        assert {t: w.carried for t, w in enumerate(own) if w.carried} == {
            t: carry.nbytes for t, carry in carries.items()
        }
        assert all(own[t].owner == carry.peer for t, carry in carries.items())
    assert sum(shown.work) == rows * mask.area
    assert shown.balance == pytest.approx(plan.balance)
    assert 1.0 <= shown.balance <= shown.lockstep + 1e-12


def test_balance_lockstep_and_hiding_by_hand() -> None:
    """Contiguous causal over 2 ranks of 4 tokens: rank 0 has 10 pairs, rank 1 has 16 + 10."""
    mask = masks.causal(8)
    side = shardings.contiguous(8, 2)
    shown = Numbers.of(mask, side, side, "bf16", Shape(1, 2, 1, 32, 64))
    assert shown.work == (10, 26) and shown.balance == 26 / 18
    assert shown.lockstep == (10 + 16) / 18
    assert shown.read == (0, 128 * (32 + 64) * 2) and shown.returned == (0, 0)
    flops = 36 * 2 * 2 * (32 + 64)
    assert shown.bytes_per_kflop == pytest.approx(1e3 * 128 * 96 * 2 / flops)
    assert shown.flops(36) == flops


# ---- what people read ---------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert main(text.split()) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_table_names_every_rank_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--seq 1M --ranks 4")
    assert "1M (1,048,576)" in text and "balance" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"[0-3] ", line)]
    assert [row[0] for row in rows] == list("0123") * 2
    assert [row[1::2] for row in rows[4:]] == [
        ["0:", "3:", "2:", "1:"],
        ["1:", "0:", "3:", "2:"],
        ["2:", "1:", "0:", "3:"],
        ["3:", "2:", "1:", "0:"],
    ]


def test_many_ranks_are_summed_up_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = said(capsys, "--seq 64K --ranks 72 --sharding contiguous")
    rows = [line.split()[0] for line in short.splitlines() if re.match(r"\d", line)]
    assert rows == ["0", "36", "71"]  # contiguous and causal: the last rank has the most
    rows = said(capsys, "--seq 64K --ranks 72 --all").splitlines()
    assert sum(bool(re.match(r"\d", line)) for line in rows) == 72


def test_one_rank_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A window's halo: the own shard, then the end of the one before it."""
    how = "--ranks 8 --window 1K --sharding contiguous --rank 5 --wire bf16"
    text = said(capsys, f"--seq 64K {how}")
    rows = [re.split(r"  +", line) for line in text.splitlines() if re.match(r"\d", line)]
    assert [row[:3] for row in rows] == [["0", "its own", "64"], ["1", "rank 4", "8"]]
    assert rows[1][3] == "4 MiB"  # 8 records x 128 tokens x 8 heads x 256 x 2 bytes


def test_domains_show_who_carries_and_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 5 of 8 in two domains: rank 1's records come over, the others' from its peers. dK/dV go
    to them in bf16, to rank 1 as their sum in fp32.
    """
    text = said(capsys, "--seq 64K --ranks 8 --domains 2 --rank 5 --backward --wire bf16")
    assert re.search(r"domains +2 of 4 ranks, (.*) cross .* \(without carrying: (.*)\)", text)
    assert re.search(r"dK/dV +.* in all, in bf16, sums of domains fp32\n", text)
    rows = [re.split(r"  +", line) for line in text.splitlines() if re.match(r"\d", line)]
    assert [(row[1], row[3], row[4]) for row in rows[4:]] == [
        ("rank 1", "16 MiB carried from 1", "0 B"),
        ("rank 0", "16 MiB from 4", "16 MiB to 4"),
        ("rank 3", "16 MiB from 7", "16 MiB to 7"),
        ("rank 2", "16 MiB from 6", "16 MiB to 6"),
        ("-", "-", "32 MiB to 1"),
    ]
    assert main(["--seq", "64K", "--ranks", "8", "--domains", "3"]) == 1
    assert "8 ranks do not make 3 domains" in capsys.readouterr().err


def test_json_holds_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--documents", "300,41,200", "--ranks", "2", "--backward", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["seq_q"], body["mask"], body["backward"]) == (541, "documents", True)
    assert [len(own) for own in body["steps"]] == [2, 2]
    assert sum(body["pairs"]) == sum(n * (n + 1) // 2 for n in (300, 41, 200))
    assert main(["--seq", "64", "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["seq_k"] == 64


# ---- the picture --------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [(7, 5), (20, 16)])
def test_the_mask_in_cells_adds_up(cells: tuple[int, int]) -> None:
    mask = Mask(40, 32, ((Band(0, 23, 3, 32, -9, 4), Band(23, 40, 0, 30)),))
    rows, columns = cells
    grid = plan_picture.coverage(mask, rows, columns)
    for a, b in product(range(rows), range(columns)):
        pairs = [
            mask.allowed(0, i, j)
            for i in range(40 * a // rows, 40 * (a + 1) // rows)
            for j in range(32 * b // columns, 32 * (b + 1) // columns)
        ]
        assert grid[a][b] == pytest.approx(sum(pairs) / len(pairs)), (a, b)


def test_cells_belong_to_the_rank_that_owns_most_of_them() -> None:
    assert plan_picture.owners(shardings.zigzag(80, 2), 8) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert plan_picture.owners(shardings.striped(80, 2), 4) == [None] * 4
    assert plan_picture.owners(shardings.uneven([33, 7]), 4) == [0, 0, 0, 1]
    assert plan_picture.owners(shardings.uneven([35, 5]), 4) == [0, 0, 0, None]


@pytest.mark.parametrize(
    "text",
    [
        "--seq 4K --ranks 3 --backward",
        "--seq 4K --ranks 4 --domains 2 --backward",
        "--seq 64K --ranks 40 --window 4K --sharding striped",
        "--seq 3 --ranks 1",
        "--seq 0",
    ],
)
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the `plot` extra")
    file = tmp_path / "plan.png"
    assert main([*text.split(), "--png", str(file)]) == 0, capsys.readouterr().err
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 10_000 < file.stat().st_size < 300_000


def test_without_matplotlib_the_table_comes_and_one_line_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["--seq", "64", "--png", str(tmp_path / "plan.png")]) == 1
    out, err = capsys.readouterr()
    assert "balance" in out
    assert err == (
        "show_plan.py: a picture needs matplotlib, which is not installed: "
        "pip install 'ringfa4[plot]'\n"
    )


def test_neither_torch_nor_numpy_is_loaded() -> None:
    """As a script, the way people run it, with stand-ins for a machine that has neither."""
    code = (
        "import sys, runpy; sys.modules.update(torch=None, numpy=None);"
        "sys.argv = ['launch/show_plan.py', '--seq', '64K', '--ranks', '72', '--documents', '9'];"
        "runpy.run_path('launch/show_plan.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "documents" in done.stdout
