"""How much of the node each user has had lately: what decides between equals in the queue. Pure.

A user's usage is the integral over time of the greater of its share of the node's threads and its share of the node's
memory, decaying with a half-life, so that what was used yesterday counts for less than what is used now.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """One user: what it had until `at` (share-seconds), and the share that it holds since then."""

    value: float = 0.0
    rate: float = 0.0
    at: float = 0.0


class Usage:
    """The accounts of all users."""

    def __init__(self, half_life: float, accounts: Mapping[int, Account] | None = None) -> None:
        self.half_life = half_life
        self._accounts = dict(accounts or {})

    def of(self, uid: int, now: float) -> float:
        """Return what a user has had, as of now, in share-seconds."""
        account = self._accounts.get(uid)
        return 0.0 if account is None else self._advanced(account, now).value

    def change(self, uid: int, delta: float, now: float) -> None:
        """Note that a user holds this much more, or less, of the node from now on."""
        account = self._advanced(self._accounts.get(uid, Account(at=now)), now)
        # A sum of floats may miss zero by a hair, and a user that holds nothing must come to rest.
        rate = account.rate + delta
        self._accounts[uid] = Account(account.value, rate if rate > 1e-9 else 0.0, now)  # noqa: PLR2004 - a hair

    def accounts(self, now: float) -> dict[int, Account]:
        """Return every account as of now, for keeping; those that have decayed to nothing are left out."""
        advanced = {uid: self._advanced(account, now) for uid, account in self._accounts.items()}
        self._accounts = {uid: account for uid, account in advanced.items() if account.rate or account.value > 1e-3}  # noqa: PLR2004
        return dict(self._accounts)

    def _advanced(self, account: Account, now: float) -> Account:
        """Let the old decay and the new add up; the integral of a constant rate under the same decay."""
        passed = max(now - account.at, 0.0)
        decay = 0.5 ** (passed / self.half_life)
        gained = account.rate * self.half_life / math.log(2) * (1 - decay)
        return Account(account.value * decay + gained, account.rate, max(now, account.at))
