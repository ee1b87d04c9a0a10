"""The server of the page: HTTP/1.1 on the loopback address, with one thread for each connection, and at most MOST.

The server accepts connections from its own users only, by the uid that the kernel reports for the other end's socket.
Every request passes `guard`. The answer is a file of `page/`, one of the page's own answers, or mpsd's answer to a
route that `guard` passes on. mpsd sees the credentials of this process, so a page shows and does only what its user may
see and do.
"""

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import click

from mpsd import __version__
from mpsd.cli.command import of_one_version
from mpsd.cli.web import answers
from mpsd.cli.web.guard import Head, Sessions, check_site, methods_of, no_session
from mpsd.client import Client
from mpsd.client.connection import DEADLINE
from mpsd.core.errors import (
    BodyTooLargeError,
    ConfigurationError,
    InvalidRequestError,
    MethodNotAllowedError,
    MpsdError,
    NotFoundError,
    UnreachableError,
    UntrustedSocketError,
)
from mpsd.system.sockets.sock_diag import tcp_uid

LOOPBACK: Final = "127.0.0.1"

MOST: Final = 32
"""Connections at a time. A browser opens six."""

_REQUEST: Final = 5.0
"""Seconds within which a request must be complete after its first byte."""
_IDLE: Final = 60.0
_LONGEST: Final = 32 * 1024
"""Bytes of a request at most."""
_DIGITS: Final = 10
_SEND: Final = 10.0
"""Seconds for a browser to receive an answer."""
_LOOK: Final = 0.5
_BATCH: Final = 256
_TOLD: Final = 32
"""Connections of other users that get a message within a second."""

_OPEN: Final = "/page/session"
_NODE: Final = "/page/node"
_PRINCIPAL: Final = "/page/principal"
_EVENTS: Final = "/page/events"
_STORY: Final = "/page/story/"
_HISTORY: Final = "/page/history?by="

_PAGE: Final = "/"
_FOLDER: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",  # no text can become HTML: the page makes text and elements only
}

_HEADERS: Final = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), usb=()",
    "Cache-Control": "no-store",
}


class _Asset(NamedTuple):
    """A file of the page."""

    media_type: str
    body: bytes


def _assets() -> dict[str, _Asset]:
    """Return the files of the page by the path at which each is served."""
    return {
        _PAGE if each.name == "index.html" else f"/{each.name}": _Asset(_MEDIA_TYPES[each.suffix], each.read_bytes())
        for each in _FOLDER.iterdir()
        if each.suffix in _MEDIA_TYPES
    }


