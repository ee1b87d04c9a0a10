"""The one door to processes: mpsd starts, watches, signals and reaps them here and nowhere else.

A process is known by pid and start time, watched through a pidfd, and started from an argument list with an environment
that is built, not inherited.
"""

import asyncio
import errno
import os
import select
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from mpsd.core.capabilities import Capability
from mpsd.core.model import Known, ProcessIdentity
from mpsd.system import capabilities, clock, descriptors, exit_status, host_environment, proc
from mpsd.system.descriptors import Purpose

_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""What a child gets of mpsd's own environment. No CUDA_* among them: NVIDIA's daemon takes defaults from those, and no
NOTIFY_SOCKET: a child must not announce readiness in mpsd's name."""

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MAXIMUM_OUTPUT: Final = 16 * 1024 * 1024

_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})
"""What the kernel says of a pid that no process has. The number of a thread that leads no process is ENOENT (measured,
kernel 6.18), and EINVAL before; a number that no process can have is EINVAL. Source: pidfd_open(2)."""

SHORTAGES: Final = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
)
"""What the kernel says when it has no process, memory, descriptor or disk to give, or when a disk fails: no fault of
what was to be started. Sources: fork(2), open(2)."""


def environment(extra: Mapping[str, str], *, path: Sequence[str] = (), libraries: Path | None = None) -> dict[str, str]:
    """Build a child's environment: an allow-list of mpsd's own, `extra`, and `path` behind what PATH already has.

    `libraries` comes before what LD_LIBRARY_PATH already has.
    """
    built = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    directories = built.get("PATH", _DEFAULT_PATH).split(os.pathsep)
    directories += [directory for directory in path if directory not in directories]
    if libraries is not None:
        built["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(libraries), built.get("LD_LIBRARY_PATH"))))
    return {**built, "PATH": os.pathsep.join(directories), **extra}


def _status_of_stranger(identity: ProcessIdentity, pidfd: int) -> int | None:
    """Return the return code of a process that has ended and is no child of mpsd; None where nobody knows it.

    Until its parent has taken it away, /proc/PID/stat has it, and 0 where mpsd may not know. Source: proc_pid_stat(5).
    """
    for _ in range(2):  # it may be taken away between the two looks
        if (returncode := exit_status.of_pidfd(pidfd)) is not None:
            return returncode
        if status := proc.wait_status(identity):
            return os.waitstatus_to_exitcode(status)
    return None


class Process:
    """A process that is watched: started here, or adopted. Close it when done; that does nothing to the process."""

    __slots__ = ("_alike", "_child", "_gone", "_loop", "_pidfd", "_poll", "_started", "identity")
    # Thousands of them may be watched.

    def __init__(self, identity: ProcessIdentity, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._child = child
        self._poll: select.poll | None = None
        """Looks at the pidfd; made for those who ask, and mostly again and again."""
        self._gone: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that reads the pidfd, if one does."""
        self._started: datetime | None = None
        self._alike = False

    @property
    def pid(self) -> int:
        """The process id, which is this process's for as long as it is not closed."""
        return self.identity.pid

    @property
    def started(self) -> datetime:
        """When it started, as the clock was set when that was asked first."""
        if self._started is None:
            self._started = clock.at_ticks(self.identity.start_ticks)
        return self._started

    def sees_alike(self) -> bool:
        """Tell what `surroundings.sees_alike` does, or that nobody can; once it was so, it is taken to stay so.

        A process may go elsewhere later, as it may with a lease in its hands, which nobody could notice.
        """
        if self._alike:
            return True
        seen = host_environment.sees_alike(self.pid)
        self._alike = seen == Known(value=True)
        return seen != Known(value=False)

    def is_gone(self) -> bool:
        """Tell whether the process has ended, or is not watched any more."""
        if self._pidfd < 0:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._pidfd, select.POLLIN)
        return bool(self._poll.poll(0))

    def when_gone(self, call: Callable[[], None]) -> None:
        """Have this called from the running loop, once, when the process is gone; closing calls it off.

        It costs less than a task that waits, and is for those who watch thousands. One may do either, not both.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_gone, call)

    async def gone_within(self, seconds: float) -> bool:
        """Wait for its end, for this long at most, and tell whether it came."""
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
        """Wait until the process is gone, and return its return code; None where it is no child, and nobody knows.

        Any number of tasks may wait, and each may be cancelled without disturbing the others.
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
        """Watch the same process once more, through a descriptor of its own; whose child it is stays with this one.

        Raises as `descriptors.duplicate`.
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
    """Watch the process behind a pidfd, which is taken over; None (and it is closed) when it is gone or not visible.

    A process in a pid namespace that mpsd cannot see has pid 0 here, and one that is gone has -1 (measured, kernel
    6.18).
    """
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines())
    pid = int(fields.get("Pid", -1))
    ticks = proc.start_ticks(pid) if pid > 0 else None
    if ticks is None:
        os.close(pidfd)
        return None
    return Process(ProcessIdentity(pid, ticks), pidfd, None)


def find(pid: int) -> Process | None:
    """Watch whatever process has this pid now; None when there is none."""
    ticks = proc.start_ticks(pid)
    return None if ticks is None else adopt(ProcessIdentity(pid, ticks))


def adopt(identity: ProcessIdentity) -> Process | None:
    """Watch a process that is no child of mpsd; None when it is gone, or when its pid belongs to another by now."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OverflowError:
        return None  # nor can a process have a number that no int of C's has
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return None
    # The look comes after the descriptor is held, so that what is looked at cannot change under it.
    if proc.start_ticks(identity.pid) != identity.start_ticks:
        os.close(pidfd)
        return None
    return Process(identity, pidfd, None)


def lives(identity: ProcessIdentity) -> bool:
    """Tell whether a process has not ended: by a pidfd, since /proc calls one a zombie whose first thread has ended."""
    living = adopt(identity)
    if living is None:
        return False
    try:
        return not living.is_gone()
    finally:
        living.close()


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    new_session: bool = False,
    allowed: Collection[Capability] | None = None,
) -> Process:
    """Start a program with exactly this environment, and watch it. Raises OSError when it cannot be started.

    `new_session` puts it out of reach of a terminal's signals, and lets it outlive mpsd. `allowed` are the capabilities
    that it can have, as far as mpsd may take others away; None: all that mpsd can have.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(argv), env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=new_session, cwd="/"
        )

    child = start() if allowed is None or not capabilities.can_drop() else capabilities.without(allowed, start)
    # It cannot be reaped by anybody else, so that its pid is still its own here, even if it has ended already.
    pidfd = os.pidfd_open(child.pid)
    return Process(ProcessIdentity(child.pid, proc.start_ticks(child.pid) or 0), pidfd, child)


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program that was run to its end left behind. `returncode` is None when it overran and was killed."""

    command: str
    returncode: int | None
    output: str


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes,
    seconds: float,
    allowed: Collection[Capability] | None = None,
) -> Finished:
    """Run a program to its end, within a deadline, and return what it printed; kill and reap it when it overruns.

    Its input and output are files in memory: there is no pipe to fill, so neither side can block on the other.
    `allowed` is as for `spawn`.
    Raises OSError when it cannot be started.
    """
    source, sink = os.memfd_create("stdin"), os.memfd_create("stdout")
    try:
        os.write(source, stdin)
        os.lseek(source, 0, os.SEEK_SET)
        process = spawn(argv, env=env, stdin=source, stdout=sink, allowed=allowed)
        try:
            async with asyncio.timeout(seconds):
                returncode = await process.wait()
        except TimeoutError:
            returncode = None
        finally:
            # Reached on cancellation too: whoever leaves here leaves no front-end behind, and no zombie.
            process.signal(signal.SIGKILL)
            await process.wait()
            process.close()
        output = os.pread(sink, _MAXIMUM_OUTPUT, 0).decode("utf-8", errors="replace")
    finally:
        os.close(source)
        os.close(sink)
    return Finished(shlex.join(argv), returncode, output)
