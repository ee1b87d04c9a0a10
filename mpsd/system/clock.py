"""The two clocks: one for people, which may jump, and one for deadlines, which may not."""

import time
from datetime import UTC, datetime
from pathlib import Path


def now() -> datetime:
    """Return the time of day in UTC, to be shown and stored, never to be subtracted."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Return seconds of a clock that never jumps, for deadlines and tallies; it says nothing across a reboot."""
    return time.monotonic()


def boot_id() -> str:
    """Return the identity of this boot: what was counted or held under another one is over."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
