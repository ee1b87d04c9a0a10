"""A server that serves no client but reports that it is well is detected, closed to admission, and replaced."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpsd.simulator.devices import Setting, set_setting
from tests.daemon.canary.conftest import BRISK, OFTEN
from tests.daemon.canary.helpers import REQUEST, canary, canary_of, hold, release, start_again, wedge
from tests.daemon.conftest import Start
from tests.daemon.helpers import event, is_running, kill, next_ready, states
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]


def test_alone(node: Node) -> None:
    """Without living clients, a control daemon whose server still lists a dead client is replaced."""
    before = node.daemons()["gpu0"]["pid"]
    with wedge(node) as client:
        told = event(node, "server_suspect", cause="client_still_listed")
        assert f"client {client.pid}" in told["because"]
    next_ready(node, "gpu0", before)
    with leased(node, *REQUEST) as again:
        assert again.hello["mps"]
        assert again.compute(0.01)["ok"]
        assert states(node, "gpu0").count("stopping") == 1  # its successor was not replaced for the same reason


def test_beside_a_lease(node: Node) -> None:
    """While a lease exists the daemon stays: canaries prove the wedge, and admission stops until the lease's end."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node) as client:
        told = event(node, "server_wedged")
    assert told["because"].count("did not initialise CUDA within 1 s") == 1
    # Canaries are not attributed to a lease, although mpsd descends from the holder of a lease here.
    assert {each["client"] for each in node.events("client_attributed")} <= {client.pid}
    found = node.daemons()["gpu0"]
    assert (found["state"], found["pid"], found["wedged"]) == ("ready", before, True)
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (409, "daemon_not_ready", "health")
    assert "wedged" in answer.json["detail"]
    status = node.mpsctl("status")
    assert status.returncode == 1
    assert "is wedged" in status.stdout
    doctor = node.mpsctl("doctor", "--only", "node")
    assert doctor.returncode == 1
    assert "node: gpu0 is wedged" in doctor.stdout
    assert "mpsctl restart gpu0 --timeout 0" in doctor.stdout
    release(node, mine)
    next_ready(node, "gpu0", before)
    event(node, "server_serves")
    release(node, hold(node))


@contextmanager
def wedged_by(cause: str, node: Node, client: SimulatedClient) -> Iterator[None]:
    """Wedge the server of a client, so that this cause alone shows it."""
    assert client.do("wedge")["ok"]
    match cause:
        case "client_silent":
            client.end()
            with leased(node, *REQUEST):  # it hangs
                yield
        case _:
            [lease] = [each["id"] for each in node.get("/v1/leases").json["leases"] if each["clients"]]
            assert node.request("POST", f"/v1/leases/{lease}/end", {}).status == 202
            yield


@pytest.mark.parametrize("cause", ["client_silent", "terminate_client"])
def test_by_each_cause(make_node: Start, cause: str) -> None:
    """A wedge that one cause alone shows is found: no request is admitted until its last lease has ended."""
    more = "client_silence = 0.5\n[enforcement]\nterminate_deadline = 0.5\ngrace = 60.0\n"
    node = make_node(simulate=1, control=None, config=BRISK + more, durations=OFTEN).start()
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with leased(node, *REQUEST) as client:
        event(node, "client_attributed", client=client.pid)
        with wedged_by(cause, node, client):
            event(node, "server_wedged")
            assert {each["cause"] for each in node.events("server_suspect")} == {cause}
            answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
            assert (answer.status, answer.json["code"], answer.json["limit"]) == (409, "daemon_not_ready", "health")
    release(node, mine)
    next_ready(node, "gpu0", before)
    with leased(node, *REQUEST) as client:
        assert client.compute(0.01)["ok"]


