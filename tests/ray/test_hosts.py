"""Two hosts with network stacks of their own, a Ray node or a torchrun agent on each, and a link
that is cut in mid-run.

Slow: `make test-ray`. Skipped, visibly, where network namespaces are not permitted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray_work
from netns import Host, two_hosts

from ringfa4.launch import ring

ray_work.ray_cluster()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent.parent
HEAD = "10.77.0.1:6400"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SMALL = ["--seq", "1500", "--backward"]
LONG = ["--seq", "64K", "--heads", "4", "--timeout", "5", "--domains", "1"]
"""A step takes seconds, so that a link can be cut in the middle of one. As one domain: of two, each
would have brought over early what it needs of the other."""

Hosts = tuple[Host, Host]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def torchrun(hosts: Hosts, *argv: str) -> list[subprocess.Popen[str]]:
    """launch/ring.py with two ranks on each host."""
    agents = []
    for number, host in enumerate(hosts):
        # gloo binds to the address of the host's name, which is loopback on both.
        env = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": host.link}
        where = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=2"]
        meet = [f"--master-addr={hosts[0].address}", "--master-port=29500"]
        command = [sys.executable, "-m", "torch.distributed.run", *where, *meet]
        agents.append(host.popen([*command, str(ROOT / "launch" / "ring.py"), *argv], env))
    return agents


@pytest.fixture
def cluster(hosts: Hosts) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launch/ray_ring.py on the first host, with a Ray node of two CPUs on each."""
    with tempfile.TemporaryDirectory(prefix="r4-") as folder:
        env = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", **ONE_THREAD}
        ray = Path(sys.executable).parent / "ray"
        small = ["--num-cpus=2", "--object-store-memory=83886080", "--block"]
        head = ["--head", "--port=6400", "--include-dashboard=false"]
        for host, where in zip(hosts, (head, [f"--address={HEAD}"]), strict=True):
            start = [str(ray), "start", f"--node-ip-address={host.address}", *where, *small]
            host.popen(start, env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda: any("raylet" in line for line in commands(host)), 60)  # noqa: B023

        def run(*argv: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(ROOT / "launch" / "ray_ring.py"), "--address", HEAD]
            return hosts[0].popen([*command, *argv], env)

        yield run
        for host in hosts:  # before the folder goes
            host.kill()


def commands(host: Host) -> list[str]:
    """Command lines of a host's processes."""
    found = []
    for pid in host.processes():
        file = Path(f"/proc/{pid}/cmdline")
        if file.exists():
            found.append(file.read_text().replace("\0", " "))
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def read_until(process: subprocess.Popen[str], start: str) -> None:
    """Read the process's lines until one begins with ``start``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"{process.args} ended: {process.communicate()}")


def test_ray_and_torchrun_over_two_hosts_write_the_same(
    hosts: Hosts, cluster: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    files = [str(tmp_path / name) for name in ("ray", "torchrun", "threads")]
    run = cluster("--nodes", "2", "--ranks-per-node", "2", *SMALL, "--output", files[0])
    said, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert "ranks 0 to 1  10.77.0.1" in said and "ranks 2 to 3  10.77.0.2" in said
    agents = torchrun(hosts, *SMALL, "--domains", "2", "--output", files[1])
    ended = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    alone = [*SMALL, "--domains", "2", "--output", files[2], "--virtual-ranks", "4"]
    assert ring.main(alone) == 0
    first, *others = (Path(file).read_bytes() for file in files)
    assert all(other == first for other in others)


def test_a_link_cut_under_ray(hosts: Hosts, cluster: Callable[..., subprocess.Popen[str]]) -> None:
    """The driver names a rank beyond the cut; ranks here are killed, those there end by
    themselves; and what is left of the cluster can be used."""
    run = cluster("--nodes", "2", "--ranks-per-node", "2", *LONG)
    read_until(run, "forward:")
    hosts[1].cut()
    begin = time.monotonic()
    _, errors = run.communicate(timeout=150)
    print(f"link cut under Ray: {time.monotonic() - begin:.1f} s to the error: {errors}")
    assert run.returncode == 1
    (line,) = errors.strip().splitlines()
    assert line.startswith(("ray_ring.py: rank 2 (pid", "ray_ring.py: rank 3 (pid"))
    assert "on 10.77.0.2)" in line and "noticed in forward, step" in line
    assert not any("_Actor" in line for line in commands(hosts[0]))
    wait_for(lambda: not any("_Actor" in line for line in commands(hosts[1])), 120)
    print(f"the last rank ended after {time.monotonic() - begin:.1f} s")
    again = cluster("--nodes", "1", "--ranks-per-node", "2", "--seq", "1K", "--check")
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0 and "check passed" in said, errors


def test_a_link_cut_under_torchrun(hosts: Hosts) -> None:
    """Both agents end, and ranks on either side name one on the other."""
    agents = torchrun(hosts, *LONG)
    read_until(agents[0], "forward:")
    hosts[1].cut()
    begin = time.monotonic()
    for agent, beyond in zip(agents, ((2, 3), (0, 1)), strict=True):
        _, errors = agent.communicate(timeout=150)
        print(f"link cut under torchrun: agent ended after {time.monotonic() - begin:.1f} s")
        assert agent.returncode == 1
        said = [line for line in errors.splitlines() if line.startswith("ring.py: rank ")]
        assert any(f": rank {rank}: " in line for line in said for rank in beyond), errors
    wait_for(lambda: not any(host.processes() for host in hosts), 60)
