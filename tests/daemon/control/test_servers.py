"""The servers of a control daemon: listed while they run, and reported as orphans when their control daemon dies."""

import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, waiting
from tests.daemon.helpers import IMPATIENT, branches, is_running, kill, next_ready
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = pytest.mark.thorough

_STAND_IN = """#!/bin/bash
exec -a nvidia-cuda-mps-server sleep 600
"""

QUICK: Final = "[daemon]\nanswer_deadline = 0.4\nprobe_interval = 0.5\n"
"""For tests that wait for a multiple of the first, until a busy server is ended."""


@pytest.fixture
def start(make_node: Start, short_tmp: Path) -> Start:
    """Return a maker of nodes whose control daemons start a stand-in for NVIDIA's server, which never becomes ready."""
    directory = short_tmp / "bin"
    directory.mkdir()
    server = directory / "nvidia-cuda-mps-server"
    server.write_text(_STAND_IN)
    server.chmod(0o755)

    def make(**options: Any) -> Node:
        return make_node(simulate=1, env={"PATH": f"{directory}:{os.environ['PATH']}"}, **options).start()

    return make


def start_server(node: Node) -> int:
    """Have the control daemon start a server, and return its pid."""
    lines = node.ask("gpu0", f"start_server -uid {os.geteuid()}\nget_server_list")
    return int(lines[-1])


def wait_for_servers(node: Node, *wanted: tuple[int, bool]) -> list[dict[str, Any]]:
    """Wait until exactly these servers are listed, each with whether it is an orphan, and return them."""

    def listed() -> list[dict[str, Any]]:
        servers: list[dict[str, Any]] = node.daemons()["gpu0"]["servers"]
        return sorted(servers, key=lambda each: int(each["pid"]))

    wait_until(
        lambda: [(each["pid"], each["orphan"]) for each in listed()] == sorted(wanted),
        what=f"the servers to be {wanted}",
    )
    return listed()


@pytest.mark.parametrize("real", branches(470, 555))
def test_server_and_orphan(start: Start, real: RealDaemon) -> None:
    """A server is listed; when its control daemon dies it becomes an orphan, and the node is not healthy."""
    node = start(control=real.control)
    before = node.daemons()["gpu0"]["pid"]
    server = start_server(node)
    (listed,) = wait_for_servers(node, (server, False))
    assert listed["clients"] == []
    # A server that is not ready, and so answers no query about itself, does not make the node unhealthy.
    assert node.get("/v1/status").json["healthy"] is True

    kill(before)
    next_ready(node, "gpu0", before)
    wait_for_servers(node, (server, True))
    assert is_running(server)
    status = node.get("/v1/status").json
    assert status["healthy"] is False
    assert f"gpu0: server {server} is an orphan" in status["because"]
    assert [line["server"] for line in node.events("server_orphaned")] == [server]

    # The next mpsd has no record of the server, and finds it by evidence.
    node.end()
    node.start(ready=False)
    node.wait_for_state("gpu0", "ready")
    wait_for_servers(node, (server, True))

    kill(server)
    wait_for_servers(node)
    assert node.get("/v1/status").json["healthy"] is True


@pytest.mark.real_daemon(535)
class TestServers:
    """Ends, orphans, hangs and shared memory of servers."""

    def test_orphan_that_was_never_seen(self, start: Start) -> None:
        """A server is an orphan also when its control daemon died before mpsd had seen the server."""
        node = start()
        before = node.daemons()["gpu0"]["pid"]
        server = start_server(node)
        kill(before)
        next_ready(node, "gpu0", before)
        wait_for_servers(node, (server, True))

    def test_orphan_of_a_failed_daemon(self, start: Start) -> None:
        """An orphan is listed until it has ended, also where no new control daemon starts."""
        node = start(config="[daemon]\ndeaths = 1\n")
        server = start_server(node)
        wait_for_servers(node, (server, False))
        kill(node.daemons()["gpu0"]["pid"])
        node.wait_for_state("gpu0", "failed")
        wait_for_servers(node, (server, True))
        kill(server)
        wait_for_servers(node)

    def test_own_server_and_orphan(self, start: Start) -> None:
        """An orphan and a server of the new control daemon are listed as different."""
        node = start()
        before = node.daemons()["gpu0"]["pid"]
        orphan = start_server(node)
        wait_for_servers(node, (orphan, False))
        kill(before)
        next_ready(node, "gpu0", before)
        server = start_server(node)
        wait_for_servers(node, (orphan, True), (server, False))
        node.end()
        node.start(ready=False)
        wait_for_servers(node, (orphan, True), (server, False))


@pytest.mark.parametrize("real", branches(470, 555))
def test_a_server_that_hangs(start: Start, real: RealDaemon) -> None:
    """A restart waits for a hung server, which may have clients, and after the timeout ends it."""
    node = start(control=real.control, config=QUICK, durations=IMPATIENT)
    before, server = node.daemons()["gpu0"]["pid"], start_server(node)
    operation = begin(node, "restart")
    for _ in range(2):
        assert [each["pid"] for each in waiting(node, operation)] == [server]
        node.end(signal.SIGKILL)
        node.start(ready=False)
    node.wait_for_state("gpu0", "draining")
    assert is_running(server)
    assert is_running(before)
    assert begin(node, "restart", timeout=0)["id"] == operation["id"]
    ended(node, operation)
    assert not is_running(server)
    assert not is_running(before)


@pytest.mark.real_daemon(535)
def test_shared_memory(start: Start, short_tmp: Path) -> None:
    """A restart removes the files in /dev/shm that a killed server left, by its log; other servers' files stay."""
    says = 'echo "[2026-01-01 00:00:00.000 Server $$] Created named shared memory region /'
    script = f"""#!/bin/bash
mine=cuda.shm.$(id -u).$(printf %x $$).1 another=cuda.shm.$(id -u).1.1-test
touch /dev/shm/$mine /dev/shm/$another
{says}$mine"
{says}$another"
{says}../../$mine"
exec -a nvidia-cuda-mps-server sleep 600
"""
    (short_tmp / "bin" / "nvidia-cuda-mps-server").write_text(script)
    node = start(config=QUICK, durations=IMPATIENT)
    mine = Path(f"/dev/shm/cuda.shm.{os.geteuid()}.{start_server(node):x}.1")
    another = Path(f"/dev/shm/cuda.shm.{os.geteuid()}.1.1-test")
    wait_until(mine.exists, what="the server to have made it")
    try:
        ended(node, begin(node, "restart", timeout=0))
        assert not mine.exists()
        assert another.exists()
    finally:
        mine.unlink(missing_ok=True)
        another.unlink()
