"""The event loop: libuv's, which takes a tenth off a grant, with timers that are never early.

Whoever waits for a moment and finds that it has not come yet waits again, for no time at all, and so until it has come:
with timers that are early by a millisecond, mpsd would be woken ten times for once.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

import uvloop

_EARLY: Final = 0.0015
"""Seconds by which libuv's timers may be early: they count whole milliseconds from the last whole one that began, and
uvloop rounds to these, up or down. Sources: uv_timer_start, TimerHandle of uvloop; 1.2 ms were measured (0.23)."""


class _Loop(uvloop.Loop):
    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back after so many seconds, and not before; `call_at` comes here too."""
        return super().call_later(delay + _EARLY if delay > 0 else delay, callback, *args, context=context)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run this to its end, and cancel what it leaves."""
    uvloop.run(main, loop_factory=_Loop)
