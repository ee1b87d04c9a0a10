"""Who is connected to the API, as the kernel says, and how many requests one uid may have in flight."""

import select
import socket
from dataclasses import dataclass
from typing import Final

from mpsd.core.errors import TooManyRequestsError
from mpsd.core.roles import Role, UserIdentity, role_of
from mpsd.core.settings import Settings
from mpsd.daemon.record.log import EventName, Logger, LogLimit
from mpsd.system import process_table
from mpsd.system.credentials import PeerCredentials, groups, peer_credentials, process_of, user_name
from mpsd.system.process import Process

_MOST_LOGGED: Final = 16
"""Refusals for want of a right that are told in a minute."""

_MOST_WORDS: Final = 200
"""Characters of what was asked that are worth repeating."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A peer with the user that it is and its role; a role of None allows nothing."""

    credentials: PeerCredentials
    user: UserIdentity
    role: Role | None


class Peer:
    """The process at the other end of one connection. The kernel recorded its credentials when it connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.uid = peer_credentials(connection).uid
        self._connection = connection
        self._process: Process | None = None
        self._principal: Principal | None = None
        self._settings: Settings | None = None
        self._hang_up = select.poll()
        self._hang_up.register(connection, 0)  # which leaves that it was hung up, and nothing else

    def principal(self, settings: Settings) -> Principal:
        """Return who it is, and which role that is, by uid and groups alone; other settings may give it another."""
        if self._principal is None or self._settings is not settings:
            credentials = peer_credentials(self._connection)
            user = UserIdentity(user_name(credentials.uid), groups(self._connection, credentials))
            role = role_of(user, settings.roles, owns_mpsd=credentials.uid in {0, process_table.own_uid()})
            self._principal, self._settings = Principal(credentials, user, role), settings
        return self._principal

    def process(self) -> Process | None:
        """Watch the process that connected; None when it is gone, or not visible. It stays the visitor's."""
        if self._process is None:
            self._process = process_of(self._connection, peer_credentials(self._connection))
        return None if self._process is None or self._process.is_gone() else self._process

    def has_left(self) -> bool:
        """Tell whether it has closed its end; the kernel knows, also while what it sent before is not read."""
        return bool(self._hang_up.poll(0))

    def close(self) -> None:
        """Stop watching its process: the connection is closed."""
        if self._process is not None:
            self._process.close()


class RequestsInFlight:
    """The requests that are in flight, by the uid whose they are."""

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}

    def begin(self, uid: int, most: int) -> None:
        """Count a request, until it `went`. Raises TooManyRequestsError, and then it is not counted."""
        here = self._requests.get(uid, 0)
        if here >= most:
            raise TooManyRequestsError(
                f"uid {uid} has {most} requests in flight, the maximum (api.requests_per_uid)",
                hint="wait until some of them are answered",
                limit="api.requests_per_uid",
            )
        self._requests[uid] = here + 1

    def end(self, uid: int) -> None:
        """Count a request no more: it was answered."""
        left = self._requests.pop(uid) - 1
        if left:
            self._requests[uid] = left


class RefusalLog:
    """Tells who asked for what it may not have, so many times a minute: anybody can go on asking."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._limit = LogLimit(_MOST_LOGGED)

    def record(self, credentials: PeerCredentials, request: str, because: str) -> None:
        """Tell it in one line of the log; the next line that is told says how many were left out."""
        more = self._limit.next()
        if more is None:
            return
        facts = {"uid": credentials.uid, "pid": credentials.pid, "asked": request[:_MOST_WORDS], "because": because}
        self._log.warning(EventName.PEER_REFUSED, **facts, **more)
