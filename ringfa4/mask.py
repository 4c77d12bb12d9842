"""A mask is a set of disjoint bands.

    Band(q0, q1, k0, k1, lo, hi) = { (i, j) : q0 <= i < q1,  k0 <= j < k1,  lo <= j - i <= hi }

i is a query position, j a key position, both global; ``lo``/``hi`` = None means unbounded. Full,
causal, sliding window, packed documents, prefix-LM and chunked-local attention are unions of bands,
so one primitive serves the planner, the kernels and the FLOP count. Bands are closed under
intersection with boxes and under striping with equal strides; their areas have a closed form, hence
work and balance are exact integers.

Invariant: the bands of a :class:`Mask` are non-empty, trimmed, sorted and disjoint. So masks built
in different ways from the same bands are equal, and a bound that is there excludes something.

Left out on purpose: masks that are not unions of few bands (random sparsity, trees). Neither torch
nor numpy is imported here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _clamped_ramp(n: int, width: int) -> int:
    """Sum of min(m, width) for m = 1..n (0 when n <= 0)."""
    if n <= 0:
        return 0
    if n <= width:
        return n * (n + 1) // 2
    return width * (width + 1) // 2 + (n - width) * width


def _area_below(height: int, width: int, c: int) -> int:
    """Pairs (a, b) of a height x width box with b - a <= c; row a has clamp(a+c+1, 0, width)."""
    return _clamped_ramp(height + c, width) - _clamped_ramp(c, width)


def _sum_of(rows: range) -> int:
    return len(rows) * (rows[0] + rows[-1]) // 2 if rows else 0


def _sum_min(rows: range, offset: int, cap: int) -> int:
    """Sum of min(i + offset, cap) over ``rows`` (ascending)."""
    below = rows[: min(len(rows), max(0, _ceil_div(cap - offset - rows.start, rows.step)))]
    return _sum_of(below) + len(below) * offset + (len(rows) - len(below)) * cap


@dataclass(frozen=True, slots=True)
class Band:
    """All (i, j) with q0 <= i < q1, k0 <= j < k1 and lo <= j - i <= hi (None: unbounded)."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None

    def contains(self, i: int, j: int) -> bool:
        return (
            self.q0 <= i < self.q1
            and self.k0 <= j < self.k1
            and (self.lo is None or j - i >= self.lo)
            and (self.hi is None or j - i <= self.hi)
        )

    def keys_of(self, i: int) -> tuple[int, int]:
        """Half-open range of the keys that query ``i`` sees; (k0, k0) when there are none."""
        if not self.q0 <= i < self.q1:
            return self.k0, self.k0
        start = self.k0 if self.lo is None else max(self.k0, i + self.lo)
        stop = self.k1 if self.hi is None else min(self.k1, i + self.hi + 1)
        return (start, stop) if start < stop else (self.k0, self.k0)

    @property
    def area(self) -> int:
        """Number of (i, j) pairs, exactly."""
        height, width = self.q1 - self.q0, self.k1 - self.k0
        if height <= 0 or width <= 0:
            return 0
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            return 0
        skew = self.q0 - self.k0  # j - i <= hi  <=>  b - a <= hi + skew for offsets a, b in the box
        below = height * width if self.hi is None else _area_below(height, width, self.hi + skew)
        under = 0 if self.lo is None else _area_below(height, width, self.lo - 1 + skew)
        return below - under

    def rows_area(self, rows: range) -> int:
        """Number of pairs whose query is in ``rows`` (ascending, any step)."""
        if not rows:
            return 0
        band = self.within(rows[0], rows[-1] + 1, self.k0, self.k1)
        if band is None:
            return 0
        first = rows[0] + rows.step * _ceil_div(band.q0 - rows[0], rows.step)
        rows = range(first, band.q1, rows.step)
        # Every row of a trimmed band has min(k1, i + hi + 1) - max(k0, i + lo) keys.
        stops = len(rows) * band.k1 if band.hi is None else _sum_min(rows, band.hi + 1, band.k1)
        begins = len(rows) * band.k0
        if band.lo is not None:  # max(a, b) = a + b - min(a, b)
            begins += _sum_of(rows) + len(rows) * band.lo - _sum_min(rows, band.lo, band.k0)
        return stops - begins

    def within(self, q0: int, q1: int, k0: int, k1: int) -> Band | None:
        """Intersection with a box, trimmed; None when empty."""
        q0, q1 = max(self.q0, q0), min(self.q1, q1)
        k0, k1 = max(self.k0, k0), min(self.k1, k1)
        lo, hi = self.lo, self.hi
        if q0 >= q1 or k0 >= k1 or (lo is not None and hi is not None and lo > hi):
            return None
        # With lo <= hi, row i holds a key iff i + hi >= k0 and i + lo < k1, and column j a query
        # iff j - hi < q1 and j - lo >= q0: each side of the smallest box follows from the old box.
        rows, columns = (q0, q1), (k0, k1)
        if lo is not None:
            q1 = min(q1, columns[1] - lo)
            k0 = max(k0, rows[0] + lo)
        if hi is not None:
            q0 = max(q0, columns[0] - hi)
            k1 = min(k1, rows[1] + hi)
        if q0 >= q1 or k0 >= k1:
            return None
        if lo is not None and k0 - (q1 - 1) >= lo:
            lo = None
        if hi is not None and (k1 - 1) - q0 <= hi:
            hi = None
        return Band(q0, q1, k0, k1, lo, hi)

    def trimmed(self) -> Band | None:
        """The same pairs with the smallest box and no bound that binds nowhere; None when empty.

        Trimmed bands are equal exactly when they hold the same pairs.
        """
        return self.within(self.q0, self.q1, self.k0, self.k1)

    def shifted(self, dq: int, dk: int) -> Band:
        """The band with every query moved by ``dq`` and every key by ``dk``."""
        move = dk - dq
        return Band(
            self.q0 + dq,
            self.q1 + dq,
            self.k0 + dk,
            self.k1 + dk,
            None if self.lo is None else self.lo + move,
            None if self.hi is None else self.hi + move,
        )

    def strided(self, q_start: int, k_start: int, stride: int, k_stride: int | None = None) -> Band:
        """Rewrite in chunk coordinates i = q_start + stride * a, j = k_start + k_stride * b.

        ``k_stride`` None is ``stride``; another one leaves a band only when nothing bounds j - i.
        """
        k_stride = stride if k_stride is None else k_stride
        skew = k_start - q_start
        if stride != k_stride:
            assert self.lo is None and self.hi is None, f"{self} under {stride=}, {k_stride=}"
        return Band(
            _ceil_div(self.q0 - q_start, stride),
            _ceil_div(self.q1 - q_start, stride),
            _ceil_div(self.k0 - k_start, k_stride),
            _ceil_div(self.k1 - k_start, k_stride),
            None if self.lo is None else _ceil_div(self.lo - skew, stride),
            None if self.hi is None else (self.hi - skew) // stride,
        )


