"""PyTorch's own CUDA attention as a block kernel: cuDNN for large simple calls, flash for the rest.

    flash   aten._flash_attention_forward     any band, as a window; GQA; one width for dk and dv
    cuDNN   aten._scaled_dot_product_cudnn_attention     large rectangles and causal squares

cuDNN is 1.5 times as fast on Hopper and builds a plan for every new shape (tens of milliseconds),
so only shapes that recur and take long go there. It runs wherever PyTorch has CUDA: SM80 and newer.

dlse: both libraries compute delta = rowsum(out * dout) themselves and take no gradient into lse.
What dlse adds is dS += P * dlse, so one more backward call with V = 0 and with out and dout chosen
such that rowsum(out * dout) = -dlse gives exactly that; it costs as much as the first and happens
only when lse has a gradient.

**Gradients repeat to the bit only under ``torch.use_deterministic_algorithms(True)``**, which makes
flash sum dQ in order (it holds one fp32 dQ per column of the launch) and keeps cuDNN out of
backward; otherwise dQ is summed by atomics. Forward always repeats. Left out: fp32 and fp64 (no
such library kernel with lse; the reference kernel takes them), softcap.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ringfa4.kernels.interface import KernelSpec
from ringfa4.kernels.native import NativeKernel, Rows, masks_pairs, padded, window
from ringfa4.kernels.pieces import is_causal, pieces
from ringfa4.mask import Band

_flash_forward = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default
_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

DTYPES = (torch.bfloat16, torch.float16)
CUDNN_PAIRS = 2048 * 2048
"""A forward call of one head takes about 20 us at this size on H200: below it launches and plans
cost more than they save.
"""


class CudaAtenKernel(NativeKernel):
    """bf16 and fp16 on SM80 and newer; every mask; GQA; dv != dk."""

    name = "cuda_aten"
    most_elements = 2**30
    """Half of where, on H200, cuDNN's dQ is wrong without an error (2M rows, 8 heads, d 128), and
    flash reads memory that is not its own (3 batch rows of 1M)."""

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.device != "cuda" or spec.arch is None:
            return (
                f"kernel {self.name!r} computes on NVIDIA GPUs, the tensors are on {spec.device!r}"
            )
        if spec.arch < (8, 0):
            return f"PyTorch's flash attention needs SM80 or newer, this is {spec.arch}"
        if spec.dtype not in DTYPES:
            return f"PyTorch's flash attention takes bf16 and fp16, not {spec.dtype}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        if spec.dk % 8 or spec.dv % 8 or max(spec.dk, spec.dv) > 256:
            return (
                f"PyTorch's flash attention takes head dimensions up to 256 that are multiples "
                f"of 8: {spec.dk=}, {spec.dv=}"
            )
        return None

    def cut(self, band: Band) -> Iterator[Band]:
        """Bands without a lower bound as rectangles and causal squares, which cuDNN can take.

        Flash takes an unbounded side of a window, and one that reaches at least as many keys as
        there are, for one that reaches exactly as many. To the right that is too few when there are
        more rows than keys: then rows are parted where they begin to see the last key and where
        they cease to see the first. A part has no more rows than keys, or no window.
        """
        if band.lo is not None:
            _, right = window(band)
            reach = band.k1 if right is None else right
            last = 0 if band.hi is None else band.k1 - 1 - band.hi  # the first row that sees it
            if reach < band.k1 or (band.hi is None and band.q1 <= band.k1 + 1):
                yield band
                return
            edges = sorted({0, last, min(1 - band.lo, band.q1), band.q1})
            for q0, q1 in pairwise(edges):
                part = band.within(q0, q1, 0, band.k1)
                if part is not None:
                    yield part
            return
        for piece in pieces(band):
            side = piece.k1 - piece.k0
            if is_causal(piece) and piece.q1 - piece.q0 > side:  # the rows below see all keys
                yield Band(piece.q0, piece.q0 + side, piece.k0, piece.k1, None, piece.hi)
                yield Band(piece.q0 + side, piece.q1, piece.k0, piece.k1)
            else:
                yield piece

    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        if _for_cudnn(box, k, v):
            out, lse, *_ = _cudnn_forward(
                *(x.transpose(1, 2) for x in (q, k, v)),
                None,
                True,
                0.0,
                masks_pairs(box),
                False,
                scale=scale,
            )
            return out.transpose(1, 2), lse.view(lse.shape[:3])
        width = max(k.shape[-1], v.shape[-1])
        left, right = window(box)
        out, lse, *_ = _flash_forward(
            *(padded(x, width) for x in (q, k, v)),
            None,
            None,
            box.q1,
            box.k1,
            0.0,
            False,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out[..., : v.shape[-1]], lse

    def differentiate(
        self,
        box: Band,
        scale: float,
        rows: Rows,
        k: Tensor,
        v: Tensor,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert into is None, "PyTorch's operators make their results themselves"
        if _for_cudnn(box, k, v) and not torch.are_deterministic_algorithms_enabled():
            dq, dk, dv = _differentiate_cudnn(box, scale, rows, k, v)
        else:
            dq, dk, dv = _differentiate_flash(box, scale, rows, k, v)
        if rows.dlse is None:
            return dq, dk, dv
        # rowsum(out * dout) = -dlse and dP = dout V^T = 0, so the dS of this call is P * dlse.
        parts = padded(_summands(rows.dlse, k.dtype).transpose(1, 2), k.shape[-1])
        only = Rows(rows.q, torch.full_like(parts, -1), parts, rows.lse, None)
        more_dq, more_dk, _ = _differentiate_flash(box, scale, only, k, torch.zeros_like(k))
        wide = torch.float32
        return dq.to(wide) + more_dq.to(wide), dk.to(wide) + more_dk.to(wide), dv


def _for_cudnn(box: Band, k: Tensor, v: Tensor) -> bool:
    """Large, at most 128 wide, and a rectangle or a causal square: all that PyTorch lets cuDNN
    mask.
    """
    square = box.lo is None and box.hi == 0 and box.q1 == box.k1
    wide = max(k.shape[-1], v.shape[-1]) > 128
    return (square or not masks_pairs(box)) and box.q1 * box.k1 >= CUDNN_PAIRS and not wide


def _differentiate_flash(
    box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dk_width, dv_width = k.shape[-1], v.shape[-1]
    width = max(dk_width, dv_width)
    left, right = window(box)
    unused = torch.zeros(2, dtype=torch.uint64, device=k.device)  # the state of dropout
    dq, dk, dv = _flash_backward(
        padded(rows.dout, width),
        *(padded(x, width) for x in (rows.q, k, v, rows.out)),
        rows.lse,
        None,
        None,
        box.q1,
        box.k1,
        0.0,
        False,
        unused,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return dq[..., :dk_width], dk[..., :dk_width], dv[..., :dv_width]


def _differentiate_cudnn(
    box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros((), dtype=torch.int64, device=k.device)  # the state of dropout
    dout, q, k, v, out = (x.transpose(1, 2) for x in (rows.dout, rows.q, k, v, rows.out))
    dq, dk, dv = _cudnn_backward(
        dout,
        q,
        k,
        v,
        out,
        rows.lse.unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        box.q1,
        box.k1,
        0.0,
        masks_pairs(box),
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _summands(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., 3) in ``dtype`` that sum to x (fp32): three significands of 8 bits hold its 24."""
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(torch.float32)
    return torch.stack(parts, -1)
