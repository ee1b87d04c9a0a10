"""Jobs by the environment of Slurm's hooks, and what they have of GPUs."""

import pytest

from mpsd.core.errors import ConfigurationError, InvalidRequestError
from mpsd.core.slurm import gres, job, settings
from mpsd.core.slurm.job import Request

GIB = 2**30
PROLOG = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "3001", "SLURM_JOB_GID": "3001", "SLURM_JOB_USER": "ann"}
MPS = {**PROLOG, "SLURM_JOB_GPUS": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}


@pytest.mark.parametrize(
    ("more", "identity"),
    [
        ({}, "7.u3001"),
        ({"SLURM_JOB_RESTART_COUNT": "1"}, "7.u3001"),
        ({"SLURM_JOB_START_TIME": "1795"}, "7.1795"),
        ({"SLURM_JOB_START_TIME": "1795", "SLURM_JOB_SLUID": "sEKNKTV3WPV500"}, "sEKNKTV3WPV500"),
        ({"SLURM_JOB_SLUID": "../up"}, "7.u3001"),
    ],
)
def test_identity(more: dict[str, str], identity: str) -> None:
    found = job.of({**MPS, **more})
    assert found.identity == identity
    assert found.groups == (("job_7", identity) if identity.startswith("s") else ("job_7",))


def test_whose_an_identity_is() -> None:
    """Where hooks know the id and user alone, each identity with them may be the job's."""
    uncertain, certain = job.of(MPS), job.of({**MPS, "SLURM_JOB_START_TIME": "1795"})
    for identity, is_its in (("7.u3001.5f", True), ("7.u30010.5f", False), ("17.u3001.5f", False), ("7.1795", False)):
        assert job.is_of(identity, uncertain) == is_its, identity
    assert job.is_of("7.1795", certain)
    assert not job.is_of("7.1795.5f", certain)
    assert not job.is_of("7.1796", certain)


@pytest.mark.parametrize(
    ("environment", "believes_comment", "has"),
    [
        ({"SLURM_JOB_GPUS": "0"}, True, False),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}, True, False),
        ({"SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}, False, True),
        ({"SLURM_JOB_GPUS": "0", "SLURM_SHARDS_ON_NODE": "1"}, True, True),
        ({"SLURM_JOB_GPUS": "0", "SLURM_SHARDS_ON_NODE": "1"}, False, False),
    ],
)
def test_tasks_with_a_share(environment: dict[str, str], *, believes_comment: bool, has: bool) -> None:
    assert job.has_share(environment, believes_comment=believes_comment) == has


@pytest.mark.parametrize("lacking", [*PROLOG][:2])
def test_no_job(lacking: str) -> None:
    with pytest.raises(InvalidRequestError):
        job.of({name: value for name, value in PROLOG.items() if name != lacking})


