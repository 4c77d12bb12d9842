"""How fast transports move K/V, what that costs compute, and what a ring costs over one call.

    python launch/transport_bench.py --ring 128K --virtual-ranks 1,8 --kernels fa4,cuda_aten
    python launch/transport_bench.py --ring 128K --virtual-ranks 8 --where
    python launch/transport_bench.py --ring 1M --virtual-ranks 1,8 --kernels fa4 --own --repeat 1
    torchrun --standalone --nproc-per-node 2 launch/transport_bench.py --transport symm_mem

All but the last run on one GPU: the libraries' calls on the whole sequence, then forward and
backward of the ring on virtual ranks, each over the call of its own library (``--where`` adds what
the GPU did in that time; ``--own`` leaves out other libraries' calls). The last needs a GPU a rank:
the rate of pulls while every rank pulls and is pulled from, and the time of an attention call alone
and beside such a pull.

bf16 wire, causal, d 128. Times are medians; the device is idle before and after each. With
``--burst N`` it is idle before and after N calls in a row, as the layers of a model make them, and
the time is that of one: what the host does before the first kernel then hides behind the last call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ringfa4 import ContextParallel
from ringfa4.comm.interface import Control, Schedule, StepTransfers, Transfer, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.comm.registry import open_transport
from ringfa4.context import Context
from ringfa4.launch.gpu_time import ran, shares, table
from ringfa4.launch.kernel_bench import Inputs, direct_calls
from ringfa4.launch.sizes import parse_size, parse_sizes
from ringfa4.ring import backward, forward

REPEATS = 5

Times = dict[str, tuple[float, int]]
"""As :func:`ringfa4.launch.gpu_time.shares` gives them."""

LIBRARY = {
    "fa4": "FA4 direct, deterministic",
    "fa4-nondeterministic": "FA4 direct",
    "cuda_aten": "cuDNN direct",
}
"""Kernel -> the direct call (kernel_bench.direct_calls) of its library."""

HEAD_START_CYCLES = 4_000_000
"""How long the device waits (2 ms) while the host enqueues what is timed."""


def median_s(run: Callable[[], object], burst: int = 1, repeats: int = REPEATS) -> float:
    """Seconds of one of ``burst`` runs, the device idle before and after; a burst to warm up."""
    taken = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            run()
        torch.cuda.synchronize()
        if repeat:
            taken.append((time.perf_counter() - start) / burst)
    return statistics.median(taken)


class Call(NamedTuple):
    """A forward and a backward pass of a ring: host seconds, and with ``where`` GPU times of a
    burst.
    """

    seconds: tuple[float, float]
    where: tuple[Times, Times] | None


def ring_calls(
    x: Inputs, world: int, kernel: str, burst: int, repeats: int, *, where: bool
) -> list[Call]:
    """``repeats`` bursts on ``world`` virtual ranks, after one to warm up, and with ``where`` one
    more.
    """
    bursts = 1 + repeats + where

    def rank(rank: int, transport: Transport, control: Control) -> list[Call]:
        cp = ContextParallel(Context(transport, control), seq_len=x.seq, kernel=kernel)
        q, k, v, dout = (cp.shard(t, dim=1) for t in (x.q, x.k, x.v, x.dout))
        ring = cp.problem.ring(q, k, v, backward=True)
        calls = []
        for repeat in range(bursts):
            watch = where and repeat == bursts - 1
            there = _Phase(rank, control, watch)
            with there:
                for _ in range(burst):
                    out, lse = forward(ring, q, k, v, scale=x.scale)
            back = _Phase(rank, control, watch)
            with back:
                for _ in range(burst):
                    backward(ring, q, k, v, out, lse, dout, scale=x.scale)
            times = (there.times, back.times) if watch else None
            calls.append(Call((there.seconds / burst, back.seconds / burst), times))
        return calls[1:]

    return run_ranks(world, rank, 300.0, "cuda")[0]


class _Phase:
    """Between two points where every rank has enqueued its work and the device is idle."""

    def __init__(self, rank: int, control: Control, watch: bool) -> None:
        self.control, self.seconds, self.times = control, 0.0, Times()
        self.profile = profile(activities=[ProfilerActivity.CUDA]) if watch and rank == 0 else None

    def __enter__(self) -> None:
        if self.profile is not None:
            self.profile.start()
        _together(self.control)
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        _together(self.control)
        self.seconds = time.perf_counter() - self.start
        if self.profile is not None:
            self.profile.stop()
            self.times = shares(ran(self.profile))


def _together(control: Control) -> None:
    """Every rank has enqueued its work, and the device has done it."""
    control.gather(b"enqueued")
    torch.cuda.synchronize()
    control.gather(b"idle")


def report_rings(
    seq: int,
    heads: int,
    worlds: list[int],
    kernels: list[str],
    burst: int,
    repeats: int,
    *,
    where: bool,
    own: bool,
) -> None:
    """A table of calls, and what the GPU did in the rings' with ``where``; with ``own`` only calls
    of the kernels' libraries.
    """
    x = Inputs(seq, heads, heads)
    flops = x.flop, 2.5 * x.flop
    direct: dict[str, tuple[float, float]] = {}

    def show(name: str, seconds: tuple[float, float], library: str) -> None:
        base = direct.get(library)
        for n, what in enumerate(("forward", "backward")):
            over = "" if base is None else f"{seconds[n] / base[n]:6.3f} of {library}"
            rate = flops[n] / seconds[n] * 1e-12
            print(f"{name:36} {what:8} {seconds[n] * 1e3:9.2f} ms {rate:5.0f} TFLOPS {over}")

    for name, calls in direct_calls(x).items():
        if own and name not in [LIBRARY[kernel] for kernel in kernels]:
            continue
        direct[name] = median_s(calls[0], burst, repeats), median_s(calls[1], burst, repeats)
        show(name, direct[name], "")
    for kernel in kernels:
        for world in worlds:
            passes = ring_calls(x, world, kernel, burst, repeats, where=where)
            timed = passes[:-1] if where else passes
            there, back = (statistics.median(c.seconds[n] for c in timed) for n in (0, 1))
            name = f"ring of {world}, {kernel}"
            show(name, (there, back), LIBRARY[kernel])
            for what, times in zip(("forward", "backward"), passes[-1].where or (), strict=False):
                print(f"{name}, {what}, by the profiler:\n{table(times)}")


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


def report_pulls(name: str, sizes: list[int], seq: int, heads: int) -> None:
    """Rates, and the time of an attention call beside a pull."""
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    transport, control = open_transport(name, dist.group.WORLD, device, 60.0)
    x = Inputs(seq, heads, heads)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

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
    parser.add_argument("--kernels", default="cuda_aten", help=f"of {', '.join(LIBRARY)}")
    parser.add_argument("--burst", type=int, default=1, help="calls in a row")
    parser.add_argument("--repeat", type=int, default=REPEATS, help="bursts, of which the median")
    parser.add_argument("--own", action="store_true", help="only calls of the kernels' libraries")
    parser.add_argument("--where", action="store_true", help="also what the GPU did, by kind")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--transport", metavar="NAME", help="measure pulls; under torchrun")
    parser.add_argument("--bytes", type=parse_sizes, default=[1 << 22, 1 << 26, 1 << 28])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.ring is not None:
        kernels = options.kernels.split(",")
        report_rings(
            options.ring,
            options.heads,
            options.virtual_ranks,
            kernels,
            options.burst,
            options.repeat,
            where=options.where,
            own=options.own,
        )
    if options.transport is not None:
        report_pulls(options.transport, options.bytes, 1 << 15, options.heads)


if __name__ == "__main__":
    main()
