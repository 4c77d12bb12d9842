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
from ringfa4.kernels.cute.specs import (
    PARTIALS,
    RUN,
    AccumulateSpec,
    DecodeSpec,
    EncodeSpec,
    FillSpec,
    GuardSpec,
    MergeSpec,
    Spec,
    parameters,
)

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
    shared, cluster = getattr(spec, "SHARED", 0), getattr(spec, "ctas", 1)
    return Kernel(binary.cubin, binary.entry, parameters(spec), spec.THREADS, shared, cluster)


def _build(spec: Spec, arch: str) -> cache.Binary:
    from ringfa4.kernels.cute.compile import compile_kernel  # imports the DSL: 3 seconds

    made = compile_kernel(spec, arch)
    return cache.Binary(made.cubin, made.entry)


@lru_cache(maxsize=64)
def _about(device: torch.device) -> tuple[int, str, bool]:
    """(index, architecture, whether the hardware converts E4M3)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, architecture(device), torch.cuda.get_device_capability(device) >= (8, 9)


def _native(device: torch.device) -> bool:
    return _about(device)[2]


def _launch(spec: Spec, device: torch.device, grid: tuple[int, int, int], *args: int) -> None:
    if 0 in grid:
        return
    index, arch, _ = _about(device)
    own = kernel(spec, arch)
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.current_device() == index:
        own.launch(grid, index, stream, args)
    else:
        with torch.cuda.device(index):
            own.launch(grid, index, stream, args)


def takes(x: Tensor) -> bool:
    """Rows of 16-byte pieces, in a dtype that the kernels know."""
    *outer, last = x.stride()
    bits, size = x.data_ptr() | x.shape[-1] * x.itemsize, x.itemsize
    for stride in outer:
        bits |= stride * size  # of a power of two all are multiples, or a low bit is set
    return last == 1 and not bits % 16 and x.dtype in DTYPES


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
        spec, x.device, (len(records) * heads, batch, 1),
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
        spec, out.device, (len(records) * heads, batch, 1),
        records.data_ptr(), records.stride(0), payload, scales,
        out.data_ptr(), tokens * d * out.element_size(), heads,
    )  # fmt: skip


# ---- the running state --------------------------------------------------------------------------


def merges(acc: Tensor, out: Tensor, lse: Tensor) -> bool:
    """Whether :func:`merge` takes such a state and such a partial."""
    return acc.dtype == lse.dtype == torch.float32 and lse.stride(-1) == 1 and takes(out)


def finalises(acc: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`merge` finalises such a state to ``dtype``."""
    known = acc.dtype == torch.float32 and dtype in DTYPES
    return known and acc.shape[-1] * dtype.itemsize % 16 == 0