@pytest.mark.parametrize(
    ("environment", "comment", "found"),
    [
        (PROLOG, "", None),
        ({**PROLOG, "SLURM_JOB_GPUS": "0,1"}, "", None),
        (MPS, "", Request(25, None)),
        (MPS, "mpsd:threads=90,memory=1073741824", Request(25, GIB)),
        (MPS, "a mpsd:threads=90,memory=1073741824", Request(25, None)),
        (MPS, "mpsd:threads=25 its own text", Request(25, None)),
        ({**PROLOG, "SLURM_JOB_GPUS": "0"}, "mpsd:threads=12.5,memory=1073741824 x", Request(12.5, GIB)),
        ({**PROLOG, "SLURM_JOB_GPUS": "0,1"}, "mpsd:threads=150,memory=1073741824", Request(75, GIB // 2)),
    ],
)
def test_requests(environment: dict[str, str], comment: str, found: Request | None) -> None:
    """slurmd's percentage comes first; the comment's part of ours is at its beginning."""
    named = job.of({**environment, "SLURM_JOB_COMMENT": comment})
    assert job.requested(named, believes_comment=True) == found


def test_a_comment_that_is_not_believed() -> None:
    """Where no plugin writes the comment, users do."""
    forged = {**PROLOG, "SLURM_JOB_GPUS": "0", "SLURM_JOB_COMMENT": "mpsd:threads=100,memory=1073741824"}
    assert job.requested(job.of(forged), believes_comment=False) is None
    assert job.requested(job.of({**MPS, **forged}), believes_comment=False) == Request(25, None)


def test_gpus_that_slurm_has_forgotten() -> None:
    forgotten = {name: value for name, value in MPS.items() if name != "SLURM_JOB_GPUS"}
    with pytest.raises(InvalidRequestError, match="does not say of which") as caught:
        job.requested(job.of(forgotten), believes_comment=False)
    assert "slurmctld" in caught.value.hint


@pytest.mark.parametrize(
    ("request_", "memory"),
    [
        (Request(25, None), 19 * GIB),
        (Request(25, 20 * GIB), 19 * GIB),  # in proportion, of the whole
        (Request(25, 8 * GIB), 8 * GIB),
        (Request(25, 40 * GIB), 40 * GIB),  # more than in proportion: as asked
        (Request(100, 80 * GIB), 76 * GIB),
        (Request(100, 90 * GIB), 76 * GIB),
        (Request(0.1, 100), 2**20),
    ],
)
def test_memory(request_: Request, memory: int) -> None:
    """Slurm counts 80 GiB, of which mpsd grants 76."""
    assert job.memory_of(request_, 80 * GIB, 76 * GIB) == memory


def test_client_places() -> None:
    assert [job.processes_of(Request(threads, None), 48) for threads in (1, 25, 100)] == [1, 12, 48]
    assert job.processes_of(Request(25, None), None) is None


def test_the_job_of_a_task() -> None:
    """The control group tells before the environment does."""
    groups = ["/user.slice", "/slurm/uid_3001/job_8/step_0/task_0"]
    assert job.job_in(groups, PROLOG) == "8"
    sluid = "sEKNKTV3WPV500"
    assert job.job_in([f"/system.slice/slurmstepd.scope/{sluid}/step_0/user/task_0"], PROLOG) == sluid
    assert job.job_in([], {**PROLOG, "SLURM_JOB_SLUID": sluid}) == sluid
    assert job.job_in([], PROLOG) == "7"
    assert job.job_in([], {"SLURM_JOB_ID": "7/../8"}) == ""


def test_a_step_that_asks_for_less() -> None:
    lease = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40.0", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8000M", "X": "1"}
    less = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}
    assert job.lowered(lease, less) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2000M",
        "X": "1",
    }
    for more in ("100", "40", "0", "-1", "nan", "x", ""):
        assert job.lowered(lease, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": more}) == lease


def test_the_lines_of_a_task() -> None:
    assert job.lines({"A": "1"}, ["B"]) == "unset B\nexport A=1\n"
    with pytest.raises(InvalidRequestError):
        job.lines({"A": "1\nexport LD_PRELOAD=x"}, [])


GRES = """\
NodeName=other Name=gpu File=/dev/nvidia[4-5]
NodeName=node[1-2],login Name=gpu Type=a100 File=/dev/nvidia[2-3] # two
Name=gpu File=/dev/nvidia0
Name=mps Count=100 File=/dev/nvidia7
"""


def test_the_order_of_gpus() -> None:
    """Slurm's places are those of gres.conf for the node."""
    assert gres.minors(GRES, "node2") == [2, 3, 0]
    assert gres.minors(GRES, "other") == [4, 5, 0]
    assert gres.minors("AutoDetect=nvml\n", "node2") == []
    by_minor = {0: "GPU-a", 2: "GPU-b", 3: "GPU-c"}
    assert [gres.uuid_at(place, [2, 3, 0], by_minor) for place in range(3)] == ["GPU-b", "GPU-c", "GPU-a"]
    assert gres.uuid_at(1, [], by_minor) == "GPU-b"
    for place, order in ((3, [2, 3, 0]), (3, []), (0, [9])):
        with pytest.raises(InvalidRequestError):
            gres.uuid_at(place, order, by_minor)


def test_minor_numbers() -> None:
    """The driver says which GPU has which device file."""
    text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 100\nGPU UUID: \t {}\nDevice Minor: \t {}\n"
    found = gres.uuids_by_minor([text.format("GPU-a", 1), text.format("GPU-b", 0), "Device Minor: 3\n"])
    assert found == {1: "GPU-a", 0: "GPU-b"}


@pytest.mark.parametrize(
    "text",
    ['wait = "x"', "wait = 0", "weight = 1", 'without_mpsd = "perhaps"', 'state_dir = "run"', "comment = 1", "="],
)
def test_wrong_settings(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"slurm\.toml"):
        settings.parse(text)


def test_settings() -> None:
    assert settings.parse("") == settings.Settings()
    found = settings.parse('comment = true\nwait = 3\nstate_dir = "/run/x"')
    assert (found.comment, found.wait, found.state_dir) == (True, 3.0, "/run/x")
    # What is not written as in JSON is TOML all the same.
    assert settings.parse("# ours\n\nstate_dir = '/run/x' # there\nwait = 3\ncomment = true\n") == found
    with pytest.raises(ConfigurationError, match="overwrite"):
        settings.parse("wait = 3\nwait = 4")
