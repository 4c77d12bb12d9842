"""The library built ahead of time: it loads where there is no DSL, and launches what it should.

Without a GPU its launches are caught by the stand-in for the CUDA runtime (ptx/capture_stub.c),
linked in its place; linked with the real one, a call fails as an exception.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ptx.encode import tensor_map

from ringfa4.kernels.sm100.launch import Arguments, TensorMap, tensor_maps
from ringfa4.kernels.sm100.specs import CTAS, EMULATED, ForwardSpec

TESTS = Path(__file__).parents[1]
MISSING = [name for name in ("cutlass", "tvm_ffi", "nvidia") if find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

DIMS = (128, 64)
ARGUMENTS = Arguments(
    q_records=0x7F00_0000_1000, q_record_bytes=2 * 4 * (128 * 128 + 512), q_payload=0,
    q_scales=2 * 4 * 128 * 128, n_q_records=5,
    kv_records=0x7F00_2000_0000, kv_record_bytes=2 * 2 * (128 * 192 + 1024), k_payload=0,
    v_payload=2 * 2 * 128 * 128, k_scales=2 * 2 * 128 * 192, v_scales=2 * 2 * (128 * 192 + 512),
    n_kv_records=70000, batch=2, heads_q=4, heads_kv=2,
    acc=0x7F00_4000_0000, max=0x7F00_5000_0000, sum=0x7F00_6000_0000,
    acc_b=600 * 4 * 64 * 4, acc_s=4 * 64 * 4, row_b=4 * 600 * 4, row_h=600 * 4,
    items=0x7F00_7000_0000, segments=0x7F00_7000_1000, modes=0x7F00_7000_2000, modes_row=600,
    n_items=6, scale=0.125, ctas=24,
)  # fmt: skip
SPECS = {arch: ForwardSpec.of(*DIMS, arch) for arch in EMULATED}

CALL = """
import ctypes, json, sys
sys.modules["cutlass"] = None  # as on a machine that has no DSL: importing it fails
library, function, arguments, kernel, sizes, offsets = json.loads(sys.argv[1])
import tvm_ffi
call = tvm_ffi.load_module(library)[function]
if not kernel:
    call(*arguments, 0)
    sys.exit("the call went through")
from ptx.capture import _Captured
stub = ctypes.CDLL(library)
stub.capture_launch.restype = ctypes.POINTER(_Captured)
stub.capture_reset(148)
integers = ctypes.c_int32 * len(sizes)
assert not stub.capture_register(kernel.encode(), integers(*sizes), integers(*offsets), len(sizes))
call(*arguments, 0)
assert stub.capture_count() == 1
c = stub.capture_launch(0).contents
shape = [list(c.grid), list(c.block), list(c.cluster), c.shared]
print(json.dumps([shape, bytes(c.parameters[: c.bytes]).hex()]))
"""


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CALL, json.dumps(arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def layout(signature: str) -> tuple[list[int], list[int]]:
    """(sizes, offsets) of parameters."""
    pieces = signature.replace("128s", "m")
    forms = ["128s" if piece == "m" else piece for piece in pieces]
    sizes = [struct.calcsize(form) for form in forms]
    offsets = [
        struct.calcsize("@" + "".join(forms[: n + 1])) - size for n, size in enumerate(sizes)
    ]
    return sizes, offsets


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ringfa4.kernels.sm100.build import build_objects

    folder = tmp_path_factory.mktemp("objects")
    built = build_objects(sorted(EMULATED), [DIMS], folder)
    assert [x.function for x in built] == ["forward_sm_100a_128x64", "forward_sm_103a_128x64"]
    for x in built:
        assert x.registers == 65536 // ForwardSpec.THREADS // 8 * 8 and x.stack_bytes == 0, str(x)
    return folder


@pytest.fixture(scope="module")
def library(objects: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linked with the stand-in for the CUDA runtime."""
    from ringfa4.kernels.sm100.build import _dialect_runtime, link

    library = tmp_path_factory.mktemp("library") / "libcaptured.so"
    link(objects, library, [TESTS / "ptx" / "capture_stub.c", _dialect_runtime()])
    return library


