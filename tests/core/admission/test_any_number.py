"""A lease for any number of processes takes a place for each client, and never a place of another lease."""

from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpsd.core.admission.admission import Amount
from mpsd.core.errors import DoesNotFitError
from mpsd.core.model import Lease
from tests.core.admission.scenarios import Desk, gpu, granted_on, now, offer, on

PLACES: Final = 6
UIDS: Final = (1000, 1001)

picks = st.integers(0, 10**6)


class Places(RuleBasedStateMachine):
    """Leases on one GPU with few places, whose clients come and go; some leases wait for a place."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(offer(clients=PLACES))
        self.pids = 0

    @property
    def leases(self) -> dict[str, Lease]:
        """The leases that hold something."""
        return self.desk.ledger.leases

    @property
    def taken(self) -> int:
        """The places that these leases hold, from the leases themselves."""
        return granted_on(self.leases.values(), gpu(0)).clients

    def pick(self, which: int) -> Lease:
        """Return one of them."""
        return [*self.leases.values()][which % len(self.leases)]

    @initialize()
    def begin(self) -> None:
        """Begin with at least one lease for any number."""
        self.desk.ask(processes=None)

    @rule(processes=st.sampled_from((1, 2, None)), uid=st.sampled_from(UIDS), waits=st.booleans())
    def ask(self, processes: int | None, uid: int, waits: bool) -> None:  # noqa: FBT001 - drawn, not passed
        """Request a lease; it is granted if there are places for it, and no other lease waits for them."""
        is_free = self.taken + (processes or 1) <= PLACES and not self.desk.ledger.waiting
        try:
            lease = self.desk.ask(uid=uid, processes=processes, wait=None if waits else 0.0)
        except DoesNotFitError:
            assert not is_free
            return
        assert not is_free or lease.id in self.leases

    @precondition(lambda self: self.leases)
    @rule(which=picks)
    def come(self, which: int) -> None:
        """Add a client, if its lease may have one more."""
        lease, taken = self.pick(which), self.taken
        room = self.desk.ledger.has_room(lease, gpu(0))
        if lease.request.processes is None:
            assert room == (not lease.clients or taken < PLACES)
        else:
            assert room == (len(lease.clients) < lease.request.processes)
        if room:
            self.pids += 1
            self.desk.ledger.attach(lease.id, (*lease.attached, *on(gpu(0), self.pids)))

    @precondition(lambda self: self.leases)
    @rule(which=picks)
    def go(self, which: int) -> None:
        """Remove a client, if there is one; a waiting lease may get its place."""
        lease = self.pick(which)
        self.desk.ledger.attach(lease.id, lease.attached[1:])
        self.desk.settle()

    @precondition(lambda self: self.leases)
    @rule(which=picks)
    def end(self, which: int) -> None:
        """End a lease."""
        self.desk.end(self.pick(which))

    @invariant()
    def no_place_is_given_twice(self) -> None:
        """At most the existing places are taken, and the sums agree with the leases and their clients."""
        ledger = self.desk.ledger
        assert self.taken <= PLACES
        assert ledger.taken(gpu(0)) == granted_on(self.leases.values(), gpu(0))
        for uid in UIDS:
            mine = [lease for lease in self.leases.values() if lease.owner.uid == uid]
            assert ledger.user(uid).holds == granted_on(mine, gpu(0))

    def teardown(self) -> None:
        """Nothing is left when all leases have ended."""
        for lease in [*self.desk.ledger.all()]:
            self.desk.ledger.end(lease.id, "released", now(self.desk.at))
        assert self.desk.ledger.taken(gpu(0)) == Amount()


TestPlaces = Places.TestCase
