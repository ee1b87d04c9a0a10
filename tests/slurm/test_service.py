"""The service beside slurmd: the node follows mpsd, jobs are accounted for, and no lease stays behind."""

import json
from collections.abc import Iterator

import pytest

from mpsd.slurm.node import PREFIX
from tests.harness import wait_until
from tests.slurm import building
from tests.slurm.site import Site, Start, hook_program, start_service, stop_service

pytestmark = [
    pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
    pytest.mark.root("run slurmd"),
    pytest.mark.parametrize("slurm", building.OLDEST_AND_NEWEST, indirect=True),
]

MIB = 2**20

SETTINGS = {"look": 1.0}


@pytest.fixture(scope="module")
def site(start: Start) -> Iterator[Site]:
    with start(settings=SETTINGS) as started:
        start_service(started)
        yield started


@pytest.fixture
def own_site(start: Start) -> Iterator[Site]:
    """Start a site whose daemons the test may end."""
    with start(settings=SETTINGS) as started:
        yield started


def reason(site: Site) -> str:
    return site.cluster.root_run("sinfo", "-h", "-o", "%E").stdout.strip()


def wait_for_node(site: Site, state: str) -> None:
    try:
        wait_until(lambda: site.cluster.node_state() == state, what=f"the node to be {state}", deadline=30)
    except AssertionError as error:
        raise AssertionError(f"{error}: {site.cluster.node_state()}, {reason(site)}\n{site.story()}") from None


def update_node(site: Site, *words: str) -> None:
    site.cluster.root_run("scontrol", "update", "nodename=slurmnode", *words)


def test_a_hold_drains_the_node_and_a_resume_resumes_it(site: Site) -> None:
    for _ in range(2):
        site.node.mpsctl("hold", "gpu1", "--reason", "memory is replaced")
        wait_for_node(site, "drain")
        assert reason(site).startswith(PREFIX)
        assert "memory is replaced" in reason(site)
        site.node.mpsctl("resume", "gpu1")
        wait_for_node(site, "idle")


def test_what_others_do_to_the_node_stays(site: Site) -> None:
    """An administrator's drain is not lifted, and a node that one resumes is not drained again for the same reason."""
    update_node(site, "state=drain", "reason=new disk")
    site.node.mpsctl("hold", "gpu0", "--reason", "one")
    looked(site)
    assert reason(site) == "new disk"
    site.node.mpsctl("resume", "gpu0")
    looked(site)
    assert (site.cluster.node_state(), reason(site)) == ("drain", "new disk")
    update_node(site, "state=resume")
    site.node.mpsctl("hold", "gpu0", "--reason", "two")
    wait_for_node(site, "drain")
    update_node(site, "state=resume")
    looked(site)
    assert site.cluster.node_state() == "idle"
    site.node.mpsctl("hold", "gpu1", "--reason", "three")
    wait_for_node(site, "drain")
    for each in ("gpu0", "gpu1"):
        site.node.mpsctl("resume", each)
    wait_for_node(site, "idle")


def looked(site: Site) -> None:
    """Wait until the service has looked at Slurm several times: it notes there by which reason it goes."""
    path = site.state_dir / "node"
    seen = {path.stat().st_mtime_ns if path.exists() else 0}

    def times() -> int:
        seen.add(path.stat().st_mtime_ns)
        return len(seen)

    wait_until(lambda: times() > 2, what="the service to look", not_yet=(OSError,))


def test_the_health_check_does_the_same_once(own_site: Site) -> None:
    """And a service that starts afterwards respects what an administrator has done since."""
    site = own_site
    assert site.cluster.root_run(*hook_program(site, "health")).returncode == 0
    site.node.mpsctl("hold", "gpu0", "--reason", "by hand")
    assert site.cluster.root_run(*hook_program(site, "health"), check=False).returncode == 1
    assert "by hand" in reason(site)
    site.node.mpsctl("resume", "gpu0")
    assert site.cluster.root_run(*hook_program(site, "health")).returncode == 0
    wait_for_node(site, "idle")
    site.node.mpsctl("hold", "gpu0", "--reason", "again")
    assert site.cluster.root_run(*hook_program(site, "health"), check=False).returncode == 1
    update_node(site, "state=resume")
    start_service(site)
    looked(site)
    assert site.cluster.node_state() == "idle"
    stop_service(site)


def admin_comment(site: Site, job: int) -> str:
    return site.cluster.root_run("squeue", "-h", f"--jobs={job}", "--Format=admin_comment:300").stdout.strip()


def test_a_job_is_accounted_for(site: Site) -> None:
    """AdminComment has what was granted and held, beside what others wrote; usage has it by the job's label."""
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, "--gres=mps:25", "--hold")
        site.cluster.root_run("scontrol", "update", f"jobid={job}", "admincomment=checked by hand")
        site.cluster.root_run("scontrol", "release", str(job))
        granted = client.answer()["pinned_device_mem_limit"] // MIB
        assert client.do(f"alloc {512 * MIB}")["ok"]

        def held() -> int:
            words = dict(each.partition("=")[::2] for each in admin_comment(site, job).split())
            return int(words.get("held", "unknown").rstrip("M").replace("unknown", "0"))

        wait_until(lambda: held() >= 512, what="the memory of the job in its AdminComment", deadline=30)
        found = admin_comment(site, job)
        assert found.startswith(f"checked by hand; mpsd(slurmnode): gpus=1 threads=25 memory={granted}M held=")
        client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()
    usage = json.loads(site.node.mpsctl("usage", "--by", "label:slurm/job", "-o", "json").stdout)
    assert str(job) in {each["key"] for each in usage["history"]}


def test_the_lease_of_an_unknown_job_ends(site: Site) -> None:
    """Where neither Epilog nor the end of its control group ended it."""
    lease = site.node.lease(
        threads=10, memory="1GiB", labels={"slurm/job": "4711"}, owner={"uid": 3001, "gid": 3001},
        holder={"claim": {"deadline": 600}},
    )  # fmt: skip
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, "--gres=mps:25")
        client.answer()
        wait_until(lambda: lease["id"] not in {each["id"] for each in site.leases()}, what="the lease to end")
        assert site.leases(job), "the lease of a running job has ended"
        client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()


def test_without_slurmctld_it_waits(own_site: Site) -> None:
    """No lease ends because Slurm does not answer, and the service goes on afterwards."""
    site = own_site
    start_service(site)
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, "--gres=mps:25")
        client.answer()
        site.cluster.kill("slurmctld")
        log = site.cluster.place / "log" / "service.out"
        wait_until(lambda: "failed" in log.read_text(), what="the service to miss slurmctld", deadline=40)
        assert site.leases(job)
        site.cluster.start_slurmctld()
        site.node.mpsctl("hold", "gpu1", "--reason", "after it")
        wait_until(lambda: "after it" in reason(site), what="the node to follow", deadline=40)
        site.node.mpsctl("resume", "gpu1")
        client.tell("exit")
    site.wait_until_clean()
