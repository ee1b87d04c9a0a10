"""`python -m bench --control PROGRAM`: the README's figures, measured here and now; exits with 1 when one is missed."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.side_by_side import Result, in_turn, timed
from mpsd.core.commands import default_active_thread_percentage, default_device_pinned_mem_limit
from mpsd.core.units import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.system import process
from mpsd.system.control import ControlPipe, ControlProgram, variables

_SETTINGS = 100
_IDLE_CPU = 0.5
"""Percent of one core that an idle mpsd with 8 daemons may take, its front-ends included."""
_IDLE_MEMORY = 60
"""MiB that it may hold."""


@contextmanager
def bare_daemon(control: str, root: Path) -> Iterator[dict[str, str]]:
    """Run a control daemon without mpsd, and give the environment that reaches it."""
    environment = process.environment(variables(root / "pipe", root / "log"))
    (root / "pipe").mkdir(parents=True)
    (root / "log").mkdir()
    daemon = start_bare(control, environment)
    try:
        yield environment
    finally:
        daemon.kill()
        daemon.wait()


def start_bare(control: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a control daemon and wait for its socket."""
    pipe_directory = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
    (pipe_directory / "control").unlink(missing_ok=True)
    daemon = subprocess.Popen(
        [control, "-f"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (pipe_directory / "control").exists():
        time.sleep(0.0005)
    return daemon


def one_shot(control: str, environment: dict[str, str], command: str) -> str:
    """Say one command in a front-end of its own, as everybody's shell script does."""
    done = subprocess.run([control], input=f"{command}\n", env=environment, capture_output=True, text=True, check=True)
    return done.stdout


# -- (a) ---------------------------------------------------------------------------------------------------------------


def settings_through_the_pipe(control: str, root: Path) -> Result:
    """Compare 100 settings, each read back and compared, with 100 one-shot front-ends that only set."""
    with bare_daemon(control, root) as environment, asyncio.Runner() as runner:
        pipe = ControlPipe(ControlProgram((control,)), root / "pipe", root / "log", deadline=10)
        settings = [
            default_active_thread_percentage(ActiveThreadPercentage(100 + number))
            if number % 2
            else default_device_pinned_mem_limit(0, PinnedDeviceMemLimit(1024 * (1 + number)))
            for number in range(_SETTINGS)
        ]

        def verified() -> float:
            return timed(lambda: runner.run(pipe.set(*settings)))

        def bare() -> float:
            return timed(lambda: [one_shot(control, environment, setting.setter) for setting in settings])

        ours, theirs = in_turn(verified, bare, rounds=9)
    return Result(f"{_SETTINGS} verified settings against {_SETTINGS} one-shot front-ends", ours, theirs, at_least=20)


# -- (b) ---------------------------------------------------------------------------------------------------------------


class Service:
    """An mpsd with simulated GPUs and real control daemons, and its log as it is written."""

    def __init__(self, control: str, root: Path, gpus: int, config: str = "") -> None:
        root.mkdir(parents=True)
        (root / "mpsd.toml").write_text(config)
        command = [
            sys.executable,
            "-m",
            "mpsd",
            "run",
            "--root",
            str(root),
            "--simulate",
            str(gpus),
            "--control",
            control,
        ]
        self.process = subprocess.Popen(
            [*command, "--config", str(root / "mpsd.toml")], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.socket = root / "run" / "mpsd.sock"
        self.daemons: dict[str, int] = {}
        while len(self.daemons) < gpus:
            self.next_ready()

    def next_ready(self) -> None:
        """Read mpsd's log until a control daemon is ready and verified."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            fact = json.loads(line)
            if fact["event"] == "daemon_state" and fact["state"] == "ready":
                self.daemons[fact["daemon"]] = fact["pid"]
                return
        raise RuntimeError("mpsd ended")

    def end(self) -> None:
        """End mpsd and its control daemons."""
        self.process.terminate()
        self.process.wait()
        for pid in self.daemons.values():
            os.kill(pid, signal.SIGKILL)


def recovery(control: str, root: Path) -> Result:
    """Compare SIGKILL to ready-and-verified with what a bare daemon needs to start and answer one command."""
    limits = '[limits]\nactive_thread_percentage = 50.0\npinned_device_mem_limit = "8GiB"\n[daemon]\ndeaths = 1000\n'
    # The second death within the window would wait on purpose: it is the first that is measured.
    service = Service(control, root / "mpsd", 1, limits + "death_window = 0.001\n")
    environment = process.environment(variables(root / "bare" / "pipe", root / "bare" / "log"))
    (root / "bare" / "pipe").mkdir(parents=True)
    (root / "bare" / "log").mkdir()

    def ours() -> float:
        pid = service.daemons["gpu0"]
        before = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        service.next_ready()
        return time.perf_counter() - before

    def theirs() -> float:
        before = time.perf_counter()
        daemon = start_bare(control, environment)
        one_shot(control, environment, "get_default_active_thread_percentage")
        taken = time.perf_counter() - before
        daemon.kill()
        daemon.wait()
        return taken

    try:
        mine, bare = in_turn(ours, theirs, rounds=25)
    finally:
        service.end()
    return Result("SIGKILL to ready and verified against a bare start and one answer", mine, bare, at_most=3)


# -- (c) ---------------------------------------------------------------------------------------------------------------


def status(control: str, root: Path) -> Result:
    """Compare `mpsctl status` with the bare interpreter."""
    service = Service(control, root, 2)
    mpsctl = Path(sys.executable).with_name("mpsctl")
    ours = [str(mpsctl), "--socket", str(service.socket), "status"]

    def run(command: list[str]) -> Callable[[], float]:
        return lambda: timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    try:
        mine, bare = in_turn(run(ours), run([sys.executable, "-c", "pass"]), rounds=31)
    finally:
        service.end()
    return Result("mpsctl status against python -c pass", mine, bare, at_most=5)


# -- (d) ---------------------------------------------------------------------------------------------------------------


def idle(control: str, root: Path, seconds: float) -> tuple[float, float]:
    """Return percent of one core and MiB that mpsd takes when nothing happens, with 8 control daemons."""
    service = Service(control, root, 8)
    try:
        found = psutil.Process(service.process.pid)
        time.sleep(3)
        before = sum(found.cpu_times()[:4])
        time.sleep(seconds)
        used = sum(found.cpu_times()[:4]) - before
        return 100 * used / seconds, found.memory_info().rss / 2**20
    finally:
        service.end()


def main() -> int:
    """Measure everything, print it, and say whether every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", default=shutil.which("nvidia-cuda-mps-control"), help="NVIDIA's control program")
    parser.add_argument("--idle-seconds", type=float, default=60)
    parser.add_argument("--only", choices="abcd", help="just this one")
    options = parser.parse_args()
    if options.control is None:
        parser.error("name NVIDIA's control program with --control (tests/real/fetch prints where it put some)")
    met = True
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        root = Path(directory)
        for letter, measure in (("a", settings_through_the_pipe), ("b", recovery), ("c", status)):
            if options.only in {None, letter}:
                result = measure(options.control, root / letter)
                met = met and result.met
                print(result, flush=True)
        if options.only in {None, "d"}:
            cpu, memory = idle(options.control, root / "d", options.idle_seconds)
            good = cpu < _IDLE_CPU and memory < _IDLE_MEMORY
            met = met and good
            print(
                f"{'met' if good else 'MISSED':7}idle with 8 daemons for {options.idle_seconds:g} s: {cpu:.2f} % of"
                f" one core (under {_IDLE_CPU:g}), {memory:.0f} MiB (under {_IDLE_MEMORY})"
            )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
