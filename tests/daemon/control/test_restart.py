"""A control daemon is drained and replaced once, without harm to clients, whatever dies meanwhile."""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mpsd.simulator.devices import Setting, set_setting
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, look, waiting
from tests.daemon.helpers import BRISK, IMPATIENT, branches, event, is_running, kill, limits_for, next_ready, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = pytest.mark.thorough

SMALL = {"threads": 10, "memory": "1GiB", "gpu": "0"}
RUNS = int(os.environ.get("MPSD_RUNS", "2"))
FREE = '[enforcement]\nunadmitted = "allow"\ngrace = 0.3\n'


@pytest.mark.parametrize("real", branches(470, 555))
class TestReal:
    """Restarts of each of NVIDIA's own control daemons."""

    def test_restart(self, make_node: Start, real: RealDaemon) -> None:
        """A new daemon has the same limits, the old one's files are gone, and the other daemon is untouched."""
        node = make_node(simulate=2, control=real.control, config=limits_for(real)).start()
        before, unharmed = node.daemons(), node.unharmed()
        left = node.pipe_directory("gpu0") / "control_lock"
        left.write_text("it is the old one's")
        ended(node, begin(node, "restart"))
        after = node.daemons()
        assert after["gpu0"]["pid"] != before["gpu0"]["pid"]
        assert not is_running(before["gpu0"]["pid"])
        assert after["gpu0"]["limits"] == before["gpu0"]["limits"]
        assert after["gpu0"]["state"] == "ready"
        assert after["gpu1"]["limits"] == before["gpu1"]["limits"]
        assert node.unharmed()["gpu1"] == unharmed["gpu1"]
        assert left.read_text() == ""
        (stopping,) = node.events("daemon_state", daemon="gpu0", state="stopping")
        assert node.events("daemon_forced") == []
        assert node.events("daemon_death") == []
        assert stopping["pid"] == before["gpu0"]["pid"]

    def test_waits_for_leases(self, make_node: Start, real: RealDaemon) -> None:
        """A restart waits for leases."""
        node = make_node(simulate=1, control=real.control).start()
        before = node.daemons()["gpu0"]["pid"]
        lease = node.request("POST", "/v1/leases", SMALL).json["id"]
        operation = begin(node, "restart")
        (occupant,) = waiting(node, operation)
        assert (occupant["what"], occupant["lease"]) == ("lease", lease)
        daemon = node.daemons()["gpu0"]
        assert (daemon["state"], daemon["pid"]) == ("draining", before)
        refused = node.request("POST", "/v1/leases", SMALL)
        assert (refused.status, refused.json["limit"]) == (409, "hold")
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(node.request, "POST", "/v1/leases", {**SMALL, "wait": 30})
            wait_until(lambda: node.events("lease_waits"), what="a request to wait")
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
            ended(node, operation)
            assert waits.result(timeout=10).status == 201
        assert node.daemons()["gpu0"]["pid"] != before


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a simulated node on which every process may be a client."""
    return make_node(simulate=1, control=None, config=FREE).start()


@pytest.fixture
def brisk(make_node: Start) -> Node:
    """Start a node that waits neither long for answers of a control daemon nor for its end."""
    return make_node(simulate=1, control=None, config=FREE + BRISK, durations=IMPATIENT).start()


class TestClients:
    """Restarts with simulated clients."""

    def test_it_waits(self, node: Node) -> None:
        """A client keeps working, and the new control daemon starts when it has left."""
        before = node.daemons()["gpu0"]["pid"]
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            operation = begin(node, "restart")
            (occupant,) = waiting(node, operation)
            assert (occupant["what"], occupant["pid"]) == ("client", client.pid)
            assert client.alloc("1GiB")["ok"]
            assert client.compute(0.05)["ok"]
            assert node.daemons()["gpu0"]["pid"] == before
        ended(node, operation)
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]

    def test_resumed(self, node: Node) -> None:
        """`resume` cancels a restart that still waits, without any effect on clients."""
        before = node.daemons()["gpu0"]["pid"]
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            operation = begin(node, "restart")
            waiting(node, operation)
            begin(node, "resume")
            assert "resumed it" in ended(node, operation, "superseded")["because"]
            assert node.wait_for_state("gpu0", "ready")["pid"] == before
            assert client.compute(0.01)["ok"]

    def test_timeout(self, node: Node) -> None:
        """After the timeout a client is ended with its lease; each step is logged."""
        with leased(node, "--threads", "10", "--memory", "1GiB") as client:
            assert client.hello["mps"]
            lease = node.get("/v1/leases").json["leases"][0]["id"]
            operation = begin(node, "drain", timeout=0.1)
            ended(node, operation)
            begun = event(node, "operation_begun", operation=operation["id"])
            assert (begun["verb"], begun["daemon"]) == ("drain", "gpu0")
            assert event(node, "operation_ended", operation=operation["id"])["state"] == "done"
            client.process.wait(timeout=5)
            event(node, "client_forced", pid=client.pid, step="SIGTERM")
        forced = node.events("client_forced", pid=client.pid)
        assert [each["step"] for each in forced] == ["terminate_client", "SIGTERM"]
        event(node, "lease_ended", lease=lease)
        assert node.daemons()["gpu0"]["state"] == "draining"
        assert node.request("POST", "/v1/leases", SMALL).json["limit"] == "hold"
        begin(node, "resume")
        assert node.request("POST", "/v1/leases", SMALL).status == 201

    def test_asked_for_long_after(self, node: Node) -> None:
        """The result of an operation can be read later, after other operations, and from a later mpsd."""
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            given_up = begin(node, "drain")
            restart = begin(node, "restart")
        ended(node, restart)
        node.end(signal.SIGKILL)
        node.start(ready=False)
        assert look(node, given_up)["state"] == "superseded"
        assert look(node, restart)["state"] == "done"

    @pytest.mark.parametrize("answers", [True, False])
    def test_asked_for_before_it_was_found(self, brisk: Node, answers: bool) -> None:  # noqa: FBT001 - a parameter
        """An operation that reaches mpsd just after its start, before it knows which daemons run, applies to those."""
        node = brisk
        before = node.daemons()["gpu0"]["pid"]
        lease = node.request("POST", "/v1/leases", SMALL).json["id"]
        operation = begin(node, "restart", timeout=None if answers else 60)
        node.end(signal.SIGKILL)
        kept = node.root / "state" / "gpu0.intention.json"
        intention = json.loads(kept.read_bytes())
        assert intention["desired"]["replaced"]["pid"] == before
        intention["desired"]["replaced"] = None  # as it is while mpsd still looks for the daemon
        if not answers:
            intention["desired"]["deadline"] = intention["desired"]["at"]
            (node.pipe_directory("gpu0") / "control").unlink()
        kept.write_text(json.dumps(intention))
        node.start(ready=False)
        if answers:
            node.request("DELETE", f"/v1/leases/{lease}")
        ended(node, operation)
        (resumed,) = node.events("operation_resumed", operation=operation["id"])
        assert (resumed["verb"], resumed["daemon"]) == ("restart", "gpu0")
        assert node.daemons()["gpu0"]["pid"] != before
        assert not is_running(before)

    def test_asked_for_again_while_it_is_forced(self, brisk: Node) -> None:
        """Neither a second command without a timeout nor mpsd's death keeps an unreachable daemon that is forced."""
        node = brisk
        before = node.daemons()["gpu0"]["pid"]
        for name in ("control", "control_privileged"):
            (node.pipe_directory("gpu0") / name).unlink(missing_ok=True)
        node.wait_for_state("gpu0", "unresponsive")
        operation = begin(node, "restart", timeout=0)
        node.wait_for_state("gpu0", "stopping")
        assert begin(node, "restart")["id"] == operation["id"]
        node.end(signal.SIGKILL)
        assert is_running(before)
        node.start(ready=False)
        ended(node, operation)
        assert not is_running(before)

    def test_drained(self, node: Node) -> None:
        """A drain ends when no client is left; another drain then starts anew."""
        first = ended(node, begin(node, "drain"))
        second = ended(node, begin(node, "drain"))
        assert first["id"] != second["id"]

    def test_whoever_comes_later(self, node: Node) -> None:
        """The timeout of a drain applies to the clients of that moment only: later clients are not ended."""
        ended(node, begin(node, "drain", timeout=0))
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen")
            node.get("/healthz")  # the consequences of the event have begun by now
            assert node.events("client_forced") == []
            assert client.compute(0.01)["ok"]

    def test_waits_for_an_orphan(self, node: Node) -> None:
        """The clients of an orphaned server cannot be listed, so nothing is stopped while NVML shows some."""
        set_setting(node.root / "run" / "simulated", Setting.OUTLIVES)
        with SimulatedClient(variables(node)) as client:
            server = client.hello["server"]
            before = node.daemons()["gpu0"]["pid"]
            kill(before)
            after = next_ready(node, "gpu0", before)["pid"]
            operation = begin(node, "restart")
            (occupant,) = waiting(node, operation)
            assert (occupant["what"], occupant["pid"]) == ("server", server)
            assert node.daemons()["gpu0"]["state"] == "draining"
            assert node.daemons()["gpu0"]["pid"] == after
            assert client.compute(0.01)["ok"]
            kill(server)
        ended(node, operation)
        assert node.daemons()["gpu0"]["pid"] != after


