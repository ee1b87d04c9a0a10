"""The journal of systemd, in its native protocol: entries of fields instead of lines.

Source: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/. mpsd never waits for the journal, and works without it.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

_SOCKET: Final = "/run/systemd/journal/socket"

_LONGEST: Final = 8 * 1024
"""Maximum bytes of one value: an entry fits into a datagram, and texts of other users cannot fill the disk."""


def is_behind(descriptor: int, stream: str) -> bool:
    """Tell whether a descriptor leads to the journal, by the device and inode in JOURNAL_STREAM.

    The process that started mpsd may have inherited the variable and redirected this descriptor (systemd.exec(5)).
    """
    if not stream:
        return False
    found = os.fstat(descriptor)
    return stream == f"{found.st_dev}:{found.st_ino}"


class Journal:
    def __init__(self, path: str = _SOCKET) -> None:
        self.gap: Callable[[int], bytes] = lambda _: b""
        """Makes the entry that reports how many entries were lost before it."""
        self.lost = 0
        """Entries lost since mpsd started."""
        self._not_logged = 0
        """Lost entries that no entry in the journal reports yet."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def write(self, entry: bytes) -> None:
        """Send an entry, or drop and count it: a lost entry must not disturb mpsd."""
        if self._not_logged and self._sent(self.gap(self._not_logged)):
            self._not_logged = 0
        if self._not_logged or not self._sent(entry):
            self.lost += 1
            self._not_logged += 1

    def _sent(self, entry: bytes) -> bool:
        with contextlib.suppress(OSError):
            self._socket.sendto(entry, self._path)
            return True
        return False

    def close(self, _: float = 0.0) -> None:
        """Close the socket; no entry is ever queued."""
        self._socket.close()


def entry(fields: Mapping[str, str]) -> bytes:
    """Return an entry of these fields."""
    return b"".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if len(data) > _LONGEST:
        data = data[: _LONGEST - 3].decode(errors="ignore").encode() + b"..."
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
