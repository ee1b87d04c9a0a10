"""Places in the queue: a disconnected caller loses its place, unless it has a request_id, also across restarts."""

import signal
from contextlib import ExitStack
from typing import Any

import pytest

from tests.durability.conftest import Start
from tests.durability.streams import answer_of, connection, in_line, submit, wait_for_line
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough

BIG = {"threads": 60, "memory": "1GiB", "wait": None}


@pytest.fixture
def full(make_node: Start) -> tuple[Node, Any]:
    """Return a node with one GPU, and the lease that has most of it."""
    node = make_node(config="[admission]\nhang_up_grace = 0.5\n").start()
    return node, node.request("POST", "/v1/leases", {"threads": 60, "memory": "1GiB"}).json


def release(node: Node, lease: Any) -> None:
    assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204


def test_hanging_up(full: tuple[Node, Any]) -> None:
    """Without a request_id the place goes at once to the next one, however long the grace."""
    node, has = full
    node.reload("[admission]\nhang_up_grace = 3600\n")
    with connection(node) as first, connection(node) as second:
        submit(first, **BIG, name="first")
        wait_for_line(node, "first")
        submit(second, **BIG, name="second")
        wait_for_line(node, "first", "second")
        first.close()
        wait_for_line(node, "second")
        release(node, has)
        assert answer_of(second)[0] == 201


def test_coming_back(full: tuple[Node, Any]) -> None:
    """With a request_id the place is kept, and a caller that returns gets the same lease, granted meanwhile or not."""
    node, has = full
    node.reload("[admission]\nhang_up_grace = 3600\n")
    with ExitStack() as stack:
        first, second, again = (stack.enter_context(connection(node)) for _ in range(3))
        submit(first, **BIG, name="first", request_id="a")
        wait_for_line(node, "first")
        submit(second, **BIG, name="second", request_id="b")
        wait_for_line(node, "first", "second")
        place = waiting_id(node, "first")
        first.close()
        submit(again, **BIG, name="first", request_id="a")
        release(node, has)
        status, lease = answer_of(again)
        assert (status, lease["id"]) == (201, place)
        # The second caller disconnects too; it is granted the lease meanwhile, and gets and keeps the lease when it
        # returns.
        place = waiting_id(node, "second")
        second.close()
        release(node, lease)
        wait_until(lambda: node.get(f"/v1/leases/{place}").json["state"] == "granted", what="the absent one's grant")
        assert node.request("POST", "/v1/leases", {**BIG, "name": "second", "request_id": "b"}).json["id"] == place
        node.reload("[admission]\nhang_up_grace = 0.001\n")
        wait_until(lambda: len(node.events("settings_reloaded")) == 2, what="a grace that is over")
        with connection(node) as third:
            submit(third, **{**BIG, "wait": 1.2}, name="third")
            assert answer_of(third)[0] == 409  # mpsd has checked its clock twice without dropping a place
        assert node.get(f"/v1/leases/{place}").json["state"] == "granted"


def waiting_id(node: Node, name: str) -> Any:
    return next(lease["id"] for lease in node.leases() if lease["name"] == name)


def test_not_coming_back(full: tuple[Node, Any]) -> None:
    """After the grace the place is dropped; a grant that no caller has received is dropped too."""
    node, has = full
    with connection(node) as first:
        submit(first, **BIG, name="first", request_id="a")
        wait_for_line(node, "first")
    release(node, has)
    ended = wait_until(
        lambda: node.events("lease_ended", because="its caller disconnected and did not come back"), what="it"
    )
    assert len(ended) == 1
    assert node.leases() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restart(full: tuple[Node, Any], number: signal.Signals) -> None:
    """However mpsd ends, requests with a request_id keep their places in order, and the others lose theirs.

    SIGTERM answers them with 503 `stopping`.
    """
    node, has = full
    node.config = "[admission]\nhang_up_grace = 3600\n"
    with ExitStack() as stack:
        lines = {}
        for name, request_id in (("one", "1"), ("two", "2"), ("passer-by", None), ("three", "3")):
            lines[name] = stack.enter_context(connection(node))
            submit(lines[name], **BIG, name=name, request_id=request_id)
            wait_until(lambda name=name: name in in_line(node), what=f"{name} to wait")  # type: ignore[misc]
        places = {name: waiting_id(node, name) for name in lines}
        node.end(number)
        if number == signal.SIGTERM:
            for line in lines.values():
                status, problem = answer_of(line)
                assert (status, problem["code"]) == (503, "stopping")
    node.start()
    assert in_line(node) == ["one", "two", "three"]
    assert {name: waiting_id(node, name) for name in in_line(node)} == {
        name: place for name, place in places.items() if name != "passer-by"
    }
    with connection(node) as last, connection(node) as first:
        submit(last, **BIG, name="three", request_id="3")
        submit(first, **BIG, name="one", request_id="1")
        release(node, has)
        status, lease = answer_of(first)
        assert (status, lease["id"]) == (201, places["one"])
        assert in_line(node) == ["two", "three"]
