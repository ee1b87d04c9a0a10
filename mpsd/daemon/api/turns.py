"""The turns of requests whose cost grows with what others have: one request of a user at a time, in slices of the loop.

A slice takes a few milliseconds, and the loop is left to others for as long after it. One request at a time has slices
beyond its first: however many users ask for much, the others have half of the loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from mpsd.system import clock

A = TypeVar("A")
R = TypeVar("R")

User: TypeAlias = tuple[int, bool]
"""A uid, and whether it is an administrator here: root, and the root of a container, are two users."""

Pause: TypeAlias = Callable[[], Awaitable[None]]
"""Called after each piece of work, it leaves the loop to others between two slices."""

_SLICE: Final = 0.004
"""Seconds of a slice."""

_REST: Final = 1.0
"""Seconds for which others have the loop, for each second of a slice."""


async def no_pause() -> None:
    """Pause nothing: the request has one slice."""


class Turns:
    """The requests of all users that are answered in slices."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        """Held by the request that has slices beyond its first."""
        self._own = WeakValueDictionary[User, asyncio.Lock]()
        """Held by the request of a user that is answered now, so that no user has two of them in the queue."""

    def turn(self, user: User) -> "Turn":
        """Return the turn of a request."""
        return Turn(self._own.setdefault(user, asyncio.Lock()), self._one)


class Turn:
    """The turn of one request."""

    def __init__(self, own: asyncio.Lock, one: asyncio.Lock) -> None:
        self._own, self._one = own, one
        self._is_long = False
        self._began = 0.0

    async def take(self, handle: Callable[[R], Awaitable[A]], request: R) -> A:
        """Wait for the user's earlier requests, answer this one, and let the next one begin."""
        async with self._own:
            self._began = clock.monotonic()
            try:
                return await handle(request)
            finally:
                if self._is_long:
                    self._one.release()

    async def pause(self) -> None:
        """End the slice if it took long enough, and begin another after others had their time."""
        worked = clock.monotonic() - self._began
        if worked < _SLICE:
            return
        if not self._is_long:
            await self._one.acquire()
            self._is_long = True
        await asyncio.sleep(_REST * worked)
        self._began = clock.monotonic()
