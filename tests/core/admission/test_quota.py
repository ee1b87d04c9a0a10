"""Quotas: which quota applies to a user, and what each of its limits refuses, by name and number."""

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.admission.admission import Amount
from mpsd.core.admission.users import UserTotals, check_quota, is_free, notice, quota_of, time_to_live
from mpsd.core.errors import QuotaError
from mpsd.core.model import LeaseRequest
from mpsd.core.roles import UserIdentity
from mpsd.core.setting_parsers import UserNames
from mpsd.core.settings import Quota, Settings
from mpsd.core.units import GIB, MIB

ANN: Final = UserIdentity(1000, frozenset({1000, 50, 60}))
NAMES: Final = UserNames({"ann": 1000, "bob": 1001}, {"staff": 50, "physics": 60, "cleaners": 70}, ("%ann",))
QUARTER: Final = Amount(250, 8 * GIB, 1)


class TestWhose:
    """A user's own quota precedes its groups', and these precede the general one; each is named by name or number."""

    OWN, STAFF, PHYSICS, ALL = Quota(leases=1), Quota(leases=2), Quota(leases=3), Quota(leases=4)

    @pytest.mark.parametrize(
        ("quotas", "whose"),
        [
            ({}, Quota()),
            ({"*": ALL}, ALL),
            ({"bob": OWN, "%cleaners": STAFF}, Quota()),
            ({"*": ALL, "%staff": STAFF}, STAFF),
            ({"*": ALL, "%staff": STAFF, "ann": OWN}, OWN),
            ({"ann": OWN, "%staff": STAFF}, OWN),
            ({"%physics": PHYSICS, "%staff": STAFF}, PHYSICS),
            ({"%staff": STAFF, "%physics": PHYSICS}, STAFF),
            ({"staff": STAFF, "*": ALL}, ALL),
            ({"%ann": STAFF, "*": ALL}, ALL),
            ({"1000": OWN, "%staff": STAFF}, OWN),
            ({"%60": PHYSICS, "*": ALL}, PHYSICS),
            ({"50": OWN, "%1001": STAFF, "*": ALL}, ALL),
        ],
    )
    def test_quota_of(self, quotas: dict[str, Quota], whose: Quota) -> None:
        """Of several groups the one that is listed first counts, and a group does not apply to a user of its name."""
        assert quota_of(ANN, Settings(quota=quotas, names=NAMES)) == whose

    @pytest.mark.parametrize(
        ("names", "is_among"),
        [
            ((), False),
            (("*",), True),
            (("ann",), True),
            (("bob", "%physics"), True),
            (("staff",), False),
            (("%ann", "%cleaners", "bob"), False),
            (("1000",), True),
            (("%50",), True),
            (("50", "%1001", "%", "99999999999", "\u0661"), False),
        ],
    )
    def test_is_among(self, names: tuple[str, ...], *, is_among: bool) -> None:
        """A list may name a user, one of its groups, or all users."""
        assert ANN.is_among(names, NAMES) is is_among


@pytest.mark.parametrize(
    ("quota", "has", "priority", "limit", "words"),
    [
        (
            Quota(clients=48),
            UserTotals(2, Amount(0, 0, 40), Amount(0, 0, 8)),
            0,
            "quota.clients",
            "1 client processes were requested, but your quota is 48, and you already hold 48",
        ),
        (Quota(), UserTotals(), 1, "quota.priority", "priority 1 was requested, but your quota allows 0 at most"),
        (
            Quota(priority=5),
            UserTotals(),
            6,
            "quota.priority",
            "priority 6 was requested, but your quota allows 5 at most",
        ),
        (
            Quota(priority=-5),
            UserTotals(),
            -4,
            "quota.priority",
            "priority -4 was requested, but your quota allows -5 at most",
        ),
        (Quota(leases=2), UserTotals(2), 0, "quota.leases", "you have 2 leases, the maximum of your quota"),
        (Quota(leases=2), UserTotals(3), 0, "quota.leases", "you have 3 leases, the maximum of your quota"),
        (
            Quota(threads=100),
            UserTotals(3, Amount(751, 0, 3)),
            0,
            "quota.threads",
            "25 % of threads were requested, but your quota is 100 %, and you already hold 75.1 %",
        ),
        (
            Quota(memory=32 * GIB),
            UserTotals(3, Amount(3, 24 * GIB + MIB, 3)),
            0,
            "quota.memory",
            "8GiB of memory were requested, but your quota is 32GiB, and you already hold 24577MiB",
        ),
    ],
)
def test_refused(quota: Quota, has: UserTotals, priority: int, limit: str, words: str) -> None:
    """A request above a quota is refused with the quota's name, the requested amount, and the amount left."""
    with pytest.raises(QuotaError) as refusal:
        check_quota(quota, has, LeaseRequest(priority=priority), QUARTER)
    assert refusal.value.limit == limit
    assert words in refusal.value.detail
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("quota", "has", "priority"),
    [
        (Quota(), UserTotals(10_000, Amount(10**9, 2**60, 10**6)), 0),
        (Quota(), UserTotals(), -100),
        (Quota(priority=5), UserTotals(), 5),
        (Quota(priority=-5), UserTotals(), -5),
        (Quota(leases=3), UserTotals(2), 0),
        (Quota(threads=100), UserTotals(3, Amount(750, 0, 3)), 0),
        (Quota(threads=25), UserTotals(), 0),
        (Quota(memory=32 * GIB), UserTotals(3, Amount(3, 24 * GIB, 3)), 0),
    ],
)
def test_within(quota: Quota, has: UserTotals, priority: int) -> None:
    """A quota may be used up completely; where a limit is not set there is none, except for priority."""
    check_quota(quota, has, LeaseRequest(priority=priority), QUARTER)


