"""The ledger, case by case: placement, order, reservations, and every refusal.

test_ledger_states.py shows that no sequence of such cases leads elsewhere, and test_fairness.py tests fairness in the
long run.
"""

from typing import Any, Final

import pytest

from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.admission.users import UserTotals
from mpsd.core.errors import (
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
    QueueFullError,
    QuotaError,
    TooManyLeasesError,
)
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Placement
from mpsd.core.units import GIB, MIB
from tests.core.admission.scenarios import HALF_LIFE, ILL, ON_HOLD, Desk, asked, gpu, now, offer, on, request

ANN, BOB, CAT = 1001, 1002, 1003


def where(lease: Lease) -> list[int]:
    """Return the GPUs that a lease is on, by index."""
    return [int(share.gpu.removeprefix("GPU-")) for share in lease.shares]


class TestPlacement:
    """The choice of a GPU among those where the request fits."""

    @pytest.mark.parametrize(
        ("placement", "taken", "asks", "goes"),
        [
            (Placement.BEST_FIT, [], {}, [0]),
            (Placement.SPREAD, [], {}, [0]),
            (Placement.BEST_FIT, [(1, 10, 10)], {}, [1]),
            (Placement.SPREAD, [(0, 10, 10)], {}, [1]),
            # Memory decides before threads; threads decide where memory is equal.
            (Placement.BEST_FIT, [(0, 90, 1), (2, 1, 9)], {}, [2]),
            (Placement.SPREAD, [(0, 1, 9), (1, 1, 9), (2, 90, 1)], {}, [2]),
            (Placement.BEST_FIT, [(0, 10, 9), (1, 11, 9)], {}, [1]),
            (Placement.SPREAD, [(0, 10, 9), (1, 11, 9), (2, 12, 9)], {}, [0]),
            # The best GPU among those where it fits.
            (Placement.BEST_FIT, [(0, 100, 60), (1, 10, 40)], {}, [1]),
            (Placement.BEST_FIT, [(0, 10, 79.5), (1, 10, 40)], {"memory": 1}, [1]),
            # For several GPUs, the best ones, in order.
            (Placement.BEST_FIT, [(1, 10, 10), (2, 10, 20)], {"gpus": 2}, [2, 1]),
            (Placement.SPREAD, [(0, 10, 10), (2, 10, 20)], {"gpus": 2}, [1, 0]),
            (Placement.BEST_FIT, [], {"gpus": 3}, [0, 1, 2]),
            # A name, and the GPUs that the user is restricted to, precede the policy.
            (Placement.BEST_FIT, [(1, 10, 10)], {"gpu": gpu(2)}, [2]),
            (Placement.SPREAD, [(0, 10, 10)], {"gpu": gpu(0)}, [0]),
            (Placement.BEST_FIT, [(0, 10, 10)], {"among": (gpu(2), gpu(1))}, [1]),
        ],
    )
    def test_policy(
        self, placement: Placement, taken: list[tuple[int, float, float]], asks: dict[str, Any], goes: list[int]
    ) -> None:
        """Best fit takes the fullest GPU that suffices, spread the emptiest; between equal GPUs the first."""
        desk = Desk(*(offer(index) for index in range(3)), placement=placement)
        for index, threads, memory in taken:
            desk.ask(threads, memory, gpu=gpu(index))
        assert where(desk.ask(**asks)) == goes

    @pytest.mark.parametrize("placement", Placement)
    @pytest.mark.parametrize(
        ("asks", "goes"),
        [
            ({"threads": 20, "memory": 8}, 1),
            ({"threads": 10, "memory": 4}, 0),
            ({"threads": 20, "memory": 8, "processes": 2}, 0),
            ({"threads": 20, "memory": 8, "processes": None}, 1),
            ({"threads": 7, "memory": 7}, 0),
            ({"threads": 20, "memory": 2}, 0),
        ],
    )
    def test_same_part(self, placement: Placement, asks: dict[str, Any], goes: int) -> None:
        """Of equally free GPUs, one is chosen whose leases give each process the same limits as the new one."""
        desk = Desk(*(offer(index) for index in range(3)), placement=placement)
        desk.ask(40, 16, gpu=gpu(0), processes=4)
        desk.ask(40, 16, gpu=gpu(1), processes=2)
        for threads, memory in ((20, 2), (20, 14)):
            desk.ask(threads, memory, gpu=gpu(2))
        assert where(desk.ask(**asks)) == [goes]

    def test_because(self) -> None:
        """The reason of a grant says what was free, and where."""
        desk = Desk(offer(0), offer(1))
        lease = desk.ask(33.3, 2, gpus=2)
        assert lease.because == "33.3 % of the threads and 2GiB were free on gpu0, gpu1"
        assert (lease.state, lease.granted, lease.until) == (LeaseState.GRANTED, now(0).time, None)


