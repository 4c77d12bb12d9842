"""Two hosts on one machine: network namespaces joined by a veth pair, which a test may cut.

    with two_hosts() as (a, b):
        a.popen(["python", ...]);  b.popen([...])      processes with a network stack of their own
        b.cut()                                        no packet passes any more, nobody is told

Each has an address of 10.77.0.0/24 and a loopback of its own; nothing else can be reached, nor
reach them. Making them takes root (CAP_SYS_ADMIN, CAP_NET_ADMIN): the test is skipped, visibly,
where that is not permitted. Processes of a host are killed when the block ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest


class Host:
    """A network namespace."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name, self.link, self.address = name, link, address
        self._started: list[subprocess.Popen[str]] = []

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen[str]:
        """``argv`` on this host, output kept as text."""
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
        command = ["ip", "netns", "exec", self.name, *argv]
        self._started.append(subprocess.Popen(command, env={**os.environ, **(env or {})}, **kept))
        return self._started[-1]

    def processes(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def cut(self) -> None:
        """Take the link down: packets vanish, connections are not closed."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def kill(self) -> None:
        """End every process of this host, also those that others started."""
        deadline = time.monotonic() + 10
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in self._started:
            process.communicate(timeout=10)  # also closes its pipes


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else."""
    if shutil.which("ip") is None:
        pytest.skip("needs network namespaces: there is no command `ip` (iproute2)")
    number = os.getpid()
    hosts = (
        Host(f"ringfa4-a{number}", f"r4a{number}", "10.77.0.1"),
        Host(f"ringfa4-b{number}", f"r4b{number}", "10.77.0.2"),
    )
    made = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host)
            a, b = hosts
            _ip("link", "add", a.link, "netns", a.name, "type", "veth",
                "peer", "name", b.link, "netns", b.name)  # fmt: skip
            for host in hosts:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
                _ip("-n", host.name, "link", "set", host.link, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"needs network namespaces with a veth pair (root): {error}")
        yield hosts
    finally:
        for host in made:
            host.kill()
            _ip("netns", "del", host.name)
