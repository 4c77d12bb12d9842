"""Work that waits for other work, on links that transfers share: a discrete-event simulator.

    Op      starts when all of ``after`` have ended; takes ``seconds``, then moves ``nbytes``
    Link    bytes a second, shared equally by the transfers that are on it
    run     the time at which every op starts and ends

A transfer runs at the least of its shares on the links it crosses. What a slower link keeps it from
using of a faster one is not given to others: a link never does more than that, and a little less
than max-min fairness where rates differ. A lane (a stream, a thread) is a chain: each op of it is
``after`` the one before.

Pure Python, deterministic; nothing here knows about attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

NOT_YET = -1.0


class Link:
    """One direction of one wire."""

    __slots__ = ("active", "bytes_per_s", "moved", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"link {name} needs a positive rate: {bytes_per_s=}")
        self.name, self.bytes_per_s = name, bytes_per_s
        self.active: dict[Op, None] = {}
        """Transfers on it now, in the order in which they came."""
        self.moved = 0
        """Bytes of all transfers that it carried."""

    @property
    def busy_s(self) -> float:
        """What its bytes take at its full rate."""
        return self.moved / self.bytes_per_s


class Op:
    """One piece of work of ``rank``; ``kind`` and ``step`` say what it is."""

    __slots__ = (
        "_left", "_rate", "_since", "_version", "_waiting", "after", "before", "end", "kind",
        "links", "nbytes", "rank", "seconds", "start", "step",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        rank: int,
        step: int,
        after: Iterable[Op | None] = (),
        *,
        seconds: float = 0.0,
        nbytes: int = 0,
        links: Sequence[Link] = (),
    ) -> None:
        assert seconds >= 0 and nbytes >= 0 and (links or not nbytes), f"{kind} of rank {rank}"
        self.kind, self.rank, self.step = kind, rank, step
        self.seconds, self.nbytes, self.links = seconds, nbytes, tuple(links)
        self.after = tuple(dict.fromkeys(op for op in after if op is not None))
        self.before: list[Op] = []
        for op in self.after:
            op.before.append(self)
        self.start = self.end = NOT_YET
        self._waiting = len(self.after)
        self._left, self._rate, self._since, self._version = float(nbytes), 0.0, 0.0, 0

    def __repr__(self) -> str:
        return f"{self.kind} {self.step} of rank {self.rank}"


def run(ops: Sequence[Op]) -> float:
    """Run ``ops`` from time 0; seconds until the last one has ended. Each op runs once.

    AssertionError when some never start: they wait for each other.
    """
    queue: list[tuple[float, int, Op, int]] = []
    number = 0

    def push(at: float, op: Op, version: int) -> None:
        nonlocal number
        number += 1
        heappush(queue, (at, number, op, version))

    def share(op: Op, now: float) -> None:
        """Account for what has moved, and give the op its present rate."""
        op._left = max(0.0, op._left - op._rate * (now - op._since))
        op._rate = min(link.bytes_per_s / len(link.active) for link in op.links)
        op._since = now
        op._version += 1
        push(now + op._left / op._rate, op, op._version)

    def reshare(links: Sequence[Link], now: float) -> None:
        for other in dict.fromkeys(other for link in links for other in link.active):
            share(other, now)

    def begin(op: Op, now: float) -> None:
        op.start = now
        push(now + op.seconds, op, 0)

    for op in ops:
        if not op._waiting:
            begin(op, 0.0)
    done, now = 0, 0.0
    while queue:
        now, _, op, version = heappop(queue)
        if version != op._version:
            continue  # its rate has changed since
        if op.nbytes and version == 0:
            for link in op.links:
                link.active[op] = None
                link.moved += op.nbytes
            reshare(op.links, now)
            continue
        op.end = now
        op._version = -1
        done += 1
        if op.nbytes:
            for link in op.links:
                del link.active[op]
            reshare(op.links, now)
        for follower in op.before:
            follower._waiting -= 1
            if not follower._waiting:
                begin(follower, now)
    if done < len(ops):
        stuck = [op for op in ops if op.end == NOT_YET]
        raise AssertionError(f"{len(stuck)} ops wait for each other, {stuck[0]} first")
    return max((op.end for op in ops), default=0.0)
