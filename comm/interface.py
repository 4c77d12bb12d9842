"""What moves bytes between ranks, and what ranks say to each other beside the data.

A :class:`Control` is the host-side channel (small byte strings, failures). A :class:`Transport`
owns the arena and the data path of one process group and device; it is shared by all layers, and
every rank makes every call on it in the same order, also when it has no work.

One call (forward or backward of one attention) is one :class:`Exchange`:

    control.gather_to_open(header)     ranks agree (ringfa4.context does this)
    ex = transport.open(schedule)      outbox of this call's parity is free to write
    encode into ex.outbox()
    ex.publish()                       after this, peers may read the outbox
    for t in 1 .. steps-1:             every rank, every t, in order
        h = ex.fetch(t)                starts reading; at most two fetches are live
        view = h.wait()                None when the step needs no records
        ...compute...                  view is valid until fetch(t + 2)
        slot = ex.grad_slot(t)         backward: where this step's dK/dV for the owner go
        ex.send_grads(t)               backward: slot is complete
        for c in ex.contributions(t):  backward: what reached this rank in step t, plan order
            add c.view; c.release()
    ex.finish()

The contributions of step t may be taken later, as long as they are taken and released, in order,
before send_grads(t + 2): so they travel while step t + 1 computes, and those of two steps, which
the inbox holds, can be added at once.

dK/dV protocol: the owner's inbox has two slots. Contribution i to an owner (plan order: step order,
one per step at most) uses slot i % 2, and its sender starts only when the owner has released
contribution i - 2. The owner takes contributions in plan order, so sums are deterministic.

Carrying. Under a topology (:mod:`ringfa4.topology`) a rank brings another domain's records over
once, for itself and for peers of its domain:

    fetch(t) with a carry       starts it, into copy slot ``lap % 2``, which stays this rank's
    fetch(t) from a lap         reads the source's copy of that lap, once it is complete there
    fetch(t) from rank itself   gives the own copy, in place
    slot ``lap % 2``            is written again, in lap + 2 or a later call, when its readers have
                                read it: all of them did so in earlier steps, so nobody waits in a
                                circle

dK/dV of carried records go to who carried them, by the protocol below; the executor adds them up.

Buffers alternate by call parity; a rank arrives at the barrier of call n + 1 only after its last
read of call n, in stream order. After an error the exchange and its transport refuse further use.
Parity is host state, so CUDA-graph capture is refused. Group ranks everywhere, never global ranks.
Bytes and JSON, never pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes between this rank and ``peer``. ``spans`` are (offset, bytes) in the source's
    outbox, or in what it carried in ``lap``, copied in order, packed at the reader."""

    peer: int
    spans: tuple[tuple[int, int], ...]
    lap: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.spans)


@dataclass(frozen=True, slots=True)
class Carry:
    """Records brought over from ``peer``'s outbox (``spans``, packed) into copy slot ``lap % 2``.

    ``readers``: the peers that read the copy there.
    """

    peer: int
    spans: tuple[tuple[int, int], ...]
    lap: int
    readers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.spans)


@dataclass(frozen=True, slots=True)
class GradTransfer:
    """dK/dV contribution number ``index`` (from 0) to its owner, ``nbytes`` long, packed."""

    peer: int
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """All this rank does in one step; None: nothing to do.

    ``receive``: records read from ``receive.peer``, which is this rank where its own copy is meant;
    ``send``: what ``send.peer`` reads here in the same step. ``grad_out``: this rank's contribution
    to the owner, or to who carried; ``grad_in``: the contribution that reaches this rank.
    ``carry``: what this rank begins to bring over; ``lend``: what another one does from here.
    """

    receive: Transfer | None = None
    send: Transfer | None = None
    grad_out: GradTransfer | None = None
    grad_in: GradTransfer | None = None
    carry: Carry | None = None
    lend: Transfer | None = None


