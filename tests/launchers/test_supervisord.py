"""Under supervisord, restarts, signals and exit statuses are those of the program, and each start has its own lease."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.driven import DEADLINE, Driven
from tests.guides.blocks import every
from tests.harness import wait_until
from tests.launchers.conftest import RANK, ROOT
from tests.node import Node

pytestmark = [pytest.mark.launchers("supervisord"), pytest.mark.timeout(180)]

_SETTINGS: Final = """
[supervisord]
nodaemon=true
logfile={0}/log
pidfile={0}/pid
childlogdir={0}
[unix_http_server]
file={0}/socket
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{0}/socket
"""


class Supervisor:
    """supervisord with the guide's program, which is a client that the test drives."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.client = Driven(directory, ".0")
        self._settings = directory / "supervisord.conf"
        app = directory / "app"
        app.write_text(f"#!/bin/sh\n{RANK}")
        app.chmod(0o755)
        (block,) = (each.text for each in every("ini") if "[program:" in each.text)
        lines = [line for line in block.splitlines() if line != "user=trainer"]
        assert len(lines) == len(block.splitlines()) - 1
        named = "\n".join(lines).replace("/usr/bin/mpsctl", f"{sys.executable} -m mpsd.cli.main")
        assert "/usr/bin/python3 /srv/trainer/train.py" in named
        named = named.replace("/usr/bin/python3 /srv/trainer/train.py", " ".join((f"{app}", *program())))
        self._settings.write_text(f"{_SETTINGS.format(directory)}{named}\n")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MPSD_"))}
        paths = {"PYTHONPATH": str(ROOT), "MPSD_SOCKET": str(node.socket)}
        environment = {**bare, **paths, "RANK": "0", VARIABLE: str(node.root / "run" / "simulated")}
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [_found("supervisord"), "-n", "-c", self._settings],
                cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def control(self, *arguments: str) -> str:
        """Call supervisorctl, and return its output."""
        command = [_found("supervisorctl"), "-c", str(self._settings), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE).stdout

    @property
    def log(self) -> str:
        return (self._settings.parent / "log").read_text()

    def wait_for(self, state: str) -> str:
        """Wait until supervisord reports this state of the program, and return the line."""

        def look() -> str | None:
            line = self.control("status", "trainer")
            return line if f" {state} " in line else None

        return wait_until(look, what=f"supervisord to report {state}", deadline=DEADLINE)

    def started(self) -> dict[str, Any]:
        """Return the first answer of the next start of the program, once it runs for supervisord."""
        hello = self.client.answer()
        assert hello["mps"]
        assert f"pid {hello['pid']}," in self.wait_for("RUNNING")
        return hello


def _found(name: str) -> str:
    path = shutil.which(name, path="/usr/local/bin:/usr/bin")
    assert path is not None
    return path


@pytest.fixture
def supervisor(node: Node, short_tmp: Path) -> Iterator[Supervisor]:
    started = Supervisor(node, short_tmp)
    yield started
    started.process.terminate()
    assert started.process.wait(DEADLINE) in {0, -signal.SIGTERM}
    started.client.close()
    wait_until(lambda: not node.leases(), what="the lease to end with supervisord's program")
    node.end_servers()


def _lease(node: Node) -> str:
    (lease,) = node.leases()
    assert lease["name"] == "trainer"
    return str(lease["id"])


def test_restarts(node: Node, supervisor: Supervisor) -> None:
    """A program that is killed or fails is started again, under another lease; one that succeeds is not."""
    killed = supervisor.started()
    first = _lease(node)
    assert node.leases()[0]["holders"][0]["pid"] == killed["pid"]  # mpsctl became the program
    os.kill(killed["pid"], signal.SIGKILL)
    assert supervisor.started()["pid"] != killed["pid"]
    wait_until(lambda: len(node.leases()) == 1, what="the first lease to end")
    second = _lease(node)
    supervisor.client.tell("exit 3")
    supervisor.started()
    wait_until(lambda: len(node.leases()) == 1, what="the second lease to end")
    assert len({first, second, _lease(node)}) == 3
    supervisor.client.tell("exit")
    supervisor.wait_for("EXITED")
    wait_until(lambda: not node.leases(), what="the lease of a program that has ended to end")


def test_stop(node: Node, supervisor: Supervisor) -> None:
    """The stop signal reaches the program, which ends by itself, and its lease ends with it."""
    supervisor.started()
    assert supervisor.client.do("obey TERM")["ok"]
    assert "stopped" in supervisor.control("stop", "trainer")
    wait_until(lambda: not node.leases(), what="the lease of a stopped program to end")
    assert "terminated by SIGTERM" not in (log := supervisor.log), log
    assert "stopped: trainer (exit status 0)" in log
    supervisor.control("start", "trainer")
    supervisor.started()
    _lease(node)


def test_waits_for_room(node: Node, supervisor: Supervisor) -> None:
    """A program that waits for room is running for supervisord, and begins when there is some."""
    supervisor.started()
    assert "stopped" in supervisor.control("stop", "trainer")
    wait_until(lambda: not node.leases(), what="the lease of a stopped program to end")
    taken = [node.lease(threads=None, memory=None, fraction=0.9, gpu=gpu)["id"] for gpu in ("0", "1")]
    supervisor.control("start", "trainer")
    supervisor.wait_for("RUNNING")
    waiting = wait_until(
        lambda: [each for each in node.leases() if each["state"] == "waiting"], what="the program's request to wait"
    )
    assert [each["name"] for each in waiting] == ["trainer"]
    for each in taken:
        node.request("DELETE", f"/v1/leases/{each}")
    supervisor.started()
