"""Callers at minimal cost: prepared requests, raw sockets, answers read no further than necessary."""

import json
import select
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CHUNK: Final = 65536
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"Content-Length: "
_ID: Final = b'"id":"'


@dataclass(frozen=True, slots=True)
class Talk:
    """The requests that a caller repeats: an admission, and the release of its answer."""

    ask: bytes
    release: Callable[[bytes], bytes]
    """Makes the second request from the first answer."""
    is_whole: Callable[[bytes], bool]
    """Returns whether an answer is complete."""


def leasing(**asked: object) -> Talk:
    """Return the talk of a caller that requests a lease and releases it."""
    body = json.dumps(asked).encode()
    ask = b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    return Talk(ask, _release, _is_whole)


def echoing(size: int) -> Talk:
    """Return the talk of a caller that sends this many bytes and gets them back."""
    message = bytes(size)
    return Talk(message, lambda _: message, lambda answer: len(answer) >= size)


def lease_id(answer: bytes) -> bytes:
    """Return the id of the lease in an answer."""
    at = answer.index(_ID) + len(_ID)
    return answer[at : answer.index(b'"', at)]


def body(answer: bytes) -> bytes:
    """Return an answer without its head."""
    return answer.partition(_HEAD_END)[2]


def _release(answer: bytes) -> bytes:
    return b"DELETE /v1/leases/%b HTTP/1.1\r\nHost: mpsd\r\n\r\n" % lease_id(answer)


def _is_whole(answer: bytes) -> bool:
    end = answer.find(_HEAD_END)
    if end < 0:
        return False
    assert answer.startswith(b"HTTP/1.1 20"), answer.decode()
    at = answer.find(_LENGTH, 0, end)
    length = int(answer[at + len(_LENGTH) : answer.index(b"\r\n", at)]) if at >= 0 else 0
    return len(answer) >= end + len(_HEAD_END) + length


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def _receive(connection: socket.socket) -> bytes:
    received = connection.recv(_CHUNK)
    assert received, "the connection was closed"
    return received


class One:
    """One caller, which waits for each answer."""

    def __init__(self, path: Path, talk: Talk) -> None:
        self._connection, self._talk = _connect(path), talk

    def say(self, request: bytes) -> bytes:
        """Send a request, and return its answer."""
        self._connection.sendall(request)
        answer = _receive(self._connection)
        while not self._talk.is_whole(answer):
            answer += _receive(self._connection)
        return answer

    def ask(self) -> bytes:
        """Send the first request, and return the answer."""
        return self.say(self._talk.ask)

    def seconds(self, pairs: int) -> float:
        """Return the seconds that a request with its release takes, as the median of so many."""
        taken = []
        for _ in range(pairs):
            before = time.perf_counter()
            self.say(self._talk.release(self.ask()))
            taken.append(time.perf_counter() - before)
        return statistics.median(taken)


class Many:
    """Many concurrent callers, each with its own connection, and always with a pending request."""

    def __init__(self, path: Path, talk: Talk, callers: int) -> None:
        self._talk = talk
        self._left = 0
        self._connections = [_connect(path) for _ in range(callers)]
        self._poll = select.epoll()
        for connection in self._connections:
            self._poll.register(connection, select.EPOLLIN)

    def seconds(self, pairs: int) -> float:
        """Return the seconds from one request with its release to the next, over so many."""
        self._left = pairs
        before = time.perf_counter()
        callers = {connection.fileno(): self._life(connection) for connection in self._connections}
        for caller in callers.values():
            next(caller)
        while callers:
            for number, _ in self._poll.poll():
                if not next(callers[number], False):
                    del callers[number]
        return (time.perf_counter() - before) / pairs

    def _life(self, connection: socket.socket) -> Iterator[bool]:
        """Request and release as long as any work is left; it yields while an answer is pending."""
        while self._left > 0:
            self._left -= 1
            granted = yield from self._say(connection, self._talk.ask)
            yield from self._say(connection, self._talk.release(granted))

    def _say(self, connection: socket.socket, request: bytes) -> Generator[bool, None, bytes]:
        connection.sendall(request)
        answer = b""
        while not self._talk.is_whole(answer):
            yield True
            answer += _receive(connection)
        return answer
