"""A driver without a GPU: a libnvidia-ml.so.1 built from fake_nvml.c, and a process that reads it through pynvml.

pynvml keeps the library that it has loaded, so every test has its own process; the library's answers can change while
that process runs.
"""

import base64
import contextlib
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.errors import catalogue
from mpsd.core.model import Gpu, GpuUsage, Inventory, Known, Reading, Unknown
from tests.tools import compiler

LIBRARY: Final = "libnvidia-ml.so.1"

_HERE: Final = Path(__file__).parent
_DEADLINE: Final = 30.0
_ERRORS: Final = {error.code: error for error in catalogue()}


def build(directory: Path) -> None:
    """Build the library into `directory`.

    Without a compiler the test skips, or fails where tests must not be skipped.
    """
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler(), *options, "-o", directory / LIBRARY, _HERE / "fake_nvml.c"], check=True)


@dataclass(frozen=True, slots=True)
class FakeNvml:
    """The library's answers: lines in the format of fake_nvml.c, which a test can replace at any time."""

    library: Path
    directory: Path

    def show(self, *lines: str) -> None:
        """Replace the node's state by this, atomically."""
        new = self.directory / "state.new"
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.rename(self.directory / "state")

    def calls(self) -> list[tuple[int, str]]:
        """Return every call so far: the id of the thread that made it, and the function."""
        path = self.directory / "calls"
        if not path.exists():
            return []
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        return [(int(thread), function) for thread, function in lines]

    def functions(self) -> list[str]:
        """Return the function of every call so far."""
        return [function for _, function in self.calls()]

    def compute_mode(self, uuid: str) -> int:
        """Return a GPU's nvmlComputeMode_t."""
        path = self.directory / f"compute_mode-{uuid}"
        return int(path.read_text(encoding="ascii")) if path.exists() else 0

    def set_compute_mode(self, uuid: str, mode: int) -> None:
        """Set a GPU's nvmlComputeMode_t, as another process would."""
        new = self.directory / f"compute_mode-{uuid}.mine"
        new.write_text(f"{mode}\n", encoding="ascii")
        new.rename(self.directory / f"compute_mode-{uuid}")

    @property
    def variables(self) -> dict[str, str]:
        """Return an environment in which a process finds only this library."""
        return {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML": str(self.directory)}


class Child:
    """A process that holds one NvmlGpus and executes requests on it (see nvml_child.py)."""

    def __init__(self, process: "subprocess.Popen[bytes]", requests: IO[bytes], answers: IO[bytes]) -> None:
        self.process = process
        self._requests = requests
        self._answers = answers
        self._asked = 0

    def ask(self, name: str, *arguments: object) -> int:
        """Send a request, and return the number that its answer will have."""
        self._asked += 1
        self._requests.write(base64.b64encode(pickle.dumps((self._asked, name, arguments))) + b"\n")
        return self._asked

    def answer(self) -> tuple[int, object]:
        """Return the next answer and its number; raise the answer if it is an error of mpsd."""
        if not select.select([self._answers], [], [], _DEADLINE)[0]:
            pytest.fail(f"no answer within {_DEADLINE:g} s")
        line = self._answers.readline()
        if not line:
            pytest.fail("the process ended instead of answering; its stderr says why")
        number, code, said = pickle.loads(base64.b64decode(line))  # noqa: S301 - our own child wrote it
        if code is not None:
            detail, hint = said
            raise _ERRORS[code](detail, hint=hint)
        return int(number), said

    def do(self, name: str, *arguments: object) -> object:
        """Send a request, and return its answer, which must be the next one."""
        number = self.ask(name, *arguments)
        answered, value = self.answer()
        assert answered == number
        return value

    def inventory(self) -> Inventory:
        """Return the result of `NvmlGpus.inventory` there."""
        inventory = self.do("inventory")
        assert isinstance(inventory, Inventory)
        return inventory

    def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return the result of `NvmlGpus.usage` there."""
        reading = self.do("usage", gpu)
        assert isinstance(reading, Known | Unknown)
        return reading

    def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
        """Return the result of `NvmlGpus.set_compute_mode` there."""
        reading = self.do("set_compute_mode", gpu, mode)
        assert isinstance(reading, Known | Unknown)
        return reading

    def leave(self) -> int:
        """End its input, wait until it has answered everything, and return its exit status."""
        self._requests.close()
        return self.process.wait(_DEADLINE)


@contextlib.contextmanager
def child(variables: Mapping[str, str]) -> Iterator[Child]:
    """Start the process with these variables in its environment, and end it in any case."""
    environment = {**os.environ, "PYTHONPATH": str(_HERE.parents[1]), **variables}
    process = subprocess.Popen(
        [sys.executable, _HERE / "nvml_child.py"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield Child(process, process.stdin, process.stdout)
        finally:
            process.kill()
