"""The results of a run as they come: a JSON file that survives the run, and a limit for every row.

    {"about": .., "rows": {NAME: {"state": STATE, "why": .., "result": ..}}}

    done      ``result`` holds what was measured        refused   ``why`` says what stood against it
    begun     it is being measured, or the process      late      it took longer than --row-limit,
              ended in it                                         and the process was ended
    left out  no time was left

The file is replaced whole after every change. A later run that resumes it takes over what is done
or refused, and does not try again what was begun or late. (Not by ``torchrun --max-restarts``: its
store would still hold the addresses of the processes that ended.)
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIED = "the processes ended in this row"
LATE_EXIT = 9

Entry = dict[str, Any]


class Journal:
    """``path`` None: nothing is written (every rank but 0, and runs that asked for no file)."""

    def __init__(self, path: str | None, about: dict[str, Any], *, resume: bool) -> None:
        self.path = None if path is None else Path(path)
        self.about, self.rows = about, dict[str, Entry]()
        self._writing = threading.Lock()
        if resume and self.path is not None and self.path.exists():
            found = json.loads(self.path.read_text())
            self.rows = {n: _taken_over(e) for n, e in found["rows"].items()}
            self.rows = {n: e for n, e in self.rows.items() if e["state"] != "left out"}

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def note(self, name: str, state: str, **more: Any) -> None:
        """Set the entry of a row and write the file."""
        self.rows[name] = {"state": state, **more}
        if self.path is None:
            return
        with self._writing:  # the limit's thread writes too
            partial = self.path.with_name(self.path.name + ".partial")
            text = json.dumps({"about": self.about, "rows": self.rows}, indent=1)
            partial.write_text(text + "\n")
            os.replace(partial, self.path)

    @contextmanager
    def limit(self, name: str, limit_s: float) -> Iterator[None]:
        """End this process when the block takes longer: a waiting device cannot be called back."""

        def end() -> None:
            why = f"not done within {limit_s:g} s"
            self.note(name, "late", why=why)
            print(f"bench.py: {name}: {why}", file=sys.stderr, flush=True)
            os._exit(LATE_EXIT)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _taken_over(entry: Entry) -> Entry:
    return {"state": "late", "why": DIED} if entry["state"] == "begun" else entry
