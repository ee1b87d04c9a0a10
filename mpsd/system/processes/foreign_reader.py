"""What belongs to others is read by a process that can be abandoned, and this is how mpsd asks it.

The environment, the arguments, the mapped files, the mounts and the root of a process, and the user database, may be
on a file system that answers late or never: that of a user's own (FUSE), or one of the network. The kernel then waits
in the place of the reader, where not even SIGKILL may reach it. So no such read happens in mpsd itself, nor in a thread
of it: `reader_program.py` forks for each, one process for each *owner* at a time, and kills what is late.

A function that reads so is called with `ForeignReader.ask`. Its arguments and its result have to be JSON.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Concatenate, Final, ParamSpec, Self, TypeVar, get_type_hints

import msgspec

from mpsd.core.model import Known, Reading, Unknown
from mpsd.system.processes import proc, process
from mpsd.system.processes.reader_program import MOST_BYTES, Answer, Request, of_json

P = ParamSpec("P")
T = TypeVar("T")

SECONDS: Final = 3.0
"""Seconds for a read. It takes milliseconds, but a busy machine may let the reader wait."""

_MORE: Final = 1.0
"""Seconds by which the program may be later than it should; then it is replaced, since it is stopped, for example."""

_START: Final = 7.0
"""The same until its first answer."""

USER_DATABASE: Final = "the user database"
"""The owner of the user database, which may be a directory on the network."""

_NS_GET_PARENT: Final = 0xB702
_NS_GET_OWNER_UID: Final = 0xB704
"""Source: ioctl_ns(2)."""

_MOST_NESTED: Final = 33
"""The kernel's maximum of nested user or pid namespaces, and one. Source: user_namespaces(7), pid_namespaces(7)."""


def owner_of(pid: int) -> str:
    """Return whose a process is, for a `ForeignReader`. No file of that user's is read.

    It is the real uid, or for a process in a user namespace below mpsd's the user who made that namespace, since one
    user may have thousands of uids there. Containers of root are owners of their own, by their pid namespaces.
    Raises OSError when no descriptor is free.
    """
    uid = _maker(pid)
    if uid is None:
        uid = proc.real_uid(pid)
    if uid != 0:
        return f"uid {uid}"
    space = _outermost(pid, "pid")
    return "uid 0" if space is None else f"uid 0 in pid namespace {space[1]}"


def _maker(pid: int) -> int | None:
    """Return the user who made the user namespace of a process; None if that is mpsd's own, or cannot be seen."""
    space = _outermost(pid, "user")
    return None if space is None else space[0]


def _outermost(pid: int, kind: str) -> tuple[int, int] | None:
    """Return the outermost namespace of a process below mpsd's: for a user namespace its maker, and its inode.

    None if it is in mpsd's own, or if that cannot be seen.
    """
    with contextlib.ExitStack() as opened:
        try:
            own = os.stat(f"/proc/self/ns/{kind}").st_ino  # noqa: PTH116 - the kernel's own link
            at = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        except proc.UNSEEN:
            return None
        opened.callback(os.close, at)
        found = None
        for _ in range(_MOST_NESTED):
            inode = os.fstat(at).st_ino
            if inode == own:
                return found
            found = _maker_of(at) if kind == "user" else 0, inode
            try:
                at = fcntl.ioctl(at, _NS_GET_PARENT)
            except PermissionError:  # the parent is outside of mpsd's own
                return found
            opened.callback(os.close, at)
    return None


def _maker_of(space: int) -> int:
    uid = bytearray(4)
    fcntl.ioctl(space, _NS_GET_OWNER_UID, uid)
    return int.from_bytes(uid, sys.byteorder)