THREADS, MEMORY = {"threads": 25.5}, {"memory": 10}
PERCENTAGE_LIMIT, MEMORY_LIMIT = "limits.active_thread_percentage", "limits.pinned_device_mem_limit"
SMALLEST: Final = "admission.smallest_share"
FORTY: Final = Limits(ActiveThreadPercentage(400), PinnedDeviceMemLimit(30 * 1024))


class TestRefusals:
    """Every refusal names its limit and its numbers."""

    @pytest.mark.parametrize(
        ("offers", "asks", "error", "limit", "words"),
        [
            ([], {}, DaemonNotReadyError, "gpu", "a GPU was requested, but mpsd cannot use any at present"),
            ([], {"gpus": 2}, DaemonNotReadyError, "gpu", "2 GPUs were requested"),
            ([offer(0)], {"gpu": gpu(1)}, DaemonNotReadyError, "gpu", "GPU-1 was requested"),
            ([offer(0)], {"gpus": 2}, NeverFitsError, "gpus", "2 GPUs were requested, but this node has 1"),
            ([offer(0), offer(1)], {"gpu": gpu(1), "among": (gpu(0),)}, QuotaError, "quota.gpus", "you may use GPU-0"),
            ([offer(0), offer(1)], {"gpus": 2, "among": (gpu(1),)}, QuotaError, "quota.gpus", "you may use GPU-1"),
            ([offer(0)], {"among": (gpu(7),)}, QuotaError, "quota.gpus", "you may use none"),
            ([offer(0)], {"gpus": 2, "among": (gpu(0),)}, NeverFitsError, "gpus", ""),
            ([offer(0, threads=300)], {"threads": 30.1}, NeverFitsError, "threads", ""),
            ([offer(0), offer(1, memory=GIB)], {"memory": 2, "gpus": 2}, NeverFitsError, "memory", ""),
            ([offer(0)], {"processes": 49, "threads": 50}, NeverFitsError, "clients", ""),
            ([offer(0, smallest_share=50)], {"threads": 4.9, "memory": 3.9}, InvalidRequestError, SMALLEST, "is 5 %"),
            ([offer(0, limits=FORTY)], {"threads": 40.1}, ExceedsDaemonLimitError, PERCENTAGE_LIMIT, ""),
            ([offer(0, limits=FORTY)], {"memory": 31}, ExceedsDaemonLimitError, MEMORY_LIMIT, ""),
            ([offer(0)], {"processes": 20}, InvalidRequestError, "processes", ""),
            ([offer(0)], {"gpus": 2, "gpu": gpu(0)}, InvalidRequestError, "gpus", ""),
        ],
    )
    @pytest.mark.parametrize("wait", [0.0, 60.0, None])
    def test_never(  # noqa: PLR0917 - a table has as many columns as it has
        self,
        offers: list[Offer],
        asks: dict[str, Any],
        error: type[MpsdError],
        limit: str,
        words: str,
        wait: float | None,
    ) -> None:
        """A request that can never fit is refused at once, whatever its wait."""
        desk = Desk(*offers)
        with pytest.raises(error) as refusal:
            desk.ask(**asks, wait=wait)
        assert type(refusal.value) is error
        assert refusal.value.limit == limit
        assert words in refusal.value.detail
        assert refusal.value.hint
        assert list(desk.ledger.all()) == []

    def test_smallest_share(self) -> None:
        """A request needs the smallest share of the threads or of the memory."""
        desk = Desk(offer(0, smallest_share=50))
        assert where(desk.ask(5, 0.001)) == where(desk.ask(0.1, 4)) == [0]

    @pytest.mark.parametrize(
        ("taken", "asks", "limit", "words"),
        [
            ({"threads": 75}, THREADS, "threads", "25.5 % of the threads were requested, but only 25 % are left"),
            ({"threads": 100}, THREADS, "threads", "25.5 % of the threads were requested, but only 0 % are left"),
            ({"memory": 70.5}, MEMORY, "memory", "10GiB of memory were requested, but only 9.5GiB are left"),
            ({"memory": 80}, MEMORY, "memory", "10GiB of memory were requested, but only 0B are left"),
            (
                {"threads": 40, "processes": 40},
                {"processes": 9},
                "clients",
                "9 client processes were requested, but only 8 of 48",
            ),
            (
                {"threads": 100, "memory": 80},
                {"threads": 1, "memory": 1},
                "threads",
                "1.0 % of the threads were requested",
            ),
        ],
    )
    def test_not_now(self, taken: dict[str, Any], asks: dict[str, Any], limit: str, words: str) -> None:
        """A refusal because of other leases states what is left; a waiting request has the same reason, and the GPU."""
        desk = Desk(offer(0))
        desk.ask(**taken)
        with pytest.raises(DoesNotFitError) as refusal:
            desk.ask(**asks)
        assert refusal.value.limit == limit
        assert words in refusal.value.detail
        waits = desk.waits(**asks)
        assert words in waits.because
        assert desk.waits_for(waits) == (limit, gpu(0))

    def test_another_user(self) -> None:
        """Where a daemon serves one uid at a time, the refusal names the uid that has it, and what would help."""
        desk = Desk(offer(0, many_users=False))
        desk.ask(uid=ANN)
        with pytest.raises(DoesNotFitError) as plain:
            desk.ask(uid=BOB)
        assert "only drivers 555 and newer" in plain.value.hint
        desk.offers(offer(0, many_users=False, many_users_by='daemon.users = "many"'))
        with pytest.raises(
            DoesNotFitError, match=f"uid {ANN} has 1 % and 1GiB of the GPU, and its control daemon serves one uid"
        ) as refusal:
            desk.ask(uid=BOB)
        assert (refusal.value.limit, "daemon.users" in refusal.value.hint) == ("user", True)
        assert desk.waits_for(desk.waits(uid=BOB)) == ("user", gpu(0))

    def test_not_its_turn(self) -> None:
        """Free resources that are reserved for another request are not granted."""
        desk = Desk(offer(0))
        desk.ask(60)
        desk.waits(50)
        with pytest.raises(
            DoesNotFitError, match="the free capacity is reserved for a request that is ahead in the queue"
        ) as refusal:
            desk.ask(40)
        assert refusal.value.limit == "turn"
        assert desk.waits_for(desk.waits(40)) == ("turn", None)

    def test_too_many(self) -> None:
        """The number of waiting requests and the number of leases are bounded."""
        desk = Desk(offer(0), queue_length=2, leases=4)
        held = desk.ask(100)
        waiting = [desk.waits(), desk.waits()]
        with pytest.raises(QueueFullError, match="2 requests are waiting, the maximum") as full:
            desk.ask(wait=None)
        assert full.value.limit == "queue"
        with pytest.raises(DoesNotFitError):
            desk.ask()  # a request without a wait is refused for the lack
        assert desk.end(held) == [lease.id for lease in waiting]
        desk.ask()
        desk.ask()
        with pytest.raises(TooManyLeasesError, match="this node has 4 leases") as many:
            desk.ask()
        assert many.value.limit == "leases"

    @pytest.mark.parametrize(
        ("first", "second", "told"),
        [
            # The GPU with the smallest missing part.
            ({"threads": 90}, {"threads": 60}, ("threads", gpu(1))),
            ({"threads": 60}, {"memory": 79}, ("threads", gpu(0))),
            ({"threads": 90}, {"memory": 76}, ("memory", gpu(1))),
        ],
    )
    def test_closest(self, first: dict[str, Any], second: dict[str, Any], told: tuple[str, str]) -> None:
        """Of several GPUs the refusal describes the closest one."""
        desk = Desk(offer(0), offer(1))
        desk.ask(**first, gpu=gpu(0))
        desk.ask(**second, gpu=gpu(1))
        assert desk.waits_for(desk.waits(50, 5)) == told

    @pytest.mark.parametrize(
        ("offers", "told"),
        [
            ([offer(0, refusal=ILL), offer(1)], ("threads", gpu(1))),
            ([offer(0, many_users=False), offer(1)], ("threads", gpu(1))),
            ([offer(0, refusal=ON_HOLD), offer(1, memory=MIB)], ("hold", gpu(0))),
        ],
    )
    def test_closest_of_a_kind(self, offers: list[Offer], told: tuple[str, str]) -> None:
        """A full GPU is closer than one that another uid has, and that is closer than one that grants nothing."""
        desk = Desk(offer(0, many_users=False), offer(1))
        desk.ask(1, uid=ANN, gpu=gpu(0))
        desk.ask(60, uid=ANN, gpu=gpu(1))
        desk.offers(*offers)
        assert desk.waits_for(desk.waits(50, uid=BOB)) == told

    def test_several_gpus(self) -> None:
        """The refusal of a request for two GPUs describes one that it cannot have, not one that it could."""
        desk = Desk(offer(0), offer(1), offer(2))
        desk.ask(80, gpu=gpu(0))
        desk.ask(90, gpu=gpu(1))
        assert desk.waits_for(desk.waits(50, gpus=2)) == ("threads", gpu(0))


