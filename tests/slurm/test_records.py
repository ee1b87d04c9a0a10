"""What Prolog leaves behind, without Slurm: ids that are given again, repeats, kills, a full disk, and broken records.

The variables are those of 22.05, which tells hooks neither SLUID nor start time.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.slurm import job as jobs
from mpsd.slurm import node as judge
from mpsd.slurm.accounting import Accounting
from mpsd.slurm.records import Record, Records
from mpsd.slurm.slurm_programs import SlurmPrograms
from tests.fork_server import ForkServer
from tests.harness import remove_tree, wait_until
from tests.node import Node, running

pytestmark = [pytest.mark.root("give files to users"), pytest.mark.thorough]

_ROOT: Final = Path(__file__).parents[2]

JOB: Final = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0", "SLURM_JOB_GPUS": "0",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
}  # fmt: skip
MORE: Final = {**JOB, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}
EPILOG: Final = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "0"}
"""Those of the Epilog of a job that slurmctld has aborted."""

_KILLED: Final = """
import os, signal, sys
left, folder = int(sys.argv.pop(1)), sys.argv.pop(1)
def hook(event, arguments):
    global left
    if event in {"socket.connect", "os.mkdir", "os.rename", "os.symlink"} or (
        event == "open" and str(arguments[0]).startswith(folder)
    ):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from mpsd.slurm.__main__ import main
"""


@pytest.fixture
def node(private_root: Path, fork_server: ForkServer) -> Iterator[Node]:
    root = private_root / "records"
    root.mkdir(mode=0o711)
    yield from running(root=root, fork_server=fork_server)
    remove_tree(root)


def _command(node: Node, name: str, variables: Mapping[str, str], *, socket: str = "") -> dict[str, Any]:
    """Return the arguments of a hook's start; its `socket` is mpsd's, unless one is named where nothing listens."""
    configuration = node.root / f"slurm{len(socket)}.toml"
    configuration.write_text(f'socket = "{socket or node.socket}"\nstate_dir = "{_state(node)}"\nwait = 1\ngrace = 5\n')
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT), "MPSD_SLURM_CONFIG": str(configuration)}
    return {"args": [sys.executable, "-m", "mpsd.slurm", name], "env": {**environment, **variables}}


def _hook(node: Node, name: str, variables: Mapping[str, str], **options: Any) -> "subprocess.CompletedProcess[str]":
    started = _command(node, name, variables, socket=options.pop("socket", ""))
    return subprocess.run(**started, **options, capture_output=True, text=True, check=False, timeout=30)


def _no_room() -> None:
    """Let every writing to a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _state(node: Node) -> Path:
    return node.root / "state"


def _left(node: Node) -> list[str]:
    jobs_there = _state(node) / "jobs"
    return sorted(each.name for each in jobs_there.iterdir()) if jobs_there.exists() else []


def _prolog(node: Node, variables: Mapping[str, str]) -> Any:
    """Run Prolog, and return the one lease of the job."""
    assert _hook(node, "prolog", variables).stderr == ""
    (lease,) = node.leases()
    return lease


