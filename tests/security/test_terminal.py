"""Names and commands that strangers choose have no effect on a terminal, and forge no line of a log."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import pytest

from mpsd.core.events import EventName
from mpsd.core.settings import LogFormat
from mpsd.daemon.record.log import configure
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import leased, variables

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

NAME: Final = "\x1b[2J\x9b31m\u202ex"
"""A program's name, of at most 15 bytes: it clears the screen, turns it red, and reverses the line."""

TURNED: Final = "\u202e\u2066\u200bgnp.exe"
"""A lease's name: it may contain these characters, but no control character."""

COMMAND: Final = "set_default_active_thread_percentage 10 \x1b[2J\x9b31m\u202e\u2028{} forged"
"""A command to a control daemon, whose lines end at \\n, and nowhere else."""

CLIENT: Final = "import sys; sys.argv[0] = ''; from mpsd.simulator.client import main; sys.exit(main())"


@pytest.fixture(params=["json", "text"])
def node(make_node: Start, request: pytest.FixtureRequest) -> Node:
    """Start a node that writes its log in one of its two forms."""
    return make_node(simulate=1, control=None, config=f'[log]\nformat = "{request.param}"\n').start()


@pytest.fixture
def client(node: Node, short_tmp: Path) -> Iterator[DrivenProgram]:
    """Start a client with such a name, and without a lease."""
    program = short_tmp / NAME
    program.write_text(f"#!{sys.executable}\n{CLIENT}\n", encoding="utf-8")
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    with DrivenProgram([str(program)], {**variables(node), "PYTHONPATH": root}) as told:
        assert told.hello["ok"], told.hello
        yield told


def harmless(text: str) -> bool:
    """Return whether no part of a text acts on a terminal, except for its line ends."""
    return text.replace("\n", "").isprintable()


def names(node: Node) -> dict[int, str]:
    return {each["pid"]: each["name"] for each in node.get("/v1/clients").json["clients"]}


def test_names(node: Node, client: DrivenProgram) -> None:
    """The names of programs and leases are harmless in every table, in JSON, in events and in the log."""
    with leased(node, "--threads", "10", "--memory", "1GiB", "--name", TURNED, "--label", f"team={TURNED}") as holder:
        found = wait_until(
            lambda: (
                {each["pid"]: each["name"] for each in node.get("/v1/clients").json["clients"]}.keys()
                >= {client.pid, holder.pid}
            ),
            what="both clients to be seen",
        )
        assert found
        names = {each["pid"]: each["name"] for each in node.get("/v1/clients").json["clients"]}
        assert names[client.pid] == NAME
        (lease,) = node.get("/v1/leases").json["leases"]
        assert lease["name"] == TURNED
        assert lease["labels"] == {"team": TURNED}
        for command in (
            ["clients"],
            ["leases"],
            ["show", lease["id"]],
            ["events"],
            ["status"],
            ["verify", lease["id"]],
        ):
            for form in ("table", "json"):
                done = node.mpsctl(*command, "-o", form)
                assert done.stdout, (command, done.stderr)
                assert harmless(done.stdout + done.stderr), (command, form)
        assert "\\x1b[2J" in node.mpsctl("clients").stdout
        assert "\\u202e" in node.mpsctl("show", lease["id"]).stdout
    assert harmless(node.stderr.read_text())


@pytest.mark.parametrize("asked", [{"name": "\x1b[2J"}, {"labels": {"a": "\n"}}, {"labels": {"\u202e": ""}}])
def test_control_characters(make_node: Start, asked: dict[str, object]) -> None:
    """A lease's name, labels and request_id cannot contain control characters; a label's name is restricted further."""
    node = make_node(simulate=1).start()
    for more in (asked, {"request_id": "\u202e"}, {"request_id": "a\nb"}, {"gpu": "\x9b"}):
        answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", **more})
        assert (answer.status, answer.json["code"]) == (422, "invalid_request")
        done = node.mpsctl("run", "--threads", "10", "--memory", "1GiB", "--gpu", "\x9b", "--", "true")
        assert done.returncode == 2
        assert harmless(done.stderr)


def test_commands(make_node: Start) -> None:
    """A stranger's command in the log of NVIDIA's control daemon is one line of mpsd's log, and one event."""
    node = make_node(simulate=1).start()
    node.ask("gpu0", COMMAND.format('"event":"node_stopping"'))
    told = event(node, "foreign_command")
    assert "forged" in told["command"]
    for line in node.stderr.read_text().split("\n"):
        assert line.isprintable()
        assert not line or json.loads(line)["event"] != "node_stopping"
    for arguments in (["events"], ["events", "-o", "json"], ["status"], ["daemons"], ["daemons", "-o", "json"]):
        done = node.mpsctl(*arguments)
        assert "forged" in done.stdout or "events" not in arguments
        assert harmless(done.stdout)


def test_commands_as_text(make_node: Start) -> None:
    """A stranger's command is also one line in a log in text form."""
    node = make_node(simulate=1, config='[log]\nformat = "text"\n').start()
    node.ask("gpu0", COMMAND.format("node_stopping"))
    wait_until(lambda: "foreign_command" in node.stderr.read_text(), what="the command to be told")
    assert harmless(node.stderr.read_text())
    assert not [line for line in node.stderr.read_text().splitlines() if line.startswith("node_stopping")]


def test_defects_as_text() -> None:
    """The traceback of a defect keeps its lines, and none acts on a terminal, whatever structlog prints."""
    with TemporaryFile("w+", encoding="utf-8") as stream:
        configure(LogFormat.TEXT, stream=stream).defect(EventName.API_DEFECT, ValueError(f"no {NAME}\nin"), path=NAME)
        stream.seek(0)
        first, *trace = stream.read().splitlines()
    assert "api_defect" in first
    assert trace == ["ValueError: no \\x1b[2J\\x9b31m\\u202ex", "in"]
    assert harmless(first)
