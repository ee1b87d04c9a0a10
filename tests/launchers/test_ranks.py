"""Ranks that mpirun and torchrun start under `mpsctl run --processes N` share one lease, whatever becomes of them."""

import os
import shutil
import signal
from collections.abc import Callable
from typing import Final

import pytest

from tests.harness import wait_until
from tests.launchers.conftest import Job
from tests.node import Node

RANKS: Final = 8

OPEN_MPI: Final = ("mpirun.openmpi", "--oversubscribe", "-n", f"{RANKS}")
MPICH: Final = ("mpirun.mpich", "-n", f"{RANKS}")
TORCHRUN: Final = ("torchrun", "--standalone", "--nproc-per-node", f"{RANKS}", "--no-python")

LAUNCHERS: Final = (
    pytest.param(OPEN_MPI, marks=pytest.mark.launchers("mpirun.openmpi"), id="Open MPI"),
    pytest.param(MPICH, marks=pytest.mark.launchers("mpirun.mpich"), id="MPICH"),
    pytest.param(
        TORCHRUN,
        # PyTorch is too large to be required in CI.
        marks=[
            pytest.mark.launchers(),
            pytest.mark.skipif(shutil.which("torchrun") is None, reason="pip install torch, and torchrun in PATH"),
        ],
        id="torchrun",
    ),
)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_share_a_lease(node: Node, job: Callable[..., Job], launcher: tuple[str, ...]) -> None:
    started = job("--fraction", "0.5", "--processes", f"{RANKS}", "--", *launcher, ranks=RANKS)
    answers = started.started()
    (lease,) = node.leases()
    assert {each["server"] for each in answers} == {answers[0]["server"]}
    assert {each["gpu"] for each in answers} == {*lease["gpus"]}
    assert sum(each["pinned_device_mem_limit"] for each in answers) == lease["pinned_device_mem_limit"]

    def verified() -> set[int] | None:
        verdict = node.get(f"/v1/leases/{lease['id']}/verify").json
        return {each["pid"] for each in verdict["processes"]} if verdict["ok"] else None

    wait_until(lambda: verified() == {*started.pids}, what="mpsd to verify every rank")
    for each in started.ranks:
        each.tell("exit")
    assert started.ended() == 0, started.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank(node: Node, job: Callable[..., Job], launcher: tuple[str, ...]) -> None:
    """The launcher ends the other ranks, and the lease ends with the launcher."""
    started = job("--fraction", "0.5", "--processes", f"{RANKS}", "--", *launcher, ranks=RANKS)
    started.started()
    os.kill(started.pids[3], signal.SIGKILL)
    assert started.ended() != 0
    wait_until(started.is_gone, what="the launcher to end the other ranks")
    wait_until(lambda: not node.leases(), what="the lease to end with its last process")