@contextlib.contextmanager
def _task(node: Node) -> Iterator[str]:
    """Run a task of the job, which lives meanwhile, and yield what its TaskProlog printed."""
    hook = _command(node, "task-prolog", {"SLURM_JOB_ID": "12", "SLURM_LOCALID": "0"})
    with subprocess.Popen(
        ["sh", "-c", '"$@"; echo; echo over; read line', "sh", *hook["args"]],
        env=hook["env"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield "".join(iter(process.stdout.readline, "over\n"))


def test_an_id_that_is_given_again_is_another_job(node: Node) -> None:
    """A repeated Prolog has the job's lease; one that asks for something else, or after the job's end, has another."""
    first = _prolog(node, JOB)
    assert _prolog(node, JOB)["id"] == first["id"]
    with _task(node) as said:
        assert f"export MPSD_LEASE={first['id']}\n" in said
        assert _prolog(node, JOB)["id"] == first["id"]  # slurmd was restarted while it runs
        assert node.get(f"/v1/leases/{first['id']}").json["holders"][0]["kind"] == "process"
    wait_until(lambda: not node.leases(), what="the lease to end with its process")
    second = _prolog(node, JOB)
    assert second["labels"]["slurm/identity"] != first["labels"]["slurm/identity"]
    third = _prolog(node, MORE)
    assert third["active_thread_percentage"] == 40
    assert third["labels"]["slurm/identity"] != second["labels"]["slurm/identity"]
    assert node.get(f"/v1/leases/{second['id']}").json["state"] == "ended"
    with _task(node) as said:
        assert f"export MPSD_LEASE={third['id']}\n" in said
    assert _hook(node, "epilog", EPILOG).stderr == ""
    assert (node.leases(), _left(node)) == ([], [])


def test_the_next_run_after_an_epilog_without_mpsd(node: Node) -> None:
    """It has a lease of its own, and that of the run before ends; no task gets that one, even without a Prolog."""
    first = _prolog(node, JOB)
    assert "mpsd" in _hook(node, "epilog", JOB, socket=f"{node.root}/none").stderr
    assert [each["id"] for each in node.leases()] == [first["id"]]
    tasks = {"SLURM_JOB_ID": "12", "SLURM_JOB_GPUS": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    done = _hook(node, "task-prolog", tasks)
    assert (done.returncode, "no lease" in done.stdout) == (1, True)
    assert _prolog(node, JOB)["id"] != first["id"]
    _hook(node, "epilog", EPILOG)
    assert (node.leases(), _left(node)) == ([], [])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"job": "12"}', b'{"leases": 3}', b"\xff"])
def test_a_record_that_nothing_can_be_read_from(node: Node, content: bytes) -> None:
    """It keeps neither its own job nor others from their leases, and goes with the next Epilog."""
    broken = _state(node) / "jobs" / "12" / "job"
    for job in (JOB, {**JOB, "SLURM_JOB_ID": "13"}):
        broken.parent.mkdir(parents=True, exist_ok=True)
        broken.write_bytes(content)
        _prolog(node, job)
        assert _hook(node, "epilog", job).stderr == ""
        assert (node.leases(), _left(node)) == ([], [])


def test_a_full_disk(node: Node) -> None:
    """A job whose lease cannot be recorded has none, and no earlier one's; Epilog ends a lease without a record."""
    done = _hook(node, "prolog", JOB, preexec_fn=_no_room)
    assert (done.returncode, node.leases()) == (0, [])
    assert "mpsd: " in done.stderr
    _prolog(node, JOB)
    _hook(node, "prolog", MORE, preexec_fn=_no_room)
    done = _hook(node, "task-prolog", MORE)
    assert (done.returncode, "no lease" in done.stdout) == (1, True)
    _prolog(node, JOB)
    assert _hook(node, "epilog", EPILOG, preexec_fn=_no_room).stderr == ""
    assert (node.leases(), _left(node)) == ([], [])


def _killed_prolog(node: Node, step: int) -> bool:
    """Run a Prolog that is killed before this step, and tell whether it came so far."""
    words = [sys.executable, "-c", f"{_KILLED}main(['prolog'])", str(step), str(_state(node))]
    environment = _command(node, "prolog", JOB)["env"]
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode != 0


@pytest.mark.timeout(120)
def test_a_prolog_that_is_killed_anywhere(node: Node) -> None:
    """Whatever it had done: the next Prolog gets one lease for the job, and Epilog leaves nothing."""
    kills = 0
    while _killed_prolog(node, kills + 1):
        assert _hook(node, "epilog", EPILOG).stderr == ""
        assert (node.leases(), _left(node)) == ([], []), kills
        _killed_prolog(node, kills + 1)
        lease = _prolog(node, JOB)
        assert json.loads((_state(node) / "jobs" / "12" / "task").read_text())["leases"] == [lease["id"]]
        assert _hook(node, "epilog", EPILOG).stderr == ""
        assert (node.leases(), _left(node)) == ([], []), kills
        kills += 1
    assert kills > 8


def test_what_the_next_run_has_written_stays(tmp_path: Path) -> None:
    """Where a hook of one run removes its record just after the next run has written its own."""
    records = Records(str(tmp_path / "state"))
    one, other = (Record("12", identity, "", (), over=False) for identity in ("12.u0.a", "12.u0.b"))
    records.write(one)
    records.write(other)
    records.remove("12", one.identity)
    assert records.read("12") == other
    records.remove("12", other.identity)
    assert records.read("12") is None
    assert list((tmp_path / "state" / "jobs").iterdir()) == []


def test_the_link_of_an_earlier_run(tmp_path: Path) -> None:
    """It leads no task to what another run has."""
    records = Records(str(tmp_path / "state"))
    job = jobs.of({**JOB, "SLURM_JOB_SLUID": "sEKNKTV3WPV500"})
    records.write(Record(job.id, job.identity, "", (), over=False))
    records.tell(job, {"leases": ["lease-1"]})
    (tmp_path / "state" / "jobs" / "sEKNKTV3WPV400").symlink_to("12")
    for name, found in (("12", True), ("sEKNKTV3WPV500", True), ("sEKNKTV3WPV400", False)):
        assert (records.told(name) is not None) == found, name


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("RUNNING", False),
        ("COMPLETING", False),
        ("A_NEW_STATE", False),
        ("PENDING", True),
        ("FAILED", True),
        (None, True),
    ],
)
def test_which_leases_end(state: str | None, ends: bool) -> None:  # noqa: FBT001 - a parameter
    """Those of jobs that Slurm does not know, or knows to have nothing of the node."""
    lease: Any = {"id": "lease-1", "labels": {jobs.JOB: "12"}}
    assert bool(judge.gone([lease], {} if state is None else {"12": state})) == ends


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"due": {"7": 1}}', b'{"seen": 7}'])
def test_accounts_that_nothing_can_be_read_from(tmp_path: Path, content: bytes) -> None:
    """The service begins anew, and says so."""
    (tmp_path / "accounts").write_bytes(content)
    said: list[str] = []
    Accounting(SlurmPrograms("node1", {}), tmp_path, said.append)
    assert len(said) == 1
    assert str(tmp_path / "accounts") in said[0]
