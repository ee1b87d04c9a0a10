"""Signs of a server that may serve no client: they are examined, also by the next mpsd, and prove nothing."""

import json
import signal
import time
from pathlib import Path

import pytest

from mpsd.core.settings import LogFormat
from mpsd.core.supervision.wedge import SPACING, Cause, Suspicion
from mpsd.daemon.canary.evidence import EvidenceRecord
from mpsd.daemon.record.log import configure
from mpsd.simulator.cuda import Leaves
from mpsd.simulator.devices import set_killed_alone
from tests.daemon.canary.conftest import BRISK, CALM, OFTEN
from tests.daemon.canary.helpers import (
    REQUEST,
    canary,
    canary_of,
    evidence,
    examination,
    hold,
    record,
    release,
    suspect,
    wedge,
)
from tests.daemon.conftest import Start
from tests.daemon.helpers import event, is_running, next_ready, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = pytest.mark.enforcement


def test_ends(calm: Node) -> None:
    """Neither the end of a client, of whatever kind, nor that of a canary makes a server suspect.

    The server logs each of them as if the client were lost, also while no mpsd runs.
    """
    before, mine = calm.daemons()["gpu0"]["pid"], hold(calm)
    with leased(calm, *REQUEST) as exits, leased(calm, *REQUEST) as killed, leased(calm, *REQUEST) as last:
        assert exits.end() == 0
        killed.kill()
        assert canary(calm)["verdict"] == "ok"
        calm.end(signal.SIGKILL)
        assert last.end() == 0
        calm.start()
    assert canary(calm)["verdict"] == "ok"
    said = calm.root / "log" / "gpu0" / "server.log"
    wait_until(lambda: said.read_text().count("assuming client exit") == 5, what="the server to log all ends")
    until = time.monotonic() + 2.0
    wait_until(lambda: time.monotonic() > until, what="some looks of mpsd, as in no event can be awaited")
    assert calm.events("server_suspect") == []
    assert [each["cause"] for each in calm.events("canary_ended")] == ["command", "command"]
    assert calm.daemons()["gpu0"]["pid"] == before
    release(calm, mine)


def test_suspicion_outlives_mpsd(make_node: Start) -> None:
    """The next mpsd examines what the last one suspected, and no uid causes more examinations by a restart of mpsd."""
    node = make_node(simulate=1, control=None, config=f"{CALM}client_silence = 0.5\n", durations=OFTEN).start()
    mine = hold(node)
    with leased(node, *REQUEST, late=True) as first:
        assert first.init()["ok"]
        event(node, "canary_ended", cause="client_silent")
    node.end(signal.SIGKILL)
    node.start()
    with leased(node, *REQUEST, late=True) as second:
        assert second.init()["ok"]
        wait_until(lambda: len(node.events("server_suspect")) == 2, what="another suspicion")
    node.end(signal.SIGKILL)
    noted = json.loads(record(node).read_bytes())
    [suspicion], [examined] = noted["evidence"]["suspicions"], noted["evidence"]["examined"]
    assert suspicion["due"] == examined["at"] + SPACING
    suspicion["due"] = examined["at"] = examined["at"] - SPACING
    record(node).write_text(json.dumps(noted))
    node.start()
    wait_until(lambda: len(node.events("canary_ended", cause="client_silent")) == 2, what="the second examination")
    assert len(node.events("server_suspect")) == 2
    release(node, mine)


def test_suspicion_before_its_gpu_shows(tmp_path: Path) -> None:
    """A suspicion for a control daemon whose GPU NVML does not show yet waits on disk for its watch, once."""
    log = configure(LogFormat.JSON)
    suspicions = [Suspicion(Cause.TERMINATE, f"server 7: {because}", 1000) for because in ("one", "two")]
    for each in suspicions:
        EvidenceRecord(tmp_path / "gpu0.evidence.json", log).add(each)
    found = EvidenceRecord(tmp_path / "gpu0.evidence.json", log).load()
    assert [each.suspicion for each in found.suspicions] == suspicions[:1]


def test_client_that_stays_silent(make_node: Start) -> None:
    """A client that is connected for long without a context makes its server suspect, and is left alone."""
    node = make_node(simulate=1, control=None, config=f"{CALM}client_silence = 1.0\n").start()
    with leased(node, *REQUEST, late=True) as client:
        assert client.init()["ok"]
        told = event(node, "server_suspect", cause="client_silent")
        assert f"client {client.pid} " in told["because"]
        assert event(node, "canary_ended", cause="client_silent")["proof"] == "context"
        assert client.context()["ok"]
        client.launch(60)
        client.kill()  # it is suspect for its end, too
    event(node, "server_suspect", cause="client_still_listed")


def test_error_that_a_killed_client_left(make_node: Start) -> None:
    """A canary with the error that a client killed in mid-kernel left proves nothing: the next one decides.

    A server with such an error is ACTIVE and lists no client (measured on 580): the end itself makes nothing suspect.
    """
    node = make_node(simulate=1, control=None, config=CALM, durations=OFTEN)
    set_killed_alone(node.root / "run" / "simulated", Leaves.ERROR)
    node.start()
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        pass
    suspect(node)
    assert examination(node)["proof"] == "nothing"
    assert [each["suspicion"]["cause"] for each in evidence(node)["suspicions"]] == ["client_silent"]
    assert node.daemons()["gpu0"]["unserved"] is None
    assert canary(node)["verdict"] == "ok"
    assert evidence(node)["suspicions"] == []
    assert node.events("server_suspect") == []
    assert node.daemons()["gpu0"]["pid"] == before
    with wedge(node):
        pass
    found = canary(node)
    assert (found["verdict"], found["mps"], found["canaries"]) == ("unknown", True, 1)
    release(node, mine)


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


def test_end_that_does_not_come_about(make_node: Start) -> None:
    """A server that does not answer `terminate_client` is suspect; without other clients, it is replaced."""
    config = f'{BRISK}[enforcement]\nterminate_deadline = 0.7\ngrace = 0.3\non_violation = "terminate"\n'
    node = make_node(simulate=1, control=None, config=config).start()
    before = node.daemons()["gpu0"]["pid"]
    with SimulatedClient(variables(node)) as stray:
        assert stray.do("ignore TERM")["ok"]
        stray.launch(60)
        told = event(node, "server_suspect", cause="terminate_client")
        assert f"server {stray.hello['server']}" in told["because"]
        next_ready(node, "gpu0", before)
    with leased(node, *REQUEST) as client:
        assert client.compute(0.01)["ok"]


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
        wait_until(lambda: not is_running(stray.pid), what="it to end")
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
