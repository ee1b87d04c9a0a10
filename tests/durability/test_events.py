"""Events: numbered without a gap, kept by count and age, published when they are stored. Slow readers delay nothing."""

import json
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.durability.conftest import Start
from tests.durability.streams import Follower, connection, events, following, gapless
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.thorough


def refuse(node: Node, times: int) -> None:
    """Have mpsd make so many decisions that leave nothing behind but an event."""
    for _ in range(times):
        assert node.request("POST", "/v1/leases", {"threads": 1, "memory": "81GiB"}).status == 422


def test_kept_then_live(make_node: Start) -> None:
    """A stream begins with the stored events and continues with new ones, without a gap.

    It equals the log, line by line.
    """
    node = make_node().start()
    refuse(node, 5)
    with following(node) as follower:
        read = follower.until(event="lease_refused")
        refuse(node, 20)
        while sum(event["event"] == "lease_refused" for event in read) < 25:
            read.append(next(follower))
    assert gapless(read, 0)
    assert [{k: v for k, v in event.items() if k != "seq"} for event in read] == node.log()[: len(read)]


def test_reconnect_across_a_restart(make_node: Start) -> None:
    """A follower that returns with its last number misses nothing, whatever happened to mpsd meanwhile."""
    node = make_node().start()
    with following(node) as follower:
        refuse(node, 3)
        read = follower.until(event="lease_refused")
        node.end(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGKILL):
        node.start()
        with following(node, read[-1]["seq"]) as follower:
            read += follower.until(event="daemon_state", state="ready")
            node.end(number)
            read += list(follower)
    assert gapless(read, 0)
    # At SIGTERM followers get all events, and their streams end.
    assert "node_stopping" in [event["event"] for event in read]


def test_count(make_node: Start) -> None:
    """The configured number of events is kept; a request for older ones is refused, and does not get a gap."""
    node = make_node(config="[api]\nevents = 20\n").start()
    refuse(node, 40)
    kept = events(node)
    assert len(kept) == 20
    last = kept[-1]["seq"]
    assert gapless(kept, last - 20)
    assert gapless(events(node, last - 20), last - 20)
    answer = node.get(f"/v1/events?after={last - 21}")
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (422, "invalid_request", "api.events")
    assert f"the oldest is {last - 19}" in answer.json["detail"]
    for _ in range(10):
        oldest = events(node)[0]["seq"]
        refuse(node, 3)  # which mostly have no number yet
        assert node.get(f"/v1/events?after={oldest - 1}").status == 422
    last = events(node)[-1]["seq"]
    node.end(signal.SIGKILL)
    node.start()
    assert gapless(events(node, last), last)


def test_age(make_node: Start) -> None:
    """Events older than configured are dropped, with or without new ones; numbers continue all the same."""
    node = make_node(config="[api]\nevents_age = 0.2\n").start()
    refuse(node, 3)
    wait_until(lambda: events(node) == [], what="all events to be too old", deadline=20)
    last = latest(node)
    node.end(signal.SIGKILL)
    node.start()
    with following(node) as follower:
        refuse(node, 1)
        assert follower.until(event="lease_refused")[0]["seq"] > last


def latest(node: Node) -> int:
    """Return the number of the latest event, even if no event is kept."""
    detail = node.get("/v1/events?after=999999999").json["detail"]
    return int(detail.rpartition(" ")[2])


def test_number_that_was_not_given(make_node: Start) -> None:
    """A request for events after a future number is refused, and does not wait."""
    node = make_node().start()
    answer = node.get("/v1/events?after=999999999&follow=true")
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")
    for wrong in ("-1", "x", "1e3", ""):
        assert node.get(f"/v1/events?after={wrong}").status == 422, wrong


def test_slow_reader(make_node: Start) -> None:
    """A follower that does not read is dropped; others get their events meanwhile, and mpsd's memory does not grow."""
    node = make_node(config="[api]\nevents = 3000\nlines_per_uid = 1000\n").start()
    with connection(node, buffer=4096) as slow, following(node) as follower:
        silent = Follower(slow, 0)
        read: list[dict[str, Any]] = []
        before = 0
        for _ in range(27):
            refuse(node, 100)
            read += [next(follower) for _ in range(100)]
            before = before or memory(node)
        assert gapless(read, 0)
        assert memory(node) - before < 8 * 1024
        wait_until(lambda: hung_up(slow), what="the slow reader to be dropped", deadline=20)
        seen = list(silent)
        assert gapless(seen, 0)
        assert len(seen) < 2700
        silent.close()
    with following(node, seen[-1]["seq"]) as again:
        assert next(again)["seq"] == seen[-1]["seq"] + 1


def memory(node: Node) -> int:
    """Return mpsd's memory in KiB."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def hung_up(connected: socket.socket) -> bool:
    """Return whether mpsd has closed a connection, whatever is left to read from it."""
    poll = select.poll()
    poll.register(connected, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_history_that_was_damaged(make_node: Start) -> None:
    """When the history is lost, numbers continue: none is used twice, and followers with old ones are refused."""
    node = make_node().start()
    refuse(node, 5)
    last = events(node)[-1]["seq"]
    node.end(signal.SIGKILL)
    history = node.root / "state" / "history.db"
    for file in (history, Path(f"{history}-wal")):
        file.write_bytes(b"\xa5" * file.stat().st_size)
    node.start()
    aside = node.events("store_set_aside")
    assert [Path(line["file"]).parent for line in aside] == [node.root / "state"]
    kept = events(node)
    assert gapless(kept, last)
    assert node.get("/v1/events?after=3").status == 422


def test_log_of_changes_that_was_cut(make_node: Start) -> None:
    """A write-ahead log that lost its end reads as if the end had never been; its numbers are not used again."""
    node = make_node().start()
    refuse(node, 5)
    before = {event["seq"]: event for event in events(node)}
    node.end(signal.SIGKILL)
    wal = node.root / "state" / "history.db-wal"
    with wal.open("r+b") as file:
        file.truncate(wal.stat().st_size * 2 // 3)
    node.start()
    after = events(node)
    assert after[0]["seq"] == max(before) + 1
    assert gapless(after, max(before))
    assert json.dumps(after)
