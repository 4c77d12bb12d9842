"""Where scales lie: linear, or in the 128 x 4 atoms that tensor cores read.

Linear, for a block shape over (rows, cols): (..., rows / shape.rows, cols / shape.cols), as
quantise gives them. Operand scales: one E8M0 per non-contracted index and 32 contracted ones,

    along d    (tokens, d / 32)      K in Q K^T, Q, dO in dO V^T, V there
    along seq  (d, tokens / 32)      V in P V, K in dS K, Q and dO in backward

each (M, B) matrix in ceil(M / 128) * ceil(B / 4) atoms of 512 bytes, atom (m, b) at (m * ceil(B /
4) + b) * 512; what is outside the matrix is the neutral 127. Tiles give both from the same
exponents: along d repeats a tile's scale over 32 tokens, along seq over 32 columns.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

from ringfa4.mx.formats import ATOM, BLOCK, E8M0, BlockShape

Axis = Literal["d", "seq"]
"""The contracted axis of an operand."""


def operand_scales(scales: Tensor, shape: BlockShape, along: Axis) -> Tensor:
    """Linear scales of a block shape -> operand scales (..., M, B), M tokens or columns of d.

    The shape must keep 32 elements of ``along`` together: 1 x 32 has no scales along the sequence.
    """
    if along == "d":
        assert shape.cols == BLOCK, (shape, along)
        return scales.repeat_interleave(shape.rows, -2)
    assert shape.rows == BLOCK, (shape, along)
    return scales.repeat_interleave(shape.cols, -1).transpose(-2, -1)


def atoms(rows: int, blocks: int) -> int:
    """Atoms that hold (rows, blocks) scales."""
    return -(-rows // ATOM.rows) * -(-blocks // ATOM.blocks)


def to_atoms(scales: Tensor) -> Tensor:
    """(..., M, B) -> uint8 (..., atoms * 512), padded with the neutral scale."""
    rows, blocks = scales.shape[-2:]
    full = pad(scales, (0, -blocks % ATOM.blocks, 0, -rows % ATOM.rows), value=E8M0.neutral)
    # row = ((m * 4) + quarter) * 32 + lane, block = b * 4 + byte  ->  (m, b, lane, quarter, byte)
    split: Tensor = full.unflatten(-1, (-1, ATOM.blocks)).unflatten(-3, (-1, 4, 32))
    *lead, m, quarter, lane, b, byte = range(split.ndim)
    return split.permute(*lead, m, b, lane, quarter, byte).flatten(-5)


def from_atoms(data: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of :func:`to_atoms`: uint8 (..., atoms * 512) -> (..., rows, blocks)."""
    across = -(-blocks // ATOM.blocks)
    split: Tensor = data.unflatten(-1, (-1, across, 32, 4, ATOM.blocks))
    *lead, m, b, lane, quarter, byte = range(split.ndim)
    full = split.permute(*lead, m, quarter, lane, b, byte).flatten(-5, -3).flatten(-2)
    return full[..., :rows, :blocks]