class ForeignReader:
    """Asks the program, which it starts when it is needed. It belongs to one event loop."""

    def __init__(self) -> None:
        self._numbers = count()
        self._link: _Link | None = None
        self._opening = asyncio.Lock()

    async def ask(self, owner: str, question: Callable[P, T], *arguments: P.args, **none: P.kwargs) -> Reading[T]:
        """Call a function beside mpsd, and return its result; unknown, with the reason, where none came in time.

        Raises the OSError that the function raised.
        """
        assert not none  # noqa: S101 - they have no place in a request
        kind = get_type_hints(question)["return"]
        request = Request(next(self._numbers), owner, SECONDS, question.__module__, question.__qualname__, [*arguments])
        answer = None
        for _ in range(2):  # a program that was not used for a while may end as it is asked
            try:
                async with self._opening:
                    if self._link is None or self._link.is_over:
                        self._link = await _Link.open()
                answer = await self._link.ask(request)
            except OSError as error:
                return Unknown(f"its reader could not be asked: {error.strerror or error}")
            if answer is not None:
                break
        if answer is None:
            return Unknown("its reader ended")
        if answer.unknown:
            return Unknown(answer.unknown)
        if answer.error is not None:
            number, file = answer.error
            raise OSError(number, os.strerror(number), file)
        return Known(msgspec.json.decode(answer.value, type=kind, dec_hook=of_json))

    async def ask_each(
        self,
        pids: Iterable[int],
        question: Callable[Concatenate[list[int], P], T],
        *arguments: P.args,
        **none: P.kwargs,
    ) -> list[tuple[list[int], Reading[T]]]:
        """Call a function for the processes of each owner, and return its results with their pids.

        Raises the first OSError that the function raised.
        """
        by_owner = dict[str, list[int]]()
        for pid in pids:
            by_owner.setdefault(owner_of(pid), []).append(pid)
        async with asyncio.TaskGroup() as group:
            asked = [
                (theirs, group.create_task(self._outcome(owner, question, theirs, *arguments, **none)))
                for owner, theirs in by_owner.items()
            ]
        found = [(theirs, each.result()) for theirs, each in asked]
        for _, outcome in found:
            if isinstance(outcome, OSError):
                raise outcome
        return [(theirs, each) for theirs, each in found if not isinstance(each, OSError)]

    async def _outcome(
        self, owner: str, question: Callable[P, T], *arguments: P.args, **none: P.kwargs
    ) -> Reading[T] | OSError:
        try:
            return await self.ask(owner, question, *arguments, **none)
        except OSError as error:
            return error

    async def close(self) -> None:
        """End the program. A child of it that does not die is not waited for."""
        if self._link is not None:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Link:
    """A running program, and the answers that are expected of it."""

    def __init__(self, started: process.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = started, reader, writer
        self._asked: dict[int, asyncio.Future[Answer | None]] = {}
        self.is_over = False
        self._has_answered = False
        self._receiving = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    async def open(cls) -> "_Link":
        """Start the program. Raises OSError."""
        own, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(own.close)
            argv = (sys.executable, "-I", "-m", "mpsd.system.processes.reader_program")
            started = process.spawn(argv, env=process.environment({}), stdin=theirs.fileno(), stderr=None)
            reader, writer = await asyncio.open_connection(sock=own, limit=2 * MOST_BYTES)
            on_failure.pop_all()
        return cls(started, reader, writer)

    async def ask(self, request: Request) -> Answer | None:
        """Return the answer; None if the program has ended instead."""
        asked: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._asked[request.number] = asked
        self._writer.write(msgspec.json.encode(request, enc_hook=str) + b"\n")
        try:
            async with asyncio.timeout(request.seconds + (_MORE if self._has_answered else _START)):
                return await asked
        except TimeoutError:  # the program itself is stopped, or gets no processor
            self._process.signal(signal.SIGKILL)
            return Answer(request.number, unknown="its reader did not answer in time")
        finally:
            self._asked.pop(request.number, None)

    async def _receive(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while line := await self._reader.readline():
                    answer, self._has_answered = msgspec.json.decode(line, type=Answer), True
                    if (asked := self._asked.get(answer.number)) is not None and not asked.done():
                        asked.set_result(answer)
            self.is_over = True
            for each in self._asked.values():
                if not each.done():
                    each.set_result(None)
            self._writer.close()
            await self._process.wait()
        finally:
            self._process.close()

    async def close(self) -> None:
        self._writer.close()
        await asyncio.wait([self._receiving], timeout=_START)
        if not self.is_over or not self._receiving.done():
            self._process.signal(signal.SIGKILL)
            await self._receiving
