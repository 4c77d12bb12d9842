"""How fast transports move K/V, what that costs compute, and what a ring costs over one call.

    python launch/transport_bench.py --ring 128K --virtual-ranks 1,8
    torchrun --standalone --nproc-per-node 2 launch/transport_bench.py --transport symm_mem

The first runs on one GPU: forward and backward of the ring on virtual ranks beside the same kernel
called directly on the whole sequence. The second needs a GPU a rank: the rate of pulls while every
rank pulls and is pulled from, and the time of an attention call alone and beside such a pull.

bf16 wire, causal. Times are medians; the device is idle before and after each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4 import ContextParallel
from ringfa4.comm.interface import Control, Schedule, StepTransfers, Transfer, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.comm.registry import open_transport
from ringfa4.context import Context
from ringfa4.launch.sizes import parse_size, parse_sizes
from ringfa4.ring import backward, forward

REPEATS = 5

HEAD_START_CYCLES = 4_000_000
"""How long the device waits (2 ms) while the host enqueues what is timed."""


def median_s(run: Callable[[], object]) -> float:
    """Seconds of ``run``, the device idle before and after; one run to warm up."""
    taken = []
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if repeat:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def tensors(seq: int, heads: int, dim: int) -> list[Tensor]:
    """q, k, v, dout (1, seq, heads, dim), bf16, random."""
    gen = torch.Generator("cuda").manual_seed(0)
    shape = (1, seq, heads, dim)
    return [torch.randn(shape, device="cuda", generator=gen).bfloat16() for _ in range(4)]


def direct_s(whole: list[Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward of one cuDNN call on the whole sequence."""
    q, k, v, dout = (x.transpose(1, 2) for x in whole)
    call = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    undo = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    out, lse, *rest = call(q, k, v, None, True, 0.0, True, False)
    _, _, seq_q, seq_k, seed, offset, _ = rest
    args = (dout, q, k, v, out, lse, seed, offset, None, None, None, seq_q, seq_k, 0.0, True)
    return median_s(lambda: call(q, k, v, None, True, 0.0, True, False)), median_s(
        lambda: undo(*args)
    )


def ring_s(whole: list[Tensor], world: int, kernel: str) -> tuple[float, float]:
    """Seconds of forward and backward of a ring of ``world`` virtual ranks, all ranks included."""
    scale = whole[0].shape[-1] ** -0.5

    def rank(rank: int, transport: Transport, control: Control) -> list[list[float]]:
        cp = ContextParallel(Context(transport, control), seq_len=whole[0].shape[1], kernel=kernel)
        q, k, v, dout = (cp.shard(x, dim=1) for x in whole)
        ring = cp.problem.ring(q, k, v, backward=True)
        times: list[list[float]] = [[], []]
        for _ in range(REPEATS + 1):
            _together(control)
            start = time.perf_counter()
            out, lse = forward(ring, q, k, v, scale=scale)
            _together(control)
            middle = time.perf_counter()
            backward(ring, q, k, v, out, lse, dout, scale=scale)
            _together(control)
            times[0].append(middle - start)
            times[1].append(time.perf_counter() - middle)
        return times

    there, back = run_ranks(world, rank, 300.0, "cuda")[0]
    return statistics.median(there[1:]), statistics.median(back[1:])


def _together(control: Control) -> None:
    """Every rank has enqueued its work, and the device has done it."""
    control.gather(b"enqueued")
    torch.cuda.synchronize()
    control.gather(b"idle")


def report_rings(seq: int, heads: int, dim: int, worlds: list[int], kernel: str) -> None:
    whole = tensors(seq, heads, dim)
    pairs = seq * (seq + 1) / 2 * heads
    flops = (4 * dim * pairs, 10 * dim * pairs)
    rows = [("one cuDNN call", direct_s(whole))]
    rows += [(f"ring, {n} virtual ranks, {kernel}", ring_s(whole, n, kernel)) for n in worlds]
    first = rows[0][1]
    for name, times in rows:
        for what, taken, base, work in zip(
            ("forward", "backward"), times, first, flops, strict=True
        ):
            rate = work / taken / 1e12
            cost = f"{taken * 1e3:9.2f} ms {rate:6.0f} TFLOPS {taken / base:6.3f}"
            print(f"{name:36} {what:8} {cost}")


def pull_ms(
    transport: Transport, control: Control, nbytes: int, beside: Callable[[], None]
) -> float:
    """Milliseconds in which each rank pulls ``nbytes`` from its neighbour while ``beside`` runs."""
    before, behind = ((transport.rank + hop) % transport.world for hop in (-1, 1))
    whole = ((0, nbytes),)
    step = StepTransfers(receive=Transfer(before, whole), send=Transfer(behind, whole))
    plan = Schedule(
        transport.rank, transport.world, nbytes, nbytes, nbytes, 0, (StepTransfers(), step)
    )
    taken: list[float] = []
    for _ in range(REPEATS + 1):
        exchange = transport.open(plan)
        exchange.publish()
        _together(control)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        coming = exchange.fetch(1)
        beside()
        coming.wait()
        stop.record()
        exchange.finish()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop))
    return statistics.median(taken[1:])


def report_pulls(name: str, sizes: list[int], seq: int, heads: int, dim: int) -> None:
    """Rates, and the time of an attention call beside a pull."""
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    transport, control = open_transport(name, dist.group.WORLD, device, 60.0)
    q, k, v, _ = (x.transpose(1, 2) for x in tensors(seq, heads, dim))

    def attend() -> None:
        torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, True, False
        )

    alone = median_s(attend) * 1e3
    for nbytes in sizes:
        moved = pull_ms(transport, control, nbytes, lambda: None)
        both = pull_ms(transport, control, nbytes, attend)
        if rank == 0:
            print(
                f"{transport.name:10} {nbytes / 2**20:6.0f} MiB {nbytes / moved / 1e6:6.1f} GB/s "
                f"each way; attention {alone:.2f} ms, beside a pull {both:.2f} ms"
            )
    transport.close()
    control.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ring", type=parse_size, metavar="SEQ", help="tokens of the ring")
    parser.add_argument("--virtual-ranks", type=parse_sizes, default=[1, 8], metavar="N,N")
    parser.add_argument("--kernel", default="cuda_aten")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--transport", metavar="NAME", help="measure pulls; under torchrun")
    parser.add_argument("--bytes", type=parse_sizes, default=[1 << 22, 1 << 26, 1 << 28])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.ring is not None:
        report_rings(
            options.ring, options.heads, options.dim, options.virtual_ranks, options.kernel
        )
    if options.transport is not None:
        report_pulls(options.transport, options.bytes, 1 << 15, options.heads, options.dim)


if __name__ == "__main__":
    main()
