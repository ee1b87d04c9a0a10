"""mpsd starts a control daemon for each GPU, as a process with only what it needs, and verifies it."""

import os
from pathlib import Path

import pytest

from mpsd.core.units import MIB
from tests.daemon.conftest import Start
from tests.daemon.helpers import kill, next_ready
from tests.harness import look_at, wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

O_APPEND = 0o2000
ALLOWED = {"PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH"}
MPS = {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES", "MPSD_START"}


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start an mpsd whose own environment is full of harmful variables."""
    traps = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/somewhere-else",
        "CUDA_VISIBLE_DEVICES": "7",
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "LD_PRELOAD": "",
        "A_SECRET": "of whoever started mpsd",
    }
    return node_for_all(env=traps).start()


class TestProcess:
    """The properties of a control daemon as a process."""

    def test_process(self, node: Node) -> None:
        """A control daemon has an allow-listed environment, a GPU by UUID, its own session, and an appended log."""
        daemons = node.daemons()
        assert len({daemon["gpu"] for daemon in daemons.values()}) == 2
        for name, daemon in daemons.items():
            pid = daemon["pid"]
            proc = Path(f"/proc/{pid}")
            variables = dict(each.split("=", 1) for each in (proc / "environ").read_text().split("\0") if each)
            assert variables.keys() - ALLOWED == MPS
            assert variables["CUDA_MPS_PIPE_DIRECTORY"] == daemon["pipe_directory"] == str(node.pipe_directory(name))
            assert variables["CUDA_VISIBLE_DEVICES"] == daemon["gpu"]
            assert daemon["gpu"].startswith("GPU-")
            # As long as there is no lease, the limits are next to nothing.
            assert daemon["limits"] == {"active_thread_percentage": 0.1, "pinned_device_mem_limit": MIB}
            assert "-f" in (proc / "cmdline").read_text().split("\0")
            assert os.getsid(pid) == pid
            found = look_at(pid)
            assert found is not None
            assert found.parent == node.pid

            open_files = {int(link.name): str(link.readlink()) for link in (proc / "fd").iterdir()}
            assert open_files[0] == "/dev/null"
            assert open_files[1] == open_files[2] == str(node.control_log(name))
            facts = dict(line.split(":\t", 1) for line in (proc / "fdinfo" / "1").read_text().splitlines())
            assert int(facts["flags"], 8) & O_APPEND
            inherited = [path for path in open_files.values() if "mpsd" in path.removeprefix(str(node.root))]
            assert inherited == []

    def test_directories(self, node: Node) -> None:
        """Every uid may reach the pipe directories, only mpsd may write there, and the lock file is private to mpsd."""
        for path in (node.root / "run", node.root / "run" / "mps", node.root / "log" / "gpu0"):
            assert path.stat().st_mode & 0o777 == 0o755, path
        assert (node.root / "run" / "mpsd.lock").stat().st_mode & 0o777 == 0o600
        assert node.control_log("gpu0").stat().st_mode & 0o007 == 0


def test_limits_are_set_once(make_node: Start) -> None:
    """A fresh control daemon gets each change of its limits once: at its start, with a lease, and after the lease."""
    node = make_node(simulate=2).start()
    lease = node.request("POST", "/v1/leases", {"threads": 25, "memory": "1GiB", "gpu": "0"}).json["id"]
    wait_until(lambda: verified(node, "gpu0")[-1] == 25.0, what="the limits of the lease to be verified")
    assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
    wait_until(lambda: verified(node, "gpu0")[-1] == 0.1, what="the limits to be lowered again")
    assert (verified(node, "gpu0"), verified(node, "gpu1")) == ([0.1, 25.0, 0.1], [0.1])
    before = node.daemons()["gpu1"]["pid"]
    kill(before)
    next_ready(node, "gpu1", before)
    assert verified(node, "gpu1") == [0.1, 0.1]


def verified(node: Node, name: str) -> list[float]:
    """Return the percentages of the threads that were verified on a control daemon, in order."""
    return [each["active_thread_percentage"] for each in node.events("limits_verified", daemon=name)]
