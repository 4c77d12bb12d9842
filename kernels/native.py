"""Bands through a library's own attention call: what the CUDA kernels that wrap one have in common.

    forward:   (out, lse) of a band from one call; the state merges them
    backward:  the library's backward with the merged out and lse

A band of a task is one call over its box (neighbouring tasks whose union is a band are one call),
with the band as a sliding window: the libraries align a window bottom-right, row i of n sees the
keys i + m - n - left .. i + m - n + right of m, and a trimmed band always gives left >= 0 and right
>= 0 (:func:`window`). So causal and shifted diagonals, windows and packed documents need no mask
and no cutting, every row of a call sees at least one key, and K and V are strided views into the
records.

What the libraries do not do is done here, always without asking the device (no host
synchronisation):

- a row whose logits hold NaN comes back with lse = -inf or +inf, which the state would drop: it
  becomes NaN;
- rows with lse = -inf must have P = 0: they enter the backward pass as zeros with lse = +inf;
- a masked pair has P = 0, and 0 * NaN leaks. In calls with masked pairs, tokens that are not finite
  enter as zeros, and NaN is put where it belongs afterwards (inf counts as NaN there). Rectangles
  have no masked pairs and take K and V as they are.

That costs one copy of q, out and dout a backward call, and of K and V a call with masked pairs;
what is flagged is then changed in place, which reads flags only. With the fused kernels
(:mod:`ringfa4.fused`) the copy and the flags are one pass.

In fp16 the P of a merge over more than about 16K keys is subnormal, in these libraries as anywhere
else that rounds P to fp16: bf16 has no such limit.

Shapes as in :mod:`ringfa4.kernels.interface`: (b, n, h, d) and (b, h, n). Left out: softcap,
dropout, sinks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from ringfa4.fused import fused
from ringfa4.grads import Grads
from ringfa4.kernels.interface import BlockKernel, Queries
from ringfa4.kernels.nonfinite import broken, seen_by_keys, seen_by_queries
from ringfa4.kernels.pieces import boxes
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import State
from ringfa4.wire import EncodedShard


@dataclass(frozen=True)
class Rows:
    """Operands of some query rows in backward; ``dlse`` None is zero."""

    q: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None


class NativeQueries(Queries):
    """``q`` (b, s, heads_q, dk) for forward calls."""


class NativeBackward(Queries):
    """Own copies of q, out and dout, dead rows (lse = -inf) zeroed, and what is not finite in them.

    ``spoils`` flags the rows (b, heads_q, s) that make NaN of their dQ and of the dK of the keys
    they see, ``spoils_dv`` those that make NaN of the dV of those keys: dV has neither out nor dlse
    in it.
    """

    def __init__(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> None:
        dead = lse == -torch.inf
        self._copies = [guarded(x, dead, zero_found=False) for x in (q, out, dout)]
        (q, bad_q), (_, bad_out), (_, bad_dout) = self._copies
        super().__init__(q, shard)
        self._loud = lse.masked_fill(dead, torch.inf), _zeroed(dlse, dead)
        self.spoils_dv = bad_q | bad_dout | torch.isnan(lse)
        self.spoils = self.spoils_dv | bad_out
        if dlse is not None:
            self.spoils = self.spoils | (~torch.isfinite(dlse) & ~dead)
        self._quiet = False

    @cached_property
    def _silent(self) -> tuple[Tensor, Tensor | None]:
        """lse and dlse with which rows that are not finite have P = 0."""
        lse, dlse = self._loud
        return lse.masked_fill(self.spoils, torch.inf), _zeroed(dlse, self.spoils)

    def operands(self, batch: slice, rows: slice, *, quiet: bool) -> Rows:
        """Some rows; ``quiet``: those that are not finite are zeros with P = 0.

        The copies are changed in place, between zeros and NaN: the calls of a stream run in order.
        """
        if quiet != self._quiet:
            for x, bad in self._copies:
                fill_rows(x, bad, 0.0 if quiet else torch.nan)
            self._quiet = quiet
        lse, dlse = self._silent if quiet else self._loud
        q, out, dout = (x for x, _ in self._copies)
        if batch != slice(None) or rows != slice(0, q.shape[1]):
            q, out, dout = (x[batch, rows] for x in (q, out, dout))
            lse = lse[batch, :, rows]
            dlse = None if dlse is None else dlse[batch, :, rows]
        return Rows(q, out, dout, lse.contiguous(), None if dlse is None else dlse.contiguous())


@dataclass(frozen=True)
class Call:
    """One band between rows of the local tensors and keys that lie together in memory.

    ``row`` is the batch row (None: all), ``box`` the band with both sides starting at 0, ``keys``
    the chunk ranges (chunk, k0, k1) that k and v (b', m, heads_kv, d) hold, in order.
    """

    row: int | None
    rows: slice
    box: Band
    keys: tuple[tuple[int, int, int], ...]
    k: Tensor
    v: Tensor

    @property
    def batch(self) -> slice:
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    def queries(self, x: Tensor) -> Tensor:
        """Its rows of a local tensor (b, s, h, d)."""
        whole = self.row is None and self.rows == slice(0, x.shape[1])
        return x if whole else x[self.batch, self.rows]

    def part(self, piece: Band) -> Call:
        """What a band inside the box needs."""
        if piece == self.box:
            return self
        keys, at = [], 0
        for chunk, k0, k1 in self.keys:
            a, b = max(piece.k0 - at, 0), min(piece.k1 - at, k1 - k0)
            if a < b:
                keys.append((chunk, k0 + a, k0 + b))
            at += k1 - k0
        rows = slice(self.rows.start + piece.q0, self.rows.start + piece.q1)
        k, v = (x[:, piece.k0 : piece.k1] for x in (self.k, self.v))
        return Call(self.row, rows, piece.shifted(-piece.q0, -piece.k0), tuple(keys), k, v)


@dataclass(frozen=True, slots=True)
class _Outline:
    """A :class:`Call` without its tensors: what is the same whenever a step comes round."""

    row: int | None
    rows: slice
    box: Band
    keys: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, call: Call) -> _Outline:
        return cls(call.row, call.rows, call.box, call.keys)

    def filled(self, shard: EncodedShard) -> Call:
        """The call on the records of ``shard``."""
        k, v = shard.keys_values(*self.keys[0])
        if len(self.keys) > 1:  # they lie together in memory
            k, v = (
                x.as_strided((x.shape[0], self.box.k1, *x.shape[2:]), x.stride()) for x in (k, v)
            )
        if self.row is not None:
            k, v = k[self.row : self.row + 1], v[self.row : self.row + 1]
        return Call(self.row, self.rows, self.box, self.keys, k, v)


MOST_OUTLINES = 256
"""Steps that a kernel remembers the calls of: those of a call on 256 ranks."""


class _Outlines:
    """The calls of each step, found by which tasks, records and queries they are for.

    A plan gives the same objects in every call, and comparing what they hold would cost as much as
    the work saved. An entry keeps its objects, so that their ids are nobody else's; they are
    integers of the plan, no tensors.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[object, ...], tuple[object, list[_Outline]]] = OrderedDict()

    def find(self, of: tuple[object, ...], what: tuple[object, ...]) -> list[_Outline] | None:
        """Those of the objects ``of`` under the hashable circumstances ``what``, if kept."""
        found = self._found.get((*map(id, of), *what))
        return None if found is None else found[1]

    def keep(
        self, of: tuple[object, ...], what: tuple[object, ...], outlines: list[_Outline]
    ) -> None:
        self._found[(*map(id, of), *what)] = of, outlines
        if len(self._found) > MOST_OUTLINES:
            self._found.popitem(last=False)


