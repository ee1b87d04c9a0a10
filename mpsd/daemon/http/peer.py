"""The peer of an API connection, as the kernel reports it, its role, and the log of what it was refused."""

import os
import select
import socket
from dataclasses import dataclass
from typing import Final

from mpsd.core.events import EventName
from mpsd.core.roles import Role, UserIdentity, may_administer, role_of
from mpsd.core.settings import Settings
from mpsd.daemon.record.bounded import LineShares
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes.process import Process
from mpsd.system.sockets.credentials import PeerCredentials, groups, peer_credentials, process_of

_MOST_LOGGED: Final = 16
"""Refusals for a missing permission that are logged for one uid in a minute."""

_MOST_WORDS: Final = 200
"""Maximum characters of a request in the log."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A peer with its user and its role; the role None allows nothing."""

    user: UserIdentity
    role: Role | None
    contained: bool
    """Whether it would be an administrator outside its container."""
    admin: bool
    operator: bool
    """Whether the peer may hold, drain and resume control daemons; an administrator may, too."""


class Peer:
    """The process at the other end of one connection. The kernel recorded its credentials when it connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.credentials = peer_credentials(connection)
        self.uid = self.credentials.uid
        """The uid of the peer."""
        self.source: int | str = self.uid
        """Whose connection it counts as: on TCP, the uid of a local process, and otherwise its address."""
        self._connection = connection
        self._accepted = clock.since_boot()
        self._process: Process | None = None
        self._principal: Principal | None = None
        self._settings: Settings | None = None
        self._hang_up = select.poll()
        self._hang_up.register(connection, 0)  # reports only that the peer closed the connection

    def principal(self, settings: Settings) -> Principal:
        """Return the user and the role of the peer, by uid and groups; changed settings may change the role.

        An administrator must be in the node's own user and pid namespaces: the kernel also reports the root of a
        container as uid 0. Raises NotPermittedError where its groups cannot be read.
        """
        if self._principal is None or self._settings is not settings:
            user = UserIdentity(self.uid, groups(self._connection, self.credentials))
            may = may_administer(user, settings, own_uid=os.geteuid())
            contained = may and self.is_contained()
            role = role_of(user, settings, administers=may and not contained)
            admin, operator = role is Role.ADMIN, role in {Role.OPERATOR, Role.ADMIN}
            self._principal = Principal(user, role, contained, admin, operator)
            self._settings = settings
        return self._principal

    def is_contained(self) -> bool:
        """Tell whether the peer's process is, or may be, in a container: an invisible or dead process counts."""
        found = self.process()
        # The check of the process comes last: while it lives, what was looked up by its pid was its own.
        return found is None or found.is_contained() or found.is_gone()

    def process(self) -> Process | None:
        """Watch the process that connected; None when it is gone or not visible.

        The peer keeps ownership of the process.
        """
        if self._process is None:
            self._process = process_of(self._connection, self.credentials, self._accepted)
        return None if self._process is None or self._process.is_gone() else self._process

    def has_left(self) -> bool:
        """Tell whether the peer has closed its end; the kernel knows that also while earlier data is unread."""
        return bool(self._hang_up.poll(0))

    def close(self) -> None:
        """Stop watching the process: the connection is closed."""
        if self._process is not None:
            self._process.close()


class RefusalLog:
    """Logs requests without the necessary permission, a limited number per minute and uid: any user can repeat them."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._shares = LineShares(log, lambda: _MOST_LOGGED, minutes=1, lines="requests without the right")

    def record(self, credentials: PeerCredentials, request: str, because: str) -> None:
        """Log a refusal in one line, unless the lines of this uid are used up."""
        if self._shares.take(credentials.uid):
            facts = {"uid": credentials.uid, "pid": credentials.pid, "asked": request[:_MOST_WORDS], "because": because}
            self._log.warning(EventName.PEER_REFUSED, **facts)