@pytest.mark.parametrize(
    ("quotas", "priority", "free"),
    [
        ({}, 0, True),
        ({}, -1, True),
        ({}, 1, False),
        ({"bob": Quota(leases=0)}, 0, True),
        ({"ann": Quota(leases=0)}, 0, False),
        ({"ann": Quota(ttl=60)}, 0, False),
    ],
)
def test_is_free(quotas: dict[str, Quota], priority: int, *, free: bool) -> None:
    """A request is free of quotas where its user has none and it asks for no priority: nothing can refuse it then."""
    quota, request = quota_of(ANN, Settings(quota=quotas, names=NAMES)), LeaseRequest(priority=priority)
    assert is_free(quota, request) is free
    if free:
        check_quota(quota, UserTotals(10_000, Amount(10**9, 2**60, 10**6)), request, QUARTER)
        assert time_to_live(quota, 1e9) == 1e9


def test_any_number_of_processes() -> None:
    """If a quota bounds the clients of a user, a request for any number of them exceeds it."""
    with pytest.raises(QuotaError) as refusal:
        check_quota(Quota(clients=8), UserTotals(), LeaseRequest(processes=None), QUARTER)
    assert refusal.value.limit == "quota.clients"
    check_quota(Quota(threads=100), UserTotals(), LeaseRequest(processes=None), QUARTER)


def test_uncertain_groups() -> None:
    """A user of whom it is not certain which groups it has gets the strictest of all that may be its quota."""
    quotas = {
        "*": Quota(leases=8, ttl=60.0),
        "%a": Quota(threads=50.0, priority=3, gpus=("GPU-1", "GPU-2")),
        "%b": Quota(leases=2, threads=75.0, gpus=("GPU-2", "GPU-3")),
        "bob": Quota(leases=0),
    }
    settings = Settings(quota=quotas, names=NAMES)
    strictest = Quota(leases=2, threads=50.0, priority=0, ttl=60.0, gpus=("GPU-2",))
    assert quota_of(UserIdentity(77, is_certain=False), settings) == strictest
    assert quota_of(UserIdentity(77), settings) == quotas["*"]
    own = replace(settings, quota={**quotas, "77": Quota(leases=1)})
    assert quota_of(UserIdentity(77, is_certain=False), own) == Quota(leases=1)


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_tenths_are_exact(tenths: int, has: int) -> None:
    """A quota in percent is exact in tenths, whatever the float: 16.1 * 10 is not 161.00000000000003."""
    quota = Quota(threads=float(f"{(has + tenths) / 10:.1f}"))
    check_quota(quota, UserTotals(1, Amount(has, 1, 1)), LeaseRequest(), Amount(tenths, 1, 1))
    with pytest.raises(QuotaError):
        check_quota(quota, UserTotals(1, Amount(has, 1, 1)), LeaseRequest(), Amount(tenths + 1, 1, 1))


@pytest.mark.parametrize(
    ("quota", "asked", "ttl"),
    [
        (Quota(), None, None),
        (Quota(), 1e9, 1e9),
        (Quota(ttl=60), None, 60),
        (Quota(ttl=60), 59, 59),
        (Quota(ttl=60), 60, 60),
    ],
)
def test_time_to_live(quota: Quota, asked: float | None, ttl: float | None) -> None:
    """A request without a time to live gets the longest that its quota allows, if the quota sets one."""
    assert time_to_live(quota, asked) == ttl


@pytest.mark.parametrize(
    ("ttl", "before"), [(1, 0.5), (100, 50), (120, 60), (600, 60), (3600, 360), (9000, 900), (86_400, 900)]
)
def test_notice(ttl: float, before: float) -> None:
    """The notice of a lease's end comes while its holder can act on it, and not so early that it is forgotten."""
    assert notice(ttl) == before


def test_too_long_a_time_to_live() -> None:
    """A longer time to live is refused, and not shortened."""
    with pytest.raises(QuotaError, match=r"61 s was requested, but your quota allows 60 s at most") as refusal:
        time_to_live(Quota(ttl=60), 61)
    assert (refusal.value.limit, refusal.value.hint) == (
        "quota.ttl",
        "request a shorter time to live, and renew the lease before it expires",
    )
