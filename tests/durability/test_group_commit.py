"""Decisions are stored before they are said, and published in their order, once."""

import json
import signal
import sqlite3
from contextlib import closing
from itertools import chain
from typing import Final

import pytest

from tests.daemon.leases.line import Talk
from tests.durability.conftest import Start
from tests.node import Node

pytestmark = pytest.mark.thorough

_MANY: Final = 40
"""Fewer than the clients that one GPU can have."""


def commits(node: Node) -> list[int]:
    """Return the number of leases in each commit, after mpsd was killed."""
    with closing(sqlite3.connect(node.root / "run" / "leases.db")) as database:
        said = chain.from_iterable(json.loads(row) for (row,) in database.execute("SELECT news FROM leases"))
        return [len(events) for _, events in said]


def test_stored_before_it_is_said(make_node: Start) -> None:
    """A grant is stored before its caller gets it."""
    node = make_node().start()
    with Talk(node.socket) as caller:
        for _ in range(_MANY):
            assert caller.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).status == 201
        node.end(signal.SIGKILL)
    assert commits(node) == [1] * _MANY


def decide(node: Node) -> list[str]:
    """Have one caller be granted, refused and released repeatedly, at once; return the ids of its leases."""
    with Talk(node.socket) as caller:
        leases = []
        for _ in range(_MANY):
            leases.append(caller.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).json["id"])
            assert caller.ask("POST", "/v1/leases", {"threads": 1, "memory": "200GiB"}).status == 422
            assert caller.ask("DELETE", f"/v1/leases/{leases[-1]}").status == 204
        return leases


def published(lines: list[str]) -> list[tuple[str, str | None]]:
    """Return the events about leases, each with its lease."""
    facts = [json.loads(line) for line in lines]
    return [(fact["event"], fact.get("lease")) for fact in facts if fact["event"].startswith("lease_")]


def decided(leases: list[str]) -> list[tuple[str, str | None]]:
    """Return the expected events after `decide`."""
    each = ([("lease_granted", lease), ("lease_refused", None), ("lease_ended", lease)] for lease in leases)
    return list(chain.from_iterable(each))


def test_nobody_overtakes(make_node: Start) -> None:
    """Pending events precede events that are published at once, in the log and in the stream, and are visible there."""
    node = make_node().start()
    leases = decide(node)
    assert published(node.get("/v1/events").body.decode().splitlines()) == decided(leases)
    assert published(node.stderr.read_text().splitlines()) == decided(leases)


def test_seen_and_told(make_node: Start) -> None:
    """A caller that sees a lease appear or disappear finds the reason in the log."""
    node = make_node().start()
    with Talk(node.socket) as caller:
        for _ in range(_MANY):
            lease = caller.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).json["id"]
            assert caller.ask("GET", f"/v1/leases/{lease}").json["state"] == "granted"
            assert published(node.stderr.read_text().splitlines())[-1] == ("lease_granted", lease)
            assert caller.ask("DELETE", f"/v1/leases/{lease}").status == 204
            assert caller.ask("GET", "/v1/leases").json["leases"] == []
            assert published(node.stderr.read_text().splitlines())[-1] == ("lease_ended", lease)


def test_killed_before_it_was_told(make_node: Start) -> None:
    """Events that were pending when mpsd was killed are published by the next mpsd, once."""
    node = make_node().start()
    leases = decide(node)
    with Talk(node.socket) as caller:
        leases.append(caller.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).json["id"])
        node.end(signal.SIGKILL)
    node.start()
    events = published(node.get("/v1/events").body.decode().splitlines())
    wanted = [each for each in decided(leases) if each[1]]  # a refusal is in no store yet
    assert [each for each in events if each[1]][: len(wanted) - 1] == wanted[:-1]
