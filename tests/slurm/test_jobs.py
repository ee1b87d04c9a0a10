"""Jobs with shares of GPUs: each has a lease, whatever it says about itself, and no more than that."""

import os

import pytest

from tests.harness import wait_until
from tests.slurm.site import Site

pytestmark = [pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"), pytest.mark.root("run slurmd")]

GIB = 2**30


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
        for job, share in zip(jobs, (60, 40), strict=True):
            (lease,) = site.leases(job)
            assert lease["active_thread_percentage"] == share
            assert lease["holders"][0]["cgroup"].endswith(f"/job_{job}")
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
