"""The only access to processes: mpsd starts, watches, signals and reaps them only here.

A process is identified by pid and start time, watched through a pidfd, and started from an argument list with an
environment that mpsd builds and the process does not inherit.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import shlex
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from mpsd.core.capabilities import Capability
from mpsd.core.model import Known, ProcessIdentity, Reading
from mpsd.system import clock
from mpsd.system.processes import capabilities, descriptors, namespaces, parentage, proc
from mpsd.system.processes.descriptors import Purpose

_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""The variables of mpsd's own environment that a child gets. CUDA_* are not among them, because NVIDIA's daemon takes
defaults from those, nor NOTIFY_SOCKET, because a child must not announce readiness in mpsd's name."""

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MAXIMUM_OUTPUT: Final = 16 * 1024 * 1024

_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})
"""Errors of the kernel for a pid that no process has. A thread id that is not a process id gives ENOENT (measured,
kernel 6.18), and EINVAL before; a number that no process can have gives EINVAL. Source: pidfd_open(2)."""

SHORTAGES: Final = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
)
"""Errors of the kernel when it has no free process, memory, descriptor or disk space, or when a disk fails: none is a
fault of the program to start. Sources: fork(2), open(2)."""

_INFO: Final = struct.Struct("=Q52xi")
"""The first version of `struct pidfd_info`, from which only the mask and the exit status are used."""

_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT: Final = 1 << 3
"""PIDFD_GET_INFO and PIDFD_INFO_EXIT. Source: linux/pidfd.h."""


def environment(extra: Mapping[str, str], *, path: Sequence[str] = (), libraries: Path | None = None) -> dict[str, str]:
    """Build a child's environment: an allow-list of mpsd's own, `extra`, and `path` after the directories of PATH.

    `libraries` goes before the directories of LD_LIBRARY_PATH.
    """
    built = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    directories = built.get("PATH", _DEFAULT_PATH).split(os.pathsep)
    directories += [directory for directory in path if directory not in directories]
    if libraries is not None:
        built["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(libraries), built.get("LD_LIBRARY_PATH"))))
    return {**built, "PATH": os.pathsep.join(directories), **extra}


class Process:
    """A watched process, started here or adopted. Closing this object does not affect the process."""

    def __init__(self, identity: ProcessIdentity, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._child = child
        self._poll: select.poll | None = None
        """Polls the pidfd; made at the first query."""
        self._gone: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that reads the pidfd, if any."""
        self._started: datetime | None = None
        self._alike = False
        self._contained: bool | None = None
        self._cgroup = ""

    @property
    def pid(self) -> int:
        """The process id, which stays this process's own until this object is closed."""
        return self.identity.pid

    @property
    def started(self) -> datetime:
        """The start time, by the clock at the first call."""
        if self._started is None:
            self._started = clock.at_ticks(self.identity.start_ticks)
        return self._started

    def sees_alike(self) -> Reading[bool]:
        """Tell what `namespaces.sees_alike` does.

        A result that is known to be true is kept: a process may change its mount namespace later, even while it holds a
        lease, but mpsd cannot notice that.
        """
        if self._alike:
            return Known(value=True)
        seen = namespaces.sees_alike(self.pid)
        self._alike = seen == Known(value=True)
        return seen

    def cgroup(self) -> str:
        """Return the path of its control group at the first look; the root's where it shows none."""
        if not self._cgroup:
            self._cgroup = proc.cgroup(self.pid) or "/"
        return self._cgroup

    def is_contained(self) -> bool:
        """Tell what `namespaces.is_contained` does, by the first look: no process leaves its container."""
        if self._contained is None:
            self._contained = namespaces.is_contained(self.pid)
        return self._contained

    def is_gone(self) -> bool:
        """Tell whether the process has ended, or is not watched any more."""
        if self._pidfd < 0:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._pidfd, select.POLLIN)
        return bool(self._poll.poll(0))

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this once from the running loop when the process is gone; closing cancels the call.

        This costs less than a task that waits, for callers that watch thousands. Use either this or `wait`, not both.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_gone, call)

    async def gone_within(self, seconds: float) -> bool:
        """Wait for its end, at most this long, and tell whether it has ended."""
        try:
            async with asyncio.timeout(seconds):
                await self.wait()
        except TimeoutError:
            return False
        return True

    def _on_gone(self, call: Callable[[], None]) -> None:
        self._stop_reading()
        call()

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._pidfd)
            self._loop = None

    async def wait(self) -> int | None:
        """Wait until the process is gone, and return its return code.

        The code is None where it is unknown, for a process that is no child. Any number of tasks may wait, and each may
        be cancelled without disturbing the others.
        """
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self.when_gone(partial(_settle, self._gone))
        await asyncio.shield(self._gone)
        return self._child.poll() if self._child is not None else _status_of_stranger(self.identity, self._pidfd)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process, never to another with its pid; False when it is gone already."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def duplicate(self, purpose: Purpose | None = None) -> "Process":
        """Watch the same process once more, through another descriptor; only this object can reap it.

        Raises the errors of `descriptors.duplicate`.
        """
        return Process(self.identity, descriptors.duplicate(self._pidfd, purpose), None)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd < 0:
            return
        self._stop_reading()
        if self._gone is not None:
            self._gone.cancel()
        os.close(self._pidfd)
        self._pidfd = -1


