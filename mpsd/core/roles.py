"""Roles in the API, and the users and groups that the configuration grants them to. Pure.

Users and groups are compared as numbers, which come from the kernel. The numbers of names are looked up when the
configuration is read (`Settings.names`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from mpsd.core.errors import NotPermittedError
from mpsd.core.setting_parsers import UserNames
from mpsd.core.settings import Settings

RESERVED: Final = "kubernetes/"
"""The beginning of the labels and request ids by which mpsd-kubernetes finds the leases of pods: administrators alone
may use it."""

SLURM: Final = "slurm/"
"""Likewise, of those by which mpsd-slurm finds the leases of jobs."""

_LONGEST_NUMBER: Final = 10
"""Maximum digits of a uid or gid, which has 32 bits."""


class Role(IntEnum):
    """The rights of a peer; each role includes the rights of the roles before it."""

    OBSERVER = 1
    """Read."""
    USER = 2
    """Hold leases, and end its own."""
    OPERATOR = 3
    """Hold, drain and resume control daemons, but end no leases except its own."""
    ADMIN = 4
    """Operate the node, and end the leases of all users."""


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """A uid, and every group of the process: its primary group and its supplementary ones."""

    uid: int
    gids: frozenset[int] = frozenset()
    is_certain: bool = True
    """Whether all groups are known that count for a quota."""

    def is_called(self, name: str, names: UserNames) -> bool:
        """Tell whether a user, a %group or * denotes this user.

        Digits are a number; an unknown name denotes no user.
        """
        if name == "*":
            return True
        if name.startswith("%"):
            return _number(name[1:], names.gids) in self.gids
        return _number(name, names.uids) == self.uid

    def is_among(self, listed: Sequence[str], names: UserNames) -> bool:
        """Tell whether a list of users, %groups and * includes this user."""
        return any(self.is_called(name, names) for name in listed)


def role_of(user: UserIdentity, settings: Settings, *, administers: bool) -> Role | None:
    """Return the role of a user; None where the configuration grants none.

    `administers` says whether the user is an administrator: `may_administer` is true, and the caller is outside
    containers.
    """
    roles, names = settings.roles, settings.names
    if administers:
        return Role.ADMIN
    if user.is_among(roles.operators, names):
        return Role.OPERATOR
    if user.is_among(roles.users, names):
        return Role.USER
    return Role.OBSERVER if user.is_among(roles.observers, names) else None


def may_administer(user: UserIdentity, settings: Settings, *, own_uid: int) -> bool:
    """Tell whether a user is an administrator outside containers: root, mpsd's own uid, or one that [roles] names."""
    return user.uid in {0, own_uid} or user.is_among(settings.roles.admins, settings.names)


def require(role: Role | None, needed: Role, *, contained: bool = False) -> None:
    """Raise NotPermittedError unless a role is sufficient.

    `contained`: outside a container the role would be another.
    """
    if role is not None and role >= needed:
        return
    if contained:
        has = "your uid has no role there" if role is None else f"your role there is {role.name.lower()}"
        raise NotPermittedError(
            f"this needs the role {needed.name.lower()}, and {has}: the calling process is in another user or pid"
            " namespace than the node, or mpsd cannot read which, so your uid is not an administrator's",
            hint="call from the host, or from mpsd's own container; roles.operators is for containers that hold,"
            " drain and resume",
        )
    if role is None:
        raise NotPermittedError("your uid has no role", hint="ask an administrator to add you to [roles]")
    raise NotPermittedError(
        f"this needs the role {needed.name.lower()}, and your role is {role.name.lower()}",
        hint="ask root to do it, or use sudo",
    )


def check_reserved(labels: Iterable[str], request_id: str | None) -> None:
    """Refuse the labels and the request id that only an administrator may use. Raises NotPermittedError."""
    for limit, name in (*(("labels", each) for each in labels), ("request_id", request_id or "")):
        for beginning, of in ((RESERVED, "kubernetes finds the leases of pods"), (SLURM, "slurm finds those of jobs")):
            if name.startswith(beginning):
                raise NotPermittedError(
                    f"{limit}: {name!r} begins with {beginning!r}, which is for administrators: mpsd-{of} by it",
                    hint="choose a name with another beginning",
                    limit=limit,
                )


def names_in(settings: Settings) -> tuple[str, ...]:
    """Return the names of users and %groups in a configuration that must be looked up, each once."""
    roles, group = settings.roles, settings.api.group
    listed = (*roles.observers, *roles.users, *roles.operators, *roles.admins, *settings.quota)
    listed += (f"%{group}",) if group else ()
    return tuple(name for name in dict.fromkeys(listed) if name != "*" and _digits(name.removeprefix("%")) is None)


def unknown_names(names: UserNames) -> str:
    """Return a sentence about the names that the user database does not have; empty where it has all."""
    if not names.unknown:
        return ""
    listed = ", ".join(names.unknown)
    return f"the user database has no {listed}: these names in [roles], [quota] or api.group match no user"


UNKNOWN_NAMES_HINT: Final = (
    "correct the names, or write uids and %gids in [roles] and [quota], which are not looked up; then: mpsctl reload,"
    " or for api.group restart mpsd"
)


def _number(name: str, known: Mapping[str, int]) -> int | None:
    digits = _digits(name)
    return known.get(name) if digits is None else digits


def _digits(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdecimal() and len(name) <= _LONGEST_NUMBER else None
