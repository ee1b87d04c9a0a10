"""The cost of supervision: verified settings, the restart of a dead daemon, a status query, and idle time."""

import asyncio
import compileall
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

import mpsd
from bench.service import Service, bare_daemon, bare_environment, one_shot, running, start_bare
from bench.side_by_side import Figure, Result, in_turn, timed
from mpsd.core.model import Limits
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT, LimitValue, Setting
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.system.mps.control_pipe import ControlPipe, ControlProgram, Conversation

_SETTINGS: Final = 100

_IDLE_SECONDS: Final = 60.0
"""Seconds for which an idle mpsd is observed."""

_IDLE_STARTS: Final = 22
"""How many starts of Python may take as much processor time as an idle minute of mpsd with 8 control daemons, its
front-ends included: 0.4 % of a core where one takes 11 ms."""

_STARTS: Final = 50

_IDLE_MEMORY: Final = 48
"""MiB that it may hold, with the programs that it starts."""


def settings_through_the_pipe(control: str, root: Path) -> Iterator[Result]:
    """Compare 100 settings, each read back and compared, with 100 one-shot front-ends that only set."""
    with bare_daemon(control, root) as environment, asyncio.Runner() as runner:
        pipe = ControlPipe(ControlProgram((control,)), root / "pipe", root / "log", deadline=10)
        settings = [
            (ACTIVE_THREAD_PERCENTAGE if number % 2 else PINNED_DEVICE_MEM_LIMIT).default_setting(
                Limits(ActiveThreadPercentage(100 + number), PinnedDeviceMemLimit(1024 * (1 + number)))
            )
            for number in range(_SETTINGS)
        ]

        def verified() -> float:
            return timed(lambda: runner.run(_set(pipe, settings)))

        def bare() -> float:
            return timed(lambda: [one_shot(control, environment, setting.setter) for setting in settings])

        ours, theirs = in_turn(verified, bare, rounds=9)
    yield Result(f"{_SETTINGS} verified settings against {_SETTINGS} one-shot front-ends", ours, theirs, at_least=20)


async def _set(pipe: ControlPipe, settings: list[Setting[LimitValue]]) -> None:
    """Set, read back and compare, all in one front-end; raises if a limit does not hold."""
    conversation = Conversation()
    pending = [conversation.ask(setting) for setting in settings]
    await pipe.converse(conversation)
    for each in pending:
        each.answer  # noqa: B018 - it raises


def _bare_start(control: str, environment: dict[str, str]) -> float:
    """Return how many seconds a bare daemon needs to start and answer one command."""
    before = time.perf_counter()
    daemon = start_bare(control, environment)
    one_shot(control, environment, "get_default_active_thread_percentage")
    taken = time.perf_counter() - before
    daemon.kill()
    daemon.wait()
    return taken


def recovery(control: str, root: Path) -> Iterator[Result]:
    """Compare the time from SIGKILL to ready-and-verified with a bare daemon's start and first answer."""
    limits = '[limits]\nactive_thread_percentage = 50.0\npinned_device_mem_limit = "8GiB"\n[daemon]\ndeaths = 1000\n'
    environment = bare_environment(root / "bare")

    # The second death within the window would wait on purpose: only the first is measured.
    with running(control, root / "mpsd", 1, limits + "death_window = 0.001\n") as service:

        def ours() -> float:
            pid = service.daemons["gpu0"]
            before = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            service.next_ready()
            return time.perf_counter() - before

        mine, bare = in_turn(ours, lambda: _bare_start(control, environment), rounds=25)
    yield Result("SIGKILL to ready and verified against a bare start and one answer", mine, bare, at_most=3)


