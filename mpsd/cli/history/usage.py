"""Granted and held amounts over a span of time, as a table in hours, and as CSV.

Users choose names and labels. A table shows them through `sanitize.plain`, as all output; in CSV, no name becomes a
formula in a spreadsheet.
"""

import csv
import io
from typing import TYPE_CHECKING, Final

from mpsd.cli.render import when
from mpsd.cli.tables import Figure, Look, columns_of, table
from mpsd.cli.users import name_of
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mpsd.client import answer_types

_HOUR: Final = 3600
_GIB: Final = 1024**3
_ALL_THREADS: Final = 100
"""Percent of a GPU's threads."""

_HEADINGS: Final = ("LEASES", "GPU HOURS", "GIB HOURS", "HELD GIB HOURS", "HELD", "CLIENT HOURS")

_FORMULA: Final = frozenset("=+-@\t\r")
"""First characters of a cell that a spreadsheet reads as a formula."""


def view(answer: "answer_types.History", gpus: "Mapping[str, str]", look: Look) -> str:
    """Return the totals as a table, the greatest first; `gpus` has the indexes of GPUs by UUID."""
    heading = answer["by"].partition(":")[2].upper() or answer["by"].upper()
    rows = [
        (
            _key(answer["by"], each["key"], gpus),
            Figure(str(leases), leases),
            _hours(threads),
            _hours(granted),
            Figure("-", -1) if held is None else _hours(held),
            _part(held, granted),
            _hours(clients),
        )
        for each in sorted(answer["history"], key=lambda each: each["total"]["threads_granted"], reverse=True)
        for leases, threads, granted, held, clients in [_amounts(each["total"])]
    ]
    columns = columns_of((heading, *_HEADINGS), drops=("HELD GIB HOURS", "HELD"), wide=("CLIENT HOURS",))
    listed = table(columns, rows, look, none="nothing was granted")
    return "\n".join([listed, *_notes(answer)])


def _notes(answer: "answer_types.History") -> "Iterator[str]":
    for gap in answer["gaps"]:
        yield f"note: {when(gap['since'])} to {when(gap['until'])}: no samples: {gap['because']}"
    if answer["left_out"]:
        yield f"note: {answer['left_out']} more with less are left out"


def as_csv(answer: "answer_types.History", *, headings: bool = True) -> str:
    """Return the totals as CSV (RFC 4180), in full precision; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    by = answer["by"].partition(":")[2] or answer["by"]
    if headings:
        writer.writerow([by, "leases", "gpu_hours", "gib_hours_granted", "gib_hours_held", "client_hours"])
    for each in answer["history"]:
        leases, threads, granted, held, clients = _amounts(each["total"])
        key = _key(answer["by"], each["key"], {}, none="")
        writer.writerow(
            [
                f"'{key}" if key[:1] in _FORMULA else key,
                leases,
                f"{threads:.6f}",
                f"{granted:.6f}",
                "" if held is None else f"{held:.6f}",
                f"{clients:.6f}",
            ]
        )
    return text.getvalue().rstrip("\n")


def _amounts(total: "answer_types.HistoryTotal") -> tuple[int, float, float, float | None, float]:
    """Return the leases, and hours of whole GPUs, of GiB granted and held, and of clients."""
    held = total["memory_held"]
    return (
        total["leases"],
        total["threads_granted"] / _ALL_THREADS / _HOUR,
        total["memory_granted"] / _GIB / _HOUR,
        None if held is None else held / _GIB / _HOUR,
        total["clients"] / _HOUR,
    )


def _key(by: str, key: str | None, gpus: "Mapping[str, str]", *, none: str = "-") -> str:
    if key is None:
        return none
    if by == "user" and key.isdecimal():
        return name_of(int(key))
    return gpus.get(key, plain(key)) if by == "gpu" else plain(key)


def _hours(hours: float) -> Figure:
    return Figure(f"{hours:.2f}" if hours >= 1 or not hours else f"{hours:.4f}", hours)


def _part(held: float | None, granted: float) -> Figure:
    """Return the held amount as a percentage of the granted one."""
    if held is None or not granted:
        return Figure("-", -1)
    return Figure(f"{100 * held / granted:.0f}%", held / granted)
