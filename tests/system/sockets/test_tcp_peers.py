"""The owner of a loopback connection, from the kernel."""

import os
import socket
import subprocess
import sys
from typing import Final

import pytest

from mpsd.system.sockets.sock_diag import tcp_uid
from tests.daemon.caller import NOBODY, needs_root

_STRANGER: Final = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
connection = socket.socket()
connection.connect(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
sys.stdin.read()
"""


def listening(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on a loopback address."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_own(address: str) -> None:
    """A connection of this process belongs to its user, for a query about either end."""
    with listening(address) as listener, socket.create_connection(listener.getsockname()[:2]) as client:
        server, peer = listener.accept()
        with server:
            assert tcp_uid(peer, listener.getsockname()) == os.geteuid()
            assert tcp_uid(listener.getsockname(), peer) == os.geteuid()
            assert client.getsockname() == peer


@needs_root
def test_of_another() -> None:
    """A connection of another user belongs to that user; once closed, it belongs to no user, and not to root."""
    with listening() as listener:
        command = [sys.executable, "-I", "-c", _STRANGER, f"{listener.getsockname()[1]}", f"{NOBODY}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "\n"
            server, peer = listener.accept()
            with server:
                assert tcp_uid(peer, listener.getsockname()) == NOBODY
                stranger.communicate()
                assert server.recv(1) == b""  # the other end is closed, and the kernel has no user of it any more
                assert tcp_uid(peer, listener.getsockname()) is None


def test_none() -> None:
    """A missing connection belongs to no user."""
    with listening() as listener:
        assert tcp_uid(("127.0.0.1", 1), listener.getsockname()) is None
