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

T = TypeVar("T")

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
    start = time.monotonic()
    end, pause, answered = start + wait, _ASK_AGAIN, False
    until = start + min(wait, BRIDGED)
    while True:
        left = max(end - time.monotonic(), 0.0)
        request = {**request, "wait": None if left == inf else left}
        try:
            client.connect()
            until, answered = start + max(wait, BRIDGED), True
            return client.admit(request, deadline=left + client.deadline, meanwhile=progress.look)
        except (UnreachableError, StoppingError) as error:
            if time.monotonic() >= until or not error.retryable:
                raise
            progress.lose(error, answered=answered)
        time.sleep(min(pause, max(until - time.monotonic(), 0.0)))
        pause = min(pause * 2, _ASK_AT_LAST)


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


def answered(ask: Callable[[], T], *, until: float) -> T:
    """Return what `ask` returns, again until this time of the monotonic clock while mpsd is gone or about to be.

    Raises the errors of `ask`.
    """
    pause = _ASK_AGAIN
    while True:
        try:
            return ask()
        except (UnreachableError, StoppingError) as error:
            if time.monotonic() >= until or not error.retryable:
                raise
        time.sleep(min(pause, max(until - time.monotonic(), 0.0)))
        pause = min(pause * 2, _ASK_AT_LAST)


def ended(client: Client, lease: str, *, until: float) -> bool:
    """Wait until a lease has ended, until this time of the monotonic clock, and tell whether it has.

    Raises the errors of `Client.lease`, except that a lease that mpsd has forgotten has ended.
    """
    pause = _LOOK_AGAIN
    while True:
        try:
            if client.lease(lease)["state"] == "ended":
                return True
        except NotFoundError:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(min(pause, max(until - time.monotonic(), 0.0)))
        pause = min(pause * 2, _ASK_AT_LAST)
