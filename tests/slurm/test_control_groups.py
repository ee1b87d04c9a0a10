"""Jobs whose control groups are of version 2, which Slurm of 26.05 names by their SLUIDs.

The control groups of many machines are of both versions, and Slurm then takes only those of version 1, which have the
ids of jobs as names. So some tests run once more, under another kernel. What is below /sys/fs/cgroup there (26.05.5):

    system.slice/NODE_slurmstepd.scope/slurmd                              slurmd, Prolog and Epilog
    system.slice/NODE_slurmstepd.scope/SLUID/step_extern/slurm             slurmstepd; both hooks with RunInJob
    system.slice/NODE_slurmstepd.scope/SLUID/step_batch/slurm              the slurmstepd of the script
    system.slice/NODE_slurmstepd.scope/SLUID/step_batch/user/task_0        the script, and its TaskProlog
    system.slice/NODE_slurmstepd.scope/SLUID/step_0/user/task_1            a task of a step, and its TaskProlog

The group of the job is gone before Epilog begins, unless Epilog runs in it. A run that is requeued has another SLUID,
and so another group. A device that is not the job's is barred (EPERM) by a program of the kernel. 24.11 has the same
tree with job_ID in the place of the SLUID.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.slurm import building, kernel
from tests.slurm.cluster import VERSION
from tests.slurm.site import Start

pytestmark = [pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"), pytest.mark.root("run slurmd")]

_CHOSEN: Final = (
    *(
        f"tests/slurm/test_jobs.py::test_{name}[forky]"
        for name in (
            "two_users_share_and_a_third_waits", "a_job_that_lies_gets_no_more", "a_step_asks_for_less",
            "a_suspended_job_keeps_its_lease", "a_requeued_job_has_another_lease",
        )
    ),
    "tests/slurm/test_control_groups.py::test_hooks_that_run_in_the_job[forky]",
)  # fmt: skip


@pytest.mark.skipif(not building.HAS_KERNEL, reason="Debian has user-mode Linux for amd64 alone")
@pytest.mark.timeout(300)  # a kernel with one processor, beside other tests
def test_jobs_named_by_their_sluids(tmp_path: Path) -> None:
    """The holder of a lease is the group with the SLUID, whatever a job or one of its steps says."""
    done = kernel.tests(tmp_path, *_CHOSEN, deadline=280)
    if done.status is None:
        pytest.skip(f"user-mode Linux does not start here: {done.output[-300:]}")
    assert done.status == 0, done.output
    assert f" {len(_CHOSEN)} passed" in done.output, done.output


@pytest.mark.parametrize("slurm", ["forky"], indirect=True)
def test_hooks_that_run_in_the_job(start: Start) -> None:
    """With RunInJob, Prolog and Epilog run in the job's control group, which is then there until Epilog has ended."""
    with start(more=lambda _: "PrologFlags=Contain,RunInJob\n") as started, started.driven() as driven:
        job = started.cluster.submit("ann", driven.script, "--gres=mps:50")
        driven.answer()
        (lease,) = started.leases(job)
        name = lease["labels"]["slurm/identity"] if VERSION == 2 else f"job_{job}"
        assert [each["cgroup"].rpartition("/")[2] for each in lease["holders"]] == [name]
        driven.tell("exit")
        started.cluster.wait_for_state(job, "COMPLETED")
        started.wait_until_clean()
        started.cluster.wait_until_idle()