def _joined(first: Call, second: Call) -> Call | None:
    """Both as one call, where their union is one band: fewer and larger calls, and fewer merges.

    Of one causal shard of two chunks this makes a single causal call; of a step that sees a whole
    chunk, a single rectangle.
    """
    if first.row != second.row or first.box.lo is not None or second.box.lo is not None:
        return None
    n1, n2, m1, m2 = first.box.q1, second.box.q1, first.box.k1, second.box.k1
    one, two = first.box.hi, second.box.hi
    if first.rows == second.rows and one is None:
        k, v = _beside(first.k, second.k), _beside(first.v, second.v)
        if k is None or v is None:
            return None
        box = Band(0, n1, 0, m1 + m2, None, None if two is None else two + m1)
        return Call(first.row, first.rows, box, first.keys + second.keys, k, v)
    if first.rows.stop != second.rows.start or second.keys[: len(first.keys)] != first.keys:
        return None
    rows = slice(first.rows.start, second.rows.stop)
    if one is None and two is None and m1 == m2:
        return Call(first.row, rows, Band(0, n1 + n2, 0, m1), first.keys, first.k, first.v)
    if one is not None and two == one + n1 and n1 + one <= m1:
        box = Band(0, n1 + n2, 0, m2, None, one)  # the diagonal goes on where the first one ends
        return Call(first.row, rows, box, second.keys, second.k, second.v)
    return None


def _beside(a: Tensor, b: Tensor) -> Tensor | None:
    """(b, m + m', h, d) over both, if b's tokens follow a's in memory."""
    end = a.data_ptr() + a.shape[1] * a.stride(1) * a.element_size()
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    if not same or a.stride() != b.stride() or end != b.data_ptr():
        return None
    shape = a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:]
    return a.as_strided(shape, a.stride(), a.storage_offset())


