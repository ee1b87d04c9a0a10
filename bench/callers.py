"""A caller at minimal cost: prepared requests, raw sockets, answers read no further than necessary."""

import json
import socket
import statistics
import time
from pathlib import Path
from typing import Final

_CHUNK: Final = 65536
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"Content-Length: "
_ID: Final = b'"id":"'


def request(**asked: object) -> bytes:
    """Return a request for a lease."""
    body = json.dumps(asked).encode()
    return b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def release(answer: bytes) -> bytes:
    """Return the request that releases the lease in an answer."""
    at = answer.index(_ID) + len(_ID)
    return b"DELETE /v1/leases/%b HTTP/1.1\r\nHost: mpsd\r\n\r\n" % answer[at : answer.index(b'"', at)]


def body(answer: bytes) -> bytes:
    """Return an answer without its head."""
    return answer.partition(_HEAD_END)[2]


def _is_whole(answer: bytes) -> bool:
    end = answer.find(_HEAD_END)
    if end < 0:
        return False
    assert answer.startswith(b"HTTP/1.1 20"), answer.decode()
    at = answer.find(_LENGTH, 0, end)
    length = int(answer[at + len(_LENGTH) : answer.index(b"\r\n", at)]) if at >= 0 else 0
    return len(answer) >= end + len(_HEAD_END) + length


class Caller:
    """One connection, on which each answer is awaited."""

    def __init__(self, path: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(path))

    def ask(self, request: bytes) -> bytes:
        """Send a request, and return its answer."""
        self._connection.sendall(request)
        answer = b""
        while not _is_whole(answer):
            received = self._connection.recv(_CHUNK)
            assert received, "the connection was closed"
            answer += received
        return answer

    def seconds(self, asked: bytes, pairs: int) -> float:
        """Return the seconds that a grant with its release takes, as the median of so many."""
        taken = []
        for _ in range(pairs):
            before = time.perf_counter()
            self.ask(release(self.ask(asked)))
            taken.append(time.perf_counter() - before)
        return statistics.median(taken)
