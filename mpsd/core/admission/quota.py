"""What one user may have: which quota is theirs, and whether a request is within it. Pure."""

from typing import Final

from mpsd.core.admission.admission import Amount
from mpsd.core.admission.ledger import UserTotals
from mpsd.core.errors import QuotaError
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Quota, Settings
from mpsd.core.units import format_size

_FREE: Final = Quota()


def quota_of(user: UserIdentity, settings: Settings) -> Quota:
    """Return a user's quota: its own before its groups' (the first listed) before everybody's."""
    quotas = settings.quota
    theirs = [name for name in quotas if user.is_called(name, settings.names)]
    if not theirs:
        return _FREE
    return quotas[min(theirs, key=lambda name: (name == "*", name.startswith("%")))]


def weighs(quota: Quota) -> bool:
    """Tell whether a quota bounds how much a user may have, and not only how many leases."""
    return quota.threads is not None or quota.memory is not None or quota.clients is not None


def check(quota: Quota, has: UserTotals, priority: int, worth: Amount) -> None:
    """Refuse a request that exceeds its user's quota. Raises QuotaError, which names the quota and what is left of it.

    `has` is what the user holds and waits for already, and `worth` what the request comes to.
    """
    highest, release = quota.priority or 0, "request less, or release a lease: mpsctl leases"
    if priority > highest:
        raise QuotaError(
            f"priority {priority} was requested, but your quota allows {highest} at most",
            hint="request a lower priority, or ask an administrator to raise quota.priority",
            limit="quota.priority",
        )
    if quota.leases is not None and has.leases >= quota.leases:
        raise QuotaError(f"you have {has.leases} leases, the maximum of your quota", hint=release, limit="quota.leases")
    if quota.threads is not None and has.amount.threads + worth.threads > quota.threads * 10:
        raise QuotaError(
            f"{worth.threads / 10:g} % of threads were requested, but your quota is {quota.threads:g} %, and you"
            f" already hold {has.amount.threads / 10:g} %",
            hint=release,
            limit="quota.threads",
        )
    if quota.memory is not None and has.amount.memory + worth.memory > quota.memory:
        raise QuotaError(
            f"{format_size(worth.memory)} of memory were requested, but your quota is {format_size(quota.memory)},"
            f" and you already hold {format_size(has.amount.memory)}",
            hint=release,
            limit="quota.memory",
        )
    if quota.clients is not None and has.amount.clients + worth.clients > quota.clients:
        raise QuotaError(
            f"{worth.clients} client processes were requested, but your quota is {quota.clients}, and you already hold"
            f" {has.amount.clients}",
            hint="request fewer processes, or release a lease: mpsctl leases",
            limit="quota.clients",
        )


def time_to_live(quota: Quota, requested: float | None) -> float | None:
    """Return the time to live that a lease gets, in seconds. Raises QuotaError when the quota allows less."""
    if quota.ttl is not None and requested is not None and requested > quota.ttl:
        raise QuotaError(
            f"a time to live of {requested:g} s was requested, but your quota allows {quota.ttl:g} s at most",
            hint="request a shorter time to live, and renew the lease before it expires",
            limit="quota.ttl",
        )
    return quota.ttl if requested is None else requested
