"""Safetensors files as memory maps: rows of a shard in, rows of a shard out.

    file = 8 bytes: length n of the header, little-endian
           n bytes: JSON  name -> {dtype, shape, data_offsets: [begin, end)}
           data     row-major, little-endian, offsets counted from here

Maps because ranks read and write only their own tokens, strided ones too, of tensors that need not
fit in memory. All ranks write into one file, so they must see one file system.

Left out: dtypes that attention does not take, and metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ringfa4.shard import Shard

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100 << 20
"""The format's own limit."""


class TensorFile:
    """The tensors of an existing file, mapped when asked for. ValueError when it is not one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise ValueError(
                    f"{self.path} is not a safetensors file: "
                    f"a header of {length:,} bytes cannot be in {size:,}"
                )
            self._data = 8 + length
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise ValueError(f"{self.path} is not a safetensors file: {error}") from None
        header.pop("__metadata__", None)
        self._entries = {name: self._entry(name, entry, size) for name, entry in header.items()}

    def _entry(
        self, name: str, entry: dict[str, Any], size: int
    ) -> tuple[str, tuple[int, ...], int]:
        """(dtype name, shape, first byte in the file) of a header entry, within the file."""
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{self.path}: malformed entry for {name!r}: {entry}") from None
        wrong = dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize
        if wrong or min((0, *shape)) < 0 or not 0 <= begin <= end <= size - self._data:
            raise ValueError(f"{self.path}: {name!r} does not fit the file: {entry}, {size=}")
        return dtype, shape, self._data + begin

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """ValueError for dtypes that attention does not take."""
        dtype = self._entries[name][0]
        if dtype not in DTYPES:
            raise ValueError(f"{self.path}: {name!r} is {dtype}, none of {sorted(DTYPES)}")
        return DTYPES[dtype]

    def tensor(self, name: str, *, writable: bool = False) -> Tensor:
        """The whole tensor as a view of the file; writes go to the file only if ``writable``."""
        dtype, shape = self.dtype(name), self.shape(name)
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)  # nothing can be mapped
        mode: Literal["r+", "c"] = (
            "r+" if writable else "c"
        )  # "c": private pages, so that torch need not warn
        raw = np.memmap(self.path, np.uint8, mode, self._entries[name][2], (size,))
        return torch.from_numpy(raw).view(dtype).view(shape)

    def read(self, name: str, shard: Shard, dim: int = 1) -> Tensor:
        """A copy of the shard's rows along ``dim``, in local order."""
        rows = self.tensor(name).movedim(dim, 0)
        local = rows.new_empty(len(shard), *rows.shape[1:])
        for offset, chunk in zip(shard.offsets, shard.chunks, strict=False):
            where = chunk.positions()
            local[offset : offset + chunk.count] = rows[where.start : where.stop : where.step]
        return local.movedim(0, dim).contiguous()

    def write(self, name: str, shard: Shard, local: Tensor, dim: int = 1) -> None:
        """The shard's rows along ``dim`` into the file. Other ranks may write at the same time."""
        rows = self.tensor(name, writable=True).movedim(dim, 0)
        source = local.detach().movedim(dim, 0)
        for offset, chunk in zip(shard.offsets, shard.chunks, strict=False):
            where = chunk.positions()
            rows[where.start : where.stop : where.step] = source[offset : offset + chunk.count]


def create(path: str | Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """A file of zeros with these dtypes and shapes."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        offsets = [at, at + size]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data aligned to 8 bytes, as the format asks
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
