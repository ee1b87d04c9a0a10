"""The groups of users by the user database, for quotas: a process may have given up a group, and with it a quota."""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from mpsd.core.model import Reading, Unknown
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Settings
from mpsd.system import clock
from mpsd.system.processes import foreign_files
from mpsd.system.processes.foreign_reader import USER_DATABASE, ForeignReader

_KEPT: Final = 60.0
"""Seconds for which the groups of a user are kept."""

_SILENT: Final = 10.0
"""Seconds for which a user database that did not answer is not asked again."""

_MOST_USERS: Final = 4096
"""Users whose groups are kept."""


class UserGroups:
    """Completes the groups of callers."""

    def __init__(self, reader: ForeignReader) -> None:
        self._reader = reader
        self._found = OrderedDict[int, tuple[float, Reading[tuple[int, ...]]]]()
        """By uid, until when the groups are kept (monotonic clock), and these."""
        self._silent = Unknown(""), 0.0

    async def complete(self, user: UserIdentity, settings: Settings) -> UserIdentity:
        """Return a user with all groups that count for a quota; `is_certain` is False where they are unknown.

        The user database is asked only if there is a quota of a group.
        """
        if not any(name.startswith("%") for name in settings.quota):
            return user
        found = await self._groups(user.uid)
        if isinstance(found, Unknown):
            return replace(user, is_certain=False)
        return replace(user, gids=user.gids.union(found.value))

    async def _groups(self, uid: int) -> Reading[tuple[int, ...]]:
        until, found = self._found.get(uid, (0.0, Unknown("")))
        reason, silent = self._silent
        if clock.monotonic() < until:
            return found
        if clock.monotonic() < silent:
            return reason
        found = await self._reader.ask(USER_DATABASE, foreign_files.groups_of, uid)
        now = clock.monotonic()
        if isinstance(found, Unknown):
            self._silent = found, now + _SILENT
            return found
        self._found[uid] = now + _KEPT, found
        while len(self._found) > _MOST_USERS:
            self._found.popitem(last=False)
        return found
