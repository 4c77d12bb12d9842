"""A launch of the SM100 kernel, read from its arguments and tables in NumPy: no DSL, no GPU.

It takes what the kernel takes (addresses, offsets, tables) and does what the kernel does, rounding
where it rounds, one head of one tile and record at a time: so it proves the host side by itself,
and says in 150 lines what the device code computes. Bytes are found by the formulas of the
documentation, not by the functions that wrote them.

    X = c Q K^T,  c = |scale| log2 e;   E = ceil(max X over a block of 32 keys)
    P = E4M3(2^(X - E + 8)),  E8M0 code E - reference + 119
    O += P V,  sum += 2^(E - 8 - reference) 2^(X - E + 8)

What the host promises is asserted: alignment, tables within bounds, a key for each row with a mode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from ringfa4.kernels.sm100.launch import Arguments
from ringfa4.kernels.sm100.specs import LEAVE, MERGE, ROWS, WRITE, ForwardSpec
from ringfa4.mx.formats import E4M3

LOG2_E = np.float32(np.log2(np.e))
LAG = 8
"""By how much ceil(max X) of a row may exceed its reference before the reference moves."""

Array = np.ndarray


class EmulatedLauncher:
    """Stands in for the GPU; ``launches`` keeps what it was given."""

    def __init__(self, multiprocessors: int = 3, arch: str = "sm_100a") -> None:
        self._multiprocessors, self._arch = multiprocessors, arch
        self.launches: list[tuple[ForwardSpec, Arguments]] = []

    def missing(self) -> str | None:
        return None

    def multiprocessors(self, device: torch.device) -> int:
        return self._multiprocessors

    def arch(self, device: torch.device) -> str:
        return self._arch

    def __call__(self, spec: ForwardSpec, device: torch.device, arguments: Arguments) -> None:
        self.launches.append((spec, arguments))
        launch(spec, arguments)


def memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Array:
    """An array over raw memory."""
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return np.ndarray(shape, dtype, buffer, strides=strides)


def table(address: int, lines: int) -> Array:
    return memory(address, (lines, 8), (32, 4), "i4")


VALUES = np.array(E4M3.values, dtype=np.float32)


def scales(address: int, rows: int, blocks: int) -> Array:
    """2^(code - 127) of (rows, blocks), from atoms of 128 rows x 4 blocks."""
    across = -(-blocks // 4)
    row, block = np.arange(rows)[:, None], np.arange(blocks)[None]
    atom = row // 128 * across + block // 4
    at = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    codes = memory(address, (-(-rows // 128) * across * 512,), (1,), "u1")[at]
    assert (codes != 255).all(), "no scale that a kernel reads is NaN"
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127)


def matrix(payload: int, scale: int, rows: int, columns: int) -> Array:
    """(rows, columns) fp32 with a scale for each 32 columns."""
    assert payload % 16 == scale % 16 == 0, (payload, scale)
    values = VALUES[memory(payload, (rows, columns), (columns, 1), "u1")]
    return values * np.repeat(scales(scale, rows, columns // 32), 32, 1)


def to_e4m3(x: Array) -> Array:
    return torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()


def launch(spec: ForwardSpec, a: Arguments) -> None:
    """All works; a cluster's are those with its number modulo all clusters', so order is free."""
    assert a.q_records % 16 == a.q_record_bytes % 128 == a.kv_records % 16 == 0
    assert a.items % 16 == a.segments % 16 == 0
    clusters, rest = divmod(a.ctas, spec.ctas)
    assert rest == 0 < clusters <= a.n_items * a.heads_q, (a.ctas, spec)
    items = table(a.items, a.n_items).tolist()
    records = [(item[0], item[1] + n) for item in items for n in range(-(-item[5] // ROWS))]
    assert len(set(records)) == len(records), "a record of queries belongs to one item"
    for item in items:
        for head in range(a.heads_q):
            for number in range(-(-item[5] // ROWS)):
                with np.errstate(invalid="ignore"):  # -inf - -inf, in lanes that are not used
                    compute(spec, a, item, number, head)


def compute(spec: ForwardSpec, a: Arguments, item: list[int], number: int, head: int) -> None:
    """The ``number``-th record of an item's queries: tile number // ctas of block number % ctas."""
    batch, q_record, tiles, row, first, rows, seg0, seg1 = item
    assert 0 <= batch < a.batch and 0 <= q_record + number < a.n_q_records
    assert first % ROWS == 0 < tiles <= 2
    assert ROWS * spec.ctas * (tiles - 1) < rows <= ROWS * spec.ctas * tiles
    row, first, rows = row + ROWS * number, first + ROWS * number, min(ROWS, rows - ROWS * number)
    heads = batch * a.heads_q + head
    base = a.q_records + (q_record + number) * a.q_record_bytes
    atoms = -(-spec.dk // 128) * 512
    q = matrix(
        base + a.q_payload + heads * ROWS * spec.dk,
        base + a.q_scales + heads * atoms,
        ROWS,
        spec.dk,
    )
    if a.scale < 0:
        q = -q
    softmax = Softmax(np.float32(abs(a.scale)) * LOG2_E, spec.dv)
    for record, low, high in records(a, first, rows, seg0, seg1):
        assert 0 <= record < a.n_kv_records, (record, a.n_kv_records)
        kv_head = batch * a.heads_kv + head // (a.heads_q // a.heads_kv)
        base = a.kv_records + record * a.kv_record_bytes
        k = matrix(
            base + a.k_payload + kv_head * ROWS * spec.dk,
            base + a.k_scales + kv_head * atoms,
            ROWS,
            spec.dk,
        )
        v = matrix(
            base + a.v_payload + kv_head * ROWS * spec.dv,
            base + a.v_scales + kv_head * -(-spec.dv // 128) * 512,
            spec.dv,
            ROWS,
        ).T
        keys = np.arange(ROWS)[None]
        softmax.add(q @ k.T, (low[:, None] <= keys) & (keys < high[:, None]), v)
    epilogue(a, spec.dv, batch, row, head, rows, softmax)


def records(
    a: Arguments, first: int, rows: int, seg0: int, seg1: int
) -> Iterator[tuple[int, Array, Array]]:
    """Records that the rows see, in order: (packed record, each row's first token, one past its
    last); rows past the end of the chunk see nothing.
    """
    i = first + np.arange(ROWS)
    segments = table(a.segments + 32 * seg0, seg1 - seg0)
    for record, q0, q1, k0, k1, lo, hi, _ in segments.tolist():
        here = (q0 <= i) & (i < q1) & (i < first + rows)
        low = np.where(here, np.maximum(k0, i + lo), 0)
        high = np.where(here, np.minimum(k1, i + hi + 1), 0)
        here &= low < high
        if not here.any():
            continue  # a segment of the item's other tile
        for j in range(low[here].min() // ROWS, (high[here].max() - 1) // ROWS + 1):
            yield record + j, np.where(here, low - ROWS * j, 0), np.where(here, high - ROWS * j, 0)


class Softmax:
    """The rows of a tile: reference, sum (ROWS,), O (ROWS, dv)."""

    def __init__(self, c: np.float32, dv: int) -> None:
        self.c = c
        self.reference = np.full(ROWS, -np.inf, np.float32)
        self.sum = np.zeros(ROWS, np.float32)
        self.out = np.zeros((ROWS, dv), np.float32)

    def add(self, s: Array, allowed: Array, v: Array) -> None:
        """Logits s (ROWS, 128) before the scale, v (128, dv)."""
        x = np.where(allowed, s * self.c, np.float32(-np.inf))
        top = np.ceil(x.reshape(ROWS, 4, 32).max(-1))
        peak = top.max(-1)
        moves = ~(peak <= self.reference + LAG)  # also where it is NaN
        moves &= peak != -np.inf
        new = np.where(moves, peak, self.reference)
        factor = np.where(moves, np.exp2(self.reference - new), np.float32(1))
        factor = np.where(self.reference == -np.inf, np.float32(0), factor)
        self.sum, self.out = self.sum * factor, self.out * factor[:, None]
        self.reference = new
        safe = np.where(new == -np.inf, np.float32(0), new)
        top = np.maximum(top, safe[:, None] - 119)
        p = np.exp2(x - np.repeat(top, 32, 1) + 8)
        weight = np.exp2(top - 8 - safe[:, None])
        self.sum += (p.reshape(ROWS, 4, 32).sum(-1) * weight).sum(-1, dtype=np.float32)
        # A NaN of V reaches the rows that see it: 0 * NaN is 0 where a pair is not allowed.
        bad = np.isnan(v)
        seen = allowed.astype(np.float32) @ bad.astype(np.float32) > 0
        product = (to_e4m3(p) * np.repeat(weight, 32, 1)) @ np.where(bad, np.float32(0), v)
        self.out += np.where(seen, np.float32(np.nan), product)


def epilogue(
    a: Arguments, dv: int, batch: int, row: int, head: int, rows: int, softmax: Softmax
) -> None:
    """Each row as its mode says; ringfa4.state's algebra."""
    modes = memory(a.modes + batch * a.modes_row + row, (rows,), (1,), "u1")
    assert set(modes.tolist()) <= {LEAVE, WRITE, MERGE}
    at = batch * a.acc_b + row * a.acc_s + head * dv * 4
    acc = memory(a.acc + at, (rows, dv), (a.acc_s, 4), "f4")
    at = batch * a.row_b + head * a.row_h + row * 4
    max, sum = (memory(x + at, (rows,), (4,), "f4") for x in (a.max, a.sum))
    top = softmax.reference[:rows] / LOG2_E
    out, total = softmax.out[:rows], softmax.sum[:rows]
    assert ((top != -np.inf) | (modes == LEAVE)).all(), "a row with a mode sees a key"
    write, merge = modes == WRITE, modes == MERGE
    acc[write], max[write], sum[write] = out[write], top[write], total[write]
    new = np.maximum(max[merge], top[merge])
    old, own = np.exp(max[merge] - new), np.exp(top[merge] - new)
    acc[merge] = acc[merge] * old[:, None] + out[merge] * own[:, None]
    sum[merge] = sum[merge] * old + total[merge] * own
    max[merge] = new
