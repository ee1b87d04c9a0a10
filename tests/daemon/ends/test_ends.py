"""Clients are ended for any reason beside computing neighbours: no neighbour is harmed, and no client is ended twice.

The nodes are of simulated parts: a simulated client that dies in mid-kernel harms those that share its server.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import pytest

from mpsd.simulator.control import program as simulator
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, look, waiting
from tests.daemon.ends.clients import BUSY, asked, await_steps, ends, lease_of, neighbour, steps, target, unharmed
from tests.daemon.helpers import (
    BRISK,
    IMPATIENT,
    SWIFT,
    event,
    holding,
    is_running,
    kill,
    next_ready,
    program,
    states,
    stopped,
)
from tests.daemon.leases.test_busy_servers import made, pids
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = pytest.mark.thorough

GRACE: Final = "[enforcement]\ngrace = 0.3\n"
ANN: Final = 61421

SMALL: Final = {"threads": 10, "memory": "1GiB", "gpu": "0"}


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=GRACE).start()


# -- each way ---------------------------------------------------------------------------------------------------------


def by_release(node: Node, client: SimulatedClient) -> None:
    assert node.request("POST", f"/v1/leases/{lease_of(node, client)}/end").status == 202


def by_expiry(node: Node, client: SimulatedClient) -> None:
    node.reload(GRACE + 'on_expiry = "terminate"\n')
    assert node.request("POST", f"/v1/leases/{lease_of(node, client)}/renew", {"ttl": 0.1}).status == 200


def by_violation(node: Node, client: SimulatedClient) -> None:
    """End the client by a violation, since its lease has ended."""
    node.reload(GRACE + '[violations]\nno_lease = "terminate"\n')
    assert node.request("DELETE", f"/v1/leases/{lease_of(node, client)}").status == 204


@pytest.mark.parametrize("way", [by_release, by_expiry, by_violation])
def test_each_way(node: Node, way: Callable[[Node, SimulatedClient], None]) -> None:
    """A client in mid-kernel is ended after its kernel, and then gets its signal; its neighbour keeps computing."""
    with neighbour(node), target(node) as client:
        lease = lease_of(node, client)
        client.launch(BUSY)
        way(node, client)
        assert client.process.wait(20) == -signal.SIGTERM
        event(node, "client_ended", pid=client.pid)
        await_steps(node, client.pid, "terminate_client", "SIGTERM")
        assert asked(node, client.pid) == 1
        event(node, "lease_ended", lease=lease)
        wait_until(lambda: not ends(node), what="nothing to be left on disk")


def test_whoever_asks(node: Node) -> None:
    """A client that must end for three reasons at once is ended once."""
    with neighbour(node), target(node) as client:
        lease = lease_of(node, client)
        client.launch(4 * BUSY)
        by_release(node, client)
        wait_until(lambda: asked(node, client.pid), what="its server to be asked")
        by_release(node, client)
        node.reload(GRACE + 'on_violation = "terminate"\n')
        assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        assert client.process.wait(20) == -signal.SIGTERM
        await_steps(node, client.pid, "terminate_client", "SIGTERM")
        assert asked(node, client.pid) == 1


# -- what the lease says ----------------------------------------------------------------------------------------------


def test_program_that_stops_gracefully(node: Node) -> None:
    """SIGTERM comes first where the lease requests it, and is enough for a program that finishes its work."""
    node.reload("[enforcement]\ngrace = 20.0\n")
    with neighbour(node), target(node, "--stop", "sigterm") as client:
        assert client.do("obey TERM")["ok"]
        client.launch(BUSY)
        by_release(node, client)
        assert client.process.wait(20) == 0
        event(node, "client_ended", pid=client.pid)
        await_steps(node, client.pid, "SIGTERM")
        assert asked(node, client.pid) == 0


def test_program_that_does_not(node: Node) -> None:
    """If the program does not stop, its server ends its contexts, and no second SIGTERM comes."""
    with neighbour(node), target(node, "--stop", "sigterm") as client:
        client.do("ignore TERM")
        by_release(node, client)
        assert client.process.wait(20) == -signal.SIGKILL
        await_steps(node, client.pid, "SIGTERM", "terminate_client", "SIGKILL")


def test_catching_a_signal_proves_nothing(node: Node) -> None:
    """A program that catches SIGTERM, but would exit in mid-kernel, gets none before its contexts are ended."""
    with neighbour(node), target(node) as client:
        assert client.do("catch TERM")["ok"]
        client.launch(BUSY)
        by_release(node, client)
        assert client.process.wait(20) == 128 + signal.SIGTERM
        await_steps(node, client.pid, "terminate_client", "SIGTERM")


# -- as long as it takes ----------------------------------------------------------------------------------------------


def test_while_a_server_is_ending_contexts(make_node: Start) -> None:
    """The daemon states what it waits for and stays healthy; grants wait, and come afterwards."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK).start()
    with neighbour(node), target(node) as client:
        client.launch(6 * BUSY)
        by_release(node, client)
        daemon = wait_until(
            lambda: "terminate_client" in (found := node.daemons()["gpu0"])["because"] and found, what="it to say so"
        )
        assert daemon["state"] == "ready"
        assert f"ending the contexts of client {client.pid}" in daemon["because"]
        status = node.get("/v1/status").json
        assert status["healthy"]
        (warning,) = (each for each in status["warnings"] if each["kind"] == "client_end")
        assert "grants on gpu0 wait" in warning["because"]
        assert node.get("/readyz").status == 200
        granted = node.request("POST", "/v1/leases", SMALL)  # this request waits meanwhile
        assert granted.status == 201
        assert client.answer()["ok"]
        (released,) = node.events("client_forced", pid=client.pid, step="terminate_client")
        (grant,) = node.events("lease_granted", lease=granted.json["id"])
        assert released["at"] >= grant["at"]  # the grant was decided at once, and answered afterwards
        assert client.process.wait(20) == -signal.SIGTERM
    assert "unresponsive" not in states(node, "gpu0")


