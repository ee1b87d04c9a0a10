"""Helpers that the tests of holders share: they request and read leases, and start processes that hold them."""

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.control_groups import joins
from tests.daemon.helpers import GIB
from tests.harness import wait_until
from tests.node import Node

ANN, BOB = 2711, 2712
MANY: Final = '[daemon]\nusers = "many"\n'
SMALL: Final[dict[str, Any]] = {"threads": 25, "memory": 2 * GIB, "gpu": "0"}
ROOT: Final = {"uid": 0, "gid": 0}


def asleep(group: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start a sleeping process in a control group."""
    return subprocess.Popen([*(joins(group) if group else ()), "sleep", "600"])


def admitted(node: Node, holder: object = None, **more: Any) -> dict[str, Any]:
    answer = node.request("POST", "/v1/leases", {**SMALL, "holder": holder, **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def refusal(node: Node, holder: object, **more: Any) -> tuple[int, str, str | None]:
    answer = node.request("POST", "/v1/leases", {**SMALL, "holder": holder, **more})
    assert node.get("/v1/leases").json["leases"] == []
    return answer.status, answer.json["code"], answer.json.get("limit")


def shown(node: Node, lease: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = node.get(f"/v1/leases/{lease['id']}").json
    return found


def ended(node: Node, lease: dict[str, Any]) -> str:
    wait_until(lambda: shown(node, lease)["state"] == "ended", what="the lease to end")
    assert len(node.events("lease_ended", lease=lease["id"])) == 1
    because: str = shown(node, lease)["because"]
    return because


def add(node: Node, lease: dict[str, Any], **asked: Any) -> Any:
    return node.request("POST", f"/v1/leases/{lease['id']}/holders", asked)


def path_in(group: Path) -> str:
    """Return the path that /proc/PID/cgroup has for a control group of a test."""
    return f"/{group.name}"


def stored(node: Node, lease: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the holders of a lease as the disk has them."""
    uri = f"file:{node.root / 'run' / 'leases.db'}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    try:
        rows = [json.loads(data) for (data,) in connection.execute("SELECT data FROM leases") if data]
    finally:
        connection.close()
    return [each for row in rows if row["id"] == lease["id"] for each in row["holders"]]