class TestOrder:
    """The order of grants: priority, past usage, arrival."""

    def test_usage(self) -> None:
        """The user with less past usage is served first, however late it came; past usage decays with time."""
        desk = Desk(offer(0))
        for uid, seconds in ((ANN, 300), (BOB, 200)):
            held = desk.ask(100, uid=uid)
            desk.at += seconds
            desk.end(held)
        held = desk.ask(100, uid=4)
        anns, bobs, cats = desk.waits(100, uid=ANN), desk.waits(100, uid=BOB), desk.waits(100, uid=CAT)
        assert desk.queue() == [cats.id, bobs.id, anns.id]
        assert desk.end(held) == [cats.id]
        desk.at += 150
        assert desk.end(cats) == [bobs.id]
        desk.at += 3 * HALF_LIFE  # Bob holds it all this time
        again = desk.waits(100, uid=CAT)
        assert desk.queue() == [anns.id, again.id]

    def test_several_places_at_once(self) -> None:
        """Resources that become free at once are shared among users of equal usage, not all given to the first."""
        desk = Desk(offer(0), offer(1))
        held = desk.ask(100, uid=4, gpus=2)
        waiting = [desk.waits(25, uid=uid) for uid in (ANN, BOB, CAT) for _ in range(8)]
        granted = desk.end(held)
        owners = [desk.ledger.leases[lease_id].owner.uid for lease_id in granted]
        assert owners == [ANN, BOB, CAT, ANN, BOB, CAT, ANN, BOB]
        assert len(waiting) - len(granted) == len(desk.queue())


