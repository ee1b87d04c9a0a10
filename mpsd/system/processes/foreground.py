"""Programs that a command runs and waits for; terminal and signals work as if the user had called them directly."""

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Final, Protocol

_PASSED_ON: Final = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)
_FROM_A_TERMINAL: Final = 0x80
"""SI_KERNEL: the kernel sent the signal for a key on the terminal, and the program got it too. Source: sigaction(2)."""


class Overseer(Protocol):
    """What `run_overseen` heeds while the program runs."""

    def fileno(self) -> int:
        """Return the descriptor of a socket on which it gets messages."""

    def heed(self, number: int | None) -> signal.Signals | None:
        """Handle what has arrived on the socket; return the signal that the program is to get now, if any.

        `number` is that of a signal which this process got for it; None: it is called for the socket, or the time.
        """

    def seconds(self) -> float | None:
        """Return the time until it wants to be called again; None: not before something happens."""


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program, found in PATH, to its end.

    Returns its exit status, or 128 plus the number of the signal that ended it. It gets the signals that are sent to
    mpsctl. Raises OSError when it cannot be started.
    """
    with _awaited(_PASSED_ON | {signal.SIGCHLD}) as before:
        pid = os.posix_spawnp(arguments[0], [*arguments], environment, setsigmask=before)
        with _opened(pid) as pidfd:
            return _follow(pid, pidfd, _PASSED_ON | {signal.SIGCHLD})


def run_overseen(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    overseer: Overseer,
    *,
    bind: Callable[[], None],
    heeded: frozenset[int],
) -> int:
    """Run a program likewise, under an overseer, who gets the signals `heeded` too, which the program does not get.

    `bind` is called in the child before it executes the program.
    """
    waited = _PASSED_ON | {signal.SIGCHLD, signal.SIGIO} | heeded
    with _awaited(waited) as before, _announced(overseer.fileno()):

        def begin() -> None:
            bind()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        program = subprocess.Popen(arguments, env=environment, preexec_fn=begin)  # noqa: PLW1509 - one thread runs
        with _opened(program.pid) as pidfd:
            status = _follow(program.pid, pidfd, waited, overseer)
        program.returncode = status  # it is reaped
        return status


@contextlib.contextmanager
def _awaited(waited: frozenset[int]) -> Iterator[set[signal.Signals | int]]:
    """Block these signals, so that they can be waited for, and yield the mask before."""
    _heed_exits()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _announced(descriptor: int) -> Iterator[None]:
    """Have the kernel send SIGIO when a socket becomes readable. Source: fcntl(2)."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _follow(pid: int, pidfd: int, waited: frozenset[int], overseer: Overseer | None = None) -> int:
    is_due = overseer is not None  # a message may have come before it was announced
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _status(os.waitstatus_to_exitcode(status))
        number: int | None = None
        if not is_due:
            seconds = None if overseer is None else overseer.seconds()
            received = signal.sigwaitinfo(waited) if seconds is None else signal.sigtimedwait(waited, seconds)
            number = None if received is None or received.si_signo == signal.SIGIO else received.si_signo
            if number == signal.SIGCHLD:
                continue
            if received is not None and number in _PASSED_ON and received.si_code == _FROM_A_TERMINAL:
                continue
        if number in _PASSED_ON:
            signal.pidfd_send_signal(pidfd, number)  # the program is not reaped yet, so its pidfd is valid
        if overseer is not None and (told := overseer.heed(number)) is not None:
            signal.pidfd_send_signal(pidfd, told)
        is_due = False


def output(arguments: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False) -> tuple[int, str]:
    """Run a program to its end, and return its exit status and its output without the last line end.

    With `quiet`, its messages are dropped.
    """
    _heed_exits()
    messages = subprocess.DEVNULL if quiet else None
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, stderr=messages, check=False)
    return _status(done.returncode), done.stdout.decode("utf-8", "backslashreplace").removesuffix("\n")


def _heed_exits() -> None:
    """Have the kernel report exits: where a caller left SIGCHLD ignored, `subprocess` takes every exit for success."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _status(code: int) -> int:
    """Return the exit status of a shell for a return code: for a signal, 128 plus its number."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def beside(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[IO[bytes]]:
    """Run a program in its own session, and yield its output.

    The program's stdin closes when the context or this process ends, which tells the program to exit; the context then
    waits for it. Raises OSError when it cannot be started.
    """
    _heed_exits()
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, start_new_session=True) as program:
        assert program.stdout is not None  # noqa: S101 - it is a pipe
        yield program.stdout


class Companion:
    """A program in its own session that ends when its stdin closes, as it does at the latest with this process."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        _heed_exits()
        pipe = subprocess.PIPE
        self._program = subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, start_new_session=True)
        self.pidfd = os.pidfd_open(self._program.pid)
        """Readable once it has ended."""

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def printed(self) -> int:
        """The descriptor of its output."""
        assert self._program.stdout is not None  # noqa: S101 - it is a pipe
        return self._program.stdout.fileno()

    def end(self, seconds: float) -> int:
        """Close its stdin, wait for its end, kill it after this time, and return its exit status."""
        assert self._program.stdin is not None  # noqa: S101 - it is a pipe
        with self._program:
            self._program.stdin.close()
            try:
                self._program.wait(seconds)
            except subprocess.TimeoutExpired:
                self._program.kill()
        os.close(self.pidfd)
        return _status(self._program.returncode)


def launch(arguments: Sequence[str], environment: Mapping[str, str], *, kept: int, output: int) -> int:
    """Start a program in its own session, wait until it has left for the background, and return its exit status.

    It inherits the descriptor `kept`. Raises OSError where it cannot be started.
    """
    _heed_exits()
    done = subprocess.run(
        arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        pass_fds=(kept,), check=False,
    )  # fmt: skip
    return _status(done.returncode)
