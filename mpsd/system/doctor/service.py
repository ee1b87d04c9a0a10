"""mpsd from outside: its socket and the listener there, the holder of its lock, its configuration file and units."""

import os
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mpsd.core.doctor.finding import ConfigurationSeen, SocketSeen
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import Known, Reading, Unknown
from mpsd.system.doctor.machine import reading
from mpsd.system.host.configuration import USUAL, read_configuration
from mpsd.system.processes import descriptors, process
from mpsd.system.sockets import credentials

_UNITS: Final = ("mpsd.service", "mpsd.socket")

_PROPERTIES: Final = (
    "Id", "LoadState", "ActiveState", "SubState", "Result", "UnitFileState", "NRestarts", "ExecMainStatus",
    "FragmentPath", "DropInPaths", "KillMode", "PrivateDevices", "PrivateIPC", "PrivateUsers",
    "PrivateTmp", "RuntimeDirectory", "RuntimeDirectoryPreserve",
)  # fmt: skip

_DEADLINE: Final = 5.0
"""Timeout in seconds for a connection, and for systemctl."""

_KINDS: Final = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link", stat.S_IFIFO: "FIFO"}


def look_at_socket(path: Path) -> SocketSeen:
    """Inspect the API socket, and connect to it."""
    for directory in reversed(path.absolute().parents):
        if directory.is_dir() and not os.access(directory, os.X_OK):
            return SocketSeen(path, None, closed=directory)
    try:
        found = path.lstat()
    except OSError:
        return SocketSeen(path, None)
    kind = "socket" if stat.S_ISSOCK(found.st_mode) else _KINDS.get(stat.S_IFMT(found.st_mode), "device")
    seen = SocketSeen(path, kind, found.st_mode & 0o7777, found.st_uid)
    if kind != "socket":
        return seen
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_DEADLINE)
        try:
            connection.connect(os.fspath(path))
            listener = credentials.peer_credentials(connection)
        except OSError:
            return seen  # mpsctl's own client says why
    return replace(seen, listener=(listener.pid, listener.uid))


def lock_holder(runtime_dir: Path) -> Reading[int | None]:
    """Return the pid of the process that holds the lock of a runtime directory."""
    lock = runtime_dir / "mpsd.lock"
    return reading(lock, lambda: next((each.pid for each in descriptors.holders(lock)), None))


def configuration(path: Path | None, root: Path | None) -> ConfigurationSeen:
    """Read the named configuration file, or the usual one; `root` is the value of mpsd's --root."""
    where = path or USUAL
    try:
        settings = read_configuration(path)
    except ConfigurationError as error:
        return ConfigurationSeen(where, Unknown(error.detail), error.hint)
    return ConfigurationSeen(where, Known(settings if root is None else settings.under(root)))


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """The arguments that an mpsd was started with; None for each that it did not get."""

    config: Path | None = None
    root: Path | None = None
    control: str | None = None


def arguments_of(pid: int, arguments: Sequence[str], socket: Path) -> ServiceArguments:
    """Return the arguments that an mpsd that listens on this socket was started with.

    `mpsd demo` gets none, and writes everything to the parent of its runtime directory.
    """
    if "run" not in arguments:
        return ServiceArguments(root=socket.parent.parent)
    found: dict[str, str] = {}
    for each, behind in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = each.partition("=")
        if name in {"--config", "--root", "--control"}:
            found[name] = value if equals else behind
    paths = {name: _of_process(pid, Path(value)) for name, value in found.items()}
    return ServiceArguments(paths.get("--config"), paths.get("--root"), found.get("--control"))


def _of_process(pid: int, path: Path) -> Path:
    """Resolve a path against the working directory of the process that got it as an argument."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) / path  # noqa: PTH115 - the kernel's own link
    except OSError:
        return path


async def units() -> Reading[Mapping[str, Mapping[str, str]]]:
    """Return systemd's properties of mpsd's units, by name, for those that it has."""
    program = shutil.which("systemctl")
    if program is None or not os.access("/run/systemd/system", os.F_OK):  # sd_booted(3)
        return Unknown("this machine does not run systemd, or systemd is not visible from here")
    command = [program, "show", f"--property={','.join(_PROPERTIES)}", *_UNITS]
    try:
        done = await process.run(command, env=process.environment({}), stdin=b"", seconds=_DEADLINE)
    except OSError as error:
        return Unknown(f"{program}: {error.strerror}")
    if done.returncode != 0:
        return Unknown(f"{done.command}: {done.output.strip() or process.describe_end(done.returncode)}")
    found = read_units(done.output)
    return Known(found) if found else Unknown(f"systemd has none of the units {', '.join(_UNITS)}")


def read_units(output: str) -> dict[str, dict[str, str]]:
    """Parse the output of `systemctl show`: a line for each property, and a blank line between units."""
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in output.split("\n\n")]
    return {block["Id"]: block for block in blocks if block.get("Id") and block.get("LoadState") != "not-found"}