def light_user(desk: Desk) -> float | None:
    """Have Ann wait for a whole GPU of which Bob always has a little; return how long she waits."""
    had = desk.ask(100, uid=ANN)
    desk.at += 36_000
    desk.end(had)
    little, whole, start = desk.ask(1, uid=BOB), desk.waits(100, uid=ANN), desk.at
    while desk.at < start + 6 * 3600:
        desk.at += 10
        another = desk.ask(1, uid=BOB, wait=None)
        desk.settle()
        if whole.id in desk.end(little):
            return desk.at - start
        little = another
    return None


@pytest.mark.parametrize("many_users", [True, False])
@pytest.mark.parametrize(("patience", "waited"), [(0.0, 20), (300.0, 310), (1e9, None)])
def test_light_user(many_users: bool, patience: float, waited: float | None) -> None:  # noqa: FBT001
    """A user that always holds a little of a GPU does not delay a request for the whole GPU for hours."""
    assert light_user(Desk(offer(0, many_users=many_users), patience=patience)) == waited


class TestReservations:
    """The resources that the first in the queue waits for are reserved for it, and no more."""

    @pytest.mark.parametrize(
        ("head", "late", "goes"),
        [
            # On the GPU that it waits for, no other request is granted, large or small.
            ({"threads": 50, "gpu": gpu(0)}, {"threads": 1, "gpu": gpu(0)}, None),
            ({"threads": 50, "gpu": gpu(0)}, {"threads": 40, "gpu": gpu(0)}, None),
            # On a GPU that it cannot use, every request is granted.
            ({"threads": 50, "gpu": gpu(0)}, {"threads": 40}, [1]),
            ({"threads": 50, "among": (gpu(0),)}, {"threads": 40}, [1]),
            # If any GPU suffices, the reservation is on the closest one.
            ({"threads": 50}, {"threads": 1}, [0]),
            ({"threads": 50}, {"threads": 21}, None),
            # On a GPU that already has enough, the surplus is free.
            ({"threads": 30, "gpus": 2}, {"threads": 10, "gpu": gpu(1)}, [1]),
            ({"threads": 30, "gpus": 2}, {"threads": 11, "gpu": gpu(1)}, None),
            ({"threads": 30, "memory": 70, "gpus": 2}, {"threads": 1, "memory": 9, "gpu": gpu(1)}, [1]),
            ({"threads": 30, "memory": 70, "gpus": 2}, {"threads": 1, "memory": 10, "gpu": gpu(1)}, None),
            ({"threads": 30, "processes": 40, "gpus": 2}, {"threads": 1, "processes": 7, "gpu": gpu(1)}, [1]),
            ({"threads": 30, "processes": 40, "gpus": 2}, {"threads": 1, "processes": 8, "gpu": gpu(1)}, None),
        ],
    )
    def test_back_fill(self, head: dict[str, Any], late: dict[str, Any], goes: list[int] | None) -> None:
        """One GPU has 20 % left, the other 40 %."""
        desk = Desk(offer(0), offer(1))
        holding = [desk.ask(80, 1, gpu=gpu(0)), desk.ask(60, 1, gpu=gpu(1))]
        first = desk.waits(**head)
        if goes is None:
            with pytest.raises(DoesNotFitError):
                desk.ask(**late)
        else:
            assert where(desk.ask(**late)) == goes
        assert desk.end(*holding) == [first.id]

    def test_as_many_gpus_as_it_asks_for(self) -> None:
        """A reservation for several GPUs is on the closest ones."""
        desk = Desk(*(offer(index) for index in range(4)))
        held = [desk.ask(threads, gpu=gpu(index), uid=BOB) for index, threads in enumerate((90, 40, 60, 80))]
        head = desk.waits(90, gpus=2, uid=ANN)
        assert [where(desk.ask(10, gpu=gpu(index), uid=CAT)) for index in (0, 3)] == [[0], [3]]
        for index in (1, 2):
            with pytest.raises(DoesNotFitError) as refusal:
                desk.ask(1, gpu=gpu(index), uid=CAT)
            assert refusal.value.limit == "turn"
        assert desk.end(held[0]) == []
        with pytest.raises(DoesNotFitError):
            desk.ask(1, gpu=gpu(0), uid=CAT)
        assert where(desk.ask(1, gpu=gpu(2), uid=CAT)) == [2]
        assert desk.end(held[1]) == [head.id]

    @pytest.mark.parametrize(
        ("holds", "wants"),
        [
            ({"threads": 1}, {"threads": 100}),
            ({"memory": 1}, {"memory": 80}),
            ({"processes": 1}, {"threads": 5, "processes": 48}),
            ({"threads": 1}, {"threads": 100, "gpus": 2}),
        ],
    )
    def test_in_one_s_own_way(self, holds: dict[str, Any], wants: dict[str, Any]) -> None:
        """A request that its own user's leases obstruct reserves nothing against other users, however long it waits."""
        desk = Desk(offer(0), offer(1), patience=10)
        mine = [desk.ask(**holds, gpu=gpu(index), uid=ANN) for index in range(2)]
        wanted = desk.waits(**wants, uid=ANN)
        for desk.at in (1, 1000):
            assert desk.settle() == []
            others = [desk.ask(90, 70, gpu=gpu(index), uid=BOB) for index in range(2)]
            assert [where(each) for each in others] == [[0], [1]]
            desk.end(*others)
        # The request precedes later ones of its own user; otherwise a user that works alone would never get a whole
        # GPU.
        with pytest.raises(DoesNotFitError) as refusal:
            desk.ask(1, gpu=gpu(0), uid=ANN)
        assert refusal.value.limit == "turn"
        assert desk.end(*mine) == [wanted.id]

    def test_nothing_idles_for_what_cannot_be(self) -> None:
        """While one of two GPUs is out of service, the other is not reserved for a request for both."""
        desk = Desk(offer(0, refusal=ON_HOLD), offer(1))
        both = desk.waits(100, gpus=2)
        small = desk.ask(50)
        assert where(small) == [1]
        assert desk.waits_for(both) == ("threads", gpu(1))
        assert desk.offers(offer(0), offer(1)) == []
        with pytest.raises(DoesNotFitError):
            desk.ask(50)  # from now on it is reserved
        assert desk.end(small) == [both.id]


