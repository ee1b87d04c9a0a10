"""The request for a lease, repeated until mpsd has answered it.

mpsd answers a waiting request when it is granted. When the caller is gone, mpsd keeps the place for a while, and the
request's own id finds it again. After a broken connection, the caller therefore connects again and repeats the same
request: it gets the lease that the lost answer was about, and no second one.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Final, TypeVar

from mpsd.client.client import Client
from mpsd.core.errors import MpsdError, NotFoundError, StoppingError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types

_T = TypeVar("_T")

BRIDGED: Final = 10.0
"""Seconds for which an mpsd that never answered is waited for, and the answer to a request that was sent: without
socket activation, none listens while mpsd is restarted."""

_ASK_AGAIN: Final = 0.2
"""Seconds before the second attempt to reach an mpsd that is gone; each further pause is twice as long."""

_LOOK_AGAIN: Final = 0.02
"""Seconds before the second look whether a lease has ended; each further pause is twice as long."""

_ASK_AT_LAST: Final = 1.0
"""Maximum seconds between two attempts: the next mpsd keeps the place for much longer (admission.hang_up_grace)."""

_LOOK: Final = 2.0
"""Seconds for each request that gives up a place: it may not delay the user."""


class Progress:
    """What `take` tells its caller meanwhile. These methods do nothing: a subclass has those that it needs."""

    def look(self) -> float:
        """Return the seconds until the next call; the first is after half a second of waiting."""
        return inf

    def lose(self, error: MpsdError, *, answered: bool) -> None:
        """Hear that mpsd is gone, by the error of each attempt; `answered`: the request was sent to it before."""

    def leave(self, *, had_place: bool | None) -> None:
        """Hear that the wait was interrupted, and whether there was a place, now given up; None: mpsd does not say."""


def new_request_id(program: str = "python") -> str:
    """Return an id for a request, by which it can be repeated, and its lease found."""
    return f"{program}-{os.urandom(12).hex()}"


def take(
    client: Client, request: Mapping[str, object], *, wait: float, progress: Progress | None = None
) -> "answer_types.Lease":
    """Return the requested lease once it is granted, within `wait` seconds (`inf`: without a limit).

    The request has the fields of `Client.admit` but `wait`; without a `request_id` it gets one of its own. An mpsd that
    stops answering is waited for, too: until the wait is over, and for BRIDGED seconds where that is longer, since the
    answer that was lost may have been a lease. One that never answered is waited for BRIDGED seconds at most. An
    exception of the caller, such as KeyboardInterrupt or one of `progress`, gives up the place, or a lease that was
    granted at that very moment. Raises the errors of `Client.admit`.
    """
    progress = progress or Progress()
    request_id = str(request.get("request_id") or new_request_id())
    try:
        return _repeat_until_answered(client, {**request, "request_id": request_id}, wait, progress)
    except MpsdError:
        raise
    except BaseException:
        had_place = None
        with contextlib.suppress(MpsdError):
            had_place = give_up(client, request_id)
        progress.leave(had_place=had_place)
        raise


def _repeat_until_answered(
    client: Client, request: Mapping[str, object], wait: float, progress: Progress
) -> "answer_types.Lease":
    attempts = Attempts(request, wait, progress)
    while True:
        try:
            client.connect()
            return client.admit(attempts.next(), deadline=attempts.left + client.deadline, meanwhile=progress.look)
        except (UnreachableError, StoppingError) as error:
            pause = attempts.pause_after(error)
        time.sleep(pause)


class Attempts:
    """The attempts of one request: how long each may wait, and when the next one is due."""

    def __init__(self, request: Mapping[str, object], wait: float, progress: Progress | None = None) -> None:
        self.left = wait
        """Seconds that are left of the wait, at the start of the present attempt."""
        self._request = request
        self._progress = progress or Progress()
        self._wait = wait
        self._start = time.monotonic()
        self._until = self._start + min(wait, BRIDGED)
        self._pause = _ASK_AGAIN
        self._answered = False

    def next(self) -> dict[str, object]:
        """Return the body of the request for an attempt; mpsd can be reached, and it is about to be sent."""
        self._answered = True
        self._until = self._start + max(self._wait, BRIDGED)
        self.left = max(self._start + self._wait - time.monotonic(), 0.0)
        return {**self._request, "wait": None if self.left == inf else self.left}

    def pause_after(self, error: UnreachableError | StoppingError) -> float:
        """Return the seconds until the next attempt after one that failed. Raises its error where it was the last."""
        left = self._until - time.monotonic()
        if left <= 0 or not error.retryable:
            raise error
        self._progress.lose(error, answered=self._answered)
        pause, self._pause = min(self._pause, left), min(self._pause * 2, _ASK_AT_LAST)
        return pause


def give_up(client: Client, request_id: str, *, deadline: float = _LOOK) -> bool:
    """End the lease of a request, or its place in the queue, and tell whether there was one.

    Raises the errors of `Client.leases` and `Client.release`.
    """
    with client.another(deadline=deadline) as another, contextlib.suppress(KeyError):  # of another version
        for lease in another.leases()["leases"]:
            if lease["request_id"] == request_id:
                another.release(lease["id"])
                return True
    return False


def through_a_restart(call: Callable[[], _T], *, within: float = BRIDGED) -> _T:
    """Return the answer to a request that may be repeated; an mpsd that is away is waited for, for so many seconds.

    Raises the errors of the request.
    """
    end, pause = time.monotonic() + within, _ASK_AGAIN
    while True:
        try:
            return call()
        except (UnreachableError, StoppingError) as error:
            left = end - time.monotonic()
            if left <= 0 or not error.retryable:
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 2, _ASK_AT_LAST)


def ended(client: Client, lease: str, *, within: float) -> bool:
    """Wait until a lease has ended, for so many seconds at most, and tell whether it has.

    Raises the errors of `Client.lease`; a lease that mpsd has forgotten has ended.
    """
    end, pause = time.monotonic() + within, _LOOK_AGAIN
    while True:
        try:
            if client.lease(lease)["state"] == "ended":
                return True
        except NotFoundError:
            return True
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 2, _ASK_AT_LAST)
