"""A server that serves no client but reports that it is well is detected, closed to admission, and replaced."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.supervision.wedge import SPACING
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event, is_running, kill, next_ready, stopped
from tests.daemon.leases.line import Talk
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

ANN: Final = 61001
"""A uid without rights."""

CLIENT: Final = """
import os, sys
from mpsd.simulator.client import main
uid = int(os.environ["CLIENT_UID"])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
sys.exit(main())
"""
"""A client that becomes another user; its first environment stays in /proc/PID/environ."""

REQUEST: Final = ("--threads", "25", "--memory", "2GiB")
"""The request of a client of these tests."""

BRISK: Final = "[daemon]\ncanary_deadline = 2.0\nprobe_interval = 1.0\n"


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node whose canaries have a short deadline."""
    return make_node(simulate=1, control=None, config=BRISK).start()


def hold(node: Node, **asked: Any) -> str:
    """Request a lease for this process, which is no client; return its id."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


def release(node: Node, lease: str) -> None:
    """End a lease."""
    assert node.request("DELETE", f"/v1/leases/{lease}").status == 204


def wedge(node: Node) -> SimulatedClient:
    """Have a client with a lease killed in mid-kernel, with no other client beside it."""
    client = leased(node, *REQUEST)
    client.launch(60)
    client.kill()
    return client


def record(node: Node) -> Path:
    """Return the file with the evidence against a server."""
    return node.root / "run" / "gpu0.evidence.json"


def evidence(node: Node) -> Any:
    """Return the stored evidence against a server."""
    return json.loads(record(node).read_bytes())["evidence"]


def canary(node: Node) -> Any:
    """Return the evidence of canaries."""
    return node.request("POST", "/v1/daemons/gpu0/canary", {}).json


def test_alone(node: Node) -> None:
    """Without living clients, a control daemon whose server still lists a dead client is replaced without a canary."""
    before = node.daemons()["gpu0"]["pid"]
    with wedge(node) as client:
        told = event(node, "server_suspect", cause="client_still_listed")
        assert f"client {client.pid}" in told["because"]
    next_ready(node, "gpu0", before)
    with leased(node, *REQUEST) as again:
        assert again.hello["mps"]
        assert again.compute(0.01)["ok"]


def test_beside_a_lease(node: Node) -> None:
    """While a lease exists the daemon stays: canaries prove the wedge, and admission stops until the lease's end."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node) as client:
        told = event(node, "server_wedged")
    assert told["because"].count("did not initialise CUDA within 2 s") == 3
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
    doctor = node.mpsctl("doctor", "--only", "wedge")
    assert doctor.returncode == 1
    assert "wedge: gpu0 is wedged" in doctor.stdout
    assert "mpsctl restart gpu0 --timeout 0" in doctor.stdout
    release(node, mine)
    next_ready(node, "gpu0", before)
    event(node, "server_serves")
    release(node, hold(node))