@pytest.mark.real_daemon(535)
def test_stopped_daemon_is_waited_for(make_node: Start) -> None:
    """The daemon's clients are unknown, so the restart waits; it proceeds when the daemon answers again."""
    node = make_node(simulate=1, config=BRISK).start()
    pid = node.daemons()["gpu0"]["pid"]
    with stopped(pid):
        node.wait_for_state("gpu0", "unresponsive")
        operation = begin(node, "restart")
        assert look(node, operation)["state"] == "running"
        assert is_running(pid)
    ended(node, operation)
    assert not is_running(pid)


@pytest.mark.real_daemon(535)
def test_failed(make_node: Start) -> None:
    """A drain of a failed daemon fails; a restart brings the daemon back in its former desired state."""
    node = make_node(simulate=1).start()

    def next_one(before: int | None) -> bool:
        daemon = node.daemons()["gpu0"]
        return daemon["state"] == "failed" or daemon["pid"] not in {None, before}

    while (daemon := node.daemons()["gpu0"])["state"] != "failed":
        kill(daemon["pid"])
        wait_until(partial(next_one, daemon["pid"]), what="the next one")
    node.wait_for_state("gpu0", "failed")
    ended(node, begin(node, "drain"), "failed")
    ended(node, begin(node, "restart"))
    assert node.wait_for_state("gpu0", "draining")
    begin(node, "resume")
    assert node.wait_for_state("gpu0", "ready")


