"""The two clocks: the time of day, which may jump, and the monotonic clock for deadlines, which does not."""

import os
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""The number of the clock ticks in /proc that make a second."""


def now() -> datetime:
    """Return the time of day in UTC, for output and storage; never subtract it."""
    return datetime.now(UTC)


def second() -> int:
    """Return the time of day in whole seconds since 1970."""
    return int(time.time())


def both() -> tuple[int, int]:
    """Return the time of day since 1970 and the monotonic clock, in microseconds: what they differ by, shows a jump."""
    return time.time_ns() // 1000, time.monotonic_ns() // 1000


def until_next(seconds: float) -> float:
    """Return the seconds until the next whole multiple of this period.

    All periodic work runs at such moments, so that the process wakes once for all of it.
    """
    return seconds - time.monotonic() % seconds


monotonic: Final = time.monotonic
"""Return the seconds of a clock that never jumps, for deadlines and tallies. Values of different boots do not
compare."""


def since_boot(ticks: int | None = None) -> float:
    """Return the seconds from boot to a moment in clock ticks, as /proc states it, or to now."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if ticks is None else ticks / _TICKS


def at_ticks(ticks: int) -> datetime:
    """Return the time of day, by the current clock, of a moment in clock ticks since boot, as /proc states it."""
    return datetime.fromtimestamp(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS, UTC)


@cache
def boot_id() -> str:
    """Return the identity of this boot; no count and no descriptor of an earlier boot is valid now."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
