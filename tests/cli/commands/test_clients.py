"""`mpsctl clients`: who uses what, and the command lines that a caller may see."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.cli.commands import lists
from mpsd.core.enforcement.verification import Verdict
from mpsd.core.model import LeaseState
from tests.cli.conftest import ROOT, mpsctl_as_nobody
from tests.daemon.caller import NOBODY, needs_root
from tests.hanging import hang, hanging
from tests.harness import HANGING, wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = pytest.mark.thorough


@pytest.fixture
def simulated(make_node: Callable[..., Node]) -> Node:
    return make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "defaults"\n').start()


@pytest.fixture
def training(simulated: Node) -> Iterator[SimulatedClient]:
    """Start a client that holds 1 GiB of a lease with a name and a label."""
    arguments = ("--threads", "25", "--memory", "2GiB", "--name", "train", "--label", "team=vision")
    with leased(simulated, *arguments) as client:
        client.alloc("1GiB")
        wait_until(
            lambda: simulated.events("client_attributed", client=client.hello["pid"]), what="it to be attributed"
        )
        yield client


def rows(node: Node, *arguments: str) -> list[dict[str, str]]:
    """Return the rows of the list."""
    done = node.mpsctl("clients", "-o", "csv", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [*csv.DictReader(io.StringIO(done.stdout))]


def test_who_uses_what(simulated: Node, training: SimulatedClient) -> None:
    """A client has what it holds, its lease's share, name and command line; each fact selects it, and sorts it."""
    with SimulatedClient(variables(simulated)) as stranger:
        pid, other = (f"{each.hello['pid']}" for each in (training, stranger))
        wait_until(lambda: len(rows(simulated)) == 2, what="both to be listed")
        wait_until(lambda: rows(simulated, "--name", "train")[0]["held"] == f"{1 << 30}", what="the memory to be read")
        (row,) = rows(simulated, "--name", "tr*", "--label", "team=vision", "--state", "ok", "--gpu", "gpu0", "--mine")
        assert (row["pid"], row["memory"], row["threads"], row["name"]) == (pid, f"{2 << 30}", "25", "train")
        assert row["command"].endswith("launch.py client")
        assert [each["pid"] for each in rows(simulated, "--sort", "-held")] == [pid, other]
        assert [each["pid"] for each in rows(simulated, "--sort", "held")] == [other, pid]
        shown = simulated.mpsctl("clients", "--no-headers", "--sort", "-held").stdout.splitlines()[0]
        assert " 1GiB of 2GiB  25% " in shown
        assert rows(simulated, "--name", "eval") == rows(simulated, "--label", "team=audio") == []


READ: Final = """
import json, os, sys
from mpsd.cli.command_lines import of_clients
os.setresuid(*3 * (int(sys.argv[1]),))
print(json.dumps(of_clients(json.loads(sys.argv[2]))))
"""


@needs_root
def test_command_lines_of_others(simulated: Node, training: SimulatedClient) -> None:
    """A user without rights sees no command line of others; root sees all, but none of a pid with another name."""
    pid = training.hello["pid"]
    (client,) = simulated.get("/v1/clients").json["clients"]
    for uid, name, shown in ((0, client["name"], True), (NOBODY, client["name"], False), (0, "another", False)):
        command = [sys.executable, "-c", READ, str(uid), json.dumps([{**client, "name": name}])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert [*json.loads(done.stdout)] == ([f"{pid}"] if shown else [])
    listed = csv.DictReader(io.StringIO(mpsctl_as_nobody(simulated, "clients", "-o", "csv").stdout))
    assert [each for each in listed if "launch.py" in each["command"]] == []


@needs_root
def test_a_command_line_that_nobody_can_read(simulated: Node, training: SimulatedClient, tmp_path: Path) -> None:
    """A process that makes each reader of its command line wait delays the list, and costs no other row."""
    with hanging(tmp_path / "silent", os.getuid(), variables(simulated)) as client:
        client.do("init")
        wait_until(lambda: len(rows(simulated)) == 2, what="both to be listed")
        hang(client)
        commands = {each["pid"]: each["command"] for each in rows(simulated)}
        assert commands[f"{client.pid}"] == HANGING
        assert "launch.py" in commands[f"{training.hello['pid']}"]


def test_states() -> None:
    """The states by which lists filter are all that there are."""
    assert {*lists.VERDICTS} == {*Verdict} - {Verdict.NOTHING}  # a client is something
    assert [*lists.STATES] == [*LeaseState]
