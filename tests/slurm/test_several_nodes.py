"""Jobs on two nodes, each with its own mpsd: arrays of them, heterogeneous jobs, and one node without its mpsd."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driven import Driven
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.slurm import building
from tests.slurm.site import ROOT, Site, sites, start_service

pytestmark = [
    pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
    pytest.mark.root("run slurmd"),
    pytest.mark.parametrize("slurm", building.OLDEST_AND_NEWEST, indirect=True),
]

SETTINGS = {"look": 1.0, "wait": 2.0}

SHOW = 'echo "$SLURMD_NODENAME $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"'


@pytest.fixture(scope="module")
def both(slurm: dict[str, Any], places: Iterator[Path], fork_server: ForkServer) -> Iterator[list[Site]]:
    """Start both nodes; of the newest Slurm, where nothing but its SLUID tells a task's component from another."""
    options = {**slurm, "control_groups": "root" not in slurm}
    with sites(next(places), fork_server, nodes=2, settings=SETTINGS, **options) as started:
        for each in started:
            start_service(each)
        yield started


class Ranks:
    """The tasks of a step on both nodes, each a client of its node's GPUs."""

    def __init__(self, first: Site, *options: str) -> None:
        directory = first.directory()
        self._all = [Driven(directory, f".{number}") for number in range(2)]
        client = first.client(f'<"{directory}/in.$SLURM_PROCID" >"{directory}/out.$SLURM_PROCID"')
        self.script = shlex.join(["srun", *options, "bash", "-c", client])

    def __enter__(self) -> list[Driven]:
        return self._all

    def __exit__(self, *_: object) -> None:
        for each in self._all:
            each.close()


def clients(site: Site, lease: str) -> list[int]:
    found: list[int] = site.node.get(f"/v1/leases/{lease}").json["clients"]
    return found


def wait_for_comment(site: Site, job: str, *wanted: str) -> None:
    """Wait until the AdminComment of a job has these parts; of an array's element `12_3`, or a component `12+0`."""

    def comment() -> str:
        said = site.cluster.root_run("squeue", "-h", "--Format=jobarrayid:20,admin_comment:400").stdout
        return {line[:20].strip(): line[20:].strip() for line in said.splitlines()}.get(job, "")

    def reached() -> bool:
        return sorted(each.partition(" memory")[0] for each in comment().split("; ")) == sorted(wanted)

    try:
        wait_until(reached, what=f"the AdminComment of {job} to have {wanted}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{comment()}\n{site.story()}") from None


def test_a_job_on_two_nodes(both: list[Site]) -> None:
    """Each task is within the lease of its node."""
    first = both[0]
    ranks = Ranks(first)
    with ranks as driven:
        job = first.cluster.submit("ann", ranks.script, "-N2", "--ntasks-per-node=1", "--gres=mps:50")
        answers = [each.answer() for each in driven]
        leases = []
        for site, answer in zip(both, answers, strict=True):
            assert (answer["mps"], answer["active_thread_percentage"]) == (True, 50)
            (lease,) = site.leases(job)
            leases.append(lease["id"])
            assert answer["pinned_device_mem_limit"] == lease["pinned_device_mem_limit"]
            pid = answer["pid"]
            wait_until(lambda site=site, lease=lease, pid=pid: clients(site, lease["id"]) == [pid], what="its client")  # type: ignore[misc]
        assert leases[0] != leases[1]
        for each in driven:
            each.tell("exit")
        first.cluster.wait_for_state(job, "COMPLETED")
    for site in both:
        site.wait_until_clean()


def test_each_node_has_its_part_of_a_comment(both: list[Site]) -> None:
    """Whoever wrote last."""
    first = both[0]
    job = first.cluster.submit("ann", "srun sleep 60", "-N2", "--gres=mps:10")
    parts = [f"mpsd({each.machine.name}): gpus=1 threads=10" for each in both]
    wait_for_comment(first, str(job), *parts)
    # As another service leaves it that had read before the first one wrote, and writes after it.
    lost = f"by hand; {parts[1]} memory=1M held=0M"
    first.cluster.root_run("scontrol", "update", f"jobid={job}", f"admincomment={lost}")
    wait_for_comment(first, str(job), "by hand", *parts)
    first.cluster.root_run("scancel", str(job))
    for site in both:
        site.wait_until_clean()


def test_each_element_of_an_array_has_its_own_comment(both: list[Site]) -> None:
    """The last one, too, whose id is that of the whole array."""
    first, second = both
    array = first.cluster.submit("ann", "sleep 60", "--array=1-2", "--gres=mps:10", "--nodelist=slurmnode2", "--hold")
    first.cluster.root_run("scontrol", "update", f"jobid={array}_1", "admincomment=by hand")
    first.cluster.root_run("scontrol", "release", str(array))
    part = "mpsd(slurmnode2): gpus=1 threads=10"
    wait_for_comment(first, f"{array}_1", "by hand", part)
    wait_for_comment(first, f"{array}_2", part)
    first.cluster.root_run("scancel", str(array))
    second.wait_until_clean()


