"""flash-attn-4 as a block kernel, where it is installed: Hopper (SM90) and Blackwell (SM100).

    forward    _flash_attn_fwd: out in the input dtype, lse fp32, natural log
    backward   _flash_attn_bwd with the merged out and lse, and dlse; lse = +inf gives P = 0

Bands are windows of the call (:mod:`ringfa4.kernels.native`); a causal square is passed as
``causal``, and an unbounded side as None: with ``causal``, a window of (-1, 0) returns zeros and
-inf without an error.

dQ is summed across tiles in a fixed order (``deterministic``), so gradients repeat to the bit. The
name "fa4-nondeterministic" gives the atomic sum, which is faster and repeats to rounding only.

Head dimensions that the library does not take, or takes and gets wrong, are padded with zeros
(:func:`widths`). On SM90 its version 4.0.0b36 returns a wrong dQ without an error where dk is in
the lower half of a step of 32 (its accumulator is laid out in steps of 32, its kernel writes steps
of 16: flash-attention pull request 2896), and of the pairs dk != dv only (192, 128) without GQA
runs: the others fail to build or touch memory that is not theirs.

dQ, dK, dV of a call come rounded to the input dtype; the sums over calls are fp32. K and V on a
quantising wire are decoded to the input dtype first. Left out: fp8 (its forward has one scale a
tensor), paged K/V, softcap.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.native import NativeKernel, Rows, is_aligned, narrowed, padded, window
from ringfa4.mask import Band

DTYPES = (torch.bfloat16, torch.float16)
STEP = 32
"""Of head dimensions where they are padded."""

_LAUNCH = threading.Lock()
"""Virtual ranks are threads: the first call of a shape class traces and compiles, which is not
thread-safe.
"""


class Fa4Kernel(NativeKernel):
    """bf16 and fp16 on SM90 and SM100; every mask; GQA; dv != dk."""

    name = "fa4"
    deterministic = True
    writes_in_place = True

    def __init__(self) -> None:
        try:
            from flash_attn.cute import interface
        except ImportError as error:
            raise MissingLibraryError(
                f"kernel {self.name!r} needs flash-attn-4 (pip install 'ringfa4[fa4]'): {error}"
            ) from error
        self._library: Any = interface

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.device != "cuda" or spec.arch is None:
            return (
                f"kernel {self.name!r} computes on NVIDIA GPUs, the tensors are on {spec.device!r}"
            )
        if spec.arch[0] not in (9, 10):
            return f"flash-attn-4 has forward and backward for SM90 and SM100, this is {spec.arch}"
        if spec.dtype not in DTYPES:
            return f"flash-attn-4 takes bf16 and fp16, not {spec.dtype}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        dims = (spec.dk, spec.dv)
        if any(d % 8 for d in dims):
            return f"flash-attn-4 takes head dimensions in steps of 8: {spec.dk=}, {spec.dv=}"
        if spec.arch[0] == 9 and max(dims) > 256:
            return f"flash-attn-4 takes head dimensions up to 256 on SM90: {spec.dk=}, {spec.dv=}"
        if spec.arch[0] == 10 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            return (
                f"flash-attn-4 takes head dimensions up to 128, (192, 128) and (256, 256) "
                f"on SM100: {spec.dk=}, {spec.dv=}"
            )
        if spec.arch[0] == 10 and spec.backward and dims == (256, 256):
            return f"flash-attn-4 takes no gradient into lse at {spec.dk=}, {spec.dv=} on SM100"
        return None

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        dk, dv = widths(q, k, v, backward=False)
        q, k, v, given = padded(q, dk), padded(k, dk), padded(v, dv), v.shape[-1]
        with _LAUNCH:
            out, lse, *_ = self._library._flash_attn_fwd(
                q, k, v, softmax_scale=scale, return_lse=True, **_mask(box)
            )
        return narrowed(out, given), lse

    def differentiate(
        self,
        box: Band,
        scale: float,
        rows: Rows,
        k: Tensor,
        v: Tensor,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = k.shape[-1], v.shape[-1]
        dk, dv = widths(rows.q, k, v, backward=True)
        q, k = (padded(x, dk) for x in (rows.q, k))
        v, out, dout = (padded(x, dv) for x in (v, rows.out, rows.dout))
        itself = into is not None and (dk, dv) == given and all(map(is_aligned, into))
        with _LAUNCH:
            grad_q, grad_k, grad_v = self._library._flash_attn_bwd(
                q,
                k,
                v,
                out,
                dout,
                rows.lse,
                softmax_scale=scale,
                dlse=rows.dlse,
                deterministic=self.deterministic,
                dk=into[0] if into is not None and itself else None,
                dv=into[1] if into is not None and itself else None,
                **_mask(box),
            )
        grad_q, grad_k = (narrowed(x, given[0]) for x in (grad_q, grad_k))
        grad_v = narrowed(grad_v, given[1])
        if into is None:
            return grad_q, grad_k, grad_v
        if not itself:
            for place, grad in zip(into, (grad_k, grad_v), strict=True):
                place.copy_(grad)
        return grad_q, *into


class NondeterministicFa4Kernel(Fa4Kernel):
    """The same with dQ summed by atomics."""

    name = "fa4-nondeterministic"
    deterministic = False


def _mask(box: Band) -> dict[str, int | bool | None]:
    left, right = window(box)
    if left is None and right == 0:
        return {"causal": True}
    return {"window_size_left": left, "window_size_right": right}


def widths(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
    """The dk and dv of the library's call for these operands: theirs, or larger."""
    dk, dv = k.shape[-1], v.shape[-1]
    if dk == dv:
        return (_step_up(dk), _step_up(dv)) if backward else (dk, dv)
    grouped = q.shape[2] != k.shape[2]
    if (dk, dv) == (192, 128):
        hopper = torch.cuda.get_device_capability(q.device)[0] == 9
        if not (hopper and backward and grouped):
            return dk, dv
    return (_step_up(max(dk, dv)),) * 2


def _step_up(d: int) -> int:
    return -(-d // STEP) * STEP
