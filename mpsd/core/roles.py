"""Who may use the API for what: roles, and the names by which the configuration grants them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from mpsd.core.errors import NotPermittedError
from mpsd.core.settings import Roles


class Role(IntEnum):
    """What a peer may do; each role includes those before it."""

    OBSERVER = 1
    """Read."""
    USER = 2
    """Hold leases, and end its own."""
    ADMIN = 3
    """Operate the node, and end anybody's leases."""


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """The name of a uid and the names of its groups; a number stands for what has no name."""

    name: str
    groups: Sequence[str] = ()

    def is_among(self, names: Sequence[str]) -> bool:
        """Tell whether a list of users, %groups and * names this user."""
        return "*" in names or self.name in names or any(f"%{group}" in names for group in self.groups)


def role_of(user: UserIdentity, roles: Roles, *, owns_mpsd: bool) -> Role | None:
    """Return the role of a user; None where the configuration grants none.

    `owns_mpsd` is true for root and for the uid that mpsd runs as: both are administrators in any case.
    """
    if owns_mpsd or user.is_among(roles.admins):
        return Role.ADMIN
    if user.is_among(roles.users):
        return Role.USER
    return Role.OBSERVER if user.is_among(roles.observers) else None


def require(role: Role | None, needed: Role) -> None:
    """Raise NotPermittedError unless a role is sufficient."""
    if role is None:
        raise NotPermittedError("your uid has no role", hint="ask an administrator to add you to [roles]")
    if role < needed:
        raise NotPermittedError(
            f"this needs the role {needed.name.lower()}, and your role is {role.name.lower()}",
            hint="ask root to do it, or use sudo",
        )
