"""The program that reads what belongs to others, each owner's in a process of its own that can be abandoned.

It gets requests as lines of JSON on its stdin, which is a socket, and answers there: see `foreign_reader.py`. For each
request it forks, and the child calls the function. The program itself reads nothing of anybody, so it never waits.

1. An owner has one child at a time; the other requests about what belongs to that owner wait for it.
2. A child that does not answer in time is killed, and the request is answered as late. If the child does not even die,
   because the kernel waits in its place, the owner's other requests are late a moment after.
3. The program ends with its parent, or when it was not used for a while; a child that does not die does not keep it.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from mpsd.system import clock

IDLE: Final = 10.0
"""Seconds without a request after which the program ends: it costs memory, and little time to start."""

MOST_CHILDREN: Final = 64
"""The maximum of owners that are read at one moment, those included whose child does not die."""

_DIES: Final = 0.1
"""Seconds within which a child that was killed dies, unless the kernel waits in its place."""

MOST_BYTES: Final = 1 << 24
"""The maximum of bytes of an answer."""


class Request(msgspec.Struct):
    """A function to call, and with what."""

    number: int
    owner: str
    seconds: float
    """The time that it may take, the wait for its turn included."""
    module: str
    function: str
    arguments: list[Any]


class Answer(msgspec.Struct, omit_defaults=True):
    """The result of a request: its value, or the error of the system, or why there is none."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: tuple[int, str | None] | None = None
    """The number of an OSError, and its file."""
    unknown: str = ""


@dataclass(slots=True)
class _Child:
    pid: int
    pipe: int
    request: Request
    deadline: float
    answered: bool = False
    output: bytearray = field(default_factory=bytearray)


class _Program:
    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._input = bytearray()
        self._children: dict[str, _Child] = {}
        """By owner."""
        self._waiting: deque[tuple[Request, float]] = deque()
        """The requests whose owner has a child, each with its deadline."""
        self._used = clock.monotonic()

    def run(self) -> None:
        while not self._is_over():
            poll = select.poll()
            poll.register(self._parent, select.POLLIN)
            for child in self._children.values():
                poll.register(child.pipe, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(self._patience() * 1000)}
            if self._parent.fileno() in ready and not self._receive():
                return
            for child in [each for each in self._children.values() if each.pipe in ready]:
                self._read(child)
            self._settle()

    def _is_over(self) -> bool:
        busy = self._waiting or any(not each.answered for each in self._children.values())
        return not busy and clock.monotonic() >= self._used + IDLE

    def _patience(self) -> float:
        due = [child.deadline for child in self._children.values() if not child.answered]
        due += [self._due(*each) for each in self._waiting]
        return max(min(due, default=self._used + IDLE) - clock.monotonic(), 0.0)

    def _receive(self) -> bool:
        """Take what the parent has sent; False when the parent is gone."""
        try:
            piece = self._parent.recv(1 << 16)
        except ConnectionResetError:  # it was killed with an answer unread
            return False
        self._input += piece
        *lines, rest = self._input.split(b"\n")
        self._input = bytearray(rest)
        self._used = clock.monotonic()
        for line in lines:
            request = msgspec.json.decode(line, type=Request)
            self._waiting.append((request, self._used + request.seconds))
        return bool(piece)

    def _settle(self) -> None:
        """Kill what is late, and start what has its turn."""
        now = clock.monotonic()
        for child in self._children.values():
            if not child.answered and now >= child.deadline:
                os.kill(child.pid, signal.SIGKILL)  # it was not waited for, so the pid is still its own
                child.answered = True
                self._answer(Answer(child.request.number, unknown=_late(child.request)))
        waiting, self._waiting = self._waiting, deque()
        for request, deadline in waiting:
            before = self._children.get(request.owner)
            if before is None and len(self._children) < MOST_CHILDREN:
                self._start(request, deadline)
            elif now >= self._due(request, deadline):
                self._answer(Answer(request.number, unknown=_late(request)))
            else:
                self._waiting.append((request, deadline))

    def _due(self, request: Request, deadline: float) -> float:
        """Return when a waiting request is late: at its deadline, or once the child before it should have died."""
        before = self._children.get(request.owner)
        return deadline if before is None else min(deadline, before.deadline + _DIES)

    def _start(self, request: Request, deadline: float) -> None:
        importlib.import_module(request.module)  # once, here, and not in each child
        pipe, theirs = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(pipe)
            os.close(theirs)
            self._answer(Answer(request.number, unknown=f"no process could be started for it: {error.strerror}"))
            return
        if pid == 0:
            _be_child(request, theirs)
        os.close(theirs)
        self._children[request.owner] = _Child(pid, pipe, request, deadline)

    def _read(self, child: _Child) -> None:
        piece = os.read(child.pipe, 1 << 16)
        child.output += piece
        if piece and len(child.output) <= MOST_BYTES:
            return
        # The pipe has ended with the child, or the child says too much. An answer of a child that was killed, as for
        # lack of memory, may be a part.
        if piece:
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pipe)
        del self._children[child.request.owner]
        if child.answered:
            return
        if status:
            self._answer(Answer(child.request.number, unknown="its reader failed"))
        else:
            self._send(child.output)

    def _answer(self, answer: Answer) -> None:
        self._send(_encoded(answer))

    def _send(self, answer: bytes | bytearray) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next look at the socket finds that, too
            self._parent.sendall(answer + b"\n")


def _late(request: Request) -> str:
    return f"the kernel did not answer within {request.seconds:g} s, as its owner can bring about"


def _encoded(answer: Answer) -> bytes:
    return msgspec.json.encode(answer)


def _be_child(request: Request, pipe: int) -> None:
    """Call the function of a request, write its answer, and end."""
    status = 1
    try:
        os.dup2(pipe, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # Without its program, as mpsd was killed, nobody asks any more.
        with contextlib.suppress(BrokenPipeError), open(0, "wb", closefd=False) as output:
            output.write(_encoded(_result(request)))
        status = 0
    finally:  # whatever it is, this process must not go on as its parent
        if status:
            traceback.print_exc()
        os._exit(status)


def _result(request: Request) -> Answer:
    function = getattr(importlib.import_module(request.module), request.function)
    hints = [hint for name, hint in get_type_hints(function).items() if name != "return"]
    arguments = [
        msgspec.convert(each, hint, dec_hook=of_json) for each, hint in zip(request.arguments, hints, strict=False)
    ]
    try:
        value = function(*arguments)
    except OSError as error:
        name = error.filename
        return Answer(request.number, error=(error.errno or 0, None if name is None else str(name)))
    return Answer(request.number, value=msgspec.Raw(msgspec.json.encode(value, enc_hook=str)))


def of_json(kind: type, value: object) -> object:
    """Return a value of a type that JSON does not have."""
    assert kind is Path  # noqa: S101 - no other such type is passed
    return Path(str(value))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the parent ends it
    sys.stdout = sys.stderr
    _Program(socket.socket(fileno=0)).run()
    os._exit(0)  # nothing is left to do, and its caller may wait