def test_next_mpsd(node: Node) -> None:
    """The next mpsd grants nothing on a wedged server either, from its start on: it examines it, and replaces it."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        event(node, "server_wedged")
    start_again(node)
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    assert (answer.status, answer.json["code"]) == (409, "daemon_not_ready")
    wait_until(lambda: node.daemons()["gpu0"]["wedged"], what="it to be found wedged again")
    assert node.daemons()["gpu0"]["pid"] == before
    release(node, mine)
    next_ready(node, "gpu0", before)
    event(node, "server_serves")
    release(node, hold(node))


@pytest.mark.parametrize("gone", ["server", "daemon"])
def test_verdict_on_a_server_that_is_gone(node: Node, gone: str) -> None:
    """The evidence against a server that has ended does not apply to the next one."""
    mine = hold(node)
    with wedge(node) as client:
        daemon, server = node.daemons()["gpu0"]["pid"], client.hello["server"]
        event(node, "server_wedged")
    pids = {"server": [server], "daemon": [daemon, server]}[gone]
    for pid in pids:
        kill(pid)
    wait_until(lambda: not any(map(is_running, pids)), what="them to be gone")
    event(node, "server_serves")
    assert not node.daemons()["gpu0"]["wedged"]
    release(node, hold(node, request_id="another", wait=20))
    release(node, mine)


def test_canary_of_an_mpsd_that_dies(node: Node) -> None:
    """A canary that hangs in a wedge ends with mpsd, so that the next mpsd does not take it for a client."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        pid = canary_of(node)
        node.end(signal.SIGKILL)
        wait_until(lambda: not is_running(pid), what="the canary to end")
    node.start(ready=False)
    node.wait_for_state("gpu0", "ready")
    release(node, mine)
    next_ready(node, "gpu0", before)


def test_verify(node: Node) -> None:
    """`mpsctl verify --canary` says whether MPS serves clients, also before there is a server, with the evidence."""
    mine = hold(node)
    said = node.mpsctl("verify", "--canary", "gpu0")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("gpu0: ok: canary ")
    assert canary(node)["mps"] is True
    with wedge(node):
        said = node.mpsctl("verify", "--canary", "gpu0")
        assert said.returncode == 1
        assert said.stdout.startswith("gpu0: wedged: canary ")
    release(node, mine)


@pytest.mark.parametrize("mps", [False, None])
def test_canary_that_misses_the_server(node: Node, mps: bool | None) -> None:  # noqa: FBT001 - a parameter of the test
    """A canary that does not reach the server of a wedged daemon does not clear it, although it gets a context.

    CUDA tells it that it does not use MPS, or on older drivers does not tell, and then the control daemon does.
    """
    mine = hold(node)
    if mps is None:
        set_setting(node.root / "run" / "simulated", Setting.NO_MPS_ATTRIBUTE)
    with wedge(node):
        event(node, "server_wedged")
        (node.pipe_directory("gpu0") / "simulated_clients").unlink()
        found = canary(node)
    assert (found["verdict"], found["mps"]) == ("unknown", mps)
    ended = node.events("canary_ended", cause="command")[-1]
    assert (ended["proof"], ended["mps"]) == ("nothing", mps)
    assert node.daemons()["gpu0"]["wedged"]
    release(node, mine)


def test_operators_restart(node: Node) -> None:
    """An operator's restart of a wedged daemon waits for leases and living clients, not for dead ones."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        event(node, "server_wedged")
    restart = node.mpsctl("restart", "gpu0", "--no-wait")
    assert restart.returncode == 0, restart.stderr
    release(node, mine)
    next_ready(node, "gpu0", before)
    event(node, "operation_ended", state="done")


def test_hanging_clients_are_left_alone(node: Node) -> None:
    """Hanging clients keep their wedged daemon alive: only their users, or an operator's command, end them."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node, processes=2)
    with wedge(node):
        pass
    with SimulatedClient(variables(node)) as hanging:
        event(node, "server_wedged")
        release(node, mine)
        wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be listed")
        assert node.daemons()["gpu0"]["pid"] == before
        assert not hanging.has_answered
        os.kill(hanging.pid, signal.SIGKILL)
    next_ready(node, "gpu0", before)


def test_control_daemon_that_dies(node: Node) -> None:
    """A canary of a control daemon that has died proves nothing about the next one."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node) as client:
        arrived = f"NEW CLIENT {canary_of(node)} "
        wait_until(lambda: arrived in node.control_log("gpu0").read_text(), what="the canary to reach the server")
        kill(before)
        assert event(node, "canary_ended")["proof"] == "nothing"
        kill(client.hello["server"])
    next_ready(node, "gpu0", before)
    assert node.daemons()["gpu0"]["unserved"] is None
    release(node, mine)
