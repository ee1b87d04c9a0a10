"""The sockets that listen at a path, and those that are connected there, in the kernel's tables."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.processes import process_table
from mpsd.system.sockets import sock_diag


def inode(of: socket.socket) -> int:
    """Return the inode of a socket, as /proc/PID/fd has it."""
    return os.fstat(of.fileno()).st_ino


@contextlib.contextmanager
def unix(kind: socket.SocketKind) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, kind) as made:
        yield made


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_listener_and_peer(short_tmp: Path, kind: socket.SocketKind) -> None:
    """The listening and the connected socket are distinguished, and each is found as its process.

    The queries do not connect to the listener.
    """
    path = short_tmp / "s"
    with unix(kind) as listener, unix(kind) as peer:
        assert sock_diag.listening(path) == frozenset()
        listener.bind(os.fspath(path))
        assert sock_diag.listening(path) == frozenset()
        listener.listen()
        listener.setblocking(False)
        assert sock_diag.listening(path) == {inode(listener)}
        with pytest.raises(BlockingIOError):
            listener.accept()
        peer.connect(os.fspath(path))
        with listener.accept()[0]:
            assert sock_diag.connected(path) == {inode(peer)}
        assert process_table.holding([inode(listener), 1]) == {os.getpid(): {inode(listener)}}
        assert process_table.holding([]) == {}


SHARING: Final = """
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (18000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.setresgid(2602, 2602, 2602)
os.setresuid(2602, 2602, 2602)
for _ in range(17900):
    os.dup(0)
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
for _ in range(400):
    if ctypes.CDLL(None).syscall(clone, 0x400 | 17, 0, 0, 0, 0) == 0:  # CLONE_FILES, SIGCHLD
        os.read(0, 1)
        os._exit(0)
print(flush=True)
for _ in range(400):
    os.wait()
"""
"""A user's processes that share one table of descriptors: seven million links in /proc, at the cost of few."""


@pytest.mark.root("be another user")
def test_many_descriptors() -> None:
    """A user with any number of descriptors delays nobody, and the sockets of other users' processes are found."""
    popen: Any = subprocess.Popen([sys.executable, "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with unix(socket.SOCK_STREAM) as own, popen as process:
        assert process.stdout.readline() == b"\n"
        began = time.thread_time()  # which does not pass while other processes have the processor
        assert process_table.holding([inode(own)]) == {os.getpid(): {inode(own)}}
        assert time.thread_time() - began < 10
        process.communicate()


def test_name_is_no_evidence(short_tmp: Path) -> None:
    """A socket that was bound to this path and then removed or replaced does not count."""
    path = short_tmp / "s"
    with unix(socket.SOCK_STREAM) as old, unix(socket.SOCK_STREAM) as new:
        old.bind(os.fspath(path))
        old.listen()
        path.rename(short_tmp / "moved")
        new.bind(os.fspath(path))
        new.listen()
        assert sock_diag.listening(path) == {inode(new)}
        assert sock_diag.listening(short_tmp / "moved") == {inode(old)}
        path.unlink()
        assert sock_diag.listening(path) == frozenset()


def test_many(short_tmp: Path) -> None:
    """A socket is found among more than fit into one message of the kernel."""
    with contextlib.ExitStack() as open_sockets:
        made = [open_sockets.enter_context(unix(socket.SOCK_STREAM)) for _ in range(700)]
        for number, each in enumerate(made):
            each.bind(os.fspath(short_tmp / f"{number}"))
            each.listen()
        assert sock_diag.listening(short_tmp / "650") == {inode(made[650])}
