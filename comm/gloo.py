"""Point-to-point messages between the ranks of a group, over gloo connections of ringfa4's own.

    post: start sends and receives, by peer;  settle: wait for them, bounded, naming who is missing

Own connections, because gloo breaks every connection of a group when one wait of it times out,
because tags would meet the caller's, and because ``dist.new_group`` cannot make a sub-group
reliably among its members alone (the name it derives from the ranks depends on how many groups each
process is in).

How a wait ends early. gloo's ``wait`` cannot be interrupted, and its works do not tell whether they
are done, so a thread of the link waits while the caller polls for failures reported by peers. A
dead process closes its sockets, which fails its neighbours' waits at once. :meth:`GlooLink.abort`
closes this rank's sockets in the same way, so a failure crosses the group even when the store that
carries the reasons died with its host.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa4.comm import background
from ringfa4.comm.interface import Control
from ringfa4.errors import PeerError

POLL_S = 0.05
"""How often a waiting rank looks whether a peer reported a failure."""

GRACE_S = 0.5
"""How long a broken connection waits for the reason, which travels through the store."""

MAX_TAG = 2**31 - 2
ABORT_TAG = 2**31 - 1


class Store(Protocol):
    """What is used of a group's store; torch's stubs leave it out."""

    def add(self, key: str, amount: int) -> int: ...

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class _Messages(Protocol):
    """What is used of ProcessGroupGloo."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...


class Posted:
    """Operations under way, each with its peer. Holds the tensors: gloo reads and writes them.

    ``refused``: peer and reason of the first operation that could not start.
    """

    def __init__(self) -> None:
        self.works: list[tuple[dist.Work, int, Tensor]] = []
        self.refused: tuple[int, str] | None = None

    def drop(self) -> None:
        self.works.clear()


class _Job:
    """Waiting for some works, done by the link's thread."""

    def __init__(self, works: Sequence[tuple[dist.Work, int, Tensor]], timeout_s: float) -> None:
        self.works, self.timeout_s = works, timeout_s
        self.done = threading.Event()
        self.error: str | None = None
        self.peer = works[0][1]
        """Whose work is waited for; when an error came, whose work failed."""

    def run(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            for work, peer, _ in self.works:
                self.peer = peer
                left = max(deadline - time.monotonic(), 0.001)
                work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            self.error = str(error)
        self.done.set()


class GlooLink:
    """Connections of this rank to all others. Collective to make; used by one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float) -> None:
        """``label`` tells links of one group apart. PeerError when a rank does not arrive within
        ``timeout_s``."""
        self.rank, self.world = group.rank(), group.size()
        store = group.get_group_store()
        # A counter per rank and label: links made one after another must not meet the old keys.
        keys = [f"ringfa4/{label}/{rank}" for rank in range(self.world)]
        number = store.add(keys[self.rank], 1)
        prefix = f"ringfa4/{label}/link{number}"
        shared = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self.store = cast(Store, shared)
        try:
            gloo = dist.ProcessGroupGloo(
                shared, self.rank, self.world, timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            missing = [rank for rank in range(self.world) if store.add(keys[rank], 0) < number]
            if not missing:
                raise PeerError(f"gloo does not connect the group: {error}") from error
            reason = f"did not open its {label} connections within {timeout_s:g} s"
            raise PeerError(reason, rank=missing[0]) from error
        self._gloo = cast(_Messages, gloo)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, posted: Posted, tensor: Tensor, peer: int, tag: int) -> None:
        """Start sending; what goes wrong is for :meth:`settle` to say."""
        self._start(self._gloo.send, posted, tensor, peer, tag)

    def receive(self, posted: Posted, tensor: Tensor, peer: int, tag: int) -> None:
        """Start receiving; what goes wrong is for :meth:`settle` to say."""
        self._start(self._gloo.recv, posted, tensor, peer, tag)

    @staticmethod
    def _start(
        operation: Callable[[list[Tensor], int, int], dist.Work],
        posted: Posted,
        tensor: Tensor,
        peer: int,
        tag: int,
    ) -> None:
        try:
            posted.works.append((operation([tensor], peer, tag), peer, tensor))
        except RuntimeError as error:  # the connection broke earlier
            posted.refused = posted.refused or (peer, str(error))

    def settle(
        self,
        posted: Posted,
        control: Control,
        what: str,
        step: int | None = None,
    ) -> None:
        """Wait until everything in ``posted`` is done; it is empty then.

        Raises PeerError when a peer reported a failure, is gone, or late by the timeout of
        ``control`` from now.
        """
        if posted.refused is not None:
            posted.drop()
            raise _broken(*posted.refused, control, step)
        if not posted.works:
            return
        job = self._submit(posted, control.timeout_s)
        while not job.done.wait(POLL_S):
            failed = control.failure()
            if failed is not None:
                raise PeerError(failed[1], rank=failed[0], step=step, awaited=job.peer)
        posted.drop()
        if job.error is None:
            return
        if "Timed out" not in job.error:
            raise _broken(job.peer, job.error, control, step)
        raise PeerError(f"no {what} within {job.timeout_s:g} s", rank=job.peer, step=step)

    def _submit(self, posted: Posted, timeout_s: float) -> _Job:
        if self._thread is None:
            name, end = f"gloo link of rank {self.rank}", functools.partial(self._jobs.put, None)
            self._thread = background.start(name, self._wait_for_jobs, end)
        job = _Job(tuple(posted.works), timeout_s)
        self._jobs.put(job)
        return job

    def _wait_for_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # works and buffers must not live until the next job comes

    def abort(self) -> None:
        """Close the connections: waits here and at the peers fail at once. Not collective."""
        for peer in range(self.world):
            if peer == self.rank:
                continue
            # ProcessGroupGloo.abort() does nothing (2.13); a wait that times out closes every pair.
            # On a pair that is closed already nothing waits, so all are tried.
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, ABORT_TAG).wait(
                    timedelta(milliseconds=1)
                )
        self.close()

    def close(self) -> None:
        """End the link's thread. Nothing may be under way, unless after :meth:`abort`."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _broken(peer: int, error: str, control: Control, step: int | None) -> PeerError:
    """What a broken connection to ``peer`` means: what was reported, or else that it is gone."""
    deadline = time.monotonic() + GRACE_S
    while (failed := control.failure()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if failed is not None:
        return PeerError(failed[1], rank=failed[0], step=step, awaited=peer)
    return PeerError(f"connection lost ({_brief(error)})", rank=peer, step=step)


def _brief(error: str) -> str:
    """gloo's message without its source position and advice."""
    return error.partition("] ")[2].partition(". This is")[0] or error
