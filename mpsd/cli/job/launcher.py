"""The words of a launcher to a rank, in its environment: which rank it is, and of how many on this node.

Sources: srun(1) for Slurm, mpirun(1) and the variables of PMIx for Open MPI, hydra's own for MPICH (measured with 4.0),
and torch.distributed.run for torchrun.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple


class Seat(NamedTuple):
    """The place of a rank in its job."""

    launcher: str
    job: str
    """What all ranks of this job on this node have in common, and ranks of no other job."""
    rank: int
    """Its number on this node."""
    ranks: int | None
    """The number of ranks on this node; None where the launcher does not say."""


_OPEN_MPI: Final = "OMPI_COMM_WORLD_LOCAL_RANK"
_MPICH: Final = "MPI_LOCALRANKID"
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
_SLURM: Final = "SLURM_LOCALID"


def seat(variables: Mapping[str, str]) -> Seat | None:
    """Return the place of this process, by the innermost launcher that says one; None without a launcher.

    The ranks of mpirun are below a step of Slurm on the nodes beside the first, so that Slurm comes last.
    """
    if _TORCHRUN in variables and "LOCAL_RANK" in variables:
        restart = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        job = f"{variables[_TORCHRUN]} {restart} {_launcher('LOCAL_RANK')}"
        return _seat("torchrun", job, variables["LOCAL_RANK"], variables.get("LOCAL_WORLD_SIZE"))
    if _OPEN_MPI in variables:
        uri = variables.get("PMIX_SERVER_URI2", "")
        job = f"{variables.get('PMIX_NAMESPACE') or _launcher(_OPEN_MPI)} {uri}"
        return _seat("Open MPI", job, variables[_OPEN_MPI], variables.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    if _MPICH in variables:
        return _seat("MPICH", _launcher(_MPICH), variables[_MPICH], variables.get("MPI_LOCALNRANKS"))
    if _SLURM in variables and "SLURM_STEP_ID" in variables:
        job = ".".join(variables.get(each, "") for each in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"))
        return _seat("Slurm", job, variables[_SLURM], _tasks(variables))
    return None


def _seat(launcher: str, job: str, rank: str, ranks: str | None) -> Seat | None:
    if not rank.isdecimal():
        return None
    known = ranks is not None and ranks.isdecimal() and int(ranks) > int(rank)
    return Seat(launcher, f"{launcher} {job}", int(rank), int(ranks or 0) if known else None)


def _tasks(variables: Mapping[str, str]) -> str | None:
    """Return the number of tasks of a step on this node: `2(x3),1` is 2 on each of three nodes, and 1 on the next."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = list[str]()
    for part in filter(None, text.split(",")):
        tasks, _, times = part.removesuffix(")").partition("(x")
        counts += [tasks] * int(times or 1)
    node = variables.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _launcher(variable: str) -> str:
    """Return the process that started the ranks: the nearest ancestor that has no such variable from its start.

    Its start time tells it from any other process with its pid.
    """
    pid = os.getppid()
    while pid > 1 and f"\0{variable}=".encode() in b"\0" + _read(pid, "environ"):
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if fields else 0
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return f"{pid} {fields[19].decode() if fields else ''}"


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # gone, or of another user: then it is no rank of this job
        return b""
