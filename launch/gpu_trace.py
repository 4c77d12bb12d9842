"""What the GPU did during a traced pass, as rows of the trace beside those of the host.

    with Timeline(rank, device) as timeline: ...   ->   timeline.rows: [Row(rank, name, spans)]

torch.profiler sees every kernel and copy of the process. One rank of it runs the profiler (the
lowest that came; virtual ranks are threads of one process) and finds whose each is by the thread
that launched it. Per rank a row for each of its streams: the one that computes, and those on which
the copy engines bring K/V and take dK/dV away.

Times of the profiler are of the system's clock; they are moved to that of time.perf_counter by
reading both at the start. With the profiler a launch costs a few microseconds more, so a traced run
is slower where the host is what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from ringfa4.launch.gpu_time import Ran, kind_of, ran

COMPUTE, COPIES = "GPU compute", "GPU copies"


@dataclass(frozen=True)
class Row:
    """What one stream of a rank did: (name, start, stop), seconds of time.perf_counter."""

    rank: int
    name: str
    spans: list[tuple[str, float, float]]


class Timeline:
    """Within it the ranks of this process compute: all of them are inside before one begins and
    until the last is done, and outside before one enters again (barriers of the caller's).
    """

    _lock = threading.Lock()
    _ranks: ClassVar[dict[int, int]] = {}
    """Thread -> rank, of those inside."""
    _leader: ClassVar[Timeline | None] = None

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device, self.rows = rank, device, list[Row]()

    def __enter__(self) -> Timeline:
        cls = Timeline
        with cls._lock:
            cls._ranks[thread_id(threading.get_ident())] = self.rank
            if cls._leader is None:
                cls._leader = self
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.start()
                self._shift = time.time_ns() - time.perf_counter_ns()
        return self

    def __exit__(self, *error: object) -> None:
        cls = Timeline
        with cls._lock:
            if cls._leader is not self:
                return
            cls._leader = None
            ranks, cls._ranks = cls._ranks, {}
        torch.cuda.synchronize(self.device)
        self._profile.stop()
        self.rows = rows_of(ran(self._profile), ranks, self._shift)


def thread_id(ident: int) -> int:
    """What the profiler keeps of ``threading.get_ident()``."""
    return ident & 0xFFFFFFFF


def rows_of(events: Iterable[Ran], ranks: Mapping[int, int], shift_ns: int) -> list[Row]:
    """Rows by rank, the stream that computes first. What other threads launched is left out where
    several ranks are here; one alone launched everything.
    """
    alone = next(iter(ranks.values())) if len(ranks) == 1 else None
    streams: dict[tuple[int, int], list[Ran]] = {}
    for event in events:
        rank = ranks.get(event.thread, alone)
        if rank is not None:
            streams.setdefault((rank, event.stream), []).append(event)
    computed = Counter(
        {key: sum(kind_of(e.name) != "transfers" for e in found) for key, found in streams.items()}
    )
    rows, named = [], Counter[int]()
    for rank, stream in sorted(streams, key=lambda key: (key[0], -computed[key], key[1])):
        n = named[rank]
        named[rank] += 1
        name = COMPUTE if n == 0 else COPIES if n == 1 else f"{COPIES} {n}"
        spans = [
            (e.name, (e.start - shift_ns) * 1e-9, (e.stop - shift_ns) * 1e-9)
            for e in sorted(streams[rank, stream], key=lambda e: e.start)
        ]
        rows.append(Row(rank, name, spans))
    return rows
