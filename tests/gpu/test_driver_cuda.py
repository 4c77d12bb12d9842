"""What the driver is given for the SM100 kernel, on any GPU that has the tensor memory accelerator.

The kernel itself needs SM100; its tensor maps, packed parameters and large shared memory do not. A
small CUDA kernel (NVRTC, which PyTorch brings) copies through a map as the SM100 kernel does, in a
process of its own: a fault on the device ends the process's use of it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ptx.encode import swizzled
from sm100.test_build import described, words

from ringfa4.kernels.cute import driver
from ringfa4.kernels.sm100.launch import TensorMap

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]

SOURCE = r"""
struct alignas(64) Map { unsigned w[32]; };
extern "C" __global__ void load(const __grid_constant__ Map map, unsigned char *out, int row,
                                int record, int bytes, float scale, float *scaled) {
  extern __shared__ unsigned char shared[];
  unsigned base = __cvta_generic_to_shared(shared), at = (base + 2047) & ~1023, barrier = at - 16;
  unsigned char *tile = shared + (at - base);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %2, %3, %4}], [%5];"
                 ::"r"(at), "l"(&map), "r"(0), "r"(row), "r"(record), "r"(barrier) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0;"
                 "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier) : "memory");
  for (int n = threadIdx.x; n < bytes; n += blockDim.x) out[n] = tile[n];
  if (threadIdx.x == 0) {
    tile[100000] = 1;  // beyond the 48 KiB that need no asking
    *scaled = 2 * scale;
  }
}
extern "C" __global__ void ranks(const __grid_constant__ Map map, int *out) {
  unsigned rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank; mov.u32 %1, %%cluster_nctarank;"
               : "=r"(rank), "=r"(size));
  if (threadIdx.x == 0) out[blockIdx.x] = 10 * size + rank;
}
"""


def compiled() -> bytes:
    """The cubin of SOURCE for this GPU."""
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = SOURCE.encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"a.cu", 0, None, None)
    option = f"--gpu-architecture={driver.architecture(torch.device('cuda'))}".encode()
    code = nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(option))
    assert not nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not code, log.value.decode()
    assert not nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    assert not nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw


@pytest.mark.parametrize("span", [64, 128])
def test_a_tile_comes_through_its_tensor_map(span: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor maps need SM90 or newer")
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, str(span)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def check(span: int) -> None:
    """Two rows of heads, three records with scales behind the payload; the last tile of all.

    Then clusters.
    """
    heads, records, payload = 2, 3, 128 * span
    stride = heads * payload + 512
    generator = torch.Generator().manual_seed(span)
    data = torch.randint(256, (records, stride), dtype=torch.uint8, generator=generator)
    there = data.cuda()
    m = TensorMap(
        there.data_ptr(), (span, 128, heads, records), (span, payload, stride), (span, 128, 1, 1),
        span,
    )  # fmt: skip
    encoded = driver.tensor_map(*m)
    assert words(encoded) == described(m)
    kernel = driver.Kernel(compiled(), "load", "128sqiiifq", 128, shared=128 * 1024)
    out = torch.zeros(payload, dtype=torch.uint8, device="cuda")
    scaled = torch.zeros(1, device="cuda")
    arguments = [encoded, out.data_ptr(), 1, 2, payload, 1.5, scaled.data_ptr()]
    stream = torch.cuda.current_stream()
    kernel.launch((1, 1, 1), torch.cuda.current_device(), stream.cuda_stream, arguments)
    stream.synchronize()
    tile = data[2, payload : 2 * payload].numpy()
    assert out.cpu().numpy().tolist() == swizzled(tile, span.bit_length() - 5).tolist()
    assert scaled.item() == 3.0
    found = torch.zeros(6, dtype=torch.int32, device="cuda")
    kernel = driver.Kernel(compiled(), "ranks", "128sq", 128, cluster=2)
    kernel.launch(
        (6, 1, 1), torch.cuda.current_device(), stream.cuda_stream, [encoded, found.data_ptr()]
    )
    stream.synchronize()
    assert found.tolist() == [20, 21] * 3, "three clusters of two"


if __name__ == "__main__":
    check(int(sys.argv[1]))
