"""The connection to mpsd of programs that block: a small HTTP/1.1 client over a unix socket."""

import contextlib
import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Final, Self, TypeAlias

from mpsd.client import exchange
from mpsd.core.errors import UntrustedSocketError

SOCKET: Final = "/run/mpsd/mpsd.sock"
"""The default socket of mpsd."""

DEADLINE: Final = 10.0
"""Seconds for one request, from connecting to the last byte of its answer, unless the request names another
deadline."""

MOST_IDLE: Final = 8
"""Maximum number of sockets that a connection keeps open between its requests. mpsd allows a uid 256 at a time."""

Meanwhile: TypeAlias = Callable[[], float]
"""A callback that runs while an answer is awaited; it returns the seconds until its next run."""

FIRST_LOOK: Final = 0.5
"""Seconds until its first run."""

MOST: Final = 64 * 1024
"""Maximum bytes that are received at a time."""

_INSTANT: Final = 0.001
"""The shortest timeout of a socket: 0 would make it non-blocking."""

_LONGEST: Final = 1_000_000.0
"""The longest timeout of a socket, in seconds, that is set; the kernel takes no infinite one."""


class Connection:
    """The way to one mpsd: each request takes a socket that is idle, or a new one, and keeps it open for the next.

    Many threads may use it at the same time. After a fork, the child's requests take sockets of its own, since mpsd
    identifies a caller by the process that connected.

    Every request raises UnreachableError when no mpsd answers within the deadline, UntrustedSocketError when the
    listener is neither root nor the caller nor trusted, and otherwise the error of mpsd's answer as an instance of its
    class.
    """

    def __init__(self, path: str | None = None, *, deadline: float = DEADLINE, trusted: Collection[int] = ()) -> None:
        """`path` is that of mpsd's socket; None: the one that MPSD_SOCKET names, otherwise the default.

        `trusted` are the uids that are trusted besides root's and the caller's own.
        """
        self.path = path or os.environ.get("MPSD_SOCKET") or SOCKET
        """The path of mpsd's socket."""
        self.trusted = frozenset(trusted)
        self.deadline = deadline
        """Seconds for one request, unless it names another deadline."""
        self._idle: list[_Link] = []

    def __enter__(self) -> Self:
        """Return it; the first request opens the connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def another(self, *, deadline: float) -> Self:
        """Return a further connection to the same mpsd."""
        return type(self)(self.path, deadline=deadline, trusted=self.trusted)

    def at(self, path: str) -> Self:
        """Return a connection to another mpsd, by the path of its socket, with the same trusted users."""
        return type(self)(path, deadline=self.deadline, trusted=self.trusted)

    def connect(self) -> None:
        """Connect, unless an idle socket is connected. Raises the errors of a request."""
        self._give_back(self._take())

    def close(self) -> None:
        """Close the idle sockets; the next request opens another."""
        while (link := self._pop()) is not None:
            link.close()

    def get(self, path: str, *, also: int | None = None) -> object:
        """Return the decoded JSON of a GET; `also` is the status of an error that is an answer as well."""
        return self._document("GET", path, also=also)

    def text(self, path: str) -> bytes:
        """Return the text of a GET whose answer is not JSON."""
        with self._exchange("GET", path, b"", self.deadline) as (_, pieces):
            return b"".join(pieces)

    def post(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        deadline: float | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> object:
        """Return the decoded JSON of a POST with a JSON body; it may have its own deadline."""
        return self._document("POST", path, json.dumps(body).encode(), deadline=deadline, meanwhile=meanwhile)

    def delete(self, path: str) -> None:
        self._document("DELETE", path)

    def lines(
        self, path: str, *, silence: float = DEADLINE, meanwhile: Meanwhile | None = None
    ) -> Iterator[tuple[str, object]]:
        """Yield the complete JSON lines of an answer as they arrive, each with its decoded value.

        The answer must begin within the deadline; after that, it may pause for at most `silence` seconds at a time.
        """
        rest = b""
        with self._exchange("GET", path, b"", self.deadline) as (link, pieces):
            while True:
                link.begin(silence, meanwhile)
                piece = next(pieces, None)
                if piece is None:
                    break
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line.decode(), json.loads(line)

    def _document(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        deadline: float | None = None,
        meanwhile: Meanwhile | None = None,
        also: int | None = None,
    ) -> object:
        deadline = self.deadline if deadline is None else deadline
        with self._exchange(method, path, body, deadline, meanwhile, also=also) as (_, pieces):
            return exchange.document(b"".join(pieces))

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        deadline: float,
        meanwhile: Meanwhile | None = None,
        *,
        also: int | None = None,
    ) -> Iterator[tuple["_Link", Iterator[bytes]]]:
        """Send a request, and yield its socket and the pieces of the answer. Raises the error of that answer.

        A socket on which the rest of an answer may still arrive is closed.
        """
        link = self._take()
        try:
            link.begin(deadline, meanwhile)
            link.send(exchange.request(method, path, body))
            answer = exchange.Answer()
            pieces = link.pieces(answer)
            next(pieces)
            if answer.is_error and answer.status != also:
                raise exchange.error_of(answer.status, exchange.document(b"".join(pieces)))
            yield link, pieces
        except (OSError, EOFError, ValueError) as error:
            raise exchange.unanswered(self.path, error, deadline, reads=method == "GET") from None
        finally:
            self._give_back(link)

    # Threads share the list without a lock: each takes from it, and puts back, in one step of the interpreter.

    def _take(self) -> "_Link":
        while (link := self._pop()) is not None:
            if not link.is_over():
                return link
            link.close()
        return _Link(_connect(self.path, self.deadline, self.trusted))

    def _pop(self) -> "_Link | None":
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give_back(self, link: "_Link") -> None:
        if not link.is_reusable:
            link.close()
            return
        self._idle.append(link)
        if len(self._idle) > MOST_IDLE and (spare := self._pop()) is not None:
            spare.close()


# -- sockets -----------------------------------------------------------------------------------------------------------

_OPEN: Final = weakref.WeakSet[socket.socket]()


def new_socket() -> socket.socket:
    """Return a socket that is this process's alone.

    A child that is forked closes its copy at once: two processes must not use one socket, and mpsd notices the end of
    a caller when all copies are closed.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _OPEN.add(made)
    return made


