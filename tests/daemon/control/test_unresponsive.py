"""A control daemon that runs and does not answer is reported and left alone: its clients may be fine."""

import shutil

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, LIMITS, holding, is_running, kill, next_ready, stopped, untouched
from tests.harness import look_at, wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests share, with frequent checks; each test uses its own GPU on it."""
    return node_for_all(simulate=3, config=LIMITS + BRISK).start()


def test_stopped_daemon(node: Node) -> None:
    """A stopped daemon is unresponsive, not killed; it admits no lease, and is ready once it continues."""
    before = node.daemons()
    pid = before["gpu0"]["pid"]
    asked = {"threads": 10, "memory": "1GiB"}
    with stopped(pid):
        daemon = node.wait_for_state("gpu0", "unresponsive")
        assert daemon["pid"] == pid
        assert daemon["ready_since"] is None
        assert node.get("/v1/status").json["healthy"] is False

        refused = node.request("POST", "/v1/leases", {**asked, "gpu": "0"})
        assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "health")
        assert "kill -CONT" in refused.json["hint"]
        # A request for any GPU is granted on another GPU.
        elsewhere = node.request("POST", "/v1/leases", asked)
        assert elsewhere.status == 201
        assert elsewhere.json["daemon"] != "gpu0"

        found = look_at(pid)
        assert found is not None
        assert found.state == "T"
        assert untouched(node.daemons()["gpu1"]) == untouched(before["gpu1"])

    daemon = node.wait_for_state("gpu0", "ready")
    levels = {each["state"]: each["level"] for each in node.events("daemon_state", daemon="gpu0")}
    assert levels == {"starting": "info", "unresponsive": "warning", "ready": "info"}
    assert daemon["pid"] == pid
    assert daemon["limits"] == before["gpu0"]["limits"]
    granted = node.request("POST", "/v1/leases", {**asked, "gpu": "0"})
    assert granted.status == 201
    assert node.events("daemon_death") == []
    for lease in (elsewhere, granted):
        node.request("DELETE", f"/v1/leases/{lease.json['id']}")


def test_socket_is_gone(node: Node) -> None:
    """A daemon whose socket was removed is reported as unresponsive, with that reason, and not killed.

    No client can reach it, though root's front-ends still can, by the other socket.
    """
    pid = node.daemons()["gpu1"]["pid"]
    socket = node.pipe_directory("gpu1") / "control"
    socket.rename(socket.with_name("away"))
    daemon = node.wait_for_state("gpu1", "unresponsive")
    assert daemon["pid"] == pid
    assert f"its socket {socket} is gone" in daemon["because"]
    assert f"kill {pid}" in daemon["hint"]
    assert is_running(pid)
    # The process that moved the socket away can move it back.
    socket.with_name("away").rename(socket)
    assert node.wait_for_state("gpu1", "ready")["pid"] == pid


def test_stranger_keeps_it_busy(node: Node) -> None:
    """A front-end that stays connected locks mpsd out: mpsd names its pid, and is ready again when it leaves."""
    pid = node.daemons()["gpu2"]["pid"]
    with holding(node, "gpu2") as holder:
        node.wait_for_state("gpu2", "unresponsive")
        because = wait_until(  # on a busy machine mpsd may time out first, and be turned away at its next query
            lambda: "other front-ends occupied" in (said := node.daemons()["gpu2"]["because"]) and said,
            what="mpsd to be turned away",
        )
        assert f"pid {holder} (uid " in because
        refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "2"})
        assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")
        assert str(holder) in refused.json["detail"]
    assert node.wait_for_state("gpu2", "ready")["pid"] == pid


def test_directory_is_gone(make_node: Start) -> None:
    """A daemon whose pipe directory was removed, by a cleaner of /tmp say, is left alone; the next one makes it again.

    Only mpsd may write to the directory that mpsd makes; one made by NVIDIA's control daemon is writable for all.
    """
    node = make_node(simulate=1, config=BRISK).start()
    pid, pipes = node.daemons()["gpu0"]["pid"], node.pipe_directory("gpu0")
    shutil.rmtree(pipes)
    daemon = node.wait_for_state("gpu0", "unresponsive")
    assert daemon["pid"] == pid
    assert str(pipes) in daemon["because"]
    assert is_running(pid)
    kill(pid)
    next_ready(node, "gpu0", pid)
    assert pipes.stat().st_mode & 0o777 == 0o700


def test_adopted_while_it_is_stopped(make_node: Start) -> None:
    """An mpsd that returns to a stopped daemon adopts it as it is, and waits for it."""
    node = make_node(simulate=1, config=BRISK).start()
    pid = node.daemons()["gpu0"]["pid"]
    node.end()
    with stopped(pid):
        node.start(ready=False)
        assert node.wait_for_state("gpu0", "unresponsive")["pid"] == pid
    assert node.wait_for_state("gpu0", "ready")["pid"] == pid
