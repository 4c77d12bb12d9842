"""What every test file shares: one hypothesis profile, one place that skips for want of a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# The same examples in every run; no deadline, since a machine shared by processes says nothing
# about time.
settings.register_profile("ringfa4", derandomize=True, deadline=None, database=None)
settings.load_profile("ringfa4")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is false")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
