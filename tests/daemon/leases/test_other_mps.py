"""A job that starts an MPS of its own, as wrappers in the manuals of clusters do, is told so, and told what to change.

A process that NVML lists stands in for its client, and a script for its server: neither can start without a GPU.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.simulator.control import program as simulator
from mpsd.simulator.devices import Kind
from tests.daemon.conftest import Start
from tests.daemon.helpers import MIB, branches, event
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import SimulatedClient, gpus

pytestmark = pytest.mark.enforcement

SERVER: Final = "#!/bin/sh\nread nothing <{fifo}\n"
"""It waits under the name of NVIDIA's server."""

HINT: Final = "mpsd runs MPS, so take the lines out of the job that start it (nvidia-cuda-mps-control -d)"


@contextlib.contextmanager
def private(real: RealDaemon, directory: Path, environment: dict[str, str], how: str) -> Iterator[int]:
    """Start a control daemon in the way of a job: with directories of its own; yield its pid."""
    programs = directory / "b"
    for each in (directory / "p", directory / "l", programs):
        each.mkdir(parents=True)
    server = programs / "nvidia-cuda-mps-server"
    os.mkfifo(directory / "fifo")
    server.write_text(SERVER.format(fifo=directory / "fifo"), encoding="ascii")
    server.chmod(0o755)
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "p"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "l")}
    env = {**environment, **own, "PATH": f"{programs}:{os.environ['PATH']}"}
    started = subprocess.Popen(
        [str(real.control), how], env=env, stdin=-3, stdout=-3, stderr=-3, start_new_session=True
    )
    try:
        if how == "-d":
            started.wait(timeout=10)
        wait_until((directory / "p" / "control").is_socket, what="the control daemon of the job to listen")
        yield started.pid
    finally:
        ask(real, env, "quit -t 0")
        started.wait(timeout=20)


def ask(real: RealDaemon, env: dict[str, str], command: str) -> list[str]:
    return subprocess.check_output([str(real.control)], env=env, input=command, text=True, timeout=20).split()


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None).start()


@contextlib.contextmanager
def holding_gpu(node: Node, environment: dict[str, str], kind: Kind = Kind.MPS_COMPUTE) -> Iterator[int]:
    """Start a process that NVML lists on the GPU; yield its pid."""
    with subprocess.Popen(["sleep", "1000"], env=environment) as process:
        try:
            assert gpus(node)[0].hold(process.pid, 100 * MIB, kind)
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["-d", "-f"])
@pytest.mark.parametrize("real", branches(470, 555))
def test_job_with_its_own(node: Node, real: RealDaemon, short_tmp: Path, how: str) -> None:
    """Client and server of the job's own MPS are violations, which name its process, directory, origin and remedy."""
    lease = node.lease(processes="any")
    environment = {**lease["env"], "PATH": os.environ["PATH"]}
    directory = short_tmp / "own"
    with private(real, directory, environment, how) as started:
        own = {**environment, "CUDA_MPS_PIPE_DIRECTORY": f"{directory}/p"}
        ask(real, own, f"start_server -uid {os.geteuid()}")
        (server,) = wait_until(lambda: ask(real, own, "get_server_list"), what="its server")
        running = look_at(int(server))
        assert running is not None
        daemon = running.parent
        assert daemon == started or how == "-d"
        wait_until(lambda: "nvidia-cuda-mps" in Path(f"/proc/{server}/comm").read_text(), what="the server to run")
        assert gpus(node)[0].hold(int(server), 27 * MIB, Kind.COMPUTE)
        with holding_gpu(node, own) as client:
            node.get(f"/v1/leases/{lease['id']}/verify")  # which reads the GPU
            found = event(node, "violation", kind="outside", pid=client)
            where = f"pid {daemon} (uid {os.geteuid()}) is a control daemon on {directory}/p"
            starter = f"process {os.getpid()}" if how == "-f" else "a process that has ended"
            assert found["because"] == (
                f"process {client} of lease {lease['id']} is a client of another control daemon on the GPU of gpu0,"
                f" without limits: {where}, which {starter} of lease {lease['id']} started"
            )
            assert found["hint"].startswith(HINT)
            answer = node.get(f"/v1/leases/{lease['id']}/verify").json
            assert answer["verdict"] == "violation"
            assert found["because"] in {each["because"] for each in answer["processes"]}
            if how == "-f":
                of_server = event(node, "violation", kind="outside", pid=int(server))
                assert "is a server of another control daemon" in of_server["because"]
        node.get(f"/v1/leases/{lease['id']}/verify")
        wait_until(lambda: node.events("violation_ended", pid=client), what="the violation to end with the client")


@contextlib.contextmanager
def simulated(node: Node, directory: Path) -> Iterator[dict[str, str]]:
    """Start a simulated control daemon on a directory of its own; yield the environment of its clients."""
    directory.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    command = [*simulator(), "--gpus", str(node.root / "run" / "simulated"), "-f"]
    script = '"$@" </dev/null >/dev/null 2>&1 & echo $!'  # its parent ends, as with `-d`
    pid = int(subprocess.check_output(["sh", "-c", script, "sh", *command], env={**os.environ, **own}))
    try:
        wait_until((directory / "control").is_socket, what="the control daemon to listen")
        yield own
    finally:
        os.kill(pid, signal.SIGTERM)


def test_client_of_a_daemon_that_does_not_show(node: Node, short_tmp: Path) -> None:
    """A client by NVML that was started with another directory is none of mpsd's, whichever process serves it."""
    lease = node.lease()
    with simulated(node, short_tmp / "own") as own, SimulatedClient({**lease["env"], **own}) as client:
        assert client.hello["mps"]
        answer = node.get(f"/v1/leases/{lease['id']}/verify").json
        assert answer["verdict"] == "unknown"
        found = event(node, "violation", kind="outside", pid=client.pid)
        assert found["because"].endswith(f"it was started with CUDA_MPS_PIPE_DIRECTORY='{short_tmp}/own'")
        assert found["policy"] == "report"
        assert node.get(f"/v1/leases/{lease['id']}/verify").json["because"] == found["because"]


def test_policy(make_node: Start, short_tmp: Path) -> None:
    """A client that is certainly of another control daemon ends where the policy says so; no client of mpsd's does."""
    config = '[enforcement]\ngrace = 0.3\n[violations]\noutside = "terminate"\n'
    node = make_node(simulate=1, control=None, config=config).start()
    lease = node.lease(processes="any")
    with (
        simulated(node, short_tmp / "own") as own,
        SimulatedClient({**lease["env"], **own}) as client,
        SimulatedClient(lease["env"]) as well,
    ):
        assert client.hello["mps"]
        assert well.hello["mps"]
        node.get(f"/v1/leases/{lease['id']}/verify")  # which reads the GPU
        wait_until(lambda: client.process.poll() is not None, what="the client to be ended", deadline=20)
        assert well.compute(0.01)["ok"]


def test_client_that_is_not_listed(node: Node) -> None:
    """A client that mpsd's own control daemon does not list, with the directory of its lease, is no violation."""
    lease = node.lease()
    with holding_gpu(node, {**lease["env"], "PATH": os.environ["PATH"]}) as client:
        said = f"process {client} is a client of MPS according to NVML, but gpu0 does not list it"
        for _ in range(2):
            assert said in node.get(f"/v1/leases/{lease['id']}/verify").json["because"]
            with SimulatedClient(lease["env"]) as another:  # mpsd asks its control daemon again
                assert another.hello["mps"]
                event(node, "client_attributed", client=another.pid)
        assert not node.events("violation")
