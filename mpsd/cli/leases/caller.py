"""The caller of mpsctl and its environment: a lease of `mpsctl admit` is bound to the calling shell or program."""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import now, print_answer
from mpsd.cli.render import as_env_file, as_exports
from mpsd.cli.users import name_of
from mpsd.client import Client
from mpsd.client.environment import environment as environment_of
from mpsd.client.environment import foreign

if TYPE_CHECKING:
    from mpsd.client import answer_types

_PF_FORKNOEXEC: Final = 0x40
"""From linux/sched.h: the process was forked and has not called exec since. `ps` shows it as F 1."""


def calling_program() -> int:
    """Return the pid of the program that called this one; 0 when it is in another pid namespace.

    In `eval "$(mpsctl admit ...)"` the parent may be a short-lived subshell. The kernel marks it as a forked copy of
    its shell, so this function follows the copies up to the original shell.
    """
    return _original(os.getppid())


def reading_program() -> int | None:
    """Return the pid of the calling program or ancestor that reads this program's output; None where none does.

    In `eval "$(timeout 5 mpsctl admit -o env)"` that is the shell, while the direct caller is the short-lived
    `timeout`. The kernel shows which process has the other end of the pipe.
    """
    pipe = os.fstat(1)
    if not stat.S_ISFIFO(pipe.st_mode):
        return None
    return next((_original(pid) for pid in family(os.getppid()) if _reads(pid, (pipe.st_dev, pipe.st_ino))), None)


def environment() -> dict[str, str]:
    """Return the environment that this program was called with, without Python's own additions.

    In the C locale, Python sets LC_CTYPE for itself (PEP 538), which a program that mpsctl executes must not inherit.
    """
    found = dict(os.environ)
    if "LC_CTYPE" in found:
        try:
            called = Path("/proc/self/environ").read_bytes()
        except OSError:
            return found
        if not any(each.startswith(b"LC_CTYPE=") for each in called.split(b"\0")):
            del found["LC_CTYPE"]
    return found


def name(pid: int) -> str:
    """Return the name of a process, with its pid."""
    comm = _comm(pid)
    return f"{comm} (pid {pid})" if comm else f"pid {pid}"


def _comm(pid: int) -> str:
    """Return the kernel's name of a process; empty where it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def unset(names: Iterable[str]) -> str:
    """Return the line that unsets variables in the shell that evaluates it, fish or another; empty without any."""
    joined = " ".join(names)
    verb = "set -e" if _comm(reading_program() or calling_program()) == "fish" else "unset"
    return f"{verb} {joined}" if joined else ""


def print_lease(api: Client, form: str, lease: "answer_types.Lease", share: int | None = None) -> None:
    """Print a lease in any format; the formats for programs contain its token."""
    if form == "env":
        variables = environment_of(api, lease, share)
        if inherited := foreign(os.environ, variables):
            click.echo(unset(inherited))
        click.echo(as_exports(variables))
    elif form == "env-file":
        click.echo(as_env_file(environment_of(api, lease, share)))
    else:
        from mpsd.cli import views

        print_answer(form, lease, lambda safe: views.lease(safe, now()))


def _original(pid: int) -> int:
    while (original := _copied_from(pid)) is not None:
        pid = original
    return pid


def _reads(pid: int, pipe: tuple[int, int]) -> bool:
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # gone or hidden: treated as unrelated
        return False
    for each in opened:
        try:
            found = each.stat()
            if (found.st_dev, found.st_ino) == pipe:
                lines = Path(f"/proc/{pid}/fdinfo/{each.name}").read_bytes().split(b"\n")
                flags = next(line for line in lines if b"flags" in line)
                if int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY:
                    return True
        except OSError:  # closed meanwhile
            continue
    return False


def family(pid: int) -> Iterator[int]:
    """Yield a process and its ancestors, as far as they are visible."""
    while pid > 0:
        yield pid
        try:
            pid, _ = _parent_and_flags(pid)
        except OSError:
            return


def _copied_from(pid: int) -> int | None:
    """Return the parent of which this process is a forked copy; None when it executed its own program.

    The command lines are compared as well: a service that forks a worker for each session names the workers
    differently, and a copy whose original is gone has another parent.
    """
    try:
        parent, flags = _parent_and_flags(pid)
        copied = flags & _PF_FORKNOEXEC and _command_line(pid) == _command_line(parent)
    except OSError:  # gone or hidden: treated as unrelated
        return None
    return parent if copied else None


def _parent_and_flags(pid: int) -> tuple[int, int]:
    """Read two fields of /proc/PID/stat, counted from the end of the name, which may contain any character."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[6])


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def use(lease: "answer_types.Lease") -> str:
    """Say for which programs a lease is, and what to type for them."""
    share = " --share N" if len(lease["gpus"]) > 1 else ""
    shown, owner = f'eval "$(mpsctl show {lease["id"]} -o env{share})"', lease["owner"]
    match lease["holders"][0] if lease["holders"] else None:
        case {"kind": "process", "pid": int(pid)} if _uid(pid) not in {None, owner["uid"]}:
            start = f"setpriv --reuid {owner['uid']} --regid {owner['gid']} --init-groups PROGRAM"
            return f"for a program that runs as {name_of(owner['uid'])}: ({shown}; {start})"
        case {"kind": "process", "pid": int(pid)} if pid in family(os.getppid()):
            return f"for this shell and what it starts: {shown}"
        case {"kind": "process", "pid": int(pid)}:
            return f"in {name(pid)}, for what it starts: {shown}"
        case {"kind": "claim"}:
            return f"with its MPSD_LEASE_TOKEN: mpsctl claim {lease['id']} -- PROGRAM"
        case {"unit": str(group)} | {"container": str(group)} | {"cgroup": str(group)}:
            return f"in {group}, for what it starts: {shown}"
        case _:
            return f"for a program with its environment: {shown}"


def _uid(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
