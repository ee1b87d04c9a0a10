"""HTTP/1.1 over a unix socket, with only what mpsd's API needs, and the errors of a request. It does no I/O.

Connection and AsyncConnection have it in common. The import of http.client takes as long as the start of the
interpreter, for every command.
"""

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Collection, Generator, Iterator
from typing import Final, TypeAlias, TypeVar

from mpsd import __version__
from mpsd.core.errors import MpsdError, UnreachableError, UntrustedSocketError, error_named

_T = TypeVar("_T")

_ERRORS: Final = 400
"""The first HTTP status that is an error."""

_LONGEST_LINE: Final = 64 * 1024

_EXIT_CODES: Final = {401: 77, 403: 77, 404: 1, 409: 75, 429: 75, 503: 75}
"""Exit codes by HTTP status, for an error with a code that this mpsctl does not know."""


def request(method: str, path: str, body: bytes) -> bytes:
    """Return a whole request."""
    head = [f"{method} {path} HTTP/1.1", "Host: mpsd", f"User-Agent: mpsd-python/{__version__}"]
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


def segment(text: str) -> str:
    """Return a text as one segment of a path, with all special characters quoted."""
    from urllib.parse import quote

    return quote(os.fsencode(text), safe="")


def document(body: bytes) -> object:
    """Return the decoded JSON of a body, None for an empty one. Raises ValueError."""
    return json.loads(body) if body else None


# -- an answer ---------------------------------------------------------------------------------------------------------

_Taken: TypeAlias = Generator[None, None, _T]
"""A part of the parser: it yields where more data is needed, and returns what it has found."""


class Answer:
    """The parser of one answer, fed with what the peer sends.

    It raises EOFError when the peer closes in the middle of the answer, and ValueError for data that is not HTTP.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_reusable = False
        """Whether the answer was read completely, so that its connection can carry another request."""
        self._received = bytearray()
        self._is_closed = False

    @property
    def is_error(self) -> bool:
        """Whether its status, known once its head has arrived, is that of an error."""
        return self.status >= _ERRORS

    def feed(self, data: bytes) -> None:
        """Take what the peer has sent; nothing: it has closed the connection."""
        self._received += data
        self._is_closed = not data

    def pieces(self) -> Iterator[bytes | None]:
        """Yield an empty piece for the head, and then the body as it arrives; None where `feed` must be called."""
        while True:
            self.status = yield from self._status()
            headers = yield from self._headers()
            if not 100 <= self.status < 200:  # noqa: PLR2004 - interim answers
                break
        yield b""
        is_reusable = headers.get(b"connection", b"").lower() != b"close"
        if self.status not in {204, 304}:
            if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
                yield from self._chunks()
            elif b"content-length" in headers:
                yield (yield from self._take(int(headers[b"content-length"])))
            else:
                is_reusable = False
                yield from self._rest()
        self.is_reusable = is_reusable and not self._received

    def _status(self) -> _Taken[int]:
        version, _, rest = (yield from self._line()).partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ValueError("it does not speak HTTP")
        return int(rest[:3])

    def _headers(self) -> _Taken[dict[bytes, bytes]]:
        headers = {}
        while line := (yield from self._line()):
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return headers

    def _chunks(self) -> Iterator[bytes | None]:
        while size := int((yield from self._line()).partition(b";")[0], 16):
            yield (yield from self._take(size))
            yield from self._line()
        yield from self._headers()

    def _line(self) -> _Taken[bytes]:
        while (found := self._received.find(b"\n")) < 0:
            if len(self._received) > _LONGEST_LINE:
                raise ValueError("it sends a line without an end")
            yield from self._more()
        return (yield from self._take(found + 1)).rstrip(b"\r\n")

    def _take(self, size: int) -> _Taken[bytes]:
        while len(self._received) < size:
            yield from self._more()
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _rest(self) -> Iterator[bytes | None]:
        with contextlib.suppress(EOFError):
            while True:
                yield (yield from self._take(len(self._received)))
                yield from self._more()

    def _more(self) -> _Taken[None]:
        yield
        if self._is_closed:
            raise EOFError


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
    error = error_named(str(code or ""), detail, hint=hint, limit=limit)
    error.is_answer = True
    if type(error) is MpsdError:
        error.exit_code = _EXIT_CODES.get(status, 2 if status < 500 else 1)  # noqa: PLR2004 - errors of the caller
    return error


_PEER: Final = struct.Struct("iII")
"""struct ucred: pid, uid, gid. Source: unix(7)."""


def check_listener(connection: socket.socket, path: str, trusted: Collection[int]) -> None:
    """Refuse a listener that is neither root nor the caller nor trusted. Raises UntrustedSocketError."""
    # The credentials of the process that called listen(); for a socket that systemd passes on, that is root.
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in {0, os.getuid(), os.geteuid(), *trusted}:
        raise UntrustedSocketError(
            f"pid {pid} of uid {uid} listens on {path}, which is neither root's mpsd nor your own",
            hint=f"if it is an mpsd that you trust as you trust root: --trust-uid {uid}, or MPSD_TRUST_UID={uid};"
            f" otherwise, {_ANOTHER_SOCKET}",
        )


def unreachable(path: str, deadline: float, error: OSError) -> UnreachableError:
    """Return the error of a connection that could not be made."""
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


def unanswered(path: str, error: OSError | EOFError | ValueError, deadline: float, *, reads: bool) -> UnreachableError:
    """Return the error of a request that was sent, or begun, and got no answer; `reads`: it changes nothing."""
    match error:
        case TimeoutError():
            return UnreachableError(
                f"mpsd accepted the request on {path} and did not answer within {deadline:g} s",
                hint="see mpsd's log for what keeps it busy; a stopped process (SIGSTOP) does not answer either",
            )
        case ValueError():
            stranger = UnreachableError(
                f"the program that listens on {path} does not answer as mpsd does: {error}",
                hint=_ANOTHER_SOCKET,
            )
            stranger.retryable = False
            return stranger
        case _:
            broke = f"the connection to mpsd on {path} broke before the answer arrived"
            if reads:
                return UnreachableError(broke, hint="try again: mpsd may be restarting")
            return UnreachableError(
                f"{broke}; whether the request took effect is unknown",
                hint="check whether mpsd is running and what it did: mpsctl status; mpsctl leases",
            )
