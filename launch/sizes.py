"""Sizes with binary suffixes: 64K = 64 * 1024, 1M = 1,048,576, 2G = 2 * 1024**3.

Also lists of them, and numbers as people read them. Nothing is guessed: no fractions, no signs.
"""

from __future__ import annotations

import re

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_SIZE = re.compile(r"(\d[\d_]*)([KMG]?)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """``"64K"`` -> 65536. ValueError that quotes ``text`` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: digits, then nothing, K, M or G (1K = 1024)")
    return int(match.group(1)) * SUFFIXES[match.group(2).upper()]


def parse_sizes(text: str) -> list[int]:
    """``"1K,512"`` -> [1024, 512]."""
    return [parse_size(part) for part in text.split(",")]


def size_text(n: int) -> str:
    """The shortest exact spelling, with the count: ``"64K (65,536)"``, ``"4099"``."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if suffix and n >= unit and n % unit == 0:
            return f"{n // unit}{suffix} ({n:,})"
    return f"{n:,}" if n >= 10_000 else str(n)


def bytes_text(n: float) -> str:
    """Three digits and a binary unit: ``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def seconds_text(s: float) -> str:
    """``"0.042 s"``, ``"12.3 s"``, ``"7 min 05 s"``, ``"1 h 02 min"``."""
    if s < 1:
        return f"{s:.3f} s"
    if s < 60:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