def _settle(gone: "asyncio.Future[None]") -> None:
    if not gone.done():
        gone.set_result(None)


def from_pidfd(pidfd: int) -> Process | None:
    """Watch the process of a pidfd, and take over the pidfd.

    Returns None, and closes the pidfd, when the process is gone or not visible. A process in a pid namespace that mpsd
    cannot see has pid 0 here, and one that is gone has -1 (measured, kernel 6.18).
    """
    with contextlib.ExitStack() as unless_watched:
        unless_watched.callback(os.close, pidfd)
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines())
        identity = proc.identify(pid) if (pid := int(fields.get("Pid", -1))) > 0 else None
        if identity is None:
            return None
        unless_watched.pop_all()
    return Process(identity, pidfd, None)


def find(pid: int) -> Process | None:
    """Watch the process that has this pid now; None when there is none."""
    identity = proc.identify(pid)
    return None if identity is None else adopt(identity)


def adopt(identity: ProcessIdentity) -> Process | None:
    """Watch a process that is no child of mpsd; None when it is gone, or when another process has its pid now."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OverflowError:
        return None  # no process can have a number beyond a C int
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return None
    with contextlib.ExitStack() as unless_watched:
        unless_watched.callback(os.close, pidfd)
        # This check follows the opening of the descriptor, so that the process cannot change in between.
        if proc.start_ticks(identity.pid) != identity.start_ticks:
            return None
        unless_watched.pop_all()
    return Process(identity, pidfd, None)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = subprocess.STDOUT,
    new_session: bool = False,
    allowed: frozenset[Capability] | None = None,
    bound: bool = False,
) -> Process:
    """Start a program with exactly this environment, and watch it. Raises OSError when it cannot be started.

    `new_session` keeps a terminal's signals from it, and lets it outlive mpsd. `allowed` are the capabilities that it
    can have, as far as mpsd may drop others; None: all that mpsd can have. It does not inherit mpsd's protection from
    the kernel's out-of-memory killer. `bound`: the kernel kills it when mpsd ends, however that ends.
    """
    bind = parentage.bound(signal.SIGKILL) if bound else None

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
            cwd="/",
            preexec_fn=bind,  # noqa: PLW1509 - one call to the kernel
        )

    child = start() if allowed is None or not capabilities.can_drop() else capabilities.without(allowed, start)
    # Only mpsd can reap it, so its pid is still its own here, even if it has ended already.
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(child.wait)
        on_failure.callback(child.kill)  # it has not begun, and nobody could watch it
        _give_up_protection(child.pid)
        identity = ProcessIdentity(child.pid, proc.start_ticks(child.pid) or 0)
        pidfd = os.pidfd_open(child.pid)
        on_failure.pop_all()
    return Process(identity, pidfd, child)


def _give_up_protection(pid: int) -> None:
    """Let the kernel end a program for lack of memory like any other, and all that the program starts. Raises OSError.

    The servers of users are such programs, and inherit the score of their control daemon. If mpsd has CAP_SYS_RESOURCE,
    the user of a server cannot lower its score again. Source: proc_pid_oom_score_adj(5).
    """
    if int(Path("/proc/self/oom_score_adj").read_text()) < 0:
        Path(f"/proc/{pid}/oom_score_adj").write_text("0")


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a program that ran to its end.

    `returncode` is None when it exceeded its deadline and was killed.
    """

    command: str
    returncode: int | None
    output: str


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes,
    seconds: float,
    allowed: frozenset[Capability] | None = None,
) -> Finished:
    """Run a program to its end within a deadline, and return its output; kill and reap it when it exceeds the deadline.

    Its input and output are files in memory: there is no pipe to fill, so neither side can block on the other.
    `allowed` has the meaning that it has for `spawn`. Raises OSError when it cannot be started.
    """
    with memory_file("stdin") as source, memory_file("stdout") as sink:
        os.write(source, stdin)
        os.lseek(source, 0, os.SEEK_SET)
        process = spawn(argv, env=env, stdin=source, stdout=sink, allowed=allowed)
        try:
            async with asyncio.timeout(seconds):
                returncode = await process.wait()
        except TimeoutError:
            returncode = None
        finally:
            # Cancellation comes here too: no front-end and no zombie is left behind.
            process.signal(signal.SIGKILL)
            await process.wait()
            process.close()
        output = os.pread(sink, _MAXIMUM_OUTPUT, 0).decode("utf-8", errors="replace")
    return Finished(shlex.join(argv), returncode, output)


