"""The host side of the SM100 kernel by itself: its launches are read in NumPy, without the DSL."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringfa4 import mask as masks
from ringfa4.kernels.choose import choose_kernel
from ringfa4.kernels.cute import driver
from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.kernels.registry import load_kernel
from ringfa4.kernels.sm100.kernel import Sm100Kernel
from ringfa4.kernels.sm100.launch import LIBRARY, Arguments
from ringfa4.kernels.sm100.specs import ForwardSpec
from sm100.emulated_launch import EmulatedLauncher
from sm100.forward_contract import ForwardContract


class EmulatedContract(ForwardContract):
    arch_name = "sm_100a"

    def kernel_forward(self) -> BlockKernel:
        return Sm100Kernel(EmulatedLauncher(arch=self.arch_name))


class TestTiles(EmulatedContract):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)


class TestOneBy32(EmulatedContract):
    """On pairs of thread blocks, too."""

    arch_name, wire = "sm_103a", "mxfp8-1x32"


# ---- the choice ---------------------------------------------------------------------------------

B200 = KernelSpec("cuda", (10, 0), torch.bfloat16, "mxfp8", 8, 2, 128, 128, frozenset(), False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu", "arch": None}, "it computes on NVIDIA GPUs, the tensors are on 'cpu'"),
        (
            {"arch": (9, 0)},
            r"it needs compute capability \(10, 0\) and \(10, 3\).*this is \(9, 0\)",
        ),
        ({"arch": (12, 0)}, r"this is \(12, 0\)"),
        ({"wire": "bf16"}, r"it reads MXFP8 wires \(mxfp8, mxfp8-1x32\), not 'bf16'"),
        ({"backward": True}, "it computes forward passes only; kernel='auto' takes another one"),
        ({"dtype": torch.float64}, "bf16, fp16 and fp32, not torch.float64"),
        ({"heads_kv": 3}, "spec.heads_q=8 is not a multiple of spec.heads_kv=3"),
        ({"dk": 96}, "dk=96, dv=128: keys may have 64, 128 or 192"),
        ({"dv": 256}, "dk=128, dv=256"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refuses_with_reasons(
    change: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfa4.kernels.sm100.launch.find_spec", lambda name: name)
    kernel = load_kernel("sm100")
    assert kernel.supports(B200) is None
    assert kernel.supports(replace(B200, arch=(10, 3), wire="mxfp8-1x32")) is None
    found = kernel.supports(replace(B200, **change))  # type: ignore[arg-type]
    assert found is not None
    assert re.search(reason, found), found


def test_needs_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfa4.kernels.sm100.launch.find_spec", lambda name: None)
    assert load_kernel("sm100").supports(B200) == (
        "the CuTe DSL is not installed (pip install 'ringfa4[cuda]')"
    )


def test_a_library_takes_the_place_of_the_dsl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function for this GPU and these dimensions, with all arguments and the stream."""
    library, calls = tmp_path / "lib.so", []
    functions = {"forward_sm_103a_128x64": lambda *given: calls.append(given)}
    monkeypatch.setenv(LIBRARY, str(library))
    installed = {"tvm_ffi"}
    monkeypatch.setattr(
        "ringfa4.kernels.sm100.launch.find_spec", lambda name: name if name in installed else None
    )
    kernel = load_kernel("sm100")
    assert kernel.supports(B200) == f"{LIBRARY}={library} is not there"
    library.touch()
    assert kernel.supports(B200) is None
    installed.clear()
    assert "apache-tvm-ffi, which is not installed" in (kernel.supports(B200) or "")

    loads = SimpleNamespace(load_module=lambda path: functions if path == str(library) else None)
    monkeypatch.setitem(sys.modules, "tvm_ffi", loads)
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_103a")
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=77))
    arguments = Arguments(*range(len(Arguments._fields)))
    assert isinstance(kernel, Sm100Kernel)
    kernel._launcher(ForwardSpec(128, 64, 0), torch.device("cuda", 0), arguments)
    assert calls == [(*arguments, 77)]


def test_auto_takes_it_forward_and_another_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfa4.kernels.sm100.launch.find_spec", lambda name: name)
    choose_kernel.cache_clear()
    forward = choose_kernel("auto", B200)
    assert (forward.kernel.name, forward.refusals) == ("sm100", ())
    backward = choose_kernel("auto", replace(B200, backward=True))
    assert backward.kernel.name in ("fa4", "cuda_aten", "reference")
    name, reason = backward.refusals[0]
    assert name == "sm100" and reason.startswith("it computes forward passes only")
    with pytest.raises(ValueError, match="kernel 'sm100' refuses: it computes forward passes only"):
        choose_kernel("sm100", replace(B200, backward=True))
    choose_kernel.cache_clear()


# ---- the launch ---------------------------------------------------------------------------------


def test_arguments_are_those_of_the_spec() -> None:
    letters = dict(zip(Arguments._fields, ForwardSpec.SIGNATURE, strict=True))
    assert "128s" * 3 + "".join(letters[name] for name in ForwardSpec.DEVICE) == (
        ForwardSpec.PARAMETERS
    )
    assert [letters[name] for name in ("scale", "ctas", "n_items", "acc_s")] == ["f", "i", "i", "q"]


