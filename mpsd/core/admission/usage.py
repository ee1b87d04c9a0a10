"""The recent usage of the node by each user, which decides between equals in the queue. Pure.

A user's usage is the integral over time of the greater of its share of the node's threads and its share of the node's
memory, decaying with a half-life: yesterday's use counts for less than the present one.
"""

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from mpsd.core.admission.admission import NOTHING, Amount

_AHEAD: Final = 1.0
"""Seconds for which the amount that a user holds is counted ahead when users are compared."""

_FORGOTTEN: Final = 1e-3
"""Share-seconds below which an account is forgotten."""


class Account(Struct, frozen=True):
    """The account of one user: its usage until `at` (share-seconds), and the share that it holds since then."""

    value: float = 0.0
    rate: float = 0.0
    at: float = 0.0


class UserTotals(Struct, frozen=True):
    """The totals of one user: its leases, waiting ones included, the amount it holds, and the amount it waits for."""

    leases: int = 0
    holds: Amount = NOTHING
    awaits: Amount = NOTHING
    unleased: Amount = NOTHING
    """The use by its clients without a lease."""

    @property
    def amount(self) -> Amount:
        """The sum of all three."""
        return self.holds + self.awaits + self.unleased


NEWCOMER: Final = UserTotals()


class Usage:
    """The accounts of all users. `half_life` and every `now` are in seconds; `now` is that of a monotonic clock."""

    def __init__(self, half_life: float, accounts: Mapping[int, Account] | None = None) -> None:
        self._decay = math.log(2) / half_life
        self._accounts = dict(accounts or {})

    def of(self, uid: int, now: float) -> float:
        """Return a user's usage as of now, in share-seconds."""
        account = self._accounts.get(uid)
        return 0.0 if account is None else self._value(account, now)

    def rank(self, uid: int, now: float) -> float:
        """Return the value by which users are compared, the lesser first: the usage, with one second ahead.

        The second ahead counts what the user holds now. Without it, all capacity that becomes free at one moment would
        be granted to the same user. The value is rounded to a millionth, so that equal users are equal and the earlier
        request decides, regardless of the rounding of floats.
        """
        account = self._accounts.get(uid)
        return 0.0 if account is None else round(self._value(account, now) + account.rate * _AHEAD, 6)

    def note_share(self, uid: int, share: float, now: float) -> None:
        """Note that a user holds this share of the node from now on.

        It is the whole share, not a change of it: a sum of changes would drift and never return to zero.
        """
        account = self._accounts.get(uid)
        if account is None:
            self._accounts[uid] = Account(0.0, share, now)
        else:
            self._accounts[uid] = Account(self._value(account, now), share, max(now, account.at))

    def accounts(self, now: float) -> dict[int, Account]:
        """Return every account as of now, for storage; accounts that have decayed to nothing are removed."""
        for uid, account in tuple(self._accounts.items()):
            value = self._value(account, now)
            if account.rate or value > _FORGOTTEN:
                self._accounts[uid] = Account(value, account.rate, max(now, account.at))
            else:
                del self._accounts[uid]
        return dict(self._accounts)

    def _value(self, account: Account, now: float) -> float:
        """Return a usage of now: the old one decayed, and the integral of the constant rate under the same decay added.

        It uses expm1, which is also exact where almost no time has passed, or where the half-life is almost infinite.
        """
        passed = now - account.at
        if passed <= 0:
            return account.value
        decayed = passed * self._decay
        lost = -math.expm1(-decayed)
        return account.value * (1 - lost) + account.rate * passed * (lost / decayed if decayed else 1.0)
