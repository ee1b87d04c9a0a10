"""The subjects of the contract: control programs, driven only through their front-ends and their logs."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from mpsd.core.mps import log_parser
from mpsd.core.mps.commands import echo_of
from mpsd.simulator.control import program
from mpsd.system.mps.control_pipe import ControlPipe, ControlProgram
from tests import real
from tests.harness import Running, kill, look_at, pids, wait_until

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

STRANGER: Final = 65534
"""A uid that no user has."""

OWNER: Final = os.geteuid()
"""The uid of the control daemons, which is that of the tests."""
ANOTHER: Final = 1000 if OWNER == 0 else OWNER + 1
"""A uid for which the owner requests a server; without root's power, the request fails."""

as_root = pytest.mark.root("be another user")

_SECONDS: Final = 20.0
"""Deadline for a front-end; none should come near it."""

AS_STRANGER: Final = (
    "setpriv",
    f"--reuid={STRANGER}",
    f"--regid={STRANGER}",
    "--clear-groups",
    # The program under test may be where only root may look, such as below /root; this capability allows only reading
    # it.
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A control program, and the driver branch that it belongs to, or imitates."""

    name: str
    branch: int
    argv: tuple[str, ...]

    @property
    def program(self) -> ControlProgram:
        return ControlProgram(self.argv)


def subjects(*simulated: int) -> list["ParameterSet"]:
    """Return NVIDIA's control program of each branch, and the simulator's as these branches, for `parametrize`.

    README's test command compares the simulator as branch 555 with NVIDIA's 535; the other branches are `thorough`.
    """

    def rest(branch: int, usual: int) -> list[pytest.MarkDecorator]:
        return [] if branch == usual else [pytest.mark.thorough]

    found = [
        pytest.param(
            Subject(f"simulator-{each}", each, program(each)), id=f"simulator-{each}", marks=rest(each, usual=555)
        )
        for each in simulated
    ]
    for each in real.real_daemon_params():
        (daemon,) = each.values
        assert isinstance(daemon, real.RealDaemon)
        subject = Subject(f"nvidia-{daemon.branch}", daemon.branch, (str(daemon.control),))
        found.append(pytest.param(subject, id=subject.name, marks=[*each.marks, *rest(daemon.branch, usual=535)]))
    return found


@dataclass(frozen=True, slots=True)
class Said:
    """The result of a front-end that has ended."""

    status: int
    printed: list[str]
    complaint: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """The result of one command in a longer conversation."""

    command: str
    printed: list[str]
    logged: list[str]


class Bench:
    """A place for one control daemon at a time: short private directories, its own environment, and its log."""

    def __init__(self, subject: Subject, root: Path) -> None:
        self.subject = subject
        self.root = root
        self.pipe = root / "p"
        self.logs = root / "l"
        self.log_file = root / "log"
        self.programs = root / "b"
        """First in the PATH of every process that is started here."""
        self.flags: tuple[str, ...] = ("-f",)
        """The flags that make the program a control daemon."""
        for directory in (self.pipe, self.logs, self.programs):
            directory.mkdir()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._front_ends: list[subprocess.Popen[bytes]] = []

    # -- the control daemon --

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }

    @property
    def daemon(self) -> "subprocess.Popen[bytes]":
        return self._daemons[-1]

    def launch(self, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a control daemon like mpsd, without waiting for it."""
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            daemon = subprocess.Popen(
                [*self.subject.argv, *self.flags],
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(log)
        self._daemons.append(daemon)
        return daemon

    def start(self, **variables: str) -> None:
        """Start a control daemon, and wait until it serves."""
        before = self.log().count(f"Starting control daemon using socket {self.pipe}/control")
        self.launch(**variables)
        wait_until(
            lambda: self.log().count(f"Starting control daemon using socket {self.pipe}/control") > before,
            what=f"{self.subject.name} to log its start",
        )
        wait_until(self.answers, what=f"{self.subject.name} to answer on {self.pipe}")

    def answers(self) -> bool:
        return self.front_end("get_default_active_thread_percentage").printed != []

    def ended(self) -> int:
        return self.daemon.wait(_SECONDS)

    def kill(self) -> None:
        self.daemon.kill()
        self.ended()

    def close(self) -> None:
        """End all processes that were started here, servers and front-ends included."""
        for front_end in self._front_ends:
            front_end.kill()
            front_end.communicate()
        for daemon in self._daemons:
            daemon.kill()
        # A server stays in the session of its daemon, whatever its parent is by now.
        sessions = {daemon.pid for daemon in self._daemons}
        for pid in pids() - sessions:
            with contextlib.suppress(ProcessLookupError):
                process = look_at(pid) if os.getsid(pid) in sessions else None
                if process is not None:
                    kill(process)
        for daemon in self._daemons:
            daemon.wait()

    def processes(self) -> list[Running]:
        """Return every running process of this bench, including the daemon."""
        found = (process for pid in pids() if (process := look_at(pid)) is not None)
        return [process for process in found if process.pipe_directory == str(self.pipe) and not process.zombie]

    # -- front-ends --

    def front_end(self, *lines: str, seconds: float = _SECONDS, as_stranger: bool = False) -> Said:
        argv = [*(AS_STRANGER if as_stranger else ()), *self.subject.argv]
        text = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(
            argv, env=self.environment, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
        return Said(done.returncode, done.stdout.splitlines(), done.stderr.strip())

    def open_front_end(self) -> "subprocess.Popen[bytes]":
        """Start a front-end that sends nothing yet; it ends with the bench."""
        front_end = subprocess.Popen(
            self.subject.argv,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._front_ends.append(front_end)
        return front_end

    def hanging_front_end(self, *lines: str) -> None:
        """Give these commands in a front-end which must not end for a while after the last one; then kill it."""
        front_end, given = self.open_front_end(), {f"Cmd:{line}" for line in lines}

        def has_all() -> bool:
            log = self.log()
            latest = log[::-1].index("NEW UI") if "NEW UI" in log else 0
            return given <= {*log[len(log) - latest :]}

        assert front_end.stdin is not None
        front_end.stdin.write("".join(f"{line}\n" for line in lines).encode())
        front_end.stdin.close()
        front_end.stdin = None
        wait_until(has_all, what=f"{given} in the log")
        with pytest.raises(subprocess.TimeoutExpired):
            front_end.wait(0.3)
        front_end.kill()
        front_end.communicate()

    @contextlib.contextmanager
    def held(self) -> "Iterator[subprocess.Popen[bytes]]":
        """Have the daemon serve a silent front-end, which is ended at the exit of this context."""
        before = self.complete_log().count("NEW UI")
        front_end = self.open_front_end()
        wait_until(lambda: self.log().count("NEW UI") > before, what="the daemon to serve it")
        try:
            yield front_end
        finally:
            front_end.kill()
            front_end.communicate()
            if self.daemon.poll() is None:
                wait_until(lambda: self.log().count("UI closed") > before, what="the daemon to be rid of it")

    def exchange(self, commands: Sequence[str], *, as_stranger: bool = False) -> list[Exchange]:
        """Give these commands in one front-end; return the result of each, on the front-end and in the log.

        An unknown command separates the commands: its echo shows where an answer ends.
        """
        mark = f"mark-{secrets.token_hex(4)}"
        said = self.front_end(*(line for command in commands for line in (command, mark)), as_stranger=as_stranger)
        assert (said.status, said.complaint) == (0, "")
        printed = _split(said.printed, echo_of(mark))
        conversation = self.logged_conversation(f"Cmd:{mark}", len(commands))
        logged = _split(conversation, f"Cmd:{mark}")
        results = []
        for command, lines, log in zip(commands, printed, logged[: len(commands)], strict=True):
            at = log.index(f"Cmd:{command}")
            results.append(Exchange(command, lines, log[at + 1 :]))
        return results

    def let_go(self) -> None:
        for front_end in self._front_ends:
            front_end.kill()

    # -- the log --

    def raw_log(self) -> list[str]:
        """Return the current log, whole lines only."""
        if not self.log_file.exists():
            return []
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def log(self) -> list[str]:
        return [line.text for raw in self.raw_log() if (line := log_parser.parse(raw)) is not None]

    def complete_log(self) -> list[str]:
        """Return the log including everything that has happened: the daemon writes its log with a short delay."""
        mark = f"mark-{secrets.token_hex(4)}"
        assert self.front_end(mark).printed == [echo_of(mark)]
        self.logged_conversation(f"Cmd:{mark}")
        return self.log()

    def logged_conversation(self, line: str, times: int = 1) -> list[str]:
        def look() -> list[str] | None:
            lines = self.log()
            found = [index for index, each in enumerate(lines) if each == line]
            if len(found) < times or "UI closed" not in lines[found[-1] :]:
                return None
            starts = [index for index, each in enumerate(lines[: found[0]]) if each == "NEW UI"]
            return lines[starts[-1] + 1 : lines.index("UI closed", found[-1])]

        return wait_until(look, what=f"{line!r} and the end of its conversation in the log")

    # -- servers --

    def put_server(self, script: str) -> None:
        """Put a stand-in for NVIDIA's server first in PATH, so that a control daemon starts it instead."""
        program = self.programs / "nvidia-cuda-mps-server"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        program.chmod(0o755)

    def start_server(self, uid: int = OWNER) -> int:
        self.front_end(f"start_server -uid {uid}")
        listed = wait_until(lambda: self.front_end("get_server_list").printed, what="the server to be listed")
        assert len(listed) == 1
        pid = int(listed[0])
        if (self.programs / "nvidia-cuda-mps-server").exists():
            wait_until(lambda: _sleeps_or_is_gone(pid), what="the stand-in to sleep")
        return pid

    # -- mpsd's door --

    def door(self, deadline: float = _SECONDS) -> ControlPipe:
        """Return mpsd's own control pipe to the daemon of this bench."""
        return ControlPipe(self.subject.program, self.pipe, self.logs, deadline=deadline)


def _sleeps_or_is_gone(pid: int) -> bool:
    process = look_at(pid)
    return process is None or "sleep" in process.command.split()


def _split(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Split lines at every separator, which is left out; a non-empty rest after the last one is a part too."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == separator:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts if parts[-1] else parts[:-1]