def test_one_launch_for_all_tasks_and_none_for_none() -> None:
    contract, launcher = ForwardContract(), EmulatedLauncher(multiprocessors=5)
    case = contract.case(masks.causal(150))
    kernel, state = Sm100Kernel(launcher), case.state()
    queries, encoded = kernel.prepare(case.q, case.q_shard), case.encoded()
    assert len(case.tasks) == 3
    kernel.forward(queries, encoded, case.tasks, case.scale, state)
    kernel.forward(queries, encoded, (), case.scale, state)
    ((spec, arguments),) = launcher.launches
    assert spec == ForwardSpec.of(64, 64, "sm_100a")
    # Two chunks of queries, shorter than 256 tokens, in two batch rows; four heads.
    assert (arguments.n_items, arguments.ctas) == (4, 5)
    assert (
        Sm100Kernel(EmulatedLauncher(99)).forward(queries, encoded, case.tasks, case.scale, state)
        is None
    )


@pytest.mark.parametrize("wire", ["mxfp8", "mxfp8-1x32"])
def test_queries_are_encoded_once_as_the_wire_encodes_keys(wire: str) -> None:
    """The same bytes as K of as many heads would have, chunk by chunk, whatever the strides."""
    contract = ForwardContract()
    contract.wire = wire
    case = contract.case(masks.full(300), heads=(3, 3), dims=(192, 64), dtype=torch.bfloat16)
    wide = torch.zeros(*case.q.shape[:3], 2 * 192, dtype=case.q.dtype)
    wide[..., ::2] = case.q
    queries = Sm100Kernel(EmulatedLauncher()).prepare(wide[..., ::2], case.q_shard)
    found = queries.records(wire)
    assert queries.records(wire) is found
    as_keys = replace(case, k=case.q, k_shard=case.q_shard).encoded()
    size, start = found.scales, as_keys.layout.operand("k", "d").scales
    assert torch.equal(found.records[:, :size], as_keys.records[:, :size])
    assert torch.equal(
        found.records[:, size:], as_keys.records[:, start : start + found.records.shape[1] - size]
    )


class FakeDriver:
    """Takes what a launch gives the driver, argument by argument, before its memory is gone."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.shared: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: object, device: int) -> int:
        self.shared.append((attribute, value))
        return 0

    def cuLaunchKernel(self, kernel: object, *rest: object) -> int:
        *shape, _, given, extra = rest
        assert extra is None and given is not None
        sizes = (128, 8, 4)
        read = [ctypes.string_at(at, size) for at, size in zip(given, sizes, strict=True)]
        self.launches.append((tuple(shape), *read))
        return 0

    def cuLaunchKernelEx(
        self, config: object, kernel: object, given: object, extra: ctypes.Array[ctypes.c_void_p]
    ) -> int:
        """CUlaunchConfig, its attributes (id, padding, a value of 64 bytes), packed arguments."""
        assert given is None
        *shape, stream, attributes, count = struct.unpack("7I4xQQI", bytes(config._obj)[:52])
        attribute = struct.unpack("2I16I", ctypes.string_at(attributes, count * 72))
        size = ctypes.c_size_t.from_address(extra[3]).value
        read = ctypes.string_at(extra[1], size)
        self.launches.append((tuple(shape), stream, count, attribute, read))
        return 0


def test_tensor_maps_are_given_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed buffer would have to know the gap that the compiler leaves before the first map."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    kernel = driver.Kernel(b"", "entry", "128sqf", 768, shared=100_000)
    tensor_map = bytes(range(128))
    for _ in range(2):
        kernel.launch((3, 1, 1), 0, 0, [tensor_map, 1 << 40, 0.5])
    launched = ((3, 1, 1, 768, 1, 1, 100_000), tensor_map, struct.pack("q", 1 << 40))
    assert fake.launches == [(*launched, struct.pack("f", 0.5))] * 2
    assert fake.shared == [(8, 100_000)], "asked for once a device"


def test_pairs_of_thread_blocks_are_launched_as_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler does not write the cluster into the kernel; the launch has to say it."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    kernel = driver.Kernel(b"", "entry", "qi", 768, shared=100_000, cluster=2)
    kernel.launch((6, 1, 1), 0, 77, [1 << 40, 5])
    ((shape, stream, count, attribute, arguments),) = fake.launches
    assert (shape, stream) == ((6, 1, 1, 768, 1, 1, 100_000), 77)
    cluster_dimension = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (count, attribute[0], attribute[2:5]) == (1, cluster_dimension, (2, 1, 1))
    assert arguments == struct.pack("qi", 1 << 40, 5)


def test_a_launch_is_a_whole_number_of_pairs() -> None:
    """Of 7 multiprocessors 6 are used; with fewer works than pairs, two thread blocks a work."""
    contract = ForwardContract()
    case = contract.case(masks.causal(150))
    for multiprocessors, ctas in ((7, 6), (99, 32)):
        launcher, state = EmulatedLauncher(multiprocessors, "sm_103a"), case.state()
        kernel = Sm100Kernel(launcher)
        queries = kernel.prepare(case.q, case.q_shard)
        kernel.forward(queries, case.encoded(), case.tasks, case.scale, state)
        ((spec, arguments),) = launcher.launches
        # Two chunks of queries in two batch rows, an item each; four heads.
        assert (spec.ctas, arguments.n_items, arguments.ctas) == (2, 4, ctas)