def _order(band: Band) -> tuple[int, int, int, int, bool, int, bool, int]:
    """Sort key of bands: by box, then by bounds, None first."""
    lo, hi = band.lo, band.hi
    return (band.q0, band.q1, band.k0, band.k1, lo is not None, lo or 0, hi is not None, hi or 0)


class Intervals:
    """Non-empty intervals [start, stop), indexed so that overlaps are found without trying all."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._ids = sorted(range(len(spans)), key=spans.__getitem__)
        self._starts = [spans[n][0] for n in self._ids]
        self._stops = [spans[n][1] for n in self._ids]
        self._reach = list(accumulate(self._stops, max))

    def touching(self, start: int, stop: int) -> list[int]:
        """Indices of the intervals that overlap [start, stop), by ascending start."""
        first = bisect_right(self._reach, start)  # all before it stop at or before `start`
        last = bisect_left(self._starts, stop)
        return [self._ids[n] for n in range(first, last) if self._stops[n] > start]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys each query sees, for every batch row.

    ``rows`` holds one tuple of disjoint bands shared by all batch rows, or one tuple per batch row.
    ``starts`` holds, like ``rows``, the key positions (0 left out) at which documents start; () is
    one document in every row. It adds no constraint (the bands do that), but wires that quantise
    tokens in groups keep documents apart by it (:func:`document_cuts`), and loss code its labels.
    ``q_starts`` is the same for queries; () is as ``starts`` where there are as many queries as
    keys, and else one document.

    Raises ValueError when a band leaves [0, seq_q) x [0, seq_k) or two bands of a row overlap.
    """

    seq_q: int
    seq_k: int
    rows: tuple[tuple[Band, ...], ...]
    starts: tuple[tuple[int, ...], ...] = ()
    name: str = field(default="bands", compare=False)
    q_starts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.seq_q < 0 or self.seq_k < 0:
            raise ValueError(
                f"sequence lengths must not be negative: seq_q={self.seq_q}, seq_k={self.seq_k}"
            )
        if not self.rows:
            raise ValueError("a mask needs at least one row of bands (it may be empty)")
        rows = tuple(self._checked(row, bands) for row, bands in enumerate(self.rows))
        one = ((),) * len(rows)
        starts = self.starts or one
        q_starts = self.q_starts or (starts if self.seq_q == self.seq_k else one)
        for sides, seq in ((starts, self.seq_k), (q_starts, self.seq_q)):
            _check_starts(sides, len(rows), seq)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "q_starts", q_starts)

    def _checked(self, row: int, bands: Iterable[Band]) -> tuple[Band, ...]:
        kept = []
        for band in bands:
            if band.q0 < 0 or band.k0 < 0 or band.q1 > self.seq_q or band.k1 > self.seq_k:
                raise ValueError(
                    f"{band} of mask row {row} leaves the {self.seq_q} queries x {self.seq_k} keys"
                )
            trimmed = band.trimmed()
            if trimmed is not None:
                kept.append(trimmed)
        kept.sort(key=_order)
        _require_disjoint(kept, row)
        return tuple(kept)

    @property
    def batch(self) -> int:
        """1 when all batch rows share the mask, else the number of rows."""
        return len(self.rows)

    @property
    def area(self) -> int:
        """Allowed pairs, summed over ``rows``."""
        return sum(band.area for bands in self.rows for band in bands)

    @property
    def documents(self) -> tuple[int, ...]:
        """Key positions, 0 left out, at which a document of any batch row starts."""
        return tuple(sorted({start for own in self.starts for start in own}))

    @property
    def features(self) -> frozenset[str]:
        """What a kernel must be able to do: subset of {"lo", "hi", "many"}.

        "lo"/"hi": a band bounded from below/above on j - i; "many": more than one band in a row.
        """
        found = set()
        for bands in self.rows:
            if len(bands) > 1:
                found.add("many")
            for band in bands:
                if band.lo is not None:
                    found.add("lo")
                if band.hi is not None:
                    found.add("hi")
        return frozenset(found)

    def allowed(self, row: int, i: int, j: int) -> bool:
        """Whether query ``i`` sees key ``j`` in batch row ``row``: the definition, for checks."""
        bands = self.rows[row if self.batch > 1 else 0]
        return any(band.contains(i, j) for band in bands)


