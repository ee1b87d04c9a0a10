"""The directories that mpsd writes to: the path of each file, and the lock that excludes a second mpsd.

Every path is decided here, and everything is created with its final mode.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from mpsd.core.errors import AlreadyRunningError, ConfigurationError
from mpsd.core.mps_facts import CONTROL_PATH_BYTES, LONGEST_SOCKET_NAME, SOCKET_PATH_BYTES
from mpsd.core.settings import Paths, Settings, Unadmitted
from mpsd.system import retry
from mpsd.system.files import acl, path_safety

_LASTING: Final = re.compile(
    r"(accounts|history)\.db(-journal|-shm|-wal)?|last-event|(compute-modes|gpu\d+\.intention|quarantines)\.json"
    r"|doctor\.log|gpu\d+(/(control|server)\.log)?"
)
"""mpsd's files below the directories of state and logs. A store that was set aside may be another program's."""

LEFT: Final = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
"""Files that a control daemon leaves in its pipe directory (measured; the last one by 550 and later)."""


class DaemonPaths:
    """The paths of one control daemon."""

    def __init__(self, paths: Paths, name: str) -> None:
        run, pipe, log = paths.runtime_dir, paths.runtime_dir / "mps" / name, paths.log_dir / name
        self.pipe_directory = pipe
        self.log_directory = log
        self.death_tally = run / f"{name}.tally.json"
        """The file with its recent deaths."""
        self.record = run / f"{name}.process.json"
        """The file with the identity of the process that mpsd started."""
        self.let_in = run / f"{name}.let-in.json"
        """The file with the uids that have had pipe access since it started."""
        self.reading = run / f"{name}.reading.json"
        """The file with the position up to which its log was read."""
        self.own_limits = run / f"{name}.limits.json"
        """The file with the limits that mpsd itself set."""
        self.operator_intent = paths.state_dir / f"{name}.intention.json"
        """The file with the desired state of the daemon."""
        self.control_socket = pipe / "control"
        """The socket that front-ends and clients look for."""
        self.control_sockets = self.control_socket, pipe / "control_privileged"
        """Both sockets of the daemon: the control socket, and the one for root's front-ends."""
        self.control_lock = pipe / "control_lock"
        """The lock that makes a control daemon the only one on its pipe directory."""
        self.pid_file = pipe / "nvidia-cuda-mps-control.pid"
        """The file in which a control daemon of 550 and newer writes its pid (measured). mpsd does not read it."""
        self.log_fifo = pipe / "log"
        """The FIFO through which the daemon and its servers write the log: only the daemon reads it (measured)."""
        self.control_log = log / "control.log"
        """The file that receives the daemon's own output."""
        self.server_log = log / "server.log"
        """The file that its servers write (NVIDIA's documentation)."""

    def create(self) -> None:
        """Make both directories, writable for mpsd only. A new pipe directory is closed until mpsd opens it.

        Raises ConfigurationError.
        """
        _make(self.pipe_directory, 0o700)
        _make(self.log_directory, 0o755)

    def clear(self) -> None:
        """Remove the sockets, the FIFO and the lock of a dead control daemon: the next one makes its own.

        A client of the dead daemon may still have them open: a process that waits for the lock keeps the next daemon
        from starting, and a byte that it writes to the FIFO ends the log (both measured, all versions).
        """
        for name in LEFT:
            (self.pipe_directory / name).unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse files in the pipe directory that are not mpsd's: the control daemon might write to them.

        Raises ConfigurationError.
        """
        for path in self.pipe_directory.iterdir():
            path_safety.check_file(path)


class RunDir:
    """The runtime directory, with its lock held for as long as this object is open."""

    def __init__(self, settings: Settings, lock: int) -> None:
        self._paths = paths = settings.paths
        self._lock = lock
        self.daemons = paths.runtime_dir / "mps"
        """The directory of the pipe directories."""
        self.libraries = libraries(settings)
        """The directory of links to the driver's libraries, where the driver has a separate root."""
        self.leases = paths.runtime_dir / "leases.db"
        """The store of state that ends with this boot."""
        self.accounts = paths.state_dir / "accounts.db"
        """The store of what was granted and held."""
        self.history = paths.state_dir / "history.db"
        """The store of the events."""
        self.ends = paths.runtime_dir / "ends"
        """The directory of the progress of each ending of processes."""
        self.clients = paths.runtime_dir / "clients.json"
        """The file with the limits that were open to each client."""
        self.saved_compute_modes = saved_compute_modes(settings)
        """The record of the compute modes that mpsd must restore on GPUs."""
        self.quarantines = paths.state_dir / "quarantines.json"
        """The quarantined uids; a reboot does not end a quarantine."""
        self.last_event = paths.state_dir / "last-event"
        """The number of the last event, apart from the history, so that a damaged history does not repeat numbers."""

    @classmethod
    def claim(cls, settings: Settings) -> "RunDir":
        """Create the directories and take the lock.

        Raises AlreadyRunningError when another mpsd holds it, ConfigurationError when a directory cannot be used.
        """
        paths = settings.paths
        for directory in (paths.runtime_dir, paths.runtime_dir / "mps", paths.state_dir, paths.log_dir):
            _make(directory, 0o755)
        _make(paths.runtime_dir / "ends", 0o700)
        path_safety.check_path(settings.socket)
        logs = (*paths.log_dir.glob("*/control.log"), *paths.log_dir.glob("*/server.log"))
        for path in (*paths.runtime_dir.iterdir(), *paths.state_dir.iterdir(), *paths.log_dir.iterdir(), *logs):
            path_safety.check_file(path)
        check_acl_support(settings)
        path = paths.runtime_dir / "mpsd.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            retry.inherited_locks()(fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AlreadyRunningError(
                f"another mpsd uses {settings.paths.runtime_dir}",
                hint=f"for its status: mpsctl --socket {settings.socket} status; or start this one with another --root",
            ) from None
        return cls(settings, lock)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def daemon(self, name: str) -> DaemonPaths:
        """Return the paths of the control daemon with this name."""
        return DaemonPaths(self._paths, name)


