"""The kernels of this package as functions of tensors: asynchronous, on the current stream.

:func:`unavailable` says why a device cannot have them; :func:`takes` says whether these tensors can
be given to them. Callers ask first (``ringfa4.fused``) and otherwise compute the same with
PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ringfa4.kernels.cute import cache
from ringfa4.kernels.cute.driver import Kernel, architecture
from ringfa4.kernels.cute.specs import PARTIALS, RUN, DecodeSpec, EncodeSpec, MergeSpec, Spec

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
RECORD = 128


def unavailable(device: torch.device) -> str | None:
    """None, or why the fused kernels cannot run on ``device``."""
    if device.type != "cuda":
        return f"fused kernels run on NVIDIA GPUs, not on {device.type!r}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"fused kernels need SM80 or newer, this is {capability}"
    if find_spec("cutlass") is None:
        return "the CuTe DSL is not installed (pip install 'ringfa4[cuda]')"
    return None


@lru_cache(maxsize=256)
def kernel(spec: Spec, arch: str) -> Kernel:
    """The loaded kernel: from this process, from disk, or compiled now."""
    binary = cache.load(spec, arch, _build)
    return Kernel(binary.cubin, binary.entry, spec.SIGNATURE, spec.THREADS)


def _build(spec: Spec, arch: str) -> cache.Binary:
    from ringfa4.kernels.cute.compile import compile_kernel  # imports the DSL: 3 seconds

    cubin, entry, _ = compile_kernel(spec, arch)
    return cache.Binary(cubin, entry)


def _launch(spec: Spec, device: torch.device, grid: tuple[int, int, int], *args: int) -> None:
    if 0 in grid:
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        kernel(spec, architecture(device)).launch(grid, stream, args)


def _native(device: torch.device) -> bool:
    """Whether the hardware converts E4M3."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def takes(x: Tensor) -> bool:
    """Rows of 16-byte pieces, in a dtype that the kernels know."""
    size = x.element_size()
    return (
        x.dtype in DTYPES
        and x.stride(-1) == 1
        and x.shape[-1] % RUN == 0
        and x.data_ptr() % 16 == 0
        and not any(s * size % 16 for s in x.stride()[:-1])
    )


# ---- MXFP8 --------------------------------------------------------------------------------------


def encode(
    x: Tensor,
    records: Tensor,
    *,
    block: tuple[int, int],
    contiguous: Literal["d", "seq"],
    payload: int,
    scales_d: int | None,
    scales_seq: int | None,
    floor: bool,
) -> None:
    """x (b, n, h, d) into ``records`` (uint8, (ceil(n / 128), bytes)): a payload and its scales.

    ``payload``, ``scales_d`` and ``scales_seq`` are offsets in a record; scales that are None are
    not written.
    """
    x = x if takes(x) else x.contiguous()
    batch, tokens, heads, d = x.shape
    size = x.element_size()
    spec = EncodeSpec(
        DTYPES[x.dtype], d, *block, contiguous, scales_d is not None, scales_seq is not None,
        floor, _native(x.device),
    )  # fmt: skip
    _launch(
        spec, x.device, (len(records), heads, batch),
        x.data_ptr(), *(x.stride(n) * size for n in (0, 1, 2)),
        records.data_ptr(), records.stride(0), payload, scales_d or 0, scales_seq or 0,
        tokens, heads,
    )  # fmt: skip


def decode(
    records: Tensor,
    out: Tensor,
    *,
    contiguous: Literal["d", "seq"],
    along: Literal["d", "seq"],
    payload: int,
    scales: int,
) -> None:
    """``records`` (uint8, (n, bytes)) into out (b, h, 128 n, d), contiguous."""
    batch, heads, tokens, d = out.shape
    assert tokens == len(records) * RECORD and out.is_contiguous(), (out.shape, len(records))
    spec = DecodeSpec(DTYPES[out.dtype], d, contiguous, along, _native(out.device))
    _launch(
        spec, out.device, (len(records), heads, batch),
        records.data_ptr(), records.stride(0), payload, scales,
        out.data_ptr(), tokens * d * out.element_size(), heads,
    )  # fmt: skip


# ---- the running state --------------------------------------------------------------------------


def merges(acc: Tensor, partials: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether :func:`merge` takes these: alike, at most PARTIALS, rows in 16-byte pieces."""
    out, lse = partials[0]
    return (
        acc.dtype == torch.float32
        and len(partials) <= PARTIALS
        and takes(acc)
        and all(takes(o) and o.stride() == out.stride() for o, _ in partials)
        and all(
            e.dtype == torch.float32 and e.stride() == lse.stride() and e.stride(-1) == 1
            for _, e in partials
        )
    )


def merge(
    acc: Tensor,
    max: Tensor,
    sum: Tensor,
    partials: Sequence[tuple[Tensor, Tensor]],
    *,
    first: bool,
) -> None:
    """Partials (out (b, n, h, dv), lse (b, h, n)) into acc (b, n, h, dv), max and sum (b, h, n).

    ``first`` assigns: the state's contents are not read.
    """
    batch, tokens, heads, dv = acc.shape
    out, lse = partials[0]
    assert merges(acc, partials) and max.stride() == sum.stride(), "ask merges() first"
    assert acc.stride(2) == dv and max.stride(-1) == 1, (acc.stride(), max.stride())
    spec = MergeSpec.of(DTYPES[out.dtype], dv, heads, len(partials), first)
    size = out.element_size()
    given = [x.data_ptr() for pair in partials for x in pair]
    _launch(
        spec, acc.device, (-(-tokens // spec.tokens), -(-heads // spec.heads), batch),
        acc.data_ptr(), max.data_ptr(), sum.data_ptr(),
        acc.stride(0) * 4, acc.stride(1) * 4, max.stride(0) * 4, max.stride(1) * 4,
        tokens, heads,
        *(out.stride(n) * size for n in (0, 1, 2)), lse.stride(0) * 4, lse.stride(1) * 4,
        *given, *[0] * (2 * (PARTIALS - len(partials))),
    )  # fmt: skip
