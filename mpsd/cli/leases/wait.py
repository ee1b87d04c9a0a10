"""Waiting for a lease: told to the user, kept across a restart of mpsd, and given up without leaving anything behind.

mpsd answers a request that waits once it is granted, and keeps its place for a while when its caller is gone, since it
has an id of its own to come back with. So a connection that breaks is made again, and the same request sent again.
"""

import gc
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from mpsd.cli import signals
from mpsd.cli.api import Api
from mpsd.cli.client import DEADLINE
from mpsd.cli.command import note
from mpsd.core.errors import MpsdError, StoppingError, UnreachableError

if TYPE_CHECKING:
    from mpsd.cli import answer_types

_ASK_AGAIN: Final = 0.2
"""Seconds before the second attempt to reach an mpsd that has gone; each further one waits twice as long."""

_ASK_AT_LAST: Final = 5.0
"""Seconds between two attempts at last: the next mpsd keeps the place for much longer (admission.hang_up_grace)."""

_LONGEST_PAUSE: Final = 16.0
"""Seconds between two looks at the queue, at last; a look costs mpsd more the more requests wait in it."""

_LOOK: Final = 2.0
"""Seconds for one look, or for giving up: neither may keep the user."""


def admit(api: Api, request: Mapping[str, object], *, wait: float) -> "answer_types.Lease":
    """Return a lease once it is granted, after `wait` seconds (`inf`: ever so long) at the latest.

    A signal that ends mpsctl gives the place away at once, or the lease that was granted in that very moment. Raises
    what `Api.admit` does, and SignalledError. An mpsd that stops answering is waited for too, but not one that never
    did.
    """
    gc.enable()  # it may take days
    request_id = f"mpsctl-{os.urandom(12).hex()}"
    start = time.monotonic()
    queue = _Queue(api, request_id)
    api.connect()
    with signals.raised():
        try:
            lease = _repeat_until_answered(api, queue, {**request, "request_id": request_id}, start + wait)
        except signals.SignalledError:
            if queue.leave():
                note("interrupted; the place in the queue is given up")
            raise
    if queue.has_waited:
        gpus = ", ".join(share["daemon"].removeprefix("gpu") for share in lease["shares"])
        note(f"granted after {time.monotonic() - start:.0f} s on GPU {gpus}")
    return lease


def _repeat_until_answered(
    api: Api, queue: "_Queue", request: Mapping[str, object], end: float
) -> "answer_types.Lease":
    pause = _ASK_AGAIN
    while True:
        left = max(end - time.monotonic(), 0.0)
        request = {**request, "wait": None if left == inf else left}
        try:
            return api.admit(request, deadline=left + DEADLINE, meanwhile=queue.look)
        except (UnreachableError, StoppingError) as error:
            if time.monotonic() >= end or not error.retryable:
                raise
            queue.lose(error)
        time.sleep(min(pause, max(end - time.monotonic(), 0.0)))
        pause = min(pause * 2, _ASK_AT_LAST)


class _Queue:
    """A request's place in mpsd's queue, as far as it can be seen from outside."""

    def __init__(self, api: Api, request_id: str) -> None:
        self._api = api
        self._request_id = request_id
        self._lease: str | None = None
        self._pause = 1.0
        self._shown: object = None
        self._lost = False

    def look(self) -> float:
        """Tell the user how it stands, and return the seconds until the next look.

        On a terminal each change is told; elsewhere, as in the log of a job, it is told once that it waits.
        """
        self._lost = False
        lease = None
        with suppress(MpsdError, KeyError):  # whatever it is, the connection that waits will meet it too
            lease = self._find()
        self._show(lease)
        if not sys.stderr.isatty():
            return inf
        pause, self._pause = self._pause, min(self._pause * 2, _LONGEST_PAUSE)
        return pause

    def _show(self, lease: "answer_types.Lease | None") -> None:
        wait = lease["wait"] if lease is not None else None
        if wait is not None and (wait["position"], wait["waits_for"]) != self._shown:
            self._shown = wait["position"], wait["waits_for"]
            note(f"waiting in place {wait['position']} for {wait['waits_for']}: {wait['because']}")
        elif self._shown is None:
            self._shown = ()
            note("waiting")

    def lose(self, error: MpsdError) -> None:
        """Tell the user, once, that mpsd has gone, and what it was that broke off the wait."""
        if not self._lost:
            self._lost = True
            note(f"mpsd is gone ({error.detail}); retrying until it is back, which keeps the place in the queue")

    @property
    def has_waited(self) -> bool:
        """Whether the user has been shown that it waits."""
        return self._shown is not None

    def leave(self) -> bool:
        """Give it away at once, which mpsd does only after a while; return whether there was one."""
        with suppress(MpsdError, KeyError), self._api.another(deadline=_LOOK) as api:
            lease = self._find()
            if lease is not None:
                api.release(lease["id"])
                return True
        return False

    def _find(self) -> "answer_types.Lease | None":
        """Return the lease that the request is by now, if it is there."""
        with self._api.another(deadline=_LOOK) as api:
            if self._lease is not None:
                known, self._lease = self._lease, None
                lease = api.lease(known)
                self._lease = known
                return lease
            found = next((each for each in api.leases()["leases"] if each["request_id"] == self._request_id), None)
        if found is not None:
            self._lease = found["id"]
        return found
