"""launch/gpu_session.py: steps in order, each within its time, and what a second run leaves out."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from ringfa4.launch import bench, gpu_session, kernel_bench, options, scaling, transport_bench
from ringfa4.launch.gpu_session import SECONDS_LEFT, TO_FINISH_S, Session, Step, main, steps


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def noted(folder: Path) -> dict[str, str]:
    ended: dict[str, str] = json.loads((folder / "steps.json").read_text())
    return ended


def test_a_step_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [
        Step("fails", python("print('about to'); raise SystemExit(3)"), 30.0),
        Step("works", python("import os; print('said', os.environ['WORD'])"), 30.0),
    ]
    assert not Session(tmp_path, 60.0, resume=False).run(plan, {**os.environ, "WORD": "hello"})
    assert noted(tmp_path) == {"fails": "exit code 3", "works": "well"}
    said, log = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    for text in ("about to", "said hello"):
        assert text in said and text in log
    assert said.index("== fails: exit code 3") < said.index("== works: well")
    assert not Session(tmp_path, 60.0, resume=True).run(plan, {**os.environ, "WORD": "again"})
    assert "said again" not in (tmp_path / "log.txt").read_text(), "it had ended well"
    assert (tmp_path / "log.txt").read_text().count("about to") == 2 * 2  # command and output


def test_a_late_step_is_ended_with_its_children(tmp_path: Path) -> None:
    """As torchrun's, the child has a session of its own; it would touch a file if it lived on."""
    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    call = f"subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    parent = f"import subprocess, sys; {call}"
    plan = [Step("late", python(parent), 1.0), Step("next", python("pass"), 30.0)]
    began = time.monotonic()
    assert not Session(tmp_path, 60.0, resume=False).run(plan, dict(os.environ))
    assert noted(tmp_path) == {"late": "ended: past its limit", "next": "well"}
    time.sleep(max(0.0, 4.5 - (time.monotonic() - began)))
    assert not mark.exists()


def test_steps_share_the_time(tmp_path: Path) -> None:
    plan = [Step("long", python("import time; time.sleep(60)"), 60.0), Step("b", python(""), 9.0)]
    assert not Session(tmp_path, 1.0, resume=False).run(plan, dict(os.environ))
    assert noted(tmp_path) == {"long": "ended: past its limit", "b": "not run: no time left"}


def test_a_step_is_tried_again_until_it_ends_well(tmp_path: Path) -> None:
    """As scaling is, which goes on behind the row that ended it."""
    count = tmp_path / "count"
    code = f"""
import pathlib
path = pathlib.Path({str(count)!r})
seen = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (seen + 1))
raise SystemExit(seen < 2)
"""
    assert Session(tmp_path, 60.0, resume=False).run([Step("a", python(code), 60.0, tries=4)], {})
    assert count.read_text() == "xxx"
    count.unlink()
    assert not Session(tmp_path, 60.0, resume=False).run([Step("a", python(code), 60.0, 2)], {})
    assert noted(tmp_path) == {"a": "exit code 1"}


def test_a_step_is_told_how_long_it_may_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*python("import sys; print('may', sys.argv[1])"), SECONDS_LEFT]
    plan = [Step("a", command, 45.0 + TO_FINISH_S), Step("b", command, 9.0)]
    assert Session(tmp_path, 300.0, resume=False).run(plan, dict(os.environ))
    seconds = [int(x.split()[1]) for x in capsys.readouterr().out.splitlines() if "may" in x]
    assert 30 <= seconds[0] <= 45 and seconds[1] == 0


def test_what_an_earlier_session_left_is_gone_unless_resumed(tmp_path: Path) -> None:
    old = tmp_path / "scaling.json"
    old.write_text("{}")
    Session(tmp_path, 1.0, resume=True)
    assert old.exists()
    Session(tmp_path, 1.0, resume=False)
    assert not old.exists()


def test_the_commands_are_understood(tmp_path: Path) -> None:
    """By the parsers of what they start; files land in the folder, few enough to carry away."""
    plan = {step.name: list(step.command) for step in steps(4, tmp_path)}
    assert list(plan)[:1] == ["suite"] and list(plan)[-2:] == ["million", "memory"]
    for name, command in plan.items():
        if name not in ("suite", "memory"):
            assert command[command.index("--nproc-per-node") + 1] == "4"
    given = plan["scaling"][plan["scaling"].index("--scaling") + 1 :]
    found = scaling.parse_options(["77" if word == SECONDS_LEFT else word for word in given])
    assert found.resume and found.budget == 77
    assert found.json == str(tmp_path / "scaling.json")
    script = next(n for n, word in enumerate(plan["million"]) if word.endswith("ring.py"))
    ring = options.parse_options(plan["million"][script + 1 :])
    assert (ring.seq, ring.backward, ring.check) == (1 << 20, True, True)
    for name in (*plan["suite"][-2:], plan["memory"][-1]):
        assert Path(name).is_file()
    assert bench.scaling is scaling
    assert sum(step.limit_s for step in steps(2, tmp_path)) < 1.2 * gpu_session.SECONDS


def test_the_commands_for_one_gpu_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benches' own parsers are reached before anything of CUDA is."""
    plan = {step.name: list(step.command) for step in steps(1, tmp_path)}
    assert list(plan)[:2] == ["tests", "nvshmem"], "what must pass comes first"
    for word in [*plan["tests"], *plan["nvshmem"]]:
        assert Path(word).exists() or not word.startswith("/"), word

    def given(name: str, script: str) -> list[str]:
        command = plan[name]
        return command[next(n for n, word in enumerate(command) if word.endswith(script)) + 1 :]

    for name, seq in (("million", 1 << 20), ("plain", 1 << 17), ("traced", 1 << 17)):
        ring = options.parse_options(given(name, "ring.py"))
        assert (ring.seq, ring.backward, ring.check) == (seq, True, name == "million")
        assert ring.virtual_ranks == 8 and (ring.trace is not None) == (name == "traced")
    reached: list[str] = []

    def no_device() -> str:
        reached.append("the device's name")
        raise SystemExit

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", no_device)
    for name, script, module in (
        ("virtual", "transport_bench.py", transport_bench),
        ("over", "transport_bench.py", transport_bench),
        ("rates", "kernel_bench.py", kernel_bench),
    ):
        monkeypatch.setattr(sys, "argv", [script, *given(name, script)])
        with pytest.raises(SystemExit):
            module.main()
        assert reached.pop() and not reached, name


def test_without_a_gpu_only_the_list_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "99"]) == 1
    assert "99 of " in capsys.readouterr().err
    assert main(["--list", "--steps", "scaling,million", "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["scaling", "million"]
    with pytest.raises(SystemExit):
        main(["--steps", "everything"])
    assert "no steps ['everything']" in capsys.readouterr().err
