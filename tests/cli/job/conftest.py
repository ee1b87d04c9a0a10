"""Jobs whose ranks a test starts by hand, with the variables of a launcher, on simulated GPUs of their own."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.client import program
from tests.driven_program import DrivenProgram
from tests.harness import kill, look_at, pids, wait_until

ROOT: Final = Path(__file__).parents[3]

MPSCTL: Final = (sys.executable, "-P", "-m", "mpsd.cli.main", "job")

LATE: Final = 60.0
"""Seconds for the start or the end of a job on a busy machine."""

LAUNCHERS: Final[Mapping[str, Callable[[str, int, int], Mapping[str, str]]]] = {
    "Open MPI": lambda job, rank, ranks: {
        "PMIX_NAMESPACE": job,
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{ranks}",
    },
    "MPICH": lambda _, rank, ranks: {"MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": f"{ranks}"},
    "Slurm": lambda job, rank, ranks: {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": f"{rank}",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": f"1,{ranks}(x2)",
    },
    "torchrun": lambda job, rank, ranks: {
        "TORCHELASTIC_RUN_ID": job,
        "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
    },
}
"""By launcher, the variables of a rank on one of its nodes."""

_STRANGE: Final = (
    "CUDA_",
    "MPSD_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_",
    "SLURM_",
    "TORCHELASTIC_",
    "LOCAL_",
    "XDG_RUNTIME",
)


class Job:
    """The processes of one job, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        bare = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)}
        self.variables = {**bare, "TMPDIR": f"{directory}", "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{directory}/none"}
        self.errors = directory.with_name(f"{directory.name}.stderr")
        self._ranks = contextlib.ExitStack()

    def start(
        self, *arguments: str, command: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
    ) -> DrivenProgram:
        """Start `mpsctl job` with these arguments, around a simulated client or another command."""
        arguments = (*MPSCTL, *arguments, "--", *(program() if command is None else command))
        with self.errors.open("ab") as errors, _only(self.variables):
            return self._ranks.enter_context(DrivenProgram(arguments, variables or {}, stderr=errors))

    def ranks(
        self, ranks: int, *arguments: str, launcher: str = "Open MPI", command: Sequence[str] | None = None
    ) -> list[DrivenProgram]:
        """Start the ranks of a launcher."""
        name = f"{self.directory.name}-{os.getpid()}"
        return [
            self.start(*arguments, command=command, variables=LAUNCHERS[launcher](name, rank, ranks))
            for rank in range(ranks)
        ]

    @property
    def said(self) -> str:
        """What the ranks have printed for their user."""
        return self.errors.read_text(errors="replace")

    @property
    def places(self) -> list[Path]:
        return [*self.directory.glob("mpsd-job-*")]

    def processes(self, word: str = "") -> list[int]:
        """Return the processes beside the ranks that name its directory in their command lines, and this word."""
        found = [look_at(pid) for pid in pids()]
        return [
            each.pid
            for each in found
            if each is not None and not each.zombie and word in each.command and self._is_its(each)
        ]

    def _is_its(self, process: Any) -> bool:
        return f"{self.directory}/" in process.command or process.pipe_directory.startswith(f"{self.directory}/")

    def is_gone(self) -> bool:
        """Tell whether nothing is left of it, once its last rank has ended; the keeper is just about to."""
        places = self.places
        wait_until(lambda: not self.processes(), what="the keeper to end", deadline=LATE)
        return not places

    def close(self) -> None:
        """End what a failed test leaves."""
        self._ranks.close()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), what="the job to end", deadline=20)
        for pid in self.processes():
            if (found := look_at(pid)) is not None:
                kill(found)
        sys.stderr.write(self.said)  # pytest shows it where the test failed
        self.errors.unlink(missing_ok=True)


@contextlib.contextmanager
def _only(variables: Mapping[str, str]) -> Iterator[None]:
    """Have os.environ be these variables."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def job(short_tmp: Path) -> Iterator[Job]:
    """Yield a job, of which nothing is left afterwards."""
    made = Job(short_tmp)
    yield made
    made.close()
