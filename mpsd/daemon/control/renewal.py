"""The replacement of an unused control daemon for its next user, or because its server may serve no client.

Files and connections that the last user still has open do not lead to the next daemon.
"""

import contextlib
from collections.abc import Callable
from math import inf
from typing import Final

from mpsd.core import health
from mpsd.core.lifecycle import ANSWERED, State
from mpsd.daemon.control.control_log import ControlLog
from mpsd.daemon.control.drainer import DaemonLeases
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.pipe_access import PipeAccess, connected_to
from mpsd.daemon.control.state import Lifecycle
from mpsd.system import clock, proc

_RECOVERY: Final = 5.0
"""Seconds for a server to recover from a fatal fault after its last client: it takes up to 0.4 s (measured on 580)."""


class Renewal:
    """Whether one control daemon must be replaced for its next user, and whether that is in progress."""

    def __init__(
        self,
        name: str,
        *,
        lifecycle: Lifecycle,
        pipe_access: PipeAccess,
        observer: Observer,
        control_log: ControlLog,
        leases: DaemonLeases,
    ) -> None:
        self._name = name
        self._lifecycle, self._pipe_access, self._leases = lifecycle, pipe_access, leases
        self._observer, self._control_log = observer, control_log
        self._next_user: tuple[int, Callable[[], bool]] | None = None
        """The next user, and whether the daemon was asked for its clients since."""
        self._distrusted: str | None = None
        """Why its server may serve no client, while there is reason to believe that."""
        self._is_answered: Callable[[], bool] | None = None
        """Tells whether the daemon was asked for its clients since none was left."""
        self._deserted_at = inf
        """Since when the daemon has been deserted although it is distrusted (monotonic clock)."""
        self.is_running = False
        """Whether the daemon is being replaced."""

    @property
    def is_due(self) -> bool:
        """Whether the daemon must be replaced, and was not asked for its clients yet."""
        return self._next_user is not None

    @property
    def _is_used(self) -> bool:
        """Whether the daemon has, or may have, any client."""
        return bool(self._observer.present) or self._may_have_unseen_clients

    @property
    def _may_have_unseen_clients(self) -> bool:
        """Whether the daemon may have clients that mpsd does not see.

        A client of another pid namespace is listed as pid 0 (R580), and mpsd cannot see whether that process lives. A
        server that has been busy since before mpsd started has not named its clients yet.
        """
        return any(0 in each.clients or not each.is_known for each in self._observer.servers)

    def want(self, uid: int, ask: Callable[[], Callable[[], bool]]) -> None:
        """Request a replacement for this uid of a daemon that had another user, where no client of that user is left.

        `ask` queries the daemon for its clients, and returns a function that tells whether that was done.
        """
        if self._lifecycle.state is State.READY and not self._is_used and self._next_user is None:
            # Its last user cannot connect any more, so the answer to this question names every client.
            self._next_user = uid, ask()

    def begin(self) -> int | None:
        """Begin once the daemon has named no client, and return its next user; None when it is not replaced now."""
        if self._next_user is None or not self._next_user[1]():
            return None
        (uid, _), self._next_user = self._next_user, None
        if self._lifecycle.state is not State.READY or self._is_used:
            self._lifecycle.notify_changed()  # the daemon stays, and callers that wait for a new one continue
            return None
        self.is_running = True
        return uid

    def distrust(self, because: str | None) -> bool:
        """Request a replacement as soon as the daemon is unused, or withdraw the request; tell whether that is new."""
        before, self._distrusted = self._distrusted, because
        return before != because

    def begin_distrusted(self, ask: Callable[[], Callable[[], bool]]) -> str | None:
        """Begin once a distrusted daemon is unused, and return why; None when it is not replaced now.

        A daemon is distrusted, too, whose server answers in an unforeseen form, or does not recover from a fault, since
        nothing is granted on it. Its use is judged by the living processes, and not by the server's list. `ask` queries
        the daemon for its clients.
        """
        answers = (health.unforeseen(*each) for each in self._observer.unforeseen)
        because = self._distrusted or next(answers, None) or self._fault
        # 1. No reason is left, or the daemon does not answer, or is used: everything begins anew.
        # 2. A fault should end with its last client, so the server gets a moment to recover.
        # 3. The daemon is asked once more, because a client may have connected meanwhile. The next call sees such a
        #    client in step 1, and otherwise replaces the daemon.
        if because is None or self._lifecycle.state not in ANSWERED or not self.is_deserted:
            self._is_answered, self._deserted_at = None, inf
            return None
        self._deserted_at = min(self._deserted_at, clock.monotonic())
        if because == self._fault and clock.monotonic() < self._deserted_at + _RECOVERY:
            return None
        if self._is_answered is None:
            self._is_answered = ask()
        if not self._is_answered():
            return None
        self._is_answered, self.is_running = None, True
        return because

    @property
    def is_deserted(self) -> bool:
        """Whether the daemon has no lease and no living process left."""
        return not any(self._leases.on(self._name)) and not self._may_have_unseen_clients and not self.present

    @property
    def present(self) -> bool:
        """Whether a client of the daemon, or a server that outlived one, lives."""
        return any(proc.lives(each) for each in self._observer.present)

    @property
    def _fault(self) -> str | None:
        """That a server handles a fatal fault, which should end with its last client; None where none does."""
        faulted = (each.pid for each in self._observer.servers if each.faulted is not None)
        return next((f"server {each} handles a fatal GPU fault, and has no client left" for each in faulted), None)

    @property
    def has_to_force(self) -> bool:
        """Whether a daemon must be forced to quit: a wedged or faulty server may never exit, and has no client left."""
        return (self._distrusted or self._fault) is not None and not self._may_have_unseen_clients and not self.present

    def follow(self, state: State) -> None:
        self.is_running = self.is_running and state in {State.STOPPING, State.DOWN, State.STARTING}
        if state is not State.READY:
            self._next_user = None
        if state is State.DOWN:
            self._distrusted = None  # that was about the server of a daemon that is gone

    async def is_blocked_by_last_user(self) -> bool:
        """Tell whether a daemon does not answer because of its last user, and has no client.

        That user has its one seat, or has used up the daemon's descriptors: no process can have become a client since.
        """
        if not self.is_deserted:
            return False
        if self._control_log.descriptors_used_up is not None:
            return self._pipe_access.users is not None
        with contextlib.suppress(OSError):
            connected = await connected_to(self._pipe_access.paths.control_sockets)
            return self._pipe_access.are_last_users(connected.values())
        return False