def _close_copies() -> None:
    for each in list(_OPEN):
        each.close()


os.register_at_fork(after_in_child=_close_copies)


def _connect(path: str, deadline: float, trusted: Collection[int]) -> socket.socket:
    """Connect, and wait until a busy mpsd accepts. Raises UnreachableError, and UntrustedSocketError."""
    connection = new_socket()
    try:
        # A timeout of the kernel: a non-blocking connect would fail at once when the queue of connections is full.
        seconds = min(max(deadline, _INSTANT), _LONGEST)
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        connection.connect(path)
        exchange.check_listener(connection, path, trusted)
    except OSError as error:
        connection.close()
        raise exchange.unreachable(path, deadline, error) from None
    except UntrustedSocketError:
        connection.close()
        raise
    return connection


class Link:
    """One socket, for one exchange at a time.

    Where a method waits, it raises TimeoutError once the time of the exchange has passed, OSError when the connection
    breaks, and the errors of `Answer`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.is_reusable = True
        """Whether the last answer was read completely, so that the socket can carry another request."""
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def is_over(self) -> bool:
        """Tell whether it is closed, at either end, between two exchanges: nothing may be received then."""
        if self._connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))


class _Link(Link):
    """One whose calls block."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._end = 0.0
        self._meanwhile: Meanwhile | None = None
        self._next_look = inf

    def begin(self, seconds: float, meanwhile: Meanwhile | None) -> None:
        """Set the time for the following exchange, and the callback that runs while it waits."""
        now = time.monotonic()
        self._end = now + seconds
        self._meanwhile = meanwhile
        self._next_look = inf if meanwhile is None else now + FIRST_LOOK

    def send(self, request: bytes) -> None:
        """Send a whole request."""
        self.is_reusable = False
        self._hurry(inf)
        self._connection.sendall(request, socket.MSG_NOSIGNAL)

    def pieces(self, answer: exchange.Answer) -> Iterator[bytes]:
        """Yield an empty piece for the head of the answer, and its body as it arrives, to its end."""
        for piece in answer.pieces():
            if piece is None:
                answer.feed(self._receive())
            else:
                yield piece
        self.is_reusable = answer.is_reusable

    def _receive(self) -> bytes:
        """Wait for more data, and run the callback meanwhile."""
        while True:
            self._hurry(self._next_look)
            try:
                return self._connection.recv(MOST)
            except TimeoutError:
                if self._meanwhile is not None and time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + self._meanwhile()

    def _hurry(self, until: float) -> None:
        """Set the timeout of the next call: the time that is left, but not beyond `until`."""
        now = time.monotonic()
        if now >= self._end:
            raise TimeoutError
        seconds = max(min(self._end, until) - now, _INSTANT)
        self._connection.settimeout(None if seconds == inf else seconds)
