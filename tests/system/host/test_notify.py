"""A service manager's variables are taken once, invalid ones are refused, and notifications arrive in time."""

import os
import socket
from pathlib import Path

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.system.host.notify import ServiceManager


def test_everything_is_taken(short_tmp: Path) -> None:
    """The variables are removed from the environment; those for another process are ignored."""
    own = {"NOTIFY_SOCKET": f"{short_tmp}/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    handed = {"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": ""}
    environ = {**own, **handed, "PATH": "/bin"}
    manager = ServiceManager.take(environ)
    assert environ == {"PATH": "/bin"}
    assert manager.watchdog == 2
    assert manager.listener is None
    manager.close()
    other = ServiceManager.take({**own, "WATCHDOG_PID": "1", "LISTEN_FDS": "1", "LISTEN_PID": "1"})
    assert other.watchdog is None
    assert other.listener is None
    other.close()


def test_nobody(short_tmp: Path) -> None:
    """Without a service manager there are no notifications, and there is no watchdog."""
    manager = ServiceManager.take({})
    assert not manager.listens
    assert manager.watchdog is None
    manager.notify("READY=1")
    assert not list(short_tmp.iterdir())


@pytest.mark.parametrize(
    "environ",
    [
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"},
        {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())},
        {"LISTEN_FDS": "-1", "LISTEN_PID": str(os.getpid())},
    ],
)
def test_nonsense(environ: dict[str, str]) -> None:
    """An invalid variable is refused by name."""
    with pytest.raises(ConfigurationError):
        ServiceManager.take(environ)


def test_busy_manager(short_tmp: Path) -> None:
    """Notifications that a busy manager did not accept are sent with the next one: of each kind the latest.

    An old sign of life is dropped.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(f"{short_tmp}/notify")
        ears.setblocking(False)
        manager = ServiceManager(f"{short_tmp}/notify")
        for number in range(1000):  # more than the kernel buffers for it
            manager.notify(f"STATUS={number}")
        manager.notify("READY=1", "STATUS=latest", "WATCHDOG=1")
        heard = []
        while True:
            try:
                heard.append(ears.recv(4096))
            except BlockingIOError:
                break
        assert heard[0] == b"STATUS=0"
        assert len(heard) < 1000
        manager.notify("STOPPING=1")
        assert ears.recv(4096) == b"STATUS=latest\nREADY=1\nSTOPPING=1"
        manager.close()
