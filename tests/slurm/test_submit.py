"""mpsd.lua in a real slurmctld: what can never run is refused with a message, and no user can forge a request."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.slurm import lines
from mpsd.core.slurm.lines import Device
from tests.slurm.cluster import Cluster
from tests.slurm.test_lua import FORGED, SCRIPT

pytestmark = [pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"), pytest.mark.root("run slurmd")]

GIB = 2**30


@pytest.fixture(scope="module")
def cluster(slurm: dict[str, Any], places: Iterator[Path]) -> Iterator[Cluster]:
    """Start a cluster whose nodes have GPUs of 40 GiB."""
    place = next(places)
    place.mkdir()
    found = Cluster(place, more_gres={"gpumem": 80 * GIB}, configuration="JobSubmitPlugins=lua\n", **slurm)
    try:
        found.write()
        etc = place / "etc" / "slurm"
        shutil.copy(SCRIPT, etc / "mpsd.lua")
        script = lines.of_script("/etc/slurm", [Device("/dev/nvidia0", 40 * GIB)] * 2)
        (etc / "job_submit.lua").write_text(script, encoding="utf-8")
        yield found.start()
    finally:
        found.close()


def held(cluster: Cluster, *options: str) -> int:
    """Submit a job that does not start."""
    return cluster.submit("ann", "true", "--hold", *options)


def comment(cluster: Cluster, job: int) -> str:
    return cluster.root_run("squeue", "-h", f"--jobs={job}", "--Format=comment:300").stdout.strip()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("--gres=mps:101", "mps:101 is more than a GPU has (mps:100), and can never run"),
        ("--gres=gpumem:8G", "gpumem:8G is the memory of a share"),
        ("--gres=mps:10,gpumem:41G", "gpumem:41G is more than a GPU has (gpumem:40G)"),
    ],
)
def test_what_can_never_run_is_refused(cluster: Cluster, request_: str, said: str) -> None:
    done = cluster.run("ann", "sbatch", request_, "--wrap=true", check=False)
    assert done.returncode != 0
    assert f"error: mpsd: {said}" in done.stderr


def test_a_share_is_filled_and_kept(cluster: Cluster) -> None:
    """Memory that was not asked for is scheduled in proportion, and the user is told."""
    done = cluster.run("ann", "sbatch", "--parsable", "--hold", "--gres=mps:25", "--comment=mine", "--wrap=true")
    assert "mps:25 gets 25 % of the GPU's memory in proportion, 10240 MiB" in done.stderr
    job = int(done.stdout.split()[-1])
    assert cluster.job(job)["TresPerNode"].replace("/", ":") == "gres:mps:25,gres:gpumem:10240M"
    assert comment(cluster, job) == "mpsd:threads=25 mine"


def test_no_user_can_forge_a_request(cluster: Cluster) -> None:
    """Not at submission, and not by a change, whatever is written."""
    plain = held(cluster)
    share = held(cluster, "--gres=mps:10,gpumem:1G")
    for forged in (each for each in FORGED if "\n" not in each):
        assert "mpsd:" not in comment(cluster, held(cluster, f"--comment={forged}")).lower()
        for job, own in ((plain, ""), (share, f"mpsd:threads=10,memory={GIB}")):
            cluster.run("ann", "scontrol", "update", f"jobid={job}", f"comment={forged}")
            found = comment(cluster, job)
            assert found.startswith(own)
            assert found.lower().count("mpsd:") == (1 if own else 0)
    cluster.run("ann", "scontrol", "update", f"jobid={share}", "comment=")
    assert comment(cluster, share) == f"mpsd:threads=10,memory={GIB}"
    assert cluster.run("ann", "scontrol", "update", f"jobid={share}", "admincomment=x", check=False).returncode != 0


@pytest.mark.parametrize("more", ["nice=-5", "features=none", "comment=mine"])
def test_no_user_can_change_a_request(cluster: Cluster, more: str) -> None:
    """Not by an update that Slurm refuses in part: it has taken the comment of the script by then."""
    share, plain = held(cluster, "--gres=mps:10,gpumem:1G"), held(cluster, "--gres=gpu:1")
    for job, own in ((share, f"mpsd:threads=10,memory={GIB}"), (plain, "")):
        gres = cluster.job(job)["TresPerNode"]
        done = cluster.run("ann", "scontrol", "update", f"jobid={job}", "gres=mps:60,gpumem:30G", more, check=False)
        assert done.returncode != 0
        assert comment(cluster, job) == (own or "(null)")
        assert cluster.job(job)["TresPerNode"] == gres
    done = cluster.run("ann", "scontrol", "update", f"jobid={share}", "gres=", check=False)
    assert done.returncode != 0
    if cluster.root is not None:  # 22.05 shows no message about a change
        assert "mpsd: a job keeps the share of a GPU that it was submitted with" in done.stderr


def test_an_exclusive_job_is_refused(cluster: Cluster) -> None:
    done = cluster.run("ann", "sbatch", "--exclusive", "--gres=mps:10", "--wrap=true", check=False)
    assert done.returncode != 0
    assert "mps:10 can never run" in done.stderr


def test_every_component_and_element_is_judged(cluster: Cluster) -> None:
    """Of a heterogeneous job, and of an array."""
    done = cluster.run("ann", "sbatch", "--gres=mps:10", ":", "--gres=mps:101", "--wrap=true", check=False)
    assert done.returncode != 0
    assert "mps:101 is more than" in done.stderr
    array = held(cluster, "--array=1-2", "--gres=mps:10,gpumem:1G")
    said = cluster.root_run("squeue", "-h", f"--jobs={array}", "--array", "--Format=comment:300").stdout.split()
    assert said == [f"mpsd:threads=10,memory={GIB}"] * 2
