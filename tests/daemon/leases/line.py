"""Callers that send requests without waiting for the answers: each request on its own connection, as any user.

The kernel records the credentials of a peer at `connect`, so one process can call as many users. Nothing about that is
simulated: mpsd gets exactly these credentials. The process behind all calls is that of the tests.
"""

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

from tests.harness import wait_until
from tests.node import Answer, Node

_numbers: Final = count(1)

OWN_UID: Final = os.geteuid()
"""The uid of a caller without root; it can call as this user only."""


@contextlib.contextmanager
def as_user(uid: int | None) -> Iterator[None]:
    """Become this user, and the group of the same number, for all connections made meanwhile; None changes nothing.

    The change affects every thread of the process, so tests that call from several threads cannot use it.
    """
    if uid in {None, OWN_UID}:
        yield
        return
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def connect(path: Path, *, uid: int | None = None) -> socket.socket:
    """Return a connection to a unix socket, made as this user. Raises OSError when no process accepts it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(30)
        with as_user(uid):
            connection.connect(os.fspath(path))
    except BaseException:
        connection.close()
        raise
    return connection


def message(method: str, target: str, body: object = None, *headers: str) -> bytes:
    """Return a request as bytes for the wire; a body that is not bytes becomes JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/1.1", "Host: mpsd", f"Content-Length: {len(raw)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


class Talk:
    """A connection that stays open, with the bytes that were received and not read yet: answers follow each other."""

    def __init__(self, path: Path, *, uid: int | None = None) -> None:
        self.connection = connect(path, uid=uid)
        self._stream = self.connection.makefile("rb")

    def __enter__(self) -> Self:
        """Return the connection, which closes at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return its descriptor, for select and poll."""
        return self.connection.fileno()

    def send(self, raw: bytes) -> None:
        """Send all of this. Raises OSError."""
        self.connection.sendall(raw)

    def ask(self, method: str, target: str, body: object = None, *headers: str) -> Answer:
        self.send(message(method, target, body, *headers))
        return self.answer(method)

    def answer(self, method: str = "GET") -> Answer:
        """Return the next answer, which is one to this method. Raises EOFError when there is none."""
        status = self._stream.readline().split()
        if not status:
            raise EOFError("the connection was closed")
        lines = iter(self._stream.readline, b"\r\n")
        headers = dict(line.decode().rstrip("\r\n").split(": ", 1) for line in lines)
        size = 0 if method == "HEAD" else int(headers.get("Content-Length", "0"))
        return Answer(int(status[1]), headers, self._stream.read(size))

    def chunk(self) -> bytes:
        """Return the next piece of an answer in chunks, empty at its end."""
        size = int(self._stream.readline(), 16)
        return self._stream.read(size + 2)[:size]

    def rest(self) -> bytes:
        """Return all bytes that arrive until the other side closes the connection."""
        return self._stream.read()

    def close(self) -> None:
        self._stream.close()
        self.connection.close()


class Call:
    """A request that was sent; its answer is read on demand."""

    def __init__(self, path: Path, method: str, target: str, body: object = None, *, uid: int | None = None) -> None:
        self._method = method
        self._talk = Talk(path, uid=uid)
        try:
            self._talk.send(message(method, target, body))
        except OSError:  # mpsd closed the connection before the request was sent
            self._talk.close()
            raise

    @property
    def answered(self) -> bool:
        """Whether there are bytes to read."""
        return bool(select.select([self._talk], [], [], 0)[0])

    def answer(self) -> Answer:
        """Wait for the answer and return it, once. Raises EOFError when the connection is closed instead."""
        try:
            return self._talk.answer(self._method)
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, answered or not."""
        self._talk.close()


class Line:
    """The callers that request leases from a node and wait in its queue."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._calls: list[Call] = []

    def call(self, method: str, target: str, body: object = None, *, uid: int | None = None) -> Call:
        """Send a request without waiting for its answer."""
        self._calls.append(Call(self.node.socket, method, target, body, uid=uid))
        return self._calls[-1]

    def ask(self, *, uid: int | None = None, **asked: Any) -> Answer:
        """Request a lease, and wait for the answer."""
        return self.call("POST", "/v1/leases", asked, uid=uid).answer()

    def granted(self, *, uid: int | None = None, **asked: Any) -> Any:
        """Request a lease that mpsd must grant, and return it."""
        answer = self.ask(uid=uid, **asked)
        assert answer.status == 201, answer.json
        return answer.json

    def waits(self, *, uid: int | None = None, **asked: Any) -> tuple[Call, Any]:
        """Request a lease, with an unlimited wait by default; return the call and the lease once it is in the queue."""
        name = f"waiter-{next(_numbers)}"
        call = self.call("POST", "/v1/leases", {"wait": None, "name": name, **asked}, uid=uid)
        lease = wait_until(
            lambda: next((each for each in self.leases() if each["name"] == name), None),
            what=f"{name} to stand in the queue; the log is {self.node.stderr}",
        )
        assert lease["state"] == "waiting", lease
        return call, lease

    def leases(self) -> list[Any]:
        """Return the leases that have not ended, as root sees them."""
        found: list[Any] = self.node.get("/v1/leases").json["leases"]
        return found

    def queue(self) -> list[Any]:
        """Return the leases that wait, in the order of their positions."""
        waiting = [each for each in self.leases() if each["state"] == "waiting"]
        return sorted(waiting, key=lambda each: int(each["wait"]["position"]))

    def lease(self, lease: Any) -> Any:
        return self.node.get(f"/v1/leases/{lease['id']}").json

    def release(self, lease: Any) -> None:
        """Release a lease, as root."""
        assert self.node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204

    def gone(self, lease: Any) -> Any:
        return wait_until(
            lambda: (found := self.lease(lease))["state"] == "ended" and found,
            what=f"{lease['id']} to end; the log is {self.node.stderr}",
        )

    def gpu(self, index: int) -> Any:
        """Return a GPU as the API has it."""
        return self.node.get("/v1/gpus").json["gpus"][index]

    def leave(self) -> None:
        """Disconnect and release everything, so that the node is as it was before."""
        for call in self._calls:
            call.hang_up()
        if self.node.process is None:
            return
        for lease in self.leases():
            self.release(lease)
        gpus = self.node.get("/v1/gpus").json["gpus"]
        assert all((gpu["threads_granted"], gpu["memory_granted"], gpu["clients"]) == (0, 0, 0) for gpu in gpus), gpus
