"""Rates of the block kernels and of the fused byte movers on one NVIDIA GPU, in one run.

    python launch/kernel_bench.py                       # both tables
    python launch/kernel_bench.py --attention 32K,128K --heads 8 --hops 8
    python launch/kernel_bench.py --bytes 64,256 --json rates.json

Attention (causal, bf16, d 128): the library calls by themselves, and the same work through our
kernels on one rank (state and gradients included, records encoded beforehand), in TFLOP/s of the
pairs that the mask allows: forward 2 (dk + dv) FLOP a pair and head, backward 2.5 times that.
``--hops P`` adds what one rank of a zigzag ring of P computes, its P steps and their merges without
any transfer, against 1/P of one call on the whole sequence.

Bytes: a device-to-device copy, MXFP8 encode and decode, and the merge of partials, in GB/s of the
bytes that must be read and written, for K or V of the given sizes. Every repetition finds the L2
cache full of something else.

Each number is the median of repetitions timed by events on the device. ``--host`` times the host
instead: microseconds in which one small call is issued, without waiting for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ringfa4.errors import MissingLibraryError
from ringfa4.fused import fused, why_not
from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel
from ringfa4.kernels.registry import load_kernel
from ringfa4.launch.sizes import parse_size
from ringfa4.mask import causal
from ringfa4.mx.wire import MXFP8, MxShard
from ringfa4.plan import Plan, Step
from ringfa4.shard import Chunk, Shard, contiguous, zigzag
from ringfa4.state import State
from ringfa4.wire import PLAIN, Direction, Geometry, PlainWire, RecordMap

HEAD_DIM = 128
KERNELS = ("fa4", "fa4-nondeterministic", "cuda_aten")
DEVICE = torch.device("cuda")


def median_seconds(call: Callable[[], Any], repetitions: int, flush: Tensor | None = None) -> float:
    """Device time of one call, after two to warm up; ``flush`` is overwritten before each."""
    for _ in range(2):
        call()
    spans = []
    for _ in range(repetitions):
        if flush is not None:
            flush.zero_()
            torch.cuda._sleep(
                1_000_000
            )  # half a millisecond: the host is ahead when the call starts
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times: list[float] = sorted(begin.elapsed_time(end) for begin, end in spans)
    return times[len(times) // 2] * 1e-3


# ---- attention ----------------------------------------------------------------------------------


class Inputs:
    """q, k, v, dout (1, s, heads, 128) bf16."""

    def __init__(self, seq: int, heads: int, heads_kv: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def gaussian(count: int) -> Tensor:
            shape = 1, seq, count, HEAD_DIM
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        self.seq, self.heads, self.heads_kv = seq, heads, heads_kv
        self.q, self.k, self.v, self.dout = map(gaussian, (heads, heads_kv, heads_kv, heads))
        self.scale = HEAD_DIM**-0.5

    @property
    def flop(self) -> int:
        """Of the forward pass."""
        return 4 * HEAD_DIM * self.heads * causal(self.seq).area


def direct_calls(x: Inputs) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (forward, backward) of library calls with nothing of ours around them."""
    aten = torch.ops.aten
    q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}

    def cudnn() -> Any:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=x.scale
        )

    out, lse, cq, ck, mq, mk, seed, offset, _ = cudnn()
    calls["cuDNN direct"] = (
        cudnn,
        lambda: aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, True, scale=x.scale
        ),
    )

    def flash() -> Any:
        return aten._flash_attention_forward(
            x.q, x.k, x.v, None, None, x.seq, x.seq, 0.0, True, False, scale=x.scale
        )

    fout, flse, state, unused, _ = flash()
    calls["PyTorch flash direct"] = (
        flash,
        lambda: aten._flash_attention_backward(
            x.dout, x.q, x.k, x.v, fout, flse, None, None, x.seq, x.seq, 0.0, True, state, unused,
            scale=x.scale,
        ),
    )  # fmt: skip
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        print(f"flash-attn-4 direct is left out: {error}")
        return calls

    def fa4() -> Any:
        return interface._flash_attn_fwd(
            x.q, x.k, x.v, softmax_scale=x.scale, causal=True, return_lse=True
        )

    out4, lse4 = fa4()[:2]

    def fa4_backward(deterministic: bool) -> Any:
        return interface._flash_attn_bwd(
            x.q, x.k, x.v, out4, x.dout, lse4, softmax_scale=x.scale, causal=True,
            deterministic=deterministic,
        )  # fmt: skip

    calls["FA4 direct, deterministic"] = fa4, lambda: fa4_backward(True)
    calls["FA4 direct"] = fa4, lambda: fa4_backward(False)
    return calls


