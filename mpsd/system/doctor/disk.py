"""Files on the disk: mpsd's directories, pipe directories, leftovers of servers, and the ends of the logs."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mpsd.core.doctor.observed import DirectorySeen, FilesSeen, PipeDirectorySeen, ServersSeen, SharedMemorySeen
from mpsd.core.doctor.processes import USUAL
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.mps.log_events import ClientArrived, ServerExited, ServerFailed, ServerReady, ServerStarting
from mpsd.core.mps.log_parser import LogReader, parse
from mpsd.core.settings import Settings
from mpsd.system import acl, clock, host_environment, path_safety, rundir
from mpsd.system.proc import start_ticks

_TAIL: Final = 256 * 1024
"""Bytes that are read from the end of a log."""

_HEX: Final = re.compile(rb"[0-9A-Fa-f]{8}")

_LISTENS: Final = 0x10000
"""__SO_ACCEPTCON in the flags of /proc/net/unix. Source: proc(5)."""

_PARTS_OF_NAME: Final = 5
"""cuda.shm.UID.SERVER.NUMBER (core/mps/log_events.py)."""

_CUDA: Final = "CUDA MPS Control binary version: "
_DRIVER: Final = "Display Driver version: "


def look(settings: Settings, *, private: bool, apart: tuple[Path, ...] = ()) -> FilesSeen:
    """Inspect all of these files, except mpsd's directories in `apart`: for mpsd, those paths lead elsewhere."""
    paths = settings.paths
    takers = listened()
    mps = paths.runtime_dir / "mps"
    reached = paths.runtime_dir not in apart
    stores = [each for each in (paths.runtime_dir, paths.state_dir) if each not in apart]
    directories = (
        ("paths.runtime_dir", paths.runtime_dir), ("paths.state_dir", paths.state_dir), ("paths.log_dir", paths.log_dir)
    )  # fmt: skip
    elsewhere = Unknown(f"{paths.log_dir} is a different directory here than for mpsd")
    return FilesSeen(
        directories=tuple(_directory(setting, path) for setting, path in directories if path not in apart),
        apart=apart,
        private=private,
        closed=_closed(mps) if reached else None,
        own=tuple(_pipe_directory(path.name, path, takers) for path in _inside(mps)) if reached else (),
        usual=tuple(_pipe_directory(path, Path(path), takers) for path in USUAL),
        shared_memory=tuple(_shared_memory()),
        damaged=_damaged(stores),
        servers=_servers(paths.log_dir) if paths.log_dir not in apart else elsewhere,
        ahead=_ahead(stores),
    )


def _inside(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []  # absent or closed: `directories` and `traverse` say which


def _closed(path: Path) -> Path | None:
    try:
        return rundir.closed_to_others(path)
    except PermissionError as error:
        return Path(error.filename)


def _directory(setting: str, path: Path) -> DirectorySeen:
    there = next(each for each in (path, *path.parents) if os.access(each, os.F_OK))
    try:
        room = os.statvfs(there)
        keeps_acls = acl.is_supported(there)
    except OSError:
        return DirectorySeen(setting, path, there == path, _strange(path), there)
    return DirectorySeen(
        setting,
        path,
        exists=there == path,
        strange=_strange(path),
        there=there,
        file_system=host_environment.file_system(there),
        free=room.f_bavail * room.f_frsize if os.geteuid() else room.f_bfree * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
        read_only=bool(room.f_flag & os.ST_RDONLY),
        keeps_acls=keeps_acls,
    )


def _strange(path: Path) -> tuple[str, str] | None:
    """Return why mpsd would not use a directory, with a hint; None where it would."""
    try:
        path_safety.check_path(path)
        own = not path.exists() or path_safety.is_own(path)
    except ConfigurationError as error:
        return error.detail, error.hint
    except OSError as error:
        return f"{error.filename}: {error.strerror}", "run it as root"
    if own:
        return None
    found = path.lstat()
    because = f"{path} (uid {found.st_uid}, mode {found.st_mode & 4095:04o}) is not private to mpsd: it is a"
    because += " symbolic link, belongs to another user, or is writable for users other than root and mpsd's"
    return because, f"chown root: {path} && chmod 0755 {path}, or choose another directory"


def listened() -> frozenset[str]:
    """Return the paths of the unix sockets that accept connections, as they were bound.

    A path can contain any bytes, and a line feed splits its row into two lines. Lines that are not rows are skipped.
    """
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_bytes().split(b"\n"))
    with_path = (row for row in rows if len(row) > 7 and _HEX.fullmatch(row[3]))  # noqa: PLR2004 - the row has a path
    return frozenset(os.fsdecode(row[7]) for row in with_path if int(row[3], 16) & _LISTENS)


