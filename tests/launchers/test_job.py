"""`mpsctl job` around the ranks of Slurm, Open MPI and MPICH: 64 of them on 4 simulated GPUs, and kills."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from mpsd.simulator.client import program
from tests.harness import kill, look_at, pids, wait_until
from tests.launchers import missing
from tests.launchers.conftest import ROOT
from tests.slurm.cluster import Cluster, running

RANKS: Final = 64

MPSCTL: Final = (sys.executable, "-P", "-m", "mpsd.cli.main", "job")

_LATE: Final = 150.0
"""Seconds for 64 ranks, of which each is three programs, on two processors that others use too."""

_ROOT_TOO: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

pytestmark = pytest.mark.timeout(400)

LAUNCHERS: Final = (
    pytest.param(
        "slurm",
        marks=[
            pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
            pytest.mark.root("run a cluster of Slurm in namespaces"),
        ],
    ),
    pytest.param("openmpi", marks=pytest.mark.launchers("mpirun.openmpi")),
    pytest.param("mpich", marks=pytest.mark.launchers("mpirun.mpich")),
)


def variables(directory: Path) -> dict[str, str]:
    """Return the variables of a job that has a directory of its own."""
    return {"TMPDIR": f"{directory}", "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{directory}/none"}


class Launched:
    """A launcher with its ranks, in a directory of their own."""

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        self.directory = directory
        strange = ("CUDA_", "MPSD_", "SLURM_", "XDG_RUNTIME")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        self._output = directory / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, env={**bare, **_ROOT_TOO, **variables(directory)}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, cwd=directory,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def answers(self) -> list[dict[str, object]]:
        """The first lines of the clients."""
        return [json.loads(line) for line in re.findall(r"\{.*?\}", self.output)]

    def left(self) -> list[str]:
        """Return what of the job is still there: processes that name its directory, and directories."""
        found = [look_at(pid) for pid in pids()]
        processes = [
            f"{each}"
            for each in found
            if each is not None
            and not each.zombie
            and each.pid != self.process.pid
            and (f"{self.directory}/" in each.command or each.pipe_directory.startswith(f"{self.directory}/"))
        ]
        return [*processes, *map(str, self.directory.glob("mpsd-job-*"))]

    def close(self) -> None:
        """End what a failed test leaves."""
        self.process.kill()
        self.process.wait(30)
        for pid in pids():
            found = look_at(pid)
            if found is not None and (f"{self.directory}/" in found.command or self._is_below(found.pipe_directory)):
                kill(found)
        with contextlib.suppress(OSError):
            sys.stderr.write(self.output)

    def _is_below(self, path: str) -> bool:
        return path.startswith(f"{self.directory}/")


@pytest.fixture(scope="module")
def slurm(private_root: Path) -> Iterator[Cluster | None]:
    """Yield the cluster that all tests share; None where there is none."""
    if os.geteuid() != 0 or missing("slurmctld", "slurmd", "srun", "munged"):
        yield None
        return
    with running(private_root / "slurm", nodes=2, control_groups=False) as cluster:
        yield cluster


Launch = Callable[..., Launched]


@pytest.fixture
def launch(slurm: Cluster | None, short_tmp: Path) -> Iterator[Launch]:
    """Start so many ranks by a launcher, each as `mpsctl job` with these arguments around a command."""
    with contextlib.ExitStack() as stack:

        def start(
            name: str, ranks: int, *arguments: str, command: Sequence[str] = program(), nodes: int = 1
        ) -> Launched:
            launcher: Sequence[str]
            match name:
                case "slurm":
                    assert slurm is not None
                    own = (f"{name}={value}" for name, value in variables(short_tmp).items())
                    srun = ("srun", f"--nodes={nodes}", "--overcommit", "-n", f"{ranks}", "--quiet")
                    launcher = slurm.command("env", *own, *srun)
                case "openmpi":
                    launcher = ("mpirun.openmpi", "--oversubscribe", "--quiet", "-n", f"{ranks}")
                case _:
                    launcher = ("mpirun.mpich", "-n", f"{ranks}")
            started = Launched(short_tmp, [*launcher, *MPSCTL, *arguments, "--", *command])
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_many_ranks(launch: Launch, launcher: str) -> None:
    """All of them are clients of MPS, 16 on each GPU, and nothing is left."""
    command = ("sh", "-c", 'exec "$@" </dev/null', "sh", *program())  # MPICH leaves stdin open
    started = launch(launcher, RANKS, "--simulate", "4", "--within", "140s", command=command)
    assert started.process.wait(_LATE) == 0, started.output
    answers = started.answers
    assert len(answers) == RANKS
    assert all(each["mps"] for each in answers)
    assert [*Counter(each["gpu"] for each in answers).values()] == [RANKS // 4] * 4
    assert "ranks 0 to 15 on GPU 0" in started.output
    wait_until(lambda: not started.left(), what="the job to leave nothing", deadline=20)


@pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged")
@pytest.mark.root("run a cluster of Slurm in namespaces")
def test_ranks_on_two_nodes(launch: Launch) -> None:
    """Each node has an mpsd of the job's own, also where both have one file system for temporary files."""
    script = 'echo "$SLURMD_NODENAME: $CUDA_MPS_PIPE_DIRECTORY"; exec "$@" </dev/null'
    started = launch("slurm", 4, "--simulate", "2", nodes=2, command=("sh", "-c", script, "sh", *program()))
    assert started.process.wait(_LATE) == 0, started.output
    assert [each["mps"] for each in started.answers] == [True] * 4
    found = re.findall(r"^(slurmnode2?): (\S+)/(gpu[01])$", started.output, re.MULTILINE)
    assert sorted((node, gpu) for node, _, gpu in found) == [*product(("slurmnode", "slurmnode2"), ("gpu0", "gpu1"))]
    assert len({directory for _, directory, _ in found}) == 2
    wait_until(lambda: not started.left(), what="the job to leave nothing", deadline=20)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_misses_mps(launch: Launch, launcher: str) -> None:
    """One of 64 ranks whose wrapper drops the environment fails all of them within the deadline, with one sentence."""
    script = (
        "rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$SLURM_LOCALID}}\n"
        '[ "$rank" != 17 ] || export CUDA_MPS_PIPE_DIRECTORY=/nobody\n'
        'sleep 600 | "$@"'
    )
    started = launch(
        launcher, RANKS, "--simulate", "4", "--within", "140s", command=("sh", "-c", script, "sh", *program())
    )
    assert started.process.wait(_LATE) != 0
    assert f"{started.output}".count("rank 17 misses MPS: process ") >= 1, started.output
    wait_until(lambda: not started.left(), what="the job to leave nothing", deadline=30)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_is_killed(launch: Launch, slurm: Cluster | None, launcher: str) -> None:
    """Its ranks, their programs, mpsd and its directory end, whatever killed it."""
    script = 'sleep 600 | "$@"'
    started = launch(launcher, 4, "--simulate", "2", command=("sh", "-c", script, "sh", *program()))
    wait_until(lambda: len(started.answers) == 4, what=f"the ranks to start: {started.output}", deadline=_LATE)
    if launcher == "slurm":
        assert slurm is not None
        slurm.root_run("scancel", "--signal=KILL", "--user=root")
    else:
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait(_LATE)
    wait_until(lambda: not started.left(), what="the job to leave nothing", deadline=30)
    clients = [each["pid"] for each in started.answers]
    found = [look_at(each) for each in clients if isinstance(each, int)]
    assert not [each for each in found if each is not None and not each.zombie]
