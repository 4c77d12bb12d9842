"""Threads beside the caller's, which end before the interpreter does.

A thread that comes back from torch while the interpreter shuts down cannot have Python's lock any
more. Python then unwinds its stack, C++ frames included, and C++ calls that an error: a process in
which all went well says "terminate called without an active exception" and ends with code 134
(Python 3.11 and torch 2.13: 6 of 6 processes that left such a thread copying). So at exit these
threads are told to end, and waited for.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

PATIENCE_S = 5.0
"""How long all threads together may take to end at exit. Who is in a call that never returns, as in
a store that never answers, does not come back to ask for the lock either."""

_running: dict[threading.Thread, Callable[[], object]] = {}
"""Each thread, and what tells it to end."""


def start(name: str, main: Callable[[], object], end: Callable[[], object]) -> threading.Thread:
    """Run ``main()`` in a thread; ``end()``, called from another one, makes it return soon."""

    def run() -> None:
        try:
            main()
        finally:
            del _running[thread]

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = end
    thread.start()
    return thread


@atexit.register
def end_all() -> None:
    """End what still runs."""
    left = list(_running.items())
    for _, end in left:
        end()
    deadline = time.monotonic() + PATIENCE_S
    for thread, _ in left:
        thread.join(max(0.0, deadline - time.monotonic()))