class NativeKernel(BlockKernel):
    """A kernel that computes one band per library call.

    ``most_elements``: of a tensor of one call, strides not counted; None: no limit.
    """

    most_elements: int | None = None

    writes_in_place: bool = False
    """Whether :meth:`differentiate` can be told where dK and dV go."""

    @abstractmethod
    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out (b, n, heads_q, dv) and lse (b, heads_q, n) fp32 of a band that starts at (0, 0)."""

    @abstractmethod
    def differentiate(
        self,
        box: Band,
        scale: float,
        rows: Rows,
        k: Tensor,
        v: Tensor,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV of a band that starts at (0, 0), in any dtype.

        ``into``: where dK and dV, of the shapes of k and v, are to be; then it is these that are
        returned. Never given unless :attr:`writes_in_place`.
        """

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """bf16, as the libraries return them, for bf16. fp16 lacks the range: a step may add up
        several results of up to 65504.
        """
        return dtype if dtype == torch.bfloat16 else super().gradient_dtype(dtype)

    def cut(self, band: Band) -> Iterator[Band]:
        """Disjoint trimmed bands whose union is ``band`` (which starts at (0, 0)), each a call."""
        yield band

    def prepare(self, q: Tensor, shard: Shard) -> NativeQueries:
        return NativeQueries(aligned(q), shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> NativeBackward:
        return NativeBackward(q, shard, out.to(q.dtype), dout.to(q.dtype), lse, dlse)

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        for call in self._calls(queries, shard, tasks):
            q, k, v = call.queries(queries.q), call.k, call.v
            if masks_pairs(call.box):
                v, bad = guarded(v, None, zero_found=True)
                out, lse = self.attend(call.box, scale, q, aligned(k), v)
                fill_rows(out, seen_by_queries(call.box, bad, q.shape[2]), torch.nan)
            else:
                out, lse = self.attend(call.box, scale, q, aligned(k), aligned(v))
            # Every row sees a key, so an infinite lse is what the library makes of NaN.
            torch.nan_to_num_(lse, nan=torch.nan, posinf=torch.nan, neginf=torch.nan)
            state.merge(call.row, call.rows, out, lse)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, NativeBackward)
        for call in self._calls(queries, shard, tasks):
            batch, rows, box, k, v = call.batch, call.rows, call.box, call.k, call.v
            own = queries.operands(batch, rows, quiet=masks_pairs(box))
            place = grads.place_dkv(call.row, call.keys, k.dtype) if self.writes_in_place else None
            more = () if place is None else (place,)
            if masks_pairs(box):
                k, bad_k = guarded(k, None, zero_found=True)
                v, _ = guarded(v, None, zero_found=True)  # who sees such a V has an out like it
                dq, dk, dv = results = self.differentiate(box, scale, own, k, v, *more)
                spoils = queries.spoils[batch, :, rows], queries.spoils_dv[batch, :, rows]
                _spoil(box, results, spoils, bad_k)
            else:
                dq, dk, dv = self.differentiate(box, scale, own, aligned(k), aligned(v), *more)
            grads.add_dq(call.row, rows, dq)
            if place is None:
                grads.add_dkv_of(call.row, call.keys, dk, dv)

    @cached_property
    def _outlines(self) -> _Outlines:
        return _Outlines()

    def _calls(
        self, queries: Queries, shard: EncodedShard, tasks: Sequence[Task]
    ) -> Iterator[Call]:
        """The calls that compute ``tasks``: neighbours joined where they are one band, then cut."""
        of, g = (tasks, shard.map, queries.shard), shard.geometry
        what = shard.wire, g.batch, g.dk, g.dv, queries.q.shape[2], self.most_elements
        outlines = self._outlines.find(of, what)
        if outlines is not None:
            for outline in outlines:
                yield outline.filled(shard)
            return
        calls = list(self._parts(self._wholes(queries, shard, tasks), queries.q))
        self._outlines.keep(of, what, [_Outline.of(call) for call in calls])
        yield from calls

    def _wholes(self, queries: Queries, shard: EncodedShard, tasks: Sequence[Task]) -> list[Call]:
        """A call a band, neighbours joined."""
        joined: list[Call] = []
        for task in tasks:
            batch = slice(None) if task.batch is None else slice(task.batch, task.batch + 1)
            for whole in task.bands:
                band = whole.trimmed()
                if band is None:
                    continue
                keys = task.k_chunk, band.k0, band.k1
                k, v = (x[batch] for x in shard.keys_values(*keys))
                rows = queries.rows(task.q_chunk, band.q0, band.q1)
                box = band.shifted(-band.q0, -band.k0)
                call: Call | None = Call(task.batch, rows, box, (keys,), k, v)
                while joined and call is not None:
                    both = _joined(joined[-1], call)
                    if both is None:
                        break
                    joined.pop()
                    call = both
                assert call is not None
                joined.append(call)
        return joined

    def _parts(self, wholes: Sequence[Call], q: Tensor) -> Iterator[Call]:
        """What is given to the library."""
        for whole in wholes:
            for call in self._sized(whole, q):
                for piece in self.cut(call.box):
                    yield call.part(piece)

    def _sized(self, call: Call, q: Tensor) -> Iterator[Call]:
        """Parts of a call whose tensors have at most ``most_elements``."""
        batch, token = call.k.shape[0], q.shape[2] * max(q.shape[-1], call.v.shape[-1])
        side = max(call.box.q1, call.box.k1)
        if self.most_elements is None or batch * side * token <= self.most_elements:
            yield call
        elif batch > 1:
            for row in range(batch):
                own = slice(row, row + 1)
                yield from self._sized(replace(call, row=row, k=call.k[own], v=call.v[own]), q)
        else:
            for box in boxes(call.box, self.most_elements // token):
                yield call.part(box)


def _spoil(
    box: Band,
    results: tuple[Tensor, Tensor, Tensor],
    spoils: tuple[Tensor, Tensor],
    bad_k: Tensor,
) -> None:
    """NaN into dQ, dK, dV of a call with masked pairs, where they depend on what became zeros."""
    dq, dk, dv = results
    heads_q, heads_kv = dq.shape[2], dk.shape[2]
    seen = seen_by_queries(box, bad_k, heads_q)
    for_dk, for_dv = spoils[0] | seen, spoils[1] | seen
    fill_rows(dq, for_dk, torch.nan)
    fill_rows(dk, seen_by_keys(box, for_dk, heads_kv), torch.nan)
    fill_rows(dv, seen_by_keys(box, for_dv, heads_kv), torch.nan)


def guarded(x: Tensor, dead: Tensor | None, *, zero_found: bool) -> tuple[Tensor, Tensor]:
    """A contiguous copy of x (b, n, h, d), and flags (b, h, n) of rows that are not finite.

    Rows flagged in ``dead`` are zeroed and never found; with ``zero_found`` those found are zeroed.
    """
    kernels = fused(x.device)
    if kernels is not None and kernels.takes(x):
        copy, found = kernels.guard(x, dead, zero_found=zero_found)
        return copy, found
    found = broken(x.transpose(1, 2))
    if dead is not None:
        found = found & ~dead
    copy = x.clone(memory_format=torch.contiguous_format)
    for flags in (dead, found if zero_found else None):
        if flags is not None:
            copy.masked_fill_(flags.transpose(1, 2).unsqueeze(-1), 0)
    return copy, found


def fill_rows(x: Tensor, flags: Tensor, value: float) -> None:
    """``value`` (0 or NaN) into the rows of x (b, n, h, d) that flags (b, h, n) name, in place."""
    kernels = fused(x.device)
    if kernels is not None and kernels.takes(x):
        kernels.fill_rows(x, flags, value)
    else:
        x.masked_fill_(flags.transpose(1, 2).unsqueeze(-1), value)


def _zeroed(x: Tensor | None, where: Tensor) -> Tensor | None:
    return None if x is None else x.masked_fill(where, 0)


def masks_pairs(box: Band) -> bool:
    """Whether some pair of the box is outside the band."""
    return box.lo is not None or box.hi is not None


def window(box: Band) -> tuple[int | None, int | None]:
    """(left, right) of a trimmed band at (0, 0) around the bottom-right diagonal; None is
    unbounded.
    """
    assert box == box.trimmed() and (box.q0, box.k0) == (0, 0), box
    diagonal = box.k1 - box.q1
    left = None if box.lo is None else diagonal - box.lo
    right = None if box.hi is None else box.hi - diagonal
    assert (left is None or left >= 0) and (right is None or right >= 0), box
    return left, right


def is_aligned(x: Tensor) -> bool:
    """Whether the rows of ``x`` can be read or written 16 bytes at a time."""
    *outer, last = x.stride()
    bits = x.data_ptr()
    for stride in outer:
        bits |= stride * x.itemsize  # of a power of two all are multiples, or a low bit is set
    return last == 1 and not bits % 16


def aligned(x: Tensor) -> Tensor:
    """``x`` if its rows can be read 16 bytes at a time, else a contiguous copy."""
    return x if is_aligned(x) else x.contiguous()


def narrowed(x: Tensor, width: int) -> Tensor:
    """(..., width) of what was :func:`padded`."""
    return x if x.shape[-1] == width else x[..., :width]


def padded(x: Tensor, width: int) -> Tensor:
    """(..., width) whose rows can be read 16 bytes at a time: zeros follow what x has."""
    missing = width - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing else aligned(x)