class TestOneUser:
    """Daemons that serve one uid at a time."""

    def test_turn_is_full(self) -> None:
        """The user whose turn it is gets everything that it waits for at once: no other user could use the rest."""
        desk = Desk(offer(0, many_users=False))
        held = desk.ask(10, uid=4)
        anns = [desk.waits(25, uid=ANN) for _ in range(5)]
        bobs = [desk.waits(25, uid=BOB) for _ in range(5)]
        assert desk.end(held) == [lease.id for lease in anns[:4]]
        desk.at = 10
        for each in anns[:3]:
            assert desk.end(desk.ledger.leases[each.id]) == []
        assert desk.end(desk.ledger.leases[anns[3].id]) == [lease.id for lease in bobs[:4]]


class TestOffers:
    """Changes of the GPUs' offers."""

    def test_less_than_was_granted(self) -> None:
        """Granted shares stay; nothing is granted until there is room in the smaller offer."""
        desk = Desk(offer(0))
        held = [desk.ask(25, 10) for _ in range(4)]
        assert desk.offers(offer(0, threads=500)) == []
        assert desk.ledger.taken(gpu(0)) == Amount(1000, 40 * GIB, 4)
        with pytest.raises(DoesNotFitError):
            desk.ask(1)
        waiting = desk.waits(25)
        assert desk.end(held[0]) == []
        assert desk.end(held[1]) == []
        assert desk.end(held[2]) == [waiting.id]

    def test_lost_and_back(self) -> None:
        """Shares on a GPU that disappears are still granted when it is back."""
        desk = Desk(offer(0), offer(1))
        held = desk.ask(60, gpu=gpu(1))
        waiting = desk.waits(50, gpu=gpu(1))
        desk.offers(offer(0))
        assert desk.ledger.leases == {held.id: held}
        assert desk.ledger.taken(gpu(1)) == Amount(600, GIB, 1)
        assert desk.waits_for(waiting) == ("gpu", None)
        assert desk.ledger.impossible() == []
        desk.offers(offer(0), offer(1))
        assert desk.waits_for(waiting) == ("threads", gpu(1))
        assert desk.end(held) == [waiting.id]

    def test_impossible(self) -> None:
        """A request that became impossible is refused with the limit."""
        desk = Desk(offer(0), offer(1))
        desk.ask(100, gpu=gpu(0))
        desk.ask(100, gpu=gpu(1))
        large, named, small = desk.waits(50), desk.waits(50, gpu=gpu(1)), desk.waits(30)
        desk.offers(offer(0, threads=400), offer(1))
        assert desk.ledger.impossible() == []
        desk.offers(offer(0, threads=400))
        ((lease, shortage),) = desk.ledger.impossible()
        assert (lease.id, shortage.limit) == (large.id, "threads")
        assert desk.waits_for(large) == ("threads", gpu(0))
        assert desk.waits_for(named) == ("gpu", None)
        assert desk.waits_for(small) == ("threads", gpu(0))


