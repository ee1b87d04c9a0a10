"""The history and the metrics from outside: the history's file, the TCP listener, and the file for node_exporter."""

import http.client
import os
import shlex
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Final

from mpsd.core.doctor.observed_records import ListenerSeen, StoreSeen, TextfileSeen
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.setting_parsers import address_of
from mpsd.core.settings import Settings
from mpsd.system import clock

TEXTFILE: Final = "mpsd-textfile.service"
TIMER: Final = "mpsd-textfile.timer"

_SQLITE: Final = b"SQLite format 3\0"
"""Source: https://www.sqlite.org/fileformat2.html."""

_LOG: Final = "-wal"

_DEADLINE: Final = 3.0
"""Seconds for an answer of the listener."""

_SOME: Final = 4096
"""Bytes in which the metrics of mpsd name one of theirs."""

_KINDS: Final = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link", stat.S_IFIFO: "FIFO"}


def look_at_store(path: Path) -> Reading[StoreSeen]:
    """Inspect the file of the history, without opening it as a database."""
    try:
        found = path.lstat()
        directory = path.parent.stat()
    except FileNotFoundError:
        return Known(StoreSeen(path, None))
    except OSError as error:
        return Unknown(f"{path} cannot be inspected by uid {os.geteuid()}: {error.strerror}")
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
    size, written = found.st_size, found.st_mtime
    log = Path(f"{path}{_LOG}")
    try:
        beside = log.lstat()
        size, written = size + beside.st_size, max(written, beside.st_mtime)
    except FileNotFoundError:
        pass  # SQLite removes it when mpsd ends
    return Known(
        StoreSeen(
            path,
            kind,
            found.st_uid,
            directory.st_uid,
            stat.S_IMODE(found.st_mode),
            size,
            clock.now().timestamp() - written,
            _is_sqlite(path) if kind == "file" else Known(value=False),
        )
    )


def _is_sqlite(path: Path) -> Reading[bool]:
    try:
        # The owner of its directory could have put a link or a FIFO there since.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no path
            begin = file.read(len(_SQLITE))
    except OSError as error:
        return Unknown(f"{path} cannot be read by uid {os.geteuid()}: {error.strerror}")
    return Known(begin in {b"", _SQLITE})


def look_at_listener(
    settings: Settings, pid: int | None, *, deadline: float = _DEADLINE
) -> Reading[ListenerSeen | None]:
    """Read the metrics from the configured address, as Prometheus does.

    `pid` is that of mpsd, if known; `deadline` is in seconds.
    """
    listen = settings.metrics.listen
    if not listen:
        return Known(None)
    if pid is not None and _is_in_another_network(pid):
        return Unknown(f"mpsd is in another network namespace, where it listens on {listen}")
    host, port = address_of(listen)
    if ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    late = threading.Event()
    refused = _try_metrics(host, port, deadline, late)
    return Known(ListenerSeen(address, f"there is no whole answer after {deadline:g} s" if late.is_set() else refused))


def _try_metrics(host: str, port: int, deadline: float, late: threading.Event) -> str:
    """Read mpsd's metrics; return why that failed, or an empty text. At the deadline, set `late`."""
    connection = http.client.HTTPConnection(host, port, timeout=deadline)
    try:
        connection.connect()
        connection.sock.settimeout(None)  # the deadline is for all of what follows
        with _shut_down_after(deadline, connection.sock, late):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            text = answer.read(_SOME)
    except OSError as error:
        return error.strerror or str(error)
    except http.client.HTTPException as error:
        return f"the answer is not HTTP ({type(error).__name__})"
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return f"the answer has status {answer.status}"
    return "" if b"mpsd_" in text else "the answer is not of mpsd"


@contextmanager
def _shut_down_after(seconds: float, connection: socket.socket, late: threading.Event) -> Iterator[None]:
    """Shut a connection down after this time, and set `late`.

    The timeout of a socket applies to each read, and a stranger's program on the port may send a byte at a time.
    """

    def shut_down() -> None:
        late.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _is_in_another_network(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")  # noqa: PTH115 - the kernel's own
    except OSError:
        return False  # only root may look; the connection shows the rest


def look_at_textfile(units: Reading[Mapping[str, Mapping[str, str]]]) -> Reading[TextfileSeen | None]:
    """Inspect the file that systemd's unit writes for node_exporter; `units` has the properties of the units."""
    if isinstance(units, Unknown):
        return units
    unit = units.value.get(TEXTFILE)
    path = textfile_of(unit.get("ExecStart", "")) if unit is not None else None
    if path is None:
        return Known(None)
    timer = units.value.get(TIMER, {}).get("ActiveState", "")
    unfit = _unfit(path.parent)
    try:
        age = clock.now().timestamp() - path.stat().st_mtime
    except OSError:
        age = None
    return Known(TextfileSeen(TEXTFILE, path, timer, unfit, age))


def textfile_of(command: str) -> Path | None:
    """Return the file that a command in the notation of `systemctl show` writes."""
    _, found, rest = command.partition("argv[]=")
    try:
        words = shlex.split(rest.partition(" ;")[0]) if found else []
    except ValueError:
        return None
    for word, behind in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name == "--textfile" and (value or behind):
            return Path(value if equals else behind)
    return None


def _unfit(directory: Path) -> str:
    """Return why root could write no file to a directory; empty where it could."""
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            return "it is not a directory"
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            return "its file system is mounted read-only"
    except OSError as error:
        return error.strerror or str(error)
    return ""