class _Input(io.RawIOBase):
    """The input of a connection, with a deadline and a limit for each request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end: float | None = None
        self._left = 0
        self.begin()

    def begin(self) -> None:
        """Begin another request; its deadline starts with its first byte."""
        self._end, self._left = None, _LONGEST

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - io's signature
        """Receive bytes; return 0 at the end of the input and beyond the limit. Raises TimeoutError."""
        now = time.monotonic()
        wait = _IDLE if self._end is None else self._end - now
        if wait <= 0:
            raise TimeoutError
        if self._left <= 0:
            return 0
        self._connection.settimeout(wait)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        if self._end is None:
            self._end = time.monotonic() + _REQUEST
        self._left -= count
        self._connection.settimeout(_SEND)
        return count


class Server(ThreadingHTTPServer):
    """The server of the page, for the given users."""

    daemon_threads = True
    request_queue_size = 4096
    """A connection beyond this number would be made again by the browser's kernel, a second later: this is Linux's
    maximum, and a refusal takes a fraction of a millisecond."""
    block_on_close = False

    def __init__(self, api: Client, port: int, users: Collection[int], opened: Callable[[], None]) -> None:
        """Listen on a port; 0 chooses a free one. `opened` is called when a browser has used a link.

        Raises OSError and ConfigurationError.
        """
        self.sessions = Sessions()
        self.assets = _assets()
        self.api = api
        self.opened = opened
        self.ending = threading.Event()
        self._users = frozenset(users)
        self._places = threading.BoundedSemaphore(MOST)
        self._told = Counter[int]()
        """The number of other users' connections in the latest second that had any."""
        super().__init__((LOOPBACK, port), _Handler)
        self.socket.setblocking(False)
        self.port = int(self.server_address[1])
        self._prove_that_users_are_known()

    def _prove_that_users_are_known(self) -> None:
        """Raise ConfigurationError if the kernel does not report the user of a connection: all would be refused."""
        with socket.create_connection((LOOPBACK, self.port), timeout=DEADLINE) as own:
            if tcp_uid(own.getsockname(), (LOOPBACK, self.port)) == os.geteuid():
                return
        self.server_close()
        raise ConfigurationError(
            "the kernel does not report whose a TCP connection is (sock_diag), so the page cannot tell users apart",
            hint="load its module, as root: modprobe tcp_diag; without it, use mpsctl top",
        )

    def link(self) -> str:
        """Return the address of the page, with a token that opens it once.

        The token is in the fragment of the address, which no browser sends and no server logs.
        """
        return f"http://{LOOPBACK}:{self.port}/#token={self.sessions.link()}"

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection of one of the users, and close all others before it unread.

        A few of them in a second get a short message, which takes longer than all else here. Raises BlockingIOError
        where no further connection waits, and after `_BATCH` others, so that the server can end beside a flood.
        """
        for _ in range(_BATCH):
            connection, address = self.socket.accept()
            if tcp_uid(address, (LOOPBACK, self.port)) in self._users:
                return connection, address
            second = int(time.monotonic())
            self._told = Counter({second: self._told[second] + 1})
            if self._told[second] <= _TOLD:
                _last_words(connection, HTTPStatus.FORBIDDEN, "this page is of another user")
            self.shutdown_request(connection)
        raise BlockingIOError

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Serve a connection in a thread of its own, if fewer than MOST are open."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        _last_words(request, HTTPStatus.SERVICE_UNAVAILABLE, f"there are {MOST} connections: close other tabs")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Serve a connection, and release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's signature
        """Report a defect; a browser that has disconnected is none."""
        error = sys.exception()
        if not isinstance(error, OSError):
            click.echo(f"mpsctl: a request to the page failed: {error!r}", err=True)

    def end(self) -> None:
        """Notify the pages, and stop serving."""
        self.ending.set()
        self.shutdown()
        self.server_close()


def _last_words(connection: socket.socket, status: HTTPStatus, why: str) -> None:
    text = f"mpsctl web: {why}\n".encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    """Otherwise the body of an answer on a kept connection waits 40 ms for the browser's kernel."""
    server_version = f"mpsctl/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        """Replace the input by one with deadlines."""
        super().setup()
        self.rfile.close()
        self._input = _Input(self.connection)
        self.rfile = io.BufferedReader(self._input)

    def handle_one_request(self) -> None:
        """Serve one request; disconnect a browser that does not finish it in time, or does not receive the answer."""
        self._input.begin()
        try:
            super().handle_one_request()
        except (TimeoutError, ConnectionError):
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's signature
        """Log nothing: a terminal is no place for it."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - http.server's signature
        """Answer a request that http.server cannot parse or does not support."""
        self.close_connection = True
        detail = f"the request is not served: {message or HTTPStatus(code).phrase}"
        self._refuse(_invalid(code, detail, "see GET, POST and DELETE of the page's own requests"))

    def do_GET(self) -> None:
        """Answer a request of any method."""
        try:
            with of_one_version():
                self._answer()
        except MpsdError as error:
            self._refuse(error)
        except click.UsageError as error:
            self._refuse(InvalidRequestError(error.format_message(), hint="choose one in the table of leases"))

    do_HEAD = do_GET  # noqa: N815 - http.server's names
    do_POST = do_GET  # noqa: N815
    do_DELETE = do_GET  # noqa: N815

    # -- requests ------------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        head = Head(self.command, self.headers)
        asset = self.server.assets.get(self.path)
        check_site(head, self.server.port, is_page=self.path == _PAGE, is_asset=asset is not None)
        if asset is not None:
            self._require("GET", "HEAD")
            self._send(200, asset.media_type, asset.body)
        elif self.path == _OPEN:
            self._require("POST")
            session = self.server.sessions.open(str(self._body().get("token")))
            self.server.opened()
            self._json({"session": session})
        elif self.server.sessions.knows(head.session):
            self._answer_session()
        else:
            raise no_session()

    def _answer_session(self) -> None:
        path, mark, query = self.path.partition("?")
        after = query.removeprefix("after=")
        if self.path == _NODE:
            self._ask(answers.node)
        elif self.path == _PRINCIPAL:
            self._ask(lambda api: {**answers.principal(api), "host": socket.gethostname()})
        elif path == _EVENTS and not mark:
            self._stream(None)
        elif path == _EVENTS and query.startswith("after=") and after.isascii() and after.isdecimal():
            self._stream(int(after))
        elif self.path.startswith(_STORY) and "/" not in (subject := self.path.removeprefix(_STORY)):
            self._ask(lambda api: answers.story(api, subject))
        elif self.path.startswith(_HISTORY):
            self._ask(lambda api: answers.history(api, unquote(self.path.removeprefix(_HISTORY))))
        else:
            self._pass_on()

    def _ask(self, ask: Callable[[Client], object]) -> None:
        self._require("GET")
        with self._mpsd() as api:
            self._json(ask(api))

    def _pass_on(self) -> None:
        """Pass a request for a route of `guard` on to mpsd unchanged."""
        methods = methods_of(self.path)
        if not methods:
            raise NotFoundError("the page has nothing there", hint="see mpsctl for all of mpsd's API")
        self._require(*methods)
        with self._mpsd() as api:
            if self.command == "POST":
                self._json(answers.shown(api.post(self.path, self._body())))
            elif self.command == "DELETE":
                api.delete(self.path)
                self._send(204, "", b"")
            else:
                self._json(answers.shown(api.get(self.path)))

    def _stream(self, after: int | None) -> None:
        """Send events until the browser, mpsd or this server ends; a last line reports the end of the server."""
        self._require("GET")
        self.close_connection = True
        with self._mpsd() as api:
            lines = answers.events(api, after, self.server.ending.is_set, _LOOK)
            first = next(lines, b"\n")  # raises before the stream begins if mpsd does not answer
            self._head(200, "application/x-ndjson")
            self.end_headers()
            try:
                self.wfile.write(first)
                for line in lines:
                    self.wfile.write(line)
            except answers.EndedError:
                self.wfile.write(b'{"ended": true}\n')
            except (MpsdError, OSError):
                return  # the page sends another request, and gets the reason

    def _mpsd(self) -> Client:
        return self.server.api.another(deadline=DEADLINE)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _require(self, *methods: str) -> None:
        """Raise MethodNotAllowedError, whose hint is the list of these methods, for a request of another."""
        if self.command not in methods:
            detail = f"{self.path} is not there for {self.command}"
            raise MethodNotAllowedError(detail, hint=" ".join(sorted(methods)))

    def _body(self) -> dict[str, object]:
        """Return the JSON object in the body of a request. Raises InvalidRequestError for any other body."""
        length = self.headers.get("Content-Length", "")
        has_length = length.isascii() and length.isdecimal() and len(length) < _DIGITS
        is_json = self.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json"
        if is_json and has_length and "Transfer-Encoding" not in self.headers:
            if int(length) > _LONGEST:
                raise BodyTooLargeError(f"a body has {_LONGEST} bytes at most", hint="send less")
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(self.rfile.read(int(length)))
                if isinstance(found, dict):
                    return found
        raise _invalid(400, "the body is not a JSON object", "send application/json")

    def _json(self, answer: object) -> None:
        self._send(200, "application/json", json.dumps(answer).encode())

    def _refuse(self, error: MpsdError) -> None:
        is_away = isinstance(error, UnreachableError | UntrustedSocketError)
        status = 502 if is_away else error.status
        title = HTTPStatus(status).phrase
        problem = {"status": status, "code": error.code, "detail": error.detail, "hint": error.hint, "title": title}
        allow = ", ".join(error.hint.split()) if isinstance(error, MethodNotAllowedError) else ""
        if self.command not in {"GET", "HEAD"}:
            self.close_connection = True  # the request may have a body that was not read
        self._send(status, "application/problem+json", json.dumps(answers.shown(problem)).encode(), allow)

    def _send(self, status: int, media_type: str, body: bytes, allow: str = "") -> None:
        self._head(status, media_type, allow)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, media_type: str, allow: str = "") -> None:
        self.send_response(status)
        if media_type:
            self.send_header("Content-Type", media_type)
        if allow:
            self.send_header("Allow", allow)
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in _HEADERS.items():
            self.send_header(name, value)


def _invalid(status: int, detail: str, hint: str) -> InvalidRequestError:
    error = InvalidRequestError(detail, hint=hint)
    error.status = status
    return error
