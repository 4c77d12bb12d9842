"""Two small CuTe DSL kernels of our own, compiled without a GPU and executed.

    python -m ptx.dsl_examples sm_90a        prints one JSON object of largest errors

`axpy` is element-wise with a tail, `row_sums` a reduction through shuffles and shared memory. Both
know their answers exactly: inputs are small integers.
"""

# No `from __future__ import annotations`: the DSL reads annotations as objects.
import json
import os
import sys

if __name__ == "__main__":
    os.environ["CUTE_DSL_ARCH"] = sys.argv[1]

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from ptx.capture import Captured
from ptx.machine import ADVERSARIAL

THREADS = 128


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        y[i] = a * x[i] + y[i]


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream):
    blocks = cute.ceil_div(cute.size(x), THREADS)
    axpy_kernel(x, y, a).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def row_sums_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = cute.arch.alloc_smem(cutlass.Float32, THREADS // 32)
    partials = cute.make_tensor(partial, cute.make_layout(THREADS // 32))
    total = cutlass.Float32(0.0)
    for column in range(thread, cute.size(x, mode=[1]), THREADS):
        total += x[row, column]
    for step in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
    if thread % 32 == 0:
        partials[thread // 32] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = cutlass.Float32(0.0)
        for warp in cutlass.range_constexpr(THREADS // 32):
            total += partials[warp]
        out[row] = total


@cute.jit
def row_sums(x: cute.Tensor, out: cute.Tensor, stream):
    rows = cute.size(x, mode=[0])
    row_sums_kernel(x, out).launch(grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream)


def compiled(function, *arguments) -> Captured:
    options = "--enable-tvm-ffi --keep-ptx"
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Captured(cute.compile(function, *arguments, stream, options=options))


def vector():
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))


def main() -> None:
    torch.manual_seed(0)
    report = {}
    kernel = compiled(axpy, vector(), vector(), cutlass.Float32(0.0))
    for count in (1, 128, 1000):
        for schedule in ADVERSARIAL:
            x, y = torch.randint(-8, 8, (2, count)).float().unbind(0)
            x, y = x.contiguous(), y.contiguous()
            want = 3 * x + y
            kernel(x, y, 3.0, schedule=schedule)
            report[f"axpy {count} {schedule.timing}"] = (y - want).abs().max().item()
    matrix = make_fake_compact_tensor(
        cutlass.Float32, (cute.sym_int(), cute.sym_int()), stride_order=(1, 0)
    )
    kernel = compiled(row_sums, matrix, vector())
    for shape in ((1, 1), (3, 700)):
        for schedule in ADVERSARIAL:
            x = torch.randint(-8, 8, shape).float()
            out = torch.full((shape[0],), torch.nan)
            kernel(x, out, schedule=schedule)
            report[f"row_sums {shape} {schedule.timing}"] = (out - x.sum(1)).abs().max().item()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
