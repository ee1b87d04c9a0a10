"""The directories that mpsd writes to: the path of each file, the lock that excludes a second mpsd, and the socket.

Every path is decided here, and everything is created with its final mode.
"""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from grp import getgrnam
from pathlib import Path
from typing import Final

from mpsd.core.errors import AlreadyRunningError, ConfigurationError
from mpsd.core.mps_facts import CONTROL_PATH_BYTES, LONGEST_SOCKET_NAME, SOCKET_PATH_BYTES
from mpsd.core.settings import Settings, Unadmitted
from mpsd.system import acl, path_safety, retry

LEFT: Final = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
"""Files that a control daemon leaves in its pipe directory (measured; the last one by 550 and later)."""


@dataclass(frozen=True)
class DaemonPaths:
    pipe_directory: Path
    log_directory: Path
    death_tally: Path
    """The file with its recent deaths."""
    record: Path
    """The file with the identity of the process that mpsd started."""
    let_in: Path
    """The file with the uids that have had pipe access since it started."""
    reading: Path
    """The file with the position up to which its log was read."""
    own_limits: Path
    """The file with the limits that mpsd itself set."""
    operator_intent: Path
    """The file with the desired state of the daemon."""

    @cached_property
    def control_socket(self) -> Path:
        """The socket that front-ends and clients look for."""
        return self.pipe_directory / "control"

    @cached_property
    def control_lock(self) -> Path:
        """The lock that makes a control daemon the only one on its pipe directory."""
        return self.pipe_directory / "control_lock"

    @cached_property
    def pid_file(self) -> Path:
        """The file in which a control daemon of 550 and newer writes its pid (measured). mpsd does not read it."""
        return self.pipe_directory / "nvidia-cuda-mps-control.pid"

    @cached_property
    def log_fifo(self) -> Path:
        """The FIFO through which the daemon and its servers write the log: only the daemon reads it (measured)."""
        return self.pipe_directory / "log"

    @cached_property
    def control_sockets(self) -> tuple[Path, Path]:
        """Both sockets of the daemon: the control socket, and the one for root's front-ends."""
        return self.control_socket, self.pipe_directory / "control_privileged"

    @cached_property
    def control_log(self) -> Path:
        """The file that receives the daemon's own output."""
        return self.log_directory / "control.log"

    @cached_property
    def server_log(self) -> Path:
        """The file that its servers write (NVIDIA's documentation)."""
        return self.log_directory / "server.log"

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
        self._settings = settings
        self._lock = lock

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

    @cached_property
    def daemons(self) -> Path:
        """The directory of the pipe directories."""
        return self._settings.paths.runtime_dir / "mps"

    @cached_property
    def libraries(self) -> Path:
        """The directory of links to the driver's libraries, where the driver has a separate root."""
        return libraries(self._settings)

    @cached_property
    def leases(self) -> Path:
        """The store of state that ends with this boot."""
        return self._settings.paths.runtime_dir / "leases.db"

    @cached_property
    def accounts(self) -> Path:
        """The store of what was granted and held."""
        return self._settings.paths.state_dir / "accounts.db"

    @cached_property
    def history(self) -> Path:
        """The store of the events."""
        return self._settings.paths.state_dir / "history.db"

    @cached_property
    def ends(self) -> Path:
        """The directory of the progress of each ending of processes."""
        return self._settings.paths.runtime_dir / "ends"

    @cached_property
    def clients(self) -> Path:
        """The file with the limits that were open to each client."""
        return self._settings.paths.runtime_dir / "clients.json"

    @cached_property
    def saved_compute_modes(self) -> Path:
        """The record of the compute modes that mpsd must restore on GPUs."""
        return saved_compute_modes(self._settings)

    @cached_property
    def quarantines(self) -> Path:
        """The quarantined uids; a reboot does not end a quarantine."""
        return self._settings.paths.state_dir / "quarantines.json"

    @cached_property
    def last_event(self) -> Path:
        """The number of the last event, apart from the history, so that a damaged history does not repeat numbers."""
        return self._settings.paths.state_dir / "last-event"

    def daemon(self, name: str) -> DaemonPaths:
        """Return the paths of the control daemon with this name."""
        paths = self._settings.paths
        return DaemonPaths(
            self.daemons / name,
            paths.log_dir / name,
            death_tally=paths.runtime_dir / f"{name}.tally.json",
            record=paths.runtime_dir / f"{name}.process.json",
            let_in=paths.runtime_dir / f"{name}.let-in.json",
            reading=paths.runtime_dir / f"{name}.reading.json",
            own_limits=paths.runtime_dir / f"{name}.limits.json",
            operator_intent=paths.state_dir / f"{name}.intention.json",
        )


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


def publish(path: Path, mode: int, group: str) -> socket.socket:
    """Return a listening unix socket that appears at `path` with its final owner and mode.

    An existing file there is replaced: the lock proves that no living mpsd uses it. If the group is unknown, the socket
    gets mpsd's own group. Raises ConfigurationError.
    """
    hidden = path.with_name(f".{os.getpid()}")  # as short as the usual name: a socket's path is limited in length
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        hidden.unlink(missing_ok=True)
        listener.bind(os.fspath(hidden))
        hidden.chmod(mode)
        if (gid := _gid(group)) is not None:
            os.chown(hidden, -1, gid)
        listener.listen(1024)
        hidden.rename(path)
    except OSError as error:
        listener.close()
        hidden.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror}", hint="check api.socket") from error
    return listener


def check_published(listener: socket.socket, path: Path, mode: int, group: str) -> None:
    """Refuse a listening socket of the service manager that differs from the settings.

    Raises ConfigurationError. The socket is not changed, since it is not mpsd's own.
    """
    if (name := os.fsdecode(listener.getsockname())) != os.fspath(path):
        raise ConfigurationError(
            f"systemd passed the socket {name}, but api.socket is {path}",
            hint=f"set ListenStream={path} in mpsd.socket (systemctl edit mpsd.socket), or change api.socket",
            limit="api.socket",
        )
    found = path.stat()
    if stat.S_IMODE(found.st_mode) != mode:
        raise ConfigurationError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, but api.mode is {mode:04o}",
            hint=f"set SocketMode={mode:04o} in mpsd.socket (systemctl edit mpsd.socket), or change api.mode",
            limit="api.mode",
        )
    if (gid := _gid(group)) is not None and found.st_gid != gid:
        raise ConfigurationError(
            f"{path} has group {found.st_gid}, but api.group is {group!r}",
            hint=f"set SocketGroup={group} in mpsd.socket (systemctl edit mpsd.socket), or change api.group",
            limit="api.group",
        )


def _gid(group: str) -> int | None:
    """Return the number of a group; None for an empty name, and for an unknown group, which admits no user."""
    if not group:
        return None
    try:
        return getgrnam(group).gr_gid
    except KeyError:
        return None


def unpublish(path: Path) -> None:
    """Remove the socket's name, so that new connections fail at once.

    The lock is still held, so no other mpsd can have published a socket under this name meanwhile.
    """
    path.unlink(missing_ok=True)


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
