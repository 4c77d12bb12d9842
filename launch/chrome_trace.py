"""One timeline of all ranks, in Chrome's trace format: for ui.perfetto.dev or chrome://tracing.

    process "rank r" (pid r)    rows call, agree, encode, fetch, wait, compute, merge (tid 0..6);
                                on GPUs "GPU compute", "GPU copies" .. (launch/gpu_trace.py)
    slice                       one span: name its kind and step, args owner, records, bytes, pairs
    arrow "kv"                  publish of the owner  ->  wait of the rank that read from it
    arrow "dkv"                 grads of the sender   ->  reduce of the owner

A document is {"traceEvents": [{"name", "ph", "pid", "tid", "ts", "dur", "args"}, ..]}, times in
microseconds from the first event on: "X" a slice, "s" and "f" the ends of an arrow, "M" a name.

Clocks. Ranks on one machine read one clock (CLOCK_MONOTONIC). A rank on another machine than rank 0
is shifted by the median difference of what both read when they leave a barrier: right to about the
time that a small message takes.

Everything happens after the run: ranks turn their spans into events and gather them as JSON bytes,
over the ring's own transport. Left out: the time that bytes are under way between hosts, which
nobody on the host sees; it ends in or before the wait.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringfa4.context import Context
from ringfa4.launch.gpu_trace import Row
from ringfa4.ring import Ring
from ringfa4.trace import Span
from ringfa4.wire import Direction

ROWS = {
    "call": (),
    "agree": ("agree",),
    "encode": ("encode", "publish"),
    "fetch": ("fetch", "grads"),
    "wait": ("wait",),
    "compute": ("compute",),
    "merge": ("reduce", "finish"),
}
"""Row -> the kinds of spans on it, top to bottom."""

_TID = {kind: tid for tid, kinds in enumerate(ROWS.values()) for kind in kinds}

BARRIERS = 9
"""Readings of the clock that a shift is the median of."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of the ring on this rank; ``name`` tells it from the others of a trace."""

    name: str
    direction: Direction
    ring: Ring
    spans: Sequence[Span]
    gpu: Sequence[Row] = ()
    """Of all ranks of this process, with one of them."""


def events(call: Call) -> Iterator[Event]:
    """Slices and arrows of one rank's call; ``ts`` on its own clock, in microseconds."""
    plan, rank = call.ring.plan, call.ring.rank
    transfers = call.ring.schedule(call.direction).steps
    begin, end = min(s.start for s in call.spans), max(s.stop for s in call.spans)
    yield _slice(rank, 0, call.name, begin, end, {"direction": call.direction})
    for span in call.spans:
        # The step after the last one only brings dK/dV home.
        step = plan.step(rank, min(span.step, plan.world - 1))
        moves = transfers[span.step]
        args: Event = {"step": span.step}
        arrows: list[tuple[str, float, str, int, int]] = []
        if span.kind == "compute":
            args |= {"owner": step.owner, "tasks": len(step.tasks), "pairs": step.area}
        elif span.kind in ("fetch", "wait"):
            args |= {"owner": step.owner, "source": step.source, "records": step.records}
            args["bytes"] = moves.receive.nbytes if moves.receive else 0
            if span.kind == "wait" and moves.receive and moves.receive.peer != rank:
                arrows.append(("f", _inside(span), "kv", step.source, span.step))
        elif span.kind == "publish":
            sends = [t for t, move in enumerate(transfers) if move.send]
            arrows += [("s", span.start, "kv", rank, t) for t in sends]
        elif span.kind == "grads":
            args |= {"owner": step.owner, "bytes": 0}
            back = plan.returns(rank, span.step)
            if moves.grad_out and back:
                args |= {"owner": back.owner, "to": back.peer, "bytes": moves.grad_out.nbytes}
                arrows.append(("s", span.start, "dkv", moves.grad_out.peer, span.step))
        elif span.kind == "reduce" and moves.grad_in:
            args |= {"from": moves.grad_in.peer, "bytes": moves.grad_in.nbytes}
            arrows.append(("f", _inside(span), "dkv", rank, span.step))
        tid = _TID[span.kind]
        yield _slice(rank, tid, f"{span.kind} {span.step}", span.start, span.stop, args)
        for ph, at, what, owner, t in arrows:
            where = {"pid": rank, "tid": tid, "ts": at * 1e6}
            bind = {"bp": "e"} if ph == "f" else {}
            name = f"{call.name}/{what}/{owner}/{t}"
            yield {"name": what, "cat": what, "ph": ph, "id": name, **where, **bind}
    rows: Counter[int] = Counter()
    for row in call.gpu:
        tid = len(ROWS) + rows[row.rank]
        rows[row.rank] += 1
        yield _meta("thread_name", row.rank, {"name": row.name}, tid)
        yield _meta("thread_sort_index", row.rank, {"sort_index": tid}, tid)
        for what, start, stop in row.spans:
            yield _slice(row.rank, tid, what, start, stop, {})


