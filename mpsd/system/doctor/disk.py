"""Files on the disk: mpsd's directories, pipe directories, and the versions in NVIDIA's logs."""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from mpsd.core.doctor.finding import FilesSeen, LoggedVersions, PipeDirectorySeen, Space
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.mps.control_daemons import USUAL
from mpsd.core.mps.log_parser import parse
from mpsd.core.settings import Settings
from mpsd.system.doctor.machine import denied, last_lines
from mpsd.system.files import rundir

_HEX: Final = re.compile(rb"[0-9A-Fa-f]{8}")

_LISTENS: Final = 0x10000
"""__SO_ACCEPTCON in the flags of /proc/net/unix. Source: proc(5)."""

_CUDA: Final = "CUDA MPS Control binary version: "
_DRIVER: Final = "Display Driver version: "


def look(settings: Settings, *, private: bool, apart: tuple[Path, ...] = ()) -> FilesSeen:
    """Inspect all of these files, except mpsd's directories in `apart`: for mpsd, those paths lead elsewhere.

    `private` is the meaning of mpsd's `--root`.
    """
    paths = settings.paths
    takers = listened()
    own = [each for each in (paths.runtime_dir, paths.state_dir, paths.log_dir) if each not in apart]
    pipes = _inside(paths.runtime_dir / "mps") if paths.runtime_dir not in apart else []
    elsewhere = Unknown(f"{paths.log_dir} is a different directory here than for mpsd")
    return FilesSeen(
        apart=apart,
        unfit=tuple(_unfit(settings, own, [each.name for each in pipes], private=private)),
        space=tuple(map(_space, own)),
        own=tuple(_pipe_directory(path.name, path, takers) for path in pipes),
        usual=tuple(_pipe_directory(path, Path(path), takers) for path in USUAL),
        versions=_versions(paths.log_dir) if paths.log_dir not in apart else elsewhere,
    )


def _inside(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []  # absent or closed, and `unfit` says so where it matters


def _unfit(settings: Settings, own: list[Path], names: list[str], *, private: bool) -> Iterator[tuple[str, str]]:
    """Yield why mpsd would not start with these directories, by the checks of its own start."""
    checks: list[Callable[[], None]] = [partial(rundir.check_directory, each) for each in own]
    if settings.paths.runtime_dir in own:
        checks.append(partial(rundir.check, settings, names or ["gpu0"], private=private))
        checks.append(partial(rundir.check_acl_support, settings))
    for each in checks:
        try:
            each()
        except ConfigurationError as error:
            yield error.detail, error.hint
        except OSError as error:
            yield f"{error.filename}: {error.strerror}", "run it as root"


def _space(path: Path) -> Space:
    there = next(each for each in (path, *path.parents) if os.access(each, os.F_OK))
    room = os.statvfs(there)
    free = room.f_bavail if os.geteuid() else room.f_bfree
    read_only = bool(room.f_flag & os.ST_RDONLY)
    return Space(there, free * room.f_frsize, room.f_favail if room.f_files else None, read_only=read_only)


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
        entries = denied(path, error)
    return PipeDirectorySeen(name, path, entries, listening=f"{path}/control" in listened)


def _versions(log_dir: Path) -> Reading[tuple[LoggedVersions, ...]]:
    try:
        return Known(tuple(_of_logs(each) for each in sorted(log_dir.iterdir()) if each.is_dir()))
    except FileNotFoundError:
        return Known(())
    except OSError as error:
        return denied(error.filename, error)


def _of_logs(directory: Path) -> LoggedVersions:
    """Read the ends of a control daemon's logs. Raises OSError."""
    log = directory / "control.log"
    cuda = _last(log, _CUDA)
    driver = _last(directory / "server.log", _DRIVER)
    return LoggedVersions(directory.name, log, int(cuda) if cuda.isdecimal() else None, driver or None)


def _last(path: Path, start: str) -> str:
    """Return the text that follows `start` in the last line of a log that begins with it; empty where none does."""
    try:
        lines = last_lines(path)
    except FileNotFoundError:
        return ""
    texts = (line.text for line in map(parse, reversed(lines)) if line is not None)
    return next((text.removeprefix(start).strip() for text in texts if text.startswith(start)), "")
