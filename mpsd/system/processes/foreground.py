"""Programs that mpsctl runs and waits for; terminal and signals work as if the user had called the program directly."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_PASSED_ON: Final = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)
_FROM_A_TERMINAL: Final = 0x80
"""SI_KERNEL: the kernel sent the signal for a key on the terminal, and the program got it too. Source: sigaction(2)."""

_MOST: Final = 1024 * 1024
"""Maximum number of bytes of a program's output that are read."""


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program, found in PATH, to its end.

    Returns its exit status, or 128 plus the number of the signal that ended it. It gets the signals that are sent to
    mpsctl. Raises OSError when it cannot be started.
    """
    waited = _PASSED_ON | {signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller may have left it ignored, and then no exit is reported
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
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD and received.si_code != _FROM_A_TERMINAL:
            signal.pidfd_send_signal(pidfd, received.si_signo)  # the program is not reaped yet, so its pidfd is valid


def output(arguments: Sequence[str], environment: Mapping[str, str], *, most: int = _MOST) -> tuple[int, str]:
    """Run a program to its end, and return its exit status and its output without the last line end.

    At most `most` bytes of the output are read.
    """
    sink = os.memfd_create("stdout")
    try:
        pid = os.posix_spawnp(arguments[0], [*arguments], environment, file_actions=[(os.POSIX_SPAWN_DUP2, sink, 1)])
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(os.dup(sink), "rb") as printed:
            printed.seek(0)
            text = printed.read(most).decode("utf-8", "backslashreplace").removesuffix("\n")
    finally:
        os.close(sink)
    return code if code >= 0 else 128 - code, text


@contextlib.contextmanager
def beside(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[int]:
    """Run a program in its own session, and yield the descriptor that reads its output.

    The program's stdin closes when the context or this process ends, which tells the program to exit; the context then
    waits for it. Raises OSError when it cannot be started.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, ours = os.pipe()
    printed, stdout = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1)]
        pid = os.posix_spawnp(arguments[0], [*arguments], environment, file_actions=actions, setsid=True)
    except OSError:
        os.close(ours)
        os.close(printed)
        raise
    finally:
        os.close(stdin)
        os.close(stdout)
    try:
        yield printed
    finally:
        os.close(ours)
        os.waitpid(pid, 0)
        os.close(printed)