def described(m: TensorMap) -> list[int]:
    """The words of a tensor map that hardware reads, by the bit table (ptx/encode.py)."""
    strides = (1, *m.strides)
    size = sum((n - 1) * s for n, s in zip(m.extents, strides, strict=True)) + 1
    memory = (ctypes.c_uint8 * size).from_address(m.address)  # described, not touched
    array = np.ndarray(m.extents[::-1], np.uint8, memory, strides=strides[::-1])
    return words(tensor_map(array, "u8", m.box, m.swizzle.bit_length() - 5))


def words(encoded: bytes) -> list[int]:
    found = list(struct.unpack("<16I", encoded[:64]))
    # Ignored: bit 21, set for large tensors; the lowest four, 2 from the DSL, 0 from the driver.
    found[2] &= ~(1 << 21 | 15)
    return found


@pytest.mark.parametrize("arch", EMULATED)
def test_launches_what_it_is_asked_for_without_the_dsl(arch: str, library: Path) -> None:
    """Thread blocks one by one, or in pairs."""
    from ringfa4.kernels.cute.compile import compile_kernel

    spec = SPECS[arch]
    kernel = compile_kernel(spec, arch).entry
    sizes, offsets = layout(ForwardSpec.PARAMETERS)
    done = call(str(library), f"forward_{arch}_128x64", ARGUMENTS, kernel, sizes, offsets)
    assert done.returncode == 0, done.stderr
    shape, parameters = json.loads(done.stdout)
    assert shape == [[24, 1, 1], [spec.THREADS, 1, 1], [CTAS[arch], 1, 1], spec.SHARED]
    *maps, scalars = split(bytes.fromhex(parameters))
    assert scalars == [getattr(ARGUMENTS, name) for name in ForwardSpec.DEVICE]
    assert [words(m) for m in maps] == [described(m) for m in tensor_maps(spec, ARGUMENTS)]


def split(parameters: bytes) -> Sequence[object]:
    values = struct.unpack("@" + ForwardSpec.PARAMETERS, parameters)
    return [*values[:3], list(values[3:])]


@pytest.mark.slow
def test_errors_of_the_runtime_are_exceptions(objects: Path, tmp_path: Path) -> None:
    """The library as it is shipped, on a machine without a driver."""
    import torch

    from ringfa4.kernels.sm100.build import link

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the call would launch")
    link(objects, tmp_path / "lib.so")
    done = call(str(tmp_path / "lib.so"), "forward_sm_103a_128x64", ARGUMENTS, "", [], [])
    assert done.returncode == 1
    assert re.search("RuntimeError: .*(cudaError|CUDA error)", done.stderr), done.stderr


@pytest.mark.slow
def test_the_command_builds_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringfa4.kernels.sm100.build", "--arch", "sm_103a"]
    done = subprocess.run(
        [*command, "--dims", "64x64", "--out", str(tmp_path / "new")],
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("forward_sm_103a_64x64: compiled in ")
    assert (tmp_path / "new" / "libringfa4_sm100.so").exists()
    refused = subprocess.run(
        [*command, "--dims", "96x96", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "dk=96, dv=96: keys may have 64, 128 or 192" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arch", EMULATED)
def test_the_machine_code_multiplies_with_block_scales_and_spills_nothing(arch: str) -> None:
    """Both products, each of its 32-deep steps; no local memory at any head dimension."""
    from ringfa4.kernels.sm100.build import DIMS as ALL
    from sm100.sass import nvdisasm, opcodes, timed

    if nvdisasm() is None:
        pytest.skip("not installed: nvdisasm (pip install nvidia-cuda-nvdisasm)")
    for dk, dv in ALL:
        made, _ = timed(ForwardSpec.of(dk, dv, arch), arch)
        found = opcodes(made.cubin)
        assert found["UTCQMMA"] >= 2 * (dk // 32 + 128 // 32), (dk, dv, found)
        assert found["UTCCP"] and found["LDTM"] and found["STTM"] and found["UTMALDG"]
        assert found["LDL"] == found["STL"] == 0, (dk, dv, found)
