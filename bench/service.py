"""mpsd and NVIDIA's control program for a benchmark: started, awaited, ended with all that they started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from mpsd.system.mps.control_pipe import variables
from mpsd.system.processes import process

_LOOK: Final = 0.0005
"""Seconds between two checks of a condition."""


class Service:
    """An mpsd with simulated GPUs and real control daemons, and its log as it is written."""

    def __init__(self, control: str, root: Path, gpus: int, config: str = "") -> None:
        """Start mpsd, over the files of an earlier one in this directory, and wait until every daemon is ready."""
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.socket = root / "run" / "mpsd.sock"
        self._gpus = gpus
        self._control = control
        (root / "mpsd.toml").write_text(config)
        self.daemons: dict[str, int] = {}
        """By name, the pids of its control daemons."""
        self.start()
        while len(self.daemons) < gpus:
            self.next_ready()

    def start(self) -> None:
        """Start mpsd, without waiting."""
        log = self.root / "mpsd.log"
        command = [sys.executable, "-m", "mpsd", "run", "--root", str(self.root), "--control", self._control]
        command += ["--simulate", str(self._gpus), "--config", str(self.root / "mpsd.toml")]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream, stdin=subprocess.DEVNULL)
        # Not a pipe: a process would have to read it all the time, and take that time from mpsd.
        self._log = log.open()

    def next_ready(self) -> None:
        """Read mpsd's log until a control daemon is ready and verified."""
        while True:
            fact = self.next_event("daemon_state")
            if fact["state"] == "ready":
                self.daemons[fact["daemon"]] = fact["pid"]
                return

    def next_event(self, event: str) -> dict[str, Any]:
        """Read mpsd's log up to the next event of this name, and return the event."""
        while True:
            line = self._log.readline()
            if not line.endswith("\n"):
                assert self.process.poll() is None, (self.root / "mpsd.log").read_text()
                self._log.seek(self._log.tell() - len(line))
                time.sleep(_LOOK)
                continue
            fact: dict[str, Any] = json.loads(line)
            if fact["event"] == event:
                return fact

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End mpsd, and leave its control daemons and its leases to the next one."""
        self.process.send_signal(number)
        self.process.wait()
        self._log.close()

    def end(self) -> None:
        """End mpsd and its control daemons."""
        self.stop()
        for pid in self.daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(control: str, root: Path, gpus: int, config: str = "") -> Iterator[Service]:
    """Run an mpsd, and end it and its control daemons."""
    service = Service(control, root, gpus, config)
    try:
        yield service
    finally:
        service.end()


@contextmanager
def bare_daemon(control: str, root: Path) -> Iterator[dict[str, str]]:
    """Run a control daemon without mpsd, and yield the environment that reaches it."""
    environment = bare_environment(root)
    daemon = start_bare(control, environment)
    try:
        yield environment
    finally:
        daemon.kill()
        daemon.wait()


def bare_environment(root: Path) -> dict[str, str]:
    """Make the directories of a control daemon, and return the environment that names them."""
    (root / "pipe").mkdir(parents=True)
    (root / "log").mkdir()
    return process.environment(variables(root / "pipe", root / "log"))


def start_bare(
    control: str, environment: dict[str, str], log: int | IO[bytes] = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """Start a control daemon and wait for its socket."""
    pipe_directory = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
    (pipe_directory / "control").unlink(missing_ok=True)
    daemon = subprocess.Popen(
        [control, "-f"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (pipe_directory / "control").exists():
        time.sleep(_LOOK)
    return daemon


def one_shot(control: str, environment: dict[str, str], command: str) -> str:
    """Give one command in a separate front-end, like a typical shell script."""
    done = subprocess.run([control], input=f"{command}\n", env=environment, capture_output=True, text=True, check=True)
    return done.stdout