@pytest.mark.timeout(60 + 30 * RUNS)
@pytest.mark.parametrize("real", branches(470, 555))
def test_killed_at_any_step(make_node: Start, real: RealDaemon) -> None:
    """However often mpsd is killed during a restart, there is exactly one new control daemon."""
    node = make_node(simulate=1, control=real.control, config=limits_for(real)).start()
    dice = random.Random(real.branch)
    for _ in range(RUNS):
        before = node.daemons()["gpu0"]["pid"]
        started = len(node.events("daemon_state", daemon="gpu0", state="starting"))
        operation = begin(node, "restart")
        for _ in range(2):
            for _ in range(dice.randrange(40)):  # each takes one to three milliseconds
                node.get("/healthz")
            node.end(signal.SIGKILL)
            node.start(ready=False)
        ended(node, operation)
        after = node.wait_for_state("gpu0", "ready")
        assert after["pid"] != before
        assert not is_running(before)
        starts = node.events("daemon_state", daemon="gpu0", state="starting")[started:]
        assert sum("was started" in each["because"] for each in starts) <= 1
        assert after["limits"] == node.daemons()["gpu0"]["limits"]


class TestLeaving:
    """The option `mpsd run --stop-daemons-on-exit`."""

    @pytest.mark.parametrize("real", branches(470, 555))
    def test_nobody_there(self, make_node: Start, real: RealDaemon) -> None:
        """SIGTERM also stops the control daemons, and no process of theirs is left."""
        node = make_node(simulate=2, control=real.control, arguments=("--stop-daemons-on-exit",)).start()
        pids = [each["pid"] for each in node.daemons().values()]
        assert node.end() == 0
        assert not any(is_running(pid) for pid in pids)
        assert not [*node.pipe_directory("gpu0").iterdir(), *node.pipe_directory("gpu1").iterdir()]

    def test_clients_are_waited_for(self, make_node: Start) -> None:
        """No lease is granted, and the API names the clients that it waits for; mpsd exits after the last one."""
        node = make_node(simulate=1, control=None, config=FREE, arguments=("--stop-daemons-on-exit",)).start()
        pid = node.daemons()["gpu0"]["pid"]
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
            node.wait_for_state("gpu0", "draining")
            assert "to keep it running" in node.daemons()["gpu0"]["hint"]
            wait_until(lambda: str(client.pid) in node.daemons()["gpu0"]["because"], what="it to say for whom it waits")
            assert node.request("POST", "/v1/leases", SMALL).json["code"] == "stopping"
            assert not node.events("lease_refused")
            assert client.compute(0.01)["ok"]
        assert node.ended() == 0
        assert not is_running(pid)

    def test_a_second_signal(self, make_node: Start) -> None:
        """A second signal ends mpsd at once, and leaves the control daemon and its client alone."""
        node = make_node(simulate=1, control=None, config=FREE, arguments=("--stop-daemons-on-exit",)).start()
        pid = node.daemons()["gpu0"]["pid"]
        with SimulatedClient(variables(node)) as client:
            assert client.hello["mps"]
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
            node.wait_for_state("gpu0", "draining")
            assert node.end() == 0
            assert is_running(pid)
            assert client.compute(0.01)["ok"]
