"""A server that its own user stops (SIGSTOP): named, and ended where no lease and no client of that user is left."""

import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended
from tests.daemon.helpers import BRISK, IMPATIENT, branches, event, is_running, kill, next_ready, stopped
from tests.daemon.leases.test_users import instead, python  # noqa: F401 - a fixture
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import SimulatedClient, gpus, leased, variables

pytestmark = pytest.mark.thorough

SHARE: Final = ("--threads", "10", "--memory", "1GiB")
REQUEST: Final = {"threads": 10, "memory": "1GiB"}
ANN, BOB = 1001, 1002

ALONE: Final = f'{BRISK}users = "one"\n'
"""A server of each user's own, which that user can stop."""


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=ALONE).start()


def reasons(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/v1/status").json["reasons"]
    return [each for each in found if each["kind"] == "server_stopped"]


def reason(node: Node, words: str = "") -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        return next((each for each in reasons(node) if words in each["because"]), None)

    return wait_until(found, what=f"the stopped server to be a reason; the log is {node.stderr}", deadline=20)


def attached(node: Node, client: SimulatedClient) -> str:
    lease: str = event(node, "client_attributed", client=client.pid)["lease"]
    return lease


def serves(node: Node) -> bool:
    """Tell whether a client of a new lease works."""
    with leased(node, *SHARE, "--wait", "20") as client:
        return bool(client.hello["mps"] and client.compute(0.01)["ok"])


def test_server_with_a_client(node: Node) -> None:
    """A stopped server with clients is left alone, and named with both ways out; nothing is granted meanwhile."""
    before = node.daemons()["gpu0"]["pid"]
    with leased(node, *SHARE) as client:
        attached(node, client)
        server = client.hello["server"]
        with stopped(server):
            found = reason(node, f"its clients are {client.pid}")
            assert found["subject"] == "gpu0"
            assert f"kill -CONT {server}" in found["hint"]
            told = event(node, "server_stopped", server=server)
            assert (told["uid"], told["daemon"]) == (os.geteuid(), "gpu0")
            refused = node.request("POST", "/v1/leases", REQUEST)
            assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
            node.wait_for_state("gpu0", "unresponsive")
            assert is_running(server)
        event(node, "server_continued", server=server)
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
        assert client.compute(0.01)["ok"]
        assert serves(node)
    assert node.events("server_killed") == []
    assert node.daemons()["gpu0"]["pid"] == before


def test_server_with_a_client_without_a_context(node: Node) -> None:
    """NVML does not show a client without a context; the server has listed it, and so is left alone."""
    with SimulatedClient(variables(node), late=True) as client:
        server = client.init()["server"]
        wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen")
        assert client.pid not in gpus(node)[0].processes()
        with stopped(server):
            reason(node, str(client.pid))
            assert is_running(server)
        assert client.compute(0.01)["ok"]
    assert node.events("server_killed") == []


def test_server_with_a_lease_alone(node: Node) -> None:
    """A stopped server without clients is left alone while its user has a lease on the GPU."""
    node.request("POST", "/v1/leases", {**REQUEST, "pid": os.getpid()})
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen")
    with stopped(server):
        (lease,) = node.get("/v1/leases").json["leases"]
        reason(node, f"{lease['id']} may use it")
        assert is_running(server)
    wait_until(lambda: not reasons(node), what="the reason to go away")
    assert node.events("server_killed") == []


@pytest.mark.parametrize("again", [1, 3])
def test_server_that_is_left(node: Node, again: int) -> None:
    """A stopped server without a lease or a client is ended, its control daemon replaced, and the next user served."""
    for number in range(again):
        before = node.daemons()["gpu0"]["pid"]
        with leased(node, *SHARE) as client:
            attached(node, client)
            server = client.hello["server"]
            kill(server, signal.SIGSTOP)
            event(node, "server_stopped", server=server)
        told = event(node, "server_killed", server=server)
        assert (told["uid"], told["daemon"]) == (os.geteuid(), "gpu0")
        next_ready(node, "gpu0", before)
        assert not is_running(server)
        assert not reasons(node)
        assert serves(node)
        assert len(node.events("server_killed")) == number + 1
    assert node.events("daemon_death") == []
    assert "failed" not in [each["state"] for each in node.events("daemon_state")]


@needs_root
def test_next_user(node: Node, python: str) -> None:  # noqa: F811 - the fixture
    """A user who stops its server and leaves takes the GPU from no other user."""
    with leased(node, *SHARE, "--user", str(ANN), within=instead(python)) as ann:
        attached(node, ann)
        server = ann.hello["server"]
        kill(server, signal.SIGSTOP)
        assert event(node, "server_stopped", server=server)["uid"] == ANN
    with leased(node, *SHARE, "--user", str(BOB), "--wait", "30", within=instead(python)) as bob:
        assert bob.hello["mps"]
        assert bob.hello["server"] != server
        assert bob.compute(0.01)["ok"]
    assert event(node, "server_killed", server=server)["uid"] == ANN


@needs_root
def test_server_of_many_users(make_node: Start, python: str) -> None:  # noqa: F811 - the fixture
    """A server of many users is left alone until the leases and clients of all of them have ended."""
    node = make_node(simulate=1, control=None, config=f'{BRISK}users = "many"\n').start()
    with calling(node.socket, uid=BOB) as bob:
        lease = bob.admit(**REQUEST).json["id"]
        with leased(node, *SHARE) as root:
            attached(node, root)
            server = root.hello["server"]
            with leased(node, *SHARE, "--user", str(ANN), within=instead(python)) as ann:
                attached(node, ann)
                assert ann.hello["server"] == server
                kill(server, signal.SIGSTOP)
                event(node, "server_stopped", server=server)
            reason(node, str(root.pid))
        reason(node, f"{lease} may use it")
        assert is_running(server)
        assert bob.request("DELETE", f"/v1/leases/{lease}").status == 204
    event(node, "server_killed", server=server)
    assert serves(node)


@needs_root
def test_beside_a_lease_of_another(node: Node) -> None:
    """While another user has a lease, a stopped server is ended, and the control daemon answers again by itself."""
    before = node.daemons()["gpu0"]["pid"]
    with calling(node.socket, uid=BOB) as bob:
        lease = bob.admit(**REQUEST).json["id"]
        with SimulatedClient(variables(node)) as client:
            server = client.hello["server"]
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen")
            kill(server, signal.SIGSTOP)
            reason(node, str(client.pid))
        event(node, "server_killed", server=server)
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
        assert node.daemons()["gpu0"]["pid"] == before
        assert [each["id"] for each in node.get("/v1/leases").json["leases"]] == [lease]


def test_restart(make_node: Start) -> None:
    """The second way out works: a restart with a timeout ends a stopped server with its clients."""
    node = make_node(
        simulate=1, control=None, config=f"{ALONE}[enforcement]\ngrace = 0.3\n", durations=IMPATIENT
    ).start()
    with leased(node, *SHARE) as client:
        attached(node, client)
        server = client.hello["server"]
        kill(server, signal.SIGSTOP)
        reason(node)
        ended(node, begin(node, "restart", timeout=0))
        assert not is_running(server)
    assert serves(node)
    assert node.events("server_killed") == []


def test_next_mpsd(node: Node) -> None:
    """The next mpsd, which has never had an answer about the server, does the same."""
    before = node.daemons()["gpu0"]["pid"]
    with leased(node, *SHARE) as client:
        attached(node, client)
        server = client.hello["server"]
        node.end(signal.SIGKILL)
        kill(server, signal.SIGSTOP)
        node.start(ready=False)
        reason(node, str(client.pid))
        assert is_running(server)
    event(node, "server_killed", server=server)
    next_ready(node, "gpu0", before)
    assert serves(node)


def test_gpu_that_does_not_answer(node: Node) -> None:
    """Where NVML does not show the processes, a stopped server may have clients, and is left alone."""
    with leased(node, *SHARE) as client:
        attached(node, client)
        server = client.hello["server"]
        kill(server, signal.SIGSTOP)
        (gpu,) = gpus(node)
        gpu.lose()
    reason(node, "whether it has clients is unknown")
    assert is_running(server)
    gpu.recover()
    event(node, "server_killed", server=server)


def test_orphan(node: Node) -> None:
    """A stopped server does not end with its control daemon; it is ended when nothing uses it."""
    with leased(node, *SHARE) as client:
        attached(node, client)
        server, before = client.hello["server"], node.daemons()["gpu0"]["pid"]
        kill(server, signal.SIGSTOP)
        kill(before)
        next_ready(node, "gpu0", before)
        event(node, "server_orphaned", server=server)
        assert reasons(node) == []
        assert is_running(server)
    event(node, "server_killed", server=server)
    assert serves(node)


@pytest.mark.parametrize("real", branches(470, 555))
def test_real_daemons(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """The same with NVIDIA's control daemons: the stopped server is named and ended, and the daemon replaced."""
    (short_tmp / "bin").mkdir()
    program = short_tmp / "bin" / "nvidia-cuda-mps-server"
    program.write_text("#!/bin/bash\nexec -a nvidia-cuda-mps-server sleep 600\n")
    program.chmod(0o755)
    path = f"{short_tmp / 'bin'}:{os.environ['PATH']}"
    node = make_node(simulate=1, control=real.control, config=ALONE, env={"PATH": path}).start()
    for _ in range(2):
        before = node.daemons()["gpu0"]["pid"]
        lease = node.request("POST", "/v1/leases", {**REQUEST, "pid": os.getpid()}).json["id"]
        server = int(node.ask("gpu0", f"start_server -uid {os.geteuid()}\nget_server_list")[-1])
        wait_until(lambda: node.daemons()["gpu0"]["servers"], what="the server to be seen")
        kill(server, signal.SIGSTOP)
        reason(node, f"{lease} may use it")
        assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        assert event(node, "server_killed", server=server)["uid"] == os.geteuid()
        next_ready(node, "gpu0", before)
    assert node.events("daemon_death") == []


def test_grant_before_it_is_noticed(node: Node) -> None:
    """No lease is granted for a server that is stopped at that moment, although mpsd looks for that once a second."""
    # The limits of a lease like this one are open already, so that a grant needs no question.
    assert node.request("POST", "/v1/leases", {**REQUEST, "pid": os.getpid()}).status == 201
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen")
        with stopped(server):
            refused = node.request("POST", "/v1/leases", REQUEST)
            assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")
        granted = node.request("POST", "/v1/leases", {**REQUEST, "wait": 20})
        assert granted.status == 201