def merge(
    acc: Tensor,
    max: Tensor,
    sum: Tensor,
    partials: Sequence[tuple[Tensor, Tensor]],
    *,
    first: bool,
    final: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Partials (out (b, n, h, dv), lse (b, h, n)) into acc (b, n, h, dv), max and sum (b, h, n).

    At most PARTIALS, all of one dtype; acc, max and sum are slices of contiguous tensors. ``first``
    assigns: the state's contents are not read. With ``final`` (out, lse) like slices of contiguous
    tensors get the finalised result, and the state is not written.
    """
    batch, tokens, heads, dv = acc.shape
    dtype = (partials[0] if final is None else final)[0].dtype
    spec = _merge_spec(DTYPES[dtype], dv, heads, len(partials), first, final is not None)
    given = [0, 0, 0, 0]
    if final is not None:
        out, lse = final
        assert lse.stride()[:2] == max.stride()[:2], (lse.stride(), max.stride())
        given = [out.data_ptr(), *(n * out.element_size() for n in out.stride()[:2])]
        given += [lse.data_ptr()]
    for out, lse in partials:
        assert out.dtype == dtype, (out.dtype, dtype)
        given += [out.data_ptr(), *(n * out.element_size() for n in out.stride()[:3])]
        given += [lse.data_ptr(), *(n * 4 for n in lse.stride()[:2])]
    given += [0] * (7 * (PARTIALS - len(partials)))
    acc_b, acc_s, _, _ = acc.stride()
    row_b, row_h, _ = max.stride()
    _launch(
        spec, acc.device, (-(-tokens // spec.tokens), -(-heads // spec.heads), batch),
        acc.data_ptr(), max.data_ptr(), sum.data_ptr(),
        acc_b * 4, acc_s * 4, row_b * 4, row_h * 4, tokens, heads, *given,
    )  # fmt: skip


_merge_spec = lru_cache(maxsize=256)(MergeSpec.of)


def adds(into: Tensor, sum: Tensor | None, parts: Sequence[Tensor]) -> bool:
    """Whether :func:`add` takes these."""
    if not takes(into) or not all(map(takes, parts)):
        return False
    if _is_copy(into, sum, parts):
        return True
    same = len({part.dtype for part in parts}) <= 1
    wide = sum is None or (sum.dtype == torch.float32 and takes(sum))
    return same and rounds(into.dtype) and wide and 1 <= len(parts) <= PARTIALS


def _is_copy(into: Tensor, sum: Tensor | None, parts: Sequence[Tensor]) -> bool:
    """Whether nothing is added and nothing rounded."""
    return sum is None and len(parts) == 1 and into.dtype == parts[0].dtype


def joins(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`add` takes ``x`` as a part of sums in ``dtype`` that lie in one piece: their
    rows are no shorter in bytes than those of x.
    """
    return dtype == torch.float32 and takes(x)


def rounds(dtype: torch.dtype) -> bool:
    """Whether :func:`add` rounds a sum to ``dtype``. fp16 would saturate."""
    return dtype in (torch.float32, torch.bfloat16)


def add(into: Tensor, sum: Tensor | None, parts: Sequence[Tensor]) -> None:
    """sum + parts[0] + .. into ``into``, all (b, n, h, d), added in this order in fp32.

    ``into`` is ``sum`` itself (fp32), or gets the result in fp32 or rounded to bf16. Without a sum
    parts[0] takes its place; a single part may then go into its own dtype, as it is. At most
    PARTIALS parts, all of one dtype.
    """
    batch, tokens, heads, d = into.shape
    size, width = parts[0].element_size(), into.element_size()
    if _is_copy(into, sum, parts):  # words of 32 bits, as they are
        spec = AccumulateSpec("fp32", d * size // 4, True)
    else:
        dtype, rounded = DTYPES[parts[0].dtype], DTYPES[into.dtype]
        spec = AccumulateSpec(dtype, d, sum is None, rounded, len(parts))
    given = [into.data_ptr(), *(n * width for n in into.stride()[:3])]
    given += [0] * 4 if sum is None else [sum.data_ptr(), *(n * 4 for n in sum.stride()[:3])]
    for x in parts:
        assert x.shape == into.shape, (x.shape, into.shape)
        given += [x.data_ptr(), *(n * size for n in x.stride()[:3])]
    given += [0] * (4 * (PARTIALS - len(parts)))
    blocks = -(-tokens * heads * (spec.d // RUN) // (spec.THREADS * spec.units))
    _launch(spec, into.device, (blocks, batch, 1), *given, tokens, heads)


# ---- rows that are not finite -------------------------------------------------------------------


def guard(x: Tensor, dead: Tensor | None, *, zero_found: bool) -> tuple[Tensor, Tensor]:
    """A contiguous copy of x (b, n, h, d) and the flags (b, h, n) of its rows that are not finite.

    Rows flagged in ``dead`` are zeroed and never found; with ``zero_found`` those found are zeroed
    too.
    """
    batch, tokens, heads, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    found = torch.empty(batch, heads, tokens, dtype=torch.bool, device=x.device)
    spec = GuardSpec(DTYPES[x.dtype], d, dead is not None, zero_found)
    dead = None if dead is None else dead.contiguous()
    size, step = x.element_size(), spec.rows * spec.groups
    _launch(
        spec, x.device, (-(-tokens * heads // step), batch, 1 if tokens * heads else 0),
        x.data_ptr(), *(x.stride(n) * size for n in (0, 1, 2)), out.data_ptr(),
        0 if dead is None else dead.data_ptr(), found.data_ptr(), tokens, heads,
    )  # fmt: skip
    return out, found


def fill_rows(x: Tensor, flags: Tensor, value: float) -> None:
    """``value`` (0 or NaN) into the rows of x (b, n, h, d) that flags (b, h, n) name, in place."""
    batch, tokens, heads, d = x.shape
    flags = flags if flags.stride(-1) == 1 else flags.contiguous()
    spec = FillSpec(d * x.element_size(), 0 if value == 0 else -1)  # all ones are a NaN everywhere
    size = x.element_size()
    _launch(
        spec, x.device, (-(-tokens // spec.THREADS), heads, batch),
        x.data_ptr(), *(x.stride(n) * size for n in (0, 1, 2)),
        flags.data_ptr(), flags.stride(0), flags.stride(1), tokens,
    )  # fmt: skip
