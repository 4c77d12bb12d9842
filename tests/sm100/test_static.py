"""sentryward proves launches of the SM100 kernel free of deadlocks and races, and finds faults.

    pip install sentryward; pytest -m slow tests/sm100/test_static.py

Its results are recorded in docs/sm100.md.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("cutlass", "sentryward") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

SHAPES = {
    "two tiles, two records": {},
    "references that do not move": {"moves": False},
    "masked": {"causal": True},
    "two works on one thread block": {"rows": 128, "keys": 128, "heads": 2},
    "d 128": {"dk": 128, "dv": 128, "rows": 128},
    "four records, so that slots are used again": {"rows": 128, "keys": 512},
    "two thread blocks, masked": {"heads": 4, "teams": 2, "rows": 128, "keys": 128, "causal": True},
    "a pair of thread blocks": {"ctas": 2, "keys": 128},
    "a pair, masked": {"ctas": 2, "keys": 128, "causal": True},
    "a pair, three records of queries": {"ctas": 2, "rows": 384, "keys": 128},
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_deadlock_and_no_race(name: str, tmp_path: Path) -> None:
    from sm100.static_check import Shape, program, verify

    shape = Shape(**SHAPES[name])  # type: ignore[arg-type]
    report = verify(shape, program(shape), tmp_path, 1200)
    checks = {key: report["checks"][key] for key in ("synchronization", "memory")}
    assert report["result"] == "race_free", (report["diagnostics"], report.get("races"))
    assert checks == {"synchronization": "passed", "memory": "passed"}


FAULTS = {
    "a commit is dropped": (r"tcgen05\.commit[^;]*;", 1, "not_wellsynced"),
    "lanes speak for their warps too early": (r"bar\.warp\.sync[^;]*;", 0, "not_wellsynced"),
    "warps of the same rows do not meet": (r"(?<= )bar\.sync[^;]*, 64;", 0, "potential_race"),
    "they do not meet again over their maxima": (
        r"(?<=\t)bar\.sync \t%r\d+, 64;", 0, "potential_race",
    ),
    "stores to tensor memory are not waited for": (
        r"tcgen05\.wait::st[^;]*;", 0, "invalid_lifecycle",
    ),
}  # fmt: skip
"""What is taken out, how often (0: everywhere), and the verdict."""

OF_PAIRS = {
    "nothing arrives at the leader": (
        r"@p mbarrier\.arrive\.release\.cluster[^;]*;", 0, "not_wellsynced",
    ),
    "thread blocks do not meet before they begin": (
        r"barrier\.cluster\.arrive[^;]*; barrier\.cluster\.wait[^;]*;", 1, "not_wellsynced",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FAULTS, *OF_PAIRS])
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    from sm100.static_check import Shape, program, verify

    pattern, count, verdict = (FAULTS | OF_PAIRS)[name]
    shape = Shape(ctas=2, keys=128) if name in OF_PAIRS else Shape(rows=128, keys=256)
    mutant, dropped = re.subn(pattern, "", program(shape), count=count)
    assert dropped >= 1
    assert verify(shape, mutant, tmp_path, 1200)["result"] == verdict
