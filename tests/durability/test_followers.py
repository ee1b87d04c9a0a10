"""Followers of events: where they begin, what they get in quiet times, and how the stream ends."""

import itertools
import json
import signal
from typing import Any

import pytest

from tests.durability.conftest import Start
from tests.durability.streams import Follower, connection, events, gapless
from tests.durability.test_events import refuse
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough


def followed(node: Node, query: str, number: int) -> list[dict[str, Any]]:
    """Return the first lines that a follower gets."""
    with connection(node) as connected:
        connected.sendall(f"GET /v1/events?follow=true&{query} HTTP/1.1\r\nHost: mpsd\r\n\r\n".encode())
        file = connected.makefile("rb")
        while file.readline().strip():
            pass
        lines = list(itertools.islice((line for line in file if line.startswith(b"{")), number))
        file.close()
    return [json.loads(line) for line in lines]


def test_latest(make_node: Start) -> None:
    """A follower of the events after the latest one gets no stored event, and every new one."""
    node = make_node().start()
    refuse(node, 2)
    last = events(node)[-1]["seq"]
    assert node.get("/v1/events?after=latest").body == b""
    with connection(node) as connected:
        follower = Follower(connected, "latest")
        refuse(node, 3)
        read = [next(follower) for _ in range(3)]
        follower.close()
    assert gapless(read, last)
    assert {each["event"] for each in read} == {"lease_refused"}


def test_heartbeats(make_node: Start) -> None:
    """A follower that requests heartbeats gets lines in quiet times, with the last number and without using one."""
    node = make_node().start()
    wait_until(lambda: all(each["verified"] for each in node.daemons().values()), what="mpsd to have nothing to log")
    last = events(node)[-1]["seq"]
    beats = followed(node, "after=latest&heartbeat=1", 2)
    assert [(each["seq"], each["event"], each["level"]) for each in beats] == [(last, "heartbeat", "info")] * 2
    assert beats[0].keys() == {"seq", "at", "level", "event"}
    assert events(node, last) == []
    refuse(node, 1)
    assert [each["event"] for each in followed(node, f"after={last}&heartbeat=1", 2)] == ["lease_refused", "heartbeat"]


def test_last_line(make_node: Start) -> None:
    """The last line of a stopping mpsd says that it is the last, and its successor continues after it."""
    node = make_node().start()
    with connection(node) as connected:
        follower = Follower(connected, 0)
        first = next(follower)
        assert node.end(signal.SIGTERM) == 0
        read = [first, *follower]
        follower.close()
    assert read[-1]["event"] == "node_stopped"
    assert gapless(read, 0)
    node.start()
    assert events(node)[len(read) - 1]["event"] == "node_stopped"
    assert events(node, read[-1]["seq"])[0]["event"] != "node_stopped"
