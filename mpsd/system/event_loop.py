"""The event loop: libuv's, which saves a tenth of the time of a grant, with timers that never fire early.

A task whose timer fires early finds that its moment has not come and sleeps again, for almost no time, until it has.
With timers that are a millisecond early, mpsd would wake ten times instead of once.
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
"""Seconds by which libuv's timers can fire early.

They count whole milliseconds from the start of the current one, and uvloop rounds delays to milliseconds, up or down
(1.2 ms early were measured with uvloop 0.23). Where the kernel's coarse clock ticks in milliseconds, libuv reads that
clock, which is up to a millisecond behind. Sources: uv_timer_start and uv__hrtime of libuv, call_later of uvloop.
"""


class _Loop(uvloop.Loop):
    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back after this many seconds, never earlier; `call_at` uses this method too."""
        return super().call_later(delay + _EARLY if delay > 0 else delay, callback, *args, context=context)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end and cancel the tasks that remain.

    Raises ConfigurationError when no loop can be made.
    """
    uvloop.run(main, loop_factory=partial(_make, main))


def _make(main: Coroutine[Any, Any, None]) -> _Loop:
    try:
        return _Loop()
    except OSError as error:
        main.close()  # the coroutine has not begun
        hint = "raise mpsd's limit of file descriptors (LimitNOFILE=, ulimit -n), or give the machine more memory"
        raise ConfigurationError(f"cannot create an event loop: {error.strerror or error}", hint=hint) from error
