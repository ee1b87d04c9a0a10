"""Jobs of several users that Slurm puts on a GPU which serves one user at a time."""

import pytest

from tests.slurm import building
from tests.slurm.site import ROLES, Start

pytestmark = [
    pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
    pytest.mark.root("run slurmd"),
    pytest.mark.parametrize("slurm", building.OLDEST_AND_NEWEST, indirect=True),
]

ONE_USER = f'{ROLES}[daemon]\nusers = "one"\n'


def test_the_second_waits_and_runs(start: Start) -> None:
    """It waits in Prolog, and has the GPU once the first has ended."""
    with (
        start(config=ONE_USER, gpus=1, settings={"wait": 30}) as started,
        started.driven() as first,
        started.driven() as second,
    ):
        jobs = [started.cluster.submit("ann", first.script, "--gres=mps:30")]
        first.answer()
        jobs.append(started.cluster.submit("bert", second.script, "--gres=mps:30"))
        started.cluster.wait_for_state(jobs[1], "RUNNING")
        assert not [each for each in started.leases(jobs[1]) if each["state"] != "waiting"]
        first.tell("exit")
        assert second.answer()["active_thread_percentage"] == 30
        second.tell("exit")
        for each in jobs:
            started.cluster.wait_for_state(each, "COMPLETED")
        started.wait_until_clean()


@pytest.mark.parametrize("settings", [{"several_users": "fail", "wait": 300}, {"wait": 1}], ids=["fail", "wait"])
def test_the_second_fails_with_the_reason(start: Start, settings: dict[str, object]) -> None:
    """At once, or when it has waited long enough; another job of the first user shares the GPU meanwhile."""
    with (
        start(config=ONE_USER, gpus=1, settings=settings) as started,
        started.driven() as first,
        started.driven() as other,
    ):
        job = started.cluster.submit("ann", first.script, "--gres=mps:30")
        first.answer()
        refused = started.cluster.submit("bert", "echo it ran", "--gres=mps:30")
        started.cluster.wait_for_state(refused, "FAILED")
        said = started.cluster.output(refused)
        assert "mpsd: " in said
        assert "user" in said
        assert "it ran" not in said
        assert started.cluster.node_state() in {"mix", "idle"}
        beside = started.cluster.submit("ann", other.script, "--gres=mps:30")
        assert other.answer()["active_thread_percentage"] == 30
        for each in (first, other):
            each.tell("exit")
        for each_job in (job, beside):
            started.cluster.wait_for_state(each_job, "COMPLETED")
        started.wait_until_clean()
