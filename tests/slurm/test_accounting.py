"""What a job was granted and held is in its AdminComment: where slurmdbd keeps it, of each job, and to its end."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.slurm import database
from tests.slurm.site import Site, sites, start_service, stop_service
from tests.slurm.site import site as running_site

_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "slurmdbd", "mariadbd")

pytestmark = [pytest.mark.launchers(*_PROGRAMS), pytest.mark.root("run slurmd")]

MIB = 2**20

FIRST = "--nodelist=slurmnode"


@pytest.fixture(scope="module")
def both(private_root: Path, fork_server: ForkServer) -> Iterator[list[Site]]:
    options = {"nodes": 2, "settings": {"look": 1.0}, "slurmdbd": True}
    with sites(private_root / "db", fork_server, **options) as started:  # type: ignore[arg-type]
        for each in started:
            start_service(each)
        yield started


@pytest.fixture
def site(both: list[Site]) -> Site:
    """Return the node of slurmctld."""
    return both[0]


@pytest.fixture
def own_site(place: Path, fork_server: ForkServer) -> Iterator[Site]:
    """Start a site whose daemons the test may end."""
    with running_site(place, fork_server, settings={"look": 1.0}, slurmdbd=True) as started:
        start_service(started)
        yield started


def recorded(site: Site, job: int) -> dict[str, str]:
    """Return the AdminComments that slurmdbd has of a job, or of the elements of an array, by the id in sacct."""
    said = site.cluster.root_run("sacct", "-n", "-P", "-X", f"--jobs={job}", "--format=JobID,AdminComment").stdout
    return dict(each.split("|", 1) for each in said.splitlines())


def wait_for(site: Site, what: str, condition: Callable[[], object]) -> None:
    try:
        wait_until(condition, what=what, deadline=30)
    except AssertionError as error:
        service = (site.cluster.place / "log" / "service.out").read_text()
        said = site.cluster.root_run(
            "sacct", "-n", "-P", "-X", "--format=JobID,State,Start,End,AdminComment", check=False
        )
        due = (site.state_dir / "accounts").read_text()
        raise AssertionError(f"{error}\n{due}\n{service}\n{said.stdout}\n{site.story()}") from None


def lowered(comments: dict[str, str]) -> dict[str, str]:
    """Return them in small letters: sacctmgr of 22.05 has no others."""
    return {key: text.lower() for key, text in comments.items()}


def totals(site: Site) -> dict[str, Any]:
    """Return what `mpsctl usage --by lease` has, by lease."""
    usage = json.loads(site.node.mpsctl("usage", "--by", "lease", "-o", "json").stdout)
    return {each["key"]: each["total"] for each in usage["history"]}


def held(site: Site, lease: str) -> int:
    clients = site.node.get("/v1/clients").json["clients"]
    return sum(each["memory_held"] or 0 for each in clients if each["lease"] == lease)


def test_a_job_that_held_most_at_its_end(site: Site) -> None:
    """slurmdbd has the most by any reading of mpsd's, beside what others wrote, and so has mpsd's own usage."""
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, FIRST, "--gres=mps:25", "--hold")
        site.cluster.root_run("scontrol", "update", f"jobid={job}", "admincomment=checked by hand")
        site.cluster.root_run("scontrol", "release", str(job))
        granted = client.answer()["pinned_device_mem_limit"] // MIB
        (lease,) = site.leases(job)
        assert client.do(f"alloc {512 * MIB}")["ok"]
        wait_until(lambda: held(site, lease["id"]) >= 512 * MIB, what="mpsd to read what the job holds")
        client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    most = totals(site)[lease["id"]]["memory_held_most"]
    assert most >= 512 * MIB
    own = f"mpsd(slurmnode): gpus=1 threads=25 memory={granted}M held={most // MIB}M"
    expected = lowered({f"{job}": f"checked by hand; {own}"})
    wait_for(site, "the account", lambda: lowered(recorded(site, job)) == expected)
    site.wait_until_clean()


def test_short_jobs(site: Site) -> None:
    """Each element of an array has its own account, however short it was; the last one has the id of the array."""
    job = site.cluster.submit("ann", "true", FIRST, "--gres=mps:20", "--array=0-2")
    site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()
    wait_until(lambda: len(recorded(site, job)) == 3, what="slurmdbd to know the array")

    def words() -> list[dict[str, str]]:
        return [dict(part.partition("=")[::2] for part in each.split()) for each in recorded(site, job).values()]

    wait_until(lambda: all("held" in each for each in words()), what="accounts of all elements", deadline=30)
    assert {(each["gpus"], each["threads"]) for each in words()} == {("1", "20")}


def test_elements_of_an_array_that_run_together(site: Site) -> None:
    """What is written while the last one runs, whose id is that of the array, is in no other one's account."""
    with site.driven() as first, site.driven() as last:
        scripts = " ".join(f"{each}) {client.script};;" for each, client in enumerate((first, last)))
        job = site.cluster.submit(
            "ann", f'case "$SLURM_ARRAY_TASK_ID" in {scripts} esac', "--gres=mps:20", "--array=0-1"
        )
        for client in (first, last):
            client.answer()
        assert last.do(f"alloc {300 * MIB}")["ok"]
        (lease,) = site.leases(job)
        wait_until(lambda: "held=3" in comment(site, f"{job}_1"), what="the account of the last one", deadline=30)
        assert "held=3" not in comment(site, f"{job}_0")
        for client in (first, last):
            client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    site.wait_until_clean()
    most = totals(site)[lease["id"]]["memory_held_most"] // MIB
    wait_until(lambda: f"held={most}m" in lowered(recorded(site, job))[f"{job}_1"], what="its record", deadline=30)
    assert f"held={most}m" not in lowered(recorded(site, job))[f"{job}_0"]


