"""The fused kernels on the card."""

from __future__ import annotations

import pytest
import torch
from cute_contract import CuteContract

from ringfa4.fused import fused, why_not

pytestmark = pytest.mark.gpu


class TestOnTheCard(CuteContract):
    device = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        if fused(self.device) is None:
            pytest.skip(str(why_not(self.device)))