def test_time_to_live_begins_with_the_grant() -> None:
    """With the grant the wait ends, and the time to live begins."""
    desk = Desk(offer(0))
    held = desk.ask(100)
    waiting = desk.waits(wait=30.0, ttl=60)
    desk.at = 29
    assert desk.end(held) == [waiting.id]
    lease = desk.ledger.leases[waiting.id]
    assert (lease.until, lease.ttl, lease.expires) == (None, 60, 89)
    assert desk.ledger.overdue(88.9) == []
    assert desk.ledger.overdue(89) == [lease]


def test_restored() -> None:
    """Leases are still held, waiting requests keep their places, and new requests come later."""
    desk = Desk(offer(0), offer(1))
    held = [desk.ask(100, gpu=gpu(0), ttl=60), desk.ask(60, gpu=gpu(1), uid=ANN)]
    active = desk.ledger.attach(held[1].id, on(gpu(1), 7))
    waiting = [desk.waits(50, uid=BOB), desk.waits(50, uid=CAT, wait=30.0), desk.waits(50, uid=BOB)]
    other = Desk(offer(0), offer(1))
    for lease in desk.ledger.all():
        other.ledger.restore(lease, desk.at)
    assert list(other.ledger.all()) == [held[0], active, *waiting]
    assert [other.ledger.taken(gpu(index)) for index in (0, 1)] == [Amount(1000, GIB, 1), Amount(600, GIB, 1)]
    assert other.ledger.user(BOB) == UserTotals(2, awaits=Amount(1000, 2 * GIB, 2))
    assert other.queue() == [lease.id for lease in waiting]
    assert other.waits(50, uid=BOB).arrival == waiting[-1].arrival + 1
    assert {lease.id for lease in other.ledger.overdue(60)} == {held[0].id, waiting[1].id}
    other.at = 10
    assert other.ledger.usage.of(ANN, 10) == pytest.approx(3, rel=0.01)


