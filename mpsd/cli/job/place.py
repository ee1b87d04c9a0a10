"""The directory of a job on a node: whose it is, who may start the keeper in it, and the removal of dead ones.

It is in XDG_RUNTIME_DIR, TMPDIR or /tmp, the first that is writable and short enough, and has mode 0700. Where all
users may write, any of them can make one with its name first: it is used only if it belongs to this user, and no link
is followed. The keeper holds a lock on it while it lives. The kernel releases that lock, so that a directory without
one belongs to no living job.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socket
from typing import Final

from mpsd.core.errors import ConfigurationError, UnreachableError
from mpsd.core.mps_facts import CONTROL_PATH_BYTES, LONGEST_SOCKET_NAME

SOCKET: Final = "job"
"""The socket of the keeper, in the directory."""

LOG: Final = "keeper.log"
"""The file of what the keeper prints, which is a defect or a lack of the machine."""

_PREFIX: Final = "mpsd-job"

_LONGEST: Final = f"mpsd/run/mps/gpu99/{LONGEST_SOCKET_NAME}"
"""The longest path of a socket in the directory; the kernel limits its length."""

ELSEWHERE: Final = "set TMPDIR to a directory of your own on a local file system"

_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.2
_START: Final = 30.0
"""Seconds for the start of a keeper."""


def directory(job: str, variables: Mapping[str, str]) -> Path:
    """Return the directory of a job, by what its ranks have in common. Raises ConfigurationError."""
    digest = hashlib.blake2s(job.encode(errors="surrogateescape"), digest_size=6).hexdigest()
    name = f"{_PREFIX}-{os.geteuid()}-{digest}"
    return _base(variables, CONTROL_PATH_BYTES - len(f"/{name}/{_LONGEST}")) / name


def _base(variables: Mapping[str, str], most: int) -> Path:
    """Return the directory for those of jobs, of at most so many bytes.

    XDG_RUNTIME_DIR may be that of another machine: Slurm passes it on.
    """
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        base = variables.get(name, "")
        if len(os.fsencode(base)) > most:
            continue
        if os.path.isabs(base) and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):  # noqa: PTH117, PTH112 - of any bytes
            return Path(base)
    return Path("/tmp")  # noqa: S108 - see `_claim`


def join(path: Path, start: Callable[[Path, int], None]) -> socket:
    """Connect to the keeper of a job; where there is none yet, `start` it, with the lock on the directory.

    Raises ConfigurationError for a directory that is not this user's, and UnreachableError where no keeper answers.
    """
    end, pause, started = time.monotonic() + _START, _PAUSE, False
    while time.monotonic() < end:
        if (connection := connect(path)) is not None:
            return connection
        if (lock := _claim(path)) is not None:
            try:
                if started:
                    break
                _empty(path)
                start(path, lock)
                started, pause = True, 0.0
            finally:
                os.close(lock)
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)
    raise UnreachableError(
        f"the keeper of the job did not start in {path}{_told(path)}", hint="find out what keeps it from starting there"
    )


def connect(path: Path) -> socket | None:
    """Connect to the keeper in a directory of this user; None where none listens, or the directory is another's."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET)
    try:
        if _is_own(os.lstat(path)):
            connection.connect(os.fspath(path / SOCKET))
            return connection
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, PermissionError):
        pass
    connection.close()
    return None


def _told(path: Path) -> str:
    try:
        lines = (path / LOG).read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1]}" if lines else ""


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _claim(path: Path) -> int | None:
    """Make the directory, or take that of a dead job, and lock it; None while another process has it."""
    with contextlib.suppress(FileExistsError):
        try:
            path.mkdir(0o700)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise ConfigurationError(f"{path} cannot be made: {error.strerror}", hint=ELSEWHERE) from None
    return _locked(path)


def _locked(path: Path) -> int | None:
    """Open and lock a directory of a job; None where another process has locked it, or it is gone by then.

    Raises ConfigurationError for one of another user.
    """
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        raise _not_own(path) from None
    with contextlib.ExitStack() as unless_locked:
        unless_locked.callback(os.close, found)
        if not _is_own(os.fstat(found)):
            raise _not_own(path)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            now = os.lstat(path)
        except (BlockingIOError, FileNotFoundError):
            return None
        if not os.path.samestat(now, os.fstat(found)):
            return None
        unless_locked.pop_all()
    return found


def _not_own(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not a directory that belongs to uid {os.geteuid()} alone, so the job does not use it",
        hint=ELSEWHERE,
    )


def _empty(path: Path) -> None:
    import shutil

    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove the directory of a job; its caller holds the lock."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def remove_dead(path: Path) -> None:
    """Remove the directory of a job whose keeper is dead; that of a living one is left."""
    with contextlib.suppress(ConfigurationError):
        if (lock := _locked(path)) is not None:
            remove(path)
            os.close(lock)


def sweep(path: Path) -> None:
    """Remove the directories of dead jobs of this user beside this one."""
    for each in path.parent.glob(f"{_PREFIX}-{os.geteuid()}-*"):
        if each != path:
            remove_dead(each)
