"""HTTP/1.1 on one connection: httptools parses a request, and the next one is read after its answer.

Only what curl and the HTTP libraries of Python, Go and Node need is implemented; all else is refused with a sentence.
A connection costs a few KiB, whatever the peer sends and however fast.
"""

import asyncio
import http
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from math import inf
from typing import Final, cast

import httptools

from mpsd.core.errors import InvalidRequestError
from mpsd.daemon.http.message import MAXIMUM_BODY, Answer, Message, unreadable
from mpsd.daemon.http.peer import Peer
from mpsd.system import clock

_LONGEST_HEAD: Final = 16 * 1024
"""Maximum bytes of a request before its body."""

_LARGEST: Final = 1024 * 1024
"""Maximum bytes of a request in all, including chunk framing.

Bytes beyond `MAXIMUM_BODY` are read up to this limit and dropped, so that the caller can read why its request was
refused: a caller whose connection is closed while it sends gets an error of its own (ECONNRESET, EPIPE) instead.
"""

_BUFFER: Final = memoryview(bytearray(8 * 1024))
"""The last received data, of any connection: it is consumed before anything else is received."""

_KEEP_ALIVE: Final = 75.0
"""Seconds for which a connection may be idle between two requests, or may take to send the next one."""

_SLOW: Final = 5.0
"""Seconds that a caller may take to receive what was sent to it, or until the kernel takes `_LEAST` more of it."""

_LEAST: Final = 64 * 1024
"""Bytes. The kernel takes more only once three quarters of what it holds are read. Source: unix_writable, net/unix."""

_OTHER_VERSION: Final = {"Pause on PRI/Upgrade", "Invalid HTTP version"}
"""httptools' messages about HTTP/2 without an offer (`PRI * HTTP/2.0`), and about versions that do not exist."""

_NO_CONTENT: Final = int(http.HTTPStatus.NO_CONTENT)


