"""Ranks of a Ray cluster's seats: who sits where, and who is therefore which rank.

    places = settle the seats' domains;  order = in_order(places);  rank r sits at places[order[r]]

A ring sends from r to r + 1, so neighbours should be near: ranks of one NVLink domain are
consecutive, inside it those of one node, inside that in the order of their GPUs. Then P ranks on D
domains have D connections that leave a domain, as few as a ring can. Domains and nodes come in the
order of their addresses: twice the same cluster, twice the same ranks.

Pure Python: no Ray, no torch.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank sits. ``domain`` names what it shares NVLink with: a fabric, else its node."""

    node: str
    address: str
    pid: int
    gpu: str | None
    domain: str

    def __str__(self) -> str:
        gpu = "" if self.gpu is None else f", GPU {self.gpu}"
        return f"pid {self.pid} on {self.address}{gpu}"


def in_order(places: Sequence[Place]) -> list[int]:
    """Indices into ``places`` by rank."""
    first: dict[str, tuple[int, int, str]] = {}
    for place in places:
        key = (*_address(place.address), place.node)
        first[place.domain] = min(first.get(place.domain, key), key)

    def rank_key(i: int) -> tuple[object, ...]:
        p = places[i]
        gpu = p.gpu or ""
        gpu = gpu.zfill(9) if gpu.isdigit() else gpu  # an index, or a name
        return (first[p.domain], p.domain, *_address(p.address), p.node, gpu, p.pid)

    return sorted(range(len(places)), key=rank_key)


def _address(text: str) -> tuple[int, int]:
    """Addresses in numeric order, version 4 before 6."""
    address = ipaddress.ip_address(text)
    return address.version, int(address)


def local_ranks(places: Sequence[Place]) -> list[int]:
    """For each rank, how many ranks before it share its node."""
    seen: Counter[str] = Counter()
    local = []
    for place in places:
        local.append(seen[place.node])
        seen[place.node] += 1
    return local


def domains(places: Sequence[Place]) -> tuple[int, ...]:
    """For each rank, the number of its domain, from 0 in the order of ranks."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(place.domain, len(numbers)) for place in places)


def even_domains(numbers: Sequence[int]) -> int | None:
    """How many domains of neighbours there are, when they are of one size: what ``--domains`` is.

    ``numbers`` as :func:`domains` gives them. None when a domain is all ranks, or one rank, or
    sizes differ: ranks then read from each other directly.
    """
    sizes = set(Counter(numbers).values())
    count = len(set(numbers))
    return count if count > 1 and len(sizes) == 1 and sizes != {1} else None


def require_one_build(builds: Sequence[str], where: Sequence[str]) -> None:
    """ValueError unless all ``builds`` are equal; ``where[i]`` runs ``builds[i]``."""
    for there, build in zip(where, builds, strict=True):
        if build != builds[0]:
            raise ValueError(
                f"nodes run different versions: {where[0]} has {builds[0]}, {there} has {build}"
            )
