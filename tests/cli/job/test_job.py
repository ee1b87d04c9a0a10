"""`mpsctl job`: around a launcher and around each rank, its refusals, and that nothing stays."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from mpsd.simulator.client import program
from tests import real
from tests.cli.job.conftest import LATE, LAUNCHERS, Job
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.tools import lacking


def test_around_the_launcher(job: Job) -> None:
    """All processes of the command are clients of one private control daemon; its exit status is the command's."""
    command = ("sh", "-c", 'python3 -c "" & "$@"; exit 7', "sh", *program())
    rank = job.start("--simulate", "1", command=command)
    assert rank.answer(LATE)["mps"] is True
    (place,) = job.places
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    rank.end()
    assert rank.process.wait(LATE) == 7
    assert job.is_gone()
    assert "MPS serves the command on GPU 0" in job.said


@pytest.mark.parametrize(
    "launcher", [each if each == "Slurm" else pytest.param(each, marks=pytest.mark.thorough) for each in LAUNCHERS]
)
def test_around_each_rank(job: Job, launcher: str) -> None:
    """The ranks share one mpsd, are spread over its GPUs, and the last one waits until nothing is left."""
    ranks = job.ranks(4, "--simulate", "2", launcher=launcher)
    answers = [each.answer(LATE) for each in ranks]
    assert all(each["mps"] for each in answers)
    assert [*Counter(each["gpu"] for each in answers).values()] == [2, 2]
    assert len(job.places) == 1
    for each in ranks:
        assert each.end() == 0
    assert job.is_gone()
    assert "ranks 0 to 1 on GPU 0, ranks 2 to 3 on GPU 1" in job.said


@pytest.mark.thorough
@pytest.mark.real_daemon(555)
def test_real_control_daemon(job: Job) -> None:
    """NVIDIA's own control daemon runs as the job's user, answers to its command, and ends with the job."""
    control = real.real_daemons()[555]
    script = 'echo get_default_active_thread_percentage | "$0"; exit 4'
    command = ("sh", "-c", script, f"{control}")
    rank = job.start("--simulate", "1", "--control", f"{control}", command=command)
    assert rank.process.stdout is not None
    assert rank.process.stdout.read() == b"100.0\n"
    assert rank.process.wait(LATE) == 4
    assert job.is_gone()


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["of a launcher", "of an unknown launcher"])
def test_both(job: Job, processes: Sequence[str]) -> None:
    """Below `mpsctl job`, each rank joins its job, with its options; a call below a rank is of that rank."""
    said = 'for rank in 0 1; do OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=2 "$@" & done; wait'
    script = 'for rank in 0 1; do "$@" & done; wait' if processes else said
    told = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" >&2'
    inner = ("mpsctl", "job", *processes, "--", "mpsctl", "job", "--", "sh", "-c", told)
    tools = job.directory / "bin"
    tools.mkdir()
    mpsctl = tools / "mpsctl"
    mpsctl.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m mpsd.cli.main "$@"\n')
    mpsctl.chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    outer = job.start("--simulate", "2", "--threads", "30", command=("sh", "-c", script, "sh", *inner), variables=path)
    assert outer.process.wait(LATE) == 0, job.said
    assert len({line for line in job.said.splitlines() if line.endswith(" 30.0")}) == 2, job.said
    assert job.is_gone()


@pytest.mark.thorough
def test_equal_parts(job: Job) -> None:
    ranks = job.ranks(2, "--simulate", "1", "--share", "even")
    assert [each.answer(LATE)["active_thread_percentage"] for each in ranks] == [50, 50]
    for each in ranks:
        each.end()


@pytest.mark.thorough
def test_memory(job: Job) -> None:
    ranks = job.ranks(2, "--simulate", "1", "--memory", "3GiB", "--threads", "20")
    for each in ranks:
        answer = each.answer(LATE)
        assert (answer["active_thread_percentage"], answer["pinned_device_mem_limit"]) == (20, 3 << 30)
    for each in ranks:
        each.end()


@pytest.mark.thorough
def test_mpsd_of_the_node(job: Job, make_node: Callable[..., Node]) -> None:
    """Where an mpsd answers, the job has a lease from it, which ends with the job, and starts none."""
    node = make_node(control=None).start()
    job.variables["MPSD_SOCKET"] = f"{node.socket}"
    job.variables["MPSD_SIMULATED_GPUS"] = f"{node.root / 'run' / 'simulated'}"
    ranks = job.ranks(2)
    assert {each.answer(LATE)["mps"] for each in ranks} == {True}
    (place,) = job.places
    assert not (place / "mpsd").exists()
    assert [len(each["holders"]) for each in node.leases()] == [1, 1]
    for each in ranks:
        each.end()
    assert not job.places
    assert node.leases() == []


