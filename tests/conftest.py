"""What every test file shares: one hypothesis profile, one thread a process, one place that skips
for want of a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from ringfa4.kernels.interface import BlockKernel

# The same examples in every run; no deadline, since a machine shared by processes says nothing
# about time.
settings.register_profile("ringfa4", derandomize=True, deadline=None, database=None)
settings.load_profile("ringfa4")

# Workers and the ranks they start are as many as there are cores, or more: threads of one process
# would spin while those of another have the core. (Measured with two workers beside other jobs on
# two cores: tests/sm100/test_host.py took 156 CPU seconds with two threads each, 7 with one.)
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[BlockKernel], None]:
    """Call it with the kernel that every problem is to take."""
    import ringfa4.problem  # not every folder of tests needs the package
    from ringfa4.kernels.choose import Choice

    def take(kernel: BlockKernel) -> None:
        monkeypatch.setattr(
            ringfa4.problem, "choose_kernel", lambda asked, spec: Choice(kernel, "double")
        )

    return take


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is false")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
