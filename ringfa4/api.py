"""What users call: :class:`ContextParallel` for layers, :func:`ring_attention` for a single call.

    cp = ContextParallel(seq_len=1 << 20, mask="causal")        # on the default group, once
    q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))           # this rank's tokens
    out = cp.attention(q, k, v)                                 # exact, over all ranks' keys
    whole = cp.unshard(out, dim=1)

All of it is collective: every rank makes the same calls in the same order. Shapes (b, s, h, d); lse
(b, h, s) fp32, natural log. Bad input is a ValueError with the values, alike on every rank, and
nothing has moved by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringfa4 import mask as masks
from ringfa4 import ops, packing
from ringfa4 import shard as shardings
from ringfa4.context import DEFAULT_TIMEOUT_S, Context, context_for
from ringfa4.mask import Mask
from ringfa4.plan import Plan
from ringfa4.problem import Problem
from ringfa4.shard import Sharding
from ringfa4.topology import Topology
from ringfa4.trace import NAMED, Observer

Group = dist.ProcessGroup | DeviceMesh | Context | None
CuSeqlens = Sequence[int] | Tensor


class ContextParallel:
    """Attention over a sequence that is spread over the ranks of a group.

    Args:
        group: process group, one-dimensional DeviceMesh (slice a larger one: ``mesh["cp"]``), a
        ready
            :class:`ringfa4.context.Context`, or None for the default group (this process alone
            when there is none).
        seq_len: tokens of the whole sequence; of the keys too, unless ``seq_len_k`` says otherwise.
        cu_seqlens, cu_seqlens_k: cumulative lengths of packed documents (b = 1); give ``seq_len``
        as well when
            padding follows the last document.
        mask: "causal", "full", or a :class:`ringfa4.mask.Mask` (any union of bands, also per batch
        row). window: tokens seen to the left, or (left, right); None is unbounded. Under "causal",
        right is 0. align: where the diagonal of a causal mask lies when queries and keys differ in
        number:
            "top-left" or "bottom-right".
        sharding: "zigzag", "contiguous", "striped", "balanced", or a
        :class:`ringfa4.shard.Sharding`; "uneven" shards come
            from :func:`ringfa4.shard.uneven`.
        sharding_k: of the keys; None is as ``sharding``.
        wire: how K/V travel: None (the inputs' dtype as it is), "bf16", "mxfp8", ...
        precondition: "none", or what makes Q and K easier to quantise and leaves attention as it
            is: "hadamard" (outlier channels), "k-mean" (biased channels), "both".
        kernel, transport: a registered name, or "auto" (:meth:`explain` says what was taken and
        why). device: where the tensors are; by default the current CUDA device under NCCL, else the
        CPU. timeout_s: how long a rank waits for another one before it raises PeerError.
        topology: which ranks share an NVLink domain (:class:`ringfa4.topology.Topology`): records
            then cross once into each other domain, and dK/dV once out of it. None: none do.

    Raises ValueError, alike on every rank, when these do not fit together.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        seq_len: int | None = None,
        seq_len_k: int | None = None,
        cu_seqlens: CuSeqlens | None = None,
        cu_seqlens_k: CuSeqlens | None = None,
        mask: str | Mask = "causal",
        window: int | tuple[int | None, int | None] | None = None,
        align: str = "top-left",
        sharding: str | Sharding = "zigzag",
        sharding_k: str | Sharding | None = None,
        wire: str | None = None,
        kernel: str = "auto",
        precondition: str = "none",
        transport: str = "auto",
        device: torch.device | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        observer: Observer = NAMED,
        topology: Topology | None = None,
    ) -> None:
        context = _context(group, device, transport, timeout_s)

        def build() -> Problem:
            made = build_mask(
                mask,
                seq_len=seq_len,
                seq_len_k=seq_len_k,
                cu_seqlens=cu_seqlens,
                cu_seqlens_k=cu_seqlens_k,
                window=window,
                align=align,
            )
            q_side = build_sharding(sharding, made, context.world, "q")
            k_side = build_sharding(
                sharding if sharding_k is None else sharding_k, made, context.world, "k"
            )
            return Problem(
                context, made, q_side, k_side, wire, kernel, precondition, observer, topology
            )

        self.problem = ops.checked(context, build)
        context.agree(
            {
                "call": "ContextParallel",
                "plan": self.plan.digest.hex(),
                "wire": wire,
                "precondition": precondition,
            }
        )
        self._handle = ops.register(self.problem)

    @property
    def context(self) -> Context:
        """Transport and control channel; shared by all objects on the same group and device."""
        return self.problem.context

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.context.rank

    @property
    def world(self) -> int:
        return self.context.world

    @property
    def mask(self) -> Mask:
        return self.problem.mask

    @property
    def plan(self) -> Plan:
        """Who computes what, when (for wires that keep tokens independent)."""
        return self.problem.plan()

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sink: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """softmax(scale * q k^T under the mask) v, for this rank's queries over all ranks' keys.

        q (b, sq, heads_q, dk), k (b, sk, heads_kv, dk), v (b, sk, heads_kv, dv): this rank's
        shards, of one dtype (bf16, fp16, fp32; fp64 with the reference kernel), any strides.
        heads_q is a multiple of heads_kv; query head h reads K/V head h // (heads_q // heads_kv).
        ``scale`` defaults to dk ** -0.5. ``sink`` (heads_q,) is the logit of one more key with
        value 0.

        Returns out (b, sq, heads_q, dv) in q's dtype; with ``return_lse`` also lse (b, heads_q, sq)
        fp32, the log-sum-exp of the scaled logits (sink included), differentiable. Queries that see
        no key give out 0 and lse -inf.

        Differentiable once. Raises ValueError (bad input on any rank), PeerError (a rank is lost).
        """
        out, lse = torch.ops.ringfa4.attention(q, k, v, sink, self._handle, scale)
        return (out, lse) if return_lse else out

    def shard(self, x: Tensor, dim: int, *, side: str = "q") -> Tensor:
        """This rank's tokens of a whole tensor along ``dim``, in local order; ``side`` "q" or "k"
        for cross attention.

        Its backward gathers the gradient from all ranks.
        """
        self._check_whole(x, dim, side)
        out: Tensor = torch.ops.ringfa4.shard(x, self._handle, dim, side)
        return out

    def unshard(self, x: Tensor, dim: int, *, side: str = "q") -> Tensor:
        """The whole tensor from every rank's shard, on every rank; its backward takes this rank's
        slice.
        """
        _require_side(side)
        out: Tensor = torch.ops.ringfa4.unshard(x, self._handle, dim, side)
        return out

    def positions(self, *, side: str = "q") -> Tensor:
        """Global positions (int64, on the context's device) of this rank's tokens: rotary
        embeddings and losses need them.
        """
        _require_side(side)
        problem = self.problem
        sharding = problem.q_sharding if side == "q" else problem.k_sharding
        return ops.positions(sharding.shards[self.rank], self.context.device)

    def position_ids(self, *, side: str = "q") -> Tensor:
        """(mask rows, s) int64: how far each of this rank's tokens is from the start of its
        document, as a document alone would be numbered. One row unless the mask has one per batch
        row.
        """
        return packing.position_ids(self.mask, self.positions(side=side), side=side)

    def shift_labels(self, labels: Tensor, ignore_index: int = packing.IGNORE) -> Tensor:
        """This rank's next-token labels (..., s), from the whole (..., seq) before any shift.

        The shift comes before the sharding, so a shard's last token keeps its label; the last token
        of each document gets ``ignore_index``. A rank may get nothing but ``ignore_index``: sum the
        losses and divide by the number of labels on *all* ranks, since a rank's own mean would be
        0 / 0, and equal ranks' means are not the mean.
        """
        shifted = packing.shift_labels(labels, self.mask, ignore_index=ignore_index)
        return shifted.index_select(-1, self.positions().to(labels.device))

    def explain(self) -> list[str]:
        """What was taken and why: transport, wire, and each kernel choice made so far."""
        wire = self.problem.wire or "the inputs' dtype"
        lines = [f"transport {self.context.transport.name}, wire {wire}, {self.world} rank(s)"]
        lines += self.context.transport.why
        return [*lines, *(str(choice) for choice in self.problem.choices)]

    def _check_whole(self, x: Tensor, dim: int, side: str) -> None:
        _require_side(side)
        seq = self.mask.seq_q if side == "q" else self.mask.seq_k
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != seq:
            raise ValueError(f"{dim=} of shape {tuple(x.shape)} should hold all {seq} tokens")


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """One call of :meth:`ContextParallel.attention`; ``options`` are the constructor's.

    Without ``seq_len``, ``cu_seqlens`` or a Mask the lengths are asked of the ranks: with
    ``sharding="contiguous"`` shards may then have any lengths. Building the object costs one header
    exchange and a plan; layers should keep a ContextParallel instead.
    """
    context = _context(
        group,
        options.pop("device", None),
        options.pop("transport", "auto"),
        options.pop("timeout_s", DEFAULT_TIMEOUT_S),
    )
    known = isinstance(options.get("mask"), Mask) or options.get("cu_seqlens") is not None
    if not known and options.get("seq_len") is None:
        lengths = ops.gather_lengths(context, q, k)
        options["seq_len"] = sum(a for a, _ in lengths)
        options["seq_len_k"] = sum(b for _, b in lengths)
        if options.get("sharding") == "contiguous":
            options["sharding"] = shardings.uneven(a for a, _ in lengths)
            options["sharding_k"] = shardings.uneven(b for _, b in lengths)
    cp = ContextParallel(context, **options)
    return cp.attention(q, k, v, scale=scale, sink=sink, return_lse=return_lse)


