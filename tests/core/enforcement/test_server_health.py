"""The health of servers, from their logs and their state words."""

from datetime import UTC, datetime, timedelta
from typing import Final

from mpsd.core.enforcement.server_health import ServerHealth
from mpsd.core.model import ReadBack
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT
from mpsd.core.mps.log_parser import (
    ContextsMade,
    LimitGiven,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
)
from mpsd.core.units import GIB, MIB

T: Final = datetime(2026, 1, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def test_fault_by_its_log() -> None:
    """A fault begins with its line in the log, once the server has answered, and ends when it has new contexts."""
    serving = ServerHealth()
    serving.note([ServerFaulted(7)], T)
    assert (serving.faults, serving.reported) == ({}, {7: T})
    # A driver without a state word does not contradict the log, and neither does a server that is busy with the fault.
    serving.note_words({7: None}, (), after(1))
    serving.note_words({}, (), after(1))
    assert serving.faults == {7: T}
    serving.note([ContextsMade(7)], after(2))
    assert serving.faults == {}
    serving.note([ServerFaulted(7), ContextsMade(7)], after(3))
    assert serving.reported == {}


def test_fault_by_its_word() -> None:
    """The state word precedes a log that is silent, or cannot be read."""
    serving = ServerHealth()
    serving.note_words({7: "FAULT", 8: "ACTIVE"}, (), T)
    serving.note_words({7: "FAULT", 8: "ACTIVE"}, (), after(5))
    assert serving.faults == {7: T}
    serving.note_words({7: "ACTIVE", 8: "ACTIVE"}, (), after(6))
    assert serving.faults == {}


def test_fault_that_outlasts_the_clients() -> None:
    """A server without clients has the fault that its word says, since the same time."""
    serving = ServerHealth()
    serving.note_words({7: "FAULT"}, (), T)
    serving.note_words({7: "FAULT"}, {7}, after(5))
    assert serving.faults == {7: T}
    serving.note_words({7: "ACTIVE"}, {7}, after(6))
    assert serving.faults == {}


def test_servers_that_cannot_start() -> None:
    """As many failures in a row as NVIDIA tolerates for one client are a reason for a minute."""
    serving = ServerHealth()
    for second in range(5):
        serving.note([ServerExited(second + 1, 1)], after(second))
    assert serving.cannot_start(after(5)) is None
    serving.note([ServerFailed(6, "MPS server failed to start"), ServerExited(6, 1)], after(5))
    because = serving.cannot_start(after(6))
    assert (
        because == "6 servers in a row failed to start within 5 s, and the last one logged 'MPS server failed to start'"
    )
    assert serving.cannot_start(after(66)) is None
    # The clock was set back: nothing is refused until the old time is reached again.
    assert serving.cannot_start(after(-3600)) is None
    # A successful start clears it.
    serving.note([ServerExited(7, 1)], after(67))
    assert serving.cannot_start(after(67)) is not None
    serving.note([ServerReady(8), ServerExited(8, 0)], after(68))
    assert serving.cannot_start(after(68)) is None


def test_what_servers_give() -> None:
    """The limits that each server reports are stored until they are compared, for each limit separately."""
    serving = ServerHealth()
    serving.note([LimitGiven(7, ACTIVE_THREAD_PERCENTAGE, 333), LimitGiven(8, PINNED_DEVICE_MEM_LIMIT, MIB)], T)
    serving.note([LimitGiven(7, PINNED_DEVICE_MEM_LIMIT, 5 * GIB), LimitGiven(8, ACTIVE_THREAD_PERCENTAGE, 1)], T)
    assert serving.given == {7: ReadBack(333, 5 * GIB), 8: ReadBack(1, MIB)}