class Connection(asyncio.BufferedProtocol):
    """One connection and its peer."""

    def __init__(
        self, peer: Peer, serve: Callable[[Message], Awaitable[None]], inside: "set[Connection]", patience: float
    ) -> None:
        """Create a connection whose first request may take `patience` seconds to arrive.

        `serve` answers a request through `send` or `stream`, and is cancelled when the caller no longer waits for the
        answer. `inside` contains the connection while it is open.
        """
        self.peer = peer
        self.deadline = clock.monotonic() + patience
        """When to close the connection if no request has arrived."""
        self.spoken = asyncio.get_running_loop().create_future()
        """Done when a first request has arrived, or will not arrive."""
        self.task: asyncio.Task[None] | None = None
        """The task that answers a request; None between two requests."""
        self.parting = False
        """Whether the next answer is the last one, because the next mpsd will answer later requests."""
        self._serve = serve
        self._inside = inside
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        """None when nothing more is read."""
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._size = 0
        """Bytes received of the current request."""
        self._coming: Message | None = None
        """The request whose body is being received."""
        self._next: deque[Message] = deque()
        """The requests to answer: the next one, and the refusal of all that follows."""
        self._due = False
        """Whether the caller waits for an answer, or for the rest of it."""
        self._last = False
        """Whether no further request is answered."""
        self._ended = False
        """Whether the caller has closed its sending side; it may still read."""
        self._taken: asyncio.Future[None] | None = None
        """Present while the kernel has not taken all sent data; done when it has."""

    # -- receiving -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to read."""
        transport = self._transport = cast("asyncio.Transport", transport)
        self._inside.add(self)
        transport.set_write_buffer_limits(0)  # wait for what the kernel does not take

    def connection_lost(self, _: Exception | None) -> None:
        """Stop: the caller or mpsd has closed the connection."""
        self._transport, self._parser = None, None
        if self.task is not None:
            self.task.cancel()
        if not self.spoken.done():
            self.spoken.set_result(None)
        self._inside.discard(self)
        self.peer.close()

    def get_buffer(self, _: int) -> memoryview:
        """Return the buffer for received data."""
        return _BUFFER

    def buffer_updated(self, size: int) -> None:
        """Parse the received data."""
        if self._parser is None:
            return
        self._size += size
        try:
            self._parser.feed_data(_BUFFER[:size])
        except httptools.HttpParserError as error:
            known = error.__context__  # raised below, in a function that the parser called
            if not isinstance(known, InvalidRequestError):
                status = 505 if str(error) in _OTHER_VERSION else 400
                known = unreadable(f"the request is not valid HTTP/1.1: {error}", status=status)
            self._refuse(known)
        else:
            if self._size > (_LONGEST_HEAD if self._coming is None else _LARGEST):
                self._refuse(unreadable("the request is too long", hint="send a shorter one"))

    def eof_received(self) -> bool:
        """Answer a complete request unless the peer has left; return whether it is still there."""
        self._ended = True
        return self.task is not None and self._coming is None and not self.peer.has_left()

    def _refuse(self, error: InvalidRequestError) -> None:
        """Read no further, answer the error after the present request, and close."""
        self._parser = None
        if self._transport is not None:
            self._transport.pause_reading()
        message, self._coming = self._coming, None
        if message is None:
            message = Message(self)
            self._next.append(message)
        message.close = True
        if len(message.body) <= MAXIMUM_BODY:  # otherwise its size is the error
            message.trouble = error
        message.wake()
        self._go_on()

    def on_url(self, url: bytes) -> None:
        """Collect a part of the request target; refuse a request before the previous answer has been read."""
        if self._due or self._taken is not None:
            raise unreadable(
                "a request came before the answer to the previous one (pipelining)",
                hint="wait for each answer, or send the requests over several connections",
            )
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header that matters here; httptools handles the length of a body and the end of a connection."""
        if self._coming is not None:
            raise unreadable("the request has trailers behind its body", hint="send them as headers, or not at all")
        name = name.lower()
        if name in {b"expect", b"accept"}:
            self._headers[name] = b"%b,%b" % (self._headers.get(name, b""), value)

    def on_headers_complete(self) -> None:
        """Begin a request."""
        parser = self._parser
        assert parser is not None  # noqa: S101 - the parser calls this
        version = parser.get_http_version()
        if version != "1.1":
            raise unreadable(f"the request is HTTP/{version}, and mpsd answers HTTP/1.1 only", status=505)
        if parser.should_upgrade():
            raise unreadable("the request asks for another protocol or a tunnel (Upgrade, CONNECT)")
        message = self._coming = Message.of(self, parser.get_method().decode(), self._target)
        if self._headers:
            message.accept = self._headers.get(b"accept", b"").decode(errors="replace")
            message.expects = b"100-continue" in self._headers.get(b"expect", b"").lower()
            self._headers = {}
        message.close = not parser.should_keep_alive()
        self._target, self._due = b"", True
        self._next.append(message)
        self._go_on()

    def on_body(self, body: bytes) -> None:
        """Collect a part of a body."""
        if self._coming is not None:
            self._coming.take(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        message, self._coming, self._size = self._coming, None, 0
        if message is not None:
            message.complete = True
            message.wake()

    # -- answering -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin to answer the next request, or close the connection after the last."""
        if self.task is not None or self._transport is None:
            return
        if self._next and not self._last:
            self.deadline = inf
            if not self.spoken.done():
                self.spoken.set_result(None)
            self.task = asyncio.get_running_loop().create_task(self._answer(self._next.popleft()))
        elif self._last or self._ended or self._parser is None:
            self._transport.close()

    async def _answer(self, message: Message) -> None:
        with suppress(ConnectionResetError):  # the caller closed the connection, as followers do, or was too slow
            await self._serve(message)
        self.task, self.deadline = None, clock.monotonic() + _KEEP_ALIVE
        self._last = self._last or self.parting or message.close
        self._go_on()

    def leave(self) -> None:
        """Answer the current request, if there is one, and close."""
        self._last = True
        self._go_on()

    def was_left(self) -> bool:
        """Tell whether the caller has closed the connection unnoticed, because the loop reads nothing at the moment."""
        if self._transport is None:
            return False
        return (self._ended or not self._transport.is_reading()) and self.peer.has_left()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def send(self, message: Message, answer: Answer) -> None:
        """Send an answer, and return when the kernel has it. Raises ConnectionResetError."""
        head = _head(answer.status, answer.kind, clock.second(), message.close or self.parting or self._last)
        if answer.allow:
            head += b"Allow: %b\r\n" % answer.allow.encode()
        if answer.status == _NO_CONTENT:
            self._put(head + b"\r\n")
        else:
            body = b"" if message.method == "HEAD" else answer.body
            self._put(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(answer.body), body))
        self._due = False
        if self._taken is not None:  # rare
            await self._drain()

    async def stream(self, message: Message, kind: str, pieces: AsyncIterator[bytes]) -> None:
        """Send an answer in pieces, each after the kernel has taken the previous one. Raises ConnectionResetError."""
        with ExitStack() as on_failure:
            on_failure.callback(self.abort)  # a part of an answer was sent, and no other answer can follow it
            head = _head(200, kind, clock.second(), message.close or self.parting or self._last)
            end = head + b"Transfer-Encoding: chunked\r\n\r\n"
            if message.method != "HEAD":
                await self._write(end)
                async for piece in pieces:
                    await self._write(b"%x\r\n%b\r\n" % (len(piece), piece))
                end = b"0\r\n\r\n"
            self._due = False
            await self._write(end)
            on_failure.pop_all()

    async def bid_continue(self) -> None:
        """Tell a caller to send the body that it holds back. Raises ConnectionResetError."""
        await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _write(self, data: bytes) -> None:
        self._put(data)
        await self._drain()

    def _put(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the peer has disconnected")
        self._transport.write(data)

    async def _drain(self) -> None:
        # An answer of megabytes may take longer than that on a busy machine: what counts is that the peer reads.
        while (taken := self._taken) is not None and (transport := self._transport) is not None:
            before = transport.get_write_buffer_size()
            await asyncio.wait({taken}, timeout=_SLOW)
            if not taken.done() and transport.get_write_buffer_size() > before - _LEAST:
                self.abort()
                raise ConnectionResetError(f"the peer has not read what was sent to it for {_SLOW:g} s")

    def pause_writing(self) -> None:
        """Let senders wait: the kernel takes no more."""
        self._taken = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let senders continue: the kernel has taken all."""
        taken, self._taken = self._taken, None
        if taken is not None and not taken.done():
            taken.set_result(None)


@lru_cache(64)
def _head(status: int, kind: str, second: int, last: bool) -> bytes:  # noqa: FBT001 - keywords slow a cache
    """Return the head of an answer in this second; `last` tells whether the connection ends after it."""
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second))
    media = "" if status == _NO_CONTENT else f"Content-Type: {kind}\r\n"
    close = "Connection: close\r\n" if last else ""
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nDate: {date}\r\n{media}{close}".encode()
