"""The mask that a command line describes.

Neither torch nor numpy: launch/show_plan.py runs without them.
"""

from __future__ import annotations

from typing import Protocol

from ringfa4 import mask as masks
from ringfa4.mask import Mask


class MaskOptions(Protocol):
    """What :func:`ringfa4.launch.options.add_mask_options` parses."""

    @property
    def mask(self) -> str: ...
    @property
    def window(self) -> int | None: ...
    @property
    def documents(self) -> tuple[int, ...] | None: ...
    @property
    def prefix(self) -> int | None: ...
    @property
    def chunk(self) -> int | None: ...


def build_mask(options: MaskOptions, seq_q: int, seq_k: int) -> Mask:
    """The mask that the options name. ValueError when it cannot lie over seq_q x seq_k."""
    if options.mask == "causal":
        return masks.causal(seq_q, seq_k)
    if options.mask == "full":
        return masks.full(seq_q, seq_k)
    if options.mask == "window":
        return masks.window(seq_q, seq_k, left=options.window)
    if seq_q != seq_k:
        raise ValueError(f"--mask {options.mask} needs as many keys as queries: {seq_q=}, {seq_k=}")
    if options.mask == "prefix":
        assert options.prefix is not None, "mask_name requires it"
        return masks.prefix_lm(seq_q, options.prefix)
    if options.mask == "chunked":
        assert options.chunk is not None, "mask_name requires it"
        return masks.chunked(seq_q, options.chunk)
    assert options.documents, "mask_name requires it"
    starts = document_starts(options.documents, seq_q)
    return masks.documents(starts, left=options.window, seq_q=seq_q)


def document_starts(documents: tuple[int, ...], seq: int) -> list[int]:
    """Cumulative lengths of ``--documents``: one number is how many, several are lengths."""
    if len(documents) > 1:
        starts = [0]
        for length in documents:
            starts.append(starts[-1] + length)
        return starts
    (count,) = documents
    if count < 1:
        raise ValueError(f"--documents {count}: there must be at least one")
    return [seq * i // count for i in range(count + 1)]
