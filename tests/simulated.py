"""Simulated clients of MPS as processes, for tests: started, told what to do, and ended."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE, Device, there
from tests.node import Node

_DEADLINE: Final = 30.0
"""Seconds for any answer: none should come near it."""


class SimulatedClient:
    """A process that uses CUDA on a simulated GPU (see mpsd.simulator.client); it ends with the `with` around it.

    Every answer is a dict with `ok`, and with `error` and `code` where that is false.
    """

    def __init__(self, environment: Mapping[str, str], *, before: Sequence[str] = ()) -> None:
        """Start it, with no CUDA_* variable but those of `environment`; `before` is a command that becomes it."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        self.process = subprocess.Popen(
            [*before, *program()],
            env={**bare, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._hello: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    @property
    def hello(self) -> dict[str, Any]:
        """What it says first: `mps`, `server`, `gpu`, `active_thread_percentage`, `pinned_device_mem_limit`, and more.

        It comes once CUDA is initialised, so it is waited for here; where MPS has the client wait, it does not come.
        """
        if self._hello is None:
            self._hello = self.answer()
        return self._hello

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer to read now."""
        return bool(select.select([self._stdout], [], [], 0)[0])

    def tell(self, line: str) -> None:
        """Tell it something, and do not wait for its answer."""
        assert self.hello["ok"], self.hello
        self._stdin.write(f"{line}\n".encode())

    def answer(self) -> dict[str, Any]:
        """Return the next answer that comes."""
        if not select.select([self._stdout], [], [], _DEADLINE)[0]:
            raise AssertionError(f"client {self.pid} did not answer within {_DEADLINE:g} s")
        line = self._stdout.readline()
        if not line:
            raise AssertionError(f"client {self.pid} ended with {self.process.wait(_DEADLINE)} instead of answering")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, line: str) -> dict[str, Any]:
        """Tell it something, and return its answer."""
        self.tell(line)
        return self.answer()

    def alloc(self, size: str) -> dict[str, Any]:
        """Allocate device memory, such as `1GiB`."""
        return self.do(f"alloc {size}")

    def free(self, size: str = "") -> dict[str, Any]:
        """Free device memory; all of it where no size is given."""
        return self.do(f"free {size}")

    def compute(self, seconds: float) -> dict[str, Any]:
        """Do as much work as the whole GPU does in these seconds; the answer has how many it took."""
        return self.do(f"compute {seconds}")

    def sync(self) -> dict[str, Any]:
        """See whether an error is waiting."""
        return self.do("sync")

    def fault(self) -> dict[str, Any]:
        """Have the GPU meet a fatal fault."""
        return self.do("fault")

    def end(self) -> int:
        """Have it exit by itself, and return its status."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"exit\n")
        return self.process.wait(_DEADLINE)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal, and return its status."""
        self.process.send_signal(number)
        return self.process.wait(_DEADLINE)

    def __enter__(self) -> Self:
        """Hand it over."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it whatever happens."""
        with self.process:
            self.process.kill()


def gpus(node: Node) -> list[Device]:
    """Return the simulated GPUs of a node, in the order of their indices."""
    return there(node.root / "run" / "simulated")


def variables(node: Node, name: str = "gpu0") -> dict[str, str]:
    """Return the environment of a process that is to find a node's GPUs, and this control daemon on them."""
    return {**outside(node), "CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory(name))}


def outside(node: Node) -> dict[str, str]:
    """Return the environment of a process that finds a node's GPUs, and no control daemon."""
    return {VARIABLE: str(node.root / "run" / "simulated"), "CUDA_MPS_PIPE_DIRECTORY": str(node.root / "nobody-here")}


def leased(node: Node, *arguments: str) -> SimulatedClient:
    """Start a client as a user does, by `mpsctl run` with these arguments: with a lease, in the lease's environment."""
    mpsctl = (sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "run", *arguments, "--")
    root = str(Path(__file__).parent.parent)
    return SimulatedClient({VARIABLE: str(node.root / "run" / "simulated"), "PYTHONPATH": root}, before=mpsctl)
