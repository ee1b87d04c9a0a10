"""HTTP/1.1 on one connection: httptools parses the requests, and they are answered one after the other.

Only what mpsd needs is implemented: nothing is decompressed, no other protocol is spoken, and data behind a request
stays unread until that request is answered. A connection costs a few KiB, whatever the peer sends and however fast.
"""

import asyncio
import http
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import lru_cache
from math import inf
from typing import Final, cast

import httptools

from mpsd.daemon.http.message import MAXIMUM_BODY, Answer, Message
from mpsd.daemon.http.peer import Peer
from mpsd.system import clock

_LONGEST_HEAD: Final = 16 * 1024
"""Maximum bytes of a request before its body."""

_LARGEST: Final = 1024 * 1024
"""Maximum bytes of a request in all, including chunk framing and trailers.

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

_VERSIONS: Final = {"1.0", "1.1"}

_READ: Final = {b"expect", b"accept"}
"""The headers that matter here; httptools handles the length of a body and the end of a connection."""

_NO_CONTENT: Final = int(http.HTTPStatus.NO_CONTENT)


class Connection(asyncio.BufferedProtocol):
    """One connection and its peer."""

    def __init__(
        self,
        peer: Peer,
        serve: Callable[[Message], Awaitable[None]],
        inside: "set[Connection]",
        patience: float,
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
        """The task that answers the requests of this connection while it is open."""
        self.is_answering = False
        """Whether a request is being answered."""
        self._in_hand: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        """The request that is being answered, or the next one."""
        self._serve = serve
        self._inside = inside
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._expects = False
        self._accept = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = b""
        """The head of a request that offers another protocol, without the offer."""
        self._size = 0
        """Bytes received of the current request."""
        self._coming: Message | None = None
        """The request whose body is being received."""
        self._next: deque[Message] = deque()
        """The requests to answer next; those behind the first arrived in the same read."""
        self._later = bytearray()
        """The unread data behind them."""
        self._last = False
        """Whether no further request is answered."""
        self._ended = False
        """Whether the caller has closed its sending side; it may still read."""
        self.parting = False
        """Whether the next answer is the last one, because the next mpsd will answer later requests."""
        self._taken: asyncio.Future[None] | None = None
        """Present while the kernel has not taken all sent data; done when it has."""

    # -- receiving -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to read."""
        transport = self._transport = cast("asyncio.Transport", transport)
        self.task = asyncio.get_running_loop().create_task(self._live())
        self._inside.add(self)
        transport.set_write_buffer_limits(0)  # wait for what the kernel does not take

    def connection_lost(self, _: Exception | None) -> None:
        """Stop: the caller or mpsd has closed the connection."""
        self._transport, self._parser = None, None
        self._next.clear()
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
        """Parse the received data, or keep it while another request has to be answered first."""
        data = _BUFFER[:size]
        if self._listens():
            self._read(data)
            self._go_on()
        else:
            self._later += data
            if len(self._later) >= len(_BUFFER) and self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Answer the received requests unless the peer has left; return whether it is still there."""
        if self.peer.has_left():
            return False
        self._ended = True
        self._go_on()
        return True

    def _listens(self) -> bool:
        """Tell whether received data belongs to the next request, or to the rest of the current one."""
        return self._parser is not None and not self._next and (not self.is_answering or self._coming is not None)

    def _read(self, data: memoryview | bytearray) -> None:
        parser = self._parser
        assert parser is not None  # noqa: S101 - it listens
        self._size += len(data)
        try:
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline(parser, data[int(offer.args[0]) :])
        except httptools.HttpParserError as error:
            self._cannot_read(str(error))
        else:
            if self._size > (_LONGEST_HEAD if self._coming is None else _LARGEST):
                self._cannot_read("it is too long")

    def _decline(self, parser: httptools.HttpRequestParser, data: memoryview | bytearray) -> None:
        """Parse a request that offers another protocol without the offer, and then the data behind its head.

        See `on_headers_complete`.
        """
        while True:
            head, self._head = self._head, b""
            if not head:
                self._parser = None  # CONNECT: the following data is for another server
                return
            parser.feed_data(head)
            if not data:
                return
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[int(offer.args[0]) :]
            else:
                return

    def _cannot_read(self, because: str) -> None:
        """Stop parsing; the reason is answered after the previous requests."""
        self._parser = None
        message, self._coming = self._coming, None
        if message is None:
            message = Message(self)
            self._next.append(message)
        message.close = True
        if len(message.body) <= MAXIMUM_BODY:  # otherwise its size is the error
            message.trouble = message.trouble or because
        message.wake()

    def on_url(self, url: bytes) -> None:
        """Collect a part of the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; trailers are dropped."""
        if self._coming is None:
            self._headers.append((name, value))
            name = name.lower()
            if name in _READ:
                self._note(name, value)

    def _note(self, name: bytes, value: bytes) -> None:
        """Note a header that matters here."""
        match name:
            case b"expect":
                self._expects = self._expects or value.lower() == b"100-continue"
            case b"accept":
                self._accept += b"," + value

    def on_headers_complete(self) -> None:
        """Begin a request.

        httptools does not parse the body of a request that offers another protocol, because that protocol may follow.
        mpsd speaks no other protocol, so the same head is parsed again without the offer.
        """
        parser = self._parser
        assert parser is not None  # noqa: S101 - the parser calls this
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade() and method != b"CONNECT":
            left = [b"%b: %b\r\n" % each for each in self._headers if each[0].lower() != b"upgrade"]
            self._head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version.encode(), b"".join(left))
        else:
            self._begin(parser, method.decode(), version)
        self._target, self._expects, self._accept = b"", False, b""
        self._headers.clear()

    def _begin(self, parser: httptools.HttpRequestParser, method: str, version: str) -> None:
        message = self._coming = Message.of(self, method, self._target)
        message.old = version == "1.0"
        if self._accept:
            message.accept = self._accept.decode(errors="replace")
        message.expects = self._expects and not message.old  # HTTP/1.0 has no such header
        message.close = message.old or not parser.should_keep_alive()
        if version not in _VERSIONS:
            message.trouble, message.close = f"it is HTTP/{version}", True
        elif method == "CONNECT":
            message.trouble, message.close = "it asks for another connection (CONNECT)", True
        self._next.append(message)

    def on_body(self, body: bytes) -> None:
        """Collect a part of a body."""
        if self._coming is not None and not self._coming.trouble:
            self._coming.take(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        if self._head:
            return  # the head is about to be parsed again
        message, self._coming, self._size = self._coming, None, 0
        if message is not None:
            message.complete = True
            if self.is_answering:  # otherwise no task waits for its body yet
                message.wake()

    # -- answering -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answer the next request, or read it, or read the rest of the current one."""
        while self._transport is not None:
            if not self.is_answering and self._next and not self._last:
                self.is_answering, self.deadline = True, inf
                if not self.spoken.done():
                    self.spoken.set_result(None)
                self._in_hand.set_result(self._next.popleft())
                if not (self._later or self._ended):
                    return  # the usual case
            elif self._later and not self._last and self._listens():
                self._read_later(self._transport)
            elif self._ended and self._coming is not None and not self._later:
                self._cannot_read("it ends in the middle of its body")
            elif not self.is_answering and (self._last or self._ended or self._parser is None):
                self._transport.close()
                return
            else:
                return

    def _read_later(self, transport: asyncio.Transport) -> None:
        later, self._later = self._later, bytearray()
        transport.resume_reading()
        self._read(later)

    async def _live(self) -> None:
        """Answer one request after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            message = await self._in_hand
            self._in_hand = loop.create_future()
            try:
                await self._serve(message)
            except ConnectionResetError:
                pass  # the caller closed the connection, as followers do, or was too slow
            finally:
                self.is_answering, self.deadline = False, clock.monotonic() + _KEEP_ALIVE
                self._last = self._last or self.parting or message.close
                self._go_on()
            if self._in_hand.done():
                await asyncio.sleep(0)  # the next request arrived with this one; all other connections come first

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
        if self._taken is not None:  # rare
            await self._drain()

    async def stream(self, message: Message, kind: str, pieces: AsyncIterator[bytes]) -> None:
        """Send an answer in pieces, each after the kernel has taken the previous one. Raises ConnectionResetError."""
        framing = b"" if message.old else b"Transfer-Encoding: chunked\r\n"
        with ExitStack() as on_failure:
            on_failure.callback(self.abort)  # a part of an answer was sent, and no other answer can follow it
            head = _head(200, kind, clock.second(), message.close or self.parting or self._last)
            await self._write(b"%b%b\r\n" % (head, framing))
            if message.method != "HEAD":
                await self._write_all(message, pieces)
            on_failure.pop_all()

    async def _write_all(self, message: Message, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            await self._write(piece if message.old else b"%x\r\n%b\r\n" % (len(piece), piece))
        if not message.old:
            await self._write(b"0\r\n\r\n")

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
