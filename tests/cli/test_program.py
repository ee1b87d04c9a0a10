"""mpsctl as a program: its invocation, its refusals, its exit, and how little it imports at the start."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpsd import __version__
from mpsd.cli.group import NAMES, mpsctl
from mpsd.core.errors import catalogue
from tests.cli.answering import answering, http
from tests.cli.conftest import ROOT, end, mpsctl_as_nobody, run_mpsctl, start_mpsctl
from tests.node import Node

MAIN = [sys.executable, "-m", "mpsd.cli.main"]


# -- how it is called --------------------------------------------------------------------------------------------------


def test_help() -> None:
    """`--help` lists every command by its purpose, every exit code of the catalogue, and how to enable completion."""
    done = subprocess.run([*MAIN, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    headings = re.findall(r"^([A-Z][a-z]+):$", done.stdout, re.MULTILINE)
    assert headings == ["Options", "See", "Take", "Operate", "Integrate"]
    commands = re.findall(r"^  ([a-z-]+)  ", done.stdout.partition("See:")[2], re.MULTILINE)
    assert commands == [*NAMES]
    codes = set(map(int, re.findall(r"^ +(\d+)  ", done.stdout, re.MULTILINE)))
    assert codes >= {0, 1, 2, *(error.exit_code for error in catalogue())}
    assert "_MPSCTL_COMPLETE=bash_source" in done.stdout
    assert [each for each in commands if CliRunner().invoke(mpsctl, [each, "-h"]).exit_code] == []


def test_version() -> None:
    """`--version` prints the version."""
    done = subprocess.run([*MAIN, "--version"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"mpsctl, version {__version__}\n"


def test_socket(node: Node, short_tmp: Path) -> None:
    """The socket is named before the command or after it, or by MPSD_SOCKET; an option precedes the variable."""
    right, wrong = str(node.socket), str(short_tmp / "wrong")
    for arguments, variable in (
        (["--socket", right, "leases"], wrong),
        (["leases", "--socket", right], wrong),
        (["leases"], right),
    ):
        environment = {**os.environ, "MPSD_SOCKET": variable}
        done = subprocess.run(
            [*MAIN, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
        )
        assert (done.returncode, done.stdout) == (0, "no leases\n"), (arguments, done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "extra"],
        ["show"],
        ["run", "--threads", "5"],
        ["run", "--threads", "5", "--", ""],
        ["run", "--pid", "1", "--", "true"],
        ["admit", "--threads", "nan"],
        ["admit", "--fraction", "inf"],
        ["admit", "--wait", "-1"],
        ["admit", "--gpus", "two"],
        ["renew", "lease-1"],
        ["events", "--after", "-1"],
        ["show", "lease-1", "--share", "0"],
        ["admit", "--label", "no-value"],
        ["admit", "--pid", "x"],
        ["reset"],
        ["reset", "gpu0", "--all"],
    ],
    ids=" ".join,
)
def test_called_wrongly(short_tmp: Path, arguments: list[str]) -> None:
    """Invalid arguments exit with 2 and a message, without a request to mpsd."""
    done = run_mpsctl(short_tmp / "none", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"mpsctl: .* \[invalid_request\]\n  hint: mps.*\n", done.stderr), done.stderr


@pytest.mark.parametrize("program", ["mpsctl", "mpsd"])
def test_libraries_of_others(node: Node, short_tmp: Path, program: str) -> None:
    """Modules in the caller's PYTHONPATH or current directory with the name of a library break nothing."""
    for name in ("click", "json", "socket", "msgspec", "decimal"):
        (short_tmp / f"{name}.py").write_text("raise SystemExit('this is not a library')\n")
    module, arguments = {"mpsctl": ("mpsd.cli.main", ["status"]), "mpsd": ("mpsd", ["check"])}[program]
    script = short_tmp / program
    imported_from = {"mpsctl": "mpsd.cli.main", "mpsd": "mpsd.__main__"}[program]
    script.write_text(f"from {imported_from} import main\nmain()\n")
    environment = {**os.environ, "PYTHONPATH": f"{short_tmp}", "MPSD_SOCKET": f"{node.socket}"}
    for command in ([sys.executable, "-m", module, *arguments], [sys.executable, str(script), *arguments]):
        done = subprocess.run(
            command, cwd=short_tmp, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), command
    (short_tmp / "gone").mkdir()
    lost = 'cd gone; rmdir ../gone; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", lost, "sh", sys.executable, str(script), *arguments],
        cwd=short_tmp, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# -- how it says no ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["admit", "--threads", "10", "--memory", "10XB"], 2, "invalid_request"),
        (["admit", "--threads", "10"], 2, "invalid_request"),
        (["admit", "--threads", "10", "--memory", "1GiB", "--name", "\x1b[2J"], 2, "invalid_request"),
        (["show", "lease-nobody-has"], 1, "not_found"),
        (["show", "../status"], 1, "not_found"),
        (["release", "lease-nobody-has"], 1, "not_found"),
        (["renew", "lease-nobody-has", "--ttl", "5"], 1, "not_found"),
        (["admit", "--threads", "10", "--memory", "1GiB", "--gpus", "3", "--wait", "forever"], 65, "never_fits"),
        (["admit", "--threads", "10", "--memory", "1GiB", "--priority", "1"], 77, "quota"),
        (["reset", "gpu7"], 1, "not_found"),
        (["admit", "--threads", "10", "--memory", "900GiB"], 65, "never_fits"),
    ],
)
def test_refusals(node: Node, arguments: list[str], status: int, code: str) -> None:
    """A refusal is one sentence with its code, then a hint, both on stderr, and an exit code of its kind."""
    done = node.mpsctl(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("mpsctl: ")
    assert first.endswith(f" [{code}]")
    assert re.fullmatch(r"  hint: \S.+", second)


@pytest.mark.root("call as another user")
def test_not_permitted(node: Node) -> None:
    """A user may read, but may neither end another's lease nor reset a daemon."""
    lease = json.loads(node.mpsctl("admit", "--threads", "5", "--memory", "1GiB", "-o", "json").stdout)["id"]
    assert mpsctl_as_nobody(node, "status").returncode == 0
    for arguments in (
        ["release", lease],
        ["renew", lease, "--ttl", "5"],
        ["reset", "gpu0"],
        ["admit", "--threads", "5", "--memory", "1GiB", "--pid", "1"],
    ):
        done = mpsctl_as_nobody(node, *arguments)
        assert done.returncode == 77, done.stderr
        assert "[not_permitted]" in done.stderr
    found = node.get(f"/v1/leases/{lease}").json
    assert (found["state"], found["expires"]) == ("granted", None)
    (listed,) = mpsctl_as_nobody(node, "leases", "--no-headers").stdout.splitlines()
    assert listed.split()[:4] == [lease, "granted", found["daemon"].removeprefix("gpu"), "5%"]


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "leases",
        "show x",
        "events",
        "events --follow",
        "admit --threads 1 --memory 1GiB --wait forever",
    ],
)
def test_unreachable(short_tmp: Path, command: str) -> None:
    """Without an mpsd every command exits with 69, names the socket, and says what to try."""
    done = run_mpsctl(short_tmp / "none", *command.split())
    assert (done.returncode, done.stdout) == (69, "")
    assert f"there is no socket {short_tmp}/none [unreachable]" in done.stderr
    assert "MPSD_SOCKET" in done.stderr


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_a_reader_that_has_seen_enough(node: Node) -> None:
    """When its reader closes the pipe, as `head -1` does, mpsctl exits without a message."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_mpsctl(node.socket, "config", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_ctrl_c(short_tmp: Path) -> None:
    """Ctrl-C ends it without a message, by the signal, so that a calling script ends too: 130 in a shell."""
    with answering(short_tmp / "s", None, None) as server:
        process = start_mpsctl(short_tmp / "s", "status")
        try:
            assert server.asked.wait(30)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            end(process)
    assert (process.returncode, stdout, stderr) == (-signal.SIGINT, "", "")


def test_unhealthy(short_tmp: Path) -> None:
    """Status exits with 1 unless mpsd reports a healthy node."""
    for healthy, status in ((True, 0), (False, 1), (None, 1)):
        with answering(short_tmp / f"{healthy}", http({"healthy": healthy})):
            assert run_mpsctl(short_tmp / f"{healthy}", "status", "-o", "json").returncode == status


# -- what it imports ---------------------------------------------------------------------------------------------------


def imported(program: str, *arguments: str) -> set[str]:
    """Return the modules that a Python program has imported at its end."""
    command = [sys.executable, "-c", f"import sys; {program}; print(*sys.modules, file=sys.stderr)", *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr.split())


def test_it_starts_light(node: Node) -> None:
    """`mpsctl status` imports click, json, socket, os, their dependencies, its own, and little more."""
    needed = imported("import click, json, os, socket")
    assert "click" in needed
    loaded = imported("import mpsd.cli.main as main; main._outcome()", "--socket", str(node.socket), "status")
    own = {module for module in loaded if module.split(".")[0] == "mpsd"}
    assert own == {
        "mpsd",
        "mpsd.client",
        "mpsd.client.client",
        "mpsd.client.connection",
        "mpsd.client.exchange",
        "mpsd.cli",
        *(f"mpsd.cli.{name}" for name in ("cells", "command", "commands", "commands.status")),
        *(f"mpsd.cli.{name}" for name in ("examples", "group", "groups", "main", "options")),
        *(f"mpsd.cli.{name}" for name in ("render", "tables", "users", "views")),
        "mpsd.core",
        "mpsd.core.errors",
        "mpsd.core.sanitize",
    }
    of_click = {"_locale", "locale"}  # once it has something to say in the user's language
    assert loaded - needed - own <= of_click | {"_signal", "pwd", "signal", "_struct", "struct"}
