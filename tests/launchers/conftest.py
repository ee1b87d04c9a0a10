"""A node, and a job on it: ranks that are clients of simulated GPUs, which a test drives one by one."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import pytest

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.driven import DEADLINE, Driven
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

_numbers = count(1)


class Job:
    """A launcher under `mpsctl run`, and its ranks; it ends with its `with` block."""

    def __init__(self, node: Node, directory: Path, arguments: Sequence[str], ranks: int) -> None:
        """Start the launcher that `arguments` of `mpsctl run` name, without the program of the ranks."""
        self.ranks = [Driven(directory, f".{number}") for number in range(ranks)]
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
