"""Starts mpsd by fork, from a process that has imported all of it: a start then takes a tenth of its usual time.

The started mpsd is the usual one: a separate process that runs `mpsd run` from the command line to its end. Only the
imports were done before, once. The tests need a thousand starts, and the imports are nine tenths of each.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent


class ForkServer:
    """The process that forks."""

    def __init__(self, library: Path | None = None) -> None:
        """Start it, with this library loaded into it and into each mpsd, if one is given."""
        preload = {"LD_PRELOAD": str(library)} if library is not None else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            env={**os.environ, **preload},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )
        assert self.ask() == os.getpid()  # the server is ready

    def ask(self, **order: object) -> int:
        """Send an order, and return the number in its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, argv: Sequence[str], log: Path, variables: Mapping[str, str], **fate: int) -> "Child":
        """Have `mpsd ARGV` started, with this environment, its output appended to a file; `fate` is for `kill_at`."""
        return Child(self, self.ask(argv=argv, log=str(log), variables=dict(variables), fate=fate))

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=10)


class Child:
    """A process that a fork server started; its interface is that of subprocess.Popen."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit status, if it has ended."""
        return self._look(0)

    def wait(self, timeout: float) -> int:
        """Wait for its exit status, for this many seconds at most."""
        status = self._look(timeout)
        assert status is not None, f"mpsd, pid {self.pid}, did not end within {timeout:g} s"
        return status

    def _look(self, seconds: float) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(seconds * 1000):
                self.returncode = self._fork_server.ask(reap=self.pid)
                os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(orders: Iterator[str]) -> None:
    """Carry out the orders, one a line, and answer each with a number."""
    for line in orders:
        order = json.loads(line)
        match order:
            case {"argv": argv}:
                answer = os.fork()
                if answer == 0:
                    _become(argv, order)
            case {"reap": pid}:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case _:
                answer = os.getppid()
        print(answer, flush=True)  # noqa: T201 - it is a program: this is what it says


def _become(argv: Sequence[str], order: dict[str, Any]) -> None:
    """Become mpsd, to its end."""
    from mpsd.__main__ import main  # noqa: PLC0415 - the tests themselves need nothing of it

    null, log = os.open("/dev/null", os.O_RDONLY), os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.clear()
    os.environ.update(order["variables"])
    if fate := order["fate"]:
        ctypes.CDLL(None).kill_at(ctypes.c_long(fate["kill_at"]), fate["torn"])
    sys.argv = ["mpsd", *argv]
    status = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()  # like Python at an uncaught exception
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def running_fork_server(library: Path | None = None) -> Iterator[ForkServer]:
    """Start a fork server, yield it, and end it."""
    started = ForkServer(library)
    try:
        yield started
    finally:
        started.close()


if __name__ == "__main__":
    # Imports here happen once: everything that a command imports when it runs.
    import uvloop  # noqa: F401

    import mpsd.__main__
    import mpsd.daemon.http.startup_refusal
    import mpsd.daemon.service
    import mpsd.simulator.control
    import mpsd.simulator.gpus
    import mpsd.system.configuration
    import mpsd.system.event_loop  # noqa: F401

    _serve(iter(sys.stdin.readline, ""))
