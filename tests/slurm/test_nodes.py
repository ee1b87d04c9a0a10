"""Nodes that are configured otherwise, and mpsd that is away: no job fails silently, and no node is drained."""

import re

import pytest

from tests.harness import wait_until
from tests.slurm import building
from tests.slurm.site import Start

pytestmark = [
    pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
    pytest.mark.root("run slurmd"),
    pytest.mark.parametrize("slurm", building.OLDEST_AND_NEWEST, indirect=True),
]


def test_all_gpus_are_shared(start: Start) -> None:
    """With all_sharing, jobs have shares of both GPUs, each under the GPU that Slurm named."""
    with start(flags="all_sharing") as started, started.driven() as one, started.driven() as two:
        jobs = [
            started.cluster.submit(user, each.script, "--gres=mps:60") for user, each in (("ann", one), ("bert", two))
        ]
        answers = [each.answer() for each in (one, two)]
        assert len({each["gpu"] for each in answers}) == 2
        for job, each in zip(jobs, (one, two), strict=True):
            each.tell("exit")
            started.cluster.wait_for_state(job, "COMPLETED")
        started.wait_until_clean()


def test_places_in_the_order_of_gres_conf(start: Start) -> None:
    """SLURM_JOB_GPUS has places in gres.conf, which may name the devices in another order, and include its lines."""
    with start(flags="all_sharing", reversed_devices=True) as started:
        hook = str(started.cluster.place / "hooks" / "prolog")
        gres = started.cluster.place / "etc" / "slurm" / "gres.conf"
        for job in ("8", "9"):
            variables = ["env", f"SLURM_JOB_ID={job}", "SLURM_JOB_UID=3001", "SLURM_JOB_GPUS=0"]
            variables += ["SLURMD_NODENAME=slurmnode"]
            started.cluster.root_run(*variables, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", hook)
            (lease,) = started.leases(int(job))
            assert lease["gpus"] == [started.node.get("/v1/gpus").json["gpus"][1]["uuid"]]
            started.cluster.root_run(*variables, str(started.cluster.place / "hooks" / "epilog"))
            if job == "8":
                gres.rename(gres.with_name("more.conf"))
                gres.write_text("Include more.conf\n")
        started.wait_until_clean()


def test_slurm_without_control_groups(start: Start) -> None:
    """Where Slurm makes no control groups, the processes that become tasks hold the lease."""
    with start(control_groups=False) as started, started.driven() as driven:
        job = started.cluster.submit("ann", driven.script, "--gres=mps:30", "-n2")
        assert driven.answer()["active_thread_percentage"] == 30
        (lease,) = started.leases(job)
        assert [each["kind"] for each in lease["holders"]] == ["process"]
        driven.tell("exit")
        started.cluster.wait_for_state(job, "COMPLETED")
        started.wait_until_clean()
        script = "srun -n2 --overlap bash -c 'echo $MPSD_LEASE'"
        job = started.cluster.submit("ann", script, "--gres=mps:30", "-n2")
        started.cluster.wait_for_state(job, "COMPLETED")
        assert len({*started.cluster.output(job).split()}) == 1
        started.wait_until_clean()


def test_a_request_in_the_comment(start: Start) -> None:
    """With `comment`, the job_submit plugin's words count: memory of a job with mps, and both of a job with shards."""
    with start(share="shard", settings={"comment": True}) as started:
        hook = str(started.cluster.place / "hooks" / "prolog")
        with started.driven() as driven:
            comment = "mpsd:threads=25,memory=2147483648 mine"
            job = started.cluster.submit("ann", driven.script, "--gres=shard:1", f"--comment={comment}")
            answer = driven.answer()
            assert (answer["active_thread_percentage"], answer["pinned_device_mem_limit"]) == (25, 2 * 2**30)
            driven.tell("exit")
            started.cluster.wait_for_state(job, "COMPLETED")
            started.wait_until_clean()
        # slurmctld was restarted, and 22.05 has forgotten the GPU.
        variables = ("env", "SLURM_JOB_ID=8", "SLURM_JOB_UID=3001", f"SLURM_JOB_COMMENT={comment}")
        started.cluster.root_run(*variables, hook)
        done = started.cluster.run(
            "ann", "env", "SLURM_JOB_ID=8", f"{hook.removesuffix('prolog')}task-prolog", check=False
        )
        assert done.returncode == 1
        assert re.search("^print mpsd: .* does not say of which", done.stdout)
        started.cluster.root_run(*variables, f"{hook.removesuffix('prolog')}epilog")
        started.wait_until_clean()


@pytest.mark.parametrize("without", ["fail", "run"])
def test_a_node_without_mpsd(start: Start, without: str) -> None:
    """A job on a node whose mpsd is away fails with the reason, or runs without a lease, as configured."""
    with start(settings={"without_mpsd": without, "wait": 1.0}) as started:
        started.node.end()
        job = started.cluster.submit("ann", "echo it ran", "--gres=mps:25")
        started.cluster.wait_for_state(job, "COMPLETED" if without == "run" else "FAILED", deadline=40)
        said = started.cluster.output(job)
        assert "mpsd: " in said
        assert ("it ran" in said) is (without == "run")
        started.cluster.wait_until_idle()
        started.node.start()
        # The Epilog came while mpsd was away. The next one ends what it could not.
        job = started.cluster.submit("ann", "true", "--gres=mps:25")
        started.cluster.wait_for_state(job, "COMPLETED")
        started.wait_until_clean()


def test_mpsd_restarts_within_prolog(start: Start) -> None:
    """A job whose Prolog finds no mpsd waits for the one that starts, and runs."""
    with start(settings={"wait": 30.0}) as started, started.driven() as driven:
        started.node.end()
        job = started.cluster.submit("ann", driven.script, "--gres=mps:25")
        started.cluster.wait_for_state(job, "RUNNING")
        wait_until((started.state_dir / "jobs" / str(job) / "job").exists, what="Prolog to have begun")
        started.node.start()
        assert driven.answer()["active_thread_percentage"] == 25
        driven.tell("exit")
        started.cluster.wait_for_state(job, "COMPLETED")
        started.wait_until_clean()
