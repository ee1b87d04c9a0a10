"""How much of the node each user has had lately: what decides between equals in the queue. Pure.

A user's usage is the integral over time of the greater of its share of the node's threads and its share of the node's
memory, decaying with a half-life, so that what was used yesterday counts for less than what is used now.
"""

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from mpsd.core.admission.admission import NOTHING, Amount

_AHEAD: Final = 1.0
"""Seconds for which what a user holds is counted ahead when users are compared."""

_FORGOTTEN: Final = 1e-3
"""Share-seconds that are not worth keeping."""


class Account(Struct, frozen=True):
    """One user: what it had until `at` (share-seconds), and the share that it holds since then."""

    value: float = 0.0
    rate: float = 0.0
    at: float = 0.0


class UserTotals(Struct, frozen=True):
    """What one user has: how many leases, waiting ones included, what it holds by them, and what it waits for."""

    leases: int = 0
    holds: Amount = NOTHING
    awaits: Amount = NOTHING
    unleased: Amount = NOTHING
    """What its clients use that no lease has."""

    @property
    def amount(self) -> Amount:
        """What all of it comes to."""
        return self.holds + self.awaits + self.unleased


NEWCOMER: Final = UserTotals()


class Usage:
    """The accounts of all users. `half_life` is in seconds, and so is every `now`, of a clock that does not jump."""

    def __init__(self, half_life: float, accounts: Mapping[int, Account] | None = None) -> None:
        self._decay = math.log(2) / half_life
        self._accounts = dict(accounts or {})

    def of(self, uid: int, now: float) -> float:
        """Return what a user has had, as of now, in share-seconds."""
        account = self._accounts.get(uid)
        return 0.0 if account is None else self._value(account, now)

    def rank(self, uid: int, now: float) -> float:
        """Return by what users are compared, the lesser first: what one has had, and what it holds, for a second more.

        Without that second, all that comes free at one moment would go to one user, who had had nothing of it yet. It
        is rounded to a millionth, so that equals are equal, and who came first decides, however the floats fell.
        """
        account = self._accounts.get(uid)
        return 0.0 if account is None else round(self._value(account, now) + account.rate * _AHEAD, 6)

    def hold(self, uid: int, share: float, now: float) -> None:
        """Note that a user holds this share of the node from now on.

        It is the whole of what it holds, not what came or went: a sum of such would drift, and never be nothing again.
        """
        account = self._accounts.get(uid)
        if account is None:
            self._accounts[uid] = Account(0.0, share, now)
        else:
            self._accounts[uid] = Account(self._value(account, now), share, max(now, account.at))

    def accounts(self, now: float) -> dict[int, Account]:
        """Return every account as of now, for keeping; those that have decayed to nothing are forgotten."""
        for uid, account in tuple(self._accounts.items()):
            value = self._value(account, now)
            if account.rate or value > _FORGOTTEN:
                self._accounts[uid] = Account(value, account.rate, max(now, account.at))
            else:
                del self._accounts[uid]
        return dict(self._accounts)

    def _value(self, account: Account, now: float) -> float:
        """Let the old decay and the new add up: the integral of a constant rate under the same decay.

        By expm1, which is right also where next to no time has passed, or the half-life is next to eternal.
        """
        passed = now - account.at
        if passed <= 0:
            return account.value
        decayed = passed * self._decay
        lost = -math.expm1(-decayed)
        return account.value * (1 - lost) + account.rate * passed * (lost / decayed if decayed else 1.0)
