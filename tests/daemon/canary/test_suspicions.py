"""Signs of a server that may serve no client: they are examined, as adopted servers are, and prove nothing."""

import signal
import time

import pytest

from tests.daemon.canary.conftest import BRISK, CALM, OFTEN
from tests.daemon.canary.helpers import REQUEST, canary, canary_of, examination, hold, release, start_again, wedge
from tests.daemon.conftest import Start
from tests.daemon.helpers import event, is_running, next_ready, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]


def test_ends(calm: Node) -> None:
    """Neither the end of a client, of whatever kind, nor that of a canary makes a server suspect.

    The server logs each of them as if the client were lost, also while no mpsd runs.
    """
    before, mine = calm.daemons()["gpu0"]["pid"], hold(calm)
    with leased(calm, *REQUEST) as exits, leased(calm, *REQUEST) as killed, leased(calm, *REQUEST) as last:
        assert all(each.hello["mps"] for each in (exits, killed, last))
        assert exits.end() == 0
        killed.kill()
        assert canary(calm)["verdict"] == "ok"
        calm.end(signal.SIGKILL)
        assert last.end() == 0
        calm.start()
    event(calm, "canary_ended", cause="adopted")
    assert canary(calm)["verdict"] == "ok"
    said = calm.root / "log" / "gpu0" / "server.log"
    wait_until(lambda: said.read_text().count("assuming client exit") == 6, what="the server to log all ends")
    until = time.monotonic() + 2.0
    wait_until(lambda: time.monotonic() > until, what="some looks of mpsd, as in no event can be awaited")
    assert [each["cause"] for each in calm.events("server_suspect")] == ["adopted"]
    assert [each["cause"] for each in calm.events("canary_ended")] == ["command", "adopted", "command"]
    assert calm.daemons()["gpu0"]["pid"] == before
    release(calm, mine)


def test_before_the_first_look(make_node: Start) -> None:
    """Also before the next mpsd has looked at the servers that it finds, it grants nothing there."""
    durations = {"mpsd.daemon.canary.watch._ADOPTED": 60.0}
    node = make_node(simulate=1, control=None, config=f"{CALM}answer_deadline = 0.5\n", durations=durations).start()
    with leased(node, *REQUEST) as client:
        event(node, "client_attributed", client=client.pid)
        start_again(node)
        refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
        assert node.events("server_suspect") == []
        assert client.compute(0.01)["ok"]


def test_next_mpsd_without_a_server(calm: Node) -> None:
    """Where no server runs, the next mpsd sends no canary, and grants at once."""
    calm.end(signal.SIGKILL)
    calm.start()
    release(calm, hold(calm))
    assert calm.events("canary_ended") == []


def test_client_that_stays_silent(make_node: Start) -> None:
    """A client that is connected for long without a context makes its server suspect, and is left alone."""
    node = make_node(simulate=1, control=None, config=f"{CALM}client_silence = 1.0\n").start()
    with leased(node, *REQUEST, late=True) as client:
        assert client.init()["ok"]
        told = event(node, "server_suspect", cause="client_silent")
        assert f"client {client.pid} " in told["because"]
        assert event(node, "canary_ended", cause="client_silent")["proof"] == "context"
        assert client.context()["ok"]
        assert client.do("wedge")["ok"]
        client.launch(60)
        client.kill()  # it is suspect for its end, too
    event(node, "server_suspect", cause="client_still_listed")


def killed_alone(node: Node) -> None:
    """Have a client with a lease killed in mid-kernel, with no other client beside it."""
    with leased(node, *REQUEST) as client:
        client.launch(60)
        client.kill()


def test_error_that_a_killed_client_left(calm: Node) -> None:
    """A canary with the error that a client killed in mid-kernel left proves nothing, and closes nothing.

    A server with such an error is ACTIVE and lists no client (measured on 580): the end itself makes nothing suspect.
    """
    before, mine = calm.daemons()["gpu0"]["pid"], hold(calm)
    killed_alone(calm)
    found = canary(calm)
    assert (found["verdict"], found["mps"]) == ("unknown", True)
    assert canary(calm)["verdict"] == "ok"
    assert calm.events("server_suspect") == []
    assert calm.daemons()["gpu0"]["unserved"] is None
    assert calm.daemons()["gpu0"]["pid"] == before
    release(calm, mine)


