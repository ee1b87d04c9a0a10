"""Starts programs by fork, from a process that has imported all of them: a start then takes a tenth of its time.

A started program is the usual one: a separate process that runs from its command line to its end. Only the imports
were done before, once. The tests need thousands of starts, and the imports are nine tenths of each. Its parent is the
fork server: where that matters, and in the tests of the start itself, a test starts the program as users do. There are
two kinds of fork server, since mpsd has nothing of gRPC.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Self

import click

from mpsd.core.capabilities import Capability

_ROOT = Path(__file__).parent.parent

_PROGRAMS: Final = {
    "mpsd": {"mpsd": "mpsd.__main__", "mpsctl": "mpsd.cli.main"},
    "kubernetes": {
        "mpsd-kubernetes": "mpsd.kubernetes.__main__",
        "kubelet": "tests.kubernetes.plugin.kubelet_program",
        "kubelet-dra": "tests.kubernetes.dra.kubelet_program",
    },
}
"""The programs of each kind of fork server, with the modules of their main functions."""

_IMPORTS: Final = {
    "mpsd": (
        "mpsd.daemon.http.startup_refusal",
        "mpsd.daemon.service",
        "mpsd.simulator.control",
        "mpsd.simulator.gpus",
        "mpsd.system.host.configuration",
        "mpsd.system.host.event_loop",
        *_PROGRAMS["mpsd"].values(),
    ),
    "kubernetes": (
        "mpsd.kubernetes.api_server",
        "mpsd.kubernetes.dra.service",
        "mpsd.kubernetes.service",
        *_PROGRAMS["kubernetes"].values(),
    ),
}
"""The modules that they import when they run, and not before."""


class ForkServer:
    """The process that forks."""

    def __init__(self, kind: str, loader: Mapping[str, str]) -> None:
        """Start one of this kind; `loader` is for the dynamic loader, which reads it only when a program starts."""
        self.loader = loader
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", kind],
            env={**os.environ, **loader},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )
        self._one_at_a_time = threading.Lock()
        assert self.ask() == os.getpid()  # the server is ready

    def ask(self, **order: object) -> int:
        """Send an order, and return the number in its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one_at_a_time:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())

    def start(
        self,
        argv: Sequence[str],
        log: Path,
        variables: Mapping[str, str],
        *,
        program: str = "mpsd",
        fate: Mapping[str, int] | None = None,
        durations: Mapping[str, float] | None = None,
        capabilities: Sequence[str] | None = None,
    ) -> "Child":
        """Start a program with this environment, its output appended to a file.

        `capabilities` are all that it has, by their names without `CAP_`; None for those of the tests. `fate` is for
        `kill_at`. `durations` are constants of the program, by the names of their modules and their own, that have
        other values in it: a test that waits for one of them need not wait long.
        """
        order = {"files": (os.devnull, str(log), str(log)), "variables": dict(variables), "fate": dict(fate or {})}
        more = {"durations": dict(durations or {}), "capabilities": capabilities}
        return Child(self, self.ask(program=program, argv=argv, **more, **order))

    def run_mpsctl(self, argv: Sequence[str], variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Run `mpsctl ARGV` to its end, with this environment and no input."""
        with _in_memory("stdout") as out, _in_memory("stderr") as err:
            mpsctl = Child(self, self._start_mpsctl(argv, variables, os.devnull, _path(out), _path(err)))
            try:
                status = mpsctl.wait(60)
            finally:
                mpsctl.kill()
                mpsctl.wait(10)
            return subprocess.CompletedProcess(["mpsctl", *argv], status, out.read().decode(), err.read().decode())

    def start_mpsctl(self, argv: Sequence[str], variables: Mapping[str, str]) -> "PipedChild":
        """Start `mpsctl ARGV` with this environment, and with pipes for its input and output."""
        (reads, stdin), (stdout, writes) = _pipe(), _pipe()
        with reads, writes:
            return PipedChild(self, self._start_mpsctl(argv, variables, _path(reads), _path(writes)), stdin, stdout)

    def _start_mpsctl(self, argv: Sequence[str], variables: Mapping[str, str], *files: str) -> int:
        return self.ask(program="mpsctl", argv=argv, files=files, variables=dict(variables))

    def close(self) -> None:
        self._process.communicate(timeout=10)


class Child:
    """A process that a fork server started; its interface is that of subprocess.Popen."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float) -> int:
        """Wait for its exit status, for this many seconds at most."""
        status = self._look(timeout)
        assert status is not None, f"process {self.pid} did not end within {timeout:g} s"
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
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedChild(Child):
    """A process whose input and output are pipes."""

    def __init__(self, fork_server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(fork_server, pid)
        self.stdin = stdin
        self.stdout = stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait(30)


def _in_memory(name: str) -> IO[bytes]:
    """Return a file without a path."""
    return open(os.memfd_create(name), "w+b")  # noqa: PTH123


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reads, writes = os.pipe()
    return open(reads, "rb", buffering=0), open(writes, "wb", buffering=0)  # noqa: PTH123


def _path(file: IO[bytes]) -> str:
    """Return a path by which the fork server opens a file of this process."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _serve(orders: Iterator[str]) -> None:
    """Carry out the orders, one a line, and answer each with a number."""
    for line in orders:
        order = json.loads(line)
        match order:
            case {"argv": argv}:
                modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
                files = [os.open(path, mode) for path, mode in zip(order["files"], modes, strict=False)]
                answer = os.fork()
                if answer == 0:
                    for target, descriptor in enumerate(files):
                        os.dup2(descriptor, target)
                        os.close(descriptor)
                    _become(argv, order)
                for descriptor in files:
                    os.close(descriptor)
            case {"reap": pid}:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case _:
                answer = os.getppid()
        print(answer, flush=True)  # noqa: T201 - it is a program: this is what it says


def _become(argv: Sequence[str], order: dict[str, Any]) -> None:
    """Become the program, to its end."""
    program = order["program"]
    module = {**_PROGRAMS["mpsd"], **_PROGRAMS["kubernetes"]}[program]
    main: Callable[[], None] = importlib.import_module(module).main
    if program == "mpsd":
        os.setsid()  # like a service: at its death, the kernel ends a front-end of it that is stopped (setpgid(2))
    os.environ.clear()
    os.environ.update(order["variables"])
    if fate := order.get("fate"):
        ctypes.CDLL(None).kill_at(ctypes.c_long(fate["kill_at"]), fate["torn"], fate["of_ends"])
    sys.argv = [program, *argv]
    status = 1
    try:
        _set_durations(order.get("durations", {}))
        if (capabilities := order.get("capabilities")) is not None:
            _keep(capabilities)
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


def _set_durations(durations: Mapping[str, float]) -> None:
    """Set constants of modules, each of which is a number already."""
    for name, value in durations.items():
        module, _, constant = name.rpartition(".")
        found = importlib.import_module(module)
        assert isinstance(getattr(found, constant), (int, float)), f"{name} is no number"
        setattr(found, constant, value)


def _keep(names: Sequence[str]) -> None:
    """Keep these capabilities alone."""
    low, high = (sum(1 << Capability[name] for name in names) >> shift & 0xFFFFFFFF for shift in (0, 32))
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3. Source: linux/capability.h
    assert ctypes.CDLL(None).capset(head, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)) == 0


def _import(kind: str) -> None:
    """Import everything that the programs of this kind import when they run."""
    for name in _IMPORTS[kind]:
        importlib.import_module(name)
    if kind == "mpsd":
        mpsctl = importlib.import_module("mpsd.cli.group").mpsctl
        for command in mpsctl.list_commands(context := click.Context(mpsctl)):
            mpsctl.get_command(context, command)
    assert threading.active_count() == 1  # a process with threads must not fork


@contextmanager
def running_fork_server(kind: str = "mpsd", **loader: str) -> Iterator[ForkServer]:
    """Start a fork server with these variables of the dynamic loader, yield it, and end it."""
    started = ForkServer(kind, loader)
    try:
        yield started
    finally:
        started.close()


if __name__ == "__main__":
    _import(sys.argv[1])
    gc.collect()
    gc.freeze()  # or a collection in each program would copy the pages of all of this
    _serve(iter(sys.stdin.readline, ""))
