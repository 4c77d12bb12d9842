"""The fused kernels without a GPU: their own PTX, executed on the CPU (tests/cute_executed.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from cute_contract import CuteContract
from ptx import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("cutlass") is None,
        reason="needs the CuTe DSL (pip install 'ringfa4[cuda]'); no GPU",
    ),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler for the PTX executor"),
]


class TestExecuted(CuteContract):
    tokens = (129, 43)
    dims = ((128, 64), (96, 32))
    all_bf16 = 1 << 11

    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    @contextmanager
    def running(self) -> Iterator[None]:
        from cute_executed import on_cpu

        with on_cpu(self.monkeypatch):
            yield
