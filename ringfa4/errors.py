"""What ringfa4 raises, and when.

Three kinds, told apart because a caller does something different with each:

- ``ValueError``: the caller passed something that cannot be computed. It names the values, is
  raised alike on every rank, and nothing has moved. The context stays usable.
- :class:`PeerError`: another rank failed, left, or is late. This rank did nothing wrong; the whole
  group has to be restarted.
- :class:`ContextBrokenError`: a call on a context that already failed. After a failure ranks no
  longer agree on which call they are in, so going on could only give wrong results.

``assert`` is for this library's own invariants and never for a caller's input.
"""

from __future__ import annotations


class RingError(RuntimeError):
    """Base of the failures that are not the caller's input."""


class PeerError(RingError):
    """Rank ``rank`` of the group failed, left or did not answer in time.

    ``rank`` is a rank of the group in use (not a global rank), or None when which one is not known.
    ``step`` is the plan step in which this rank noticed, or None outside the ring.

    ``awaited``: whom this rank waited for when it heard of the failure, None when it was ``rank``.
    A rank that is blamed for being late may have waited itself: then it raises this error too, and
    from one ``awaited`` to the next one comes to the rank that kept them all.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        awaited: int | None = None,
    ) -> None:
        self.reason, self.rank, self.step = reason, rank, step
        self.awaited = None if awaited == rank else awaited
        who = "a peer" if rank is None else f"rank {rank}"
        when = "" if step is None else f"in step {step}"
        meanwhile = "" if self.awaited is None else f"waiting for rank {self.awaited}"
        noticed = ", ".join(part for part in (when, meanwhile) if part)
        super().__init__(f"{who}: {reason}{noticed and f' (noticed {noticed})'}")


class PlanMismatchError(ValueError):
    """Ranks disagree about what is being computed; the message names the field and both values."""


class ContextBrokenError(RingError):
    """The context failed earlier (the message says how) and refuses further calls."""


class MissingLibraryError(RingError):
    """An optional library that was asked for by name is not there; the message says how to get
    it.
    """
