"""Granted and held amounts over a span of time, as a list in hours."""

from typing import TYPE_CHECKING, Final

from mpsd.cli.render import when
from mpsd.cli.tables import Column, Figure, Listed, columns_of
from mpsd.cli.users import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mpsd.client import answer_types

_HOUR: Final = 3600
_GIB: Final = 1024**3
_ALL_THREADS: Final = 100
"""Percent of a GPU's threads."""

_HEADINGS: Final = ("LEASES", "GPU HOURS", "GIB HOURS", "HELD GIB HOURS", "HELD", "CLIENT HOURS")


def columns(by: str) -> tuple[Column, ...]:
    """Return the columns of the totals by user, GPU, name, lease, or `label:KEY`."""
    heading = by.partition(":")[2].upper() or by.upper()
    return columns_of((heading, *_HEADINGS), drops=("HELD GIB HOURS", "HELD"), wide=("CLIENT HOURS",), cuts=(heading,))


def listed(answer: "answer_types.History", gpus: "Mapping[str, str]") -> Listed:
    """Return the totals, the greatest first; `gpus` has the indexes of GPUs by UUID."""
    rows = [
        (
            _key(answer["by"], each["key"], gpus),
            Figure(str(leases), leases),
            _hours(threads),
            _hours(granted),
            Figure("-", None) if held is None else _hours(held),
            _part(held, granted),
            _hours(clients),
        )
        for each in sorted(answer["history"], key=lambda each: each["total"]["threads_granted"], reverse=True)
        for leases, threads, granted, held, clients in [_amounts(each["total"])]
    ]
    return Listed(columns(answer["by"]), rows, "nothing was granted", [*_notes(answer)])


def _notes(answer: "answer_types.History") -> "Iterator[str]":
    for gap in answer["gaps"]:
        yield f"note: {when(gap['since'])} to {when(gap['until'])}: no samples: {gap['because']}"
    if answer["left_out"]:
        yield f"note: {answer['left_out']} more with less are left out"


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


def _key(by: str, key: str | None, gpus: "Mapping[str, str]") -> str:
    if key is None:
        return "-"
    if by == "user" and key.isdecimal():
        return name_of(int(key))
    return gpus.get(key, key) if by == "gpu" else key


def _hours(hours: float) -> Figure:
    return Figure(f"{hours:.2f}" if hours >= 1 or not hours else f"{hours:.4f}", hours, f"{hours:.6f}")


def _part(held: float | None, granted: float) -> Figure:
    """Return the held amount as a percentage of the granted one."""
    if held is None or not granted:
        return Figure("-", None)
    return Figure(f"{100 * held / granted:.0f}%", held / granted, f"{100 * held / granted:.2f}")
