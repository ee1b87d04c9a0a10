"""Asks a control daemon about its servers for reasons that prove nothing, at most once a second.

Such a reason is a line of a server, or an Xid of the GPU. Any user with a client can cause both in a loop, so they may
neither refuse the requests of others nor occupy the daemon: a grant waits for the answer to the reasons before it.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from mpsd.system import clock

_SPACING: Final = 1.0
"""Seconds between two questions for such reasons."""


class Doubt:
    """The reasons to ask one control daemon, and the next question."""

    def __init__(self, ask: Callable[[], object], answered_later: Callable[[], Callable[[], bool]]) -> None:
        """`ask` requests a conversation.

        `answered_later` returns a function that tells whether a conversation has begun and ended since.
        """
        self._ask, self._answered_later = ask, answered_later
        self._is_answered: Callable[[], bool] | None = None
        """Tells whether the latest reason was answered; None where there is none."""
        self._last_question = -inf
        self._next: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Note a reason, and ask for it soon."""
        self._is_answered = self._answered_later()
        if self._next is None:
            delay = max(0.0, self._last_question + _SPACING - clock.monotonic())
            self._next = asyncio.get_running_loop().call_later(delay, self._ask_now)

    def _ask_now(self) -> None:
        self._next = None
        if self.unanswered() is not None:
            self._last_question = clock.monotonic()
            self._ask()

    def unanswered(self) -> Callable[[], bool] | None:
        """Return a function that tells whether the reasons so far were answered; None where all are."""
        if self._is_answered is not None and self._is_answered():
            self._is_answered = None
        return self._is_answered

    def close(self) -> None:
        """Ask no more."""
        if self._next is not None:
            self._next.cancel()
