"""The thread that keeps a lease: it renews it, and tells its program that it ends or that its GPU is being drained.

1. The lease is renewed at a third of its time to live. While that fails, it is tried again after growing pauses, until
   the lease has ended: an mpsd that is back in time renews it.
2. The end is told of in time: where a lease was not renewed, by the clock; where mpsd ends it, by mpsd's events.
3. The events begin anew with each connection, and the state of the lease and of its control daemons is looked at then:
   so it does not matter what was missed while mpsd was away.

A forked child has no such thread.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Final, NoReturn, cast

from mpsd.client.client import Client
from mpsd.client.connection import DEADLINE
from mpsd.core.errors import MpsdError, NotFoundError

if TYPE_CHECKING:
    from mpsd.client import answer_types

NOTICE: Final = 60.0
"""Seconds before its end in which a lease is said to end; a third of its time to live, where that is less: a lease that
is renewed in time never comes so near its end."""

_RENEWALS: Final = 3
"""Attempts to renew it that a time to live has room for."""

_ASK_AGAIN: Final = 0.2
"""Seconds before the second attempt to reach an mpsd that is gone; each further pause is twice as long."""

_ASK_AT_LAST: Final = 10.0
"""Maximum seconds between two attempts; a thirtieth of the time to live, where that is less."""

_HEARTBEAT: Final = 20
"""Seconds after which mpsd sends a line if there is no event, so that a dead connection is noticed."""


class _OverError(Exception):
    """The lease has ended, or was closed: the thread has nothing more to do."""


class Watcher:
    """The thread of one lease."""

    def __init__(
        self,
        client: Client,
        answer: "answer_types.Lease",
        *,
        ttl: float | None,
        heard: Callable[["answer_types.Lease"], object],
        on_ending: Callable[[float], object] | None,
        on_draining: Callable[[], object] | None,
    ) -> None:
        """`ttl` is the time to live that was requested, in seconds, of which all is left now.

        The thread calls `heard` with each answer about it, and the others where they are not None: `on_ending` with the
        seconds until its end, and `on_draining`.
        """
        ttl = _given(answer) if ttl is None else ttl
        self._client = client.another(deadline=min(DEADLINE, max(ttl / _RENEWALS, 1.0)))
        self._answer = answer
        self._daemons = {each["daemon"] for each in answer["shares"]}
        self._ttl = ttl
        self._heard, self._on_ending, self._on_draining = heard, on_ending, on_draining
        self._stopped = threading.Event()
        self._pause = _ASK_AGAIN
        self._longest = min(_ASK_AT_LAST, max(ttl / 30, _ASK_AGAIN))
        self._ends = time.monotonic() + ttl
        self._renews = time.monotonic() + ttl / _RENEWALS
        self._is_looked, self._is_said = True, False
        self._draining: set[str] = set()

    def start(self) -> None:
        """Begin; the thread ends with its process at the latest."""
        threading.Thread(target=self._run, name=f"mpsd-{self._answer['id']}", daemon=True).start()

    def stop(self) -> None:
        """Have it end soon, without a further word; the lease may be released then.

        It ends at once where it waits, and by the event of the lease's end where it follows the events.
        """
        self._stopped.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(_OverError), self._client:
            if self._on_ending is None and self._on_draining is None:
                self._wait(inf)
            pause = _ASK_AGAIN
            while True:
                self._is_looked = False
                with contextlib.suppress(MpsdError), contextlib.closing(self._events()) as events:
                    for _, event in events:
                        pause = _ASK_AGAIN
                        self._tick()
                        self._hear(event)
                self._wait(pause)
                pause = min(pause * 2, self._longest)

    def _events(self) -> "Generator[tuple[str, answer_types.Event]]":
        events = self._client.events("latest", follow=True, heartbeat=_HEARTBEAT, meanwhile=self._tick)
        return cast("Generator[tuple[str, answer_types.Event]]", events)

    def _wait(self, seconds: float) -> None:
        """Wait, and do meanwhile what is due."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            pause = min(self._tick(), end - now)
            self._stopped.wait(None if pause == inf else pause)

    def _tick(self) -> float:
        """Do what is due, and return the seconds until the next time. Raises _OverError."""
        if self._stopped.is_set():
            raise _OverError
        if time.monotonic() >= self._renews:
            self._renew()
        if not self._is_looked:
            self._is_looked = True
            with contextlib.suppress(MpsdError):
                self._look()
        left = self._ends - time.monotonic()
        if left <= 0:
            self._end(f"its time to live of {self._ttl:g} s has expired, and mpsd does not answer")
        notice = min(NOTICE, self._ttl / _RENEWALS)
        if left <= notice:
            self._say_ending(left)
        due = min(self._renews, self._ends, inf if self._is_said else self._ends - notice)
        return max(due - time.monotonic(), 0.0)

    def _renew(self) -> None:
        began = time.monotonic()
        try:
            answer = self._client.renew(self._answer["id"], self._ttl)
        except NotFoundError as error:
            self._end(error.detail)
        except MpsdError:
            self._renews = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, self._longest)
        else:
            self._ends, self._renews = began + self._ttl, began + self._ttl / _RENEWALS
            self._pause, self._is_said = _ASK_AGAIN, False
            self._take(answer)

    def _look(self) -> None:
        """Look at the lease and at its control daemons. Raises _OverError, and the errors of the client."""
        try:
            answer = self._client.lease(self._answer["id"])
        except NotFoundError as error:
            self._end(error.detail)
        if answer["state"] == "ended":
            self._end(answer["because"])
        self._take(answer)
        for each in self._client.daemons()["daemons"]:
            self._see(each["name"], each["state"])

    def _hear(self, event: Mapping[str, object]) -> None:
        """Take an event. Raises _OverError."""
        match event:
            case {"event": "lease_ended", "lease": lease, "because": str(because)} if lease == self._answer["id"]:
                self._end(because)
            case {"event": "lease_closing", "lease": lease} if lease == self._answer["id"]:
                self._say_ending(0.0)
            case {"event": "daemon_state", "daemon": str(daemon), "state": str(state)}:
                self._see(daemon, state)

    def _see(self, daemon: str, state: str) -> None:
        """Take the state of a control daemon."""
        if state != "draining":
            self._draining.discard(daemon)
        elif daemon in self._daemons - self._draining:
            self._draining.add(daemon)
            self._call(self._on_draining)

    # -- what the program hears ---------------------------------------------------------------------------------------

    def _take(self, answer: "answer_types.Lease") -> None:
        self._answer = answer
        if not self._stopped.is_set():
            self._heard(answer)

    def _say_ending(self, seconds: float) -> None:
        if not self._is_said:
            self._is_said = True
            self._call(self._on_ending, seconds)

    def _end(self, because: str) -> NoReturn:
        """Take the end of the lease. Raises _OverError."""
        self._take(cast("answer_types.Lease", {**self._answer, "state": "ended", "because": because}))
        self._say_ending(0.0)
        raise _OverError

    def _call(self, callback: Callable[..., object] | None, *arguments: object) -> None:
        """Call the program; what it raises is logged with its traceback, and does not end the thread.

        By `logging`, since that is where a program looks for what its threads could not raise; a warning is shown once
        for each place, and has no traceback.
        """
        if callback is None or self._stopped.is_set():
            return
        try:
            callback(*arguments)
        except BaseException:  # SystemExit, too, would end this thread alone, and the lease with it
            import logging  # as slow as all the rest

            logging.getLogger("mpsd").exception("a callback of lease %s failed", self._answer["id"])


def _given(answer: "answer_types.Lease") -> float:
    """Return the time to live of a lease for which none was requested: that of a quota, or none, which is infinite."""
    if answer["expires"] is None or answer["granted"] is None:
        return inf
    ends, began = (datetime.fromisoformat(each) for each in (answer["expires"], answer["granted"]))
    return (ends - began).total_seconds()


def release_later(client: Client, lease: str) -> None:
    """Release a lease in a thread as soon as mpsd is back; without that, it ends with its holder."""
    threading.Thread(target=_release, args=[client.another(deadline=DEADLINE), lease], daemon=True).start()


def _release(client: Client, lease: str) -> None:
    pause = _ASK_AGAIN
    while True:
        threading.Event().wait(pause)
        pause = min(pause * 2, _ASK_AT_LAST)
        try:
            with client:
                client.release(lease)
        except MpsdError as error:
            if error.retryable:
                continue
        return
