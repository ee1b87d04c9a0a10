"""Jobs with shares of GPUs: each has a lease, whatever it says about itself, and no more than that."""

import contextlib
import re
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.harness import remove_tree, wait_until
from tests.slurm.cluster import VERSION
from tests.slurm.site import ROOT, Site
from tests.slurm.site import site as running_site

pytestmark = [pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"), pytest.mark.root("run slurmd")]

GIB = 2**30

_IDENTITIES = {"22.05": r"{job}\..+", "24.11": r"{job}\.[0-9]{{10}}", "26.05": "s[0-9A-Z]{{13}}"}
"""What the hooks of a release tell a job by."""


def test_two_users_share_and_a_third_waits(site: Site) -> None:
    """Two jobs of two users share a GPU, each within its part; Slurm has a third wait until one of them ends."""
    with site.driven() as first, site.driven() as second, site.driven() as third:
        jobs = [
            site.cluster.submit(user, driven.script, f"--gres=mps:{share}")
            for user, driven, share in (("ann", first, 60), ("bert", second, 40))
        ]
        answers = [first.answer(), second.answer()]
        assert [each["mps"] for each in answers] == [True, True]
        assert answers[0]["gpu"] == answers[1]["gpu"]
        assert [each["active_thread_percentage"] for each in answers] == [60, 40]
        release = site.cluster.root_run("slurmd", "-V").stdout.split()[1].rpartition(".")[0]
        for job, share in zip(jobs, (60, 40), strict=True):
            (lease,) = site.leases(job)
            identity = lease["labels"]["slurm/identity"]
            assert re.fullmatch(_IDENTITIES[release].format(job=job), identity)
            assert lease["active_thread_percentage"] == share
            assert _group(lease) == (identity if VERSION == 2 and release == "26.05" else f"job_{job}")
        waits = site.cluster.submit("cleo", third.script, "--gres=mps:10")
        wait_until(lambda: site.cluster.job(waits).get("Reason") == "Resources", what="the third job to wait")
        assert not site.leases(waits)
        # Memory is a limit: what is beyond it is refused, and within it is had.
        memory = answers[1]["pinned_device_mem_limit"]
        assert not second.do(f"alloc {memory + GIB}")["ok"]
        assert second.do(f"alloc {memory - GIB}")["ok"]
        first.tell("exit")
        assert third.answer()["active_thread_percentage"] == 10
        for each in (second, third):
            each.tell("exit")
        for job in (*jobs, waits):
            site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def _group(lease: Mapping[str, Any]) -> str:
    """Return the name of the control group that holds a lease."""
    (holder,) = lease["holders"]
    return str(holder["cgroup"]).rpartition("/")[2]


def test_a_job_that_lies_gets_no_more(site: Site) -> None:
    """A job that changes its variables, and one that drops all of them, stay what their control group is."""
    with site.driven() as bare, site.driven() as raised:
        lie = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=70000M "
        jobs, allocated = [], []
        for driven, before, share in (
            (bare, "unset ${!MPSD_*}\nexport MPSD_LEASE=none", 30),
            (raised, f"export {lie}", 20),
        ):
            jobs.append(site.cluster.submit("ann", f"{before}\n{driven.script}", f"--gres=mps:{share}"))
            answer = driven.answer()
            assert answer["active_thread_percentage"] == 30
            (lease,) = site.leases(jobs[-1])
            assert _clients(site, lease["id"]) == [answer["pid"]]
            allocated.append(driven.do(f"alloc {lease['pinned_device_mem_limit'] + GIB}")["ok"])
        # The second gets what its user's larger lease opened before it came: mpsd finds that, and tells.
        assert allocated == [False, True]
        wait_until(
            lambda: site.node.get(f"/v1/leases/{lease['id']}/verify").json["violations"], what="the lie to be found"
        )
        for driven in (bare, raised):
            driven.tell("exit")
        for job in jobs:
            site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def _clients(site: Site, lease: str) -> list[int]:
    """Return the clients of a lease, once it has some."""

    def found() -> list[int]:
        clients: list[int] = site.node.get(f"/v1/leases/{lease}").json["clients"]
        return clients

    return wait_until(found, what="the client to be attributed")


def test_a_step_asks_for_less(site: Site) -> None:
    """Each step has what it asked Slurm for, with memory in proportion; all of them are of the job's lease."""
    show = 'echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT $MPSD_LEASE"'
    script = f"{show}; srun -n1 --gres=mps:10 bash -c '{show}'; srun -n2 --overlap bash -c '{show}'"
    job = site.cluster.submit("ann", script, "--gres=mps:40", "-n2")
    site.cluster.wait_for_state(job, "COMPLETED")
    lines = [each.split() for each in site.cluster.output(job).splitlines()]
    memory = int(lines[0][1].removeprefix("0=").removesuffix("M"))
    assert [each[0] for each in lines] == ["40.0", "10", "40.0", "40.0"], site.cluster.output(job)
    assert [each[1] for each in lines] == [f"0={part}M" for part in (memory, memory // 4, memory, memory)]
    assert len({each[2] for each in lines}) == 1
    site.wait_until_clean()


@pytest.mark.parametrize("deaf", [False, True], ids=["obedient", "deaf"])
def test_scancel(site: Site, deaf: bool) -> None:  # noqa: FBT001 - a parameter
    """A job that is cancelled ends with its lease, whether it obeys SIGTERM or not."""
    with site.driven() as driven:
        job = site.cluster.submit("ann", driven.script, "--gres=mps:50")
        driven.answer()
        if deaf:
            driven.do("ignore TERM")
        (lease,) = site.leases(job)
        site.cluster.run("ann", "scancel", str(job))
        site.cluster.wait_for_state(job, "CANCELLED")
    site.wait_until_clean()
    assert site.node.get(f"/v1/leases/{lease['id']}").json["state"] == "ended"
    assert site.cluster.node_state() in {"idle", "mix"}


def test_a_refusal_fails_the_job_alone(site: Site) -> None:
    """What mpsd does not grant fails the job with mpsd's own sentence in its output, and the node stays as it is."""
    configuration = site.cluster.place / "hooks" / "slurm.toml"
    text = configuration.read_text()
    configuration.write_text(f"{text}wait = 1.0\n")
    whole = site.node.lease(fraction=1, threads=None, memory=None, gpu="0")
    other = site.node.lease(fraction=1, threads=None, memory=None, gpu="1")
    job = site.cluster.submit("ann", "echo it ran", "--gres=mps:25", "--time=5")
    site.cluster.wait_for_state(job, "FAILED", deadline=45)
    said = site.cluster.output(job)
    assert "mpsd: " in said
    assert "it ran" not in said
    for each in (whole, other):
        site.node.request("DELETE", f"/v1/leases/{each['id']}")
    configuration.write_text(text)
    site.cluster.wait_until_idle()
    site.wait_until_clean()


def test_epilog_without_prolog(site: Site) -> None:
    """An Epilog for a job that no Prolog knows, and a repeated one, change nothing and succeed."""
    hook = str(site.cluster.place / "hooks" / "epilog")
    variables = ("env", "SLURM_JOB_ID=4711", "SLURM_JOB_UID=3001", "SLURM_JOB_GID=3001")
    for _ in range(2):
        done = site.cluster.root_run(*variables, hook)
        assert (done.stdout, done.stderr) == ("", "")
    # slurmd runs Epilog alone for an allocation without a step, unless PrologFlags has Alloc.
    done = site.cluster.run("ann", "salloc", "--gres=mps:25", "true")
    site.wait_until_clean()
    site.cluster.wait_until_idle()


def test_a_repeated_prolog(site: Site) -> None:
    """A Prolog that runs again has the same lease; that of another job with the same id ends the lease of the first."""
    hook = str(site.cluster.place / "hooks" / "prolog")
    variables = ["env", "SLURM_JOB_ID=4712", "SLURM_JOB_UID=3001", "SLURM_JOB_GID=3001", "SLURM_JOB_GPUS=1"]
    variables += ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", "SLURM_JOB_USER=ann", "SLURMD_NODENAME=slurmnode"]
    granted = []
    for _ in range(2):
        assert site.cluster.root_run(*variables, "SLURM_JOB_START_TIME=1", hook).stderr == ""
        granted += site.leases(4712)
    first, again = granted
    assert first["id"] == again["id"]
    assert first["holders"][0]["kind"] == "claim"
    assert first["gpus"] == [site.node.get("/v1/gpus").json["gpus"][1]["uuid"]]
    site.cluster.root_run(*variables, "SLURM_JOB_START_TIME=2", hook)
    (second,) = site.leases(4712)
    assert second["id"] != first["id"]
    # The Epilog of the first comes late, and ends nothing.
    epilog = str(site.cluster.place / "hooks" / "epilog")
    site.cluster.root_run(*variables, "SLURM_JOB_START_TIME=1", epilog)
    assert [each["id"] for each in site.leases(4712)] == [second["id"]]
    site.cluster.root_run(*variables, "SLURM_JOB_START_TIME=2", epilog)
    site.wait_until_clean()


def test_another_user_cannot_take_a_lease(site: Site) -> None:
    """What Prolog leaves for a job's tasks is for its user alone."""
    with site.driven() as driven:
        job = site.cluster.submit("ann", driven.script, "--gres=mps:25")
        driven.answer()
        task = site.state_dir / "jobs" / str(job) / "task"
        assert site.cluster.run("bert", "cat", str(task), check=False).returncode != 0
        assert site.cluster.run("bert", "ls", str(task.parent.parent), check=False).returncode != 0
        assert site.cluster.run("ann", "cat", str(task), check=False).returncode == 0
        driven.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def test_no_lease_without_a_share(site: Site) -> None:
    """Slurm would not count a lease that a user takes out beside it, and a job with that share would fail."""
    packages = next(each for each in sys.path if each.endswith("site-packages"))
    program = f"PYTHONPATH={ROOT}:{packages} {Path(sys.executable).resolve()} -m mpsd.cli.main"
    job = site.cluster.submit("ann", f"{program} --socket {site.node.socket} admit --fraction 0.9 2>&1; echo status $?")
    site.cluster.wait_for_state(job, "COMPLETED")
    said = site.cluster.output(job)
    assert "this needs the role user, and your role is observer [not_permitted]" in said
    assert "status 77" in said
    assert not site.node.leases()


def test_a_suspended_job_keeps_its_lease(site: Site) -> None:
    """A suspended job keeps its memory on the GPU, so it keeps its share; it goes on where it was."""
    with site.driven() as driven:
        job = site.cluster.submit("ann", driven.script, "--gres=mps:50")
        driven.answer()
        assert driven.do(f"alloc {GIB}")["ok"]
        site.cluster.root_run("scontrol", "suspend", str(job))
        site.cluster.wait_for_state(job, "SUSPENDED")
        (lease,) = site.leases(job)
        gpu = next(each for each in site.node.get("/v1/gpus").json["gpus"] if each["uuid"] == lease["gpus"][0])
        assert gpu["threads_granted"] == 50
        site.cluster.root_run("scontrol", "resume", str(job))
        assert driven.do("sync")["ok"]
        driven.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def hurried(site: Site, job: int) -> bool:
    """Bring the start of a requeued job forward, and tell whether it has started.

    Slurm waits two minutes by itself, and sets that time when the job is requeued and again at the end of its Epilog.
    Then it starts at the next look of the scheduler, which is up to `sched_interval` later, 60 seconds by default. On
    22.05 a job that starts within a second of its end has no Prolog, and is refused by TaskProlog.
    """
    found = site.cluster.job(job)
    with contextlib.suppress(ValueError, KeyError):
        if datetime.fromisoformat(found["EligibleTime"]) - datetime.now() > timedelta(seconds=10):  # noqa: DTZ005
            site.cluster.root_run("scontrol", "update", f"jobid={job}", "StartTime=now+3seconds", check=False)
    return found.get("JobState") == "RUNNING"


def test_a_requeued_job_has_another_lease(site: Site) -> None:
    """Its lease ends with the run, and the next run has another."""
    with site.driven() as driven:
        job = site.cluster.submit("ann", driven.script, "--gres=mps:50", "--requeue")
        driven.answer()
        (first,) = site.leases(job)
        site.cluster.root_run("scontrol", "requeue", str(job))
        site.wait_until_clean()
        try:
            wait_until(lambda: hurried(site, job), what="the job to start again", deadline=40)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{site.cluster.job(job)}\n{site.cluster.node_state()}") from None
        assert driven.answer()["active_thread_percentage"] == 50
        (second,) = site.leases(job)
        assert second["id"] != first["id"]
        assert (_group(second) != _group(first)) == (VERSION == 2)  # each run has a SLUID of its own
        driven.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def test_an_id_that_slurmctld_gives_again(place: Path, fork_server: ForkServer) -> None:
    """slurmctld is killed before it has stored a job: the next one has its id, on 22.05 its identity, and no more.

    slurmd kills the first when it registers, and knows that its Prolog has run for about a second: where the next one
    starts within it, it has no Prolog.
    """
    with running_site(place, fork_server) as started, started.driven() as driven:
        job = started.cluster.submit("ann", driven.script, "--gres=mps:50")
        driven.answer()
        (lost,) = started.leases(job)
        started.cluster.kill("slurmctld")
        stored = started.cluster.place / "spool" / "ctld"
        remove_tree(stored)
        stored.mkdir()
        started.cluster.start_slurmctld()
        show = 'echo "has $MPSD_LEASE $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"'
        again = wait_until(
            lambda: started.cluster.submit("ann", show, "--gres=mps:20"),
            what="slurmctld to take a job", not_yet=(AssertionError,), deadline=30,
        )  # fmt: skip
        assert again == job
        state = started.cluster.wait_for_state(job, "COMPLETED", "FAILED", deadline=60)
        said = started.cluster.output(job)
        if state == "FAILED":
            # Slurm may end it before it begins: then it has printed nothing.
            assert not said or "its Prolog has not run here" in said, (said, started.story())
            assert "has lease-" not in said
        else:
            assert re.search(r"has lease-\w+ 20", said), said
            assert lost["id"] not in said
        assert started.node.get(f"/v1/leases/{lost['id']}").json["state"] == "ended"
        started.wait_until_clean()


@pytest.mark.parametrize("share", ["mps", "shard"])
def test_a_job_whose_prolog_has_not_run(place: Path, fork_server: ForkServer, share: str) -> None:
    """TaskProlog refuses what would be a share without a limit; a job with a whole GPU runs."""
    without = {"share": share, "settings": {"comment": True}, "more": lambda _: "Prolog=/bin/true\n"}
    with running_site(place, fork_server, **without) as started:
        job = started.cluster.submit("ann", "echo it ran", f"--gres={share}:1")
        started.cluster.wait_for_state(job, "FAILED")
        said = started.cluster.output(job)
        assert "its Prolog has not run here" in said
        assert "it ran" not in said
        job = started.cluster.submit("ann", "echo it ran", "--gres=gpu:1")
        started.cluster.wait_for_state(job, "COMPLETED")
        started.cluster.wait_until_idle()


def test_a_job_without_a_gpu_is_left_alone(site: Site) -> None:
    """A job without a GPU, and one with a whole GPU, have no lease, and run as without mpsd."""
    for options in ((), ("--gres=gpu:1",)):
        job = site.cluster.submit("ann", 'echo "lease: $MPSD_LEASE"', *options)
        site.cluster.wait_for_state(job, "COMPLETED")
        assert site.cluster.output(job) == "lease: \n"
    site.wait_until_clean()
