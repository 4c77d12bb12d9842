"""Ranks that cannot read one another's memory are told so, by rank, host and domain."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from ringfa4.comm import reach
from ringfa4.comm.control import SoloControl
from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.comm.reach import Seat, _fabric, objection, require_reachable
from ringfa4.comm.registry import TRANSPORTS, open_transport
from ringfa4.errors import MissingLibraryError

HERE = Seat("node-a", "boot-a", "11111111-aaaa", fabric=None, mps=False)
BESIDE = replace(HERE, gpu="22222222-bbbb")
ELSEWHERE = Seat("node-b", "boot-b", "33333333-cccc", fabric=None, mps=False)


def test_gpus_of_one_host_are_left_to_the_driver() -> None:
    assert objection([HERE, BESIDE], 0, several_on_one_gpu=False) is None


@pytest.mark.parametrize("fabrics", [(None, None), ("c1/0", None), ("c1/0", "c1/1")])
def test_hosts_in_different_nvlink_domains_are_named(
    fabrics: tuple[str | None, str | None],
) -> None:
    seats = [replace(HERE, fabric=fabrics[0]), replace(ELSEWHERE, fabric=fabrics[1])]
    for rank in range(2):
        reason = objection(seats, rank, several_on_one_gpu=True)
        assert reason is not None
        for part in ("node-a", "node-b", "rank 0", "rank 1", "NVLink domain", str(fabrics[0])):
            assert part in reason


def test_one_domain_over_hosts_is_accepted() -> None:
    seats = [replace(HERE, fabric="c1/0"), replace(ELSEWHERE, fabric="c1/0")]
    assert objection(seats, 0, several_on_one_gpu=False) is None


def test_a_shared_gpu_needs_a_library_that_can_and_mps() -> None:
    seats = [HERE, HERE]
    assert "share a GPU" in (objection(seats, 1, several_on_one_gpu=False) or "")
    assert "MPS" in (objection(seats, 1, several_on_one_gpu=True) or "")
    assert objection([replace(HERE, mps=True)] * 2, 1, several_on_one_gpu=True) is None


def test_what_is_missing_comes_before_what_is_wrong() -> None:
    alone, cpu = SoloControl(1.0), torch.device("cpu")
    with pytest.raises(MissingLibraryError, match="rank 0: no such library"):
        require_reachable(alone, cpu, "any", missing="no such library", obstacle="and more")
    with pytest.raises(ValueError, match="transport 'any', rank 0: it moves CUDA tensors"):
        require_reachable(alone, cpu, "any")


def test_ranks_whose_waits_could_take_all_queues_are_told_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them is enough, and all hear the same."""
    seats = [HERE, replace(HERE, gpu="2", connections="1"), replace(HERE, gpu="3")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(reach, "seat_of", lambda device: seats[device.index])

    def main(rank: int, transport: Transport, control: Control) -> str:
        with pytest.raises(ValueError) as caught:
            require_reachable(control, torch.device("cuda", rank), "any")
        return str(caught.value)

    said = run_ranks(3, main)
    assert len(set(said)) == 1
    for part in ("rank 1", "CUDA_DEVICE_MAX_CONNECTIONS", "it is 1", "MPS"):
        assert part in said[0]
    assert objection(seats[1:2], 0, several_on_one_gpu=False) is None, "it waits for nobody"


@pytest.mark.parametrize("name", sorted(set(TRANSPORTS) - {"torch_p2p"}))
def test_pulling_needs_a_gpu(name: str) -> None:
    with pytest.raises((ValueError, MissingLibraryError), match=f"transport '{name}', rank 0"):
        open_transport(name, None, torch.device("cpu"), 1.0)


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t, as nvidia-ml-py declares it."""

    _fields_ = [
        ("clusterUuid", ctypes.c_char * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    ]


@pytest.mark.parametrize(
    "cluster, state, want",
    [
        (bytes(range(16)), 3, bytes(range(16)).hex() + "/7"),
        (bytes(range(16)), 2, None),
        (bytes(16), 3, None),
    ],
)
def test_the_domain_is_cluster_and_clique_once_the_fabric_is_up(
    cluster: bytes, state: int, want: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zero byte at the start of the cluster's name does not end it."""
    nvml = ModuleType("pynvml")

    def fill(handle: str, info: object) -> None:
        assert handle == b"GPU-12345"
        filled = FabricInfo(status=0, cliqueId=7, state=state)
        ctypes.memmove(ctypes.addressof(filled), cluster, 16)
        ctypes.memmove(info, ctypes.addressof(filled), ctypes.sizeof(filled))  # type: ignore[arg-type]

    nvml.__dict__.update(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        c_nvmlGpuFabricInfo_t=FabricInfo,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetGpuFabricInfo=fill,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert _fabric("12345") == want


def test_without_nvml_no_domain_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import_module raises ImportError
    assert _fabric("12345") is None
