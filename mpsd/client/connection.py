"""A small synchronous HTTP/1.1 client over a unix socket, with only what mpsd's API needs.

The import of http.client takes as long as the start of the interpreter, for every command.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Final, Self, TypeAlias

from mpsd import __version__
from mpsd.core.errors import MpsdError, UnreachableError, UntrustedSocketError, catalogue

SOCKET: Final = "/run/mpsd/mpsd.sock"
"""The default socket of mpsd."""

DEADLINE: Final = 10.0
"""Seconds for one request, from connecting to the last byte of its answer, unless the request names another
deadline."""

Meanwhile: TypeAlias = Callable[[], float]
"""A callback that runs while an answer is awaited; it returns the seconds until its next run."""

FIRST_LOOK: Final = 0.5
"""Seconds until its first run."""

_ERRORS: Final = 400
"""The first HTTP status that is an error."""

_INSTANT: Final = 0.001
"""The shortest timeout of a socket: 0 would make it non-blocking."""

_LONGEST_LINE: Final = 64 * 1024

_EXIT_CODES: Final = {401: 77, 403: 77, 404: 1, 409: 75, 429: 75, 503: 75}
"""Exit codes by HTTP status, for an error with a code that this mpsctl does not know."""


class Connection:
    """One connection to mpsd, opened at the first request and kept for further ones.

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
        self._connection: _Socket | None = None

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

    def connect(self) -> "_Socket":
        """Connect, unless a connection is open; mpsd may have closed it since. Raises the errors of a request."""
        if self._connection is not None and self._connection.is_over():
            self.close()
        if self._connection is None:
            self._connection = _Socket(_connect(self.path, self.deadline, self.trusted))
        return self._connection

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str) -> object:
        """Return the decoded JSON of a GET."""
        return self._document("GET", path)

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
        with self._exchange("GET", path, b"", self.deadline) as (connection, pieces):
            while True:
                connection.begin(silence, meanwhile)
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
    ) -> object:
        deadline = self.deadline if deadline is None else deadline
        with self._exchange(method, path, body, deadline, meanwhile) as (_, pieces):
            answer = b"".join(pieces)
            return json.loads(answer) if answer else None

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes, deadline: float, meanwhile: Meanwhile | None = None
    ) -> Iterator[tuple["_Socket", Iterator[bytes]]]:
        """Send a request, and yield the connection and the pieces of the answer. Raises the error of that answer.

        A connection on which the rest of an answer may still arrive is closed.
        """
        try:
            connection = self.connect()
            connection.begin(deadline, meanwhile)
            head = [f"{method} {path} HTTP/1.1", "Host: mpsd", f"User-Agent: mpsctl/{__version__}"]
            if body:
                head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            connection.send("\r\n".join([*head, "", ""]).encode() + body)
            status, headers = connection.head()
            pieces = connection.pieces(status, headers)
            if status >= _ERRORS:
                answer = b"".join(pieces)
                raise error_of(status, json.loads(answer) if answer else None)
            yield connection, pieces
        except (OSError, EOFError, ValueError) as error:
            raise self._unanswered(error, deadline, reads=method == "GET") from None
        finally:
            if self._connection is not None and not self._connection.reusable:
                self.close()

    def _unanswered(self, error: OSError | EOFError | ValueError, deadline: float, *, reads: bool) -> UnreachableError:
        match error:
            case TimeoutError():
                return UnreachableError(
                    f"mpsd accepted the request on {self.path} and did not answer within {deadline:g} s",
                    hint="see mpsd's log for what keeps it busy; a stopped process (SIGSTOP) does not answer either",
                )
            case ValueError():
                stranger = UnreachableError(
                    f"the program that listens on {self.path} does not answer as mpsd does: {error}",
                    hint=_ANOTHER_SOCKET,
                )
                stranger.retryable = False
                return stranger
            case _:
                broke = f"the connection to mpsd on {self.path} broke before the answer arrived"
                if reads:
                    return UnreachableError(broke, hint="try again: mpsd may be restarting")
                return UnreachableError(
                    f"{broke}; whether the request took effect is unknown",
                    hint="check whether mpsd is running and what it did: mpsctl status; mpsctl leases",
                )


def segment(text: str) -> str:
    """Return a text as one segment of a path, with all special characters quoted."""
    from urllib.parse import quote

    return quote(os.fsencode(text), safe="")


# -- errors ------------------------------------------------------------------------------------------------------------

_ANOTHER_SOCKET: Final = "name mpsd's socket with --socket or MPSD_SOCKET"
_START_IT: Final = (
    "if mpsd is not running, start it (systemctl start mpsd, or mpsd run); in a container, mount the"
    f" directory of the socket, not the socket, since each mpsd creates a new socket; or {_ANOTHER_SOCKET}"
)


def error_of(status: int, document: object) -> MpsdError:
    """Return the error in a problem document; an unknown code is judged by its HTTP status."""
    fields = document if isinstance(document, dict) else {}
    code, detail, hint, limit = (fields.get(name) for name in ("code", "detail", "hint", "limit"))
    detail = str(detail or f"the answer was HTTP status {status} without a reason")
    hint = str(hint or f"check that the program that listens there is mpsd; otherwise, {_ANOTHER_SOCKET}")
    limit = None if limit is None else str(limit)
    kind = next((each for each in catalogue() if each.code == code), MpsdError)
    error = kind(detail, hint=hint, limit=limit)
    error.is_answer = True
    if kind is MpsdError:
        error.code = str(code or error.code)
        error.exit_code = _EXIT_CODES.get(status, 2 if status < 500 else 1)  # noqa: PLR2004 - errors of the caller
    return error


