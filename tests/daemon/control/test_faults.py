"""Fatal faults, errors that a GPU reports, and servers that do not start: they are reported, and admission stops."""

import json
import os
import signal
from functools import partial

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import gpus, leased

pytestmark = pytest.mark.thorough

SMALL = {"threads": 10, "memory": "1GiB"}
BRISK = "[enforcement]\ngrace = 0.5\n"


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=BRISK).start()


def test_fatal_fault(node: Node) -> None:
    """The report names the affected clients, admission stops until all have ended, and then the limits hold again."""
    with (
        leased(node, "--threads", "25", "--memory", "2GiB") as one,
        leased(node, "--threads", "50", "--memory", "2GiB") as other,
    ):
        clients = {one.hello["pid"], other.hello["pid"]}
        for client in (one, other):
            event(node, "client_attributed", client=client.pid)
        assert not one.fault()["ok"]
        told = event(node, "leases_faulted")
        assert set(told["clients"]) == clients
        assert set(told["leases"]) == {each["id"] for each in node.get("/v1/leases").json["leases"]}
        assert told["server"] == one.hello["server"]
        wait_until(lambda: node.get("/readyz").status == 503, what="the node not to be ready")
        refused = node.request("POST", "/v1/leases", SMALL)
        assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
        # The hint is the command that ends the affected clients; until the last has exited, nothing is granted.
        (hint,) = (each["hint"] for each in node.get("/v1/status").json["reasons"] if each["kind"] == "server_fault")
        *end, first, second = hint.partition("mpsctl ")[2].split()
        assert {int(first), int(second)} == clients
        assert f"mpsctl {' '.join(end)} " in told["hint"]
        assert node.mpsctl(*end, first).returncode == 0
        assert node.request("POST", "/v1/leases", SMALL).status == 409
        assert node.mpsctl(*end, second).returncode == 0
        event(node, "server_recovered")
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready")
    assert node.request("POST", "/v1/leases", SMALL).status == 201
    # The limits that the ended clients needed may stay for a moment.
    wait_until(lambda: node.ask("gpu0", "get_default_active_thread_percentage") == ["10.0"], what="its own alone")


def test_fault_of_a_silent_daemon(node: Node) -> None:
    """After a fault in a server's log, nothing is granted before the server has answered, or where it cannot."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.hello["pid"])
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        daemon = node.daemons()["gpu0"]["pid"]
        os.kill(daemon, signal.SIGSTOP)
        try:
            client.fault()
            event(node, "server_faulted")
            refused = node.request("POST", "/v1/leases", SMALL)
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
        event(node, "leases_faulted")


@pytest.mark.thorough
def test_clients_that_linger(make_node: Start) -> None:
    """Affected clients that do not end block admission: that is a violation, and policy may end them."""
    durations = {"mpsd.daemon.gpu.gpus._INTERVAL": 1.0}
    node = make_node(simulate=1, control=None, config=BRISK, durations=durations).start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.hello["pid"])
        client.fault()
        told = event(node, "violation", kind="lingers")
        assert (told["pid"], told["policy"]) == (client.pid, "report")
        assert client.process.poll() is None
        node.reload(BRISK + '[violations]\nlingers = "terminate"\n')
        assert client.process.wait(20) == -15
        event(node, "server_recovered")
    assert node.events("client_forced")[0]["step"] == "SIGTERM"
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready")


def test_pid_of_a_server_that_ended(node: Node) -> None:
    """A fault ends with its server, although another process has the server's pid when mpsd looks next."""
    node.end(signal.SIGKILL)
    record = node.root / "run" / "gpu0.reading.json"
    reading = json.loads(record.read_text())
    reading["record"]["serving"]["faults"] = {str(os.getpid()): "2026-11-26T00:00:00Z"}
    record.write_text(json.dumps(reading))
    node.start()
    wait_until(lambda: node.request("POST", "/v1/leases", SMALL).status == 201, what="the GPU to be granted")


def test_xids_in_a_loop(node: Node) -> None:
    """A program that causes Xids in a loop fills no log, hides no Xid of the GPU itself, and all are counted."""
    (gpu,) = gpus(node)
    for _ in range(500):
        gpu.report(31)
    gpu.report(79)
    event(node, "gpu_xid", xid=79)
    assert len(node.events("gpu_xid", xid=31)) <= 33
    wait_until(lambda: counted(node, 31) == 500, what="all of them to be counted", deadline=30)


def counted(node: Node, xid: int) -> float:
    """Return how many of these Xids the metrics have."""
    lines = node.get("/metrics").body.decode().splitlines()
    found = [each for each in lines if each.startswith("mpsd_gpu_xids_total{") and f'xid="{xid}"' in each]
    return sum(float(each.rpartition(" ")[2]) for each in found)


def test_xids(node: Node) -> None:
    """An Xid that a program causes is reported; one of the GPU itself takes it out of service until it is reset."""
    (gpu,) = gpus(node)
    gpu.report(31)
    event(node, "gpu_xid", xid=31)
    assert node.request("POST", "/v1/leases", SMALL).status == 201
    gpu.report(79)
    event(node, "gpu_xid", xid=79)
    gpu.report(31)
    wait_until(lambda: len(node.events("gpu_xid")) == 3, what="all of them to be told")
    (found,) = node.get("/v1/gpus").json["gpus"]
    assert found["health"] == "faulty"
    refused = node.request("POST", "/v1/leases", SMALL)
    assert (refused.json["code"], refused.json["limit"]) == ("daemon_not_ready", "health")
    assert node.get("/readyz").status == 503
    assert node.mpsctl("reset", "gpu0").returncode == 0
    assert node.get("/v1/gpus").json["gpus"][0]["health"] == "ok"
    assert node.request("POST", "/v1/leases", SMALL).status == 201


@pytest.mark.real_daemon(535)
def test_servers_that_do_not_start(make_node: Start) -> None:
    """Repeated deaths of servers stop admission, with a hint that may help."""
    node = make_node(simulate=1, config="").start()  # NVIDIA's own, whose servers cannot start without a GPU

    def died(servers: int) -> bool:
        return len(node.events("server_exited")) >= servers

    for number in range(1, 7):
        node.ask("gpu0", f"start_server -uid {os.geteuid()}")
        wait_until(partial(died, number), what="the server to die")
    wait_until(lambda: node.get("/readyz").status == 503, what="the node not to be ready")
    refused = node.request("POST", "/v1/leases", SMALL)
    assert (refused.status, refused.json["limit"]) == (409, "health")
    assert [each["kind"] for each in node.get("/v1/status").json["reasons"]] == ["servers_cannot_start"]
    # The reason holds for the next mpsd too, which does not read about it again.
    node.end(signal.SIGKILL)
    node.start(ready=False)
    node.wait_for_state("gpu0", "ready")
    assert node.request("POST", "/v1/leases", SMALL).status == 409
    assert [each["kind"] for each in node.get("/v1/status").json["reasons"]] == ["servers_cannot_start"]
