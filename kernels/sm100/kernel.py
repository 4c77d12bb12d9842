"""The MXFP8 forward kernel of SM100 and SM103 as a block kernel.

    state <- state (+) partial(softmax(scale Q K^T) V over the pairs of the tasks), one launch

Q, K and V are read as MXFP8 records: K and V are the bytes of the wire, Q is encoded once a call
(:mod:`ringfa4.kernels.sm100.queries`). A launch takes all tasks of a step: tables of items and
segments (:mod:`ringfa4.kernels.sm100.worklist`) go to the device in one copy, and the kernel merges
into the fp32 state itself. Which rows it writes and which it merges is known here, so the state is
never read before it is written.

Forward only. Backward is chosen apart from forward (ringfa4.problem), so ``kernel="auto"`` takes
this one forward and a library's kernel, on K and V decoded from the wire, backward; asked for by
name, it refuses a backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ringfa4.kernels.interface import BlockKernel, KernelSpec, Queries
from ringfa4.kernels.sm100.launch import Arguments, Launcher, cuda_launcher
from ringfa4.kernels.sm100.queries import WIRES, Sm100Queries
from ringfa4.kernels.sm100.specs import ForwardSpec
from ringfa4.kernels.sm100.worklist import WorkList, work_list
from ringfa4.mx.quantise import quantisable
from ringfa4.mx.wire import MxShard
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard

ARCHITECTURES: Mapping[tuple[int, int], str] = {(10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capabilities whose tensor cores read MXFP8 and whose tensor memory the kernel uses."""


class Sm100Kernel(BlockKernel):
    """MXFP8 forward on B200, GB200 (SM100), B300 and GB300 (SM103); every mask; GQA.

    ``launcher`` runs the kernel; None is the GPU.
    """

    name = "sm100"

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = cuda_launcher() if launcher is None else launcher

    def supports(self, spec: KernelSpec) -> str | None:
        if spec.device != "cuda" or spec.arch is None:
            return f"it computes on NVIDIA GPUs, the tensors are on {spec.device!r}"
        if spec.arch not in ARCHITECTURES:
            known = " and ".join(str(arch) for arch in ARCHITECTURES)
            return f"it needs compute capability {known} (SM100, SM103), this is {spec.arch}"
        if spec.wire not in WIRES:
            return f"it reads MXFP8 wires ({', '.join(WIRES)}), not {spec.wire!r}"
        if spec.backward:
            return "it computes forward passes only; kernel='auto' takes another one for backward"
        if not quantisable(spec.dtype):
            return f"it takes bf16, fp16 and fp32, not {spec.dtype}"
        if spec.heads_q % spec.heads_kv:
            return f"{spec.heads_q=} is not a multiple of {spec.heads_kv=}"
        reason = ForwardSpec.refusal(spec.dk, spec.dv)
        if reason is not None:
            return reason
        return self._launcher.missing()

    def prepare(self, q: Tensor, shard: Shard) -> Sm100Queries:
        return Sm100Queries(q, shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> NoReturn:
        raise NotImplementedError("sm100 computes forward passes only; supports() says so")

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        assert isinstance(queries, Sm100Queries) and isinstance(shard, MxShard)
        assert state.acc.dtype == torch.float32 and state.acc.is_contiguous(), state.acc.dtype
        batch, rows, heads_q, dk = queries.q.shape
        device, layout = queries.q.device, shard.layout
        spec = ForwardSpec.of(dk, layout.geometry.dv, self._launcher.arch(device))
        work = work_list(tasks, queries.shard, shard.map, batch, spec.ctas)
        if not len(work.items):
            return
        items, segments, modes = _uploaded(work, work.claim(state.written, rows), device)
        q, kv = queries.records(shard.wire), shard.records
        k, v = layout.operand("k", "d"), layout.operand("v", "seq")
        at_a_time = self._launcher.multiprocessors(device) // spec.ctas
        arguments = Arguments(
            q_records=q.records.data_ptr(),
            q_record_bytes=q.records.stride(0),
            q_payload=q.payload,
            q_scales=q.scales,
            n_q_records=len(q.records),
            kv_records=kv.data_ptr(),
            kv_record_bytes=layout.nbytes,
            k_payload=k.payload,
            v_payload=v.payload,
            k_scales=k.scales,
            v_scales=v.scales,
            n_kv_records=len(kv),
            batch=batch,
            heads_q=heads_q,
            heads_kv=layout.geometry.heads_kv,
            acc=state.acc.data_ptr(),
            max=state.max.data_ptr(),
            sum=state.sum.data_ptr(),
            acc_b=state.acc.stride(0) * 4,
            acc_s=state.acc.stride(1) * 4,
            row_b=state.max.stride(0) * 4,
            row_h=state.max.stride(1) * 4,
            items=items.data_ptr(),
            segments=segments.data_ptr(),
            modes=modes.data_ptr(),
            modes_row=rows,
            n_items=len(work.items),
            scale=scale,
            ctas=spec.ctas * min(len(work.items) * heads_q, at_a_time),
        )
        self._launcher(spec, device, arguments)

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("sm100 computes forward passes only; supports() says so")


def _uploaded(work: WorkList, modes: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Items, segments and modes as bytes on ``device``, in one asynchronous copy."""
    tables = [x.reshape(-1).view(torch.uint8) for x in (work.items, work.segments, modes)]
    sizes = [x.numel() for x in tables]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    torch.cat(tables, out=pinned)
    there: Tensor = pinned.to(device, non_blocking=True)
    return tuple(torch.split(there, sizes))
