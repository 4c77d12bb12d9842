"""A pool of real processes with a gloo group, started once a test session and reused.

    with gloo_pool(2) as pool:
        results = pool.run("distributed.work:add", {"x": 3})         # one result a rank

The function runs in every rank, inside an initialised default group (gloo), with one thread; it
takes the keyword arguments and may return anything that pickles (tensors too). Name it by module as
the tests import it: ``tests`` is on the path, so this file is ``distributed.pool``. Processes fork
from a server in which torch is already loaded: the first pool costs one import of torch, a pool of
another world a fraction of a second. Pools are kept, idle, until the session ends.

``run`` raises :class:`RanksFailed` with every rank's traceback when one fails. ``outcomes`` is for
tests that expect failures: it returns an :class:`Outcome` a rank, with the error's type and message
and the seconds it took. When ranks are still busy after ``timeout_s``, all stacks are dumped
(faulthandler), every process is killed, and RanksFailed shows where each rank stood. A pool that
lost a process is thrown away when its ``with`` block ends. Ranks report each other's failures
through a store in the parent, as torchrun's agent has it: it survives any rank.

Pickle is used between this process and its own children, over pipes; nothing of it is in the
library.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_S = RUN_S = 100.0
"""Nothing takes that long, on a slow machine either: a rank hangs. pytest ends tests at 120 s."""


@dataclass(frozen=True)
class Outcome:
    """How one rank's run ended: ``error`` is None, an exception's type name, or
    "Killed"/"Timeout"."""

    rank: int
    seconds: float
    value: Any = None
    error: str | None = None
    message: str = ""
    details: str = ""


class RanksFailed(AssertionError):
    """A rank failed although the test did not expect it."""

    def __init__(self, function: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [o for o in outcomes if o.error is not None]
        lines = [f"{function}: {len(failed)} of {len(outcomes)} ranks failed"]
        lines += [f"--- rank {o.rank}: {o.error}: {o.message}\n{o.details}" for o in failed]
        super().__init__("\n".join(lines))


class Pool:
    """``world`` processes with one gloo group. Use :func:`gloo_pool`."""

    def __init__(self, world: int) -> None:
        import torch.distributed as dist

        self.world = world
        self._logs = tempfile.TemporaryDirectory(prefix="ringfa4-pool-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _forkserver()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world, self._store.port, str(self._log(rank))),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.alive = True
        started = self._collect("start of the pool", START_S)
        if any(o.error for o in started):
            self.close()
            raise RanksFailed("start of the pool", started)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.stacks"

    def run(
        self, function: str, kwargs: Mapping[str, Any] | None = None, *, timeout_s: float = RUN_S
    ) -> list[Any]:
        """Results of ``function`` ("module:name") by rank."""
        outcomes = self.outcomes(function, kwargs, timeout_s=timeout_s)
        if any(o.error is not None for o in outcomes):
            raise RanksFailed(function, outcomes)
        return [o.value for o in outcomes]

    def outcomes(
        self, function: str, kwargs: Mapping[str, Any] | None = None, *, timeout_s: float = RUN_S
    ) -> list[Outcome]:
        """How ``function`` ended on each rank. RanksFailed when a rank is still busy after the
        timeout."""
        assert self.alive, "a process of this pool has died; leave the with block"
        message = pickle.dumps((function, dict(kwargs or {})))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(function, timeout_s)

    def _collect(self, what: str, timeout_s: float) -> list[Outcome]:
        begin = time.monotonic()
        waiting = dict(enumerate(self._connections))
        outcomes: dict[int, Outcome] = {}
        while waiting:
            left = timeout_s - (time.monotonic() - begin)
            ready = wait(list(waiting.values()), max(left, 0))
            if not ready:
                outcomes.update(self._dump(list(waiting), time.monotonic() - begin))
                raise RanksFailed(what, [outcomes[r] for r in sorted(outcomes)])
            for rank, connection in list(waiting.items()):
                if connection in ready:
                    outcomes[rank] = self._receive(rank, connection, time.monotonic() - begin)
                    del waiting[rank]
        return [outcomes[rank] for rank in range(self.world)]

    def _receive(self, rank: int, connection: Connection, seconds: float) -> Outcome:
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            self.alive = False
            self._processes[rank].join(20)
            code = self._processes[rank].exitcode
            return Outcome(rank, seconds, error="Killed", message=f"exit code {code}")

    def _dump(self, ranks: list[int], seconds: float) -> dict[int, Outcome]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        self.alive = False
        stacks = self._stacks(ranks)
        self.close()
        return {
            rank: Outcome(rank, seconds, None, "Timeout", "was still busy; it stood here:", stack)
            for rank, stack in stacks.items()
        }

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """What faulthandler writes from the signal handler, once it writes no more."""
        stacks, before, deadline = dict.fromkeys(ranks, ""), {}, time.monotonic() + 20.0
        while (stacks != before or not all(stacks.values())) and time.monotonic() < deadline:
            time.sleep(0.2)
            before, stacks = stacks, {rank: self._log(rank).read_text() for rank in ranks}
        return stacks

    def leave(self, timeout_s: float) -> list[int | None]:
        """Let the processes end by themselves; their exit codes, None for those that do not."""
        self.alive = False
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """Kill the processes. Idempotent."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(20)
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._logs.cleanup()


_kept: dict[int, Pool] = {}


ONE_THREAD = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
"""OpenMP reads these when torch is loaded; threads that spin would take the other ranks' cores."""


@cache
def _forkserver() -> multiprocessing.context.ForkServerContext:
    """Processes that begin with torch imported: it is loaded once, in the server they fork from."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


@contextmanager
def gloo_pool(world: int) -> Iterator[Pool]:
    """The session's pool of ``world`` processes; see the module."""
    pool = _kept.pop(world, None) or Pool(world)
    try:
        yield pool
    finally:
        if pool.alive:
            _kept[world] = pool
        else:
            pool.close()


@atexit.register
def close_pools() -> None:
    """End the kept pools."""
    while _kept:
        _kept.popitem()[1].close()


def _serve(connection: Connection, rank: int, world: int, port: int, log: str) -> None:
    """Main of one process: run what comes through ``connection`` until the parent goes away."""
    with open(log, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=START_S)
        )
        connection.send_bytes(pickle.dumps(Outcome(rank, 0.0)))
        while True:
            try:
                function, kwargs = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_run(rank, function, kwargs)))


def _run(rank: int, function: str, kwargs: dict[str, Any]) -> Outcome:
    begin = time.monotonic()
    try:
        module, name = function.split(":")
        value = getattr(import_module(module), name)(**kwargs)
        return Outcome(rank, time.monotonic() - begin, value)
    except Exception as error:
        seconds = time.monotonic() - begin
        details = traceback.format_exc()
        return Outcome(rank, seconds, None, type(error).__name__, str(error), details)
