"""A connection's handling of incoming bytes, over a real socket, with a handler that echoes its requests."""

import asyncio
import json
import re
import socket
from collections.abc import Iterable
from typing import Any, Final

from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Answer, Message
from mpsd.daemon.http.peer import Peer

_ANSWER: Final = re.compile(
    rb"HTTP/1\.1 200 OK\r\nDate: [^\r]+\r\nContent-Type: application/json\r\n"
    rb"(Connection: close\r\n)?Content-Length: (\d+)\r\n\r\n"
)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


async def _repeat(message: Message) -> None:
    await message.arrival()
    facts = [message.method, message.path, message.query, len(message.body), str(message.trouble or "")]
    message.method = "GET"  # otherwise HEAD would be answered without the echo
    await message.connection.send(message, Answer(200, json.dumps(facts).encode()))


async def _said(pieces: Iterable[bytes]) -> bytes:
    """Return the bytes that come back over a connection on which these pieces are sent, one after the other."""
    inside: set[Connection] = set()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        visitor = Peer(theirs)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(visitor, _repeat, inside, 60), theirs
        )
        assert len(inside) == 1
        said = b""
        for piece in pieces:
            try:
                ours.send(piece)
            except BrokenPipeError:
                break
            await _turns(4 + 3 * piece.count(b"\n"))
            said += _received(ours)
    await _turns(4)
    assert not inside
    return said


async def _turns(number: int) -> None:
    """Run the loop for so many iterations: a few suffice for the input, and three for each request in it."""
    for _ in range(number):
        await asyncio.sleep(0)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except (BlockingIOError, ConnectionResetError):
        return b""


def _answers(said: bytes) -> list[Any]:
    """Return the echoed requests, each with whether it was declared the last, which is checked."""
    found: list[Any] = []
    said = said.replace(_CONTINUE, b"")
    while said:
        head = _ANSWER.match(said)
        assert head is not None, said
        assert not (found and found[-1][0]), "there is an answer behind the last one"
        end = head.end() + int(head[2])
        facts = json.loads(said[head.end() : end])
        # An unreadable request has no head, and so no method; nothing is read after it.
        assert facts[0] or facts[4]
        assert not facts[4] or head[1]
        found.append((bool(head[1]), *facts))
        said = said[end:]
    return found


def conversation(pieces: list[bytes]) -> tuple[list[Any], list[Any]]:
    """Return the answers to bytes in one piece, and to the same bytes in several pieces."""
    with asyncio.Runner() as runner:
        whole, cut = (runner.run(_said(each)) for each in ([b"".join(pieces)], pieces))
    return _answers(whole), _answers(cut)
