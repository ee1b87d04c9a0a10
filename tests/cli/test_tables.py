"""Lists fit the terminal: texts are cut before columns are dropped, nothing wraps, and every form has the same rows."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mpsd.cli.cells import CUT, cells, cut, fold
from mpsd.cli.tables import PLAIN, Column, Figure, Listed, Look, bar, columns_of, table
from mpsd.core.sanitize import plain
from tests.cli.conftest import ROOT
from tests.node import Node

COLUMNS = columns_of(
    ("ID", "SIZE", "AGE", "TOTAL", "UUID", "NAME"), drops=("NAME", "AGE"), wide=("UUID",), data=("TOTAL",)
)
ROWS = (
    ("a", Figure("8GiB", 8 << 30), "2m", Figure("9GiB", 9 << 30), "U-1", "first"),
    ("b", Figure("512MiB", 512 << 20), "-", Figure("unknown", None), "U-2", "second of two"),
)
LISTED = Listed(COLUMNS, ROWS, "none")


def lines(look: Look) -> list[str]:
    return LISTED.text(look).splitlines()


def test_widths() -> None:
    """A text is cut to a readable width; then the columns with the highest rank go; at last, anything is cut."""
    assert lines(PLAIN) == ["ID  SIZE    AGE  NAME", "a   8GiB    2m   first", "b   512MiB  -    second of two"]
    assert lines(Look(width=30)) == lines(PLAIN)
    assert lines(Look(width=25)) == ["ID  SIZE    AGE  NAME", "a   8GiB    2m   first", "b   512MiB  -    second …"]
    assert lines(Look(width=24)) == ["ID  SIZE    AGE", "a   8GiB    2m", "b   512MiB  -"]
    assert lines(Look(width=14)) == ["ID  SIZE", "a   8GiB", "b   512MiB"]
    assert lines(Look(width=8)) == ["ID  SIZE", "a   8GiB", "b   512…"]
    assert lines(Look(width=1)) == ["…", "a", "b"]
    assert lines(Look(wide=True))[0] == "ID  SIZE    AGE  UUID  NAME"
    assert lines(Look(headings=False)) == ["a  8GiB    2m  first", "b  512MiB  -   second of two"]


def test_one_long_name() -> None:
    """A long name costs nobody a column: it alone is cut."""
    columns = columns_of(("ID", "USER", "NAME", "AGE"), drops=("AGE",), cuts=("USER", "NAME"))
    rows = [("a", "anna", "x" * 200, "2m"), ("b", "bernadette", "y", "3m")]
    said = table(columns, rows, Look(width=40), none="").splitlines()
    assert said[0].split() == ["ID", "USER", "NAME", "AGE"]
    assert said[1].split() == ["a", "anna", "x" * 18 + CUT, "2m"]
    assert said[2].split() == ["b", "bernadette", "y", "3m"]


TEXTS = st.text(max_size=30) | st.sampled_from(["漢字" * 20, "e\u0301" * 30, "👩‍🔬" * 9, "한국어", "☎️" * 12, "x" * 300])


@given(
    st.lists(st.tuples(TEXTS, TEXTS, TEXTS, TEXTS), min_size=1, max_size=4),
    st.integers(1, 120),
    st.booleans(),
)
def test_any_names(names: list[tuple[str, ...]], width: int, headings: bool) -> None:  # noqa: FBT001 - hypothesis
    """No line is wider than the terminal, and nothing is cut without an ellipsis, whatever the names are."""
    columns = columns_of(("ID", "NAME", "AGE", "LABELS"), drops=("AGE",), cuts=("NAME", "LABELS"))
    rows = plain([[*each] for each in names])
    look = Look(width=width, headings=headings)
    said = table(columns, rows, look, none="").split("\n")
    assert [line for line in said if cell_len(line) > width] == []
    for row, line in zip(rows, said[headings:], strict=True):
        whole = "  ".join(row)
        if CUT not in line and "AGE" in said[0]:
            assert " ".join(line.split()) == " ".join(whole.split())


@given(TEXTS, st.integers(1, 50))
def test_cuts(name: str, width: int) -> None:
    """A text that fits is unchanged; of another, the beginning is left, with an ellipsis."""
    text = plain(name)
    short = cut(text, width)
    assert cells(short) <= width
    assert short == text or (short.endswith(CUT) and text.startswith(short.removesuffix(CUT)))
    assert (short == text) is (cells(text) <= width)


@given(TEXTS)
def test_cells(name: str) -> None:
    """No text takes more cells than are counted, by the count of the library that draws `mpsctl top`."""
    assert cell_len(plain(name)) <= cells(plain(name))


@given(st.lists(TEXTS, min_size=1, max_size=9), st.integers(20, 90))
def test_folds(words: list[str], width: int) -> None:
    """A folded line has the same words; only a word that is wider than the terminal sticks out."""
    text = plain(" ".join(words)).strip(" ")
    folded = fold(text, width, 4)
    assert folded.split() == text.split()
    assert [each for each in folded.split("\n") if cells(each) > width and " " in each.strip(" ")] == []


@pytest.mark.parametrize(
    ("by", "order"),
    [("size", "ba"), ("-size", "ab"), ("name", "ab"), ("-name", "ba"), ("total", "ab"), ("-total", "ab"), (None, "ab")],
)
def test_sorting(by: str | None, order: str) -> None:
    """A list is sorted by the values of a column, not by their texts, up or down; what is unknown comes last."""
    assert LISTED.ordered(by).names() == "\n".join(order)


def test_csv() -> None:
    """CSV has all columns, figures as numbers, an unknown value as nothing, and no formula."""
    assert LISTED.csv().splitlines() == [
        "id,size,age,total,uuid,name",
        "a,8589934592,2m,9663676416,U-1,first",
        "b,536870912,,,U-2,second of two",
    ]
    odd = Listed(columns_of(("A", "B", "")), [("=1+1", 'a,"b"', "#.."), ("\uff1d1+1", "", "#..")], "none")
    assert odd.csv(headings=False).splitlines() == ['\'=1+1,"a,""b"""', "'\uff1d1+1,"]


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
    assert [line for part in rows for line in part.splitlines() if cells(line) > width] == []
    if command == "leases" and width > 80:
        assert {"NAME", "PID", "AGE"} <= {*rows[0].splitlines()[0].split()}