def test_deadline(make_node: Start) -> None:
    """When a server exceeds the deadline, a client beside others is left alone, and that is reported."""
    config = "[enforcement]\ngrace = 0.3\nterminate_deadline = 0.5\n" + BRISK
    node = make_node(simulate=1, control=None, config=config).start()
    with target(node) as other, target(node) as client:
        other.loop(BUSY / 10)
        client.launch(100.0)
        by_release(node, client)
        failed = event(node, "client_forced", pid=client.pid, step="terminate_client")["failed"]
        assert "did not answer 'terminate_client" in failed
        stays = event(node, "client_not_ended", pid=client.pid)
        assert "has other clients" in stays["stays_because"]
        unharmed(other)
        assert is_running(client.pid)
        other.end()
        assert client.process.wait(20) == -signal.SIGTERM
        event(node, "client_ended", pid=client.pid)
        assert steps(node, client.pid)[-1] == "SIGTERM"
        assert {*steps(node, client.pid)[:-1]} == {"terminate_client"}


def test_capacity_is_kept(node: Node) -> None:
    """The share of an ending lease is granted again only after its clients have ended."""
    with neighbour(node), leased(node, "--threads", "60", "--memory", "1GiB") as client:
        event(node, "client_attributed", client=client.hello["pid"])
        lease = lease_of(node, client)
        client.launch(20 * BUSY)
        by_release(node, client)
        wait_until(lambda: asked(node, client.pid), what="its server to be asked")
        found = node.get(f"/v1/leases/{lease}").json
        assert found["state"] == "active"
        assert "its clients are being ended" in found["because"]
        refused = node.request("POST", "/v1/leases", {**SMALL, "threads": 50})
        assert (refused.status, refused.json["limit"]) == (409, "threads")
        assert node.request("POST", f"/v1/leases/{lease}/renew", {"ttl": 60}).status == 404
        assert node.request("POST", "/v1/leases", {**SMALL, "threads": 50, "wait": 20}).status == 201
        assert client.process.wait(20) == -signal.SIGTERM


