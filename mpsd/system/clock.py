"""The two clocks: one for people, which may jump, and one for deadlines, which may not."""

import os
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""How many of the clock ticks that /proc counts make a second."""


def now() -> datetime:
    """Return the time of day in UTC, to be shown and stored, never to be subtracted."""
    return datetime.now(UTC)


def second() -> int:
    """Return the second of the time of day, since 1970."""
    return int(time.time())


def until_next(seconds: float) -> float:
    """Return how long it is until the next whole multiple of so many seconds.

    What is done again and again is done at such moments, so that the process is woken once for all of it.
    """
    return seconds - time.monotonic() % seconds


monotonic: Final = time.monotonic
"""Return seconds of a clock that never jumps, for deadlines and tallies; it says nothing across a reboot."""


def since_boot(ticks: int | None = None) -> float:
    """Return the seconds since boot of a moment in clock ticks, as /proc has them, or of now."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if ticks is None else ticks / _TICKS


def at_ticks(ticks: int) -> datetime:
    """Return the time of day, as the clock is set now, of a moment in clock ticks since boot, as /proc has them."""
    return datetime.fromtimestamp(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS, UTC)


@cache
def boot_id() -> str:
    """Return the identity of this boot: what was counted or held under another one is over."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