def _check_starts(starts: Sequence[Sequence[int]], rows: int, seq: int) -> None:
    if len(starts) != rows:
        raise ValueError(f"{rows} rows of bands but {len(starts)} of document starts")
    for own in starts:
        if own and any(a >= b for a, b in pairwise((0, *own, seq))):
            raise ValueError(f"document starts must rise within 1..{seq - 1}: {own[:8]}")


def _require_disjoint(bands: Sequence[Band], row: int) -> None:
    """Sweep over queries (``bands`` are sorted); pairs whose boxes overlap are compared by area."""
    live: list[Band] = []
    for band in bands:
        live = [other for other in live if other.q1 > band.q0]
        for other in live:
            if other.k0 >= band.k1 or other.k1 <= band.k0:
                continue
            common = Band(
                band.q0,
                min(band.q1, other.q1),
                max(band.k0, other.k0),
                min(band.k1, other.k1),
                max((b.lo for b in (band, other) if b.lo is not None), default=None),
                min((b.hi for b in (band, other) if b.hi is not None), default=None),
            )
            if common.area:
                raise ValueError(f"bands of mask row {row} overlap: {other} and {band}")
        live.append(band)


def document_cuts(mask: Mask, at_least: int = 128) -> tuple[int, ...]:
    """Document starts where a cut pays: the document before or after holds >= ``at_least`` tokens.

    After ``Sharding.split`` at these, no record (so no group of tokens that a wire quantises
    together) holds tokens of such a document and of another one. Shorter documents may share
    records: cutting at each would pad each to a record. Padding at the end counts as a document.
    """
    cuts: set[int] = set()
    for own in mask.starts:
        edges = (0, *own, mask.seq_k)
        for before, start, after in zip(edges, edges[1:], edges[2:], strict=False):
            if max(start - before, after - start) >= at_least:
                cuts.add(start)
    return tuple(sorted(cuts))


# ---- the masks people ask for -------------------------------------------------------------------


def _alignment(seq_q: int, seq_k: int, align: str) -> int:
    if align == "top-left":
        return 0
    if align == "bottom-right":
        return seq_k - seq_q
    raise ValueError(f"{align=} is neither 'top-left' nor 'bottom-right'")


def _reach(left: int | None, right: int | None, offset: int) -> tuple[int | None, int | None]:
    """Bounds of j - i for ``left`` and ``right`` tokens around the diagonal ``offset``."""
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(
            f"a window reaches a number of tokens >= 0 to each side: {left=}, {right=}"
        )
    return None if left is None else offset - left, None if right is None else offset + right


def full(seq_q: int, seq_k: int | None = None) -> Mask:
    """Every query sees every key."""
    seq_k = seq_q if seq_k is None else seq_k
    return Mask(seq_q, seq_k, ((Band(0, seq_q, 0, seq_k),),), name="full")