@dataclass(frozen=True)
class Schedule:
    """The data movement of one rank for one call, derived from the plan. ``steps[0]`` is local and
    moves nothing; after the plan's steps one more may bring dK/dV home.

    The capacities are maxima over *all* ranks and both directions of the plan, so that all ranks
    size their arena alike: ``outbox_bytes`` (this call's own outbox is ``own_bytes``),
    ``fetch_bytes`` (largest receive), ``grad_bytes`` (largest contribution), ``carry_bytes``
    (largest copy carried).
    """

    rank: int
    world: int
    own_bytes: int
    outbox_bytes: int
    fetch_bytes: int
    grad_bytes: int
    steps: tuple[StepTransfers, ...]
    carry_bytes: int = 0

    def require_valid(self, rank: int, world: int) -> None:
        """Raises ValueError unless this is a schedule of ``rank`` of ``world`` that keeps the
        rules above."""
        if (self.rank, self.world) != (rank, world):
            raise ValueError(
                f"the schedule is for rank {self.rank} of {self.world}, "
                f"the transport is rank {rank} of {world}"
            )
        if self._fault is not None:
            raise ValueError(self._fault)

    @cached_property
    def _fault(self) -> str | None:
        """Which rule it breaks; layers send the same schedule in every call."""
        rank, world = self.rank, self.world
        if self.own_bytes > self.outbox_bytes:
            return f"{self.own_bytes=} exceeds {self.outbox_bytes=}"
        if not self.steps or self.steps[0] != StepTransfers():
            return "step 0 is local and moves nothing"
        given = 0
        for number, step in enumerate(self.steps):
            moves = (step.receive, step.send, step.grad_out, step.grad_in, step.carry, step.lend)
            for transfer in moves:
                if transfer is not None and (
                    not 0 <= transfer.peer < world
                    or transfer.nbytes <= 0
                    or (transfer.peer == rank and not _is_own_copy(transfer))
                ):
                    return f"step {number} of rank {rank} of {world}: {transfer}"
            if step.receive is not None and step.receive.nbytes > (
                self.carry_bytes if step.receive.peer == rank else self.fetch_bytes
            ):
                return f"step {number} receives {step.receive.nbytes} > {self.fetch_bytes=}"
            if step.carry is not None and step.carry.nbytes > self.carry_bytes:
                return f"step {number} carries {step.carry} > {self.carry_bytes=}"
            for given_away in (step.send, step.lend):
                if given_away is None:
                    continue
                there = self.own_bytes if given_away.lap is None else self.carry_bytes
                if max(map(sum, given_away.spans)) > there:
                    return (
                        f"step {number} sends {given_away} of {self.own_bytes=}, "
                        f"{self.carry_bytes=}"
                    )
            for grad in (step.grad_out, step.grad_in):
                if grad is not None and grad.nbytes > self.grad_bytes:
                    return f"step {number}: {grad} exceeds {self.grad_bytes=}"
            if step.grad_in is not None:
                if step.grad_in.index != given:
                    return f"step {number}: contribution {given} is due, not {step.grad_in}"
                given += 1
        return None


def _is_own_copy(transfer: Transfer | GradTransfer | Carry) -> bool:
    return isinstance(transfer, Transfer) and transfer.lap is not None


class Handle(ABC):
    """A fetch under way."""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """The packed bytes (uint8), ready for work on the current stream; None when the step
        receives nothing.

        Idempotent. Raises PeerError when the source failed or is late.
        """


@dataclass(frozen=True)
class Contribution:
    """dK/dV for this rank's records from ``peer``; read ``view`` (uint8, packed), then call
    ``release``."""

    peer: int
    view: Tensor
    _release: Callable[[], None]

    def release(self) -> None:
        """Reads of ``view`` issued so far on the current stream are the last ones."""
        self._release()


