"""Programs that a command runs and waits for; terminal and signals work as if the user had called them directly."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Final

_PASSED_ON: Final = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)
_FROM_A_TERMINAL: Final = 0x80
"""SI_KERNEL: the kernel sent the signal for a key on the terminal, and the program got it too. Source: sigaction(2)."""


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program, found in PATH, to its end.

    Returns its exit status, or 128 plus the number of the signal that ended it. It gets the signals that are sent to
    mpsctl. Raises OSError when it cannot be started.
    """
    waited = _PASSED_ON | {signal.SIGCHLD}
    _heed_exits()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = os.posix_spawnp(arguments[0], [*arguments], environment, setsigmask=before)
        pidfd = os.pidfd_open(pid)
        try:
            return _follow(pid, pidfd, waited)
        finally:
            os.close(pidfd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(pid: int, pidfd: int, waited: frozenset[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _status(os.waitstatus_to_exitcode(status))
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD and received.si_code != _FROM_A_TERMINAL:
            signal.pidfd_send_signal(pidfd, received.si_signo)  # the program is not reaped yet, so its pidfd is valid


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
