"""The directories that mpsd writes to: where each thing lies, the lock that makes mpsd the only one, and the socket.

Every path is decided here, and everything is created with its final mode.
"""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from grp import getgrnam
from pathlib import Path
from typing import Final

from mpsd.core.errors import AlreadyRunningError, ConfigurationError
from mpsd.core.mps_facts import CONTROL_PATH_BYTES, LONGEST_SOCKET_NAME, SOCKET_PATH_BYTES
from mpsd.core.settings import Settings, Unadmitted
from mpsd.system import acl, path_safety, retry

LEFT: Final = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
"""What a control daemon makes in its pipe directory, and leaves there (measured; the last one by 550 and later)."""


@dataclass(frozen=True)
class DaemonPaths:
    """Where one control daemon has its things. Each path is made once, since it is looked at every second."""

    pipe_directory: Path
    log_directory: Path
    death_tally: Path
    """The file that its deaths are kept in."""
    record: Path
    """The file that tells which process mpsd started."""
    let_in: Path
    """The file that has who was let in to it since it started."""
    reading: Path
    """The file that tells how far its log was read."""
    own_limits: Path
    """The file that has the limits that mpsd itself set."""
    unserved: Path
    """The file that has the evidence against its server, where that serves nobody."""
    operator_intent: Path
    """The file that has what an operator wants of it."""

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
        """Where a control daemon of 550 and newer writes its pid (measured). mpsd does not read it."""
        return self.pipe_directory / "nvidia-cuda-mps-control.pid"

    @cached_property
    def log_fifo(self) -> Path:
        """The FIFO by which the daemon and its servers write the log: the daemon alone reads it (measured)."""
        return self.pipe_directory / "log"

    @cached_property
    def control_sockets(self) -> tuple[Path, Path]:
        """All sockets of the daemon: that one, and the one that root's front-ends use."""
        return self.control_socket, self.pipe_directory / "control_privileged"

    @cached_property
    def control_log(self) -> Path:
        """The file that the daemon's own output is appended to."""
        return self.log_directory / "control.log"

    @cached_property
    def server_log(self) -> Path:
        """The file that its servers write (NVIDIA's documentation)."""
        return self.log_directory / "server.log"

    def create(self) -> None:
        """Make both directories, for mpsd alone to write; a new pipe directory is closed until somebody opens it.

        Raises ConfigurationError.
        """
        _make(self.pipe_directory, 0o700)
        _make(self.log_directory, 0o755)

    def clear(self) -> None:
        """Remove the sockets, the FIFO and the lock that a dead control daemon left: the next one makes its own.

        Somebody whom the dead one let in may still have them open: a lock that is waited for keeps the next daemon from
        starting, and what is written into a FIFO ends its log (both measured, all versions).
        """
        for name in LEFT:
            (self.pipe_directory / name).unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse what lies in the pipe directory and is not mpsd's: the control daemon might write to it.

        Raises ConfigurationError.
        """
        for path in self.pipe_directory.iterdir():
            path_safety.check_file(path)


class RunDir:
    """The runtime directory, with the lock held for as long as this object is open."""

    def __init__(self, settings: Settings, lock: int) -> None:
        self._settings = settings
        self._lock = lock

    @classmethod
    def claim(cls, settings: Settings) -> "RunDir":
        """Create the directories and take the lock.

        Raises AlreadyRunningError when another mpsd has it, ConfigurationError when a directory cannot be used.
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
        """Let the lock go."""
        os.close(self._lock)

    @cached_property
    def daemons(self) -> Path:
        """Where the pipe directories are."""
        return self._settings.paths.runtime_dir / "mps"

    @cached_property
    def libraries(self) -> Path:
        """Where the driver's libraries are linked to, if it has a root of its own."""
        return libraries(self._settings)

    @cached_property
    def leases(self) -> Path:
        """The store of what ends with this boot."""
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
        """Where it stands how far the ends of processes are."""
        return self._settings.paths.runtime_dir / "ends"

    @cached_property
    def saved_compute_modes(self) -> Path:
        """The compute modes that GPUs are to get back."""
        return saved_compute_modes(self._settings)

    @cached_property
    def quarantines(self) -> Path:
        """The uids that are quarantined, which no reboot forgives."""
        return self._settings.paths.state_dir / "quarantines.json"

    @cached_property
    def last_event(self) -> Path:
        """The number of the last event, beside the history, so that damage to that does not have it given again."""
        return self._settings.paths.state_dir / "last-event"

    def daemon(self, name: str) -> DaemonPaths:
        """Say where the control daemon of this name has its things."""
        paths = self._settings.paths
        return DaemonPaths(
            self.daemons / name,
            paths.log_dir / name,
            death_tally=paths.runtime_dir / f"{name}.tally.json",
            record=paths.runtime_dir / f"{name}.process.json",
            let_in=paths.runtime_dir / f"{name}.let-in.json",
            reading=paths.runtime_dir / f"{name}.reading.json",
            own_limits=paths.runtime_dir / f"{name}.limits.json",
            unserved=paths.runtime_dir / f"{name}.unserved.json",
            operator_intent=paths.state_dir / f"{name}.intention.json",
        )


def libraries(settings: Settings) -> Path:
    """Say where the driver's libraries are linked to, if it has a root of its own."""
    return settings.paths.runtime_dir / "driver"


