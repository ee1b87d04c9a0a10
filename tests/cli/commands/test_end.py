"""`mpsctl end`: what it asks first, what it ends, and what it says about a lease."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.cli.conftest import AS_USER, ROOT, end, mpsctl_as_nobody, start_mpsctl
from tests.daemon.caller import NOBODY, needs_root
from tests.daemon.ends.clients import lease_of, target
from tests.daemon.helpers import is_running, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables
from tests.terminals import Terminal

pytestmark = pytest.mark.thorough

OPEN: Final = f'[enforcement]\ngrace = 0.3\nunadmitted = "defaults"\n[roles]\nadmins = ["{NOBODY}"]\n'


@pytest.fixture
def simulated(make_node: Callable[..., Node]) -> Node:
    return make_node(simulate=1, control=None, config=OPEN).start()


@pytest.fixture
def client(simulated: Node) -> Iterator[SimulatedClient]:
    """Start a client of the tests' own user, without a lease, and wait until it is listed."""
    with SimulatedClient(variables(simulated)) as started:
        pid = started.hello["pid"]
        wait_until(
            lambda: [each for each in simulated.get("/v1/clients").json["clients"] if each["pid"] == pid],
            what="it to be listed",
        )
        yield started


def test_without_a_lease(simulated: Node, client: SimulatedClient) -> None:
    """One's own process is ended without a question."""
    done = simulated.mpsctl("end", str(client.pid))
    assert (done.returncode, done.stderr) == (0, "")
    assert f" done: process {client.pid}: " in done.stdout
    assert client.process.wait(20) == -signal.SIGTERM


def test_lease(simulated: Node) -> None:
    """What became of the lease is said: it ends with its holder, and lives on where another process holds it."""
    with target(simulated) as client:
        lease = lease_of(simulated, client)
        assert f"\n{lease} has ended\n" in simulated.mpsctl("end", str(client.pid)).stdout
    held = simulated.lease(threads=10, memory="1GiB", gpu="0")
    with SimulatedClient({**variables(simulated), **held["env"]}) as client:
        pid = client.hello["pid"]
        wait_until(lambda: simulated.events("client_attributed", client=pid), what="it to be attributed")
        done = simulated.mpsctl("end", str(pid))
        assert f"mpsctl release {held['id']}" in done.stdout
        assert client.process.wait(20) == -signal.SIGTERM


def test_several(simulated: Node, client: SimulatedClient) -> None:
    """An error of one does not stop the others, and decides the exit status."""
    with SimulatedClient(variables(simulated)) as other:
        pids = [other.hello["pid"], 1, client.pid]
        done = simulated.mpsctl("end", "-o", "json", "--yes", *map(str, pids))
        assert (done.returncode, "[not_permitted]" in done.stderr) == (77, True)
        assert other.process.wait(20) == client.process.wait(20) == -signal.SIGTERM
        found = json.JSONDecoder().raw_decode(done.stdout)[0]
        assert (found["verb"], found["state"]) == ("end", "done")


def test_waits_and_is_given_up(simulated: Node, client: SimulatedClient) -> None:
    """While its control daemon does not answer, mpsctl says so; Ctrl-C ends the waiting, and the end continues."""
    with stopped(simulated.daemons()["gpu0"]["pid"]):
        process = start_mpsctl(simulated.socket, "end", str(client.pid))
        try:
            assert process.stderr is not None
            assert "gpu0 does not answer" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert "continues" in process.communicate(timeout=20)[1]
            assert process.returncode == -signal.SIGINT
        finally:
            end(process)
        assert is_running(client.pid)
    assert client.process.wait(20) == -signal.SIGTERM


@needs_root
class TestOfAnotherUser:
    """An administrator is asked before the process of another user is ended."""

    def test_asks(self, simulated: Node, client: SimulatedClient) -> None:
        command = [sys.executable, "-c", AS_USER, "--socket", str(simulated.socket), "end", str(client.pid)]
        environment = {**os.environ, "MPSD_TEST_UID": f"{NOBODY}"}
        for answer, status in (("n", 1), ("y", 0)):
            with Terminal.running(command, environment, cwd=ROOT) as terminal:
                question = terminal.wait_for(r"End process (\d+) .* \[y/N\]")
                assert question[1] == str(client.pid)
                terminal.type(f"{answer}\n")
                assert terminal.wait_for_the_end() == status
            assert is_running(client.pid) is (answer == "n")

    def test_no_terminal(self, simulated: Node, client: SimulatedClient) -> None:
        assert mpsctl_as_nobody(simulated, "end", str(client.pid)).returncode == 2
        assert is_running(client.pid)
        assert mpsctl_as_nobody(simulated, "end", "--yes", str(client.pid)).returncode == 0
        assert client.process.wait(20) == -signal.SIGTERM


@pytest.mark.real_daemon(535)
def test_real_daemon(node: Node) -> None:
    """Beside NVIDIA's own control daemon, without a client: it is refused, and so is a process that is no client."""
    control = node.daemons()["gpu0"]["pid"]
    assert node.mpsctl("end", "--yes", str(control)).returncode == 77
    assert node.mpsctl("end", "--yes", str(os.getpid())).returncode == 1
    assert node.daemons()["gpu0"]["pid"] == control