class Exchange(ABC):
    """One call. See the module's protocol."""

    @abstractmethod
    def outbox(self) -> Tensor:
        """uint8, ``schedule.own_bytes`` long, 128-byte aligned; contents undefined."""

    @abstractmethod
    def publish(self) -> None:
        """The outbox is complete (work on the current stream included); peers may read it."""

    @abstractmethod
    def fetch(self, step: int) -> Handle:
        """Start the transfers of ``step``. Called for each step from 1 on, in order, at most one
        ahead of the last waited."""

    @abstractmethod
    def grad_slot(self, step: int) -> Tensor | None:
        """uint8 buffer for this step's contribution (``grad_out.nbytes``; contents undefined),
        None without one."""

    @abstractmethod
    def send_grads(self, step: int) -> None:
        """The slot is complete (work on the current stream included). Called for each step from
        1 on, in order, also without a slot."""

    @abstractmethod
    def contributions(self, step: int) -> Iterator[Contribution]:
        """Contributions of ``step`` to this rank, once they are here. Called for each step in
        order, after ``send_grads(step)``; two at most wait to be released."""

    @abstractmethod
    def finish(self) -> None:
        """This rank's last read of the call is issued."""


class Transport(ABC):
    """Data path of one group on one device."""

    name: str
    rank: int
    world: int
    device: torch.device
    why: tuple[str, ...] = ()
    """Why this transport was taken and others were not, when nobody asked for it by name."""

    @abstractmethod
    def ready(self, schedule: Schedule) -> bool:
        """Whether ``open`` can lend buffers without growing the arena. Growing is collective:
        agree first."""

    @abstractmethod
    def open(self, schedule: Schedule) -> Exchange:
        """Begin a call. ValueError when a schedule is not this rank's; RuntimeError under
        CUDA-graph capture."""

    @abstractmethod
    def all_gather(self, local: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's bytes, by rank: ``local`` is 1-D uint8 with ``sizes[rank]`` elements; sizes
        may differ and be 0.

        Outside an exchange, in the same order on all ranks, after :meth:`Control.gather` agreed on
        the sizes. Sharding, sinks and means are built on it (sums are taken in rank order, hence
        deterministic).
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Refuse everything from now on; wake whoever waits here. Not collective."""

    @abstractmethod
    def close(self) -> None:
        """Release the arena. Collective after a clean run; never blocks after :meth:`abort`."""


class Control(ABC):
    """Host-side side channel of one group. ``timeout_s`` bounds every wait of this rank, here and
    in its transport, and is read when the wait begins."""

    rank: int
    world: int
    timeout_s: float

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. At most :data:`MESSAGE_BYTES` each. Raises PeerError
        naming a failed or late rank."""

    def gather_to_open(self, message: bytes) -> list[bytes]:
        """As :meth:`gather`, of ranks that then open a call at once, or :meth:`decline`.

        Where ranks work in turn it ends with this rank's turn: each returns when the one before
        waits in its call.
        """
        return self.gather(message)

    def decline(self) -> None:  # noqa: B027  # only where ranks work in turn is there more to do
        """No call is opened after :meth:`gather_to_open`."""

    @abstractmethod
    def report(self, reason: str) -> None:
        """Tell the peers that this rank failed. Never raises, never waits."""

    @abstractmethod
    def failure(self) -> tuple[int, str] | None:
        """(rank, reason) of the first peer that reported a failure, if any. Cheap enough to poll
        while waiting."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent, not collective."""


MESSAGE_BYTES = 4096
"""Longest message of :meth:`Control.gather`."""


def require_message(message: bytes) -> None:
    """Raises ValueError when ``message`` is too long for :meth:`Control.gather`."""
    if len(message) > MESSAGE_BYTES:
        raise ValueError(f"a control message of {len(message)} bytes exceeds {MESSAGE_BYTES=}")


def require_gather_arguments(local: Tensor, sizes: Sequence[int], rank: int, world: int) -> None:
    """Raises ValueError unless ``local`` is what ``sizes`` says this rank contributes."""
    if len(sizes) != world or local.dtype != torch.uint8 or tuple(local.shape) != (sizes[rank],):
        raise ValueError(
            f"rank {rank} of {world} contributes {sizes[rank : rank + 1]} uint8 of {list(sizes)}, "
            f"not {local.dtype} {tuple(local.shape)}"
        )
