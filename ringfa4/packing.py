"""Packed documents: from the layouts that training code has to masks, positions and labels.

    thd, packed     x (t, h, d), document n at [cu[n], cu[n + 1])            cu = cu_seqlens
    thd, padded     x (t, h, d), document n at [start[n], start[n] + length[n]); the rest is padding
    bshd            (1, t, h, d): what attention takes; a view of thd

A padded tensor needs no copy: :func:`padded_documents` makes a mask in which padding sees nothing
and is seen by nothing. :func:`remove_padding` and :func:`add_padding` convert where memory matters.

Positions within documents and shifted labels follow the documents of a :class:`ringfa4.mask.Mask`
(``q_starts``, ``starts``), whoever made it. What is padding counts as a document of its own.

Left out: rows of different lengths as nested tensors; pack them, or ``mask.stack`` one mask a row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ringfa4.mask import Band, Mask, documents

IGNORE = -100
"""The label that torch's cross entropy ignores by default."""


def integers(values: Iterable[int] | Tensor, name: str) -> list[int]:
    """``values`` as Python integers, from a 1-D tensor or anything that iterates over integers.

    ValueError, which names ``name``, for anything else.
    """
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point():
            raise ValueError(
                f"{name} must be one-dimensional and hold integers, "
                f"got {values.dtype} of shape {tuple(values.shape)}"
            )
        values = values.tolist()
    try:
        return [operator.index(x) for x in values]
    except TypeError:
        raise ValueError(f"{name} must be a sequence of integers, got {values!r:.80}") from None


def cu_seqlens(lengths: Sequence[int] | Tensor) -> list[int]:
    """Cumulative lengths from lengths: [3, 0, 5] -> [0, 3, 3, 8]."""
    sizes = integers(lengths, "lengths")
    if any(n < 0 for n in sizes):
        raise ValueError(f"a document has a length >= 0, got {min(sizes)}")
    return [0, *accumulate(sizes)]


def padded_documents(
    starts: Sequence[int] | Tensor,
    lengths: Sequence[int] | Tensor,
    *,
    seq_len: int | None = None,
    causal: bool = True,
    left: int | None = None,
) -> Mask:
    """Self-attention inside documents that lie at ``starts`` with padding behind them.

    ``starts`` may have one entry more than ``lengths`` (a padded ``cu_seqlens``): its last is then
    the tensor's length. Else ``seq_len`` is, or the end of the last document.
    """
    begins, sizes = integers(starts, "starts"), integers(lengths, "lengths")
    if len(begins) == len(sizes) + 1:
        end = begins.pop()
        if seq_len not in (None, end):
            raise ValueError(f"{seq_len=} contradicts the last of starts, {end}")
        seq_len = end
    runs = list(_runs(begins, sizes, seq_len))
    seq = max([seq_len or 0, *(stop for _, stop in runs)])
    edges = sorted({0, seq, *(x for run in runs for x in run)})
    packed = documents(edges, causal=causal, left=left)
    inside = {start: stop for start, stop in runs if start < stop}
    bands: tuple[Band, ...] = tuple(b for b in packed.rows[0] if b.q0 in inside)
    return Mask(seq, seq, (bands,), packed.starts, "padded documents")


def _runs(begins: list[int], sizes: list[int], seq: int | None) -> Iterator[tuple[int, int]]:
    """[start, stop) of each document; they neither overlap nor leave [0, seq)."""
    if len(begins) != len(sizes):
        raise ValueError(
            f"{len(sizes)} lengths need as many starts (or one more), got {len(begins)}"
        )
    at = 0
    for n, (start, length) in enumerate(zip(begins, sizes, strict=True)):
        if length < 0 or start < at:
            raise ValueError(
                f"document {n} ({start=}, {length=}) must begin at or after {at}, "
                "where the one before it ends, and have a length >= 0"
            )
        at = start + length
        if seq is not None and at > seq:
            raise ValueError(f"document {n} ({start=}, {length=}) leaves a tensor of {seq} tokens")
        yield start, at


def to_bshd(x: Tensor) -> Tensor:
    """(t, h, d) -> (1, t, h, d), a view."""
    if x.dim() != 3:
        raise ValueError(f"a packed tensor is (t, h, d), got shape {tuple(x.shape)}")
    return x.unsqueeze(0)


def to_thd(x: Tensor) -> Tensor:
    """(1, t, h, d) -> (t, h, d), a view."""
    if x.dim() != 4 or x.shape[0] != 1:
        raise ValueError(f"expected (1, t, h, d), got shape {tuple(x.shape)}")
    return x.squeeze(0)


def remove_padding(
    x: Tensor, starts: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor, dim: int = 0
) -> Tensor:
    """The documents' tokens one after another along ``dim``; ``cu_seqlens(lengths)`` finds them."""
    return x.index_select(dim, _valid(starts, lengths, x.shape[dim]).to(x.device))


def add_padding(
    x: Tensor,
    starts: Sequence[int] | Tensor,
    lengths: Sequence[int] | Tensor,
    seq_len: int,
    dim: int = 0,
) -> Tensor:
    """The inverse of :func:`remove_padding` into ``seq_len`` tokens; padding is 0."""
    index = _valid(starts, lengths, seq_len)
    if x.shape[dim] != len(index):
        raise ValueError(f"the documents hold {len(index)} tokens, x has {x.shape[dim]} in {dim=}")
    shape = list(x.shape)
    shape[dim] = seq_len
    return x.new_zeros(shape).index_copy(dim, index.to(x.device), x)


def _valid(starts: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor, seq: int) -> Tensor:
    """Positions of the documents' tokens, ascending."""
    begins, sizes = integers(starts, "starts"), integers(lengths, "lengths")
    if len(begins) == len(sizes) + 1:
        begins.pop()
    runs = [torch.arange(start, stop) for start, stop in _runs(begins, sizes, seq)]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def position_ids(mask: Mask, positions: Tensor, *, side: str = "q") -> Tensor:
    """(mask rows, s): how far each of ``positions`` (s,) is from the start of its document."""
    rows = []
    for starts in mask.q_starts if side == "q" else mask.starts:
        begins = torch.tensor([0, *starts], dtype=positions.dtype, device=positions.device)
        # Shifts by the last start at or before each position.
        rows.append(positions - begins[torch.searchsorted(begins, positions, right=True) - 1])
    return torch.stack(rows)


def shift_labels(labels: Tensor, mask: Mask, *, ignore_index: int = IGNORE) -> Tensor:
    """(..., seq) -> (..., seq): each token's label is the next token of its document.

    The last token of each document gets ``ignore_index``. ``labels`` is whole, before sharding: a
    shard's own last label is another rank's first token.
    """
    if labels.dim() == 0 or labels.shape[-1] != mask.seq_q:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} should hold all {mask.seq_q} tokens last"
        )
    if mask.batch > 1 and (labels.dim() != 2 or labels.shape[0] != mask.batch):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit a mask of {mask.batch} batch rows"
        )
    ends = torch.full_like(labels[..., :1], ignore_index)
    shifted = torch.cat([labels[..., 1:], ends], -1)[..., : mask.seq_q]
    for row, starts in enumerate(mask.q_starts):
        last = torch.tensor([start - 1 for start in starts], dtype=torch.int64)
        own = shifted if mask.batch == 1 else shifted[row]
        own.index_fill_(-1, last.to(labels.device), ignore_index)
    return shifted