def test_release_by_command(node: Node) -> None:
    """`mpsctl release --end-clients` returns when lease and clients are gone; without clients it is a plain release."""
    with neighbour(node), target(node) as client:
        lease = lease_of(node, client)
        client.launch(BUSY)
        assert node.mpsctl("release", lease, "--end-clients").returncode == 0
        assert client.process.wait(20) == -signal.SIGTERM
        assert node.get(f"/v1/leases/{lease}").json["state"] == "ended"
        again = node.mpsctl("release", lease, "--end-clients")
        assert (again.returncode, again.stdout) == (0, f"{lease} had ended already\n")
        idle = node.request("POST", "/v1/leases", SMALL).json["id"]
        assert node.mpsctl("release", idle, "--end-clients").returncode == 0


def test_release_by_command_of_an_ended_lease(node: Node) -> None:
    """The clients that a lease left behind are not ended with it later: mpsctl names them, and how to end them."""
    with neighbour(node), target(node) as client:
        lease = lease_of(node, client)
        assert node.mpsctl("release", lease).returncode == 0
        event(node, "lease_ended", lease=lease)
        done = node.mpsctl("release", lease, "--end-clients")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{lease} had ended already (" in done.stderr
        assert f"; its clients {client.pid} still run, without a lease [not_found]" in done.stderr
        assert f"hint: as an administrator: mpsctl end {client.pid}; " in done.stderr
        assert client.compute(0.01)["ok"]


# -- mpsd is killed, or stopped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_mpsd_ends_while_a_server_is_asked(make_node: Start, number: signal.Signals) -> None:
    """The waiting front-end keeps running, and the next mpsd reads its answer: no command is given twice."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK).start()
    with neighbour(node), target(node) as client:
        client.launch(6 * BUSY)
        by_release(node, client)
        (end,) = wait_until(lambda: [each for each in ends(node) if each["pending"]], what="its server to be asked")
        node.end(number)
        front_end = end["pending"]["front_end"]["pid"]
        assert look_at(front_end) is not None
        node.start(ready=False)
        resumed = event(node, "client_end_resumed", pid=client.pid)
        assert resumed["step"] == "terminate_client"
        assert client.process.wait(20) == -signal.SIGTERM
        event(node, "client_ended", pid=client.pid)
        node.wait_for_state("gpu0", "ready")
        await_steps(node, client.pid, "terminate_client", "SIGTERM")
        assert asked(node, client.pid) == 1
    assert "unresponsive" not in states(node, "gpu0")


def test_own_limits_are_no_drift(make_node: Start) -> None:
    """Limits that mpsd had set before it was killed are no drift, although the next mpsd wants lower ones."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK).start()
    with neighbour(node), target(node) as client:
        wider = node.request("POST", "/v1/leases", {"threads": 50, "memory": "2GiB"}).json["id"]
        assert in_force(node) == 50.0
        client.launch(10 * BUSY)
        by_release(node, client)
        wait_until(lambda: any(each["pending"] for each in ends(node)), what="its server to be asked")
        # The control daemon's only connection is taken, so that the ceiling stays unchanged.
        assert node.request("DELETE", f"/v1/leases/{wider}").status == 204
        node.end(signal.SIGKILL)
        node.start(ready=False)
        event(node, "client_ended", pid=client.pid)
        node.wait_for_state("gpu0", "ready")
        wait_until(lambda: in_force(node) == 10.0, what="the ceiling to follow the lease that is left")
    assert node.events("limit_drift") == []


def in_force(node: Node) -> float:
    """Return the ceiling of threads, as read back."""
    daemon = node.daemons()["gpu0"]
    return float(daemon["limits"]["active_thread_percentage"]) if daemon["verified"] else 0.0


def test_damaged_record(node: Node) -> None:
    """A damaged record is reported, and does not hinder mpsd."""
    node.end()
    (node.root / "run" / "ends" / "1-1.json").write_text("{")
    node.start()
    assert "ends/1-1.json" in event(node, "file_damaged")["because"]
    assert ends(node) == []


# -- by a drain or a restart -------------------------------------------------------------------------------------------


@contextmanager
def occupied(node: Node) -> Iterator[None]:
    """Have another front-end occupy the control daemon's only seat."""
    with holding(node, "gpu0"):
        yield


@contextmanager
def hung(node: Node) -> Iterator[None]:
    with stopped(node.daemons()["gpu0"]["pid"]):
        node.wait_for_state("gpu0", "unresponsive")
        yield


@pytest.mark.parametrize("verb", ["drain", "restart"])
@pytest.mark.parametrize("trouble", [occupied, hung])
def test_silent_for_a_moment(
    make_node: Start, verb: str, trouble: Callable[[Node], AbstractContextManager[None]]
) -> None:
    """A daemon that answers again ends its clients step by step, although no end could begin at the timeout."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK, durations=SWIFT).start()
    with target(node) as one, target(node) as other:
        for each in (one, other):
            each.launch(6 * BUSY)
        with trouble(node):
            operation = begin(node, verb, timeout=0)
            for each in (one, other):
                event(node, "client_not_ended", pid=each.pid)
            wait_until(lambda: "not ended yet: " in look(node, operation)["because"], what="the reason to be given")
        ended(node, operation)
        for each in (one, other):
            assert each.process.wait(20) == -signal.SIGTERM
            assert each.answer()["ok"]  # the client's kernel has finished
            await_steps(node, each.pid, "terminate_client", "SIGTERM")
            assert asked(node, each.pid) == 1
    assert node.events("daemon_forced") == []


def test_restart_of_a_silent_daemon(make_node: Start) -> None:
    """The timeout of a restart has an end: a daemon that stays silent is ended with its clients, which is reported."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK, durations=IMPATIENT).start()
    before = node.daemons()["gpu0"]["pid"]
    with target(node) as client:
        kill(before, signal.SIGSTOP)
        ended(node, begin(node, "restart", timeout=0))
        forced = event(node, "daemon_forced", step="quit -t")
        assert f"client {client.pid}" in forced["because"]
    next_ready(node, "gpu0", before)


@pytest.mark.parametrize(("verb", "timeout"), [("drain", None), ("restart", 0)])
def test_clients_that_are_not_named_yet(make_node: Start, short_tmp: Path, verb: str, timeout: float | None) -> None:
    """A drain or restart waits for a server that has not named its clients yet, and then ends each of them in order."""
    node, server = made(make_node, short_tmp, "anytime")
    node.durations = SWIFT
    node.start()
    with SimulatedClient(variables(node)) as client:
        _, busy = pids(node, client)
        node.end()
        server.turn(busy=True)
        node.start(ready=False)
        operation = begin(node, verb, timeout=timeout)
        (blocker,) = waiting(node, operation)
        assert (blocker["what"], blocker["pid"]) == ("server", busy)
        server.converse()
        found = look(node, operation)
        assert f"server {busy}, which is busy and has not named its clients (since " in found["because"]
        assert client.sync()["ok"]
        server.turn(busy=False)
        if timeout is None:
            wait_until(lambda: waiting(node, operation)[0]["pid"] == client.pid, what="the client to be named")
            client.end()
        else:
            event(node, "client_forced", pid=client.pid, step="terminate_client")
        ended(node, operation)
    assert node.events("daemon_forced") == []


# -- clients that cannot be identified ---------------------------------------------------------------------------------

_HIDES: Final = """
[ "$1" = -f ] || {{ {command} | sed "s/^$(cat {file})\\$/0/"; exit; }}
exec {command} "$@"
"""


class TestUnidentified:
    """A client outside the processes that mpsd sees has the pid 0 in its server's list."""

    @pytest.fixture
    def node(self, make_node: Start, short_tmp: Path) -> Node:
        """Start a node whose front-ends print 0 for the pid in a file."""
        node = make_node(simulate=1, config='[enforcement]\nunadmitted = "allow"\ngrace = 0.3\n', durations=SWIFT)
        self.hidden = short_tmp / "hidden"
        self.hidden.write_text("none")
        command = " ".join(simulator(555, str(node.root / "run" / "simulated")))
        (short_tmp / "bin").mkdir()
        script = _HIDES.format(command=command, file=self.hidden)
        node.control = program(short_tmp / "bin" / "nvidia-cuda-mps-control", script)
        return node.start()

    def _hidden(self, client: SimulatedClient) -> None:
        self.hidden.write_text(str(client.hello["pid"]))

    def test_drain_waits(self, node: Node) -> None:
        """The daemon is not empty while it has such a client, and says that it waits for it."""
        with SimulatedClient(variables(node)) as client:
            self._hidden(client)
            operation = begin(node, "drain")
            (blocker,) = waiting(node, operation)
            assert (blocker["what"], blocker["pid"]) == ("client", 0)
            assert "cannot be identified (pid 0" in look(node, operation)["because"]
            assert client.compute(0.01)["ok"]
        ended(node, operation)

    def test_timeout(self, node: Node) -> None:
        """With a timeout the client ends with its server, which is reported; admission stays stopped afterwards."""
        before = node.daemons()["gpu0"]["pid"]
        with SimulatedClient(variables(node)) as hidden, SimulatedClient(variables(node)) as seen:
            self._hidden(hidden)
            assert seen.hello["ok"]
            operation = begin(node, "drain", timeout=0.1)
            ended(node, operation)
            await_steps(node, seen.pid, "terminate_client", "SIGTERM")
            assert not hidden.sync()["ok"]
        assert len(node.events("daemon_forced", step="quit -t")) == 1
        assert (after := node.wait_for_state("gpu0", "draining"))["pid"] != before, after
        assert node.request("POST", "/v1/leases", SMALL).json["limit"] == "hold"


@needs_root
def test_who_becomes_another_user(make_node: Start, short_tmp: Path) -> None:
    """mpsd signals no process of another user: a client that executes a setuid program is left alone."""
    copy = short_tmp / "becomes-root"
    shutil.copy(Path(sys.executable).resolve(), copy)
    copy.chmod(0o4755)
    becomes = "import os; os.setgroups([]); os.setresuid(0, 0, 0); print('root', flush=True); input()"
    script = (
        "import os; from mpsd.simulator.cuda_process import CudaProcess; os.setgroups([]);"
        f" os.setresgid({ANN}, {ANN}, {ANN}); os.setresuid({ANN}, {ANN}, {ANN});"
        " cuda = CudaProcess(); print(os.getpid(), flush=True); input(); cuda.init(); cuda.context();"
        f" print('client', flush=True); input(); os.execv({str(copy)!r}, [{str(copy)!r}, '-I', '-c', {becomes!r}])"
    )
    node = make_node(simulate=1, control=None, config=GRACE).start()
    environment = {**os.environ, **variables(node)}
    with (
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as process,
        calling(node.socket, uid=ANN) as ann,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def says(expected: str) -> None:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == expected

        says(f"{process.pid}")
        lease = ann.request("POST", "/v1/leases", {**SMALL, "pid": process.pid})
        assert lease.status == 201, lease.body
        for answer in ("client", "root"):
            process.stdin.write("\n")
            says(answer)
            if answer == "client":
                event(node, "client_attributed", client=process.pid)
        assert ann.request("POST", f"/v1/leases/{lease.json['id']}/end").status == 202
        assert f"it runs as uid 0, and its lease is of uid {ANN}" in event(node, "client_not_ended")["because"]
        assert process.poll() is None
        assert not [each for each in node.events("client_forced", pid=process.pid) if each["step"].startswith("SIG")]
        process.kill()
