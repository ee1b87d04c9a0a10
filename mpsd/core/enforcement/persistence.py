"""When a finding counts as a violation: some kinds must persist first, because honest programs cause them. Pure.

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


def doubts(suspected: Iterable[Violation], lease_id: str) -> list[str]:
    """Describe the findings about a lease that do not count yet: until they do, its state is unknown."""
    return [
        f"{each.because}; that is a violation if it lasts for {PERSISTS:g} s"
        for each in suspected
        if each.lease == lease_id
    ]
