"""Bands through a library's own attention call: what the CUDA kernels that wrap one have in common.

    forward:   (out, lse) of a band from one call; the state merges them
    backward:  the library's backward with the merged out and lse

A band of a task is one call over its box, with the band as a sliding window: the libraries align a
window bottom-right, row i of n sees the keys i + m - n - left .. i + m - n + right of m, and a
trimmed band always gives left >= 0 and right >= 0 (:func:`window`). So causal and shifted
diagonals, windows and packed documents need no mask and no cutting, every row of a call sees at
least one key, and K and V are strided views into the records.

What the libraries do not do is done here, always without asking the device (no host
synchronisation):

- a row whose logits hold NaN comes back with lse = -inf or +inf, which the state would drop: it
  becomes NaN;
- rows with lse = -inf must have P = 0: they enter the backward pass as zeros with lse = +inf;
- a masked pair has P = 0, and 0 * NaN leaks. In calls with masked pairs, tokens that are not finite
  enter as zeros and :mod:`ringfa4.kernels.nonfinite` puts NaN where it belongs afterwards (inf
  counts as NaN there). Rectangles have no masked pairs and pay nothing.

Shapes as in :mod:`ringfa4.kernels.interface`: (b, n, h, d) and (b, h, n). Left out: softcap,
dropout, sinks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringfa4.kernels.interface import BlockKernel, Queries
from ringfa4.kernels.nonfinite import broken, seen_by_keys, seen_by_queries, spoil, zeroed
from ringfa4.mask import Band
from ringfa4.plan import Task
from ringfa4.shard import Shard
from ringfa4.state import Grads, State
from ringfa4.wire import EncodedShard


@dataclass(frozen=True)
class Rows:
    """Operands of some query rows in backward; ``dlse`` None is zero."""

    q: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None

    def __getitem__(self, index: tuple[slice, slice]) -> Rows:
        """Batch rows and query rows."""
        batch, rows = index
        return Rows(
            *(x[batch, rows] for x in (self.q, self.out, self.dout)),
            self.lse[batch, :, rows].contiguous(),
            None if self.dlse is None else self.dlse[batch, :, rows].contiguous(),
        )

    def silenced(self, where: Tensor) -> Rows:
        """The flagged rows (b, h, n) as zeros with P = 0."""
        return Rows(
            *(_masked(x, where) for x in (self.q, self.out, self.dout)),
            self.lse.masked_fill(where, torch.inf),
            None if self.dlse is None else self.dlse.masked_fill(where, 0),
        )


class NativeQueries(Queries):
    """``rows`` is set in backward; dead rows (lse = -inf) are silent in it."""

    rows_of_call: Rows

    @cached_property
    def isolated(self) -> tuple[Rows, Tensor, Tensor]:
        """The rows, silent where not finite; flags of those that spoil dQ and dK, and dV.

        Made when the first call with masked pairs needs it. dV has neither out nor dlse in it.
        """
        rows = self.rows_of_call
        bad = _broken(rows.q) | _broken(rows.dout) | torch.isnan(rows.lse)
        for_dv = bad
        bad = bad | _broken(rows.out)
        if rows.dlse is not None:
            bad = bad | ~torch.isfinite(rows.dlse)
        return rows.silenced(bad), bad, for_dv


class NativeKernel(BlockKernel):
    """A kernel that computes one band per library call."""

    @abstractmethod
    def attend(
        self, box: Band, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out (b, n, heads_q, dv) and lse (b, heads_q, n) fp32 of a band that starts at (0, 0)."""

    @abstractmethod
    def differentiate(
        self, box: Band, scale: float, rows: Rows, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV of a band that starts at (0, 0), in any dtype."""

    def prepare(self, q: Tensor, shard: Shard) -> NativeQueries:
        return NativeQueries(aligned(q), shard)

    def prepare_backward(
        self, q: Tensor, shard: Shard, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> NativeQueries:
        queries = NativeQueries(q, shard)
        rows = Rows(q, out.to(q.dtype), dout.to(q.dtype), lse, dlse)
        queries.rows_of_call = rows.silenced(lse == -torch.inf)
        return queries

    def forward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        state: State,
    ) -> None:
        for task, band, batch, rows in _calls(queries, tasks):
            k, v = (x[batch] for x in shard.keys_values(task.k_chunk, band.k0, band.k1))
            box = band.shifted(-band.q0, -band.k0)
            bad = None
            if masks_pairs(box):
                bad = _broken(v)
                v = _masked(v, bad)
            q = queries.q[batch, rows]
            out, lse = self.attend(box, scale, q, aligned(k), aligned(v))
            lse = lse.masked_fill(torch.isinf(lse), torch.nan)  # every row sees a key
            if bad is not None:
                out = _spoilt(out, seen_by_queries(box, bad, q.shape[2]))
            state.merge(task.batch, rows, out, lse)

    def backward(
        self,
        queries: Queries,
        shard: EncodedShard,
        tasks: Sequence[Task],
        scale: float,
        grads: Grads,
    ) -> None:
        assert isinstance(queries, NativeQueries)
        for task, band, batch, rows in _calls(queries, tasks):
            k, v = (x[batch] for x in shard.keys_values(task.k_chunk, band.k0, band.k1))
            box = band.shifted(-band.q0, -band.k0)
            if masks_pairs(box):
                dq, dk, dv = self._isolated(queries, box, scale, batch, rows, k, v)
            else:
                operands = queries.rows_of_call[batch, rows]
                dq, dk, dv = self.differentiate(box, scale, operands, aligned(k), aligned(v))
            grads.add_dq(task.batch, rows, dq)
            grads.add_dkv(task.batch, task.k_chunk, band.k0, band.k1, dk, dv)

    def _isolated(
        self,
        queries: NativeQueries,
        box: Band,
        scale: float,
        batch: slice,
        rows: slice,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV of a call with masked pairs: NaN reaches exactly what depends on it."""
        call, *flags = queries.isolated
        for_dk, for_dv = (x[batch, :, rows] for x in flags)
        bad_k, bad_v = _broken(k), _broken(v)
        dq, dk, dv = self.differentiate(
            box, scale, call[batch, rows], _masked(k, bad_k), _masked(v, bad_v)
        )
        heads_q, heads_kv = call.q.shape[2], k.shape[2]
        seen_k, seen_v = (seen_by_queries(box, x, heads_q) for x in (bad_k, bad_v))
        for_dk, for_dv = for_dk | seen_k | seen_v, for_dv | seen_k
        return (
            _spoilt(dq, for_dk),
            _spoilt(dk, seen_by_keys(box, for_dk, heads_kv)),
            _spoilt(dv, seen_by_keys(box, for_dv, heads_kv)),
        )


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


def aligned(x: Tensor) -> Tensor:
    """``x`` if its rows can be read 16 bytes at a time, else a contiguous copy."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and not any(s % step for s in x.stride()[:-1])
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


def _calls(queries: Queries, tasks: Sequence[Task]) -> Iterator[tuple[Task, Band, slice, slice]]:
    """(task, trimmed band, its batch rows, its rows of the local tensors), in list order."""
    for task in tasks:
        batch = slice(None) if task.batch is None else slice(task.batch, task.batch + 1)
        for whole in task.bands:
            band = whole.trimmed()
            if band is not None:
                yield task, band, batch, queries.rows(task.q_chunk, band.q0, band.q1)


def _broken(x: Tensor) -> Tensor:
    return broken(x.transpose(1, 2))


def _masked(x: Tensor, where: Tensor) -> Tensor:
    return zeroed(x.transpose(1, 2), where).transpose(1, 2)


def _spoilt(x: Tensor, where: Tensor) -> Tensor:
    return spoil(x.transpose(1, 2), where).transpose(1, 2)
