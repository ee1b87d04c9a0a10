"""batch/pbs_hook.py with a stand-in for PBS's module: its own logic alone, since no PBS is here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.node import Node

pytestmark = pytest.mark.root("claim a lease for another user")

HOOK = Path(__file__).parents[2] / "batch" / "pbs_hook.py"

_PBS = """
import json, os, sys
EXECJOB_BEGIN, EXECJOB_LAUNCH, EXECJOB_END, LOG_WARNING = 1, 2, 3, 4
class _Job:
    id, euser = "7.server", "nobody"
    Resource_List = {"mps": int(os.environ["SHARE"]) or None}
class _Event:
    type, job, env = int(os.environ["EVENT"]), _Job(), {}
    progname, argv = "/bin/sh", ["sh", "-c", "echo $MPSD_LEASE"]
    def _end(self, **said):
        print(json.dumps({**said, "env": self.env, "progname": self.progname, "argv": self.argv}))
        sys.exit(0)
    def accept(self):
        self._end(accepted=True)
    def reject(self, text):
        self._end(accepted=False, text=text)
_event = _Event()
def event():
    return _event
def logmsg(level, text):
    print(text, file=sys.stderr)
"""


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """Return the directory of a copy of the hook that writes into it, beside the stand-in."""
    (tmp_path / "pbs.py").write_text(_PBS)
    text = HOOK.read_text(encoding="utf-8")
    for old, new in (("/usr/bin/mpsctl", f"{tmp_path}/mpsctl"), ("/run/mpsd-pbs", f"{tmp_path}/state")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "hook.py").write_text(text)
    (tmp_path / "mpsctl").write_text(f"#!{sys.executable}\nfrom mpsd.cli.main import main\nmain()\n")
    (tmp_path / "mpsctl").chmod(0o755)
    return tmp_path


def run(node: Node, directory: Path, event: int, share: int = 25) -> tuple[dict[str, Any], str]:
    """Return what the hook did to an event, and what it logged."""
    variables = {
        "EVENT": f"{event}",
        "SHARE": f"{share}",
        "PYTHONPATH": f"{directory}:{HOOK.parents[1]}",
        "PATH": "/bin",
    }
    command = [sys.executable, str(directory / "hook.py")]
    done = subprocess.run(
        command, env={**variables, "MPSD_SOCKET": str(node.socket)}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def test_a_job_has_a_lease_from_begin_to_end(shared_node: Node, hook: Path) -> None:
    """The task becomes `mpsctl claim`, which has the token, and the end of the job ends the lease."""
    run(shared_node, hook, 1)
    (lease,) = shared_node.leases()
    assert (lease["labels"]["pbs/job"], lease["active_thread_percentage"]) == ("7.server", 25)
    launched, _ = run(shared_node, hook, 2)
    assert launched["argv"] == [f"{hook}/mpsctl", "claim", lease["id"], "--", "/bin/sh", "-c", "echo $MPSD_LEASE"]
    assert launched["env"]["MPSD_LEASE"] == lease["id"]
    assert launched["env"]["MPSD_LEASE_TOKEN"]
    run(shared_node, hook, 3)
    assert not shared_node.leases()
    assert run(shared_node, hook, 3)[0]["accepted"]


def test_without_a_lease_the_task_alone_is_rejected(shared_node: Node, hook: Path) -> None:
    whole = [shared_node.lease(fraction=1, threads=None, memory=None) for _ in range(2)]
    begun, said = run(shared_node, hook, 1)
    assert begun["accepted"]
    assert "mpsd: " in said
    launched, _ = run(shared_node, hook, 2)
    assert not launched["accepted"]
    assert "has no lease" in launched["text"]
    for each in whole:
        shared_node.request("DELETE", f"/v1/leases/{each['id']}")


def test_other_jobs_are_left_alone(shared_node: Node, hook: Path) -> None:
    for event in (1, 2, 3):
        done, said = run(shared_node, hook, event, share=0)
        assert (done["accepted"], done["progname"], said) == (True, "/bin/sh", "")
    assert not shared_node.leases()
