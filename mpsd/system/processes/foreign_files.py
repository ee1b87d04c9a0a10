"""The reads of what belongs to others, which may never end. mpsd calls them by a `ForeignReader`, and never itself.

The kernel reads environment, arguments and maps of a process under locks of that process, or from its memory, so
whoever owns the process can make a reader wait: by a page that a file system of the user's own must bring, for example.
Its mounts and its root may be thousands, or lie on a file system of the network. The other files of /proc (stat,
status, comm, cgroup) are the kernel's own facts, and no process delays them: `proc.py`.

Each argument and each result is JSON, since a `ForeignReader` passes it on.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from grp import getgrnam
from pathlib import Path, PurePosixPath
from pwd import getpwnam, getpwuid
from typing import Final, TypeAlias

from msgspec import Struct

from mpsd.core.model import Known, ProcessIdentity, Reading, Unknown
from mpsd.core.sanitize import text
from mpsd.core.setting_parsers import UserNames
from mpsd.system import clock
from mpsd.system.processes import namespaces, proc


class ForeignFile(StrEnum):
    """A file of /proc/PID that its process can delay."""

    ENVIRONMENT = "environ"
    ARGUMENTS = "cmdline"
    MAPS = "maps"
    MOUNTS = "mountinfo"


_MOST_READ: Final = 1 << 20
"""Maximum bytes of a file that are read; for a table of mounts, several thousand mounts. More was made on purpose."""

_MOST_MAPS: Final = 1 << 24
"""Maximum bytes of the maps of a process: the kernel's default allows 65,530."""

_MOST_KEPT: Final = 1024
"""Maximum bytes of the variables that are kept of an environment."""

_MOST_ENVIRONMENT: Final = 256 * 1024
"""Bytes of an environment that are searched for a token."""

_ROUNDS: Final = 3
"""Maximum passes over /proc, so that processes that start during a pass are found by the next."""

_EXECUTES: Final = 0.02
"""Seconds within which a process that executes a program gets its environment."""

_MOST_SCRIPT: Final = 256
"""Bytes of a script's first line that the kernel reads (BINPRM_BUF_SIZE)."""

_VARIABLE: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*=")


def _read(pid: int, file: ForeignFile, most: int) -> bytes:
    """Return the beginning of a file of a process. Raises OSError."""
    with Path(f"/proc/{pid}/{file}").open("rb") as opened:
        return opened.read(most)


# -- the claims of a process -------------------------------------------------------------------------------------------

Environment: TypeAlias = dict[str, str] | str | None
"""The variables that a process was started with, or why they are unknown; None if it has ended."""


def known_of(answer: Reading[Environment]) -> Reading[Mapping[str, str]] | None:
    """Return the variables of a process from the answer of a `ForeignReader`; None if the process has ended."""
    found = answer.value if isinstance(answer, Known) else answer.reason
    return Unknown(found) if isinstance(found, str) else None if found is None else Known(found)


def environment(pid: int, wanted: list[str], most: int = _MOST_KEPT) -> Environment:
    """Return the wanted ones of the variables that a process was started with.

    A name that ends with an underline stands for all that begin with it. `most` is the maximum of bytes that they may
    have together.

    /proc/PID/environ does not show later changes by setenv(3), but shows what the process writes over that area, as a
    program does that sets its title. So an area that may have a title alone is unknown, and not an environment without
    variables. An area without bytes is as unknown. A process has one if it was started without variables, while it
    executes a program, and once its first thread has ended (measured on Linux 6.18); it can also move its area.
    Sources: proc(5), PR_SET_MM in prctl(2).
    """
    try:
        raw = _read(pid, ForeignFile.ENVIRONMENT, _MOST_READ + 1)
    except (FileNotFoundError, ProcessLookupError):
        raw = b""
    except PermissionError as error:
        if not proc.has_no_memory(pid):
            return (
                f"/proc/{pid}/environ cannot be read by uid {os.geteuid()}: {error.strerror};"
                " root can, with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
            )
        raw = b""  # as root reads it
    if not raw and proc.live_ticks(pid) is None:
        return None
    found = variables_in(raw)
    if not found:
        return (
            f"/proc/{pid}/environ cannot be read: it shows no variables, because the process has overwritten them, as"
            " programs do that set their title (SPT_NOENV=1 keeps setproctitle from it), or was started with only one"
        )
    prefixes = tuple(each for each in wanted if each.endswith("_"))
    kept = {name: value for name, value in found.items() if name in wanted or name.startswith(prefixes)}
    if len(raw) > _MOST_READ or sum(len(name) + len(value) for name, value in kept.items()) > most:
        return f"the environment of process {pid} is larger than mpsd reads: {most} bytes of the variables that matter"
    return kept


