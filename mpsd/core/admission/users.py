"""The users of the node: the recent usage of each, what it has, and its quota. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Final

from msgspec import Struct, structs

from mpsd.core.admission.admission import NOTHING, Amount, said_of_clients
from mpsd.core.errors import QuotaError
from mpsd.core.model import Lease, LeaseRequest
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Quota, Settings
from mpsd.core.units import MIB, format_size

# -- the usage of a user -----------------------------------------------------------------------------------------------

# It decides between equals in the queue. It is the integral over time of the greater of the user's share of the node's
# threads and its share of the node's memory, decaying with a half-life: yesterday's use counts for less than the
# present one.

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


# -- the quota of a user -----------------------------------------------------------------------------------------------

_FREE: Final = Quota()


def quota_of(user: UserIdentity, settings: Settings) -> Quota:
    """Return the quota of a user: the user's own, else that of its first listed group, else that for all users.

    If it is not certain which groups the user has, each group's quota applies, and that for all users.
    """
    quotas = settings.quota
    name = class_of(user, settings) if quotas else ""
    if not user.is_certain and (not name or name == "*" or name.startswith("%")):
        return _strictest([quota for each, quota in quotas.items() if each == "*" or each.startswith("%")])
    return quotas[name] if name else _FREE


def _strictest(quotas: Iterable[Quota]) -> Quota:
    """Return a quota that allows what each of these allows."""
    found = _FREE
    for quota in quotas:
        limits = {}
        for field in fields(Quota):
            both = [each for each in (getattr(found, field.name), getattr(quota, field.name)) if each is not None]
            limits[field.name] = min(both, default=None)
        among = [{*each} for each in (found.gpus, quota.gpus) if each is not None]
        limits["gpus"] = tuple(sorted(set.intersection(*among))) if among else None
        limits["priority"] = min(found.priority or 0, quota.priority or 0)
        found = Quota(**limits)
    return found


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


def check_quota(quota: Quota, has: UserTotals, request: LeaseRequest, worth: Amount) -> None:
    """Refuse a request that exceeds its user's quota. Raises QuotaError, which names the quota and what is left of it.

    `has` is the amount that the user already holds and waits for, and `worth` the amount that the request needs.
    """
    highest, release = quota.priority or 0, _release_hint(has)
    if request.priority > highest:
        raise QuotaError(
            f"priority {request.priority} was requested, but your quota allows {highest} at most",
            hint="request a lower priority, or ask an administrator to raise quota.priority",
            limit="quota.priority",
        )
    _check_leases(quota, has)
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
    if quota.clients is not None and has.amount.places + worth.places > quota.clients:
        raise QuotaError(
            f"{said_of_clients(worth)} were requested, but your quota is {quota.clients}, and you already hold"
            f" {has.amount.places}",
            hint=release.replace("less", "fewer processes", 1),
            limit="quota.clients",
        )


def check_gpu(quota: Quota, gpu: str) -> None:
    """Refuse a GPU that a quota does not include. Raises QuotaError."""
    if quota.gpus is not None and gpu not in quota.gpus:
        raise QuotaError(
            "your quota does not include this GPU",
            hint="request another GPU, or ask an administrator to change quota.gpus",
            limit="quota.gpus",
        )


def check_left(quota: Quota, has: UserTotals) -> None:
    """Refuse whatever a user requests where its quota leaves nothing. Raises QuotaError."""
    _check_leases(quota, has)
    used = limit = ""
    if quota.threads is not None and has.amount.threads >= int(quota.threads * 10):
        used, limit = f"{has.amount.threads / 10:g} % of threads", "quota.threads"
    elif quota.memory is not None and has.amount.memory + MIB > quota.memory:
        used, limit = f"{format_size(has.amount.memory)} of memory", "quota.memory"
    elif quota.clients is not None and has.amount.places >= quota.clients:
        used, limit = f"{has.amount.places} client processes", "quota.clients"
    if limit:
        raise QuotaError(f"you hold {used}, all of your quota", hint=_release_hint(has), limit=limit)


def _check_leases(quota: Quota, has: UserTotals) -> None:
    if quota.leases is not None and has.leases >= quota.leases:
        because = f"you have {has.leases} leases, the maximum of your quota"
        raise QuotaError(because, hint=_release_hint(has), limit="quota.leases")


def _release_hint(has: UserTotals) -> str:
    hint = "request less, or release a lease: mpsctl leases"
    if has.unleased.clients:
        hint += "; your clients without a lease count too: mpsctl clients"
    return hint


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


def left_of(quota: Quota, has: UserTotals, free: Amount) -> Amount:
    """Return how much of a free amount a quota leaves to the next lease of its user."""
    if quota.leases is not None and has.leases >= quota.leases:
        return NOTHING
    threads = free.threads if quota.threads is None else int(quota.threads * 10) - has.amount.threads
    memory = free.memory if quota.memory is None else quota.memory - has.amount.memory
    places = free.places if quota.clients is None else quota.clients - has.amount.places
    return Amount(
        max(min(free.threads, threads), 0), max(min(free.memory, memory), 0), max(min(free.places, places), 0)
    )


def within_gpu_count(quota: Quota, request: LeaseRequest, leases: Iterable[Lease]) -> LeaseRequest:
    """Return a request that leaves its user on no more GPUs than its quota; `leases` are all of that user.

    A GPU that a waiting lease names counts as one that the user has; another waiting lease counts as GPUs of its own,
    unless it can only be granted on those. A request for which no other GPU is left is restricted to those, too.
    Raises QuotaError.
    """
    if quota.gpu_count is None:
        return request
    leases = tuple(leases)
    has = {share.gpu for lease in leases for share in lease.shares}
    has |= {each.request.gpu for each in leases if not each.shares and each.request.gpu != "any"}
    awaited = sum(each.request.gpus for each in leases if not (each.shares or _is_on(has, each.request)))
    if _is_on(has, request) or len(has) + awaited + request.gpus <= quota.gpu_count:
        return request
    left = tuple(gpu for gpu in sorted(has) if request.among is None or gpu in request.among)
    if request.gpu == "any" and len(left) >= request.gpus:
        return structs.replace(request, among=left)
    raise QuotaError(
        f"further GPUs were requested ({request.gpus}), but your leases have or wait for {len(has) + awaited}, and your"
        f" quota is {quota.gpu_count} at a time",
        hint="request one of the GPUs that you have, or release a lease: mpsctl leases",
        limit="quota.gpu_count",
    )


def _is_on(gpus: set[str], request: LeaseRequest) -> bool:
    """Tell whether a request can only be granted on these GPUs."""
    return gpus.issuperset(request.among or (request.gpu,) if request.gpu == "any" else (request.gpu,))


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
