"""The event loop: libuv's, which takes a tenth off a grant, with timers that are never early.

Whoever waits for a moment and finds that it has not come yet waits again, for no time at all, and so until it has come:
with timers that are early by a millisecond, mpsd would be woken ten times for once.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, Final

import uvloop

from mpsd.core.errors import ConfigurationError

_MONOTONIC_COARSE: Final = 6
"""From linux/time.h; CPython has no name for it."""

_MILLISECOND: Final = 0.001

_EARLY: Final = 1.5 * _MILLISECOND + (_MILLISECOND if time.clock_getres(_MONOTONIC_COARSE) <= _MILLISECOND else 0.0)
"""Seconds by which libuv's timers may be early.

They count whole milliseconds from the last whole one that began, and uvloop rounds to these, up or down (1.2 ms were
measured with 0.23). Where the kernel's coarse clock ticks in milliseconds, libuv reads that, a millisecond behind.
Sources: uv_timer_start and uv__hrtime of libuv, call_later of uvloop.
"""


class _Loop(uvloop.Loop):
    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back after so many seconds, and not before; `call_at` comes here too."""
        return super().call_later(delay + _EARLY if delay > 0 else delay, callback, *args, context=context)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run this to its end, and cancel what it leaves. Raises ConfigurationError where no loop can be made."""
    uvloop.run(main, loop_factory=partial(_make, main))


def _make(main: Coroutine[Any, Any, None]) -> _Loop:
    try:
        return _Loop()
    except OSError as error:
        main.close()  # it was never begun
        hint = "raise mpsd's limit of file descriptors (LimitNOFILE=, ulimit -n), or give the machine more memory"
        raise ConfigurationError(f"cannot create an event loop: {error.strerror or error}", hint=hint) from error