def first_environment(pids: list[int], wanted: list[str]) -> dict[str, str]:
    """Return the environment of the first of these processes that shows one, as `environment` does; else an empty one.

    Raises OSError.
    """
    found = (environment(pid, wanted) for pid in pids)
    return next((each for each in found if isinstance(each, dict)), {})


def variables_in(raw: bytes) -> dict[str, str]:
    """Return the variables in an environment; empty where it has no name of a variable.

    A title fills the area with NULs, or reaches into it if it is long: what stands there alone may be the end of one.
    """
    # Of a name that occurs twice, getenv(3) returns the first.
    pairs = (text(each).partition("=") for each in reversed(_entries(raw)))
    return {name: value for name, _, value in pairs}


def _entries(raw: bytes) -> list[bytes]:
    entries = [each for each in raw.split(b"\0") if each]
    return entries if len(entries) > 1 and any(map(_VARIABLE.match, entries)) else []


def arguments(pid: int) -> tuple[str, ...]:
    """Return the arguments that a process was started with, or has replaced since.

    Raises OSError when they cannot be read.
    """
    raw = _read(pid, ForeignFile.ARGUMENTS, _MOST_READ).removesuffix(b"\0")
    return tuple(map(text, raw.split(b"\0"))) if raw else ()


def has_mapped(pid: int, directories: list[str]) -> list[str]:
    """Return those names of directories from which a process has mapped a file. Raises OSError."""
    maps = _read(pid, ForeignFile.MAPS, _MOST_MAPS)
    return [each for each in directories if f"/{each}/".encode() in maps]


def runs(pid: int, program: Path) -> bool:
    """Tell whether a process runs this very program, by device and inode; for a script its interpreter counts."""
    try:
        own = os.stat(f"/proc/{pid}/exe")  # noqa: PTH116 - the kernel's own link, also to a file that is deleted
        return any(os.path.samestat(own, each.stat()) for each in (program, *interpreter(program)))
    except OSError:
        return False


def running(pids: list[int], program: Path) -> list[int]:
    """Return those of these processes that run this very program, as `runs` tells."""
    return [pid for pid in pids if runs(pid, program)]


def interpreter(program: Path) -> Iterator[Path]:
    """Yield the interpreter of a script; nothing for another program. Raises OSError."""
    with program.open("rb") as file:
        first = file.read(_MOST_SCRIPT).partition(b"\n")[0]
    if first.startswith(b"#!") and (words := first[2:].split()):
        yield Path(os.fsdecode(words[0]))


class ProcessDetails(Struct, frozen=True):
    """A process by the kernel's facts and by its own claims."""

    identity: ProcessIdentity
    uid: int
    """Its real uid. A setuid program has another effective uid, and the environment of the user who started it."""
    started: datetime
    executable: str
    arguments: tuple[str, ...]
    variables: Environment
    """Its CUDA_* environment at its start."""
    runs: bool
    """Whether it runs the program that was asked for."""


