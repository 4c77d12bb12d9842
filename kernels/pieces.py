"""Cut a band into pieces, each one call of a routine for rectangles and top-left-causal boxes.

A piece is itself a (trimmed) band, of one of three kinds:

    full     lo = hi = None             a rectangle, no mask
    causal   lo = None, hi = k0 - q0    row a of the box sees keys 0..a (top-left), any Sq x Sk
    masked   anything else              at most ROWS rows; needs a mask of its box

A full band is one piece; a causal band at any offset one or two; a band bounded from below (a
window) is cut into tiles of ROWS rows, each a masked piece at the low edge, a rectangle and a
causal piece, or one masked piece when the rectangle would be narrow. Every row of a piece sees at
least one key.

Pure integers: neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringfa4.mask import Band

ROWS = 256
"""Most rows of a masked piece. A window of 1,024 keys then runs at half a rectangle's rate."""


def is_full(piece: Band) -> bool:
    """Every row sees every key of the box."""
    return piece.lo is None and piece.hi is None


def is_causal(piece: Band) -> bool:
    """Row a of the box sees keys 0..a of the box."""
    return piece.lo is None and piece.hi == piece.k0 - piece.q0


def is_masked(piece: Band) -> bool:
    """The piece needs a mask of its box."""
    return not is_full(piece) and not is_causal(piece)


def boxes(band: Band, side: int) -> Iterator[Band]:
    """Disjoint parts of ``band`` with at most ``side`` rows and keys each, in order of both."""
    for a in range(band.q0, band.q1, side):
        rows = band.within(a, a + side, band.k0, band.k1)
        if rows is None:
            continue  # nothing is left out: the band holds no pair of these rows
        for b in range(rows.k0, rows.k1, side):
            box = rows.within(rows.q0, rows.q1, b, b + side)
            if box is not None:
                yield box


def pieces(band: Band) -> Iterator[Band]:
    """Disjoint pieces whose union is ``band``, rows ascending, keys ascending within a row tile."""
    whole = band.trimmed()
    if whole is None:
        return
    if whole.lo is None:
        yield from _from_the_left(whole)
        return
    for a in range(whole.q0, whole.q1, ROWS):
        tile = whole.within(a, min(a + ROWS, whole.q1), whole.k0, whole.k1)
        if tile is not None:
            yield from _tile(tile)


def _from_the_left(band: Band) -> Iterator[Band]:
    """A trimmed band without lower bound: the keys all rows see, then a causal piece."""
    if band.hi is None or is_causal(band):
        yield band
        return
    corner = band.q0 + band.hi  # the first row's last key: k0 <= corner < k1 - 1, being trimmed
    yield Band(band.q0, band.q1, band.k0, corner)
    yield Band(band.q0, band.q1, corner, band.k1, None, band.hi)


def _tile(tile: Band) -> Iterator[Band]:
    """A trimmed band of at most ROWS rows."""
    if tile.lo is None:
        yield from _from_the_left(tile)
        return
    first = tile.q1 - 1 + tile.lo  # the first key that every row sees
    last = tile.k1 - 1 if tile.hi is None else tile.q0 + tile.hi
    if last - first < 2 * ROWS:
        yield tile
        return
    edge = Band(tile.q0, tile.q1, tile.k0, first, tile.lo, None).trimmed()
    assert edge is not None  # trimmed of the last row, which sees none of these keys
    yield edge
    yield from _from_the_left(Band(tile.q0, tile.q1, first, tile.k1, None, tile.hi))