class TestAnyNumber:
    """Leases for any number of client processes."""

    def test_each_gets_the_whole(self) -> None:
        """Each process may use the whole share, and without clients the lease takes one place."""
        desk = Desk(offer(clients=2))
        lease = desk.ask(25, 2, processes=None)
        assert lease.shares[0].env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25.0"
        assert lease.shares[0].env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2G"
        assert desk.ledger.taken(gpu(0)) == Amount(250, 2 * GIB, 1)

    def test_lost(self) -> None:
        """Clients whose work has ended keep their places until their processes end."""
        desk = Desk(offer())
        lease = desk.ask(25, 2, processes=2)
        one, other = clients = on(gpu(0), 7, 8)
        desk.ledger.attach(lease.id, clients)
        lease = desk.ledger.lose(lease.id, (one.process, other.process))
        assert lease.clients == lease.lost
        assert not desk.ledger.has_room(lease, gpu(0))
        lease = desk.ledger.attach(lease.id, (other,))
        assert (lease.lost, desk.ledger.has_room(lease, gpu(0))) == ((other.process,), True)
        assert desk.ledger.attach(lease.id, ()).lost == ()

    def test_places(self) -> None:
        """Each client takes a place, as long as no other lease has been granted it, and frees it when it ends."""
        desk = Desk(offer(clients=4))
        lease, other = desk.ask(25, 2, processes=None), desk.ask(uid=ANN)
        clients = on(gpu(0), 7, 8, 9)
        for number in (1, 2, 3):
            assert desk.ledger.has_room(lease, gpu(0))
            lease = desk.ledger.attach(lease.id, clients[:number])
            assert desk.ledger.taken(gpu(0)).clients == number + 1
            assert desk.ledger.user(1000).holds == Amount(250, 2 * GIB, number)
        assert not desk.ledger.has_room(lease, gpu(0))
        waits = desk.waits(uid=ANN)
        assert desk.waits_for(waits)[0] == "clients"
        desk.end(other)
        assert desk.ledger.find(waits.id) in desk.ledger.leases.values()
        assert not desk.ledger.has_room(lease, gpu(0))
        lease = desk.ledger.attach(lease.id, clients[:1])
        assert desk.ledger.has_room(lease, gpu(0))
        desk.ledger.attach(lease.id, ())
        desk.end(*desk.ledger.leases.values())
        assert desk.ledger.taken(gpu(0)) == Amount()