@pytest.mark.thorough
def test_lease_of_the_environment(job: Job, make_node: Callable[..., Node]) -> None:
    """Under a lease, its ranks start together, and the lease stays."""
    node = make_node(control=None).start()
    lease = node.lease(fraction=0.5, threads=None, memory=None, processes=2)
    job.variables.update(lease["env"], MPSD_SOCKET=f"{node.socket}")
    job.variables["MPSD_SIMULATED_GPUS"] = f"{node.root / 'run' / 'simulated'}"
    ranks = job.ranks(2)
    assert [each.answer(LATE)["active_thread_percentage"] for each in ranks] == [25, 25]
    for each in ranks:
        each.end()
    assert [each["id"] for each in node.leases()] == [lease["id"]]


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["--simulate", "4"], {}, "the job may see 4 GPUs, and a program under MPS uses one of them"),
        (["--simulate", "2"], {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names '7'"),
        (["--simulate", "1", "--share", "even"], {}, "the number of ranks is not known"),
        (["--control", "/no/control"], {}, "'/no/control'"),
        ([], {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, "Slurm does not say how many ranks are on this node"),
    ],
)
def test_refusals(job: Job, arguments: list[str], variables: dict[str, str], sentence: str) -> None:
    rank = job.start(*arguments, command=("sh", "-c", "echo '{}'"), variables=variables)
    assert rank.process.wait(LATE) != 0
    assert sentence in job.said
    assert rank.process.stdout is not None
    assert rank.process.stdout.read(1) == b"", "the command did run"
    assert job.is_gone()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--threads", "200"], "--threads: 200 % of the threads is more than 100 %"),
        (["--threads", "0"], "--threads: 0 % of the threads is less than 0.1 %"),
        (["--threads", "many"], "--threads: 'many' is not a percentage"),
        (["--memory", "8G"], "--memory: '8G' has the ambiguous unit G"),
        (["--memory", "512"], "--memory: 512 is a number of bytes, and less than 1 MiB"),
        (["--memory", "4PiB"], "--memory: '4PiB' has the unknown unit"),
        (["--memory", "1024TiB"], "--memory: pinned device memory limit of 1073741824 MiB is not between"),
        (["--processes", "0"], "--processes: 0 is not in the range"),
        (["--gpus", "nope"], "--gpus 'nope' names no GPU"),
        (["--gpus", "3", "--simulate", "2"], "--gpus '3' is not from 1 to 2"),
        (["--gpus", "0,7", "--simulate", "2"], "--gpus names '7', and the job may see no such GPU"),
    ],
)
def test_refusals_before_the_start(job: Job, arguments: list[str], sentence: str) -> None:
    """What can never be granted is refused with the way out, before anything is made."""
    made = job.directory.stat().st_mtime_ns
    assert job.start(*arguments, command=("true",)).process.wait(LATE) == 2
    assert sentence in job.said
    assert "[invalid_request]\n  hint: " in job.said
    assert job.directory.stat().st_mtime_ns == made


def test_refusals_after_the_start(job: Job) -> None:
    """What only the keeper or mpsd can see has its own code and status, in all ranks."""
    ranks = job.ranks(2, "--simulate", "1", "--memory", "1TiB")
    assert [each.process.wait(LATE) for each in ranks] == [2, 2]
    assert job.said.count("2 ranks on a GPU with 1024GiB each are more than") == 2
    seen = job.start("--simulate", "2", command=("true",), variables={"CUDA_VISIBLE_DEVICES": "7"})
    assert seen.process.wait(LATE) == 2
    assert "CUDA_VISIBLE_DEVICES names '7', and the job may see no such GPU [invalid_request]" in job.said
    assert job.is_gone()


def test_command_is_not_found(job: Job) -> None:
    assert job.start("--simulate", "1", command=("no-such-program",)).process.wait(LATE) == 127