# ---- from what users write to masks and shardings -----------------------------------------------


def build_mask(
    mask: str | Mask,
    *,
    seq_len: int | None = None,
    seq_len_k: int | None = None,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    align: str = "top-left",
) -> Mask:
    """The mask that the arguments of :class:`ContextParallel` describe. ValueError when they
    conflict.
    """
    if isinstance(mask, Mask):
        extra = {
            "cu_seqlens": cu_seqlens is not None,
            "window": window is not None,
            "seq_len": seq_len not in (None, mask.seq_q),
            "seq_len_k": seq_len_k not in (None, mask.seq_k),
        }
        given = [name for name, there in extra.items() if there]
        if given:
            raise ValueError(
                f"a Mask over {mask.seq_q} x {mask.seq_k} is complete; it conflicts with {given}"
            )
        return mask
    if mask not in ("causal", "full"):
        raise ValueError(f"{mask=} is neither 'causal', 'full' nor a Mask")
    causal = mask == "causal"
    for name, length in (("seq_len", seq_len), ("seq_len_k", seq_len_k)):
        if not _is_count(length):
            raise ValueError(f"{name} must be a number of tokens, got {length!r}")
    sides = window if isinstance(window, tuple) else (window, None if not causal else 0)
    if len(sides) != 2 or not all(_is_count(side) for side in sides):
        raise ValueError(f"{window=} is neither a number of tokens nor (left, right)")
    left, right = sides
    if causal and right not in (0, None):
        raise ValueError(f"a causal window sees nothing to the right: {window=}")
    right = 0 if causal else right
    if cu_seqlens is not None:
        return masks.documents(
            packing.integers(cu_seqlens, "cu_seqlens"),
            None if cu_seqlens_k is None else packing.integers(cu_seqlens_k, "cu_seqlens_k"),
            causal=causal,
            left=left,
            right=None if causal else right,
            align=align,
            seq_q=seq_len,
            seq_k=seq_len_k,
        )
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens")
    if seq_len is None:
        raise ValueError("give seq_len, cu_seqlens or a Mask")
    if left is not None or (right is not None and not causal):
        return masks.window(seq_len, seq_len_k, left=left, right=right, align=align)
    return masks.causal(seq_len, seq_len_k, align) if causal else masks.full(seq_len, seq_len_k)


def _is_count(x: object) -> bool:
    """An integer (not a bool, which is one to Python), or None for one that is not given."""
    return x is None or (isinstance(x, int) and not isinstance(x, bool))


def build_sharding(sharding: str | Sharding, mask: Mask, world: int, side: str) -> Sharding:
    """The sharding called ``sharding`` of the queries ("q") or keys ("k") of ``mask``."""
    if isinstance(sharding, Sharding):
        return sharding
    return shardings.by_name(sharding, mask, world, side)


def _require_side(side: str) -> None:
    if side not in ("q", "k"):
        raise ValueError(f"{side=} is neither 'q' nor 'k'")


def _context(
    group: Group, device: torch.device | str | None, transport: str, timeout_s: float
) -> Context:
    if isinstance(group, Context):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a mesh of {group.ndim} dimensions {group.mesh_dim_names}: slice one, mesh['cp']"
            )
        group = group.get_group()
    return context_for(group, device=device, transport=transport, timeout_s=timeout_s)
