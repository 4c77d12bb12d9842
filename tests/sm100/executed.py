"""The SM100 kernel on CPU tensors: its PTX executed, beside the oracle that rounds as it does.

A case is what one launch computes: queries and keys of one chunk each, bands between them. Tables
are made here by hand, not by the host's code, so that a test of the kernel is one of the kernel.
Needs nvidia-cutlass-dsl and apache-tvm-ffi.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringfa4.kernels.reference_mxfp8 import ReferenceMxfp8Kernel
from ringfa4.kernels.sm100.specs import WRITE, ForwardSpec
from ringfa4.mask import Band
from ringfa4.mx.wire import MXFP8, MxShard
from ringfa4.plan import Task
from ringfa4.shard import RECORD, Chunk, Shard
from ringfa4.state import State
from ringfa4.wire import Geometry, RecordMap

UNBOUNDED = 1 << 30


@lru_cache(maxsize=64)
def compiled(spec: ForwardSpec, arch: str = "sm_100a") -> Any:
    """What cute.compile gives, with ``__ptx__`` and ``__cubin__``."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from ringfa4.kernels.sm100.forward import Forward

    zeros = {"q": cutlass.Int64(0), "i": cutlass.Int32(1), "f": cutlass.Float32(0.0)}
    arguments = [zeros[letter] for letter in spec.SIGNATURE]
    with tempfile.TemporaryDirectory() as folder:  # the DSL dumps what it keeps
        options = f"--enable-tvm-ffi --keep-ptx --keep-cubin --gpu-arch={arch} --dump-dir={folder}"
        return cute.compile(Forward(spec), *arguments, make_fake_stream(), options=options)


@lru_cache(maxsize=64)
def captured(spec: ForwardSpec, arch: str = "sm_100a") -> Any:
    from ptx.capture import Captured

    return Captured(compiled(spec, arch))


@dataclass
class Case:
    """q (b, sq, heads_q, dk), k (b, sk, heads_kv, dk), v (b, sk, heads_kv, dv), fp32 or bf16.

    ``teams`` thread blocks at most, or pairs of them where ``ctas`` is 2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bands: Sequence[Band]
    scale: float
    emulated: int = 12
    teams: int = 3
    arch: str = "sm_100a"
    ctas: int = 1

    @property
    def spec(self) -> ForwardSpec:
        return ForwardSpec(self.q.shape[-1], self.v.shape[-1], self.emulated, self.ctas)

    @property
    def tasks(self) -> list[Task]:
        sq, sk = self.q.shape[1], self.k.shape[1]
        return [Task(None, 0, 0, (0, sq), (0, sk), (band,)) for band in self.bands]

    def state(self) -> State:
        b, sq, heads, _ = self.q.shape
        return State(b, sq, heads, self.v.shape[-1], device=torch.device("cpu"))

    def encoded(self, x: Tensor, v: Tensor) -> MxShard:
        shard = Shard((Chunk(0, x.shape[1]),))
        geometry = Geometry(x.shape[0], x.shape[2], x.shape[3], v.shape[3], torch.float32)
        size = shard.records * MXFP8.record_bytes(geometry, "forward")
        out = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        out = out[-out.data_ptr() % 256 :][:size]
        MXFP8.encode(x, v, shard, out, "forward")
        return MXFP8.view(geometry, RecordMap.whole(shard), out, "forward")

    def tables(self) -> tuple[Tensor, Tensor]:
        """An item for each 256 queries and thread block of a team, all bands its segments."""
        b, sq = self.q.shape[:2]
        segments = [
            (
                0, *(band.q0, band.q1, band.k0, band.k1),
                -UNBOUNDED if band.lo is None else band.lo,
                UNBOUNDED if band.hi is None else band.hi, 0,
            )
            for band in self.bands
        ]  # fmt: skip
        items = []
        for batch in range(b):
            for first in range(0, sq, 2 * RECORD * self.ctas):
                rows = min(2 * RECORD * self.ctas, sq - first)
                tiles = -(-rows // (RECORD * self.ctas))
                items.append((batch, first // RECORD, tiles, first, first, rows, 0, len(segments)))
        return torch.tensor(items, dtype=torch.int32), torch.tensor(segments, dtype=torch.int32)

    def expected(self, state: State) -> None:
        """The oracle into ``state``."""
        shard = Shard((Chunk(0, self.q.shape[1]),))
        kernel = ReferenceMxfp8Kernel(integer=True)
        queries = kernel.prepare(self.q, shard)
        kernel.forward(queries, self.encoded(self.k, self.v), self.tasks, self.scale, state)

    def execute(
        self,
        state: State,
        modes: Tensor | int = WRITE,
        tables: tuple[Tensor, Tensor] | None = None,
        drop: int = 0,
        **options: Any,
    ) -> Any:
        """The kernel into ``state``; the executor's result.

        ``modes`` (b, sq) uint8, or one for all rows; ``drop``: so many records, the keys' first,
        are not there; ``options`` are the executor's.
        """
        from ptx.machine import Memory

        keys, queries = self.encoded(self.k, self.v), self.encoded(self.q, self.q)
        b, sq, heads_q, _ = self.q.shape
        items, segments = tables or self.tables()
        if isinstance(modes, int):
            modes = torch.full((b, sq), modes, dtype=torch.uint8)
        kept = keys.buffer[drop * keys.layout.nbytes :].clone()
        acc, top, total = state.acc, state.max, state.sum
        memory = Memory()
        for name, x in (
            ("queries", queries.buffer), ("keys", kept), ("acc", acc), ("max", top),
            ("sum", total), ("items", items), ("segments", segments), ("modes", modes),
        ):  # fmt: skip
            memory.add(x, name, writable=name in ("acc", "max", "sum"))
        k, v, q = keys.layout.operand("k"), keys.layout.operand("v"), queries.layout.operand("k")
        kernel = captured(self.spec, self.arch)
        kernel(
            queries.buffer.data_ptr(), queries.layout.nbytes, q.payload, q.scales,
            queries.map.records,
            kept.data_ptr(), keys.layout.nbytes, k.payload, v.payload, k.scales, v.scales,
            keys.map.records - drop,
            b, heads_q, self.k.shape[2],
            acc.data_ptr(), top.data_ptr(), total.data_ptr(),
            acc.stride(0) * 4, acc.stride(1) * 4, top.stride(0) * 4, top.stride(1) * 4,
            items.data_ptr(), segments.data_ptr(), modes.data_ptr(), modes.stride(0),
            len(items), self.scale, self.ctas * min(self.teams, len(items) * heads_q), 0,
            memory=memory, **options,
        )  # fmt: skip
        return kernel.results[-1]


def gaussian(
    sq: int, sk: int, *, b: int = 1, heads_q: int = 1, heads_kv: int = 1, dk: int = 128,
    dv: int = 128, bands: Sequence[Band] | None = None, seed: int = 0, **options: Any,
) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(b, sq, heads_q, dk, generator=g)
    k = torch.randn(b, sk, heads_kv, dk, generator=g)
    v = torch.randn(b, sk, heads_kv, dv, generator=g)
    bands = [Band(0, sq, 0, sk)] if bands is None else bands
    return Case(q, k, v, bands, options.pop("scale", 1 / math.sqrt(dk)), **options)
