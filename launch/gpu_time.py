"""Where a GPU's time goes: the kernels of a profile by kind, and when nothing ran.

    wall = sum over kinds + idle

Kernels of several streams overlap; while n of them run, each is given 1/n of the time, so that the
table adds up to the wall clock. What a kernel is follows from its name (:data:`KINDS`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention, before and after": (
        "Preprocess", "Postprocess", "dot_do_o", "convert_dq", "compute_dot",
    ),
    "attention": ("FlashAttention", "flash_fwd", "flash_bwd", "cudnn", "fmha"),
    "merges": ("Merge_object",),
    "gradient sums": ("Accumulate_object",),
    "copies and flags against NaN": ("Guard_object", "Fill_object"),
    "MXFP8": ("Encode_object", "Decode_object"),
    "transfers": ("Memcpy DtoD", "Memcpy PtoP"),
    "other": ("",),
}  # fmt: skip
"""Kind -> parts of names; a kernel is of the first kind that has one of its parts."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel or copy: its name, when it ran (ns), on which stream, and which thread launched it
    (0: unknown), as the profiler numbers them.
    """

    name: str
    start: int
    stop: int
    stream: int = 0
    thread: int = 0


def kind_of(name: str) -> str:
    return next(kind for kind, parts in KINDS.items() if any(part in name for part in parts))


def ran(profile: Any) -> list[Ran]:
    """What ran on the GPU during a ``torch.profiler.profile`` that was stopped."""
    events = profile.profiler.kineto_results.events()
    launches = {
        event.correlation_id(): event.device_resource_id() & 0xFFFFFFFF
        for event in events
        if event.device_type() == DeviceType.CPU and event.correlation_id()
    }
    return [
        Ran(
            event.name(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.device_resource_id(),
            launches.get(event.correlation_id(), 0),
        )
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def shares(what: Iterable[Ran]) -> dict[str, tuple[float, int]]:
    """Kind -> (seconds, how many ran), longest first; "idle" is when nothing ran in between."""
    events = list(what)
    edges = sorted(
        [(x.start, 1, n) for n, x in enumerate(events)]
        + [(x.stop, 0, n) for n, x in enumerate(events)]
    )
    given: defaultdict[str, float] = defaultdict(float)
    active: set[int] = set()
    last = edges[0][0] if edges else 0
    for at, starts, n in edges:
        for running in active:
            given[kind_of(events[running].name)] += (at - last) / len(active)
        if not active:
            given["idle"] += at - last
        last = at
        if starts:
            active.add(n)
        else:
            active.discard(n)
    count = Counter(kind_of(x.name) for x in events)
    longest = sorted(given.items(), key=lambda item: -item[1])
    return {kind: (ns * 1e-9, count[kind]) for kind, ns in longest}


def table(times: Mapping[str, tuple[float, int]]) -> str:
    """Lines of kind, milliseconds, share of all, and how many ran."""
    total = sum(seconds for seconds, _ in times.values())
    lines = [
        f"  {kind:30} {seconds * 1e3:9.2f} ms {seconds / total:7.1%} {count:6}"
        for kind, (seconds, count) in times.items()
    ]
    return "\n".join([*lines, f"  {'together':30} {total * 1e3:9.2f} ms"])
