"""Programs that hold a lease of their own, and end with this process."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias, Unpack, cast

from mpsd.client.environment import own_connections
from mpsd.client.exchange import error_of
from mpsd.client.lease import Lease, Options
from mpsd.client.processes import become
from mpsd.client.processes.ends import end_clients
from mpsd.client.processes.starter import start
from mpsd.client.waiting import Progress
from mpsd.core.errors import InvalidRequestError, MpsdError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types

Argument: TypeAlias = "str | bytes | os.PathLike[str]"
Stream: TypeAlias = "int | IO[Any] | None"

_TERMINATION: Final = 5.0
"""Seconds that a program has to exit on SIGTERM, before SIGKILL."""


class Process(subprocess.Popen[bytes]):
    """A program under a lease: a `subprocess.Popen` with `lease`, of which the `with` block ends the program.

    Its `pid` is that of the program, which holds the lease.
    """

    _lease: "_LeaseOfProgram | None" = None

    def __init__(self, program: "_Program", descriptor: int) -> None:
        """Start the process that is to become a program; its order comes on the descriptor."""
        super().__init__(
            become.command(descriptor),
            pass_fds=[descriptor],
            cwd=program.cwd,
            stdin=program.stdin,
            stdout=program.stdout,
            stderr=program.stderr,
        )
        self.args = [*program.arguments]
        self._caller = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the program, where it has not ended, and close its streams; a forked child only closes its own."""
        try:
            if self.is_started_here:
                self.end()
        finally:
            if self.is_started_here:
                self.kill()  # where end() was interrupted before it could begin: Popen waits for the program's end
            super().__exit__(kind, error, traceback)

    @property
    def lease(self) -> Lease:
        """The lease of the program, which holds it."""
        assert self._lease is not None  # noqa: S101 - nobody gets a process without one
        return self._lease

    @property
    def is_started_here(self) -> bool:
        """Whether this very process started the program, and not the one that it was forked from."""
        return self._caller == os.getpid()

    def become(self, lease: "_LeaseOfProgram") -> None:
        """Take the lease that the process has, now that it is its program."""
        self._lease = lease
        lease.holder = self.pid if lease.id else None

    def end(self, within: float = _TERMINATION) -> int:
        """End the program and its lease, and return its exit status.

        mpsd first ends what it does on the GPU, as a signal in the middle of that may end the work of its neighbours.
        Then comes SIGTERM, and after `within` seconds SIGKILL.
        """
        try:
            if self.lease.id:
                end_clients(self.lease)
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                super().wait(within)
        finally:  # at once, where this is interrupted
            self.kill()
            status = self.wait()
        if self.lease.id:
            with contextlib.suppress(MpsdError):
                self.lease.refresh()
        return status

    def poll(self) -> int | None:
        """Return the exit status, or None, as of `subprocess.Popen`."""
        return self._reaped(super().poll())

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status, as of `subprocess.Popen`."""
        status = super().wait(timeout)
        self._reaped(status)
        return status

    def _reaped(self, status: int | None) -> int | None:
        if status is not None and self._lease is not None:
            self._lease.leave()
            _with_this_one.discard(self)
        return status


def spawn(
    arguments: Sequence[Argument],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    detached: bool = False,
    **request: Unpack[Options],
) -> Process:
    """Start a program under a lease of its own, without a shell, and return it.

        with mpsd.spawn(["python3", "train.py"], fraction=0.25, wait="10m") as program:
            print(program.lease.id, program.wait())

    The first arguments are those of `subprocess.Popen`, and the others those of `mpsd.lease`. The program holds its
    lease, which ends with it at the latest; no lease is left whatever process is killed. The program ends with this
    process, too: at its exit as `Process.end` does, and where it is killed, by SIGKILL. With `detached` it lives on.
    Programs that it starts itself end as it ends them.

    Raises the errors of `Lease.open` before anything runs, and OSError for a program that cannot be executed, such as
    FileNotFoundError, which leaves no lease. An exception during the wait, such as KeyboardInterrupt, gives it up.
    """
    if "pid" in request:
        raise InvalidRequestError("the program itself holds its lease", hint="leave out pid", limit="pid")
    program = _Program(arguments, env, cwd, stdin, stdout, stderr, is_detached=detached)
    lease = _LeaseOfProgram(program, request)
    with contextlib.ExitStack() as failed:
        failed.callback(program.abandon)
        lease.open(sets_environment=False)
        if lease.is_whole_gpu:
            program.start(lease, None)
        assert program.process is not None  # noqa: S101 - it was started, or an error was raised
        process = program.process
        process.become(lease)
        if not detached:
            _with_this_one.add(process)
        failed.pop_all()
        return process


class _Program:
    """What is to be executed, and the process that becomes it."""

    def __init__(
        self,
        arguments: Sequence[Argument],
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        *streams: Stream,
        is_detached: bool,
    ) -> None:
        if isinstance(arguments, str | bytes) or not arguments:
            raise TypeError("a program is a sequence of arguments, such as ['python3', 'train.py']")
        self.arguments = arguments
        self.cwd = cwd
        self.stdin, self.stdout, self.stderr = streams
        self.process: Process | None = None
        self.environment: Mapping[str, str] = os.environ if env is None else env
        self._is_detached = is_detached

    def start(
        self, lease: Lease, request: Mapping[str, object] | None, wait: float = 0.0, progress: Progress | None = None
    ) -> "answer_types.Lease | None":
        """Start the process, and return the lease that it takes by a request, once it has become the program.

        Without a request, it takes none. Raises MpsdError for a refusal, and OSError.
        """
        order = become.Order(
            arguments=[become.encoded(each) for each in self.arguments],
            environment={become.encoded(name): become.encoded(value) for name, value in self.environment.items()},
            request=None if request is None else {**request},
            wait=wait,
            socket=os.path.abspath(lease.client.path),  # noqa: PTH100 - unchanged, including links
            trusted=[*lease.client.trusted],
            parent=None if self._is_detached else os.getpid(),
        )
        own, its = socket.socketpair()
        with own:
            with its:
                self.process = start(lambda: Process(self, its.fileno()), _abandon)
            with contextlib.ExitStack() as failed:
                failed.callback(self.abandon)
                answer = self._ordered(own, order, progress)
                if answer is None:
                    status, name = self.process.wait(), os.fsdecode(self.arguments[0])
                    raise ChildProcessError(f"the process that was to become {name} ended before, with status {status}")
                failed.pop_all()
        return answer

    def abandon(self) -> None:
        """Kill the process, where there is one, and forget it."""
        process, self.process = self.process, None
        if process is not None:
            _abandon(process)

    def _ordered(
        self, its: socket.socket, order: become.Order, progress: Progress | None
    ) -> "answer_types.Lease | None":
        """Give the process its order, and return its lease when it is the program; None where it ended before."""
        with contextlib.suppress(BrokenPipeError):  # it was killed, and gives no answer
            its.sendall(json.dumps(order).encode(), socket.MSG_NOSIGNAL)
            its.shutdown(socket.SHUT_WR)
        answer = None
        for line in its.makefile("rb"):
            document = json.loads(line)
            if "errno" in document:
                raise OSError(document["errno"], os.strerror(document["errno"]), self.arguments[0])
            if "error" in document:
                raise _error(document["error"], progress)
            answer = document["lease"]
        return cast("answer_types.Lease | None", answer)


class _LeaseOfProgram(Lease):
    """A lease that a program takes for itself, and holds."""

    def __init__(self, program: _Program, options: Options) -> None:
        super().__init__(**options)
        self._program = program

    def leave(self) -> None:
        """Leave its end to mpsd, after that of the program: processes that the program started may be under it yet."""
        self._opened_by = None
        self.close()

    def _take(self, request: Mapping[str, object], progress: Progress) -> "answer_types.Lease":
        if "connections" not in self._request:  # then those that the program's own environment asks for
            connections = own_connections(self._program.environment)
            request = {**request, "connections": connections}
        answer = self._program.start(self, request, self._wait, progress)
        assert answer is not None  # noqa: S101 - it was requested
        return answer


def _error(document: Mapping[str, Any], progress: Progress | None) -> MpsdError:
    """Return the error that the process met, as it was there."""
    error = error_of(document["status"], document)
    error.retryable, error.is_answer = bool(document["retryable"]), bool(document["is_answer"])
    if isinstance(error, UnreachableError):
        error.socket = document["socket"]
    if document["is_reached"] and progress is not None:
        progress.lose(error, answered=True)
    return error


# -- the end -----------------------------------------------------------------------------------------------------------

_with_this_one: set[Process] = set()
"""The programs that end with this process."""


@atexit.register
def _end_programs() -> None:
    for each in [*_with_this_one]:
        if each.is_started_here:
            each.end()


def _abandon(process: Process) -> None:
    """Kill a process that has not become its program, or whose caller is not told of it."""
    process.kill()
    subprocess.Popen.__exit__(process, None, None, None)  # it closes the streams, and waits
