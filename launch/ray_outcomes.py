"""How ranks ended, and what that means for all of them: one error that names rank and step.

    outcomes (one a rank)  ->  culprit  ->  RankFailed, or what every rank raised alike

Who is to blame, the first that there is of

    Lost      a rank whose process or node is gone
    (other)   a rank with an error of its own
    PeerError the rank that most others name, in the end: they waited for it
    Busy      a rank that still did not answer when the others had failed

A dead process breaks connections in a ring, and a rank that gives up says so to the others, so
ranks further away blame those who noticed first, and a late rank keeps others who are blamed for
it: such chains are followed to their end, from each rank to the one it waited for. All that is
hearsay, which the first two kinds overrule. ContextBrokenError is hearsay too.

Pure Python: no Ray, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfa4.errors import MissingLibraryError, PlanMismatchError, RingError
from ringfa4.launch.ray_places import Place

Spot = tuple[str, str, int]
"""(call, kind of span, plan step): where a rank is, or was last."""

LOST, BUSY = "Lost", "Busy"
"""Errors that the driver finds, beside the exceptions' names."""

HEARSAY = (BUSY, "PeerError", "ContextBrokenError")

ALIKE: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, PlanMismatchError, MissingLibraryError, OSError, FileNotFoundError)
}
"""What ranks raise alike when the caller asked for what cannot be done; nothing is broken then."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a function ended on one rank.

    ``error`` is None when it returned ``value``, else an exception's type, :data:`LOST` or
    :data:`BUSY`. A PeerError ``blames`` a rank and names the plan ``step`` in which this one
    noticed, and the rank it ``awaited`` then, when that is another one. ``spot`` is the span that
    this rank entered last.
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    details: str = ""
    blames: int | None = None
    step: int | None = None
    spot: Spot | None = None
    awaited: int | None = None

    @property
    def waited_for(self) -> int | None:
        return self.blames if self.awaited is None else self.awaited


class RankFailed(RingError):
    """Rank ``rank`` ended the run of all; ``outcomes`` says how each rank ended, by rank.

    ``rank`` is None when no rank can be named. ``step`` is the plan step in which it raised, else
    one in which another rank noticed, the first that is known; None outside the ring. Who notices
    first depends on the machine: only the rank is sure. ``details`` is the culprit's traceback,
    where its error is not a known one.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        outcomes: Sequence[Outcome] = (),
    ) -> None:
        self.rank, self.step, self.outcomes = rank, step, tuple(outcomes)
        super().__init__(message)

    @property
    def details(self) -> str:
        known = (None, LOST, *HEARSAY, *ALIKE)
        return "".join(
            o.details for o in self.outcomes if o.rank == self.rank and o.error not in known
        )


def failed(outcomes: Sequence[Outcome]) -> bool:
    return any(o.error is not None for o in outcomes)


def raised_alike(outcomes: Sequence[Outcome]) -> Exception | None:
    """The caller's mistake, when that is what every rank says."""
    said = {(o.error, o.message) for o in outcomes}
    if len(said) != 1:
        return None
    error, message = said.pop()
    kind = ALIKE.get(error or "")
    return None if kind is None else kind(message)


def blame(outcomes: Sequence[Outcome]) -> int | None:
    """The culprit, as the module says; None when nobody can be named."""
    for o in outcomes:
        if o.error == LOST:
            return o.rank
    for o in outcomes:
        if o.error is not None and o.error not in HEARSAY:
            return o.rank
    named = Counter(_root(o, outcomes) for o in outcomes if o.blames is not None)
    if named:
        return named.most_common(1)[0][0]
    return next((o.rank for o in outcomes if o.error == BUSY), None)


def _root(outcome: Outcome, outcomes: Sequence[Outcome]) -> int | None:
    """Whom ``outcome`` waited for, or whom that one did in turn, and so on; ranks that waited for
    each other in a circle are taken at their word."""
    seen, at = {outcome.rank}, outcome.waited_for
    while at is not None and at not in seen and outcomes[at].blames is not None:
        seen.add(at)
        at = outcomes[at].waited_for
    return outcome.blames if at in seen else at


def diagnose(
    outcomes: Sequence[Outcome],
    places: Sequence[Place],
    last: Mapping[int, Spot | None],
    dead_nodes: frozenset[str] = frozenset(),
) -> RankFailed:
    """The one error. ``last``: where the driver saw each rank last, by rank."""
    culprit = blame(outcomes)
    if culprit is None:
        said = "; ".join(f"rank {o.rank}: {o.message}" for o in outcomes if o.error is not None)
        return RankFailed(said, outcomes=outcomes)
    theirs, place = outcomes[culprit], places[culprit]
    witnesses = [o for o in outcomes if culprit in (o.blames, o.awaited) and o.rank != culprit]
    witnesses.sort(key=lambda o: (o.blames != culprit, o.step is None, o.step or 0))
    own = theirs.error is not None and theirs.error not in (LOST, *HEARSAY)
    if own:
        what = f"{theirs.error}: {theirs.message}"
    elif theirs.error == LOST:
        what = f"its node {place.address} is gone" if place.node in dead_nodes else theirs.message
    else:
        heard = witnesses[0].message if witnesses else theirs.message
        what = heard.removeprefix(f"rank {culprit}: ").partition(" (noticed ")[0]
        if witnesses and witnesses[0].blames != culprit:
            what = f"rank {witnesses[0].rank}, which was given up, waited for it"
        what += "; it does not answer" if theirs.error == BUSY and witnesses else ""
    spot = theirs.spot or last.get(culprit)
    parts = [f"rank {culprit} ({place}): {what}"]
    if spot is not None:
        parts.append(f"{'' if own else 'last seen '}{at(spot)}")
    if witnesses:
        parts.append(f"rank {witnesses[0].rank} noticed {at(witnesses[0].spot)}")
    elif theirs.error == BUSY:  # the others gave up where they cannot tell for whom they waited
        parts += [f"rank {o.rank}: {o.message}" for o in outcomes if o.error == "PeerError"][:1]
    if len(parts) == 1:
        parts.append("before its first step")
    if own and spot is not None:
        step: int | None = spot[2]
    else:
        step = _step(witnesses[0]) if witnesses else None
    return RankFailed("; ".join(parts), rank=culprit, step=step, outcomes=outcomes)


def _step(o: Outcome) -> int | None:
    """The plan step in which a rank noticed; 0 while ranks agree before the first transfer."""
    return o.step if o.step is not None or o.spot is None else o.spot[2]


def at(spot: Spot | None) -> str:
    if spot is None:
        return "outside the ring"
    call, kind, step = spot
    return f"in {call}, step {step} ({kind})"