@contextlib.contextmanager
def memory_file(name: str) -> Iterator[int]:
    """Make a file in memory for a program's input or output. Raises OSError."""
    descriptor = os.memfd_create(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- how a process ended -----------------------------------------------------------------------------------------------


def _status_of_stranger(identity: ProcessIdentity, pidfd: int) -> int | None:
    """Return the return code of a process that has ended and is not a child of mpsd; None where it is unknown.

    /proc/PID/stat has it until the parent reaps the process, and 0 where mpsd may not read it. Source:
    proc_pid_stat(5).
    """
    for _ in range(2):  # the parent may reap it between the two reads
        if (returncode := returncode_of(pidfd)) is not None:
            return returncode
        with contextlib.suppress(OSError):  # its end is certain, and only the code is unknown without a descriptor
            if status := proc.wait_status(identity):
                return os.waitstatus_to_exitcode(status)
    return None


def returncode_of(pidfd: int) -> int | None:
    """Return the return code of a process that its parent has reaped; None where the kernel does not report it.

    Linux 6.15 and newer report it (measured on 6.18).
    """
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, answer)
    except OSError:
        return None  # older kernels do not have this call
    mask, status = _INFO.unpack(answer)
    return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None


def describe_end(returncode: int | None) -> str:
    """Describe how a process ended, from a return code in the form of subprocess; None where it is unknown."""
    if returncode is None:
        return "ended in a way that is not known (it was adopted, so its status went to another parent)"
    name = signal_of(returncode)
    return f"killed by {name}" if name is not None else f"exited with status {returncode}"


def signal_of(returncode: int | None) -> str | None:
    """Return the name of the signal that ended a process; None for a process that exited, or where it is unknown."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # the real-time signals between the first and the last have no name
        return f"signal {-returncode}"
