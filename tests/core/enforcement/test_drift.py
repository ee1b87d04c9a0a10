"""Drift: which limits are not as set, since when, and by whose command."""

from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.enforcement.ceiling import ANYTHING, by_commands
from mpsd.core.enforcement.drift import drift, in_force
from mpsd.core.model import Drift, Limits, ReadBack
from mpsd.core.mps.limits import NOTHING
from mpsd.core.quantities import ActiveThreadPercentage, Bounds, PinnedDeviceMemLimit
from mpsd.core.units import GIB, MIB

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
LATER: Final = NOW + timedelta(seconds=5)
WANTED: Final = Limits(ActiveThreadPercentage(500), PinnedDeviceMemLimit(8 * 1024))
AS_SET: Final = ReadBack(500, 8 * GIB)

PERCENTAGE: Final = "active_thread_percentage"
MEMORY: Final = "pinned_device_mem_limit"
SET_10: Final = "set_default_active_thread_percentage 10"
SET_1G: Final = "set_default_device_pinned_mem_limit 0 1G"


def test_own_limits() -> None:
    """A value that mpsd itself set is no drift.

    This holds for each limit separately: mpsd may have been killed between two of them.
    """
    own = (ReadBack(100, GIB), ReadBack(250, 2 * GIB))
    assert drift(WANTED, ReadBack(100, 2 * GIB), (), (), NOW, own=own) == ()
    (found,) = drift(WANTED, ReadBack(100, 4 * GIB), (), (), NOW, own=own)
    assert (found.limit, found.found) == (MEMORY, 4 * GIB)


def test_in_force() -> None:
    """The limits to keep are the widest of the daemon and its servers, by what mpsd set where that is known."""
    low, high = ReadBack(100, 512 * MIB), ReadBack(600, GIB)
    kept = Limits(ActiveThreadPercentage(600), PinnedDeviceMemLimit(2047))
    assert in_force([low, high], [low, high]) == kept
    assert in_force([low, high], []) == kept
    assert in_force([low], [low, high]) == Limits(ActiveThreadPercentage(100), PinnedDeviceMemLimit(512))
    assert in_force([ReadBack(1000, None)], [low, high]) == kept
    assert in_force([ReadBack(0, 2**64)], []) == Limits(ActiveThreadPercentage(1), None)


def test_command_is_named() -> None:
    """Each limit is named with the latest command that sets it, and with no other."""
    foreign = (
        "set_default_active_thread_percentage 20",
        SET_1G,
        SET_10,
        "start_server -uid 0",
        "set_active_thread_percentage 7 5",
    )
    percentage, memory = drift(WANTED, ReadBack(100, GIB), (), foreign, NOW)
    assert (percentage.command, memory.command) == (SET_10, SET_1G)


def test_what_is_known_already_stays_known() -> None:
    """Continuing drift keeps its time and its command."""
    first = drift(WANTED, ReadBack(100, 8 * GIB), (), (SET_10,), NOW)
    assert drift(WANTED, ReadBack(100, 8 * GIB), first, (), LATER) == first
    assert drift(WANTED, ReadBack(100, 8 * GIB), first, (SET_1G,), LATER) == first


def test_drift_that_goes_further() -> None:
    """Drift to another value keeps its first time, and has the command that caused the new value, if known."""
    first = drift(WANTED, ReadBack(100, 8 * GIB), (), (SET_10,), NOW)
    (known,) = drift(WANTED, ReadBack(200, 8 * GIB), first, ("set_default_active_thread_percentage 20",), LATER)
    assert (known.since, known.found, known.command) == (NOW, 20.0, "set_default_active_thread_percentage 20")
    (unknown,) = drift(WANTED, ReadBack(200, 8 * GIB), first, (), LATER)
    assert (unknown.since, unknown.command) == (NOW, None)


def test_command_that_comes_late() -> None:
    """A command that appears in the log only after the limit was read is still named."""
    first = drift(WANTED, ReadBack(100, 8 * GIB), (), (), NOW)
    (named,) = drift(WANTED, ReadBack(100, 8 * GIB), first, (SET_10,), LATER)
    assert (named.since, named.command) == (NOW, SET_10)


def test_drift_that_is_over() -> None:
    """A limit that reads back as set is no longer drift, even after foreign commands; new drift has a new time."""
    first = drift(WANTED, ReadBack(100, GIB), (), (SET_10, SET_1G), NOW)
    half = drift(WANTED, ReadBack(500, GIB), first, ("set_default_active_thread_percentage 50",), LATER)
    assert [each.limit for each in half] == [MEMORY]
    assert drift(WANTED, AS_SET, half, (), LATER) == ()
    (again,) = drift(WANTED, ReadBack(100, 8 * GIB), half, (), LATER)
    assert (again.limit, again.since) == (PERCENTAGE, LATER)


