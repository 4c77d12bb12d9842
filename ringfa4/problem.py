"""What is attended to, apart from the tensors: mask, shardings, wire and kernel of one layer or of
many.

A :class:`Problem` turns (q, k, v) into a :class:`ringfa4.ring.Ring` after checking them, and keeps
what can be kept between calls: plans per wire, rings per geometry. Checks are local;
:mod:`ringfa4.ops` makes every rank raise what any of them finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringfa4.context import Context
from ringfa4.kernels.choose import Choice, choose_kernel
from ringfa4.kernels.interface import KernelSpec
from ringfa4.mask import Mask
from ringfa4.plan import Plan, shared_plan
from ringfa4.precondition import Precondition
from ringfa4.ring import Ring
from ringfa4.shard import Sharding
from ringfa4.topology import Topology
from ringfa4.trace import NAMED, Observer
from ringfa4.wire import Geometry, WireFormat, wire_format


@dataclass
class Problem:
    """``wire`` None is the input dtype as it is; ``kernel`` is a registered name or "auto".

    ``observer`` sees the spans of every call; replace it to record them. ``topology`` None: all
    ranks read from each other directly.
    """

    context: Context
    mask: Mask
    q_sharding: Sharding
    k_sharding: Sharding
    wire: str | None = None
    kernel: str = "auto"
    precondition: str = "none"
    observer: Observer = NAMED
    topology: Topology | None = None
    _plans: dict[tuple[int, ...], Plan] = field(default_factory=dict, repr=False)
    _rings: dict[tuple[Geometry, int, bool], Ring] = field(default_factory=dict, repr=False)
    choices: list[Choice] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.wire is not None:
            wire_format(self.wire, torch.bfloat16)  # unknown names are refused at once
        Precondition.parse(self.precondition)
        if self.q_sharding.world != self.context.world:
            raise ValueError(
                f"the sharding is for {self.q_sharding.world} ranks, "
                f"the group has {self.context.world}"
            )
        self.plan()

    def plan(self, wire: WireFormat | None = None) -> Plan:
        """The plan for ``wire``: wires that quantise groups of tokens cut chunks at documents."""
        cuts = () if wire is None else wire.split_at(self.mask)
        if cuts not in self._plans:
            keys = self.k_sharding.split(cuts)
            self._plans[cuts] = shared_plan(self.mask, self.q_sharding, keys, self.topology)
        return self._plans[cuts]

    def ring(self, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Ring:
        """The ring for these inputs, kernel chosen. Raises ValueError naming what does not fit."""
        self._check(q, k, v)
        geometry = Geometry(q.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)
        key = (geometry, q.shape[2], backward)
        if key not in self._rings:
            wire = wire_format(self.wire, k.dtype)
            reason = wire.supports(geometry)
            if reason is not None:
                raise ValueError(reason)
            device = self.context.device
            arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
            spec = KernelSpec(
                device=device.type,
                arch=arch,
                dtype=q.dtype,
                wire=wire.name,
                heads_q=q.shape[2],
                heads_kv=geometry.heads_kv,
                dk=geometry.dk,
                dv=geometry.dv,
                features=self.mask.features,
                backward=backward,
            )
            choice = choose_kernel(self.kernel, spec)
            self.choices.append(choice)
            self._rings[key] = Ring(
                self.context,
                self.plan(wire),
                wire,
                choice.kernel,
                geometry,
                q.shape[2],
                Precondition.parse(self.precondition),
            )
        return self._rings[key]

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} must be (b, s, h, d), got shape {tuple(x.shape)}")
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k, v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}")
        if q.dtype not in SUPPORTED_DTYPES:
            raise ValueError(
                f"q, k, v are {q.dtype}, which is none of {[str(d) for d in SUPPORTED_DTYPES]}"
            )
        if {x.device.type for x in (q, k, v)} != {self.context.device.type}:
            raise ValueError(
                f"inputs are on {q.device}, {k.device}, {v.device}; "
                f"the context is on {self.context.device}"
            )
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise ValueError(f"batch sizes differ: {shapes}")
        if self.mask.batch not in (1, q.shape[0]):
            raise ValueError(
                f"the mask has {self.mask.batch} batch rows, the inputs {q.shape[0]}: {shapes}"
            )
        if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
            raise ValueError(f"k and v must agree in length and heads: {shapes}")
        if q.shape[3] != k.shape[3]:
            raise ValueError(f"q and k must have one head dimension: {shapes}")
        if 0 in (q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]):
            raise ValueError(f"batch, heads and head dimension must not be 0: {shapes}")
        if q.shape[2] % k.shape[2]:
            raise ValueError(f"query heads must be a multiple of K/V heads: {shapes}")
        rank = self.context.rank
        for name, x, sharding in (("q", q, self.q_sharding), ("k", k, self.k_sharding)):
            due = len(sharding.shards[rank])
            if x.shape[1] != due:
                hint = "; as (b, h, s, d) it would fit: transpose(1, 2)" * (x.shape[2] == due)
                raise ValueError(
                    f"this rank's shard of {name} has {due} tokens "
                    f"({sharding.name}, {sharding.seq} in all), got {x.shape[1]}: {shapes}{hint}"
                )


SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """``scale``, or 1 / sqrt(head_dim) for None. ValueError unless it is finite."""
    value = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if not math.isfinite(value):
        raise ValueError(f"{scale=} must be finite")
    return value


def check_sink(sink: Tensor | None, q: Tensor) -> None:
    """ValueError unless ``sink`` is None or one logit per query head, on q's device."""
    if sink is None:
        return
    if tuple(sink.shape) != (q.shape[2],) or not sink.is_floating_point():
        raise ValueError(
            f"a sink is one floating-point logit per query head ({q.shape[2]}), "
            f"got {sink.dtype} of shape {tuple(sink.shape)}"
        )
    if sink.device != q.device:
        raise ValueError(f"the sink is on {sink.device}, q on {q.device}")