def test_number_on_several_gpus() -> None:
    """A client on one GPU leaves the places on the other one; a process on both takes a place on each."""
    desk = Desk(offer(0), offer(1))
    lease = desk.ask(25, 2, gpus=2)
    lease = desk.ledger.attach(lease.id, on(gpu(1), 7))
    assert [desk.ledger.has_room(lease, gpu(index)) for index in (0, 1)] == [True, False]
    lease = desk.ledger.attach(lease.id, (*lease.attached, *on(gpu(0), 7)))
    assert [desk.ledger.has_room(lease, gpu(index)) for index in (0, 1)] == [False, False]
    assert [each.pid for each in lease.clients] == [7]
    assert desk.ledger.user(1000).holds == Amount(500, 4 * GIB, 2)


class TestUsers:
    """A user's amounts, waiting leases included: the basis of quotas."""

    @pytest.mark.parametrize(
        ("asks", "worth"),
        [
            (request(25, 8), Amount(250, 8 * GIB, 1)),
            (request(25, 8, gpus=2), Amount(500, 16 * GIB, 2)),
            (request(25, 8, processes=3), Amount(250, 8 * GIB, 3)),
            (LeaseRequest(fraction=0.5), Amount(500, 40 * GIB, 1)),
            (LeaseRequest(fraction=0.5, gpu=gpu(0)), Amount(500, 10 * GIB, 1)),
            (LeaseRequest(fraction=0.5, among=(gpu(0),)), Amount(500, 10 * GIB, 1)),
            (LeaseRequest(fraction=0.5, gpus=2), Amount(1000, 80 * GIB, 2)),
            (request(gpu=gpu(9)), Amount()),
        ],
    )
    def test_worth(self, asks: LeaseRequest, worth: Amount) -> None:
        """A request counts its amount on the GPU where that is greatest."""
        assert Desk(offer(0, memory=20 * GIB), offer(1)).ledger.worth(asks) == worth

    def test_nothing_stays_behind(self) -> None:
        """When all leases have ended, only their users' past usage is left."""
        desk = Desk(offer(0))
        for number in range(50):
            desk.ask(25, uid=number % 7, wait=None, ttl=60)
            desk.settle()
        while list(desk.ledger.all()):
            desk.end(next(iter(desk.ledger.all())))
        fresh = Desk(offer(0)).ledger
        for name, value in vars(desk.ledger).items():
            if isinstance(value, dict):
                assert value == vars(fresh)[name], name
        assert vars(desk.ledger._queue)["_first_since"] == {}

    def test_place_of_none(self) -> None:
        """A lease that does not wait has no position."""
        desk = Desk(offer(0))
        assert desk.ledger.place(desk.ask().id, 0) is None
        assert desk.ledger.place("lease-0", 0) is None
        assert desk.ledger.find("lease-0") is None
        assert desk.ledger.end("lease-0", "released", now(0)) is None
        assert desk.ledger.submit(asked(request()), now(0)).id in desk.ledger.leases
