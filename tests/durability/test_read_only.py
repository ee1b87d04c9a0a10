"""A file system that the kernel has made read-only after an error, under each of mpsd's directories."""

import os
import signal

import pytest

from tests.disks import as_root, failing
from tests.durability.conftest import Start
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.real import real_daemons

pytestmark = [as_root, pytest.mark.thorough]


def admit(node: Node) -> Answer:
    """Request a lease as the process of the tests."""
    return node.request("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"})


def kill_daemon(node: Node) -> None:
    """Kill the control daemon, and wait until mpsd has noticed."""
    os.kill(node.daemons()["gpu0"]["pid"], signal.SIGKILL)
    wait_until(lambda: node.events("daemon_death"), what="mpsd to know of the death")


def cannot_start(node: Node, file: str) -> None:
    """Check that the control daemon cannot start because of a named file, and that this counts as no death."""
    wait_until(
        lambda: node.daemons()["gpu0"]["because"].startswith("it cannot be started now"),
        what="mpsd to say that it cannot be started",
    )
    daemon = node.daemons()["gpu0"]
    assert daemon["state"] == "down"
    assert file in daemon["because"]
    assert "Read-only file system" in daemon["because"]
    assert admit(node).json["code"] == "daemon_not_ready"
    assert len(node.events("daemon_death")) == 1


def test_runtime_directory(make_node: Start) -> None:
    """Nothing is granted, a release holds while mpsd lives, and a dead control daemon is not given up."""
    node = make_node(simulate=1)
    path = node.root / "run"
    path.mkdir(mode=0o755)
    with failing(path) as fail:
        node.start()
        lease = admit(node).json["id"]
        fail()
        refused = admit(node)
        assert (refused.status, refused.json["code"]) == (507, "storage")
        assert "make it writable again" in refused.json["hint"]
        assert node.get("/v1/status").json["reasons"][0]["kind"] == "store"
        assert node.request("DELETE", f"/v1/leases/{lease}").json["code"] == "storage"
        kill_daemon(node)
        cannot_start(node, "run/mps/gpu0/")
        node.end(signal.SIGKILL)


def test_state_directory(make_node: Start) -> None:
    """Leases are granted and end, control daemons restart; events wait in memory, and the log says so."""
    node = make_node(simulate=1)
    path = node.root / "state"
    path.mkdir(mode=0o755)
    with failing(path) as fail:
        node.start()
        fail()
        lease = admit(node)
        assert lease.status == 201
        assert node.request("DELETE", f"/v1/leases/{lease.json['id']}").status == 204
        wait_until(lambda: node.events("store_full"), what="the log to say that events wait")
        before = node.daemons()["gpu0"]["pid"]
        kill_daemon(node)
        wait_until(
            lambda: node.daemons()["gpu0"]["state"] == "ready" and node.daemons()["gpu0"]["pid"] != before,
            what="the next control daemon",
        )
        assert admit(node).status == 201
        node.end(signal.SIGTERM)


@pytest.mark.real_daemon
@pytest.mark.parametrize("branch", [470, 535, 550, 555])
def test_log_directory(make_node: Start, branch: int) -> None:
    """The log of a control daemon stops, which is detected, and the next daemon waits for the disk."""
    node = make_node(simulate=1, control=real_daemons()[branch])
    path = node.root / "log"
    path.mkdir(mode=0o755)
    with failing(path) as fail:
        node.start()
        fail()
        assert admit(node).status == 201
        wait_until(lambda: node.events("log_silent"), what="mpsd to notice that the log shows nothing")
        assert admit(node).status == 201
        kill_daemon(node)
        cannot_start(node, "log/gpu0/")
        node.end(signal.SIGTERM)
