"""What others do with the same tokens on the same ranks, to be measured beside the ring.

    plain-ring            zigzag ring written the obvious way: K and V go round by batched sends and
                          receives, dK and dV follow in fp32, partials merge in fp32 by PyTorch's
                          operators; attention by the library that the row's kernel calls
    pytorch-all-gather    torch.distributed.tensor.experimental.context_parallel, by its rotation
    pytorch-all-to-all
    ring-flash-attn       the public package's zigzag ring (causal) or ring (full)

A rival holds its shard (1, s, heads, d) and answers ``forward() -> out, lse`` (lse None where it
returns none) and ``backward() -> dq, dk, dv``, all in (b, s, h, d). Under a causal mask all of them
deal out the sequence as ringfa4's zigzag does. PyTorch takes no fewer K/V heads than query heads in
a context-parallel call, so there they are repeated, inside what is timed.

ring-flash-attn calls flash-attention 2. Where that is not installed, its module
``flash_attn.flash_attn_interface`` is stood in for by the row's library, so the package's own code
runs, over the same kernel as everybody else's.

Left out: anything but equal shards, batch 1, and the default softmax scale.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.native import NativeKernel, Rows, aligned
from ringfa4.kernels.registry import load_kernel
from ringfa4.mask import Band


@dataclass(frozen=True)
class Share:
    """What one rank holds: q, dout (1, s, heads, d), k, v (1, s, kv_heads, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool


class Rival(Protocol):
    """One rank's attention over the whole sequence. Both methods are collective.

    ``note`` says on what it computes where that is not the row's kernel.
    """

    note: str

    def forward(self) -> tuple[Tensor, Tensor | None]: ...

    def backward(self) -> tuple[Tensor, Tensor, Tensor]: ...


# ---- one attention call -------------------------------------------------------------------------


class Library(Protocol):
    """A call on (b, n, h, d) against (b, m, h', d): everything allowed, or causal with n = m."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """out, and lse (b, h, n) fp32."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv for the merged ``out`` and ``lse``."""
        ...


class NativeLibrary:
    """What a CUDA kernel of ours calls, without what it does around the call."""

    def __init__(self, kernel: NativeKernel) -> None:
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return self.kernel.attend(_box(q, k, causal), q.shape[-1] ** -0.5, q, k, v)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = Rows(q, out, dout, lse.contiguous(), None)
        k, v = aligned(k), aligned(v)
        return self.kernel.differentiate(_box(q, k, causal), q.shape[-1] ** -0.5, rows, k, v)


def _box(q: Tensor, k: Tensor, causal: bool) -> Band:
    return Band(0, q.shape[1], 0, k.shape[1], None, 0 if causal else None)


class CpuLibrary:
    """PyTorch's flash attention for CPUs; its backward pass wants a K/V head a query head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q.shape[2]) for x in (k, v))
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = call(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = k.shape[2]
        k, v = (_repeated(x, q.shape[2]) for x in (k, v))
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = call(*operands, lse, 0.0, causal)
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        dk, dv = (x.unflatten(2, (heads, -1)).sum(3) for x in (dk, dv))
        return dq, dk, dv


def _repeated(x: Tensor, heads: int) -> Tensor:
    """(b, n, h, d) with each head as often as it takes to have ``heads``."""
    return x.repeat_interleave(heads // x.shape[2], dim=2) if heads != x.shape[2] else x


def library_of(kernel: str) -> Library:
    """The library under ``kernel``. ValueError for a kernel that calls none."""
    if kernel == "cpu":
        return CpuLibrary()
    loaded = load_kernel(kernel)
    if not isinstance(loaded, NativeKernel):
        raise ValueError(f"kernel {kernel!r} is no library's call; rivals need one")
    return NativeLibrary(loaded)


# ---- a plain ring -------------------------------------------------------------------------------


class PlainRing:
    """Zigzag ring over the default group, as a reader of the papers would write it."""

    note = ""

    def __init__(self, share: Share, library: Library) -> None:
        self.share, self.library = share, library
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.out = self.lse = share.q.new_empty(0)

    def _pass_on(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """What the previous rank passes on, once the works are done, for ``x`` to the next one."""
        received = torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, x, (self.rank + 1) % self.world),
            dist.P2POp(dist.irecv, received, (self.rank - 1) % self.world),
        ]
        return received, list(dist.batch_isend_irecv(operations))

    def _parts(self, step: int) -> tuple[slice, slice, bool]:
        """(query rows, key rows, causal) of a step: which half of a zigzag shard sees which."""
        whole, half = slice(None), self.share.q.shape[1] // 2
        if step == 0 or not self.share.causal:
            return whole, whole, self.share.causal and step == 0
        return (
            (whole, slice(half), False) if step <= self.rank else (slice(half, None), whole, False)
        )

    def _rounds(self) -> Iterator[tuple[int, Tensor]]:
        """(step, keys and values (2, b, s, h, d)); the next ones travel meanwhile."""
        pair = torch.stack((self.share.k, self.share.v))
        for step in range(self.world):
            works: list[dist.Work] = []
            coming = pair
            if step + 1 < self.world:
                coming, works = self._pass_on(pair)
            yield step, pair
            for work in works:
                work.wait()
            pair = coming

    def forward(self) -> tuple[Tensor, Tensor]:
        q = self.share.q
        out = lse = self.out = self.lse = torch.empty(0)
        for step, (k, v) in self._rounds():
            rows, keys, causal = self._parts(step)
            part, part_lse = self.library.forward(q[:, rows], k[:, keys], v[:, keys], causal)
            if step == 0:
                out, lse = part.float(), part_lse.transpose(1, 2).unsqueeze(-1).contiguous()
                continue
            mine, mine_lse = out[:, rows], lse[:, rows]
            other = part_lse.transpose(1, 2).unsqueeze(-1)
            mine -= torch.sigmoid(other - mine_lse) * (mine - part)
            mine_lse.copy_(torch.logaddexp(mine_lse, other))
        self.out, self.lse = out.to(q.dtype), lse.squeeze(-1).transpose(1, 2).contiguous()
        return self.out, self.lse

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        share, out, lse = self.share, self.out, self.lse
        dq = torch.zeros_like(share.q, dtype=torch.float32)
        coming, works = torch.empty(0), list[dist.Work]()
        for step, (k, v) in self._rounds():
            rows, keys, causal = self._parts(step)
            more = self.library.backward(
                share.dout[:, rows], share.q[:, rows], k[:, keys], v[:, keys],
                out[:, rows], lse[:, :, rows], causal,
            )  # fmt: skip
            dq[:, rows] += more[0]
            if step == 0:
                sums = torch.stack((more[1], more[2])).float()
            else:
                for work in works:
                    work.wait()
                sums = coming
                sums[0][:, keys] += more[1]
                sums[1][:, keys] += more[2]
            if self.world > 1:  # after the last step they arrive at their owner
                coming, works = self._pass_on(sums)
        for work in works:
            work.wait()
        dk, dv = coming if self.world > 1 else sums
        return dq.to(share.q.dtype), dk.to(share.k.dtype), dv.to(share.v.dtype)


# ---- through autograd ---------------------------------------------------------------------------


class _Differentiated:
    """Gradients of ``call(q, k, v) -> out, lse`` by autograd, as often as they are asked for."""

    def __init__(
        self,
        share: Share,
        call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]],
        note: str,
    ) -> None:
        self.call, self.dout, self.note = call, share.dout, note
        self.leaves = [x.detach().requires_grad_() for x in (share.q, share.k, share.v)]
        self.out = share.q.new_empty(0)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        self.out = self.dout.new_empty(0)  # with it goes what the last call kept for its gradients
        self.out, lse = self.call(*self.leaves)
        return self.out.detach(), None if lse is None else lse.detach()

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)
        dq, dk, dv = found
        return dq, dk, dv


FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""PyTorch's kernels, by speed on Hopper: 578 and 332 TFLOP/s (128K causal, docs/benchmarks.md)."""


@contextmanager
def plain_ring(share: Share, kernel: str) -> Iterator[Rival]:
    yield PlainRing(share, library_of(kernel))


@contextmanager
def pytorch(share: Share, rotation: str) -> Iterator[Rival]:
    """PyTorch's context parallel; ``rotation`` "allgather" or "alltoall"."""
    # The switch between a zigzag and a plain deal has no public name, and full attention is refused
    # with the first.
    attention = import_module("torch.distributed.tensor.experimental._attention")
    try:
        options = import_module(
            "torch.distributed.tensor.experimental._context_parallel._attention"
        )._cp_options
    except ModuleNotFoundError:  # where it was before torch 2.10
        options = attention._cp_options
    before = options.enable_load_balance, options.rotate_method
    mesh = DeviceMesh(share.q.device.type, list(range(dist.get_world_size())))
    heads = share.q.shape[2]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, _repeated(k, heads), _repeated(v, heads)))
        with sdpa_kernel(FASTEST, set_priority=True):
            # By its place in the module: that is where context_parallel puts its own.
            out: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=share.causal)
        return out.transpose(1, 2), None

    options.enable_load_balance = share.causal
    attention.set_rotate_method(rotation)
    try:
        # It shards these buffers in place and wants at least one; the shards are made already.
        nothing = torch.zeros(2 * dist.get_world_size(), device=share.q.device)
        with attention.context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0]):
            yield _Differentiated(share, call, "computes with PyTorch's cuDNN or flash kernel")
    finally:
        options.enable_load_balance, options.rotate_method = before


