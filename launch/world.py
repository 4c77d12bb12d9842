"""Where the ranks of a command run, and how its process ends.

    one_rank      this process is a rank: torchrun started it and others, or it is alone
    in_group      this process is a rank of a group that somebody else made (Ray)
    virtual       all ranks are threads of this process, which share its CPU or one GPU
    exit_code     0 done, 1 refused, failed or past tolerance, 2 usage; an error is one line

What is wrong alike on every rank is said once, by rank 0; what one rank alone knows, by that rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ringfa4.comm.interface import Control, Transport
from ringfa4.comm.local import run_ranks
from ringfa4.context import Context, close_contexts, context_for
from ringfa4.errors import RingError
from ringfa4.launch.options import UsageError
from ringfa4.launch.peers import Alone, Peers, Processes, Threads

T = TypeVar("T")

SAY_S = 20.0
"""How long the other ranks leave it to rank 0 to say what is wrong. torchrun ends them as soon as
rank 0 has ended, so only a rank 0 that says nothing costs this time."""


def environment() -> tuple[int, int, int]:
    """(rank, world, local rank) from torchrun, or (0, 1, 0)."""
    rank, world, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    return rank, world, local


@contextmanager
def one_rank(device: str, transport: str, timeout_s: float) -> Iterator[tuple[Context, Peers]]:
    """This process's context and peers; the group ends with the block. Collective."""
    _, world, local = environment()
    if world == 1:
        yield context_for(device=device, transport=transport, timeout_s=timeout_s), Alone()
        close_contexts()
        return
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    with in_group(transport, timeout_s) as opened:
        yield opened
    dist.destroy_process_group()


@contextmanager
def in_group(transport: str, timeout_s: float) -> Iterator[tuple[Context, Peers]]:
    """Context and peers on the default group, which somebody else made. Collective."""
    context = context_for(transport=transport, timeout_s=timeout_s)
    yield context, Processes(context.device)
    close_contexts()


def virtual(
    ranks: int, transport: str, fn: Callable[[Context, Peers], T], device: str, timeout_s: float
) -> list[T]:
    """``fn(context, peers)`` in one thread a rank; results by rank."""
    if transport not in ("auto", "local"):
        raise ValueError(f"virtual ranks move bytes by 'local', not {transport!r}")
    threads = Threads(ranks, timeout_s)

    def main_of(rank: int, transport: Transport, control: Control) -> T:
        try:
            return fn(Context(transport, control), threads.member(rank))
        except BaseException:
            threads.abort()
            raise

    return run_ranks(ranks, main_of, timeout_s, device)


def exit_code(program: str, run: Callable[[], bool]) -> int:
    """What the process ends with; ``run`` says whether all went well."""
    rank = environment()[0]
    try:
        passed = run()
    except UsageError as error:
        _complain(rank, f"{error.usage}{program}: error: {error}")
        return 2
    except (ValueError, OSError) as error:  # alike on every rank: said once
        _complain(rank, f"{program}: {error}")
        return 1
    except RingError as error:  # each rank knows something of its own
        print(f"{program}: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0 if passed else 1


def _complain(rank: int, message: str) -> None:
    """Rank 0 says it. The others give it time to, since torchrun ends all when one has ended."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(SAY_S)