def details(pid: int, program: Path) -> ProcessDetails | None:
    """Return the facts about a process, and whether it runs this program; None when it has ended.

    Raises PermissionError where it may not be inspected.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat, uid, variables = proc.stat_of(pid), proc.real_uid(pid), environment(pid, ["CUDA_"])
        if stat is None or uid is None or variables is None or stat.is_zombie:
            return None
        return ProcessDetails(
            identity=ProcessIdentity(pid, stat.start_ticks),
            uid=uid,
            started=clock.at_ticks(stat.start_ticks),
            executable=text(os.readlink(b"/proc/%d/exe" % pid).removesuffix(b" (deleted)")),  # noqa: PTH115 - bytes
            arguments=arguments(pid),
            variables=variables,
            runs=runs(pid, program),
        )
    return None


# -- searches by a variable --------------------------------------------------------------------------------------------


def leader_with(pids: list[int], variable: str, value: str) -> ProcessIdentity | None:
    """Return the one of these processes that was started with this variable."""
    wanted = os.fsencode(f"{variable}={value}")
    for pid in pids:
        with contextlib.suppress(*proc.UNSEEN):
            if wanted in _read(pid, ForeignFile.ENVIRONMENT, _MOST_READ).split(b"\0"):
                return proc.identify(pid)
    return None


def started_with(pids: list[int], variable: str, value: str) -> list[tuple[ProcessIdentity, str]]:
    """Return those of these processes that were started with a variable of this value, and an empty text for each.

    For one of which that is unknown, the text says why. Another process may have the pid by the end of a read.
    """
    found = []
    for process in filter(None, map(proc.identify, pids)):
        match environment(process.pid, [variable]):
            case str(reason):
                found.append((process, reason))
            case dict(variables) if variables.get(variable) == value:
                found.append((process, ""))
    return found


class Titled(Struct, frozen=True):
    """A process that has overwritten its environment, and that another one than its parent seems to have started."""

    process: ProcessIdentity
    parent: ProcessIdentity
    by_init: bool
    """Whether its parent is the init of a pid namespace, which becomes that of all processes without one."""
    cgroup: str
    """The path of its control group: `/` for the root group."""


class Carriers(Struct):
    """The processes of a user that carry tokens."""

    by_token: dict[str, list[ProcessIdentity]] = {}
    """The oldest first."""
    titled: list[Titled] = []
    """Those that may carry any token; the oldest first."""
    unread: int | None = None
    """The last process of the user that mpsd may not read; it counts as one without a token."""


def carriers(uid: int, variable: str, tokens: list[str]) -> Carriers:
    """Return the processes of a real uid that were started with a variable of one of these values.

    The value must stand near the beginning of the environment, since an environment can have megabytes and a user
    thousands of processes. A process that has overwritten its environment may have any value, if its parent
    did not start it. Others that overwrite theirs are on every machine, such as each session of sshd.

    Processes that start during the search are included, for a few passes, as are those that have no environment at
    first, because they are executing a program. Raises OSError when no descriptor is free.
    """
    found, seen, unclear = Carriers(), set[int](), set[int]()
    begun, rounds = clock.monotonic(), 0
    while rounds < _ROUNDS or (unclear and clock.monotonic() - begun < _EXECUTES):
        fresh = [pid for pid in proc.pids() if pid not in seen]
        if not fresh:
            break
        unclear.clear()
        for pid in fresh:
            # The effective user of a setuid program is root.
            if proc.effective_uid(pid) not in {0, uid} or proc.real_uid(pid) != uid:
                continue
            raw = _beginning(pid)
            value = _value_of(variable, raw or b"")
            if raw is None:
                found.unread = pid
            elif value in tokens and (identity := _of_user(pid, uid)) is not None:
                found.by_token.setdefault(value, []).append(identity)
            elif not raw:
                unclear.add(pid)
            elif not _entries(raw) and (titled := _titled(pid, uid)) is not None:
                found.titled.append(titled)
        seen.update(fresh)
        seen -= unclear
        rounds += 1
    for identities in found.by_token.values():
        identities.sort(key=lambda each: each.age)
    found.titled.sort(key=lambda each: each.process.age)
    return found


def _titled(pid: int, uid: int) -> Titled | None:
    """Return a process of a user that its parent does not seem to have started; None for any other.

    The parent is the init of a pid namespace, or is in another session; then the process may also have begun its own.
    """
    stat, identity = proc.stat_of(pid), _of_user(pid, uid)
    parent = proc.stat_of(stat.parent) if stat is not None else None
    if stat is None or identity is None or parent is None:
        return None
    by_init = proc.status(stat.parent, "NSpid")[-1:] == ["1"]
    if stat.session == parent.session and not by_init:
        return None
    return Titled(identity, ProcessIdentity(stat.parent, parent.start_ticks), by_init, proc.cgroup(pid) or "/")


def _beginning(pid: int) -> bytes | None:
    """Return the beginning of the environment of a process, empty where it has none; None if mpsd may not read it."""
    try:
        return _read(pid, ForeignFile.ENVIRONMENT, _MOST_ENVIRONMENT)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except PermissionError:
        return b"" if proc.has_no_memory(pid) else None  # as root reads it


def _value_of(variable: str, raw: bytes) -> str:
    """Return the value of a variable in an environment; empty where it has none."""
    _, _, rest = (b"\0" + raw).partition(b"\0" + os.fsencode(f"{variable}="))
    return rest.partition(b"\0")[0].decode("ascii", errors="replace")


def _of_user(pid: int, uid: int) -> ProcessIdentity | None:
    """Return the identity of the process with a pid, if it has this real uid and has not ended."""
    stat = proc.stat_of(pid)
    if stat is None or stat.is_zombie or proc.real_uid(pid) != uid or proc.start_ticks(pid) != stat.start_ticks:
        return None
    return ProcessIdentity(pid, stat.start_ticks)


# -- where a path leads a process --------------------------------------------------------------------------------------


def hidden(pid: int, directories: list[Path]) -> list[Path]:
    """Return those of mpsd's directories whose paths lead a process elsewhere, as they may in a container.

    A directory is left out where that is unknown: the process is gone or may not be inspected, or the path has a
    symbolic link. The file that the process finds there is not inspected.
    """
    return elsewhere(pid, [each for each in directories if each.resolve() == each])


def elsewhere(pid: int, paths: list[Path]) -> list[Path]:
    """Return those paths without symbolic links that lead a process elsewhere than mpsd; none if that is unknown.

    The file systems of the paths are not accessed, so another user may have chosen a path.
    """
    try:
        theirs = mounts(pid)
    except proc.UNSEEN:
        theirs = None
    if theirs is None:
        return []
    own = namespaces.own_mounts()
    return [each for each in paths if namespaces.place(own, each) != namespaces.place(theirs, each)]


def blind(pids: list[int], variable: str) -> dict[int, str]:
    """Return the directory in a variable of each of these processes whose path leads the process elsewhere than mpsd.

    So it is in a container that was started with the variable, and without the directory. A process is left out where
    that is unknown.
    """
    found = {}
    for pid in pids:
        variables = environment(pid, [variable])
        value = variables.get(variable) if isinstance(variables, dict) else None
        if value and elsewhere(pid, [Path(value)]):
            found[pid] = value
    return found


def mounts(pid: int) -> tuple[namespaces.Mount, ...] | None:
    """Return the mounts that a process sees; None where the table is too long. Raises OSError."""
    raw = _read(pid, ForeignFile.MOUNTS, _MOST_READ + 1)
    return None if len(raw) > _MOST_READ else namespaces.parse(raw.decode("utf-8", errors="surrogateescape"))


def device_at(pid: int, path: Path) -> str:
    """Return the device number of the file system at a path of a process, from its mounts; empty if that is unknown.

    Raises OSError.
    """
    table = mounts(pid)
    place = namespaces.place(table, PurePosixPath(path)) if table is not None else None
    return "" if place is None else place.device


def paths_of(pid: int, device: str, directory: Path) -> list[Path]:
    """Return the paths by which a process reaches a directory of a file system. Raises OSError."""
    table, wanted = mounts(pid) or (), namespaces.Place(device, PurePosixPath(directory))
    found = [
        each.point / wanted.path.relative_to(each.root.path)
        for each in table
        if each.root.device == device and wanted.path.is_relative_to(each.root.path)
    ]
    return [Path(each) for each in found if namespaces.place(table, each) == wanted]


# -- the user database, which may be a directory on the network --------------------------------------------------------


def look_up(names: list[str]) -> UserNames:
    """Look up the numbers of users and %groups in the user database, once."""
    uids, gids, unknown = dict[str, int](), dict[str, int](), list[str]()
    for name in names:
        try:
            if name.startswith("%"):
                gids[name[1:]] = getgrnam(name[1:]).gr_gid
            else:
                uids[name] = getpwnam(name).pw_uid
        except (KeyError, ValueError):  # ValueError: an invalid name, such as one that the locale cannot encode
            unknown.append(name)
    return UserNames(uids, gids, tuple(unknown))


def groups_of(uid: int) -> tuple[int, ...]:
    """Return the groups of a user, the primary one first; none where the user database does not have the user."""
    try:
        user = getpwuid(uid)
    except KeyError:
        return ()
    return user.pw_gid, *os.getgrouplist(user.pw_name, user.pw_gid)
