"""Who calls: the role of a uid, and how much of mpsd one uid may have at a time."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mpsd.core.errors import NotPermittedError, TooManyRequestsError
from mpsd.core.quota import Person
from mpsd.core.settings import Settings
from mpsd.daemon.routes import Role
from mpsd.system import credentials, peers
from mpsd.system.credentials import Caller


@dataclass(frozen=True, slots=True)
class Known:
    """A caller, as the kernel and the user database know it, and what it may do; None: nothing at all."""

    caller: Caller
    person: Person
    role: Role | None


class Callers:
    """The connections that are open, by who opened them."""

    def __init__(self) -> None:
        self._connections: Counter[int] = Counter()
        self._requests: Counter[int] = Counter()

    def know(self, connection: socket.socket, settings: Settings) -> Known:
        """Return who is at the other end, and which role that is: by uid and groups alone."""
        caller = credentials.caller(connection)
        person = Person(credentials.user_name(caller.uid), credentials.groups(connection, caller))
        return Known(caller, person, _role(caller.uid, person, settings))

    @contextmanager
    def one_request(self, uid: int, most: int) -> Iterator[None]:
        """Count a request for as long as it is in flight. Raises TooManyRequestsError when there are too many."""
        if self._requests[uid] >= most:
            raise TooManyRequestsError(
                f"uid {uid} has {most} requests in flight, as many as it may",
                hint="wait for some of them",
                limit="api.requests_per_uid",
            )
        self._requests[uid] += 1
        try:
            yield
        finally:
            self._requests[uid] -= 1
            if not self._requests[uid]:
                del self._requests[uid]

    def opened(self, uid: int, most: int) -> bool:
        """Count a connection; False when this uid has as many as it may, and then it is not counted."""
        if self._connections[uid] >= most:
            return False
        self._connections[uid] += 1
        return True

    def closed(self, uid: int) -> None:
        """Count a connection no more."""
        self._connections[uid] -= 1
        if not self._connections[uid]:
            del self._connections[uid]


def _role(uid: int, person: Person, settings: Settings) -> Role | None:
    roles = settings.roles
    if uid in {0, peers.own_uid()} or person.is_among(roles.admins):
        return Role.ADMIN
    if person.is_among(roles.users):
        return Role.USER
    return Role.OBSERVER if person.is_among(roles.observers) else None


def require(role: Role | None, needed: Role) -> None:
    """Let a caller pass whose role is enough. Raises NotPermittedError."""
    if role is None:
        raise NotPermittedError("your uid has no role here", hint="ask an administrator to add you to [roles]")
    if role < needed:
        raise NotPermittedError(
            f"this needs the role {needed.name.lower()}, and yours is {role.name.lower()}", hint="ask root, or run it with sudo"
        )
