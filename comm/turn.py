"""Whose host works, where ranks are threads of one process that share a GPU.

A rank takes the turn when nobody has it, else it sleeps until it is given it. Given up, the turn
passes to the next higher rank, in a circle, that waits for it and can go on: ``ready`` says so.
Nobody is woken only to ask for the turn, or wakes while another rank works.

Left out: who may keep it, and for how long. :mod:`ringfa4.comm.cuda_local` says when a rank works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TURN_POLL_S = 0.05
"""How often a rank that waits for its turn looks whether another one failed."""


class Turn:
    """Held by one rank at a time."""

    def __init__(self, world: int) -> None:
        self.holder: int | None = None
        self.since = 0.0
        """When the holder got it, on the clock of time.monotonic."""
        self._world = world
        self._changes = threading.Lock()
        self._waiting: dict[int, tuple[threading.Event, Callable[[], bool]]] = {}

    def take(self, rank: int, timeout_s: float, ready: Callable[[], bool] = lambda: True) -> bool:
        """Whether ``rank`` has it within ``timeout_s``, with ``ready`` true; if not, it does not
        wait for it either.
        """
        with self._changes:
            if self.holder is None and ready():
                self._pass_to(rank)
                return True
            given = threading.Event()
            self._waiting[rank] = given, ready
        given.wait(timeout_s)
        with self._changes:
            self._waiting.pop(rank, None)
            return self.holder == rank

    def give_up(self, rank: int) -> None:
        """Nothing when another rank has it, or none."""
        with self._changes:
            if self.holder == rank:
                self.holder = None
                self._offer(rank)

    def changed(self, rank: int) -> None:
        """``rank`` did what another may have waited for."""
        with self._changes:
            if self.holder is None:
                self._offer(rank)

    def _offer(self, after: int) -> None:
        for rank in sorted(self._waiting, key=lambda r: (r - after) % self._world):
            given, ready = self._waiting[rank]
            if ready():
                del self._waiting[rank]
                self._pass_to(rank)
                given.set()
                return

    def _pass_to(self, rank: int) -> None:
        self.holder, self.since = rank, time.monotonic()
