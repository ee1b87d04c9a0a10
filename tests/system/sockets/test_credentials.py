"""The process and user at the other end of a unix socket, as the kernel reports them."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.errors import NotPermittedError
from mpsd.system import clock
from mpsd.system.host.configuration import read_configuration, with_names
from mpsd.system.processes import foreign_files
from mpsd.system.processes.proc import start_ticks
from mpsd.system.sockets import credentials
from mpsd.system.sockets.credentials import PeerCredentials
from tests.harness import wait_until

NOBODY: Final = 65534
needs_root = pytest.mark.root("call as another user")

_CALLER: Final = """
import json, os, socket, sys
uid, groups = int(sys.argv[2]), json.loads(sys.stdin.readline())
if uid >= 0:
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin.read()
"""


@contextlib.contextmanager
def called(
    directory: Path, uid: int = -1, groups: tuple[int, ...] = ()
) -> Iterator[tuple[socket.socket, "subprocess.Popen[str]"]]:
    """Yield a connection of another process, and that process, which lives until its input ends."""
    path = directory / "listening"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        path.chmod(0o666)
        directory.chmod(0o711)
        listener.listen()
        listener.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CALLER, str(path), str(uid)], stdin=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        print(list(groups), file=process.stdin, flush=True)
        try:
            connection, _ = listener.accept()
            with connection:
                yield connection, process
        finally:
            process.kill()
            process.communicate()


def test_own_process(short_tmp: Path) -> None:
    """The peer is the process that connected, with its user."""
    with called(short_tmp) as (connection, process):
        assert credentials.peer_credentials(connection) == PeerCredentials(os.geteuid(), os.getegid(), process.pid)


@needs_root
def test_another_user(short_tmp: Path) -> None:
    """The peer's uid, gid and groups are those at the moment of its connection."""
    with called(short_tmp, NOBODY, (1, 2)) as (connection, process):
        who = credentials.peer_credentials(connection)
        assert who == PeerCredentials(NOBODY, NOBODY, process.pid)
        assert credentials.groups(connection, who) == {NOBODY, 1, 2}


@needs_root
@pytest.mark.parametrize("count", [0, 64, 65, 300, 1000, 65536])
def test_every_group(short_tmp: Path, count: int) -> None:
    """A peer in more groups than one query has room for has all of them, up to the kernel's limit."""
    with called(short_tmp, 54321, tuple(range(100000, 100000 + count))) as (connection, _):
        found = credentials.groups(connection, credentials.peer_credentials(connection))
        assert found == {54321, *range(100000, 100000 + count)}


def test_groups_that_cannot_be_read() -> None:
    """Groups are never guessed: without the kernel's answer the peer is refused, with a hint."""
    with socket.socket(socket.AF_UNIX) as nobody_s, pytest.raises(NotPermittedError) as refused:
        credentials.groups(nobody_s, PeerCredentials(0, 0, 0))
    assert "cannot be read" in refused.value.detail
    assert refused.value.hint


class TestNames:
    def test_look_up(self) -> None:
        """Users and groups are separate databases; an unknown name is reported, whatever its characters."""
        found = foreign_files.look_up(["root", "%root", "%no-such", "no-such", "\udcff", "a\0b"])
        assert (found.uids, found.gids) == ({"root": 0}, {"root": 0})
        assert found.unknown == ("%no-such", "no-such", "\udcff", "a\0b")

    def test_configuration(self, short_tmp: Path) -> None:
        """Names are looked up when a configuration is read; numbers and `*` are not."""
        path = short_tmp / "mpsd.toml"
        path.write_text('[roles]\nusers = ["*", "12", "%34"]\nadmins = ["nobody"]\n[quota."%gone"]\n[quota."7"]\n')
        names = asyncio.run(with_names(read_configuration(path))).names
        assert (names.uids, names.gids, names.unknown) == ({"nobody": NOBODY}, {}, ("%gone",))


def test_process_is_watched(short_tmp: Path) -> None:
    """mpsd watches the connected process by a descriptor that no child inherits, and sees its end."""
    with called(short_tmp) as (connection, process):
        watched = credentials.process_of(connection, credentials.peer_credentials(connection))
        assert watched is not None
        try:
            assert (watched.pid, watched.identity.start_ticks) == (process.pid, start_ticks(process.pid))
            assert not os.get_inheritable(watched._pidfd)
        finally:
            watched.close()


def test_process_that_is_gone(short_tmp: Path) -> None:
    """A peer that has ended, though its connection is still open, cannot be watched."""
    with called(short_tmp) as (connection, process):
        who = credentials.peer_credentials(connection)
        process.kill()
        process.communicate()
        wait_until(lambda: start_ticks(who.pid) is None, what="the caller to be gone")
        assert credentials.peer_credentials(connection) == who
        assert credentials.process_of(connection, who) is None


class TestWithoutPeerPidfd:
    """Kernels without a pidfd of the peer (before 6.5), and sockets without a peer."""

    @pytest.fixture
    def connection(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            with pytest.raises(OSError, match=r"No data available|Protocol not available|Invalid argument"):
                connection.getsockopt(socket.SOL_SOCKET, credentials._SO_PEERPIDFD)
            yield connection

    def test_by_pid(self, connection: socket.socket) -> None:
        """The process in the credentials is watched by its pid."""
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        try:
            watched = credentials.process_of(connection, PeerCredentials(0, 0, process.pid))
            assert watched is not None
            assert watched.identity.start_ticks == start_ticks(process.pid)
            watched.close()
        finally:
            process.communicate()
        assert credentials.process_of(connection, PeerCredentials(0, 0, process.pid)) is None

    def test_pid_of_another(self, connection: socket.socket) -> None:
        """A process that started after the connection was accepted is another one that reuses the peer's pid."""
        accepted = clock.since_boot() - 1
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        try:
            assert credentials.process_of(connection, PeerCredentials(0, 0, process.pid), accepted) is None
            later = credentials.process_of(connection, PeerCredentials(0, 0, process.pid), clock.since_boot())
            assert later is not None
            later.close()
        finally:
            process.communicate()

    def test_not_visible(self, connection: socket.socket) -> None:
        """A process outside mpsd's pid namespace has pid 0, which identifies no process."""
        assert credentials.process_of(connection, PeerCredentials(0, 0, 0)) is None
