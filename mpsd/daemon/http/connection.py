"""HTTP/1.1 on one connection: httptools reads what comes in, and its requests are answered one after the other.

What mpsd has no use for is not there: nothing is decompressed, no other protocol is spoken, and what comes behind a
request waits, unread, until that is answered. Whoever is connected costs a few KiB, whatever it sends and however fast.
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
"""Bytes of a request before its body."""

_LARGEST: Final = 1024 * 1024
"""Bytes of a request in all, with what frames the chunks of a body, and follows them.

What exceeds `MAXIMUM_BODY` is read so far and dropped, for its caller to get as far as reading why it was refused: one
that is cut off while it sends gets an error of its own (ECONNRESET, EPIPE) instead.
"""

_BUFFER: Final = memoryview(bytearray(8 * 1024))
"""What was received last, on whichever connection: it is taken from here before anything else is received."""

_KEEP_ALIVE: Final = 75.0
"""Seconds for which a connection may idle between two requests, or take to send the next one."""

_SLOW: Final = 5.0
"""Seconds that a caller may take for what was sent to it."""

_VERSIONS: Final = {"1.0", "1.1"}

_NO_CONTENT: Final = int(http.HTTPStatus.NO_CONTENT)


class Connection(asyncio.BufferedProtocol):
    """One connection, and who is at the other end."""

    def __init__(
        self,
        peer: Peer,
        serve: Callable[[Message], Awaitable[None]],
        inside: "set[Connection]",
        patience: float,
    ) -> None:
        """Begin. `patience` is how many seconds the first request may take to come.

        `serve` answers a request, through `send` or `stream`, and is cancelled when nobody waits for the answer any
        more. While it lasts, the connection is `inside`.
        """
        self.peer = peer
        self.deadline = clock.monotonic() + patience
        """When to hang up, for want of a request."""
        self.spoken = asyncio.get_running_loop().create_future()
        """Done when a first request has come, or will not."""
        self.task: asyncio.Task[None] | None = None
        """Answers its requests, for as long as it lasts."""
        self.is_answering = False
        """Whether a request is in hand."""
        self._in_hand: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        """The request that is, or the next one that will be."""
        self._serve = serve
        self._inside = inside
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._expects = False
        self._accept = b""
        self._trace = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = b""
        """The head of a request that offers another protocol, without the offer."""
        self._size = 0
        """Bytes that have come of the request that is being received."""
        self._coming: Message | None = None
        """The request of which the body is being received."""
        self._next: deque[Message] = deque()
        """Requests to be answered; those behind the first came with it, in as many bytes as are read at a time."""
        self._later = bytearray()
        """What came behind them."""
        self._last = False
        """Whether nothing more is answered."""
        self._ended = False
        """Whether its caller sends nothing more, and may be there to read all the same."""
        self.parting = False
        """Whether the next answer is the last, since somebody else answers soon."""
        self._taken: asyncio.Future[None] | None = None
        """For as long as something was sent that the kernel could not take yet: done when it has."""

    # -- what comes in -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to listen."""
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclasses of it
        self.task = asyncio.get_running_loop().create_task(self._live())
        self._inside.add(self)
        transport.set_write_buffer_limits(0)  # what the kernel does not take is waited for

    def connection_lost(self, _: Exception | None) -> None:
        """Stop: its caller has hung up, or mpsd has."""
        self._transport, self._parser = None, None
        self._next.clear()
        if self.task is not None:
            self.task.cancel()
        if not self.spoken.done():
            self.spoken.set_result(None)
        self._inside.discard(self)
        self.peer.close()

    def get_buffer(self, _: int) -> memoryview:
        """Say where to put what comes in."""
        return _BUFFER

    def buffer_updated(self, size: int) -> None:
        """Read what has come in, unless something else is to be answered before."""
        data = _BUFFER[:size]
        if self._listens():
            self._read(data)
            self._go_on()
        else:
            self._later += data
            if len(self._later) >= len(_BUFFER) and self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Answer what has come all the same, unless nobody is left to read it; return whether anybody is."""
        if self.peer.has_left():
            return False
        self._ended = True
        self._go_on()
        return True

    def _listens(self) -> bool:
        """Tell whether what comes in now is a next request, or the rest of the one in hand."""
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
        """Have a request that offers another protocol read without the offer, and what comes behind its head.

        See `on_headers_complete`.
        """
        while True:
            head, self._head = self._head, b""
            if not head:
                self._parser = None  # CONNECT: what follows is for somebody else
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
        """Listen no more; why is said once what came before is answered."""
        self._parser = None
        message, self._coming = self._coming, None
        if message is None:
            message = Message(self, "", b"")
            self._next.append(message)
        message.close = True
        if len(message.body) <= MAXIMUM_BODY:  # or that is what is wrong with it
            message.trouble = message.trouble or because
        message.wake()

    def on_url(self, url: bytes) -> None:
        """Take up what a request is for, or some of it."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take up a header, or a trailer.

        Few of them matter: httptools knows how long a body is, and what ends a connection.
        """
        if self._coming is None:
            self._headers.append((name, value))
            match name.lower():
                case b"expect":
                    self._expects = self._expects or value.lower() == b"100-continue"
                case b"accept":
                    self._accept += b"," + value
                case b"traceparent":
                    self._trace += value  # two of them make one that is not valid

    def on_headers_complete(self) -> None:
        """Take up a request.

        httptools does not read the body of one that offers another protocol, since that may be spoken from there on.
        It is not, here; so the same head is read again without the offer.
        """
        parser = self._parser
        assert parser is not None  # noqa: S101 - it is calling
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade() and method != b"CONNECT":
            left = [b"%b: %b\r\n" % each for each in self._headers if each[0].lower() != b"upgrade"]
            self._head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version.encode(), b"".join(left))
        else:
            self._begin(parser, method.decode(), version)
        self._target, self._expects, self._accept, self._trace = b"", False, b"", b""
        self._headers.clear()

    def _begin(self, parser: httptools.HttpRequestParser, method: str, version: str) -> None:
        message = self._coming = Message(self, method, self._target)
        message.old = version == "1.0"
        if self._accept:
            message.accept = self._accept.decode(errors="replace")
        message.trace = self._trace
        message.expects = self._expects and not message.old  # which knows of no such word
        message.close = message.old or not parser.should_keep_alive()
        if version not in _VERSIONS:
            message.trouble, message.close = f"it is HTTP/{version}", True
        elif method == "CONNECT":
            message.trouble, message.close = "it asks for another connection (CONNECT)", True
        self._next.append(message)

    def on_body(self, body: bytes) -> None:
        """Take up some of a body."""
        if self._coming is not None and not self._coming.trouble:
            self._coming.take(body)

    def on_message_complete(self) -> None:
        """Take note that a request has come to its end."""
        if self._head:
            return  # it is about to be read again
        message, self._coming, self._size = self._coming, None, 0
        if message is not None:
            message.complete = True
            if self.is_answering:  # or nobody waits for its body yet
                message.wake()

    # -- what is answered ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answer the next request, or listen for it, or for the rest of the one in hand."""
        while self._transport is not None:
            if not self.is_answering and self._next and not self._last:
                self.is_answering, self.deadline = True, inf
                if not self.spoken.done():
                    self.spoken.set_result(None)
                self._in_hand.set_result(self._next.popleft())
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
                pass  # it has hung up, which is how followers leave, or it was too slow, and is not waited for
            finally:
                self.is_answering, self.deadline = False, clock.monotonic() + _KEEP_ALIVE
                self._last = self._last or self.parting or message.close
                self._go_on()
            if self._in_hand.done():
                await asyncio.sleep(0)  # the next one came with it; all others are asked first

    def leave(self) -> None:
        """Answer what is in hand, if anything is, and close."""
        self._last = True
        self._go_on()

    def was_left(self) -> bool:
        """Tell whether its caller has hung up where the loop does not notice, since nothing is read at the moment."""
        return self._transport is not None and not self._transport.is_reading() and self.peer.has_left()

    def abort(self) -> None:
        """Hang up."""
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
        if self._taken is not None:  # hardly ever
            await self._drain()

    async def stream(self, message: Message, kind: str, pieces: AsyncIterator[bytes]) -> None:
        """Send an answer piece by piece, none before the kernel has the last. Raises ConnectionResetError."""
        framing = b"" if message.old else b"Transfer-Encoding: chunked\r\n"
        with ExitStack() as on_failure:
            on_failure.callback(self.abort)  # half of an answer is on its way, which nothing else can follow
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
        """Have a caller send the body that it holds back. Raises ConnectionResetError."""
        await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _write(self, data: bytes) -> None:
        self._put(data)
        await self._drain()

    def _put(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the peer has disconnected")
        self._transport.write(data)

    async def _drain(self) -> None:
        if self._taken is None:
            return
        try:
            async with asyncio.timeout(_SLOW):
                await self._taken
        except TimeoutError:
            self.abort()
            raise ConnectionResetError(f"the peer has not read what was sent to it for {_SLOW:g} s") from None

    def pause_writing(self) -> None:
        """Have whoever sends wait: the kernel takes no more."""
        self._taken = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Go on: it has taken all."""
        taken, self._taken = self._taken, None
        if taken is not None and not taken.done():
            taken.set_result(None)


@lru_cache(64)
def _head(status: int, kind: str, second: int, last: bool) -> bytes:  # noqa: FBT001 - a cache takes no names for free
    """Return how an answer in this second begins; `last` tells whether nothing comes behind it."""
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second))
    media = "" if status == _NO_CONTENT else f"Content-Type: {kind}\r\n"
    close = "Connection: close\r\n" if last else ""
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nDate: {date}\r\n{media}{close}".encode()
