"""Granted and held amounts, as a table and as CSV."""

import csv
import io
import re
from typing import Any

import pytest

from mpsd.cli.history import usage
from mpsd.cli.tables import PLAIN
from mpsd.core.sanitize import plain

HOUR = 3600
GIB = 1024**3


def answer(*keys: str | None, by: str = "name", **more: Any) -> Any:
    """Return an answer of the API with an hour of half a GPU and 2 GiB for each key."""
    total = {
        "seconds": HOUR,
        "leases": 3,
        "threads_granted": 50.0 * HOUR,
        "memory_granted": 2.0 * GIB * HOUR,
        "memory_held": 0.5 * GIB * HOUR,
        "clients": 1.0 * HOUR,
    }
    series: list[dict[str, Any]] = [{"key": key, "total": total, "samples": []} for key in keys]
    return {"history": series, "by": by, "left_out": 0, "gaps": [], **more}


def test_a_table() -> None:
    """The table has hours of whole GPUs and of GiB, and the held part of the latter."""
    heading, row = usage.listed(answer("train"), {}).text(PLAIN).splitlines()
    assert re.split(" {2,}", heading) == ["NAME", "LEASES", "GPU HOURS", "GIB HOURS", "HELD GIB HOURS", "HELD"]
    assert row.split() == ["train", "3", "0.5000", "2.00", "0.5000", "25%"]


def test_what_is_not_known() -> None:
    """An amount without a reading, or a missing key, is a dash in the table, and empty in CSV."""
    found = answer(None)
    found["history"][0]["total"]["memory_held"] = None
    assert usage.listed(found, {}).text(PLAIN).splitlines()[1].split() == ["-", "3", "0.5000", "2.00", "-", "-"]
    assert usage.listed(found, {}).csv().splitlines()[1] == ",3,0.500000,2.000000,,,1.000000"


def test_gaps_are_told() -> None:
    """Notes below the table name gaps without samples, and the number of keys left out."""
    gap = {"since": "2026-11-23T10:00:00Z", "until": "2026-11-23T11:00:00Z", "because": "the disk is full"}
    lines = usage.listed(answer("a", gaps=[gap], left_out=7), {}).text(PLAIN).splitlines()
    assert lines[-2].endswith(": no samples: the disk is full")
    assert lines[-1] == "note: 7 more with less are left out"


def test_nothing() -> None:
    """An empty table says that nothing was granted."""
    assert usage.listed(answer(), {}).text(PLAIN) == "nothing was granted"


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_formula(name: str) -> None:
    """No name becomes a formula in a spreadsheet."""
    (row,) = csv.reader(io.StringIO(usage.listed(plain(answer(name)), {}).csv(headings=False)))
    assert row[0][0] not in "=+-@\t\r"


@pytest.mark.parametrize("name", ['a,"b"', "a;b", "\x1b[2J", "a\nb", "ä"])
def test_any_name(name: str) -> None:
    """Any name is one cell of one row, and does not act on a terminal."""
    text = usage.listed(plain(answer(name)), {}).csv(headings=False)
    ((key, *_),) = csv.reader(io.StringIO(text))
    assert key == plain(name)
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_gpus_by_index() -> None:
    """A GPU has its index, as in the other tables; a GPU that is gone has its UUID."""
    lines = usage.listed(answer("GPU-a", "GPU-b", by="gpu"), {"GPU-a": "0"}).text(PLAIN).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0", "GPU-b"]