def saved_compute_modes(settings: Settings) -> Path:
    """Say where the compute modes are written down that GPUs are to get back."""
    return settings.paths.state_dir / "compute-modes.json"


def check(settings: Settings, names: Sequence[str], *, private: bool) -> None:
    """Refuse what cannot work, before anything is started.

    `private` is what `--root` asks for: a node for whoever can reach that directory. Raises ConfigurationError.
    """
    pipe = settings.paths.runtime_dir / "mps" / max(names, key=len, default="") / LONGEST_SOCKET_NAME
    for path, most in ((pipe, CONTROL_PATH_BYTES), (settings.socket, SOCKET_PATH_BYTES)):
        length = len(os.fsencode(path))
        if length > most:
            raise ConfigurationError(
                f"the socket path {path} has {length} bytes, and the maximum is {most}",
                hint="choose a shorter paths.runtime_dir (or --root)",
                limit="paths.runtime_dir",
            )
    if os.geteuid() == 0 and not private:
        closed = closed_to_others(settings.paths.runtime_dir)
        if closed is not None:
            raise ConfigurationError(
                f"other uids may not traverse {closed}, and MPS runs a server under its client's uid",
                hint=f"chmod o+x {closed}, or choose another paths.runtime_dir",
                limit="paths.runtime_dir",
            )


def check_acl_support(settings: Settings) -> None:
    """Refuse a runtime directory whose file system cannot keep who may reach a control daemon, where that matters.

    An mpsd that is not root's serves its own uid, which owns the directories. Raises ConfigurationError.
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
    """Return the first existing directory on the way to `path` that another uid cannot traverse, if there is one."""
    for directory in _components(path):
        try:
            mode = os.stat(directory).st_mode  # noqa: PTH116 - at every admission
        except FileNotFoundError:
            return None
        if not mode & stat.S_IXOTH:
            return Path(directory)
    return None


@cache
def _components(path: Path) -> tuple[str, ...]:
    """Return every directory on the way to a path, and the path."""
    return tuple(map(os.fspath, (*reversed(path.parents), path)))


def _make(directory: Path, mode: int) -> None:
    """Make a directory and its parents. No stranger may write to it, or put another one in its place."""
    try:
        path_safety.check_path(directory)  # before anything is made behind a stranger's link
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            directory.chmod(mode)
        path_safety.check_path(directory)
        own = path_safety.is_own(directory)
    except OSError as error:
        raise ConfigurationError(
            f"cannot create {directory}: {error.strerror}",
            hint="choose a directory that mpsd may write to, for example with --root; in a container, mount a"
            " volume there",
        ) from error
    if not own:
        raise ConfigurationError(
            f"{directory} is not private to mpsd: it is a symbolic link, belongs to another user, or is"
            " writable for all users, or for users or groups other than root's and mpsd's",
            hint="choose a directory that only mpsd can write to",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _not_writable(directory)


def _not_writable(directory: Path) -> ConfigurationError:
    """Say why mpsd cannot write to a directory, and what would let it."""
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
    """Return a listening unix socket at `path`, which appears there with its final owner and mode and not before.

    Whatever lay there is replaced: the lock proves that no living mpsd uses it. With a group that is unknown, the
    socket has mpsd's own. Raises ConfigurationError.
    """
    hidden = path.with_name(f".{os.getpid()}")  # no longer than the usual name: a socket's path is short of room
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        hidden.unlink(missing_ok=True)
        listener.bind(os.fspath(hidden))
        hidden.chmod(mode)
        gid = _gid(group)
        if gid is not None:
            os.chown(hidden, -1, gid)
        listener.listen(1024)
        hidden.rename(path)
    except OSError as error:
        listener.close()
        hidden.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror}", hint="check api.socket") from error
    return listener


def check_published(listener: socket.socket, path: Path, mode: int, group: str) -> None:
    """Refuse a listening socket that somebody else published, where it is not what the settings say.

    Raises ConfigurationError. Nothing about it is changed: it is not mpsd's own.
    """
    name = os.fsdecode(listener.getsockname())
    if name != os.fspath(path):
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
    gid = _gid(group)
    if gid is not None and found.st_gid != gid:
        raise ConfigurationError(
            f"{path} has group {found.st_gid}, but api.group is {group!r}",
            hint=f"set SocketGroup={group} in mpsd.socket (systemctl edit mpsd.socket), or change api.group",
            limit="api.group",
        )


def _gid(group: str) -> int | None:
    """Return the number of a group; None without one, and for one that is unknown, which gives nobody access."""
    if not group:
        return None
    try:
        return getgrnam(group).gr_gid
    except KeyError:
        return None


def unpublish(path: Path) -> None:
    """Take the socket's name away, so that new callers are told at once that nobody is there.

    The lock is still held, so nobody else can have published another socket under this name meanwhile.
    """
    path.unlink(missing_ok=True)


def remove_shared_memory(name: str) -> bool:
    """Remove what an MPS server made in /dev/shm, whose name begins with `cuda.shm.` and the uid of its owner.

    Returns whether it did.
    """
    path = Path("/dev/shm") / name  # noqa: S108 - where POSIX shared memory is, shm_overview(7)
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and name.startswith(f"cuda.shm.{found.st_uid}."):
            path.unlink()
            return True
    return False
