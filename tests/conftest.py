"""What every test file shares: one hypothesis profile, one thread a process, one place that skips
for want of a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# The same examples in every run; no deadline, since a machine shared by processes says nothing
# about time.
settings.register_profile("ringfa4", derandomize=True, deadline=None, database=None)
settings.load_profile("ringfa4")

# Workers and the ranks they start are as many as there are cores, or more: threads of one process
# would spin while those of another have the core. (Measured with two workers beside other jobs on
# two cores: tests/sm100/test_host.py took 156 CPU seconds with two threads each, 7 with one.)
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is false")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
