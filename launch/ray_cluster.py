"""Rings on a Ray cluster, for tests and scripts.

    with ring_cluster(nodes=2, ranks_per_node=2) as ring:
        values = ring.run(fn, x, y=1)           fn(x, y=1) in every rank, in one default group

Without an address a cluster is started on this machine: one raylet a node, each with a loopback
address of its own, no dashboard, and a temporary folder that goes with it. ``fn`` may be anything
that Ray can pickle; functions of modules must be importable by the ranks, who on this machine look
where this process looks.

``ring.run`` raises what every rank raised alike (ValueError) and can be called again; after
:class:`RankFailed` the next ``run`` starts the ranks anew. When the block ends, no process, no
placement group, no shared memory and no file of it is left.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ringfa4.errors import MissingLibraryError
from ringfa4.launch.ray_outcomes import RankFailed

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError as error:
    raise MissingLibraryError("Ray is not installed; pip install 'ringfa4[ray]'") from error

from ringfa4.launch.ray_gang import Gang, Shape, nodes_there

__all__ = ["Gang", "LocalCluster", "RankFailed", "Ring", "Shape", "connected", "ring_cluster"]

STORE_BYTES = 80 << 20
"""Shared memory of a node on this machine, for what calls of actors carry; Ray's minimum is 75 MiB.
K and V do not pass through it."""

LONGEST_FOLDER = 20
"""Characters of the folder for temporary files: Ray's sockets lie some 85 further on, and their
names may have 107."""

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment of all processes: no report to Ray's makers, and no warning about what a later Ray
does with CUDA_VISIBLE_DEVICES."""

SYSTEM = {
    "prestart_worker_first_driver": False,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""No workers in stock, since ranks have an environment of their own. A node of this machine that is
gone refuses connections: 1.5 s tell. A busy one answers late: Ray allows 10 s a check."""


class LocalCluster:
    """``nodes`` raylets on this machine with ``cpus`` (not more than counted: nobody checks them
    against cores) and ``gpus`` each. ``env[i]``: variables of node i's processes."""

    def __init__(
        self,
        nodes: int,
        cpus: int,
        gpus: int = 0,
        env: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self.cpus, self.gpus, self._env = cpus, gpus, env or {}
        temporary = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="ringfa4-", dir=temporary if len(temporary) <= LONGEST_FOLDER else "/tmp"
        )
        self._before = {name: os.environ.get(name) for name in ("RAY_TMPDIR", *SETTINGS)}
        os.environ.update({"RAY_TMPDIR": self._folder, **SETTINGS})
        os.makedirs(Path(self._folder, "ray"))
        self._cluster = Cluster()
        self._nodes: list[Any] = []
        try:
            for _ in range(nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> int:
        """One more node; its index. The first is the head."""
        index = len(self._nodes)
        head = {} if index else {"include_dashboard": False, "_system_config": SYSTEM}
        devices = range(index * self.gpus, (index + 1) * self.gpus)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if self.gpus else {}
        node = self._cluster.add_node(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            object_store_memory=STORE_BYTES,
            node_ip_address=_loopback(index),
            env_vars={"PYTHONPATH": _path(), **visible, **self._env.get(index, {})},
            **head,
        )
        self._nodes.append(node)
        return index

    def remove_node(self, index: int) -> None:
        """Kill node ``index`` (not the head) and what runs on it, without a word to anybody."""
        self._cluster.remove_node(self._nodes[index], allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _loopback(index: int) -> str:
    """A loopback address a node, so that they differ as nodes do; Linux has all of 127.0.0.0/8.

    Not 127.0.0.1, for which Ray's driver would put the host's outer address.
    """
    return f"127.0.0.{2 + index}" if platform.system() == "Linux" else "127.0.0.1"


def _path() -> str:
    """This process's search path: what it can import, ranks on its machine can."""
    return os.pathsep.join(entry for entry in sys.path if entry)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver of the cluster at ``address`` ("auto": the one of this machine).

    ValueError when there is none, RuntimeError when this process is connected already.
    """
    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already")
    own = {"_node_ip_address": _loopback(0)} if address.startswith("127.") else {}
    # Ray prints raylets' remarks on standard output, also when it is told not to pass on logs.
    ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


class Ring:
    """Ranks of one shape on the cluster that this process is connected to."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._gang: Gang | None = None

    @property
    def gang(self) -> Gang:
        """The ranks; started when there are none that can run."""
        if self._gang is None or self._gang.closed:
            self._gang = Gang(self.shape)
        return self._gang

    @property
    def running(self) -> bool:
        """Whether there are ranks."""
        return self._gang is not None and not self._gang.closed

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``fn(*args, **kwargs)`` in every rank; values by rank. See :meth:`Gang.run`."""
        return self.gang.run(fn, *args, **kwargs)

    def close(self) -> None:
        """End the ranks, if there are any; another run starts new ones."""
        if self._gang is not None:
            self._gang.close(leave=True)


@contextmanager
def ring_cluster(
    nodes: int = 1,
    ranks_per_node: int = 1,
    *,
    address: str | None = None,
    gpus: bool | None = None,
    **shape: Any,
) -> Iterator[Ring]:
    """A ring of ``nodes`` x ``ranks_per_node`` ranks; on a cluster of its own without ``address``.

    ``gpus``: whether each rank gets a GPU; None: where there are enough. ``shape``: other fields of
    :class:`ringfa4.launch.ray_gang.Shape`. Ranks start with the first run. ValueError for a shape
    that the cluster cannot give.
    """
    wanted = Shape(nodes, ranks_per_node, **shape)
    wanted.require_valid()
    with ExitStack() as stack:
        if address is None:
            cpus = ranks_per_node * wanted.cpus_per_rank
            here = ranks_per_node if nodes * ranks_per_node <= torch.cuda.device_count() else 0
            cluster = LocalCluster(nodes, cpus, here)
            stack.callback(cluster.close)
            address = cluster.address
        stack.enter_context(connected(address))
        with_gpus = replace(wanted, gpus=True)
        use = gpus if gpus is not None else len(with_gpus.fitting(nodes_there())) >= nodes
        ring = Ring(with_gpus if use else wanted)
        stack.callback(ring.close)
        yield ring
