"""Lists fit the terminal: columns shrink in a fixed order, nothing wraps, and every form has the same rows."""

import os
import pty
import re
import subprocess
import sys

import pytest
import yaml

from mpsd.cli.render import as_yaml
from mpsd.cli.tables import PLAIN, Column, Figure, Look, bar, table
from tests.cli.conftest import ROOT
from tests.node import Node

COLUMNS = (Column("ID"), Column("SIZE"), Column("AGE", rank=1), Column("UUID", wide=True), Column("NAME", 2))
ROWS = (
    ("a", Figure("8GiB", 8 << 30), "2m", "U-1", "first"),
    ("b", Figure("512MiB", 512 << 20), "-", "U-2", "second"),
)


def lines(look: Look) -> list[str]:
    return table(COLUMNS, ROWS, look, none="none").splitlines()


def test_widths() -> None:
    """The column with the highest number shrinks first; columns without a number keep their width."""
    assert lines(PLAIN) == ["ID  SIZE    AGE  NAME", "a   8GiB    2m   first", "b   512MiB  -    second"]
    assert lines(Look(width=23)) == lines(PLAIN)
    assert lines(Look(width=22)) == ["ID  SIZE    AGE", "a   8GiB    2m", "b   512MiB  -"]
    assert lines(Look(width=14)) == lines(Look(width=1)) == ["ID  SIZE", "a   8GiB", "b   512MiB"]
    assert lines(Look(wide=True))[0] == "ID  SIZE    AGE  UUID  NAME"
    assert lines(Look(headings=False)) == ["a  8GiB    2m  first", "b  512MiB  -   second"]


def test_a_last_column_that_is_too_long() -> None:
    """A column that cannot shrink is cut at the terminal's edge, and shows that it was."""
    columns = (Column("ID"), Column("NAME"))
    assert table(columns, [("a", "x" * 40)], Look(width=20), none="").splitlines()[1] == "a   " + "x" * 15 + "…"


@pytest.mark.parametrize(("by", "order"), [("size", "ba"), ("NAME", "ab"), ("age", "ba"), (None, "ab")])
def test_sorting(by: str | None, order: str) -> None:
    """A table is sorted by the values of a column, not by their texts."""
    assert "".join(line[0] for line in lines(Look(headings=False, sort=by))) == order


def test_colour() -> None:
    """Colour is additional: without it, the text is the same."""
    states = (Column("STATE"), Column("NAME"))
    rows = [("ready", "a"), ("failed", "b"), ("waiting, place 2", "c")]
    coloured = table(states, rows, Look(colour=True), none="")
    assert "\x1b[32mready" in coloured
    assert "\x1b[31mfailed" in coloured
    assert "\x1b[33mwaiting" in coloured
    bare = re.sub(r"\x1b\[\d*m", "", coloured)
    assert [line.split() for line in bare.splitlines()] == [
        line.split() for line in table(states, rows, PLAIN, none="").splitlines()
    ]


@pytest.mark.parametrize(
    ("part", "drawn"),
    [(0.0, ".........."), (0.001, "#........."), (0.5, "#####....."), (1.0, "##########"), (1.5, "#" * 10)],
)
def test_bars(part: float, drawn: str) -> None:
    """A bar has ten characters; any usage is visible, and a terminal without UTF-8 gets ASCII."""
    assert bar(part, "ascii") == drawn
    assert bar(part, "UTF-8") == drawn.replace("#", "█").replace(".", "░")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"a": []},
        {"a": [1, {"b": None, "c": [True]}], "d": {"e f": "x: y\n'\"# -"}},
        [[1, [2]], {"a": 1.5}],
        "no",
    ],
)
def test_yaml(answer: object) -> None:
    """A YAML reader gets the same answer from the YAML output."""
    assert yaml.safe_load(as_yaml(answer)) == answer


# -- of a living node --------------------------------------------------------------------------------------------------


def on_a_terminal(node: Node, *arguments: str, **variables: str) -> str:
    """Return the output of mpsctl on a terminal."""
    parent, child = pty.openpty()
    try:
        command = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), *arguments]
        environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "LANG": "C.UTF-8", **variables}
        subprocess.run(command, stdout=child, env=environment, cwd=ROOT, check=True)
        return os.read(parent, 65536).decode()
    finally:
        os.close(parent)
        os.close(child)


LISTS = ("status", "gpus", "daemons", "clients", "leases")


@pytest.fixture
def full(node: Node) -> Node:
    """Return a node with leases: granted, waiting, with a long name, with an end."""
    for options in (("--name", "n" * 60, "--ttl", "1h"), ("--gpus", "2", "--label", "team=vision")):
        assert node.mpsctl("admit", "--threads", "40", "--memory", "1536MiB", *options).returncode == 0
    return node


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("command", LISTS)
def test_nothing_wraps(full: Node, command: str, width: int) -> None:
    """No row of a table is wider than the terminal."""
    said = on_a_terminal(full, command, COLUMNS=f"{width}", NO_COLOR="1")
    rows = said.split("\r\n\r\n")[1:-1] if command == "status" else [said]
    assert [line for part in rows for line in part.splitlines() if len(line) > width] == []


def test_forms(full: Node) -> None:
    """Every form of a list has the same leases, and filters select among them."""
    found = full.leases()
    ids = [each["id"] for each in found]
    assert full.mpsctl("leases", "-o", "name").stdout.split() == ids
    assert yaml.safe_load(full.mpsctl("gpus", "-o", "yaml").stdout) == full.get("/v1/gpus").json
    assert [line.split()[0] for line in full.mpsctl("leases", "--no-headers").stdout.splitlines()] == ids
    assert "team=vision" in full.mpsctl("leases", "-o", "wide").stdout
    assert full.mpsctl("leases", "--gpu", "1", "-o", "name").stdout.split() == ids[1:]
    assert full.mpsctl("leases", "--mine", "-o", "name").stdout.split() == ids
    assert full.mpsctl("leases", "--user", "4000000", "-o", "name").stdout == ""
    for arguments, says in (
        (("--user", "nobody-at-all"), "there is no user 'nobody-at-all'"),
        (("--gpu", "7"), "there is no GPU '7'"),
        (("--sort", "colour"), "there is no column 'colour': choose lease, state, gpu"),
        (("--mine", "--user", "root"), "--mine or --user"),
    ):
        done = full.mpsctl("leases", *arguments)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_ended_leases(full: Node) -> None:
    """An ended lease is listed with --all, at the end."""
    first, second = full.mpsctl("leases", "-o", "name").stdout.split()
    assert full.mpsctl("release", first).returncode == 0
    assert full.mpsctl("leases", "-o", "name").stdout.split() == [second]
    shown = full.mpsctl("leases", "--all", "--no-headers").stdout.splitlines()
    assert [line.split()[:2] for line in shown if first in line] == [[first, "ended"]]
    assert shown.index(next(line for line in shown if first in line)) > 0


def test_a_terminal(full: Node) -> None:
    """On a terminal a list is coloured, and without colour if NO_COLOR is set."""
    assert "\x1b[32mready" in on_a_terminal(full, "daemons")
    assert "\x1b" not in on_a_terminal(full, "daemons", NO_COLOR="1")


def test_no_terminal(full: Node) -> None:
    """Output for a program is never cut, whatever COLUMNS says."""
    done = full.mpsctl("leases", env={**os.environ, "COLUMNS": "20"})
    assert "n" * 60 in done.stdout
