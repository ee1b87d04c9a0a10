"""Process 1 of the container, tested without a container: its restarts, its forwarding, and its exit status."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.harness import look_at, pids, wait_until

pytestmark = pytest.mark.thorough

INIT: Final = Path(__file__).parents[2] / "container" / "init"

STOP: Final = signal.SIGRTMIN + 3

MAIN: Final = """
import os, signal, socket, subprocess, sys
where, children = sys.argv[1], int(sys.argv[2])
def told(number, _):
    if "NOTIFY_SOCKET" in os.environ and number == signal.SIGHUP:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as signs:
            signs.sendto(b"STATUS=well\\nWATCHDOG=1", chr(0) + os.environ["NOTIFY_SOCKET"][1:])
    with open(where, "a") as file:
        file.write(f"{signal.Signals(number).name}\\n")
    if number != signal.SIGHUP:
        sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, told)
for _ in range(children):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(where, "a") as file:
        file.write(f"child {child.pid}\\n")
with open(where, "a") as file:
    file.write(f"started {os.getpid()}\\n")
while True:
    signal.pause()
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """Return the file in which its command reports events."""
    return tmp_path / "said"


@contextmanager
def init(*command: str, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Run it, and end all processes that are left: orphans of its children are reparented to it."""
    with subprocess.Popen([sys.executable, "-I", INIT, *command], env=env) as process:
        try:
            yield process
        finally:
            for pid in _below(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()


def _below(pid: int) -> list[int]:
    found = [each for each in map(look_at, pids()) if each is not None and each.parent == pid]
    return [*(each.pid for each in found), *(pid for each in found for pid in _below(each.pid))]


def main(said: Path, *, children: int = 0) -> list[str]:
    """Return the command that reports events."""
    return [sys.executable, "-c", MAIN, str(said), str(children)]


def pids_of(said: Path, what: str) -> list[int]:
    """Return the pids of the commands started so far, or of their children."""
    lines = said.read_text().splitlines() if said.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(what)]


@pytest.mark.parametrize(
    ("number", "received"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (STOP, "SIGTERM")],
)
def test_told_to_end(said: Path, number: int, received: str) -> None:
    """Each signal to end is forwarded, and the exit status is the command's."""
    with init(*main(said)) as process:
        wait_until(lambda: pids_of(said, "started"), what="the command to run")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP\n" in said.read_text(), what="the command to be told to reload")
        process.send_signal(number)
        assert process.wait(10) == 7
    assert said.read_text().endswith(f"SIGHUP\n{received}\n")


def test_stop_signal_reaches_nobody_else(said: Path) -> None:
    """The container's stop signal is ignored by the command and its children: podman sends it to all."""
    with init(*main(said, children=1)) as process:
        (command,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        (child,) = pids_of(said, "child")
        for pid in (child, command):
            os.kill(pid, STOP)
            ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
            assert int(ignored.split()[1], 16) & 1 << (STOP - 1)
        assert process.poll() is None
        assert look_at(child) is not None


def test_dead_with_others_left(said: Path) -> None:
    """A command that dies and leaves children is started again, and they stay."""
    with init(*main(said, children=1)) as process:
        (first,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP\n" in said.read_text(), what="the command to be told to reload, and not to end")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(pids_of(said, "started")) == 2, what="the command to be started again")
        child, _ = pids_of(said, "child")
        left = look_at(child)
        assert left is not None
        assert left.parent == process.pid
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: look_at(child) is None, what="the orphan to be reaped")


def test_silent(said: Path) -> None:
    """A command that has stopped giving signs of life is killed and restarted; children cannot give signs for it."""
    with init("--watchdog=0.4", *main(said, children=1)) as process:
        (first,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        variables = Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
        (name,) = (each.partition(b"=@")[2] for each in variables if each.startswith(b"NOTIFY_SOCKET="))
        os.kill(first, signal.SIGHUP)  # the command gives one
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:

            def started_again() -> bool:
                other.sendto(b"WATCHDOG=1", b"\0" + name)
                return len(pids_of(said, "started")) == 2

            wait_until(started_again, what="the command to be started again")
        assert look_at(first) is None
        assert process.poll() is None


def test_told_to_end_while_it_is_dead(said: Path) -> None:
    """A command that dies after the signal is restarted and signalled again, as long as it leaves children.

    The children were promised time.
    """
    with init("--watchdog=1000", *main(said, children=1)) as process:
        (first,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        os.kill(first, signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        for lives in (2, 3):
            wait_until(lambda: len(pids_of(said, "started")) == lives, what="the command to be started again")  # noqa: B023
            assert said.read_text().count("SIGTERM") == lives - 2
            if lives == 3:
                for child in pids_of(said, "child"):
                    os.kill(child, signal.SIGKILL)
            os.kill(pids_of(said, "started")[-1], signal.SIGHUP)  # a sign of life shows that it can handle the signal
        assert process.wait(10) == 7
    assert said.read_text().count("SIGTERM") == 2


def test_told_to_end_and_left_children_that_end(said: Path) -> None:
    """Once the last child of a command that failed has ended, the exit status is still the command's."""
    with init("--watchdog=1000", *main(said, children=1)) as process:
        (first,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: look_at(first) is None, what="the command to be reaped")

        def is_over() -> bool:
            there = {*_below(process.pid)}
            with suppress(ProcessLookupError):  # it has just ended
                for child in there & {*pids_of(said, "child")}:
                    os.kill(child, signal.SIGKILL)
                for again in there & {*pids_of(said, "started")}:  # a sign of life shows that it can handle the signal
                    os.kill(again, signal.SIGHUP)
            return process.poll() is not None

        wait_until(is_over, what="the container to end")
        assert process.returncode == 7


def test_never_gave_a_sign(said: Path) -> None:
    """A command that never gave a sign of life is left alone."""
    with init("--watchdog=0.01", *main(said)) as process:
        (first,) = wait_until(lambda: pids_of(said, "started"), what="the command to run")
        looks = [str(process.pid), str(first)]
        subprocess.run(["sh", "-c", 'for _ in 1 2 3; do kill -CHLD "$0"; sleep 0.05; done', *looks], check=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 7
    assert len(pids_of(said, "started")) == 1


def test_ready(short_tmp: Path) -> None:
    """The command's readiness is forwarded at once to the service manager outside; signs of life are not."""
    says = "import os, socket, signal\nsigns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    says += "for said in (b'WATCHDOG=1', b'STATUS=well', b'READY=1'):\n"
    says += "    signs.sendto(said, chr(0) + os.environ['NOTIFY_SOCKET'][1:])\nsignal.pause()\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(str(short_tmp / "notify"))
        outside.settimeout(20)
        command = [sys.executable, "-c", says]
        with init("--watchdog=1000", *command, env={**os.environ, "NOTIFY_SOCKET": str(short_tmp / "notify")}):
            assert outside.recv(4096) == b"READY=1"


def test_open_files() -> None:
    """The command may open as many files as init can allow itself, whatever init's own limit was."""
    command = ["prlimit", "--nofile=64:4096", sys.executable, "-I", str(INIT), "sh", "-c", "ulimit -S -n"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "4096\n"


def test_locked_memory() -> None:
    """The command may lock memory without a limit where init may change it, or as the runtime allows."""
    limited = ["prlimit", "--memlock=65536:1048576"]
    may_raise = subprocess.run([*limited, "prlimit", "--memlock=unlimited", "true"], capture_output=True, check=False)
    command = [*limited, sys.executable, "-I", str(INIT), "sh", "-c", "ulimit -S -l"]
    wanted = "1024\n" if may_raise.returncode else "unlimited\n"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == wanted


def test_alone() -> None:
    """A command that ends without children ends the container, with its status."""
    with init("sh", "-c", "exit 78") as process:
        assert process.wait(10) == 78
    with init("sh", "-c", "kill -9 $$") as process:
        assert process.wait(10) == 128 + signal.SIGKILL


def test_not_there() -> None:
    """A command that cannot be started is reported."""
    done = subprocess.run([sys.executable, "-I", INIT, "/there/is/none"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "/there/is/none cannot be started" in done.stderr
    assert subprocess.run([sys.executable, "-I", INIT], capture_output=True, check=False).returncode != 0