class Rank:
    """One rank of a ring without its transfers: ``steps`` of a plan over records that are here."""

    def __init__(self, x: Inputs, kernel: BlockKernel, world: int) -> None:
        sharding = contiguous(x.seq, 1) if world == 1 else zigzag(x.seq, world)
        self.plan = Plan(causal(x.seq), sharding, sharding)
        self.x, self.kernel, self.wire = x, kernel, PLAIN[torch.bfloat16]
        self.shard = sharding.shards[0]
        self.geometry = Geometry(1, x.heads_kv, HEAD_DIM, HEAD_DIM, torch.bfloat16)
        own = len(self.shard)
        self.q, self.k, self.v, self.dout = (t[:, :own] for t in (x.q, x.k, x.v, x.dout))
        record = self.wire.record_bytes(self.geometry, "forward")
        self.records = torch.empty(self.shard.records * record, dtype=torch.uint8, device=DEVICE)
        self.wire.encode(self.k, self.v, self.shard, self.records, "forward")
        size = self.shard.records * PLAIN[torch.float32].record_bytes(self.geometry, "backward")
        self.slot = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def _steps(self) -> list[tuple[Step, RecordMap]]:
        shards = self.plan.k_sharding.shards
        return [(s, RecordMap(shards[s.owner], s.ranges)) for s in self.plan.steps(0) if s.tasks]

    @cached_property
    def _gradients(self) -> PlainWire:
        return PLAIN[self.kernel.gradient_dtype(torch.bfloat16)]

    def forward(self) -> tuple[Tensor, Tensor]:
        queries = self.kernel.prepare(self.q, self.shard)
        state = State(1, len(self.shard), self.x.heads, HEAD_DIM, device=DEVICE)
        for step, where in self._steps():
            view = self.wire.view(self.geometry, where, self.records, "forward")
            self.kernel.forward(queries, view, step.tasks, self.x.scale, state)
        return state.finalise(torch.bfloat16)

    def backward(self, out: Tensor, lse: Tensor) -> Tensor:
        queries = self.kernel.prepare_backward(self.q, self.shard, out, self.dout, lse, None)
        grads = Grads(1, len(self.shard), self.x.heads, HEAD_DIM, device=DEVICE)
        for step, where in self._steps():
            view = self.wire.view(self.geometry, where, self.records, "backward")
            grads.begin(self._gradients.view(self.geometry, where, self.slot, "backward"))
            self.kernel.backward(queries, view, step.tasks, self.x.scale, grads)
            grads.end()
        return grads.finish(torch.bfloat16)


def attention_rows(
    seq: int, heads: int, heads_kv: int, hops: int, kernels: Sequence[str], repetitions: int
) -> list[dict[str, Any]]:
    """Rates at one length: libraries first, then ours, one rank and a rank of ``hops``."""
    x = Inputs(seq, heads, heads_kv)
    rows = []

    def measure(
        name: str, share: int, forward: Callable[[], Any], backward: Callable[[], Any]
    ) -> None:
        seconds = [median_seconds(call, repetitions) for call in (forward, backward)]
        flop = x.flop / share
        rows.append(
            {
                "what": name,
                "seq": seq,
                "heads": f"{heads}:{heads_kv}",
                "forward_ms": seconds[0] * 1e3,
                "backward_ms": seconds[1] * 1e3,
                "forward_tflops": flop / seconds[0] * 1e-12,
                "backward_tflops": 2.5 * flop / seconds[1] * 1e-12,
            }
        )

    for name, (forward, backward) in direct_calls(x).items():
        measure(name, 1, forward, backward)
    for name in kernels:
        try:
            kernel = load_kernel(name)
        except MissingLibraryError as error:
            print(f"{name} is left out: {error}")
            continue
        for world in sorted({1, hops}):
            rank = Rank(x, kernel, world)
            out, lse = rank.forward()
            label = f"ours, {name}" + (f", a rank of {world}" if world > 1 else "")
            measure(label, world, rank.forward, partial(rank.backward, out, lse))
    return rows


def host_rows() -> list[dict[str, Any]]:
    """Microseconds of the host for a call on 256 tokens, one rank: what bounds short steps."""
    rows = []

    def measure(name: str, call: Callable[[], Any]) -> None:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        rows.append({"what": name, "host_us": (time.perf_counter() - start) / 50 * 1e6})
        torch.cuda.synchronize()

    x = Inputs(256, 8, 8)
    for name, (forward, backward) in direct_calls(x).items():
        measure(f"{name}, forward", forward)
        measure(f"{name}, backward", backward)
    for name in KERNELS:
        try:
            rank = Rank(x, load_kernel(name), 1)
        except MissingLibraryError:
            continue
        out, lse = rank.forward()
        measure(f"ours, {name}, forward", rank.forward)
        measure(f"ours, {name}, backward", partial(rank.backward, out, lse))
    state = State(1, 256, 8, HEAD_DIM, device=DEVICE)
    lse = torch.zeros(1, 8, 256, device=DEVICE)
    measure("merge", lambda: state.merge(None, slice(0, 256), x.q, lse))
    return rows


# ---- bytes --------------------------------------------------------------------------------------


