"""Readers of events, and callers that wait or disconnect: raw connections, so that a test can drop them."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.harness import wait_until
from tests.node import Node


@contextmanager
def connection(node: Node, *, buffer: int | None = None) -> Iterator[socket.socket]:
    """Connect to mpsd; `buffer` is the number of unread bytes that the kernel keeps here."""
    with socket.socket(socket.AF_UNIX) as connected:
        if buffer is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connected.settimeout(30)
        connected.connect(str(node.socket))
        yield connected


class Follower:
    """A reader of the stream of events."""

    def __init__(self, connected: socket.socket, after: int | str) -> None:
        """Request the events after a number and all later ones, and wait for the answer's head."""
        head = f"GET /v1/events?follow=true&after={after} HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\n\r\n"
        connected.sendall(head.encode())
        self._file = connected.makefile("rb")
        assert b" 200 " in self._file.readline()
        while self._file.readline().strip():
            pass

    def __next__(self) -> dict[str, Any]:
        """Return the next event; raise StopIteration when mpsd has ended the stream."""
        line = b"\r\n"
        while line[:1] not in {b"{", b""}:  # the size of a chunk, or its end
            line = self._file.readline()
        if not line.endswith(b"\n"):
            raise StopIteration
        event: dict[str, Any] = json.loads(line)
        return event

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def until(self, **facts: object) -> list[dict[str, Any]]:
        """Read up to the first event with these facts, and return all events read."""
        read = []
        for event in self:
            read.append(event)
            if facts.items() <= event.items():
                return read
        raise AssertionError(f"the stream ended without {facts}: {read}")

    def close(self) -> None:
        self._file.close()


@contextmanager
def following(node: Node, after: int = 0) -> Iterator[Follower]:
    """Follow the events after a number."""
    with connection(node) as connected:
        follower = Follower(connected, after)
        try:
            yield follower
        finally:
            follower.close()


def events(node: Node, after: int = 0) -> list[dict[str, Any]]:
    """Return the stored events after a number."""
    answer = node.get(f"/v1/events?after={after}")
    assert answer.status == 200, answer.json
    return [json.loads(line) for line in answer.body.splitlines()]


def gapless(read: list[dict[str, Any]], after: int) -> bool:
    """Return whether these events are exactly those after a number, in order."""
    return [event["seq"] for event in read] == list(range(after + 1, after + 1 + len(read)))


def submit(connected: socket.socket, **asked: object) -> None:
    """Request a lease, without waiting for the answer."""
    body = json.dumps(asked).encode()
    head = f"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connected.sendall(head.encode() + body)


def answer_of(connected: socket.socket) -> tuple[int, Any]:
    """Return the status and the body of the next answer."""
    with connected.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def in_line(node: Node) -> list[str]:
    """Return the names of the waiting leases in order."""
    waiting = [lease for lease in node.leases() if lease["state"] == "waiting"]
    return [lease["name"] for lease in sorted(waiting, key=lambda lease: lease["wait"]["position"])]


def wait_for_line(node: Node, *names: str) -> None:
    """Wait until exactly these leases wait, in this order."""
    wait_until(lambda: in_line(node) == list(names), what=f"{names} to wait")
