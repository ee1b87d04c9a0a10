"""Control groups named by SLUID, as 26.05 lays them in version 2: a tree made by the test, without Slurm.

This machine's control groups are of both versions, which slurmd of 26.05 refuses. Source: Slurm, "Control Group v2
plugin": slurmstepd.scope/SLUID/step_N/user/task_N.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.control_groups import control_group
from tests.fork_server import ForkServer
from tests.harness import remove_tree, wait_until
from tests.node import Node, running

pytestmark = [pytest.mark.root("make control groups"), pytest.mark.thorough]

_ROOT: Final = Path(__file__).parents[2]

SLUID: Final = "sEKNKTV3WPV500"

JOB: Final = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0", "SLURM_JOB_SLUID": SLUID,
    "SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
}  # fmt: skip

_AS_TASK: Final = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


@pytest.fixture
def node(private_root: Path, fork_server: ForkServer) -> Iterator[Node]:
    root = private_root / "sluid"
    root.mkdir(mode=0o711)
    yield from running(root=root, fork_server=fork_server)
    remove_tree(root)


@pytest.fixture
def task() -> Iterator[Path]:
    """Make the groups of a task, and remove them."""
    with control_group("cgroup2", "slurmstepd") as scope:
        group = scope / SLUID / "step_0" / "user" / "task_0"
        group.mkdir(parents=True)
        yield group
        _end(group)
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the task to have ended")
        while group != scope:
            group.rmdir()
            group = group.parent


def _end(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def _hook(node: Node, name: str, variables: Mapping[str, str], *before: str) -> "subprocess.CompletedProcess[str]":
    configuration = node.root / "slurm.toml"
    configuration.write_text(f'socket = "{node.socket}"\nstate_dir = "{node.root}/state"\n')
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT), "MPSD_SLURM_CONFIG": str(configuration)}
    return subprocess.run(
        [*before, sys.executable, "-m", "mpsd.slurm", name],
        env={**environment, **variables}, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip


def test_the_group_of_the_job(node: Node, task: Path) -> None:
    """The group with the SLUID holds the lease of the job, from its first task on until Epilog."""
    assert _hook(node, "prolog", JOB).stderr == ""
    (claim,) = node.leases()
    assert claim["labels"]["slurm/identity"] == SLUID
    record = node.root / "state" / "jobs" / "12" / "task"
    assert record.exists()
    script = 'sleep 600 >/dev/null 2>&1 & "$@"'
    tasks = {"SLURM_JOB_ID": "12", "SLURM_LOCALID": "0"}
    done = _hook(node, "task-prolog", tasks, "sh", "-c", _AS_TASK, str(task), "sh", "-c", script, "sh")
    assert done.returncode == 0, done.stdout
    assert f"export MPSD_LEASE={claim['id']}\n" in done.stdout
    (lease,) = node.leases()
    (holder,) = lease["holders"]
    assert holder["kind"] == "cgroup"
    assert holder["cgroup"].endswith(f"/{SLUID}")
    # Another run of the job, with the same id: its Epilog ends nothing.
    _hook(node, "epilog", {**JOB, "SLURM_JOB_SLUID": "sEKNKTV3WPV501"})
    assert [each["id"] for each in node.leases()] == [lease["id"]]
    _end(task)
    assert _hook(node, "epilog", JOB).stderr == ""
    assert node.leases() == []
    assert not record.parent.exists()
