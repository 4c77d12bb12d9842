"""Threads of the library end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys
import threading

from ringfa4.comm import background

COPIES = """
import threading, torch
from ringfa4.comm import background

stop, begun, data = threading.Event(), threading.Event(), torch.zeros(64)

def main():
    while not stop.is_set():
        data.copy_(data.clone())
        begun.set()

background.start("copies", main, stop.set)
begun.wait()
"""


def test_a_process_ends_in_order_while_a_thread_copies() -> None:
    """Without being told, the thread ends in "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", COPIES], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_has_ended_is_forgotten() -> None:
    stop = threading.Event()
    thread = background.start("short", stop.wait, stop.set)
    assert thread.daemon and thread in background._running
    stop.set()
    thread.join()
    assert thread not in background._running