def test_forms(full: Node) -> None:
    """Every form of a list has the same leases, and filters select among them."""
    found = full.leases()
    ids = [each["id"] for each in found]
    assert full.mpsctl("leases", "-o", "name").stdout.split() == ids
    for command, named in (
        ("gpus", "gpu"),
        ("daemons", "daemon"),
        ("clients", "pid"),
        ("leases", "lease"),
        ("usage", "user"),
    ):
        names = full.mpsctl(command, "-o", "name").stdout.split()
        heading, *rows = csv.reader(io.StringIO(full.mpsctl(command, "-o", "csv").stdout))
        assert heading[0] == named
        assert [row[0] for row in rows] == names
        assert {len(row) for row in rows} <= {len(heading)}
        assert json.loads(full.mpsctl(command, "-o", "json").stdout)
        shown = full.mpsctl(command, "-o", "wide").stdout.splitlines()
        assert [line.split()[0] for line in shown[1 : len(names) + 1]] == names
    (held, *_), *_ = csv.reader(io.StringIO(full.mpsctl("events", "-o", "csv").stdout))
    assert held == "seq"
    assert [line.split()[0] for line in full.mpsctl("leases", "--no-headers").stdout.splitlines()] == ids
    assert "team=vision" in full.mpsctl("leases", "-o", "wide").stdout
    for arguments, chosen in (
        (("--gpu", "1"), ids[1:]),
        (("--name", "nn*"), ids[:1]),
        (("--name", "nn"), []),
        (("--label", "team"), ids[1:]),
        (("--label", "team=vision"), ids[1:]),
        (("--label", "team=other"), []),
        (("--state", "granted", "--state", "active"), ids),
        (("--state", "waiting"), []),
        (("--sort", "-lease"), sorted(ids, reverse=True)),
    ):
        assert full.mpsctl("leases", *arguments, "-o", "name").stdout.split() == chosen, arguments
    assert full.mpsctl("leases", "--mine", "-o", "name").stdout.split() == ids
    assert full.mpsctl("leases", "--user", "4000000", "-o", "name").stdout == ""
    for wrong, says in (
        (("--user", "nobody-at-all"), "there is no user 'nobody-at-all'"),
        (("--gpu", "7"), "there is no GPU '7': choose 0 (gpu0), 1 (gpu1)"),
        (("--state", "gone"), "'gone' is not one of 'waiting', 'granted', 'active', 'ended'"),
        (("--sort", "colour"), "there is no column 'colour': choose lease, state, gpu"),
        (("--mine", "--user", "root"), "--mine or --user"),
    ):
        refused = full.mpsctl("leases", *wrong)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr


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
