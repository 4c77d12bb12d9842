"""Tensor maps, matrix and instruction descriptors as the tests build them.

Written from the bit tables, not from the core: the core decodes what this encodes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

_CODES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "f16": 6, "f32": 7, "bf16": 10}
_BYTES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "f16": 2, "f32": 4, "bf16": 2}


def tensor_map(
    array: np.ndarray, kind: str, box: Sequence[int], swizzle: int = 0, fill_nan: bool = False
) -> bytes:
    """The 128 bytes for a C-contiguous array; `box` and dimension 0 are innermost first.

    swizzle: 0 none, 1, 2, 3 for spans of 32, 64, 128 bytes.
    """
    size = _BYTES[kind]
    sizes = array.shape[::-1]
    strides = [s * size // array.itemsize for s in array.strides[::-1]]
    rank = len(sizes)
    word = [0] * 32
    address = array.ctypes.data
    word[0], word[1] = address & 0xFFFFFFFF, address >> 32
    word[2] = (
        2 | (rank - 1) << 4 | _CODES[kind] << 7 | swizzle << 13 | int(fill_nan) << 15 | 2 << 17
    )
    for i in range(1, rank):
        word[2 + i] = strides[i] >> 4 & 0xFFFFFFFF
        word[7] |= (strides[i] >> 36) << (4 * (i - 1))
    for d in range(rank):
        word[8 + d] = sizes[d] - 1
    word[13] |= (box[0] - 1) << 24
    for d in range(1, rank):
        word[14] |= (box[d] - 1) << (8 * (d - 1))
    word[16:] = [0xDEADBEEF] * 16  # not part of the map
    return struct.pack("<32I", *word)


def swizzled(linear: np.ndarray, bits: int, start: int = 0) -> np.ndarray:
    """Bytes at their place in shared memory, for a tile whose address is `start` modulo 1024."""
    data = linear.reshape(-1).view(np.uint8)
    at = np.arange(data.size) + start
    moved = at ^ ((at >> 7 & ((1 << bits) - 1)) << 4)
    out = np.zeros_like(data)
    out[moved - start] = data
    return out


def descriptor(leading: int, stride: int, swizzle: int, sm100: bool = True) -> int:
    """A matrix descriptor with start address 0: the kernel adds `address >> 4`."""
    layout = (
        {0: 0, 1: 6, 2: 4, 3: 2}[swizzle] << 61
        if sm100
        else {0: 0, 1: 3, 2: 2, 3: 1}[swizzle] << 62
    )
    return leading >> 4 << 16 | stride >> 4 << 32 | (1 << 46 if sm100 else 0) | layout


def instruction(
    m: int, n: int, a: int = 0, b: int = 0, d: int = 1, mn_a: bool = False, mn_b: bool = False
) -> int:
    """An instruction descriptor of kinds f16 and f8f6f4; `a`, `b` are type codes."""
    word = d << 4 | a << 7 | b << 10 | int(mn_a) << 15 | int(mn_b) << 16
    return word | (n >> 3) << 17 | (m >> 4) << 24


def scaled_instruction(m: int, n: int, byte: int) -> int:
    """Of kind mxf8f6f4 with E4M3 operands: both scales in byte `byte` of their cells."""
    return byte << 4 | (n >> 3) << 17 | 1 << 23 | (m >> 7) << 27 | byte << 29
