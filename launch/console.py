"""What rank 0 says: lines, a progress line with the time left, and a table.

On a terminal progress is one line rewritten in place; elsewhere (logs, CI) plain lines, at most one
every few seconds. Other ranks have a console too and say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from ringfa4.launch.sizes import seconds_text


class Console:
    """Prints to ``stream`` if ``speaks``. ``clock`` is for tests."""

    def __init__(
        self, stream: TextIO, *, speaks: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream, self.speaks, self.clock = stream, speaks, clock
        self.terminal = speaks and stream.isatty()
        self._open_line = False

    def say(self, text: str = "") -> None:
        self.end_line()
        if self.speaks:
            print(text, file=self.stream, flush=True)

    def rewrite(self, text: str) -> None:
        """A line that the next one replaces, on a terminal; a line elsewhere."""
        if not self.terminal:
            self.say(text)
            return
        self.stream.write(f"\r{text}\x1b[K")
        self.stream.flush()
        self._open_line = True

    def end_line(self) -> None:
        if self._open_line:
            self.stream.write("\n")
            self._open_line = False

    def table(self, rows: Sequence[tuple[str, ...]], *, numbers: bool = True) -> None:
        """Columns as wide as they need; numbers (all but the first column) to the right."""
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        for row in rows:
            cells = [
                cell.rjust(width) if numbers and c else cell.ljust(width)
                for c, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.say("  ".join(cells).rstrip())


class Progress:
    """Rank 0's share of one pass: pairs done, time gone, time left at the rate so far."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console, self.what, self.total = console, what, total
        self.interval = 0.5 if console.terminal else 5.0
        self.done = 0
        self.start = self.shown = console.clock()

    def add(self, pairs: int) -> None:
        """``pairs`` (more than 0) are done now."""
        self.done += pairs
        now = self.console.clock()
        if self.console.speaks and now - self.shown >= self.interval:
            self.shown = now
            self.console.rewrite(self.line(now))

    def line(self, now: float) -> str:
        gone = now - self.start
        text = f"{self.what}: {100 * self.done / self.total:3.0f}% of rank 0's pairs, "
        text += f"{seconds_text(gone)} gone"
        if self.done < self.total:
            text += f", about {seconds_text(gone * (self.total / self.done - 1))} left"
        return text
