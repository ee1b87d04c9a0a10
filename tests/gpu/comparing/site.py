"""The machine under comparison: mpsd and a bare control daemon on one GPU, and clients of each and of none."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.driven_program import DrivenProgram
from tests.gpu import machine
from tests.gpu.bare import BareDaemon
from tests.gpu.comparing.interrupts import ending
from tests.node import Node

ANSWERS: Final = 40.0
"""Seconds for an answer, beside those of the work: clients that share a GPU wait for each other."""

LEAVES: Final = 40.0
"""Seconds within which a client has ended its work and itself."""

CROWDED: Final = "[admission]\nthreads_oversubscription = 8\n"
"""The configuration for several pairs of clients, of which one works at a time. It changes no client's percentage."""

USABLE: Final = 0.9
"""The part of the GPU's memory that is divided among clients: some is for contexts and servers."""


class Mode(StrEnum):
    """The ways of a client to its GPU."""

    MPSD = "mpsd"
    """By `mpsctl run`."""
    BARE = "bare MPS"
    """Through an unsupervised control daemon, with the limits in its own environment."""
    OUTSIDE = "outside MPS"
    """Without MPS: the driver gives each such process the whole GPU in turn."""


class Wanted(NamedTuple):
    """A client that is wanted: its way, and its percentage of the threads, which has no effect outside MPS."""

    mode: Mode
    threads: float = 100.0


class WrongError(Exception):
    """Something went wrong in a measurement; the text says what."""


class Worker(DrivenProgram):
    """A client that does timed work (tests.gpu.client), or does not get a context."""

    def __init__(self, wanted: Wanted, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed at its end
        super().__init__(command, environment, stderr=self._stderr)
        self.mode = wanted.mode

    def checked(self) -> dict[str, Any]:
        """Wait for its context, and return what it says about it.

        Raises WrongError where it has none, or is not where it should be: clients that miss MPS say nothing.
        """
        if self._hello is None:
            self._hello = self.result()
        if self._hello["mps"] is not (self.mode is not Mode.OUTSIDE):
            inside = {None: "not known to be inside MPS or outside", True: "INSIDE MPS", False: "OUTSIDE MPS"}
            raise WrongError(f"a client of {self.mode} is {inside[self._hello['mps']]} (attribute 133)")
        return self._hello

    def result(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return its next answer, to a line that takes so long. Raises WrongError where it failed, or ended."""
        try:
            answer = self.answer(seconds + ANSWERS)
        except AssertionError as error:
            raise WrongError(f"{self.mode}: {error}; its stderr: {self._last_words() or 'empty'}") from error
        if not answer["ok"]:
            raise WrongError(f"a client of {self.mode} failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        written = os.pread(self._stderr.fileno(), 1 << 16, 0)
        return " ".join(written.decode(errors="replace").split())[-300:]

    def perform(self, line: str, seconds: float = 0.0) -> dict[str, Any]:
        """Have it carry out a line, and return the answer. Raises WrongError where it failed."""
        self.tell(line)
        return self.result(seconds)

    def leave(self) -> None:
        """Have it end by itself, once its present work is done, without waiting."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def __exit__(self, *_: object) -> None:
        """Wait for its end; a kill in the middle of a kernel would harm its neighbours."""
        self.leave()
        try:
            self.process.wait(LEAVES)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"a client of {self.mode}, pid {self.pid}, does not end, and is killed\n")
        self._stderr.close()
        super().__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class Site:
    """A GPU with mpsd and a bare control daemon."""

    node: Node
    bare: Mapping[str, str]
    """The variables of the bare control daemon's clients."""

    @property
    def at_once(self) -> int:
        """How many clients come and go at a time: each start needs a processor."""
        return min(12, 2 * (os.cpu_count() or 1))

    def memory(self, clients: int) -> int:
        """Return the MiB of each of so many clients."""
        return int(machine.first_gpu(self.node)["memory_total"] * USABLE / clients) >> 20

    def start(self, wanted: Wanted, memory: int, *options: str) -> Worker:
        """Start a client with so many MiB, and do not wait for it; `options` are of `mpsctl run`."""
        command = [*machine.PROGRAM]
        variables = {**machine.ENVIRONMENT, **machine.gpus_of(self.node)}
        match wanted.mode:
            case Mode.MPSD:
                limits = ("--threads", f"{wanted.threads:g}", "--memory", f"{memory}MiB")
                command = [*self.node.mpsctl_command("run", "--gpu", "0", *limits, *options, "--"), *command]
            case Mode.BARE:
                variables |= self.bare
                variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{wanted.threads:g}"
                variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory}M"
            case Mode.OUTSIDE:
                gpu = machine.first_gpu(self.node)["uuid"]
                variables |= {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent", "CUDA_VISIBLE_DEVICES": gpu}
        return Worker(wanted, command, variables)

    @contextlib.contextmanager
    def clients(self, wanted: Sequence[Wanted], memory: int) -> Iterator[list[Worker]]:
        """Start clients, each with so many MiB, yield them with their contexts, and end them all. Raises WrongError."""
        with ending() as stack:
            started = [stack.enter_context(self.start(each, memory)) for each in wanted]
            stack.callback(_leave, started)  # first of all, so that they end at the same time
            for worker in started:
                worker.checked()
            yield started


def _leave(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.leave()


@contextlib.contextmanager
def opened(root: Path, config: str) -> Iterator[Site]:
    """Start mpsd and a bare control daemon in directories below this one, and end both with their servers."""
    (root / "m").mkdir(parents=True)
    with ending() as stack:
        node = stack.enter_context(machine.running(root / "m", config))
        devices = machine.gpus_of(node)
        gpu = "0" if devices else str(machine.first_gpu(node)["uuid"])
        bare = stack.enter_context(BareDaemon(root / "b", gpu=gpu, devices=devices))
        yield Site(node, {"CUDA_MPS_PIPE_DIRECTORY": str(bare.root)})


class Timer:
    """The time of a measurement."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left; below 0 afterwards."""
        return self._end - time.monotonic()

    def part(self, weight: float, of: float) -> "Timer":
        """Return a timer for a part of what is left, of parts that have this weight together."""
        return Timer(self.left * weight / of)