@contextmanager
def ring_flash_attn(share: Share, kernel: str) -> Iterator[Rival]:
    """The package's own code; loaded anew each time, since it binds its library when loaded."""
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None:
        raise MissingLibraryError("ring-flash-attn is not installed: pip install ring-flash-attn")
    # Without the package's __init__, which loads what is not needed here (transformers, triton).
    package = {"ring_flash_attn": importlib.util.module_from_spec(spec)}
    kind = "zigzag_ring_flash_attn" if share.causal else "ring_flash_attn"
    library = _flash_attention_2(kernel)
    with _modules(library | package):
        attend = getattr(import_module(f"ring_flash_attn.{kind}"), f"{kind}_func")

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = attend(
            q, k, v, causal=share.causal, return_attn_probs=True, group=dist.group.WORLD,
        )  # fmt: skip
        return out, lse

    note = "over the row's kernel" if library else "over flash-attention 2 as installed"
    yield _Differentiated(share, call, note)


@contextmanager
def _modules(found: dict[str, ModuleType]) -> Iterator[None]:
    """``found`` can be imported by name; afterwards they and what they loaded are forgotten."""
    before = dict(sys.modules)
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "ring_flash_attn"]:
            del sys.modules[name]
        for name in found:
            sys.modules.pop(name, None)
        sys.modules.update({name: before[name] for name in found if name in before})


