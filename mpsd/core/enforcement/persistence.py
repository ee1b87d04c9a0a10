"""When a finding counts as a violation, and when the GPUs are read for it. Pure.

Some kinds must persist first, because honest programs cause them.

A program that replaces itself is there beside its predecessor for as long as the kernel takes down the predecessor.
NVML lists a process a moment before a control daemon does, and a moment longer.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from mpsd.core.enforcement.violations import Violation
from mpsd.core.model import ViolationKind

_BY_NVML: Final = frozenset({ViolationKind.MEMORY, ViolationKind.OUTSIDE})
"""The kinds of violation that only a reading of the GPUs shows."""

_MOMENTARY: Final = _BY_NVML | {ViolationKind.PROCESSES}
"""The kinds of violation that honest programs cause for a moment."""

PERSISTS: Final = 1.0
"""Seconds for which such a finding must persist before it counts."""


def suspected(
    found: Collection[Violation],
    counted: Collection[Violation],
    before: Mapping[Violation, float],
    now: float,
    *,
    read: bool,
) -> dict[Violation, float]:
    """Return those of the present findings that do not count yet, each with the time since when it persists.

    `counted` are the findings that count already: they do so until they are no longer found. `before` is what this
    function returned at the last look, and `now` is in seconds of the same clock. A finding from NVML begins to count
    with a reading, so `read` tells whether the GPUs were read since the last look.
    """
    since = {each: before.get(each, now) for each in found if each.kind in _MOMENTARY and each not in counted}
    return {each: at for each, at in since.items() if now < at + PERSISTS or (each.kind in _BY_NVML and not read)}


def next_reading(suspected: Mapping[Violation, float], found: Iterable[Violation], last: float) -> float | None:
    """Return when the GPUs must be read again for the sake of findings; None for not at all. A past time means at once.

    `suspected` are the findings that do not count yet, and `found` those that count. A client without a memory limit
    shows what it holds to NVML alone, so the GPUs are read each second while there is one. `last` is the time of the
    last such reading: there is at most one a second, since any user can cause findings at any rate.
    """
    due = [at + PERSISTS for at in suspected.values()]
    if any(each.kind is ViolationKind.LIMITS for each in found):
        due.append(last + PERSISTS)
    return max(min(due), last + PERSISTS) if due else None


def doubts(suspected: Iterable[Violation], lease_id: str) -> list[str]:
    """Describe the findings about a lease that do not count yet: until they do, its state is unknown."""
    return [
        f"{each.because}; that is a violation if it lasts for {PERSISTS:g} s"
        for each in suspected
        if each.lease == lease_id
    ]
