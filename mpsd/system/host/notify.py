"""The data that a service manager passes to mpsd at its start, and mpsd's notifications: systemd's protocols.

Sources: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3). The variables are removed from the environment, since
programs that mpsd starts must not speak in its name.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Final, Self

from mpsd.core.errors import ConfigurationError
from mpsd.system import clock
from mpsd.system.host.journal import Journal, is_behind

_FIRST: Final = 3
"""The first descriptor that is passed (SD_LISTEN_FDS_START)."""

_STDERR: Final = 2

_HINT: Final = "start mpsd through its units, or without systemd: mpsd run"


class ServiceManager:
    """The manager that started mpsd; without an address, notifications are dropped."""

    def __init__(
        self,
        address: str | None = None,
        *,
        watchdog: float | None = None,
        listener: socket.socket | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`address` is the destination of notifications."""
        self.watchdog = watchdog
        """Seconds without a notification after which the manager restarts mpsd; None without a watchdog."""
        self.listener = listener
        """The socket that was listening before mpsd started, and still listens after it ends."""
        self.journal = journal
        """The journal, where mpsd's log goes to it."""
        self._address = address if address is None or address[0] != "@" else f"\0{address[1:]}"
        self._unsent: tuple[str, ...] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Self:
        """Read what the manager passed, and remove it from the environment.

        Raises ConfigurationError for invalid values.
        """
        address = environ.pop("NOTIFY_SOCKET", None) or None
        if address is not None and address[0] not in "@/":
            raise ConfigurationError(f"NOTIFY_SOCKET={address} is not a unix socket", hint=_HINT)
        watchdog = _number(environ, "WATCHDOG_USEC")
        if _number(environ, "WATCHDOG_PID") not in {None, os.getpid()}:
            watchdog = None
        count = _number(environ, "LISTEN_FDS") or 0
        if _number(environ, "LISTEN_PID") != os.getpid():
            count = 0
        environ.pop("LISTEN_FDNAMES", None)
        if count > 1:
            raise ConfigurationError(f"systemd passed {count} sockets, but mpsd uses only one", hint=_HINT)
        return cls(
            address,
            watchdog=watchdog / 1_000_000 if watchdog else None,
            listener=_listener() if count else None,
            journal=Journal() if is_behind(_STDERR, environ.get("JOURNAL_STREAM", "")) else None,
        )

    @property
    def listens(self) -> bool:
        """Whether the manager receives notifications."""
        return self._socket is not None

    def notify(self, *assignments: str) -> None:
        """Send assignments such as `READY=1`; what a busy manager cannot take is sent with the next ones.

        mpsd does not wait for the manager, and continues where it is gone.
        """
        if self._socket is None or self._address is None:
            return
        lines = (*self._unsent, *assignments)
        self._unsent = ()
        try:
            self._socket.sendto(
                "\n".join(lines).encode(errors="backslashreplace"),
                socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
                self._address,
            )
        except BlockingIOError:
            # Only the latest value of each name counts, and a late watchdog notification has no value.
            latest = {line.partition("=")[0]: line for line in lines if not line.startswith("WATCHDOG=")}
            self._unsent = tuple(latest.values())
        except OSError:
            return

    def notify_reloading(self) -> None:
        """Announce a reload; the next `READY=1` ends it."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={int(clock.monotonic() * 1_000_000)}")

    def close(self) -> None:
        """Send no more notifications."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.journal is not None:
            self.journal.close()


def _number(environ: MutableMapping[str, str], name: str) -> int | None:
    text = environ.pop(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"{name}={text} is not a number", hint=_HINT)
    return int(text)


def _listener() -> socket.socket:
    """Return the listening unix socket that was passed. Raises ConfigurationError."""
    with contextlib.suppress(OSError):
        listener = socket.socket(fileno=_FIRST)
        listener.set_inheritable(False)
        listener.setblocking(False)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and listener.family == socket.AF_UNIX and listener.type == socket.SOCK_STREAM:
            return listener
        listener.detach()
    raise ConfigurationError(
        "the socket that systemd passed is not a listening unix socket (ListenStream=)", hint=_HINT
    )