def _flash_attention_2(kernel: str) -> dict[str, ModuleType]:
    """Nothing where it is installed, else the library of ``kernel`` by its names."""
    name = "flash_attn.flash_attn_interface"
    package = importlib.util.find_spec("flash_attn")
    if package is not None and importlib.util.find_spec(name) is not None:
        return {}
    stand_in = {name: _standing_in(library_of(kernel))}
    return stand_in if package is not None else {"flash_attn": ModuleType("flash_attn"), **stand_in}


def _standing_in(library: Library) -> ModuleType:
    """A module with flash-attention 2's private calls, as of 2.8."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        out, lse = library.forward(q, k, v, causal)
        return out, lse, None, None

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:  # fmt: skip
        found = library.backward(dout, q, k, v, out, softmax_lse, causal)
        for into, value in zip((dq, dk, dv), found, strict=True):
            into.copy_(value)

    module: Any = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_forward = _flash_attn_forward
    module._flash_attn_backward = _flash_attn_backward
    return module  # type: ignore[no-any-return]


RIVALS = {
    "plain-ring": plain_ring,
    "pytorch-all-gather": lambda share, kernel: pytorch(share, "allgather"),
    "pytorch-all-to-all": lambda share, kernel: pytorch(share, "alltoall"),
    "ring-flash-attn": ring_flash_attn,
}
"""Name -> (share, kernel) -> a context in which the rival can be used."""