def test_next_mpsd(make_node: Start) -> None:
    """The next mpsd grants nothing on a server that it finds before a canary has shown that the server serves."""
    durations = OFTEN | {"mpsd.core.supervision.wedge.SPACING": 4.0}
    node = make_node(simulate=1, control=None, config=f"{CALM}answer_deadline = 0.5\n", durations=durations).start()
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    killed_alone(node)
    start_again(node)
    event(node, "server_suspect", cause="adopted")
    assert examination(node)["proof"] == "nothing"
    refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
    event(node, "canary_ended", cause="adopted", proof="context")
    release(node, hold(node, request_id="another", wait=20))
    assert node.daemons()["gpu0"]["pid"] == before
    release(node, mine)


def test_grants_wait(calm: Node) -> None:
    """A request that comes while a server is suspect for the end of a client is granted after the canary, not before.

    Where the server does not answer it, the request is refused.
    """
    mine = hold(calm)
    with wedge(calm):
        event(calm, "server_suspect", cause="client_still_listed")
        assert calm.events("server_wedged") == []
        refused = calm.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
        assert "still lists client" in refused.json["detail"]
    release(calm, mine)


def test_stopped_server(node: Node) -> None:
    """A stopped server answers no client either, but that is no wedge."""
    with leased(node, *REQUEST) as client:
        server = client.hello["server"]
        wait_until(
            lambda: [each["pid"] for each in node.daemons()["gpu0"]["servers"]] == [server], what="it to be seen"
        )
        with stopped(server):
            found = canary(node)
        assert found["verdict"] == "unknown"
        assert "is stopped (SIGSTOP)" in found["because"]
        assert not node.daemons()["gpu0"]["wedged"]


def test_server_that_is_stopped_for_a_moment(node: Node) -> None:
    """The silence of a canary proves nothing where its server was stopped at any time, as its user can do."""
    mine = hold(node)
    with wedge(node) as client:
        canary_of(node)
        with stopped(client.hello["server"]):
            until = time.monotonic() + 0.5
            wait_until(lambda: time.monotonic() > until, what="some checks of mpsd")
        ended = event(node, "canary_ended")
    assert ended["proof"] == "nothing"
    assert f"server {client.hello['server']} is stopped (SIGSTOP)" in ended["because"]
    release(node, mine)


def test_end_that_comes_late(make_node: Start) -> None:
    """A server that ends contexts for longer than the deadline refuses a canary, which clears no suspicion."""
    config = f'{BRISK}[enforcement]\nterminate_deadline = 0.7\ngrace = 0.3\non_violation = "terminate"\n'
    node = make_node(simulate=1, control=None, config=config).start()
    before = node.daemons()["gpu0"]["pid"]
    with leased(node, *REQUEST), SimulatedClient(variables(node)) as stray:
        assert stray.do("ignore TERM")["ok"]
        stray.launch(1.2)  # on a quarter of the GPU
        event(node, "server_suspect", cause="terminate_client")
        ended = event(node, "canary_ended", cause="terminate_client")
        assert ended["proof"] == "nothing"
        assert "MPS_SERVER_NOT_READY (807)" in ended["because"]
        # The end looks again after ever longer pauses, of 5 s at most.
        wait_until(lambda: not is_running(stray.pid), what="it to end", deadline=30)
    next_ready(node, "gpu0", before)


def test_end_that_takes_long(make_node: Start) -> None:
    """While a server ends contexts, the silence of a canary proves nothing: it may not answer other clients."""
    slow = BRISK.replace("canary_deadline = 1.0", "canary_deadline = 2.0")  # the end begins before a canary is over
    node = make_node(simulate=1, control=None, config=slow).start()
    mine = hold(node, processes=2)
    with wedge(node) as dead, SimulatedClient(variables(node)) as hanging:
        event(node, "client_attributed", client=hanging.pid)
        canary_of(node)
        assert node.request("POST", f"/v1/leases/{mine}/end", {}).status == 202
        ended = event(node, "canary_ended", proof="nothing")
        assert f"server {dead.hello['server']} is ending the contexts of client {hanging.pid}" in ended["because"]
    assert not node.events("server_wedged")


def test_stopped_control_daemon(node: Node) -> None:
    """A stopped control daemon answers no client either, but its server is not wedged."""
    with leased(node, *REQUEST) as client:
        event(node, "client_attributed", client=client.pid)
        with stopped(node.daemons()["gpu0"]["pid"]):
            found = canary(node)
        assert found["verdict"] == "unknown"
        assert "is stopped (SIGSTOP)" in found["because"]
        assert node.daemons()["gpu0"]["unserved"] is None
