"""Questions to a store that may never answer.

torch's TCPStore waits for an answer without a limit (2.13: ``check`` ignores its timeout). While
its host is stopped, or the way to it is cut and nobody closes the connection, the call does not
return, and a rank that asks whether a peer failed would hang for ever in asking. So a thread asks,
and who wants the answer waits for a bounded time.

Invariant: at most one question is under way. While one is unanswered others are not asked, and
count as unanswered at once: a silent store costs its waiters ``patience_s`` once, not every time.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ringfa4.comm import background

T = TypeVar("T")


class _Question(Generic[T]):
    def __init__(self, question: Callable[[], T]) -> None:
        self._question: Callable[[], T] | None = question
        self.answer: T | None = None
        self.done = threading.Event()

    def run(self) -> None:
        # An asker keeps its last question, which must not keep who asked, with its connections.
        question, self._question = self._question, None
        assert question is not None, "asked twice"
        try:
            self.answer = question()
        except RuntimeError:  # torch's way to say that the store is gone
            return
        finally:
            self.done.set()


class Asker:
    """Asks from a thread of its own; usable from several threads."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._last: _Question[Any] | None = None
        self._questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T]) -> T | None:
        """The answer; None when the store is gone or does not answer in ``patience_s``."""
        with self._lock:
            if self._last is not None and not self._last.done.is_set():
                return None
            if self._thread is None:
                end = functools.partial(self._questions.put, None)
                self._thread = background.start("asker", self._serve, end)
            asked = _Question(question)
            self._last = asked
            self._questions.put(asked)
            asked.done.wait(self.patience_s)
            return asked.answer

    def close(self) -> None:
        """End the thread; one that still waits for an answer ends when it comes, or with the
        process."""
        with self._lock:
            if self._thread is None:
                return
            self._questions.put(None)
            if self._last is None or self._last.done.is_set():
                self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (asked := self._questions.get()) is not None:
            asked.run()
            del asked  # what it closes over must not live until the next one comes