_PEER: Final = struct.Struct("iII")
"""struct ucred: pid, uid, gid. Source: unix(7)."""


def _connect(path: str, deadline: float, trusted: Collection[int]) -> socket.socket:
    """Connect, and wait until a busy mpsd accepts. Raises UnreachableError, and UntrustedSocketError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A timeout of the kernel: a non-blocking connect would fail at once when the queue of connections is full.
        seconds = struct.pack("@ll", int(deadline), int(deadline % 1 * 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise _unreachable(path, deadline, error) from None
    # The credentials of the process that called listen(); for a socket that systemd passes on, that is root.
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid in {0, os.getuid(), os.geteuid(), *trusted}:
        return connection
    connection.close()
    raise UntrustedSocketError(
        f"pid {pid} of uid {uid} listens on {path}, which is neither root's mpsd nor your own",
        hint=f"if it is an mpsd that you trust as you trust root: --trust-uid {uid}, or MPSD_TRUST_UID={uid};"
        f" otherwise, {_ANOTHER_SOCKET}",
    )


def _unreachable(path: str, deadline: float, error: OSError) -> UnreachableError:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR | errno.ECONNREFUSED:
            is_there = error.errno == errno.ECONNREFUSED
            absent = UnreachableError(
                f"nothing listens on {path}" if is_there else f"there is no socket {path}", hint=_START_IT
            )
            absent.socket = path
            return absent
        case errno.EACCES | errno.EPERM:
            refused = UnreachableError(
                f"uid {os.getuid()} is not permitted to connect to {path}",
                hint=f"join the group that api.group names, or run the command as root; or {_ANOTHER_SOCKET}",
            )
            refused.retryable = False
            return refused
        case errno.EAGAIN:
            return UnreachableError(
                f"mpsd did not accept a connection on {path} within {deadline:g} s",
                hint="see mpsd's log for what keeps it busy; a stopped process (SIGSTOP) does not accept"
                " connections either",
            )
        case _:
            return UnreachableError(f"cannot connect to {path}: {error.strerror or error}", hint=_ANOTHER_SOCKET)


# -- HTTP --------------------------------------------------------------------------------------------------------------


class _Socket:
    """One connection, and the parser of its answers.

    Every method raises TimeoutError once the time given to `begin` has passed, EOFError when the peer closes in the
    middle of an answer, ConnectionError when the connection breaks, and ValueError for data that is not HTTP.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.reusable = False
        """Whether the last answer was read completely, so that the connection can carry another request."""
        self._connection = connection
        self._received = bytearray()
        self._end = 0.0
        self._meanwhile: Meanwhile | None = None
        self._next_look = inf

    def close(self) -> None:
        self._connection.close()

    def is_over(self) -> bool:
        """Tell whether its peer has closed it, between two exchanges: nothing may be received then."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, seconds: float, meanwhile: Meanwhile | None) -> None:
        """Set the time for the following exchange, and the callback that runs while it waits."""
        now = time.monotonic()
        self._end = now + seconds
        self._meanwhile = meanwhile
        self._next_look = inf if meanwhile is None else now + FIRST_LOOK

    def send(self, request: bytes) -> None:
        """Send a whole request."""
        self.reusable = False
        self._hurry(inf)
        self._connection.sendall(request, socket.MSG_NOSIGNAL)

    def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Return status and headers of the next answer."""
        while True:
            status, headers = self._status(), self._headers()
            if not 100 <= status < 200:  # noqa: PLR2004 - interim answers
                return status, headers

    def pieces(self, status: int, headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
        """Yield the body of the answer as it arrives, to its end."""
        reusable = headers.get(b"connection", b"").lower() != b"close"
        if status not in {204, 304}:
            if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
                yield from self._chunks()
            elif b"content-length" in headers:
                yield self._take(int(headers[b"content-length"]))
            else:
                reusable = False
                yield from self._rest()
        self.reusable = reusable

    def _status(self) -> int:
        version, _, rest = self._line().partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ValueError("it does not speak HTTP")
        return int(rest[:3])

    def _headers(self) -> dict[bytes, bytes]:
        headers = {}
        while line := self._line():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return headers

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._line().partition(b";")[0], 16):
            yield self._take(size)
            self._line()
        self._headers()

    def _line(self) -> bytes:
        while (found := self._received.find(b"\n")) < 0:
            if len(self._received) > _LONGEST_LINE:
                raise ValueError("it sends a line without an end")
            self._receive()
        return self._take(found + 1).rstrip(b"\r\n")

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            self._receive()
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _rest(self) -> Iterator[bytes]:
        with contextlib.suppress(EOFError):
            while True:
                yield self._take(len(self._received))
                self._receive()

    def _receive(self) -> None:
        """Wait for more data, and run the callback meanwhile."""
        while True:
            self._hurry(self._next_look)
            try:
                received = self._connection.recv(64 * 1024)
            except TimeoutError:
                if self._meanwhile is not None and time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + self._meanwhile()
                continue
            if not received:
                raise EOFError
            self._received += received
            return

    def _hurry(self, until: float) -> None:
        """Set the timeout of the next call: the time that is left, but not beyond `until`."""
        now = time.monotonic()
        if now >= self._end:
            raise TimeoutError
        seconds = max(min(self._end, until) - now, _INSTANT)
        self._connection.settimeout(None if seconds == inf else seconds)