@pytest.mark.thorough
@pytest.mark.root("mount a file system")
def test_full_directory(job: Job) -> None:
    """The sentence says what is missing, though nothing can be written to the log."""
    full = job.directory / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", full], check=False).returncode:
        lacking("mounting is not allowed here")
    try:
        with (full / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert job.start("--simulate", "1", variables={"TMPDIR": f"{full}"}).process.wait(LATE) == 1
        assert f"there is no space left in {full}" in job.said
        wait_until(lambda: not job.processes(), what="the keeper to end")
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.thorough
def test_directory_of_another(job: Job) -> None:
    """A link with the name of the job's directory is not followed."""
    first = job.ranks(2, "--simulate", "1")
    for each in first:
        each.answer(LATE)
    (place,) = job.places
    for each in first:
        each.end()
    aim = job.directory / "elsewhere"
    aim.mkdir(mode=0o700)
    place.symlink_to(aim)
    for each in job.ranks(2, "--simulate", "1"):
        assert each.process.wait(LATE) == 78
    assert "is not a directory that belongs to" in job.said, job.said
    assert not [*aim.iterdir()]


def test_rank_that_misses_mps(job: Job) -> None:
    """All ranks are ended, with one sentence, also where a wrapper drops the environment of one."""
    bare = ("env", "CUDA_MPS_PIPE_DIRECTORY=/nobody", *program())
    name = {"PMIX_NAMESPACE": "misses", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    ranks = [
        job.start(
            "--simulate", "1", "--within", "20s",
            command=bare if rank == 1 else program(),
            variables={**name, "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}"},
        )
        for rank in range(3)
    ]  # fmt: skip
    assert [each.process.wait(LATE) for each in ranks] == [1, 1, 1]  # one may end before it has begun to answer
    assert job.said.count("rank 1 misses MPS") == 3
    wait_until(job.is_gone, what="the job to leave nothing")


@pytest.mark.thorough
def test_rank_that_does_not_come(job: Job) -> None:
    slurm = LAUNCHERS["Slurm"]
    ranks = [job.start("--simulate", "1", "--within", "5s", variables=slurm("j", rank, 3)) for rank in (0, 2)]
    assert [each.process.wait(LATE) for each in ranks] == [1, 1]
    assert job.said.count("of 3 ranks 1 did not come within 5 s (--within): 1") == 2


@pytest.mark.thorough
def test_rank_that_differs(job: Job) -> None:
    """None starts where one of them sees other GPUs."""
    slurm = LAUNCHERS["Slurm"]
    first = job.start("--simulate", "2", "--gpus", "1", variables={**slurm("j", 0, 2), "CUDA_VISIBLE_DEVICES": "0"})
    wait_until(lambda: job.processes("mpsd job"), what="the private mpsd to start")
    odd = job.start("--simulate", "2", "--gpus", "1", variables={**slurm("j", 1, 2), "CUDA_VISIBLE_DEVICES": "1"})
    assert [each.process.wait(LATE) for each in (first, odd)] == [1, 1]
    assert job.said.count("the ranks of the job differ in CUDA_VISIBLE_DEVICES") == 2
    assert "--gpu-bind=none" in job.said
    wait_until(job.is_gone, what="the job to leave nothing", deadline=LATE)


@pytest.mark.thorough
def test_rank_that_dies_early(job: Job) -> None:
    """None starts where one ended before all were ready."""
    first = job.start("--simulate", "1", variables=LAUNCHERS["Slurm"]("j", 0, 3))
    wait_until(lambda: job.processes("mpsd job"), what="the private mpsd to start, once this rank has come")
    second = job.start("--simulate", "1", variables=LAUNCHERS["Slurm"]("j", 1, 3))
    first.kill()
    assert second.process.wait(LATE) == 1
    assert "ended before all 3 ranks were ready" in job.said
    assert job.start("--simulate", "1", variables=LAUNCHERS["Slurm"]("j", 2, 3)).process.wait(LATE) == 1
    assert job.said.count("ended before all 3 ranks were ready") == 2
    wait_until(job.is_gone, what="the job to leave nothing")


@pytest.mark.thorough
def test_signals(job: Job) -> None:
    """A signal for mpsctl is the program's."""
    command = ("sh", "-c", "trap 'exit 5' USR1; echo '{}'; while :; do sleep 0.1; done")
    rank = job.start("--simulate", "1", command=command)
    rank.answer(LATE)
    rank.process.send_signal(signal.SIGUSR1)
    assert rank.process.wait(LATE) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["rank", "program", "keeper", "mpsd", "control", "all"])
def test_kills(job: Job, victim: str) -> None:
    """Whatever is killed, no process and no directory of the job stays."""
    ranks = job.ranks(2, "--simulate", "1")
    inside = [each.answer(LATE) for each in ranks]
    words = {"keeper": "keeper", "mpsd": "mpsd job", "control": " -f"}
    targets = {"rank": [ranks[0].pid], "program": [inside[0]["pid"]]}.get(victim)
    if victim == "all":
        targets = [each.pid for each in ranks] + [each["pid"] for each in inside] + job.processes()
    elif targets is None:
        targets = job.processes(words[victim])
        assert targets
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):  # it ended with another one
            os.kill(pid, signal.SIGKILL)
    if victim in {"rank", "program", "control"}:  # what a launcher does with the others is its own
        for each in ranks:
            each.process.send_signal(signal.SIGTERM)
    for each in ranks:
        each.process.wait(LATE)
    wait_until(lambda: not job.processes(), what="the processes of the job to end", deadline=LATE)
    wait_until(lambda: all(look_at(each["pid"]) is None for each in inside), what="its programs to end", deadline=LATE)
    if victim == "all":  # the directory stays until the next job
        assert len(job.places) == 1
        again = job.start("--simulate", "1", command=("true",))
        assert again.process.wait(LATE) == 0
    wait_until(lambda: not job.places, what="its directory to be removed", deadline=LATE)
    if victim == "mpsd":
        assert job.said.count("the job's own mpsd ended unexpectedly") == 2