def test_a_heterogeneous_job(both: list[Site]) -> None:
    """Each component is a job with its lease, on its node, where the tasks of one step of all have it."""
    first = both[0]
    ranks = Ranks(first, "--het-group=0,1")
    with ranks as driven:
        job = first.cluster.submit("ann", ranks.script, "--gres=mps:25", "-N1", ":", "--gres=mps:50", "-N1")
        answers = [each.answer() for each in driven]
        assert [each["active_thread_percentage"] for each in answers] == [25, 50]
        for number, answer in enumerate(answers):
            at = next(each for each in both if each.leases(job + number))
            assert not [each for each in both if each is not at and each.leases(job + number)]
            (lease,) = at.leases(job + number)
            pid = answer["pid"]
            wait_until(lambda at=at, lease=lease, pid=pid: clients(at, lease["id"]) == [pid], what="its client")  # type: ignore[misc]
            part = f"mpsd({at.machine.name}): gpus=1 threads={(25, 50)[number]}"
            wait_for_comment(first, f"{job}+{number}", part)
        first.cluster.run("ann", "scancel", str(job))
        for number in range(2):
            first.cluster.wait_for_state(f"{job}+{number}", "CANCELLED")
    for site in both:
        site.wait_until_clean()
    refused = first.cluster.run(
        "ann", "sbatch", "--nodelist=slurmnode", ":", "--nodelist=slurmnode", "--wrap=true", check=False
    )
    assert refused.returncode != 0, "two components of a job are on one node"


@pytest.mark.parametrize(
    "command",
    [
        ["salloc", "--gres=mps:10", ":", "--gres=mps:30", "srun", "--het-group=0,1", "bash", "-c", SHOW],
        ["srun", "--gres=mps:10", "bash", "-c", SHOW, ":", "--gres=mps:30", "bash", "-c", SHOW],
    ],
    ids=["salloc", "srun"],
)
def test_heterogeneous_jobs_at_a_terminal(both: list[Site], command: list[str]) -> None:
    done = both[0].cluster.run("ann", *command)
    nodes, shares = zip(*(each.split() for each in done.stdout.splitlines()), strict=True)
    assert sorted(nodes) == ["slurmnode", "slurmnode2"]
    assert sorted(map(float, shares)) == [10, 30]
    for site in both:
        site.wait_until_clean()


def wait_for_drained(site: Site, *wanted: str) -> None:
    """Wait until these nodes are drained, and no others; slurmctld may long show an idle node as mixed."""

    def drained() -> list[str]:
        names = [each.name for each in site.cluster.machines]
        return [each for each in names if site.cluster.node_state(each).startswith("dr")]

    wait_until(lambda: drained() == [*wanted], what=f"the nodes {wanted} to be drained, and no others")


def test_a_hold_drains_its_node_alone(both: list[Site]) -> None:
    first, second = both
    second.node.mpsctl("hold", "gpu0", "--reason", "memory is replaced")
    wait_for_drained(first, "slurmnode2")
    job = first.cluster.submit("ann", SHOW, "--gres=mps:10")
    first.cluster.wait_for_state(job, "COMPLETED")
    assert first.cluster.output(job).split() == ["slurmnode", "10.0"]
    second.node.mpsctl("resume", "gpu0")
    wait_for_drained(first)


def test_a_node_without_mpsd(place: Path, fork_server: ForkServer, slurm: dict[str, Any]) -> None:
    """Of a job on two nodes, the task there fails with the sentence, and so does srun; the other has its lease."""
    with sites(place, fork_server, nodes=2, settings=SETTINGS, **slurm) as (first, second):
        second.node.end()
        ranks = Ranks(first)
        with ranks as (there, _):
            job = first.cluster.submit("ann", ranks.script, "-N2", "--ntasks-per-node=1", "--gres=mps:10")
            assert there.answer()["active_thread_percentage"] == 10
            assert len(first.leases(job)) == 1
            there.tell("exit")
            first.cluster.wait_for_state(job, "FAILED")
        assert "mpsd: there is no socket" in first.cluster.output(job)
        first.wait_until_clean()
        second.node.start()
        job = first.cluster.submit("ann", SHOW, "--gres=mps:10", "--nodelist=slurmnode2")
        first.cluster.wait_for_state(job, "COMPLETED")
        second.wait_until_clean()
        wait_for_drained(first)


def test_nodes_without_configuration_files(place: Path, fork_server: ForkServer, slurm: dict[str, Any]) -> None:
    """Where slurmd has them from slurmctld, hooks and check find gres.conf and what it includes."""
    options: dict[str, Any] = {
        "nodes": 2,
        "configless": True,
        "reversed_devices": True,
        "flags": "all_sharing",
        "settings": SETTINGS,
    }
    with sites(place, fork_server, more=lambda _: "KillWait=3\n", **options, **slurm) as (first, second):
        job = first.cluster.submit("ann", SHOW, "--nodelist=slurmnode2", "--gres=mps:10")
        first.cluster.wait_for_state(job, "COMPLETED")
        (granted,) = second.node.events("lease_granted")
        assert granted["gpus"] == [second.node.get("/v1/gpus").json["gpus"][1]["uuid"]]
        second.wait_until_clean()
        packages = next(each for each in sys.path if each.endswith("site-packages"))
        python = ["env", f"PYTHONPATH={ROOT}:{packages}", str(Path(sys.executable).resolve())]
        mpsctl = [*python, "-m", "mpsd.cli.main", "--socket", str(second.node.socket), "slurm"]
        checked = second.machine.root_run(*mpsctl, "check", check=False)
        assert "gres.conf" not in checked.stdout, checked.stdout
        assert "KillWait=3 is shorter" in checked.stdout, checked.stderr
        installed = second.machine.root_run(*mpsctl, "install").stdout
        assert "# /etc/slurm/mpsd-slurm.conf" in installed
        assert "/run/slurm" not in installed
