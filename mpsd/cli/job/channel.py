"""The connection between a rank and the keeper of its job: one JSON object in each packet."""

import json
import select
from collections.abc import Mapping
from socket import MSG_DONTWAIT, MSG_NOSIGNAL, socket
from typing import Any, Final, TypeAlias

Message: TypeAlias = dict[str, Any]

_LARGEST: Final = 128 * 1024
"""Bytes of the largest packet: an environment, or a sentence."""


class Channel:
    """One end of such a connection. The kernel closes it with its process."""

    def __init__(self, connection: socket) -> None:
        self.connection = connection
        self.is_over = False
        """Whether the other end has closed."""

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self.connection.fileno()

    def tell(self, **message: object) -> None:
        """Send a message; nothing where the other end is gone, which `hear` reports."""
        try:
            self.connection.send(json.dumps(message).encode(), MSG_NOSIGNAL)
        except OSError:
            self.is_over = True

    def hear(self) -> Message | None:
        """Return the next message if there is one; None otherwise, and for good once the other end has closed."""
        try:
            packet = self.connection.recv(_LARGEST, MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            self.is_over = True
            return None
        found: Mapping[str, object] = json.loads(packet)
        return dict(found)

    def wait(self, *others: int, seconds: float | None = None) -> list[int]:
        """Wait until this connection, or one of the other descriptors, is readable, and return those."""
        poll = select.poll()
        for each in (self.fileno(), *others):
            poll.register(each, select.POLLIN)
        return [number for number, _ in poll.poll(None if seconds is None else max(seconds, 0.0) * 1000)]

    def close(self) -> None:
        self.connection.close()