def causal(seq_q: int, seq_k: int | None = None, align: str = "top-left") -> Mask:
    """j <= i (top-left), or j <= i + seq_k - seq_q (bottom-right: the last query sees all keys)."""
    seq_k = seq_q if seq_k is None else seq_k
    offset = _alignment(seq_q, seq_k, align)
    return Mask(seq_q, seq_k, ((Band(0, seq_q, 0, seq_k, None, offset),),), name="causal")


def window(
    seq_q: int,
    seq_k: int | None = None,
    *,
    left: int | None,
    right: int | None = 0,
    align: str = "top-left",
) -> Mask:
    """i - left <= j <= i + right; None is unbounded. ``left=8, right=0``: nine keys, causal."""
    seq_k = seq_q if seq_k is None else seq_k
    lo, hi = _reach(left, right, _alignment(seq_q, seq_k, align))
    return Mask(seq_q, seq_k, ((Band(0, seq_q, 0, seq_k, lo, hi),),), name="window")


def prefix_lm(seq: int, prefix: int) -> Mask:
    """Every query sees the first ``prefix`` keys; beyond them attention is causal."""
    if not 0 <= prefix <= seq:
        raise ValueError(f"{prefix=} is not within 0..{seq=}")
    bands = (Band(0, seq, 0, prefix), Band(0, seq, prefix, seq, None, 0))
    return Mask(seq, seq, (bands,), name="prefix-lm")


def chunked(seq: int, chunk: int, *, causal: bool = True) -> Mask:
    """Chunked-local attention: i and j see each other only inside blocks of ``chunk`` tokens."""
    if chunk <= 0:
        raise ValueError(f"{chunk=} must be positive")
    edges = [*range(0, seq, chunk), seq]
    bands = tuple(Band(a, b, a, b, None, 0 if causal else None) for a, b in pairwise(edges))
    return Mask(seq, seq, (bands,), name="chunked")


def documents(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int] | None = None,
    *,
    causal: bool = True,
    left: int | None = None,
    right: int | None = None,
    align: str = "top-left",
    seq_q: int | None = None,
    seq_k: int | None = None,
) -> Mask:
    """Packed documents: query document d sees key document d only.

    ``cu_seqlens`` are cumulative lengths starting at 0 (anything that iterates over integers; a
    repeated value is an empty document). ``left`` and ``right`` bound how far a token looks back
    and ahead; ``causal`` is ``right=0`` and takes no other. ``align`` places the diagonal where a
    document has different q and k lengths. ``seq_q``/``seq_k`` longer than the documents leave
    padding at the end that sees nothing and that nothing sees.
    """
    if causal and right not in (None, 0):
        raise ValueError(f"{causal=} looks ahead 0 tokens, not {right=}")
    cu_q = [int(x) for x in cu_seqlens_q]
    cu_k = cu_q if cu_seqlens_k is None else [int(x) for x in cu_seqlens_k]
    for label, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not cu or cu[0] != 0 or any(a > b for a, b in pairwise(cu)):
            raise ValueError(
                f"{label} must be cumulative lengths, which start at 0 and never fall; "
                f"it begins with {cu[:8]}"
            )
    if len(cu_q) != len(cu_k):
        raise ValueError(f"{len(cu_q) - 1} query documents but {len(cu_k) - 1} key documents")
    seq_q = cu_q[-1] if seq_q is None else seq_q
    seq_k = (seq_q if cu_seqlens_k is None else cu_k[-1]) if seq_k is None else seq_k
    if seq_q < cu_q[-1] or seq_k < cu_k[-1]:
        raise ValueError(f"documents end at q={cu_q[-1]}, k={cu_k[-1]}, past {seq_q=}, {seq_k=}")
    bands = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        offset = k0 - q0 + _alignment(q1 - q0, k1 - k0, align)
        bands.append(Band(q0, q1, k0, k1, *_reach(left, 0 if causal else right, offset)))
    q_starts, starts = (
        tuple(sorted({x for x in cu if 0 < x < seq})) for cu, seq in ((cu_q, seq_q), (cu_k, seq_k))
    )
    return Mask(seq_q, seq_k, (tuple(bands),), (starts,), "documents", (q_starts,))


def stack(masks: Sequence[Mask]) -> Mask:
    """One mask per batch row, of equal lengths."""
    if not masks:
        raise ValueError("stack needs at least one mask")
    sizes = sorted({(m.seq_q, m.seq_k) for m in masks})
    if len(sizes) > 1 or any(m.batch != 1 for m in masks):
        batches = [m.batch for m in masks]
        raise ValueError(f"stack takes single-row masks of one size: {sizes=}, {batches=}")
    seq_q, seq_k = sizes[0]
    rows = tuple(m.rows[0] for m in masks)
    starts, q_starts = tuple(m.starts[0] for m in masks), tuple(m.q_starts[0] for m in masks)
    return Mask(seq_q, seq_k, rows, starts, "stack", q_starts)
