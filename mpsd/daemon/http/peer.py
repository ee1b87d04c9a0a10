"""Who calls: the role of a uid, and how much of mpsd one uid may have at a time."""

import select
import socket
from dataclasses import dataclass
from math import inf
from typing import Final

from mpsd.core.admission.quota import Person
from mpsd.core.errors import NotPermittedError, TooManyRequestsError
from mpsd.core.settings import Settings
from mpsd.daemon.api.routes import Role
from mpsd.daemon.record.log import Happened, Logger
from mpsd.system import clock, credentials, process_table
from mpsd.system.credentials import Caller
from mpsd.system.process import Process

_MINUTE: Final = 60.0
_MOST_TOLD: Final = 16
"""Refusals for want of a right that are told in a minute."""

_MOST_WORDS: Final = 200
"""Characters of what was asked that are worth repeating."""


@dataclass(frozen=True, slots=True)
class Known:
    """A caller, as the kernel and the user database know it, and what it may do; None: nothing at all."""

    caller: Caller
    person: Person
    role: Role | None


class Visitor:
    """Whoever is at the other end of one connection: the kernel noted it as it connected, so one look is enough."""

    def __init__(self, connection: socket.socket) -> None:
        self.uid = credentials.caller(connection).uid
        self._connection = connection
        self._process: Process | None = None
        self._known: Known | None = None
        self._settings: Settings | None = None
        self._hang_up = select.poll()
        self._hang_up.register(connection, 0)  # which leaves that it was hung up, and nothing else

    def known(self, settings: Settings) -> Known:
        """Return who it is, and which role that is, by uid and groups alone; other settings may give it another."""
        if self._known is None or self._settings is not settings:
            caller = credentials.caller(self._connection)
            person = Person(credentials.user_name(caller.uid), credentials.groups(self._connection, caller))
            self._known, self._settings = Known(caller, person, _role(caller.uid, person, settings)), settings
        return self._known

    def process(self) -> Process | None:
        """Watch the process that connected; None when it is gone, or not visible. It stays the visitor's."""
        if self._process is None:
            self._process = credentials.process_of(self._connection, credentials.caller(self._connection))
        return None if self._process is None or self._process.is_gone() else self._process

    def has_left(self) -> bool:
        """Tell whether it has closed its end; the kernel knows, also while what it sent before is not read."""
        return bool(self._hang_up.poll(0))

    def close(self) -> None:
        """Stop watching its process: the connection is closed."""
        if self._process is not None:
            self._process.close()


class Callers:
    """The requests that are in flight, by the uid whose they are."""

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}

    def came(self, uid: int, most: int) -> None:
        """Count a request, until it `went`. Raises TooManyRequestsError, and then it is not counted."""
        here = self._requests.get(uid, 0)
        if here >= most:
            raise TooManyRequestsError(
                f"uid {uid} has {most} requests in flight, as many as it may",
                hint="wait for some of them",
                limit="api.requests_per_uid",
            )
        self._requests[uid] = here + 1

    def went(self, uid: int) -> None:
        """Count a request no more: it was answered."""
        left = self._requests.pop(uid) - 1
        if left:
            self._requests[uid] = left


class Refusals:
    """Tells who asked for what it may not have, so many times a minute: anybody can go on asking."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._since = -inf
        self._told = 0
        self._left_out = 0

    def tell(self, caller: Caller, asked: str, because: str) -> None:
        """Tell it in one line of the log; the next line that is told says how many were left out."""
        now = clock.monotonic()
        if now - self._since >= _MINUTE:
            self._since, self._told = now, 0
        if self._told >= _MOST_TOLD:
            self._left_out += 1
            return
        more = {"left_out": self._left_out} if self._left_out else {}
        self._told, self._left_out = self._told + 1, 0
        facts = {"uid": caller.uid, "pid": caller.pid, "asked": asked[:_MOST_WORDS], "because": because}
        self._log.warning(Happened.CALLER_REFUSED, **facts, **more)


def _role(uid: int, person: Person, settings: Settings) -> Role | None:
    roles = settings.roles
    if uid in {0, process_table.own_uid()} or person.is_among(roles.admins):
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
            f"this needs the role {needed.name.lower()}, and yours is {role.name.lower()}",
            hint="ask root, or run it with sudo",
        )
