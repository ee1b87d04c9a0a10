"""The quota of a user, and whether a request is within it. Pure."""

from typing import Final

from mpsd.core.admission.admission import Amount
from mpsd.core.admission.usage import UserTotals
from mpsd.core.errors import QuotaError
from mpsd.core.model import LeaseRequest
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Quota, Settings
from mpsd.core.units import format_size

_FREE: Final = Quota()


def quota_of(user: UserIdentity, settings: Settings) -> Quota:
    """Return the quota of a user: the user's own, else that of its first listed group, else that for all users."""
    quotas = settings.quota
    name = class_of(user, settings) if quotas else ""
    return quotas[name] if name else _FREE


def class_of(user: UserIdentity, settings: Settings) -> str:
    """Return the name of a user's quota; an empty text where no quota applies to the user."""
    theirs = [name for name in settings.quota if user.is_called(name, settings.names)]
    return min(theirs, key=lambda name: (name == "*", name.startswith("%")), default="")


def is_free(quota: Quota, request: LeaseRequest) -> bool:
    """Tell whether no quota can refuse a request: its user has none, and its priority is not above 0."""
    return quota is _FREE and request.priority <= 0


def weighs(quota: Quota) -> bool:
    """Tell whether a quota limits the amount that a user may have, and not only the number of leases."""
    return quota.threads is not None or quota.memory is not None or quota.clients is not None


def check(quota: Quota, has: UserTotals, request: LeaseRequest, worth: Amount) -> None:
    """Refuse a request that exceeds its user's quota. Raises QuotaError, which names the quota and what is left of it.

    `has` is the amount that the user already holds and waits for, and `worth` the amount that the request needs.
    """
    highest, release = quota.priority or 0, "request less, or release a lease: mpsctl leases"
    if has.unleased.clients:
        release += "; your clients without a lease count too: mpsctl clients"
    if request.priority > highest:
        raise QuotaError(
            f"priority {request.priority} was requested, but your quota allows {highest} at most",
            hint="request a lower priority, or ask an administrator to raise quota.priority",
            limit="quota.priority",
        )
    if quota.leases is not None and has.leases >= quota.leases:
        raise QuotaError(f"you have {has.leases} leases, the maximum of your quota", hint=release, limit="quota.leases")
    _check_alone(quota, worth)
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
    if quota.clients is not None and request.processes is None:
        raise QuotaError(
            f"any number of processes was requested, but your quota is {quota.clients} client processes",
            hint="request a number of processes",
            limit="quota.clients",
        )
    if quota.clients is not None and has.amount.clients + worth.clients > quota.clients:
        raise QuotaError(
            f"{worth.clients} client processes were requested, but your quota is {quota.clients}, and you already hold"
            f" {has.amount.clients}",
            hint=release.replace("less", "fewer processes", 1),
            limit="quota.clients",
        )


def _check_alone(quota: Quota, worth: Amount) -> None:
    """Refuse a request that exceeds its user's quota whatever the user releases. Raises QuotaError."""
    wanted = most = limit = ""
    if quota.threads is not None and worth.threads > quota.threads * 10:
        wanted, most, limit = f"{worth.threads / 10:g} % of threads", f"{quota.threads:g} %", "quota.threads"
    elif quota.memory is not None and worth.memory > quota.memory:
        wanted, most, limit = f"{format_size(worth.memory)} of memory", format_size(quota.memory), "quota.memory"
    if wanted:
        raise QuotaError(
            f"{wanted} were requested, but your quota is {most}",
            hint=f"request less, or ask an administrator to raise {limit}",
            limit=limit,
        )


def time_to_live(quota: Quota, requested: float | None) -> float | None:
    """Return the time to live of a lease, in seconds.

    Raises QuotaError when the quota allows less than the requested one.
    """
    if quota.ttl is not None and requested is not None and requested > quota.ttl:
        raise QuotaError(
            f"a time to live of {requested:g} s was requested, but your quota allows {quota.ttl:g} s at most",
            hint="request a shorter time to live, and renew the lease before it expires",
            limit="quota.ttl",
        )
    return quota.ttl if requested is None else requested


LONGEST_NOTICE: Final = 900.0
"""Maximum seconds of notice before the end of a lease: users forget an earlier notice."""

_SHORTEST_NOTICE: Final = 60.0
"""Seconds in which a user can read the notice and type `mpsctl renew`."""


def notice(ttl: float) -> float:
    """Return how many seconds before the end of its time to live the holder of a lease gets notice of it.

    It is a tenth of the time to live, within bounds: not too short to act on, and not so long that the user forgets it
    again. It is never more than half: a holder that renews a lease before half of its time to live is over never gets a
    notice.
    """
    return min(ttl / 2, max(_SHORTEST_NOTICE, min(ttl / 10, LONGEST_NOTICE)))