def test_verdict_outlives_mpsd(node: Node) -> None:
    """The next mpsd grants nothing on a wedged server either, by the last one's evidence, and replaces it."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        told = event(node, "server_wedged")
    node.end(signal.SIGKILL)
    canaries = node.events("canary_ended")
    node.start(ready=False)
    found = node.wait_for_state("gpu0", "ready")
    assert (found["pid"], found["wedged"], found["unserved"]) == (before, True, told["because"])
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    assert (answer.status, answer.json["code"]) == (409, "daemon_not_ready")
    wait_until(lambda: node.events("canary_ended") != canaries, what="it to be examined again")
    release(node, mine)
    next_ready(node, "gpu0", before)
    event(node, "server_serves")
    release(node, hold(node))
    assert (evidence(node)["unserved"], evidence(node)["suspicions"]) == (None, [])


@pytest.mark.parametrize("gone", ["server", "daemon", "boot"])
def test_verdict_on_a_server_that_is_gone(node: Node, gone: str) -> None:
    """Evidence about a server that has ended does not apply to the next one."""
    mine = hold(node)
    with wedge(node) as client:
        event(node, "server_wedged")
    node.end(signal.SIGKILL)
    noted = json.loads(record(node).read_bytes())
    against = noted["evidence"]["against"]
    server = against["server"]["pid"]
    assert server == client.hello["server"]
    if gone == "boot":
        noted["boot_id"] = "another"
        record(node).write_text(json.dumps(noted))
    pids = {"server": [server], "daemon": [against["daemon"]["pid"], server], "boot": []}[gone]
    for pid in pids:
        kill(pid)
    wait_until(lambda: not any(map(is_running, pids)), what="them to be gone")
    node.start()
    assert not node.daemons()["gpu0"]["wedged"]
    release(node, hold(node, request_id="another"))
    release(node, mine)


def canary_of(node: Node) -> int:
    """Wait for a canary of this node, and return its pid."""

    def found() -> list[int]:
        children = Path(f"/proc/{node.pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        return [pid for pid in pids if b"\0--alarm\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    return wait_until(found, what="a canary", not_yet=(OSError,))[0]


def test_canary_of_an_mpsd_that_dies(node: Node) -> None:
    """A canary that hangs in a wedge ends with mpsd, so that the next mpsd does not take it for a client."""
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with wedge(node):
        pid = canary_of(node)
        node.end(signal.SIGKILL)
        wait_until(lambda: not is_running(pid), what="the canary to end")
    node.start(ready=False)
    event(node, "server_wedged")
    release(node, mine)
    next_ready(node, "gpu0", before)


def test_damaged_verdict(node: Node) -> None:
    """A damaged record does not hinder mpsd: it is logged and ignored."""
    node.end(signal.SIGKILL)
    record(node).write_text("{")
    node.start()
    assert str(record(node)) in event(node, "file_damaged")["because"]
    release(node, hold(node))


def test_verify(node: Node) -> None:
    """`mpsctl verify --canary` says whether MPS serves clients, also before there is a server, with the evidence."""
    mine = hold(node)
    said = node.mpsctl("verify", "--canary", "gpu0")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("gpu0: ok: canary ")
    with wedge(node):
        said = node.mpsctl("verify", "--canary", "gpu0")
        assert said.returncode == 1
        assert said.stdout.startswith("gpu0: wedged: canary ")
    release(node, mine)


def test_canary_that_misses_the_server(node: Node) -> None:
    """A canary that does not reach the server of a wedged daemon does not clear it, although it gets a context."""
    mine = hold(node)
    with wedge(node):
        event(node, "server_wedged")
        (node.pipe_directory("gpu0") / "simulated_clients").unlink()
        found = canary(node)
    assert found["verdict"] == "unknown"
    assert "it used CUDA without MPS: the control daemon does not name it as a client" in found["because"]
    assert node.daemons()["gpu0"]["wedged"]
    release(node, mine)


def test_lost_client(node: Node) -> None:
    """A client that is killed while idle makes its server suspect.

    One canary clears the server, and nothing is closed.
    """
    before, mine = node.daemons()["gpu0"]["pid"], hold(node)
    with leased(node, *REQUEST) as client:
        assert client.hello["ok"]
        client.kill()
    event(node, "server_suspect", cause="client_lost")
    ended = event(node, "canary_ended", cause="client_lost")
    assert ended["proof"] in {"context", "error"}  # the ceiling may be closed
    assert node.daemons()["gpu0"]["pid"] == before
    release(node, mine)


def test_client_lost_while_mpsd_was_away(node: Node) -> None:
    """A client that is killed while no mpsd runs makes its server suspect, also beside another client."""
    with leased(node, *REQUEST) as other, leased(node, *REQUEST) as client:
        assert other.hello["server"] == client.hello["server"]
        event(node, "client_attributed", client=client.pid)
        node.end(signal.SIGKILL)
        client.kill()
        node.start()
        event(node, "server_suspect", cause="client_lost")


def test_suspicion_outlives_mpsd(node: Node) -> None:
    """The next mpsd examines what the last one suspected, and no uid causes more examinations by a restart of mpsd."""
    mine = hold(node)
    with leased(node, *REQUEST) as first:
        assert first.hello["ok"]
        first.kill()
    event(node, "canary_ended", cause="client_lost")
    node.end(signal.SIGKILL)
    node.start()
    with leased(node, *REQUEST) as second:
        assert second.hello["ok"]
        second.kill()
    wait_until(lambda: len(node.events("server_suspect")) == 2, what="another suspicion")
    node.end(signal.SIGKILL)
    noted = json.loads(record(node).read_bytes())
    [suspicion], [examined] = noted["evidence"]["suspicions"], noted["evidence"]["examined"]
    assert suspicion["due"] == examined["at"] + SPACING
    suspicion["due"] = examined["at"] = examined["at"] - SPACING
    record(node).write_text(json.dumps(noted))
    node.start()
    wait_until(lambda: len(node.events("canary_ended", cause="client_lost")) == 2, what="the second examination")
    assert len(node.events("server_suspect")) == 2
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
        stray.launch(2)  # on a quarter of the GPU
        event(node, "server_suspect", cause="terminate_client")
        ended = event(node, "canary_ended", cause="terminate_client")
        assert ended["proof"] == "nothing"
        assert "MPS_SERVER_NOT_READY (807)" in ended["because"]
        wait_until(lambda: not is_running(stray.pid), what="it to end")
    next_ready(node, "gpu0", before)


def test_end_that_takes_long(make_node: Start) -> None:
    """While a server ends contexts, the silence of a canary proves nothing: it may not answer other clients."""
    slow = BRISK.replace("canary_deadline = 2.0", "canary_deadline = 5.0")  # the end begins before a canary is over
    node = make_node(simulate=1, control=None, config=slow).start()
    mine = hold(node, processes=2)
    with wedge(node) as dead, SimulatedClient(variables(node)) as hanging:
        event(node, "client_attributed", client=hanging.pid)
        canary_of(node)
        assert node.request("POST", f"/v1/leases/{mine}/end", {}).status == 202
        ended = event(node, "canary_ended", proof="nothing")
        assert f"server {dead.hello['server']} is ending the contexts of client {hanging.pid}" in ended["because"]
    assert not node.events("server_wedged")


def test_stopped_control_daemon(make_node: Start) -> None:
    """A stopped control daemon answers no client either, but its server is not wedged."""
    config = f"{BRISK}answer_deadline = 6.0\n"  # it is not unresponsive yet when the server becomes suspect
    node = make_node(simulate=1, control=None, config=config).start()
    mine = hold(node)
    with leased(node, *REQUEST) as client:
        event(node, "client_attributed", client=client.pid)
        with stopped(node.daemons()["gpu0"]["pid"]):
            client.kill()
            ended = event(node, "canary_ended", cause="client_lost")
            assert ended["proof"] == "nothing"
            assert "is stopped (SIGSTOP)" in ended["because"]
    assert node.daemons()["gpu0"]["unserved"] is None
    assert canary(node)["verdict"] == "ok"
    release(node, mine)


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


def test_client_that_stays_silent(make_node: Start) -> None:
    """A client that is connected for long without a context makes its server suspect, and is left alone."""
    node = make_node(simulate=1, control=None, config=f"{BRISK}client_silence = 1.0\n").start()
    with leased(node, *REQUEST, late=True) as client:
        assert client.init()["ok"]
        told = event(node, "server_suspect", cause="client_silent")
        assert f"client {client.pid} " in told["because"]
        assert event(node, "canary_ended", cause="client_silent")["proof"] == "context"
        assert client.context()["ok"]
        client.launch(60)
        client.kill()  # it is suspect for its end, too
    event(node, "server_suspect", cause="client_still_listed")


@needs_root
def test_quarantined_user(node: Node) -> None:
    """A canary does not run as a quarantined user, who has no pipe access, although that user's server runs."""
    with Talk(node.socket, uid=ANN) as talk:
        answer = talk.ask("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0"})
    assert answer.status == 201, answer.body
    environment = {**variables(node), **answer.json["env"], "CLIENT_UID": str(ANN)}
    with DrivenProgram([sys.executable, "-c", CLIENT], environment) as client:
        assert client.hello["mps"]
        node.end(signal.SIGKILL)
        quarantined = [{"uid": ANN, "since": "2026-01-01T00:00:00Z", "because": "of a test"}]
        record = {"boot_id": "", "crashes": [], "quarantined": quarantined}
        (node.root / "state" / "quarantines.json").write_text(json.dumps(record))
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        found = canary(node)
    assert found["verdict"] == "unknown"
    assert f"uid {ANN} is quarantined" in found["because"]