def _pipe_directory(name: str, path: Path, listened: frozenset[str]) -> PipeDirectorySeen:
    entries: Reading[tuple[str, ...]]
    try:
        there = set(os.listdir(path))  # noqa: PTH208 - names, not paths
        entries = Known(tuple(each for each in rundir.LEFT if each in there))
    except (FileNotFoundError, NotADirectoryError):
        entries = Known(())
    except OSError as error:
        entries = Unknown(f"{path} cannot be read by uid {os.geteuid()}: {error.strerror}")
    return PipeDirectorySeen(name, path, entries, listening=f"{path}/control" in listened)


def _shared_memory() -> Iterator[SharedMemorySeen]:
    for path in _inside(host_environment.SHARED_MEMORY):
        parts = path.name.split(".")
        if parts[:2] != ["cuda", "shm"] or len(parts) != _PARTS_OF_NAME:
            continue
        try:
            uid, server, size = int(parts[2]), int(parts[3], 16), path.lstat().st_size
        except (ValueError, FileNotFoundError):
            continue
        yield SharedMemorySeen(path.name, uid, server, size)


def _damaged(directories: Iterable[Path]) -> tuple[Path, ...]:
    """Return the stores that were set aside, without their companions.

    Another check reports the record of compute modes.
    """
    return tuple(
        path
        for directory in directories
        for path in _inside(directory)
        if path.stem and path.suffix.startswith(".set-aside-") and path.suffix.rpartition("-")[2].isdecimal()
    )


def _ahead(directories: Iterable[Path]) -> tuple[Path, float] | None:
    """Return the file of mpsd's with the modification time furthest in the future, and the seconds until then."""
    now = clock.now().timestamp()
    found: list[tuple[float, Path]] = []
    for directory in directories:
        for path in _inside(directory):
            try:
                found.append((path.lstat().st_mtime - now, path))
            except OSError:
                continue
    return (max(found)[1], max(found)[0]) if found and max(found)[0] > 0 else None


def _servers(log_dir: Path) -> Reading[tuple[ServersSeen, ...]]:
    try:
        return Known(tuple(_of_logs(each) for each in sorted(log_dir.iterdir()) if each.is_dir()))
    except FileNotFoundError:
        return Known(())
    except OSError as error:
        return Unknown(f"{error.filename} cannot be read by uid {os.geteuid()}: {error.strerror}")


def _of_logs(directory: Path) -> ServersSeen:
    """Read the ends of a control daemon's logs. Raises OSError."""
    control, server = directory / "control.log", directory / "server.log"
    failures, words = 0, ""
    uids: dict[int, int] = {}
    waiting: dict[int, int] = {}
    lines = _tail(control)
    for event in LogReader().read(lines):
        if isinstance(event, ServerReady):
            failures, words = 0, ""
            waiting.pop(uids.get(event.server, -1), None)
        elif isinstance(event, ServerStarting):
            uids[event.server] = event.uid
        elif isinstance(event, ClientArrived):
            if event.waits:
                waiting[event.uid] = event.pid
            else:
                waiting.pop(event.uid, None)
        elif isinstance(event, ServerFailed):
            words = event.words
        elif isinstance(event, ServerExited) and event.status:
            failures += 1
    of_server = _tail(server)
    if failures and not words:
        said = [event.words for event in LogReader().read(of_server) if isinstance(event, ServerFailed)]
        words = said[-1] if said else ""
    cuda = _last(lines, _CUDA)
    return ServersSeen(
        directory.name,
        failures,
        words,
        cuda=int(cuda) if cuda.isdecimal() else None,
        driver=_last(of_server, _DRIVER) or None,
        log=control,
        waiting=tuple((pid, uid) for uid, pid in waiting.items() if pid and start_ticks(pid) is not None),
    )


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            return log.read(_TAIL).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _last(lines: list[str], start: str) -> str:
    """Return the text that follows `start` in the last log line of a daemon or server that begins with it."""
    texts = (line.text for line in map(parse, reversed(lines)) if line is not None)
    return next((text.removeprefix(start).strip() for text in texts if text.startswith(start)), "")
