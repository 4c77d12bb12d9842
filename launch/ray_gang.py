"""A gang: the ranks of one group as actors of a Ray cluster, which live and die together.

    Gang(shape)      placement group (a bundle a node, STRICT_SPREAD)  ->  an actor a rank
                     seats -> places -> ranks (ringfa4.launch.ray_places)  ->  one process group
    run(fn, *args)   fn in every rank; values by rank, or one error for all
    close()          actors killed, their processes gone, the placement group removed

One error (:mod:`ringfa4.launch.ray_outcomes`). The first rank that fails starts a clock: the others
have :data:`GRACE_S` to fail by themselves, which tells who is to blame and in which step they
noticed; whoever is still busy then does not answer. All are killed. What every rank raises alike is
the caller's mistake and comes back as it is.

After a failure a gang is closed; its ranks no longer agree on where they are. Start another.

Calls of actors travel in Ray's own serialisation (pickle), on Ray's connections: who can reach a
Ray cluster can run code on it. K, V and gradients travel on ringfa4's transports, which never
unpickle.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringfa4.launch.ray_outcomes import (
    BUSY,
    LOST,
    Outcome,
    RankFailed,
    Spot,
    diagnose,
    failed,
    raised_alike,
)
from ringfa4.launch.ray_places import Place, domains, in_order, local_ranks, require_one_build
from ringfa4.launch.ray_rank import Rank

POLL_S = 0.25
"""How often the driver looks at its ranks."""

GRACE_S = 5.0
"""How long the other ranks may take to notice a failure. Reasons travel through the group's store
in 0.05 s; longer is for loaded machines, and for ranks that wait outside the ring."""

LAST_WORD_S = 1.0
"""How long ranks that all others have named may still take to say what is wrong with them."""

BURIAL_S = 30.0
"""How long killed processes and a removed placement group may take to be gone."""

PASSED_ON = ("NCCL_", "GLOO_", "NVSHMEM_", "TORCH_", "CUDA_", "OMP_", "GOMP_", "MKL_", "RINGFA4_")
"""Environment variables of the driver that ranks get, by prefix, as torchrun's would."""

NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES",)
"""Ray's to set."""


@dataclass(frozen=True)
class Shape:
    """What a gang needs of a cluster.

    ``port``: the first one that rank 0 tries for the group's store, 0 for any. ``timeout_s``: how
    long a rank waits for another one. ``start_s``: how long the cluster may take to give the
    resources and to start the ranks. ``order``: from places to ranks.
    """

    nodes: int
    ranks_per_node: int
    gpus: bool = False
    cpus_per_rank: int = 1
    port: int = 0
    timeout_s: float = 300.0
    start_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    order: Callable[[Sequence[Place]], list[int]] = in_order

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one node."""
        cpus = {"CPU": float(self.ranks_per_node * self.cpus_per_rank)}
        return {**cpus, "GPU": float(self.ranks_per_node)} if self.gpus else cpus

    def fitting(self, nodes: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
        """Those of ``nodes`` that have a bundle."""
        return [n for n in nodes if all(n.get(r, 0) >= much for r, much in self.bundle.items())]

    def require_valid(self) -> None:
        """Raises ValueError for what no cluster could give."""
        for name in ("nodes", "ranks_per_node", "cpus_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port} is not a port")
        if not self.timeout_s > 0 or not self.start_s > 0:
            raise ValueError(f"timeouts must be positive: {self.timeout_s=}, {self.start_s=}")


class _Actor(Rank):
    """A :class:`Rank` that asks Ray where it is."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        super().__init__(context.get_node_id(), get_node_ip_address(), gpus[0] if gpus else None)


