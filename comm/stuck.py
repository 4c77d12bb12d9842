"""The last resort where a device waits for a lost peer for good: the process says so and ends.

Whoever synchronises with such a device never returns, and no exception reaches it. The peers have
been told by then, and the next use of the transport would raise; who can still act has
:func:`patience_s` to do so.
"""

from __future__ import annotations

import os
import sys

STUCK_S = 30.0
"""How long a device may stay where a lost peer left it; the transport's timeout if longer."""

STUCK_EXIT = 70
"""Exit code of a process that ended for that (EX_SOFTWARE of sysexits.h)."""


def patience_s(timeout_s: float) -> float:
    """Seconds from the loss of a peer to the end of a process that cannot go on."""
    return max(STUCK_S, timeout_s)


def end_process(words: str) -> None:
    """Without what Python does at exit, which would wait for the device."""
    sys.stderr.write(f"ringfa4: {words}\n")
    sys.stderr.flush()
    os._exit(STUCK_EXIT)