def _slice(pid: int, tid: int, name: str, start: float, stop: float, args: Event) -> Event:
    where = {"pid": pid, "tid": tid, "ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"name": name, "cat": "ring", "ph": "X", **where, "args": args}


def _inside(span: Span) -> float:
    """Where an arrow ends: as late as it can, and still within the slice that it binds to."""
    return max(span.start, span.stop - 1e-9)


# ---- from all ranks to one document -------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one rank contributes: ``clock`` names the clock, ``stamps`` are its barriers' times."""

    rank: int
    clock: str
    stamps: tuple[float, ...]
    events: list[Event]

    def encode(self) -> bytes:
        return json.dumps([self.rank, self.clock, self.stamps, self.events]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Part:
        rank, clock, stamps, found = json.loads(message)
        return cls(rank, clock, tuple(stamps), found)


def gather(context: Context, calls: Iterable[Call]) -> list[Part]:
    """Every rank's events, on every rank. Collective."""
    with context.guard():
        stamps = []
        for _ in range(BARRIERS):
            context.control.gather(b"")
            stamps.append(time.perf_counter())
    own = [event for call in calls for event in events(call)]
    message = Part(context.rank, clock_name(), tuple(stamps), own).encode()
    sizes = context.agree({"call": "trace"}, values={"bytes": len(message)})
    with context.guard():
        local = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(context.device)
        parts = context.transport.all_gather(local, [size["bytes"] for size in sizes])
        return [Part.decode(part.cpu().numpy().tobytes()) for part in parts]


def clock_name() -> str:
    """The same on two ranks exactly when ``time.perf_counter`` counts from one moment on both."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def document(runs: Iterable[Sequence[Part]]) -> dict[str, Any]:
    """The trace of one or several runs, each given as the parts of its ranks."""
    found: list[Event] = []
    for parts in runs:
        for part in parts:
            shift = 1e6 * offset(parts[0], part)
            found += [_moved(event, shift) for event in part.events]
    origin = min(event["ts"] for event in found if "ts" in event)
    found = [_moved(event, origin) for event in found]
    names = []
    for rank in sorted({event["pid"] for event in found}):
        names.append(_meta("process_name", rank, {"name": f"rank {rank}"}))
        names.append(_meta("process_sort_index", rank, {"sort_index": rank}))
        for tid, row in enumerate(ROWS):
            names.append(_meta("thread_name", rank, {"name": row}, tid))
            names.append(_meta("thread_sort_index", rank, {"sort_index": tid}, tid))
    return {"displayTimeUnit": "ms", "traceEvents": names + found}


def _moved(event: Event, earlier: float) -> Event:
    return {**event, "ts": event["ts"] - earlier} if "ts" in event else event


def offset(first: Part, part: Part) -> float:
    """Seconds that ``part``'s clock is ahead of ``first``'s."""
    if part.clock == first.clock:
        return 0.0
    pairs = zip(part.stamps, first.stamps, strict=True)
    return statistics.median(theirs - ours for theirs, ours in pairs)


def _meta(name: str, pid: int, args: Event, tid: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