def byte_rows(mib: int, heads: int, repetitions: int) -> list[dict[str, Any]]:
    """Rates for K or V of ``mib`` MiB in bf16."""
    tokens = (mib << 20) // (2 * heads * HEAD_DIM)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    x = torch.randn(1, tokens, heads, HEAD_DIM, device=DEVICE).to(torch.bfloat16)
    copied = torch.empty_like(x)
    rows: list[dict[str, Any]] = []

    def measure(name: str, moved: int, call: Callable[[], Any]) -> None:
        seconds = median_seconds(call, repetitions, flush)
        rate = moved / seconds * 1e-9
        copy = rows[0]["gbps"] if rows else rate
        rows.append(
            {"what": name, "mib": mib, "us": seconds * 1e6, "gbps": rate, "of_copy": rate / copy}
        )

    measure("copy", 4 * x.numel(), lambda: copied.copy_(x))
    own = Shard((Chunk(0, tokens),))
    geometry = Geometry(1, heads, HEAD_DIM, HEAD_DIM, x.dtype)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        size = own.records * MXFP8.record_bytes(geometry, direction)
        outbox = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        measure(
            f"encode K and V, {direction}",
            4 * x.numel() + size,
            partial(MXFP8.encode, x, x, own, outbox, direction),
        )
    forward_size = own.records * MXFP8.record_bytes(geometry, "forward")
    outbox = torch.empty(forward_size, dtype=torch.uint8, device=DEVICE)
    MXFP8.encode(x, x, own, outbox, "forward")

    def decode() -> None:
        view = MXFP8.view(geometry, RecordMap.whole(own), outbox, "forward")
        assert isinstance(view, MxShard)
        view.keys_values(0, 0, tokens)

    measure("decode K and V", forward_size + 4 * x.numel(), decode)

    host = fused(DEVICE)
    if host is None:
        print(f"fused kernels are left out: {why_not(DEVICE)}")
        return rows
    acc = torch.zeros(1, tokens, heads, HEAD_DIM, device=DEVICE)
    top, total = (torch.zeros(1, heads, tokens, device=DEVICE) for _ in range(2))
    lse = torch.randn(1, heads, tokens, device=DEVICE)
    stats = 4 * lse.numel()
    partials = [(x, lse), *((x.clone(), lse.clone()) for _ in range(3))]
    for count in (1, 2, 4):
        given = count * (2 * x.numel() + stats)
        measure(
            f"merge {count}",
            2 * (4 * acc.numel() + 2 * stats) + given,
            partial(host.merge, acc, top, total, partials[:count], first=False),
        )
    measure(
        "merge 1, first",
        4 * acc.numel() + 2 * stats + 2 * x.numel() + stats,
        lambda: host.merge(acc, top, total, partials[:1], first=True),
    )
    final = torch.empty_like(x), torch.empty_like(lse)
    measure(
        "merge 4, last",
        4 * acc.numel() + 2 * stats + 4 * (2 * x.numel() + stats) + 2 * x.numel() + stats,
        lambda: host.merge(acc, top, total, partials, first=False, final=final),
    )
    parts = [part for part, _ in partials]
    measure("gradient sum 1, first", 6 * x.numel(), partial(host.add, acc, None, parts[:1]))
    for count in (1, 2, 4):
        measure(
            f"gradient sum {count}",
            (8 + 2 * count) * x.numel(),
            partial(host.add, acc, acc, parts[:count]),
        )
    rounded = torch.empty_like(x)
    measure(
        "gradient sum 4, last",
        (4 + 8 + 2) * x.numel(),
        partial(host.add, rounded, acc, parts),
    )
    state = State(1, tokens, heads, HEAD_DIM, device=DEVICE)
    state.acc, state.max, state.sum = acc, top, total
    state.written.claim(0, 0, tokens)
    ones = torch.ones_like(lse)
    measure(
        "merge 1 by operators",
        2 * (4 * acc.numel() + 2 * stats) + 2 * x.numel() + stats,
        lambda: state.merge_state(None, slice(0, tokens), x, lse, ones),
    )
    return rows


# ---- the command --------------------------------------------------------------------------------


def print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    names = list(rows[0])
    cells = [names, *([_text(row[n]) for n in names] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(names))]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print()


def _text(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--attention", default="32K,128K", help="sequence lengths, or 'none'")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--hops", type=int, default=8, help="also a rank of a ring of this many")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="ours, by name")
    parser.add_argument("--bytes", default="16,64,256,1024", help="MiB of K, or 'none'")
    parser.add_argument("--host", action="store_true", help="also the host's time for small calls")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", help="write all numbers to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernel_bench needs an NVIDIA GPU: torch.cuda.is_available() is false")
        return 2
    about = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }
    print(json.dumps(about))
    results: dict[str, Any] = {"about": about, "bytes": [], "attention": []}
    sizes = [] if options.bytes == "none" else [int(n) for n in options.bytes.split(",")]
    for mib in sizes:
        results["bytes"] += byte_rows(mib, options.heads, 2 * options.repetitions)
    print_rows(results["bytes"])
    lengths = [] if options.attention == "none" else options.attention.split(",")
    for length in lengths:
        rows = attention_rows(
            parse_size(length),
            options.heads,
            options.heads_kv,
            options.hops,
            options.kernels.split(","),
            options.repetitions,
        )
        print_rows(rows)
        results["attention"] += rows
    if options.host:
        results["host"] = host_rows()
        print_rows(results["host"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