def returning(control: str, root: Path) -> Iterator[Result]:
    """Compare a restart of mpsd, and a planned restart of a daemon, with a bare daemon's start and first answer."""
    environment = bare_environment(root / "bare")

    with running(control, root / "mpsd", 1) as service:

        def adopted() -> float:
            service.stop(signal.SIGKILL)
            before = time.perf_counter()
            service.start()
            service.next_ready()
            return time.perf_counter() - before

        def restarted() -> float:
            before = time.perf_counter()
            restart = ["POST /v1/daemons/gpu0/restart HTTP/1.1", "Host: mpsd", "Content-Length: 0", "", ""]
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(service.socket))
                connection.sendall("\r\n".join(restart).encode())
                assert connection.recv(100).startswith(b"HTTP/1.1 202 ")
            service.next_ready()
            return time.perf_counter() - before

        back, anew, bare = in_turn(adopted, restarted, lambda: _bare_start(control, environment), rounds=9)
    yield Result("start of mpsd to adopted and verified against a bare start and one answer", back, bare, at_most=200)
    yield Result("restart of an idle daemon against a bare start and one answer", anew, bare, at_most=15)


def status(control: str, root: Path) -> Iterator[Result]:
    """Compare `mpsctl status`, a full run of `mpsctl doctor`, and the Python package, with the bare interpreter."""
    mpsctl = Path(sys.executable).with_name("mpsctl")
    # As pip does at an installation; a checkout may not be compiled.
    compileall.compile_dir(Path(mpsd.__file__).parent, quiet=2)

    def run(*command: str) -> Callable[[], float]:
        environment = {**os.environ, "MPSD_SOCKET": str(service.socket)}
        return lambda: timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment))

    with running(control, root, 2) as service:
        # This call runs every check, and reports one that is ok on any machine, so it exits with 0.
        doctor = run(str(mpsctl), "doctor", "--only", "version")
        ours, bare = run(str(mpsctl), "status"), run(sys.executable, "-c", "pass")
        package = [
            run(sys.executable, "-c", f"import mpsd; {name}") for name in ("mpsd", "mpsd.lease", "mpsd.AsyncClient")
        ]
        mine, looked, theirs, imported, blocking, later = in_turn(ours, doctor, bare, *package, rounds=31)
    yield Result("mpsctl status against python -c pass", mine, theirs, at_most=4.5)
    yield Result("mpsctl doctor against python -c pass", looked, theirs, at_most=28)
    yield Result("import mpsd against python -c pass", imported, theirs, at_most=3)
    yield Result("import mpsd and mpsd.lease against python -c pass", blocking, theirs, at_most=5)
    yield Result("import mpsd and mpsd.AsyncClient against python -c pass", later, theirs, at_most=8)


def idle(control: str, root: Path) -> Iterator[Result | Figure]:
    """Compare an idle minute of mpsd with 8 control daemons with starts of Python; measure its memory."""
    with running(control, root, 8) as service:
        mpsd_itself = psutil.Process(service.process.pid)
        time.sleep(3)
        before = _used(service, mpsd_itself)
        time.sleep(_IDLE_SECONDS)
        used = _used(service, mpsd_itself) - before
        programs = mpsd_itself, *_helpers(service, mpsd_itself)
        memory = sum(each.memory_info().rss for each in programs) / 2**20
    began = os.times().children_user + os.times().children_system
    for _ in range(_STARTS):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    start = (os.times().children_user + os.times().children_system - began) / _STARTS
    name = f"processor time of {_IDLE_SECONDS:g} s idle with 8 daemons against python -c pass"
    yield Result(name, used, start, at_most=_IDLE_STARTS)
    yield Figure("memory while idle with 8 daemons", memory, _IDLE_MEMORY, "MiB")


def _helpers(service: Service, mpsd_itself: psutil.Process) -> list[psutil.Process]:
    """Return the programs that mpsd has started and that run now, but for the control daemons."""
    control_daemons = set(service.daemons.values())
    return [each for each in mpsd_itself.children() if each.pid not in control_daemons]


def _used(service: Service, mpsd_itself: psutil.Process) -> float:
    """Return the processor time (s) of mpsd, of the programs that it has started, and of those that have ended."""
    helpers = (sum(each.cpu_times()[:4]) for each in _helpers(service, mpsd_itself))
    return sum(mpsd_itself.cpu_times()[:4]) + sum(helpers)
