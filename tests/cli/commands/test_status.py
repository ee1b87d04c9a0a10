"""Each reading command shows the API's answer: unchanged with `-o json`, otherwise as a table."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsd.cli.users import name_of
from tests.cli.answering import answering, http
from tests.cli.conftest import run_mpsctl
from tests.node import Node

ME = name_of(os.geteuid())

ROUTES = {
    "status": "/v1/status",
    "gpus": "/v1/gpus",
    "daemons": "/v1/daemons",
    "clients": "/v1/clients",
    "leases": "/v1/leases",
    "config": "/v1/config",
}

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n"


@pytest.mark.parametrize("command", ROUTES)
def test_json(node: Node, command: str) -> None:
    """`-o json` is the API's own document: every field under its name, in its order."""
    node.lease(name="train", labels={"team": "a"})
    done = node.mpsctl(command, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.dumps(json.loads(done.stdout)) == json.dumps(node.get(ROUTES[command]).json)


def test_show(node: Node) -> None:
    """One lease is shown as JSON, as a table, and as export lines, also when it has ended."""
    lease = node.lease(name="it's", labels={"team": "a b"})
    assert json.loads(node.mpsctl("show", lease["id"], "-o", "json").stdout) == lease
    table = node.mpsctl("show", lease["id"]).stdout
    assert re.search(r"^name +it's$", table, re.MULTILINE)
    assert re.search(r"^labels +team=a b$", table, re.MULTILINE)
    exports = node.mpsctl("show", lease["id"], "-o", "env").stdout.splitlines()
    assert [line.split("=")[0] for line in exports] == [f"export {name}" for name in (*lease["env"], "MPSD_SOCKET")]
    node.request("DELETE", f"/v1/leases/{lease['id']}")
    assert re.search(r"^state +ended: ", node.mpsctl("show", lease["id"]).stdout, re.MULTILINE)


def test_errors_with_escape_sequences(short_tmp: Path) -> None:
    """Escape sequences in mpsd's refusals have no effect either."""
    problem = http({"code": "not_found", "detail": f"no lease {HOSTILE}", "hint": HOSTILE}, "404 Not Found")
    with answering(short_tmp / "s", problem):
        done = run_mpsctl(short_tmp / "s", "show", "x")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.replace("\n", "").isprintable()


def test_names_that_the_terminal_cannot_show(node: Node) -> None:
    """A name outside the terminal's character set is escaped, and is no error."""
    node.lease(name="漢 größe")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = run_mpsctl(node.socket, "leases", env=environment, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u6f22 größe" in done.stdout


def test_an_older_mpsd(short_tmp: Path) -> None:
    """An answer that lacks fields is reported as one of another version; as JSON it is shown unchanged."""
    with answering(short_tmp / "s", http({"daemons": [{"name": "gpu0"}]}), http({"gpus": [{"index": 0}]})):
        table = run_mpsctl(short_tmp / "s", "daemons")
        plain = run_mpsctl(short_tmp / "s", "gpus", "-o", "json")
    assert table.returncode == 1
    assert "has no 'state'" in table.stderr
    assert "different versions" in table.stderr
    assert (plain.returncode, json.loads(plain.stdout)) == (0, {"gpus": [{"index": 0}]})


# -- one answer, of one moment -----------------------------------------------------------------------------------------


def test_status_is_one_request(node: Node, short_tmp: Path) -> None:
    """The verdict and the tables come from one answer: mpsctl sends one request."""
    whole = node.get("/v1/status").json
    whole["healthy"], whole["headline"] = False, "NOT HEALTHY: gpu1 is failed: 5 deaths"
    whole["daemons"][1]["state"], whole["gpus"][0]["health"] = "failed", "faulty"
    for number, form in enumerate(("table", "json")):
        with answering(short_tmp / f"{number}", http(whole)) as server:
            done = run_mpsctl(short_tmp / f"{number}", "status", "-o", form)
        assert (done.returncode, done.stderr) == (1, "")
        assert [request.split(b" HTTP")[0] for request in server.requests] == [b"GET /v1/status"]
        if form == "json":
            assert json.loads(done.stdout) == whole
            continue
        lines = done.stdout.splitlines()
        assert lines[0] == "NOT HEALTHY: gpu1 is failed: 5 deaths"
        assert any(re.match(r"gpu1 +failed ", line) for line in lines)
        assert any(re.match(r"0 +faulty ", line) for line in lines)


# -- a node that is not well -------------------------------------------------------------------------------------------


def test_reset(make_node: Callable[..., Node]) -> None:
    """A daemon that died too often is failed; the command that status suggests brings it back."""
    node = make_node(config="[daemon]\ndeaths = 1\n").start()
    assert node.mpsctl("reset", "gpu1").returncode == 0, "a daemon that runs may be reset too"
    before = node.daemons()
    os.kill(before["gpu1"]["pid"], signal.SIGKILL)
    node.wait_for_state("gpu1", "failed")
    assert "mpsctl reset gpu1" in node.mpsctl("status").stdout

    done = node.mpsctl("reset", "gpu1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"op-\w+ done: .+\n", done.stdout)
    after = node.wait_for_state("gpu1", "ready")
    assert after["pid"] != before["gpu1"]["pid"]
    assert node.daemons()["gpu0"] == before["gpu0"]

    done = node.mpsctl("reset", "--all", "-o", "json")
    assert done.returncode == 0
    decoder, text, verbs = json.JSONDecoder(), done.stdout, []
    while text.strip():
        operation, length = decoder.raw_decode(text.lstrip())
        verbs.append((operation["daemon"], operation["verb"]))
        text = text.lstrip()[length:]
    assert verbs == [("gpu0", "reset"), ("gpu1", "reset")]
