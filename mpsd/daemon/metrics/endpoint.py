"""The TCP listener for Prometheus: GET /metrics and nothing else, for whoever can reach it.

Callers are not known, so each may be hostile. Few are connected at a time, each for one answer and some seconds, and
the metrics are gathered once a second at most: a flood of them costs leases nothing that matters.
"""

import asyncio
import contextlib
from typing import Final

from mpsd.core.metrics import exposition
from mpsd.core.setting_parsers import address_of
from mpsd.daemon.http.listener import Listener
from mpsd.daemon.http.message import Answer, Message
from mpsd.daemon.http.problems import unroutable
from mpsd.daemon.metrics.collector import Collector
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, tcp_listener

_PATH: Final = "/metrics"
_METHODS: Final = ("GET", "HEAD")

_MOST: Final = 32
"""Connections at a time."""

_FRESH: Final = 1.0
"""Seconds for which an answer is given again."""

_PAUSES: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, *(60.0,) * 60)
"""Seconds between two attempts to listen where another process has the port: an hour in all."""

_HINT: Final = "free the port, or set another (metrics.listen) and restart mpsd; under systemd it needs mpsd-tcp.conf"


class Endpoint:
    """The metrics of one node on TCP, if its configuration says so."""

    def __init__(self, node: Node, collector: Collector, log: Logger) -> None:
        self._settings = node.settings
        self._collector = collector
        self._log = log
        self._answers: dict[tuple[str, bool], tuple[float, bytes]] = {}
        """By form, and whether users are in it: the last answer, and until when it is given."""

    async def run(self) -> None:
        """Serve until cancelled; return at once where there is nothing to serve, and where no port is to be had."""
        address = self._settings.current.metrics.listen
        if not address:
            return
        for attempt, pause in enumerate(_PAUSES):
            try:
                listening = tcp_listener.listen(*address_of(address))
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
                listener = Listener(self._receive, listening, self._log, most=_MOST)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(listener.accept(self._settings))
                        group.create_task(listener.sweep())
                finally:
                    await listener.empty(0)
            return
        because = f"mpsd no longer tries to listen on {address} for Prometheus"
        self._log.error(EventName.METRICS_NOT_LISTENING, address=address, because=because, hint=_HINT)

    async def _receive(self, message: Message) -> None:
        """Answer a request, and hang up. Raises ConnectionResetError when its caller has hung up."""
        message.close = True
        if message.trouble or message.path != _PATH or message.method not in _METHODS:
            answer = unroutable(message, _METHODS if message.path == _PATH else ())
        else:
            media_type = exposition.negotiated(message.accept)
            answer = Answer(200, self._metrics(media_type), media_type)
        await message.connection.send(message, answer)

    def _metrics(self, media_type: str) -> bytes:
        users, now = self._settings.current.metrics.users, clock.monotonic()
        until, text = self._answers.get((media_type, users), (0.0, b""))
        if now >= until:
            text = self._collector.answer(media_type, (lambda _: True) if users else None)
            self._answers[media_type, users] = now + _FRESH, text
        return text
