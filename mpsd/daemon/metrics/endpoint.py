"""The TCP listener for Prometheus. It serves GET /metrics only; every caller that reaches it gets the answer.

Callers are not authenticated, so any of them may be hostile. The listener limits the connections, and closes each after
one answer or a few seconds. It gathers the metrics at most once a second, so a flood of requests hardly delays leases.
"""

import asyncio
import contextlib
from typing import Final

from mpsd.core.events import EventName
from mpsd.core.setting_parsers import address_of
from mpsd.daemon.http.listener import Listener
from mpsd.daemon.http.message import Answer, Message, unroutable
from mpsd.daemon.metrics.collector import Collector, negotiated
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.sockets import listeners

_PATH: Final = "/metrics"
_METHODS: Final = ("GET", "HEAD")

_MOST: Final = 32
"""Connections at a time."""

_FRESH: Final = 1.0
"""Seconds for which an answer is reused."""

_PAUSES: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, *(60.0,) * 60)
"""Seconds between two attempts to listen while another process has the port: an hour in total."""

_HINT: Final = "free the port, or set another (metrics.listen) and restart mpsd; under systemd it needs mpsd-tcp.conf"


class Endpoint:
    """The TCP listener of one node, if the configuration has one."""

    def __init__(self, node: Node, collector: Collector, log: Logger) -> None:
        self._settings = node.settings
        self._collector = collector
        self._log = log
        self._answers: dict[tuple[str, bool], tuple[float, bytes]] = {}
        """By format, and whether users are in it: the time until which the last answer is reused, and that answer."""
        self._gathering = asyncio.Lock()
        """Held while the answer is found, so that callers that come meanwhile reuse it."""

    async def run(self) -> None:
        """Serve until cancelled. Return at once without a configured address, and after an hour without the port."""
        address = self._settings.current.metrics.listen
        if not address:
            return
        for attempt, pause in enumerate(_PAUSES):
            try:
                listening = listeners.listen_tcp(*address_of(address))
            except OSError as error:
                because = f"mpsd cannot listen on {address} for Prometheus: {error.strerror}"
                self._collector.trouble = f"{because}; {_HINT}"
                if attempt == 0:
                    self._log.warning(EventName.METRICS_NOT_LISTENING, address=address, because=because, hint=_HINT)
                await asyncio.sleep(pause)
                continue
            self._collector.trouble = ""
            self._log.info(EventName.METRICS_LISTENING, address=address)
            with contextlib.closing(listening):
                listener = Listener(self._receive, listening, self._settings, self._log, most=_MOST)
                try:
                    await listener.run()
                finally:
                    await listener.empty(0)
            return
        because = f"mpsd no longer tries to listen on {address} for Prometheus"
        self._log.error(EventName.METRICS_NOT_LISTENING, address=address, because=because, hint=_HINT)

    async def _receive(self, message: Message) -> None:
        """Answer a request, and close the connection. Raises ConnectionResetError if the caller has closed it."""
        message.close = True
        if message.trouble is not None or message.path != _PATH or message.method not in _METHODS:
            answer = unroutable(message, _METHODS if message.path == _PATH else ())
        else:
            media_type = negotiated(message.accept)
            answer = Answer(200, await self._metrics(media_type), media_type)
        await message.connection.send(message, answer)

    async def _metrics(self, media_type: str) -> bytes:
        users = self._settings.current.metrics.users
        async with self._gathering:
            now = clock.monotonic()
            until, text = self._answers.get((media_type, users), (0.0, b""))
            if now >= until:
                text = await self._collector.answer(media_type, (lambda _: True) if users else None)
                self._answers[media_type, users] = now + _FRESH, text
            return text
