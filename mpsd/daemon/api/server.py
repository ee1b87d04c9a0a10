"""The API of one node: HTTP/1.1 on a unix socket, from the route table; when it opens, and how it closes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from mpsd.core.reload import ReloadResult
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.api.dispatcher import Dispatcher
from mpsd.daemon.api.routes import ROUTES, Handlers
from mpsd.daemon.http.listener import Listener
from mpsd.daemon.metrics.collector import Collector
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.log import Logger

_SHUTDOWN: Final = 1.0
"""Seconds that the answers in progress may take when mpsd ends."""

_LAST_WORDS: Final = 1.0
"""Seconds that open connections have for a request, when the next mpsd will answer all others."""

_PAUSE: Final = 0.1
"""Seconds without a request after which a connection is idle, and not just between two requests."""


class Api:
    """The HTTP side of one node."""

    def __init__(
        self,
        node: Node,
        events: Events,
        accountant: Accountant,
        collector: Collector,
        *,
        log: Logger,
        reload: Callable[[], Awaitable[ReloadResult]],
    ) -> None:
        """`reload` reads the configuration again. Raises ConfigurationError."""
        self._node = node
        self._log = log
        handlers = Handlers(node, events, accountant, collector, reload=reload)
        self._dispatcher = Dispatcher(ROUTES, handlers, node.settings, log)
        self._listener: Listener | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Answer on this socket until cancelled."""
        self._listener = Listener(self._dispatcher.receive, listener, self._log)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.accept(self._node.settings))
            group.create_task(self._listener.sweep())

    async def leave(self) -> None:
        """Stop accepting, and answer the open connections; new callers wait for the next mpsd.

        It is for a socket that outlives mpsd, so that no caller misses anything.
        """
        if self._listener is not None:
            self._listener.shut()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await asyncio.sleep(_PAUSE)
                    await self._listener.wait_for_requests()

    async def close(self) -> None:
        """Finish the answers in progress, and stop; a second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.empty(_SHUTDOWN)