@given(
    st.integers(1, 1000),
    st.none() | st.integers(1, 2**20),
    st.integers(0, 1000),
    st.none() | st.integers(1, 2**20).map(lambda mebibytes: mebibytes * MIB),
    st.lists(st.sampled_from([SET_10, SET_1G, "quit", "bogus"]), max_size=4),
)
def test_any_reading(tenths: int, mebibytes: int | None, found: int, memory: int | None, foreign: list[str]) -> None:
    """Drift exists exactly where the reported value is not the one that the set limit reports."""
    limit = None if mebibytes is None else PinnedDeviceMemLimit(mebibytes)
    wanted, read = Limits(ActiveThreadPercentage(tenths), limit), ReadBack(found, memory)
    result: tuple[Drift, ...] = drift(wanted, read, (), tuple(foreign), NOW)
    expected = [PERCENTAGE] * (tenths != found) + [MEMORY] * ((limit.as_reported.bytes if limit else None) != memory)
    assert [each.limit for each in result] == expected
    assert drift(wanted, read, result, (), LATER) == result


@pytest.mark.parametrize(
    ("command", "fresh", "old"),
    [
        ("set_active_thread_percentage 7 80", ReadBack(800, 0), ReadBack(800, 0)),
        ("set_active_thread_percentage 7 12.34", ReadBack(124, 0), ReadBack(124, 0)),
        ("set_active_thread_percentage 8 80", NOTHING, NOTHING),
        ("set_device_pinned_mem_limit 7 0 3G", ReadBack(0, 3 * GIB), ReadBack(0, 3 * GIB)),
        ("set_device_pinned_mem_limit 7 0 0", ReadBack(0, None), ReadBack(0, None)),
        # A server has the defaults of the moment at which it started.
        ("set_default_active_thread_percentage 80", ReadBack(800, 0), NOTHING),
        ("set_default_device_pinned_mem_limit 0 512M", ReadBack(0, 512 * MIB), NOTHING),
        ("\tset_active_thread_percentage\v7\f80", ReadBack(800, 0), ReadBack(800, 0)),
        # MPS's reading of these is unknown, or unexpected.
        ("set_active_thread_percentage 7 1_0", ReadBack(1000, 0), ReadBack(1000, 0)),
        ("set_active_thread_percentage 7 \u0663", ReadBack(1000, 0), ReadBack(1000, 0)),
        ("set_active_thread_percentage \u0663 80", ReadBack(800, 0), ReadBack(800, 0)),
        ("set_device_pinned_mem_limit 7 0 17179869185G", ReadBack(0, None), ReadBack(0, None)),
        ("set_active_thread_percentage +7 80", ReadBack(800, 0), ReadBack(800, 0)),
        ("set_active_thread_percentage 7 80%", ReadBack(1000, 0), ReadBack(1000, 0)),
        ("set_active_thread_percentage 7", ReadBack(1000, 0), ReadBack(1000, 0)),
        ("set_active_thread_percentage", NOTHING, NOTHING),
        ("set_device_pinned_mem_limit 7 0 -1G", ReadBack(0, None), ReadBack(0, None)),
        ("set_device_pinned_mem_limit 7 0 100", ReadBack(0, None), ReadBack(0, None)),
        ("get_active_thread_percentage 7", NOTHING, NOTHING),
        ("", NOTHING, NOTHING),
        (" ", NOTHING, NOTHING),
    ],
)
def test_what_others_opened(command: str, fresh: ReadBack, old: ReadBack) -> None:
    """A command counts for the server that it names or may name; one that sets defaults counts for a fresh server."""
    assert by_commands([command], 7, fresh=True).most == fresh
    assert by_commands([command], 7, fresh=False).most == old


def test_the_widest_and_the_narrowest_count() -> None:
    """Of several commands, each limit counts at its widest and at its narrowest."""
    commands = ["set_active_thread_percentage 7 80", "set_active_thread_percentage 7 25"]
    assert by_commands(commands, 7, fresh=False) == Bounds(ReadBack(250, None), ReadBack(800, 0))
    none = by_commands([*commands, "set_device_pinned_mem_limit 7 0 0"], 7, fresh=False)
    assert none == Bounds(ReadBack(250, 0), ReadBack(800, None))
    doubt = ["set_active_thread_percentage 7 x", "set_device_pinned_mem_limit 7 0 x"]
    assert by_commands([*commands, *doubt], 7, fresh=False) == ANYTHING
