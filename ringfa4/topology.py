"""Which ranks share an NVLink domain, and the order in which they then read.

    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))       D domains of n ranks
    step t = lap * n + turn of rank domains[d][i]:
        owner   domains[(d - lap) % D][(i - turn) % n]
        source  the owner in lap 0;  else domains[d][(i - turn) % n]

In lap 0 a domain works on its own K/V, in lap u on that of the u-th domain before it. In turn 0 of
a lap each rank has the records of its opposite number there, which it brought over for the whole
domain; in the other turns it reads from the peer who brought them. So whatever a domain needs of a
rank outside crosses once, and the sources of a step are a permutation, as the owners are. One
domain, and domains of one rank, are the flat ring, owner (r - t) % P.

Invariant: each rank of [0, world) is in exactly one domain, and domains have one size. Left out:
domains of different sizes (their laps would need empty turns), and what links are worth.

Pure Python: neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """``domains[d]`` are the group ranks of domain d, in the order in which they read.

    Raises ValueError unless the domains are of one size and hold each rank once.
    """

    domains: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        given: Iterable[Iterable[int]] = self.domains
        domains = tuple(tuple(domain) for domain in given)
        object.__setattr__(self, "domains", domains)
        ranks = [rank for domain in domains for rank in domain]
        if not ranks or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
            raise ValueError(f"domains are lists of ranks, got domains={domains}")
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"domains must hold each rank of 0..{len(ranks) - 1} once, got domains={domains}"
            )
        sizes = [len(domain) for domain in domains]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"domains must have one size, they have {sizes} ranks: domains={domains}; "
                "without a topology ranks read from each other directly"
            )

    @classmethod
    def even(cls, world: int, count: int) -> Topology:
        """``count`` domains of neighbouring ranks. ValueError unless ``world`` divides by it."""
        if world < 1 or count < 1 or world % count:
            raise ValueError(f"{world} ranks do not make {count} domains of one size")
        size = world // count
        return cls(tuple(tuple(range(d * size, (d + 1) * size)) for d in range(count)))

    @classmethod
    def of(cls, labels: Sequence[Hashable]) -> Topology:
        """Ranks of one label (a node, an NVLink domain) share a domain; ``labels[r]`` is r's."""
        found: dict[Hashable, list[int]] = {}
        for rank, label in enumerate(labels):
            found.setdefault(label, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def world(self) -> int:
        return self.size * self.count

    @property
    def size(self) -> int:
        """Ranks of a domain: turns of a lap."""
        return len(self.domains[0])

    @property
    def count(self) -> int:
        """Domains: laps of a call."""
        return len(self.domains)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(domain, place in it) of each rank."""
        found = {
            rank: (d, i) for d, ranks in enumerate(self.domains) for i, rank in enumerate(ranks)
        }
        return tuple(found[rank] for rank in range(self.world))

    def together(self, a: int, b: int) -> bool:
        """Whether two ranks share a domain."""
        return self.places[a][0] == self.places[b][0]

    def peer(self, rank: int, laps: int, turns: int) -> int:
        """The rank that is ``laps`` domains and ``turns`` places after ``rank``; before, if < 0."""
        d, i = self.places[rank]
        return self.domains[(d + laps) % self.count][(i + turns) % self.size]