class Gang:
    """Ranks that are ready to run. Collective start: all of them, or an error and nothing left.

    Raises ValueError when the cluster is too small or its nodes run different versions, RankFailed
    when a rank does not start.
    """

    def __init__(self, shape: Shape) -> None:
        shape.require_valid()
        self.shape, self.closed = shape, False
        self.places: list[Place] = []
        self.port = 0
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        try:
            self._reserve()
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        return self.shape.ranks

    @property
    def domains(self) -> tuple[int, ...]:
        """For each rank, the number of its NVLink domain (its node, where there is none)."""
        return domains(self.places)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        show: Callable[[str], None] | None = None,
        terminal: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` in every rank, in the gang's default group; values by rank.

        ``fn``, its arguments and its values are pickled by Ray. ``show`` gets what rank 0 prints
        through :func:`ringfa4.launch.ray_rank.printed`, as for a terminal or not.

        Raises what every rank raised alike; else RankFailed, and the gang is closed.
        """
        if self.closed:
            raise RuntimeError("this gang has failed or was closed; start another one")
        calls = [actor.run.remote(fn, args, kwargs, terminal) for actor in self._actors]
        watch = _Watch(self._actors, show)
        try:
            outcomes = self._collect(calls, watch)
        except BaseException:
            self.close()
            raise
        finally:
            watch.finish()
        if failed(outcomes):
            raise self._failure(outcomes, watch.last)
        return [o.value for o in outcomes]

    def close(self, *, leave: bool = False) -> None:
        """Ends the ranks and frees what they held. Idempotent; with ``leave``, they part first."""
        if self.closed:
            return
        self.closed = True
        if leave:
            parting = [actor.leave.remote() for actor in self._actors]
            ray.wait(parting, num_returns=len(parting), timeout=GRACE_S)
        for actor in self._actors:
            with suppress(RayError, ValueError):  # gone before
                ray.kill(actor)
        self._await_burial()
        if self._group is not None:
            remove_placement_group(self._group)
            deadline = time.monotonic() + BURIAL_S
            while _state(self._group) != "REMOVED" and time.monotonic() < deadline:
                time.sleep(0.05)

    # ---- start -----------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """The placement group: refused at once when the cluster could never give it."""
        shape, bundle = self.shape, self.shape.bundle
        nodes = nodes_there()
        wanted = f"{shape.nodes} node(s) with {_resources(bundle)} each are wanted"
        if len(shape.fitting(nodes)) < shape.nodes:
            there = "; ".join(_resources(n) for n in nodes)
            raise ValueError(f"{wanted}, but the cluster has {len(nodes)}: {there}")
        self._group = placement_group([bundle] * shape.nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(shape.start_s):
            raise ValueError(f"{wanted}; others still use them after {shape.start_s:g} s")

    def _start(self) -> None:
        shape = self.shape
        passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        env = {k: v for k, v in passed.items() if k not in NOT_PASSED_ON} | dict(shape.env)
        made = ray.remote(concurrency_groups={"watch": 1})(_Actor)
        assert self._group is not None
        for index in range(shape.ranks):
            actor = made.options(
                num_cpus=shape.cpus_per_rank,
                num_gpus=1 if shape.gpus else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index // shape.ranks_per_node
                ),
                runtime_env={"env_vars": env},
            ).remote()
            self._actors.append(actor)
        seats = self._all("seat", [()] * shape.ranks)
        require_one_build([s.pop("build") for s in seats], [s["address"] for s in seats])
        gpus = {s["node"]: [t["gpu"] for t in seats if t["node"] == s["node"]] for s in seats}
        settled = self._all("settle", [(gpus[s["node"]],) for s in seats])
        places = [Place(**s, domain=d) for s, d in zip(seats, settled, strict=True)]
        order = shape.order(places)
        if sorted(order) != list(range(shape.ranks)):
            raise ValueError(f"an order of {shape.ranks} places must name each once, not {order}")
        self._actors = [self._actors[i] for i in order]
        self.places = [places[i] for i in order]
        master = self.places[0].address
        self.port = self._ask(self._actors[:1], "host", [(shape.port,)])[0]
        self._all(
            "join",
            [
                (rank, shape.ranks, local, master, self.port, shape.timeout_s)
                for rank, local in enumerate(local_ranks(self.places))
            ],
        )

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask(self._actors, method, arguments)

    def _ask(
        self, actors: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """``method`` of each actor, while the gang starts. RankFailed for who does not answer."""
        calls = [
            getattr(a, method).remote(*args) for a, args in zip(actors, arguments, strict=True)
        ]
        deadline = time.monotonic() + self.shape.start_s
        waiting = list(calls)
        while waiting:
            left = max(deadline - time.monotonic(), 0)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for call in ready or waiting[:1]:
                index = calls.index(call)
                try:
                    ray.get(call, timeout=0)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, (ValueError, OSError)):
                        raise error.cause from None
                    first = (str(error.cause).strip().splitlines() or [""])[0]
                    why = f"{type(error.cause).__name__}: {first}"
                    raise self._not_started(index, method, why) from error
                except GetTimeoutError:
                    late = f"no answer within {self.shape.start_s:g} s"
                    raise self._not_started(index, method, late) from None
                except RayActorError as error:
                    raise self._not_started(index, method, _brief(error)) from error
        values: list[Any] = ray.get(calls)
        return values

    def _not_started(self, index: int, method: str, why: str) -> RankFailed:
        """``index`` is a rank once there are places, before that an actor's."""
        if self.places:
            who, rank = f"rank {index} ({self.places[index]})", index
        else:
            bundles = placement_group_table(self._group)["bundles_to_node_id"]
            node = bundles[index // self.shape.ranks_per_node]
            addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
            who, rank = f"a rank on {addresses.get(node, node)}", None
        return RankFailed(
            f"{who}: {why}; before the first step ({method})", rank=rank, step=None, outcomes=()
        )

    # ---- run and fail ----------------------------------------------------------------------------

    def _collect(self, calls: list[Any], watch: _Watch) -> list[Outcome]:
        """How each rank ended; the rest is given up when one has failed and GRACE_S is over."""
        waiting = {call: rank for rank, call in enumerate(calls)}
        outcomes: dict[int, Outcome] = {}
        deadline: float | None = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S)
            for call in ready:
                rank = waiting.pop(call)
                outcomes[rank] = outcome = _outcome(rank, call)
                if outcome.error is not None and deadline is None:
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and set(waiting.values()) <= {
                o.waited_for for o in outcomes.values()
            }:
                # Everybody else has waited for these already, for as long as it is allowed.
                deadline = min(deadline, time.monotonic() + LAST_WORD_S)
            watch.look()
        for rank in waiting.values():
            outcomes[rank] = Outcome(rank, error=BUSY, message="no answer")
        return [outcomes[rank] for rank in range(self.world)]

    def _failure(self, outcomes: list[Outcome], last: Mapping[int, Spot | None]) -> Exception:
        """The error for all. Closes the gang, unless nothing is wrong but the caller's input."""
        alike = raised_alike(outcomes)
        if alike is not None:
            return alike
        dead = frozenset(n["NodeID"] for n in ray.nodes() if not n["Alive"])
        self.close()
        return diagnose(outcomes, self.places, last, dead)

    def _await_burial(self) -> None:
        """Until the killed ranks of this machine are no processes any more."""
        here = {n["NodeID"] for n in ray.nodes() if n["NodeManagerHostname"] == platform.node()}
        pids = [p.pid for p in self.places if p.node in here]
        deadline = time.monotonic() + BURIAL_S
        while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)


class _Watch:
    """What ranks do while they run: one question to each is under way at any time."""

    def __init__(self, actors: Sequence[Any], show: Callable[[str], None] | None) -> None:
        self._actors, self._show = actors, show
        self.last: dict[int, Spot | None] = {}
        self._asked: dict[Any, int] = {}
        self._shown = 0

    def look(self) -> None:
        """Takes the answers that are here, and asks again."""
        if self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for call in ready:
                self._take(call)
        asked = set(self._asked.values())
        for rank, actor in enumerate(self._actors):
            if rank not in asked:
                seen = self._shown if rank == 0 and self._show else 1 << 62
                self._asked[_where(actor, seen)] = rank

    def _take(self, call: Any) -> None:
        rank = self._asked.pop(call)
        with suppress(RayError):  # gone: its run says so
            self.last[rank], text = ray.get(call)
            if text and self._show is not None:
                self._shown += len(text)
                self._show(text)

    def finish(self) -> None:
        """What rank 0 printed last."""
        self._asked.clear()
        if self._show is None:
            return
        with suppress(RayError):
            _, text = ray.get(_where(self._actors[0], self._shown), timeout=GRACE_S)
            self._show(text)


def _where(actor: Any, seen: int) -> Any:
    return actor.where.options(concurrency_group="watch").remote(seen)


def nodes_there() -> list[Mapping[str, float]]:
    """The resources of each live node, used or not."""
    return [n["Resources"] for n in ray.nodes() if n["Alive"]]


def _outcome(rank: int, call: Any) -> Outcome:
    """What a finished call of :meth:`Rank.run` says, or why it says nothing."""
    try:
        outcome: Outcome = ray.get(call)
    except RayActorError as error:
        return Outcome(rank, error=LOST, message=_brief(error))
    except RayError as error:  # its arguments or its value could not be pickled
        return Outcome(rank, error=type(error).__name__, message=str(error))
    return outcome


def _brief(error: RayActorError) -> str:
    """Ray's account of a lost actor without its advice."""
    lines = str(error).strip().splitlines()
    if "creation task" in lines[0]:  # the rest is a traceback
        return f"it cannot start: {lines[-1]}"
    detail = " ".join(lines).partition("Worker exit detail: ")[2].partition(". ")[0]
    if not detail or "connection error code 2" in detail:  # end of file
        return "its process is gone (killed, crashed or out of memory)"
    return f"its process is gone ({detail})"


def _state(group: PlacementGroup) -> str:
    return str(placement_group_table(group).get("state", "REMOVED"))


def _resources(there: Mapping[str, float]) -> str:
    return ", ".join(f"{there[r]:g} {r}" for r in ("CPU", "GPU") if r in there) or "nothing"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
