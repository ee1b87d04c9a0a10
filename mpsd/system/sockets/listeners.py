"""The sockets that mpsd listens on: its API's, with its final owner and mode at once, and a TCP port for metrics."""

import os
import socket
import stat
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError

_BACKLOG: Final = 64
"""Connections of scrapers that wait; the API's socket has room for 1024."""


def publish(path: Path, mode: int, gid: int | None) -> socket.socket:
    """Return a listening unix socket that appears at `path` with its final owner and mode.

    An existing file there is replaced: the lock proves that no living mpsd uses it. Without a group the socket
    gets mpsd's own. Raises ConfigurationError.
    """
    hidden = path.with_name(f".{os.getpid()}")  # as short as the usual name: a socket's path is limited in length
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        hidden.unlink(missing_ok=True)
        listener.bind(os.fspath(hidden))
        hidden.chmod(mode)
        if gid is not None:
            os.chown(hidden, -1, gid)
        listener.listen(1024)
        hidden.rename(path)
    except OSError as error:
        listener.close()
        hidden.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror}", hint="check api.socket") from error
    return listener


def check_published(listener: socket.socket, path: Path, mode: int, group: str, gid: int | None) -> None:
    """Refuse a listening socket of the service manager that differs from the settings.

    Raises ConfigurationError. The socket is not changed, since it is not mpsd's own.
    """
    if (name := os.fsdecode(listener.getsockname())) != os.fspath(path):
        raise ConfigurationError(
            f"systemd passed the socket {name}, but api.socket is {path}",
            hint=f"set ListenStream={path} in mpsd.socket (systemctl edit mpsd.socket), or change api.socket",
            limit="api.socket",
        )
    found = path.stat()
    if stat.S_IMODE(found.st_mode) != mode:
        raise ConfigurationError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, but api.mode is {mode:04o}",
            hint=f"set SocketMode={mode:04o} in mpsd.socket (systemctl edit mpsd.socket), or change api.mode",
            limit="api.mode",
        )
    if gid is not None and found.st_gid != gid:
        raise ConfigurationError(
            f"{path} has group {found.st_gid}, but api.group is {group!r}",
            hint=f"set SocketGroup={group} in mpsd.socket (systemctl edit mpsd.socket), or change api.group",
            limit="api.group",
        )


def unpublish(path: Path) -> None:
    """Remove the socket's name, so that new connections fail at once.

    The lock is still held, so no other mpsd can have published a socket under this name meanwhile.
    """
    path.unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a numeric address. Raises OSError, such as for a port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
