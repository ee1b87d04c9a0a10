"""An operator's long commands: they say which clients they wait for, and ending them ends only the waiting."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from mpsd.cli.render import as_here
from tests.cli.conftest import ROOT, end, start_mpsctl
from tests.harness import wait_until
from tests.node import Node
from tests.terminals import Terminal

pytestmark = pytest.mark.thorough

SMALL = {"threads": 10, "memory": "1GiB", "gpu": "0"}


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """Start a node of this module: a hold persists."""
    return make_node(simulate=2, control=None).start()


@pytest.fixture
def lease(node: Node) -> str:
    """Return a lease on GPU 0, for which a restart waits."""
    found: str = node.request("POST", "/v1/leases", SMALL).json["id"]
    return found


def begun(node: Node) -> Any:
    """Wait until an operation has begun, and return its event."""
    return wait_until(lambda: node.events("operation_begun"), what="an operation to begin")[0]


def test_all(node: Node) -> None:
    """Every control daemon is restarted, with a line for each."""
    before = node.daemons()
    done = node.mpsctl("restart", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for (name, was), line in zip(before.items(), lines, strict=True):
        pid = node.daemons()[name]["pid"]
        assert f" done: {name} is pid {pid}, which replaced {was['pid']}" in line


def test_by_name(node: Node) -> None:
    """The answer names the user of the command, as every other sentence does."""
    done = node.mpsctl("resume", "gpu0")
    assert done.returncode == 0
    assert as_here(f" done: uid {os.geteuid()} resumed gpu0; it is ready") in done.stdout


def test_waits_and_is_given_up(node: Node, lease: str) -> None:
    """mpsctl says what it waits for, and exits with 1 when another command replaced the operation meanwhile."""
    process = start_mpsctl(node.socket, "drain", "gpu0", "-o", "json")
    try:
        assert process.stderr is not None
        assert f"waiting for {lease} (pid " in process.stderr.readline()
        assert node.mpsctl("resume", "gpu0").returncode == 0
        stdout, _ = process.communicate(timeout=20)
        assert process.returncode == 1
        assert json.loads(stdout)["state"] == "superseded"
    finally:
        end(process)


def test_on_a_terminal(node: Node, lease: str) -> None:
    """On a terminal one line shows what it waits for and how long; the line is gone at the end."""
    command = [sys.executable, "-m", "mpsd.cli.main", "--socket", f"{node.socket}", "drain", "gpu0"]
    with Terminal.running(command, os.environ, cwd=ROOT) as terminal:
        terminal.wait_for(rf"mpsctl: [1-9]\d*s: gpu0: drain waits for {lease} \(pid {os.getpid()}\)")
        assert "\n" not in terminal.raw
        assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        assert terminal.wait_for_the_end() == 0
    assert re.fullmatch(r"op-\w+ done: .*\r\n", terminal.raw.rpartition("\r\x1b[K")[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signalled(node: Node, lease: str, number: signal.Signals) -> None:
    """Ctrl-C ends mpsctl, which says that the restart continues, and how to cancel it; the restart continues."""
    process = start_mpsctl(node.socket, "restart", "gpu0")
    try:
        assert process.stderr is not None
        assert lease in process.stderr.readline()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
        operation = begun(node)["operation"]
        assert (process.returncode, stdout) == (-number, "")
        assert stderr == f"mpsctl: {operation} continues; to cancel it: mpsctl resume gpu0\n"
    finally:
        end(process)
    assert node.get(f"/v1/operations/{operation}").json["state"] == "running"
    assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
    wait_until(lambda: node.get(f"/v1/operations/{operation}").json["state"] == "done", what="the restart to be done")


def test_across_a_restart_of_mpsd(node: Node, lease: str) -> None:
    """mpsd is killed meanwhile: mpsctl says so, and asks the next one."""
    process = start_mpsctl(node.socket, "restart", "gpu0")
    try:
        assert process.stderr is not None
        assert lease in process.stderr.readline()
        node.end(signal.SIGKILL)
        assert "mpsd is gone; the next mpsd continues the operation" in process.stderr.readline()
        node.start(ready=False)
        assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
        stdout, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert " done: gpu0 is pid " in stdout
    finally:
        end(process)


def test_no_wait(node: Node, lease: str) -> None:
    """The operation begins, and the caller continues."""
    done = node.mpsctl("restart", "gpu0", "--no-wait", "--timeout", "1000", "-o", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["state"] == "running"
    told = json.loads(done.stdout)
    began = datetime.fromisoformat(told["started"]).replace(microsecond=0)
    assert f", at {began.isoformat()}, and ends the remaining clients at " in told["because"]
    end = datetime.fromisoformat(told["because"].partition("remaining clients at ")[2].split()[0])
    assert (end - began).total_seconds() == pytest.approx(1000, abs=1)
    assert node.get(f"/v1/leases/{lease}").json["state"] == "granted"