def comment(site: Site, name: str) -> str:
    return site.cluster.root_run("squeue", "-h", f"--jobs={name}", "--Format=admin_comment:300").stdout.strip()


def test_two_services_write_one_comment(both: list[Site]) -> None:
    """A job on two nodes has the part of each, also where one has written what it had read before the other wrote."""
    site = both[0]
    job = site.cluster.submit("ann", "true", "-N2", "--gres=mps:20", "--array=0-2")
    parts = [f"mpsd({each.machine.name}): gpus=1 threads=20" for each in both]

    def complete() -> bool:
        texts = recorded(site, job).values()
        return len(texts) == 3 and all(text.count(part) == 1 for text in texts for part in parts)

    wait_for(site, "both parts of each account", complete)
    for each in both:
        each.wait_until_clean()


def test_what_others_wrote_stays(site: Site) -> None:
    """sacctmgr of 22.05 would change their capital letters: then the account that slurmctld had at the end stays."""
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, FIRST, "--gres=mps:25", "--hold")
        site.cluster.root_run("scontrol", "update", f"jobid={job}", "admincomment=JS1:H4sI")
        site.cluster.root_run("scontrol", "release", str(job))
        client.answer()
        wait_until(lambda: "mpsd(" in comment(site, f"{job}"), what="the first account")
        before = comment(site, f"{job}")
        (lease,) = site.leases(job)
        assert client.do(f"alloc {512 * MIB}")["ok"]
        wait_until(lambda: held(site, lease["id"]) >= 512 * MIB, what="mpsd to read what the job holds")
        client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    log = site.cluster.place / "log" / "service.out"
    wait_until(lambda: f"job {job}: slurmdbd keeps" in log.read_text(), what="the service to say so", deadline=30)
    assert before.startswith("JS1:H4sI; mpsd(slurmnode): gpus=1")
    site.wait_until_clean()
    (text,) = recorded(site, job).values()
    assert text.startswith("JS1:H4sI; mpsd(slurmnode): gpus=1 threads=25 memory=20352M held=")


def test_without_slurmdbd_and_without_the_service(own_site: Site) -> None:
    """The last account is written when slurmdbd is back, by another service; slurmctld's own report comes first."""
    site = own_site
    with site.driven() as client:
        job = site.cluster.submit("ann", client.script, "--gres=mps:25")
        client.answer()
        wait_until(lambda: "mpsd(" in comment(site, f"{job}"), what="the first account")
        (lease,) = site.leases(job)
        site.cluster.kill("slurmdbd")
        assert client.do(f"alloc {700 * MIB}")["ok"]
        wait_until(lambda: held(site, lease["id"]) >= 700 * MIB, what="mpsd to read what the job holds")
        client.tell("exit")
        site.cluster.wait_for_state(job, "COMPLETED")
    due = site.state_dir / "accounts"
    wait_until(lambda: str(job) in json.loads(due.read_text())["due"], what="the account to be due", not_yet=(OSError,))
    stop_service(site)
    database.start_slurmdbd(site.cluster)
    start_service(site)
    wait_for(site, "nothing to be due", lambda: not json.loads(due.read_text())["due"])
    site.wait_until_clean()
    most = totals(site)[lease["id"]]["memory_held_most"] // MIB
    assert most >= 700
    (text,) = recorded(site, job).values()
    assert text.lower().endswith(f"held={most}m"), text
