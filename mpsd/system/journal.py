"""The journal of systemd, spoken to in its own protocol: fields, not lines.

Source: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/. mpsd never waits for the journal, and lives on without it.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

_SOCKET: Final = "/run/systemd/journal/socket"

_LONGEST: Final = 8 * 1024
"""Bytes of one value that are kept: all of an entry's fit into a datagram, and what others wrote fills no disk."""


def is_behind(descriptor: int, stream: str) -> bool:
    """Tell whether a descriptor leads to the journal, as JOURNAL_STREAM says by device and inode.

    Who started mpsd may have inherited the variable, and sent this descriptor elsewhere (systemd.exec(5)).
    """
    if not stream:
        return False
    found = os.fstat(descriptor)
    return stream == f"{found.st_dev}:{found.st_ino}"


class Journal:
    """The way to the journal."""

    def __init__(self, path: str = _SOCKET) -> None:
        self.gap: Callable[[int], Mapping[str, str]] | None = None
        """Makes the entry that tells how many were lost before it."""
        self.lost = 0
        """Entries that were lost since mpsd started."""
        self._not_logged = 0
        """Those of them that the journal does not tell of yet."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def send(self, fields: Mapping[str, str]) -> None:
        """Send an entry, or drop it and count it: one that is lost must not hurt mpsd."""
        if self._not_logged and self.gap is not None and self._sent(self.gap(self._not_logged)):
            self._not_logged = 0
        if self._not_logged or not self._sent(fields):
            self.lost += 1
            self._not_logged += 1

    def _sent(self, fields: Mapping[str, str]) -> bool:
        with contextlib.suppress(OSError):
            self._socket.sendto(b"".join(_field(name, value) for name, value in fields.items()), self._path)
            return True
        return False

    def close(self, _: float = 0.0) -> None:
        """Send nothing any more; no entry waits."""
        self._socket.close()


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if len(data) > _LONGEST:
        data = data[: _LONGEST - 3].decode(errors="ignore").encode() + b"..."
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
