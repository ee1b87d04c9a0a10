"""Doctor's readers of the history and the metrics: real files, listeners and units."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mpsd.core.configuration.document import parse
from mpsd.core.doctor.observed_records import ListenerSeen, StoreSeen, TextfileSeen
from mpsd.core.model import Known, Unknown
from mpsd.core.settings import Settings
from mpsd.system.doctor import records

METRICS = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nmpsd_up 1\n"


def store_at(path: Path) -> StoreSeen:
    found = records.look_at_store(path)
    assert isinstance(found, Known)
    return found.value


def test_store(tmp_path: Path) -> None:
    """A store has its owner, its mode, the size with its write-ahead log, and the age of the last write to either."""
    path = tmp_path / "accounts.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(84))
    path.chmod(0o640)
    os.utime(path, (time.time() - 500, time.time() - 500))
    found = store_at(path)
    assert (found.kind, found.mode, found.bytes) == ("file", 0o640, 100)
    assert found.owner == found.directory_owner == os.geteuid()
    assert found.age == pytest.approx(500, abs=60)
    assert found.is_sqlite == Known(value=True)
    (tmp_path / "accounts.db-wal").write_bytes(bytes(1000))
    found = store_at(path)
    assert found.bytes == 1100
    assert found.age < 60
    path.write_bytes(b"something else")
    found = store_at(path)
    assert found.is_sqlite == Known(value=False)


def test_no_store(tmp_path: Path) -> None:
    """A store that does not exist, and one that is no file."""
    path = tmp_path / "accounts.db"
    found = store_at(path)
    assert found.kind is None
    path.symlink_to("/dev/null")
    found = store_at(path)
    assert found.kind == "symbolic link"
    assert isinstance(records.look_at_store(path / "x" / "accounts.db"), Unknown)


@contextmanager
def answering(answer: bytes, host: str = "127.0.0.1") -> Iterator[int]:
    """Listen, and give one connection this answer; yield the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(timeout=30)
        assert not thread.is_alive()


def listening(address: str) -> Settings:
    """Return settings with a TCP listener for the metrics."""
    return parse(f'[metrics]\nlisten = "{address}"\n')


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (METRICS, ""),
        (METRICS.replace(b"mpsd_", b"node_"), "the answer is not of mpsd"),
        (METRICS.replace(b"200 OK", b"404 No"), "the answer has status 404"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP (BadStatusLine)"),
    ],
)
def test_listener(answer: bytes, refused: str) -> None:
    """The metrics are read as Prometheus reads them; another program on the port is none of mpsd's."""
    with answering(answer) as port:
        found = records.look_at_listener(listening(f"0.0.0.0:{port}"), os.getpid())
    assert found == Known(ListenerSeen(f"127.0.0.1:{port}", refused))


def test_listener_of_ipv6() -> None:
    """An IPv6 address is written as in a URL."""
    with answering(METRICS, "::1") as port:
        found = records.look_at_listener(listening(f"[::]:{port}"), None)
    assert found == Known(ListenerSeen(f"[::1]:{port}"))


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"", b""), (b"", b"x"), (b"HTTP/1.1 200 OK\r\nX-A: ", b"x"), (b"HTTP/1.1 200 OK\r\n\r\n", b"x")],
)
def test_listener_without_end(begin: bytes, more: bytes) -> None:
    """A program that sends nothing, or a byte now and then, does not hold up doctor."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                connection.sendall(begin)
                while not over.wait(0.1):
                    connection.sendall(more)

        thread = threading.Thread(target=serve)
        thread.start()
        found = records.look_at_listener(listening(f"127.0.0.1:{port}"), None, deadline=0.5)
        over.set()
        thread.join(timeout=30)
    assert found == Known(ListenerSeen(f"127.0.0.1:{port}", "there is no whole answer after 0.5 s"))


def test_no_listener() -> None:
    """Without `metrics.listen` there is nothing to read; a closed port refuses."""
    assert records.look_at_listener(Settings(), None) == Known(None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = records.look_at_listener(listening(f"127.0.0.1:{port}"), None)
    assert found == Known(ListenerSeen(f"127.0.0.1:{port}", "Connection refused"))


def textfile_of(units: dict[str, dict[str, str]]) -> TextfileSeen:
    found = records.look_at_textfile(Known(units))
    assert isinstance(found, Known)
    assert found.value is not None
    return found.value


def test_textfile(tmp_path: Path) -> None:
    """The file is the one that the unit names; without the unit there is none."""
    path = tmp_path / "mpsd.prom"
    shown = f"{{ path=/usr/bin/mpsctl ; argv[]=/usr/bin/mpsctl metrics --textfile {path} ; ignore_errors=no }}"
    units = {"mpsd-textfile.service": {"ExecStart": shown}, "mpsd-textfile.timer": {"ActiveState": "active"}}
    found = textfile_of(units)
    assert (found.path, found.timer, found.unfit, found.age) == (path, "active", "", None)
    path.touch()
    found = textfile_of(units)
    assert found.age == pytest.approx(0, abs=60)
    gone = shown.replace(str(path), f"{tmp_path}/gone/mpsd.prom")
    found = textfile_of({"mpsd-textfile.service": {"ExecStart": gone}})
    assert (found.timer, found.unfit) == ("", "No such file or directory")
    assert records.look_at_textfile(Known({})) == Known(None)
    assert isinstance(records.look_at_textfile(Unknown("no systemd")), Unknown)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("{ path=/x ; argv[]=/x metrics --textfile=/a/b.prom --users ; ignore_errors=no }", Path("/a/b.prom")),
        ("{ path=/x ; argv[]=/x metrics ; ignore_errors=no }", None),
        ("{ path=/x ; argv[]=/x metrics --textfile ; ignore_errors=no }", None),
        ("{ path=/x ; argv[]=/x 'half ; ignore_errors=no }", None),
        ("", None),
    ],
)
def test_command(command: str, path: Path | None) -> None:
    """The option is found in the notation of `systemctl show`, if it is there."""
    assert records.textfile_of(command) == path
