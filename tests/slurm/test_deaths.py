"""Fifty jobs, an array of a hundred, and the daemons killed meanwhile: no lease is left, and none is given twice."""

import signal
import threading
from itertools import cycle
from typing import Final

import pytest

from tests.harness import wait_until
from tests.slurm import building
from tests.slurm.site import Site, Start, start_service
from tests.slurm.test_jobs import hurried

pytestmark = [
    pytest.mark.launchers("slurmctld", "slurmd", "srun", "munged"),
    pytest.mark.root("run slurmd"),
    pytest.mark.timeout(240),
]

_JOBS: Final = 50

_OVER: Final = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}

_SLURM_S_OWN: Final = "Duplicate jobid"

_SAY: Final = 'echo "has $MPSD_LEASE"; sleep 0.3'


def test_deaths_among_fifty_jobs(start: Start) -> None:
    """slurmd, slurmctld and mpsd are killed in turn: each job runs with its lease, or fails and says why."""
    with start(flags="all_sharing", settings={"wait": 20.0, "look": 1.0}) as started:
        start_service(started)
        jobs: dict[int, str] = {}
        deaths = cycle((_kill_slurmd, _kill_slurmctld, _kill_mpsd))
        for number in range(_JOBS):
            user = ("ann", "bert", "cleo")[number % 3]
            # 22.05 gives the id of a job that it lost to another user's, who may not write to the first one's file.
            output = f"--output={started.cluster.place}/out/%j.{user}"
            jobs[_submitted(started, user, output, f"--gres=mps:{(10, 25, 40)[number % 3]}")] = user
            if number % 8 == 7:
                next(deaths)(started)
        states = {job: _end(started, job) for job in jobs}
        failed = []
        for job, state in states.items():
            said = started.cluster.output(f"{job}.{jobs[job]}")
            if state == "COMPLETED":
                assert "has lease-" in said, (job, said, started.story())
            elif state:
                failed.append((job, state))
                # A task that began had its lease: then it was Slurm that ended the job. A slurmctld that is killed
                # loses its newest jobs, which never began. What Slurm itself ends, slurmstepd says between asterisks.
                began, told = "has lease-" in said, "mpsd: " in said or " error: *** " in said
                found = started.cluster.job(job)
                assert began or told or state in {"CANCELLED", "NODE_FAIL"}, (found, said, started.story())
        assert len(failed) < _JOBS / 2, failed
        started.wait_until_clean(60)
        _resume(started)
        started.cluster.wait_until_idle(60)


def _submitted(started: Site, user: str, *options: str) -> int:
    """Submit a job; slurmctld may be restarting."""
    return wait_until(
        lambda: started.cluster.submit(user, _SAY, "--no-requeue", *options),
        what="slurmctld to take a job", not_yet=(AssertionError,), deadline=30,
    )  # fmt: skip


def _end(started: Site, job: int) -> str:
    """Return the last state of a job; empty where slurmctld was killed before it had stored it."""
    last = ""

    def is_over() -> bool:
        nonlocal last
        _resume(started)
        done = started.cluster.root_run("scontrol", "-o", "show", "job", str(job), check=False)
        found = dict(each.partition("=")[::2] for each in done.stdout.split() if "=" in each)
        last = found.get("JobState", "")
        if found.get("Reason") == "BeginTime":  # slurmd died when it was told to launch it: Slurm tries again
            hurried(started, job)
        return last in _OVER or "Invalid job id" in done.stderr

    try:
        try:
            wait_until(is_over, what=f"job {job} to be over", deadline=30)
        except AssertionError:
            # Its launch died with a slurmd, which 22.05 finds when another one tells what jobs it has.
            _kill_slurmd(started)
            wait_until(is_over, what=f"job {job} to be over", deadline=60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{started.cluster.job(job)}\n{started.story()}") from None
    return last


def _resume(started: Site) -> None:
    """Resume a node that Slurm has drained for its own sake: its slurmd died while it was told to launch a job."""
    reason = started.cluster.root_run("sinfo", "-h", "-o", "%E", check=False).stdout.strip()
    if reason == _SLURM_S_OWN:
        started.cluster.root_run("scontrol", "update", "nodename=slurmnode", "state=resume", check=False)
    else:
        assert reason in {"none", ""} or "Unexpected" in reason or "Not responding" in reason, reason


def _kill_slurmd(started: Site) -> None:
    started.cluster.kill("slurmd")
    started.cluster.start_slurmd()


def _kill_slurmctld(started: Site) -> None:
    started.cluster.kill("slurmctld")
    started.cluster.start_slurmctld()


def _kill_mpsd(started: Site) -> None:
    started.node.end(signal.SIGKILL)
    started.node.start()


class _Watch(threading.Thread):
    """Reads again and again how much of each GPU is granted."""

    def __init__(self, started: Site) -> None:
        super().__init__()
        self._site = started
        self.over = threading.Event()
        self.most: dict[str, float] = {}
        self.looks = 0

    def run(self) -> None:
        while not self.over.wait(0.02):
            for gpu in self._site.node.get("/v1/gpus").json["gpus"]:
                self.most[gpu["uuid"]] = max(self.most.get(gpu["uuid"], 0), gpu["threads_granted"])
                assert gpu["memory_granted"] <= gpu["memory_total"] - gpu["memory_reserved"]
            self.looks += 1


@pytest.mark.parametrize("slurm", building.OLDEST_AND_NEWEST, indirect=True)
def test_an_array_on_two_gpus(start: Start) -> None:
    """A hundred jobs of an array run on two GPUs, at no moment with more than there is."""
    with start(flags="all_sharing") as started:
        watch = _Watch(started)
        watch.start()
        try:
            array = started.cluster.submit("ann", _SAY, "--gres=mps:25", "--array=1-100")
            wait_until(
                lambda: not started.cluster.root_run("squeue", "-h").stdout.strip(),
                what="the array to be over", deadline=200,
            )  # fmt: skip
        finally:
            watch.over.set()
            watch.join()
        outputs = [path.read_text() for path in (started.cluster.place / "out").iterdir() if path.name.isdecimal()]
        assert len(outputs) == 100, array
        assert all("has lease-" in each for each in outputs), [each for each in outputs if "has lease-" not in each]
        assert len({each.split()[1] for each in outputs}) == 100
        # Of each GPU, and of memory, no event says otherwise either: mpsd's own accounts of what was granted.
        granted = [each for each in started.node.events("lease_granted") if each["uid"] == 3001]
        assert len({each["lease"] for each in granted}) == 100
        assert len(watch.most) == 2
        assert max(watch.most.values()) <= 100
        assert _most_at_once(started) <= 100
        started.wait_until_clean()


def _most_at_once(started: Site) -> float:
    """Return the most that was granted of one GPU at any moment, by mpsd's events."""
    now: dict[str, float] = {}
    of: dict[str, tuple[str, float]] = {}
    most = 0.0
    for each in started.node.log():
        if each["event"] == "lease_granted":
            of[each["lease"]] = (each["gpus"][0], each["active_thread_percentage"])
            gpu, threads = of[each["lease"]]
            now[gpu] = now.get(gpu, 0.0) + threads
            most = max(most, now[gpu])
        elif each["event"] == "lease_ended" and each["lease"] in of:
            gpu, threads = of.pop(each["lease"])
            now[gpu] -= threads
    assert of == {}
    return most
