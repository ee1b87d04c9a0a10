"""Operations of an operator on a control daemon, for tests."""

from typing import Any

from tests.harness import wait_until
from tests.node import Node


def begin(node: Node, verb: str, name: str = "gpu0", **body: Any) -> Any:
    answer = node.request("POST", f"/v1/daemons/{name}/{verb}", body)
    assert answer.status == 202, answer.body
    return answer.json


def look(node: Node, operation: Any) -> Any:
    answer = node.get(f"/v1/operations/{operation['id']}")
    assert answer.status == 200, answer.body
    return answer.json


def ended(node: Node, operation: Any, state: str = "done") -> Any:
    def over() -> Any:
        found = look(node, operation)
        return found if found["state"] != "running" else None

    found = wait_until(over, what=f"the operation to be over; the log is {node.stderr}", deadline=30)
    assert found["state"] == state, found
    assert found["ended"] is not None
    assert found["waits_for"] == []
    return found


def waiting(node: Node, operation: Any) -> Any:
    """Wait until an operation waits for clients, and return them."""
    return wait_until(lambda: look(node, operation)["waits_for"], what="the operation to wait for somebody")
