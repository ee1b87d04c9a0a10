"""`mpsctl doctor` on the history and the metrics of real nodes."""

import os
import socket
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.disks import as_root, fill, mounted
from tests.doctor.test_node import doctor, one, only
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

CHECKS: Final = only("history-store", "history-samples", "history-size", "metrics-listener")


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def lease(node: Node) -> None:
    """Take out a lease, which changes the history."""
    request = {"threads": 10, "memory": "1GiB", "pid": os.getpid()}
    assert node.request("POST", "/v1/leases", request).status == 201


def found_by(node: Node, check: str) -> Callable[[], dict[str, Any] | None]:
    """Return a function that returns the finding of a check, or None while the check is ok."""

    def look() -> dict[str, Any] | None:
        _, found = doctor(node, *only(check))
        finding = one(found, check)
        return None if finding["verdict"] == "ok" else finding

    return look


def test_well(make_node: Start) -> None:
    """A node that stores its history and serves its metrics on TCP passes each check."""
    port = free_port()
    node = make_node(simulate=1, config=f'[metrics]\nlisten = "127.0.0.1:{port}"\n').start()
    wait_until(lambda: node.events("metrics_listening"), what="the metrics to be served")
    lease(node)
    status, found = doctor(node, *CHECKS)
    wrong = {name: each for name, each in found.items() if name != "fixed" and each[0]["verdict"] != "ok"}
    assert (status, wrong) == (0, {})


def test_wrong(make_node: Start) -> None:
    """A port of a silent program and a store that others may read are found while mpsd runs, and without it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        node = make_node(simulate=1, config=f'[metrics]\nlisten = "127.0.0.1:{port}"\n').start()
        store = node.root / "state" / "accounts.db"
        store.chmod(0o644)
        status, found = doctor(node, *CHECKS)
        assert status == 1
        assert one(found, "metrics-listener", "metrics.listen")["evidence"]["address"] == f"127.0.0.1:{port}"
        assert one(found, "history-store")["remedy"] == f"chmod 0600 {store}"
        node.end()
        _, found = doctor(node, *CHECKS)
        assert one(found, "history-store")["verdict"] == "warn"
        assert one(found, "history-samples")["verdict"] == "unknown"


@as_root
def test_full_disk(make_node: Start) -> None:
    """Samples that a full disk refuses are found, with the reason, until they can be stored again."""
    node = make_node(simulate=1)
    (node.root / "state").mkdir(mode=0o700)
    with mounted(node.root / "state", "3m"):
        node.start()
        lease(node)
        full = fill(node.root / "state")
        lease(node)
        finding = wait_until(found_by(node, "history-samples"), what="the refused samples to be found")
        assert finding["verdict"] == "fail"
        assert finding["evidence"]["because"] == node.get("/v1/history?by=gpu").json["because"]
        full.unlink()
        wait_until(lambda: node.events("history_stored"), what="samples to be stored again")
        assert found_by(node, "history-samples")() is None
        node.end()
