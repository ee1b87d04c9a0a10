"""A node, and a job on it: ranks that are clients of simulated GPUs, which a test drives one by one."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import pytest

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.fork_server import ForkServer
from tests.harness import kill, look_at, remove_tree, wait_until
from tests.node import Node, running

ROOT: Final = Path(__file__).parents[2]

RANK: Final = """
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$RANK}}
exec "$@" <in.$rank >out.$rank
"""
"""Becomes a client whose lines come from one pipe, and whose answers go to another: a launcher has one stdin."""

_UNASKED: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI asks root to say twice that it is meant."""

DEADLINE: Final = 40.0
"""Seconds for the start of a whole job on a busy machine, and for its end."""

_numbers = count(1)


class Rank:
    """One rank of a job: a client, in its own pipes."""

    def __init__(self, directory: Path, number: int) -> None:
        self._ends = []
        for name in ("in", "out"):
            path = directory / f"{name}.{number}"
            os.mkfifo(path)
            self._ends.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # the test waits for no process to open it
        self._read = b""

    def answer(self) -> dict[str, Any]:
        """Return its next answer, of which the first tells where it runs."""
        while b"\n" not in self._read:
            assert select.select([self._ends[1]], [], [], DEADLINE)[0], "a rank does not answer"
            self._read += os.read(self._ends[1], 65536)
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        os.write(self._ends[0], f"{line}\n".encode())

    def close(self) -> None:
        for each in self._ends:
            os.close(each)


class Job:
    """A launcher under `mpsctl run`, and its ranks; it ends with its `with` block."""

    def __init__(self, node: Node, directory: Path, arguments: Sequence[str], ranks: int) -> None:
        """Start the launcher that `arguments` of `mpsctl run` name, without the program of the ranks."""
        self.ranks = [Rank(directory, number) for number in range(ranks)]
        self._output = directory / "output"
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MPSD_"))}
        variables = {VARIABLE: str(node.root / "run" / "simulated"), "PYTHONPATH": str(ROOT), "HOME": str(directory)}
        variables["TMPDIR"] = str(directory)  # torchrun leaves its logs there
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*node.mpsctl_command("run", *arguments), "sh", "-c", RANK, "sh", *program()],
                cwd=directory, env={**bare, **_UNASKED, **variables},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.pids: list[int] = []

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def started(self) -> list[dict[str, Any]]:
        """Return the first answer of each rank, which is a client of MPS."""
        answers = [each.answer() for each in self.ranks]
        self.pids = [each["pid"] for each in answers]
        assert all(each["mps"] for each in answers)
        return answers

    def ended(self) -> int:
        """Wait for the launcher's end, and return its exit status."""
        return self.process.wait(DEADLINE)

    def is_gone(self) -> bool:
        """Tell whether no rank is left."""
        return all(look_at(pid) is None for pid in self.pids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.ranks:
            each.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEADLINE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)
        for pid in self.pids:
            if (found := look_at(pid)) is not None:
                kill(found)


@pytest.fixture(scope="module")
def node(private_root: Path, fork_server: ForkServer) -> Iterator[Node]:
    root = private_root / f"l{next(_numbers)}"
    root.mkdir(mode=0o711)
    yield from running(root=root, fork_server=fork_server)
    remove_tree(root)


@pytest.fixture
def job(node: Node, short_tmp: Path) -> Iterator[Callable[..., Job]]:
    """Start a launcher with so many ranks by `mpsctl run`; afterwards no lease is left."""
    with contextlib.ExitStack() as jobs:
        yield lambda *arguments, ranks: jobs.enter_context(Job(node, short_tmp, arguments, ranks))
    wait_until(lambda: not node.leases(), what="the lease of a job to end")
    node.end_servers()