def contents(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return mpsd's files in its directory of state or of logs, those in a folder before the folder, and the others."""
    own, others = list[Path](), list[Path]()
    folders = [each for each in directory.glob("gpu*") if each.is_dir() and not each.is_symlink()]
    for each in (*chain.from_iterable(map(Path.iterdir, folders)), *directory.iterdir()):
        is_own = _LASTING.fullmatch(f"{each.relative_to(directory)}") and not each.is_symlink()
        (own if is_own else others).append(each)
    kept = {each.parent for each in others} - {directory}
    return [each for each in own if each not in kept], others


def libraries(settings: Settings) -> Path:
    """Return the directory of links to the driver's libraries, where the driver has a separate root."""
    return settings.paths.runtime_dir / "driver"


def saved_compute_modes(settings: Settings) -> Path:
    """Return the file of the compute modes that mpsd must restore on GPUs."""
    return settings.paths.state_dir / "compute-modes.json"


def check(settings: Settings, names: Sequence[str], *, private: bool) -> None:
    """Refuse settings that cannot work, before anything is started.

    `private` is the meaning of `--root`: a node for users that can traverse that directory. Raises ConfigurationError.
    """
    pipe = settings.paths.runtime_dir / "mps" / max(names, key=len, default="") / LONGEST_SOCKET_NAME
    for path, most in ((pipe, CONTROL_PATH_BYTES), (settings.socket, SOCKET_PATH_BYTES)):
        if (length := len(os.fsencode(path))) > most:
            raise ConfigurationError(
                f"the socket path {path} has {length} bytes, and the maximum is {most}",
                hint="choose a shorter paths.runtime_dir (or --root)",
                limit="paths.runtime_dir",
            )
    closed = closed_to_others(settings.paths.runtime_dir)
    if os.geteuid() == 0 and not private and closed is not None:
        raise ConfigurationError(
            f"other uids may not traverse {closed}, and MPS runs a server under its client's uid",
            hint=f"chmod o+x {closed}, or choose another paths.runtime_dir",
            limit="paths.runtime_dir",
        )


def check_acl_support(settings: Settings) -> None:
    """Refuse a runtime directory on a file system without ACLs, where pipe access depends on them.

    An mpsd without root serves only its own uid, which owns the directories. Raises ConfigurationError.
    """
    runtime_dir = settings.paths.runtime_dir
    if os.geteuid() != 0 or settings.unadmitted is not Unadmitted.DENY:
        return
    there = next(path for path in (runtime_dir, *runtime_dir.parents) if path.exists())
    if not acl.is_supported(there):
        raise ConfigurationError(
            f"the file system of {there} does not support POSIX ACLs, which limit pipe access to the uids"
            ' that hold a lease (enforcement.unadmitted = "deny")',
            hint="choose a paths.runtime_dir on tmpfs, ext4, xfs or btrfs, mount this file system with ACLs, or"
            ' set enforcement.unadmitted = "defaults", which lets every local user reach every control'
            " daemon",
            limit="paths.runtime_dir",
        )


def closed_to_others(path: Path) -> Path | None:
    """Return the first existing directory of `path` that other uids cannot traverse; None if there is none."""
    for directory in (*reversed(path.parents), path):
        try:
            mode = directory.stat().st_mode
        except FileNotFoundError:
            return None
        if not mode & stat.S_IXOTH:
            return directory
    return None


def check_directory(directory: Path) -> None:
    """Refuse an existing directory that mpsd would not use. Raises ConfigurationError, and OSError."""
    path_safety.check_path(directory)
    try:
        own = path_safety.is_own(directory)
    except FileNotFoundError:
        return  # mpsd makes it
    if not own:
        raise ConfigurationError(
            f"{directory} is not private to mpsd: it is a symbolic link, belongs to another user, or is"
            " writable for all users, or for users or groups other than root's and mpsd's",
            hint="choose a directory that only mpsd can write to",
        )


def _make(directory: Path, mode: int) -> None:
    """Make a directory and its parents. No stranger may be able to write to it or to replace it."""
    try:
        path_safety.check_path(directory)  # checked before anything is made behind a stranger's link
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            directory.chmod(mode)
        check_directory(directory)
    except OSError as error:
        raise ConfigurationError(
            f"cannot create {directory}: {error.strerror}",
            hint="choose a directory that mpsd may write to, for example with --root; in a container, mount a"
            " volume there",
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _not_writable(directory)


def _not_writable(directory: Path) -> ConfigurationError:
    """Return the error that says why mpsd cannot write to a directory, and the remedy."""
    owner, uid = directory.lstat().st_uid, os.geteuid()
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        because, hint = "its file system is read-only", "mount it for writing, or choose another directory"
    elif uid in {0, owner}:
        because = f"not even uid {uid} may"
        hint = "find what forbids it: an immutable directory (lsattr -d), its mode, or a security module (dmesg)"
    else:
        because, hint = f"it belongs to uid {owner}, and mpsd runs as uid {uid}", f"run mpsd as uid {owner}"
    return ConfigurationError(f"{directory} cannot be written: {because}", hint=hint)


def remove_shared_memory(name: str) -> bool:
    """Remove a file of an MPS server in /dev/shm; return whether that happened.

    The name of such a file begins with `cuda.shm.` and the uid of its owner.
    """
    path = Path("/dev/shm") / name  # noqa: S108 - where POSIX shared memory is, shm_overview(7)
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and name.startswith(f"cuda.shm.{found.st_uid}."):
            path.unlink()
            return True
    return False
