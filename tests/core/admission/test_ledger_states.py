"""Every operation on a ledger, in any order, compared after each step with a reference that is computed by hand.

There are three nodes: one whose daemons serve many users, one whose daemons serve one user at a time, and a crowded
one. By default more than 10,000 steps are taken in all. For more, set the factor, and lift each test's time limit:

    MPSD_LEDGER_TIMES=100 pytest --timeout=0 tests/core/admission/test_ledger_states.py
"""

import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.users import Account, Usage
from mpsd.core.errors import (
    CapacityError,
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
from mpsd.core.model import Claim, HoldingProcess, Lease, LeaseRequest, LeaseState, Limits, Owner, ProcessIdentity
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Admission, Placement
from mpsd.core.units import MIB
from tests.core.admission.hand_ledger import HandLedger
from tests.core.admission.scenarios import FREE, ILL, ON_HOLD, asked, gpu, granted_on, now, offer, on

pytestmark = pytest.mark.thorough

T = TypeVar("T")

HALF_LIFE: Final = 100.0
UIDS: Final = (1000, 1001, 1002, 1003)
SIZES: Final = (1000 * MIB, 1500 * MIB + 7, 3000 * MIB)
TIMES: Final = int(os.environ.get("MPSD_LEDGER_TIMES", "1"))
STEPS: Final = 60

picks = st.integers(0, 10**6)
"""An index into the existing ones, whose number changes from step to step."""

requests = st.builds(
    LeaseRequest,
    threads=st.sampled_from((1, 100, 250, 333, 500, 501, 900, 1000)).map(ActiveThreadPercentage),
    memory=st.sampled_from((1, 100, 333, 500, 999, 1400)).map(PinnedDeviceMemLimit),
    gpu=st.sampled_from(("any", "any", "any", gpu(0), gpu(1), gpu(9))),
    among=st.sampled_from((None, None, None, (gpu(0),), (gpu(1), gpu(2)))),
    gpus=st.sampled_from((1, 1, 1, 1, 2, 3)),
    processes=st.sampled_from((1, 1, 1, 2, 5, 30, None, None)),
    connections=st.sampled_from((None, None, None, None, 8, 32)),
    priority=st.sampled_from((0, 0, 0, 0, 1, -1)),
)
fractions = st.builds(
    LeaseRequest,
    fraction=st.sampled_from((0.001, 0.1, 0.25, 0.29, 1 / 3, 0.5, 0.75, 1.0)),
    gpus=st.sampled_from((1, 1, 1, 2)),
)
limits = st.sampled_from(
    (
        FREE,
        FREE,
        Limits(ActiveThreadPercentage(500), None),
        Limits(FREE.active_thread_percentage, PinnedDeviceMemLimit(400)),
    )
)


class Node(RuleBasedStateMachine):
    """A ledger, its decisions so far, and the reference beside it."""

    gpus = 2
    many_users = True
    users: tuple[int, ...] = UIDS
    first_rules = Admission(queue_length=8, leases=16, patience=50.0)

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.first_rules, Usage(HALF_LIFE))
        self.books = HandLedger(self.first_rules, lambda uid: self.ledger.usage.of(uid, self.books.now), HALF_LIFE)
        self.ended: set[str] = set()
        self.untaken: dict[str, Lease] = {}
        """For each taken claim, the lease before that."""
        self.head: str | None = None
        """The first in the queue since the last grant before it,"""
        self.kept: frozenset[str] = frozenset()
        """the GPUs that were nearest to granting it at the last look,"""
        self.behind: dict[str, frozenset[str]] = {}
        """the leases that were granted behind it meanwhile, each with these GPUs,"""
        self.lacked: list[Fraction] | None = None
        """and what it lacked on its reserved GPUs at the last check."""

    # -- what happens -------------------------------------------------------------------------------------------------

    @initialize(memory=st.lists(st.sampled_from(SIZES), min_size=3, max_size=3), placement=st.sampled_from(Placement))
    def start(self, memory: list[int], placement: Placement) -> None:
        self.change_rules(replace(self.first_rules, placement=placement))
        for index in range(self.gpus):
            at = offer(index, memory=memory[index], clients=16, many_users=self.many_users)
            self.books.offers[at.gpu] = at
        self.offer()

    @rule(
        request=requests | fractions,
        uid=picks,
        wait=st.sampled_from((0.0, 30.0, None, None)),
        ttl=st.sampled_from((None, 60.0)),
        claim=st.sampled_from((None, None, None, Claim(20.0), Claim(1e9))),
    )
    def submit(
        self, request: LeaseRequest, uid: int, wait: float | None, ttl: float | None, claim: Claim | None = None
    ) -> None:
        self.submit_one(request, uid, wait, ttl, claim)
        self.settle()

    def submit_one(
        self, request: LeaseRequest, uid: int, wait: float | None, ttl: float | None, claim: Claim | None = None
    ) -> None:
        """Send a request; it must be granted, wait, or be refused for a true reason."""
        books = self.books
        lease = asked(request, uid=self.pick(self.users, uid), wait=wait, ttl=ttl, at=books.now)
        if claim is not None:
            lease = structs.replace(lease, holders=(), claim=claim)
        newest = max((each.arrival for each in self.all()), default=0)
        placed = structs.replace(lease, arrival=newest + 1)
        self.note_head()
        gpus, first = books.places_of_new(placed)
        try:
            answer = self.ledger.submit(lease, now(books.now))
        except MpsdError as refusal:
            self.check_refusal(refusal, lease, gpus)
            return
        assert len(books.leases) + len(books.waiting) < books.rules.leases
        assert answer.arrival > newest
        assert [share.gpu for share in answer.shares] == gpus
        assert (answer.state is LeaseState.WAITING) == (not gpus)
        if gpus:
            self.check_grant(answer)
        else:
            assert wait != 0
            assert len(books.waiting) < books.rules.queue_length
            assert sum(each.owner.uid == lease.owner.uid for each in books.waiting.values()) < books.rules.queue_per_uid
        books.enter(answer)
        if gpus:
            self.note_let_in(answer, first)

    @precondition(lambda self: self.books.leases or self.books.waiting)
    @rule(which=picks, because=st.sampled_from(("released", "its holder is gone", "revoked", "its caller hung up")))
    def end(self, which: int, because: str) -> None:
        """End a lease for any reason, and once more, which does nothing."""
        self.end_one(self.pick(self.all(), which), because)
        self.settle()

    @precondition(lambda self: self.books.leases or self.books.waiting)
    @rule(which=st.lists(picks, min_size=1, max_size=6), newcomer=st.none() | requests | fractions, uid=picks)
    def end_several(self, which: list[int], newcomer: LeaseRequest | None, uid: int) -> None:
        """End several leases before anything is granted; a new request may arrive just then."""
        for each in which:
            if self.all():
                self.end_one(self.pick(self.all(), each), "released")
        if newcomer is not None:
            self.submit_one(newcomer, uid, None, None)
        self.settle()

    @rule(seconds=st.sampled_from((1e-6, 0.5, 7.0, 31.0, 61.0, 1000.0)))
    def pass_time(self, seconds: float) -> None:
        books = self.books
        books.pass_time(seconds)
        late = {lease.id for lease in books.waiting.values() if lease.until is not None and lease.until <= books.now}
        for lease in books.leases.values():
            ends = (lease.expires, lease.claim.deadline if lease.claim is not None else None)
            late |= {lease.id for end in ends if end is not None and end <= books.now}
        overdue = self.ledger.overdue(books.now)
        assert sorted(lease.id for lease in overdue) == sorted(late)
        for lease in overdue:
            self.end_one(lease, "its time is over")
        self.settle()

    @precondition(lambda self: self.books.leases)
    @rule(which=picks, ttl=st.sampled_from((1.0, 60.0, 1e9)))
    def renew(self, which: int, ttl: float) -> None:
        """Set a longer or shorter time to live."""
        lease = self.pick(list(self.books.leases.values()), which)
        renewed = self.ledger.renew(lease.id, ttl, self.books.now)
        assert renewed == structs.replace(lease, ttl=ttl, expires=self.books.now + ttl)
        self.books.enter(renewed)

    @rule(request=requests | fractions, uid=picks, taker=picks, ttl=st.sampled_from((None, 5.0)))
    def claim(self, request: LeaseRequest, uid: int, taker: int, ttl: float | None) -> None:
        """Create a claim, and take the newest one; its creator may have other leases there."""
        self.submit_one(request, uid, None, None, Claim(1e9))
        if self.claimed():
            self.take_one(self.claimed()[-1], taker, ttl)
        self.settle()

    @precondition(lambda self: self.claimed())
    @rule(which=picks, uid=picks, ttl=st.sampled_from((None, None, 5.0)))
    def take(self, which: int, uid: int, ttl: float | None) -> None:
        """Take a claim as some user, unless the daemons of its GPUs serve another user."""
        self.take_one(self.pick(self.claimed(), which), uid, ttl)

    def take_one(self, claim: Lease, uid: int, ttl: float | None) -> None:
        books, user = self.books, self.pick(self.users, uid)
        where = {share.gpu for share in claim.shares}
        others = {
            (each.owner.uid, share.gpu)
            for each in books.leases.values()
            for share in each.shares
            if each.claim is None and share.gpu in where and each.owner.uid != user
        }
        if self.many_users:
            others = {(uid, at) for uid, at in others if at not in books.offers}
        holder, owner = HoldingProcess(ProcessIdentity(uid, uid)), Owner(user, user, uid, None)
        if others:
            refusals = {at: books.offers[at].refusal for _, at in others if at in books.offers}
            with pytest.raises(CapacityError) as refusal:
                self.ledger.take(claim.id, owner, holder, ttl, books.now)
            assert refusal.value.limit in {"gpu", "user", *(each.limit for each in refusals.values() if each)}
            return
        taken = self.ledger.take(claim.id, owner, holder, ttl, books.now)
        life = (claim.ttl, claim.expires) if ttl in {None, claim.ttl} else (ttl, books.now + (ttl or 0.0))
        assert taken == structs.replace(claim, owner=owner, holders=(holder,), claim=None, ttl=life[0], expires=life[1])
        self.untaken[claim.id] = claim
        self.enter_again(taken)

    @precondition(lambda self: self.untaken)
    @rule(which=picks)
    def put_back(self, which: int) -> None:
        """Undo the taking of a claim, as when its daemon could not be opened to the taker."""
        before = self.untaken.pop(self.pick(list(self.untaken), which))
        lease = self.books.leases.get(before.id)
        if lease is not None and not lease.clients and lease.claim is None:
            back = structs.replace(lease, owner=before.owner, holders=(), claim=before.claim)
            self.ledger.put_back(back, self.books.now)
            self.enter_again(back)

    @precondition(lambda self: self.books.leases)
    @rule(which=picks, seconds=st.sampled_from((20.0, 1e9)))
    def leave(self, which: int, seconds: float) -> None:
        """Turn a lease into a claim for its own user, so that it outlives its holder."""
        lease = self.pick(list(self.books.leases.values()), which)
        claim = Claim(seconds, lease.owner.uid, self.books.now + seconds)
        left = structs.replace(lease, state=LeaseState.GRANTED, holders=(), claim=claim, attached=())
        self.ledger.put_back(left, self.books.now)
        self.enter_again(left)

    @precondition(lambda self: self.books.leases)
    @rule(which=picks, pids=st.lists(picks, min_size=1, max_size=3, unique=True))
    def hand_over(self, which: int, pids: list[int]) -> None:
        """Give a lease other holders: that changes nothing else, and a claim with a holder is no claim any more."""
        lease = self.pick(list(self.books.leases.values()), which)
        if lease.claim is None:
            others = tuple(HoldingProcess(ProcessIdentity(pid, pid)) for pid in pids)
            handed = self.ledger.set_holders(lease.id, others)
            assert handed == structs.replace(lease, holders=others)
            self.books.enter(handed)

    def claimed(self) -> list[Lease]:
        return [lease for lease in self.books.leases.values() if lease.claim is not None]

    def enter_again(self, lease: Lease) -> None:
        """Record a lease that has gained or lost its user, which may change the first in the queue."""
        self.books.leases.pop(lease.id)
        self.books.enter(lease)
        self.forget_head()
        self.settle()

    @precondition(lambda self: self.books.leases)
    @rule(which=picks, pids=st.sampled_from(((), (7,), (7, 8))), places=st.sampled_from((1, 1, 4)))
    def attach(self, which: int, pids: tuple[int, ...], places: int) -> None:
        """Let clients come and go, but none of a lease without a holder."""
        lease = self.pick(list(self.books.leases.values()), which)
        where = self.pick(lease.shares, which).gpu
        if lease.claim is not None:
            assert not self.ledger.has_room(lease, where)
            return
        if lease.request.processes is None:
            self.attach_any(lease, where, coming=6 * len(pids))
            return
        clients = on(where, *pids, places=places)
        there = sum(each.gpu == where for each in lease.attached)
        assert self.ledger.has_room(lease, where) == (there < lease.request.processes)
        attached = self.ledger.attach(lease.id, clients)
        state = LeaseState.ACTIVE if clients else LeaseState.GRANTED
        assert attached == structs.replace(lease, attached=clients, state=state)
        self.books.enter(attached)
        if places > 1:
            self.forget_head()  # a client with more places than those of its lease precedes waiting leases
        self.settle()

    def attach_any(self, lease: Lease, where: str, coming: int) -> None:
        """Let clients of a lease for any number come, without taking another lease's place; or let one go."""
        books = self.books
        if not coming:
            books.enter(self.ledger.attach(lease.id, lease.attached[:-1]))
        for _ in range(coming):
            lease = books.leases[lease.id]
            offer = books.offers.get(where)
            is_free = (
                offer is None
                or (granted_on(books.leases.values(), where) + offer.unleased).places < offer.clients
                or all(each.gpu != where for each in lease.attached)
            )
            assert self.ledger.has_room(lease, where) == is_free
            if is_free:
                number = max((each.pid for each in lease.clients), default=0) + 1
                books.enter(self.ledger.attach(lease.id, (*lease.attached, *on(where, number))))
        self.forget_head()  # a client of an existing lease precedes waiting leases
        self.settle()

    @rule(which=picks, refusal=st.sampled_from((None, None, ILL, ON_HOLD)))
    def fall_ill(self, which: int, refusal: Any) -> None:
        """Make a GPU unhealthy or held, or let it recover."""
        self.change_offer(which, lambda at: structs.replace(at, refusal=refusal))

    @rule(which=picks, threads=st.sampled_from((1000, 1000, 400, 1500)), memory=st.sampled_from((*SIZES, 0)))
    def resize(self, which: int, threads: int, memory: int) -> None:
        """Offer more or less of a GPU, also less than was granted on it."""
        self.change_offer(which, lambda at: structs.replace(at, threads=threads, memory=memory))

    @rule(which=picks, clients=st.sampled_from((16, 16, 3)), to=limits)
    def limit(self, which: int, clients: int, to: Limits) -> None:
        """Change a control daemon's limits for each client, and its number of clients."""
        self.change_offer(which, lambda at: structs.replace(at, clients=clients, limits=to))

    @rule(which=picks, uid=picks, threads=st.sampled_from((1, 250, 1000)), memory=st.sampled_from((0, 333 * MIB + 5)))
    def use_without_a_lease(self, which: int, uid: int, threads: int, memory: int) -> None:
        """Add an unleased client, or remove all from a GPU, if its user has one there."""
        if not self.books.offers:
            return
        at, user = self.pick(list(self.books.offers), which), self.pick(self.users, uid)
        there = self.books.unleased.setdefault(at, {})
        if user in there:
            there.clear()
        else:
            there[user] = Amount(threads, memory, 1)
        before = {lease.id: lease for lease in self.books.leases.values()}
        self.change_offer(which, lambda each: structs.replace(each, unleased=sum(there.values(), Amount())))
        assert before.items() <= self.ledger.leases.items(), "who has a lease keeps it"

    @rule(index=st.integers(0, 2), memory=st.sampled_from(SIZES))
    def lose_or_find(self, index: int, memory: int) -> None:
        """Let a GPU disappear with its granted leases, or come back."""
        if self.books.offers.pop(gpu(index), None) is None and index < self.gpus:
            unleased = sum(self.books.unleased.get(gpu(index), {}).values(), Amount())
            at = offer(index, memory=memory, clients=16, many_users=self.many_users, unleased=unleased)
            self.books.offers[at.gpu] = at
        self.forget_head()
        self.offer()
        self.settle()

    @rule(
        placement=st.sampled_from(Placement),
        queue_length=st.sampled_from((1, 4, 8)),
        leases=st.sampled_from((3, 8, 16)),
        patience=st.sampled_from((0.25, 5.0, 50.0, 1e9)),
        queue_per_uid=st.sampled_from((2, 8, 8)),
    )
    def reload(self, placement: Placement, queue_length: int, leases: int, patience: float, queue_per_uid: int) -> None:
        """Change the rules.

        Patience is above zero, as the settings demand: with none at all, becoming the first would change the order at
        the very moment when it is recorded, and another settle at that moment could grant one more.
        """
        self.change_rules(
            Admission(
                placement=placement,
                queue_length=queue_length,
                leases=leases,
                patience=patience,
                queue_per_uid=queue_per_uid,
            )
        )
        self.settle()

    @rule(order=st.randoms(use_true_random=False), offers_first=st.booleans(), settles=st.booleans())
    def restart(self, order: Any, offers_first: bool, settles: bool) -> None:  # noqa: FBT001 - drawn, not passed
        """Start anew from the stored state: the leases, in any order, and the past usage."""
        books = self.books
        before = self.ledger.usage.accounts(books.now)
        accounts = {uid: Account(account.value, 0.0, books.now) for uid, account in before.items()}
        self.ledger = Ledger(books.rules, Usage(HALF_LIFE, accounts))
        stored = self.all()
        order.shuffle(stored)
        if offers_first:
            self.offer()
        for lease in [*stored, *stored]:  # a lease that is already there is not entered twice
            self.ledger.restore(lease, books.now)
        self.offer()
        books.first_since.clear()  # patience begins anew
        self.forget_head()
        if settles:
            self.settle()

    # -- what is checked whenever something is decided -----------------------------------------------------------------

    def settle(self) -> None:
        """Grant what can be granted: exactly the leases of the reference, in its order, and no others."""
        for lease, shortage in self.ledger.impossible():
            self.check_impossible(lease, shortage.error)
            self.end_one(lease, "it can never be had any more")
        self.note_head()
        granted = self.ledger.settle(now(self.books.now))
        for lease in granted:
            self.check_grant(lease)
        before = dict(self.books.leases)
        for lease, first in zip(granted, self.books.settle(granted), strict=True):
            self.note_let_in(lease, first)
        assert self.books.leases.keys() - before.keys() == {lease.id for lease in granted}
        assert self.ledger.settle(now(self.books.now)) == []

    def check_grant(self, lease: Lease) -> None:
        request, books = lease.request, self.books
        asked_for = books.waiting.get(lease.id)
        if asked_for is not None:
            assert (lease.request, lease.owner, lease.arrival) == (
                asked_for.request,
                asked_for.owner,
                asked_for.arrival,
            )
        assert lease.state is LeaseState.GRANTED
        assert lease.expires == (None if lease.ttl is None else books.now + lease.ttl)
        assert lease.until is None
        if (claim := lease.claim) is not None:
            assert claim == Claim(claim.seconds, claim.uid, books.now + claim.seconds)
        where = [share.gpu for share in lease.shares]
        assert len(set(where)) == len(where) == request.gpus
        for share in lease.shares:
            at = books.offers[share.gpu]
            assert at.refusal is None
            assert (share.daemon, share.env["CUDA_VISIBLE_DEVICES"]) == (at.daemon, at.gpu)
            need = books.need(request, at)
            assert (share.threads.tenths, share.memory.bytes) == (need.threads, need.memory)
            assert share.places * (request.processes or 1) == need.places

    def check_refusal(self, refusal: MpsdError, lease: Lease, gpus: list[str]) -> None:
        """Check that a refusal is of the right kind, names a true limit, and has a hint."""
        request, books = lease.request, self.books
        named, candidates = books.named(request), books.candidates(request)
        assert refusal.hint
        assert refusal.limit
        if len(candidates) < request.gpus:
            self.check_impossible(lease, type(refusal))
        elif len(books.leases) + len(books.waiting) >= books.rules.leases:
            assert (type(refusal), refusal.limit) == (TooManyLeasesError, "leases")
        elif lease.until is None or lease.until > books.now:
            assert type(refusal) is QueueFullError
            own = [each for each in books.waiting.values() if each.owner.uid == lease.owner.uid]
            if len(own) >= books.rules.queue_per_uid:
                assert refusal.limit == "admission.queue_per_uid"
            else:
                assert refusal.limit == "queue"
                assert len(books.waiting) >= books.rules.queue_length
        else:
            assert isinstance(refusal, DoesNotFitError | DaemonNotReadyError)
            self.check_lack(lease, refusal.limit)
        assert not gpus or isinstance(refusal, TooManyLeasesError)
        assert len(named) >= len(candidates)

    def check_impossible(self, lease: Lease, error: type[MpsdError]) -> None:
        """Check that the request could not be granted on as many GPUs as it needs, even if they were empty."""
        named, request = self.books.named(lease.request), lease.request
        assert len(self.books.candidates(request)) < request.gpus
        if request.gpus > 1 and request.gpu != "any":
            assert error is InvalidRequestError
        elif len(named) >= request.gpus:
            assert error in {NeverFitsError, ExceedsDaemonLimitError, InvalidRequestError}
        elif request.among is not None and len(self.books.named(structs.replace(request, among=None))) >= request.gpus:
            assert error is QuotaError
        else:
            assert error is (NeverFitsError if named else DaemonNotReadyError)

    def check_lack(self, lease: Lease, limit: str, where: str | None = None) -> None:
        """Check that the stated limit of a waiting lease is lacking on the stated GPU, or on one that it could use."""
        books = self.books
        candidates = books.candidates(lease.request)
        lacks = {at.gpu: books.lacking(lease, at, books.leases.values()) for at in candidates}
        if sum(not each for each in lacks.values()) >= lease.request.gpus:
            assert (limit, where) == ("turn", None)
        elif where is not None:
            assert limit in lacks[where]
        else:
            assert any(limit in each for each in lacks.values())

    # -- no later request delays the head ------------------------------------------------------------------------------

    def note_head(self) -> None:
        """Record the current first in the queue, which ends the reservation of another."""
        first = next(iter(self.books.in_order()), None)
        if first is None or first.id != self.head:
            self.forget_head()
            self.head = None if first is None else first.id

    def forget_head(self) -> None:
        """Start a new record of the leases that are granted behind the first in the queue."""
        self.head, self.behind, self.lacked = None, {}, None

    def note_let_in(self, lease: Lease, first: str | None) -> None:
        """Record a grant, and the first in the queue when it was decided; start anew if that is another one.

        The order afterwards does not show the first, since a grant counts against its user at once. A user with less
        past usage than the head's user overtakes the head, and may come after it from then on: that is no delay. A
        grant behind the head to the head's own user may make another lease the first, which then counts for the next
        decision.
        """
        if first is not None and first == self.head:
            self.behind[lease.id] = self.kept
        else:
            self.behind, self.lacked = {}, None

    @invariant()
    def head_is_not_delayed(self) -> None:
        """Check that other grants never increase what the first in the queue lacks, on as many GPUs as it requests.

        The leases granted behind it take nothing that it waits for: without those that were granted while the same GPUs
        were the nearest, it would still have to wait for these. As leases end, another GPU may become the nearest.
        """
        head = self.books.waiting.get(self.head or "")
        lacks = self.books.lacks(head) if head is not None else []
        if head is not None and lacks:
            for now_missing, before in zip(lacks, self.lacked or lacks, strict=True):
                assert now_missing <= before
            held = self.books.leases.values()
            kept = [offer for _, offer in self.books.closest(head, self.books.promising(head, held), held)]
            self.kept = frozenset(offer.gpu for offer in kept)
            others = [lease for lease in held if self.behind.get(lease.id) != self.kept]
            assert any(self.books.lacking(head, offer, others) for offer in kept)
        self.lacked = lacks or None

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        """Check that the ledger has exactly the leases that it returned, unchanged, each in one place."""
        books, ledger = self.books, self.ledger
        assert dict(ledger.leases) == books.leases
        assert dict(ledger.waiting) == books.waiting
        assert not books.leases.keys() & books.waiting.keys()
        assert not self.ended & (books.leases.keys() | books.waiting.keys())
        assert [lease.id for lease in ledger.all()] == [*ledger.leases, *ledger.waiting]
        arrivals = [lease.arrival for lease in ledger.all()]
        assert len(set(arrivals)) == len(arrivals)
        for lease in self.all():
            assert ledger.find(lease.id) is ledger.leases.get(lease.id, ledger.waiting.get(lease.id))

    @invariant()
    def sums_are_sums(self) -> None:
        """Check that the ledger's sums of resources, and each user's amounts, agree with the leases."""
        books, ledger = self.books, self.ledger
        for index in range(3):
            assert ledger.taken(gpu(index)) == granted_on(books.leases.values(), gpu(index))
            taken = (lease for lease in books.leases.values() if lease.claim is None)
            there = {lease.owner.uid for lease in taken for share in lease.shares if share.gpu == gpu(index)}
            assert {*ledger.holders(gpu(index))} == there
        for uid in UIDS:
            mine = [lease for lease in self.all() if lease.owner.uid == uid]
            worth = books.charged().get(uid, Amount())
            for lease in mine:
                held = [granted_on([lease], gpu(index)) for index in range(3)]
                for each in held if lease.shares else [ledger.worth(lease.request)]:
                    worth += each
            assert (ledger.user(uid).leases, ledger.user(uid).amount) == (len(mine), worth)

    @invariant()
    def usage_is_what_was_used(self) -> None:
        """Check that the past usage of users is the integral of what they held."""
        for uid in UIDS:
            had, share = self.books.used.get(uid, 0.0), self.books.share(uid)
            assert abs(self.ledger.usage.of(uid, self.books.now) - had) <= 1e-3 + 1e-6 * had
            assert abs(self.ledger.usage.rank(uid, self.books.now) - had - share) <= 2e-3 + 1e-6 * had

    @invariant()
    def places_are_in_order(self) -> None:
        places = self.ledger.places(self.books.now)
        assert list(places) == [lease.id for lease in self.books.in_order()]
        for position, (lease_id, place) in enumerate(places.items(), start=1):
            lease, waits_for = self.books.waiting[lease_id], place.waits_for
            assert place.position == position
            assert self.ledger.place(lease_id, self.books.now) == place
            assert waits_for.because
            if len(self.books.candidates(lease.request)) >= lease.request.gpus:
                assert issubclass(waits_for.error, CapacityError)
                self.check_lack(lease, waits_for.limit, waits_for.gpu)

    # -- in short ------------------------------------------------------------------------------------------------------

    def all(self) -> list[Lease]:
        """Return every lease that was returned and has not ended."""
        return [*self.books.leases.values(), *self.books.waiting.values()]

    @staticmethod
    def pick(among: Any, which: int) -> Any:
        return among[which % len(among)]

    def end_one(self, lease: Lease, because: str) -> None:
        ended = self.ledger.end(lease.id, because, now(self.books.now))
        expected = structs.replace(lease, state=LeaseState.ENDED, because=because, ended=now(0).time)
        assert ended == expected
        assert self.ledger.end(lease.id, because, now(self.books.now)) is None
        self.books.strike(lease.id)
        self.ended.add(lease.id)
        self.behind.pop(lease.id, None)

    def change_offer(self, which: int, to: Callable[[Offer], Offer]) -> None:
        if self.books.offers:
            before = self.pick(list(self.books.offers.values()), which)
            self.books.offers[before.gpu] = to(before)
            self.forget_head()
            self.offer()
            self.settle()

    def change_rules(self, rules: Admission) -> None:
        self.ledger.rules = self.books.rules = rules

    def offer(self) -> None:
        """Pass the offers to the ledger; equal offers change nothing."""
        charged, at = self.books.charged(), self.books.now
        self.ledger.offer(list(self.books.offers.values()), at, charged)
        assert not self.ledger.offer([structs.replace(each) for each in self.books.offers.values()], at, {**charged})


class OneUser(Node):
    """A node whose daemons serve one user at a time."""

    many_users = False
    gpus = 3

    @invariant()
    def one_user_at_a_time(self) -> None:
        """Check that no user is ever admitted beside another; an untaken claim admits no user."""
        for index in range(self.gpus):
            holders = {
                lease.owner.uid
                for lease in self.books.leases.values()
                for share in lease.shares
                if share.gpu == gpu(index) and lease.claim is None
            }
            assert len(holders) <= 1


class Crowded(Node):
    """A node with one GPU and two users, where requests rarely fit at once."""

    gpus = 1
    users = UIDS[:2]
    first_rules = Admission(queue_length=20, leases=40, patience=5.0)


class Three(Node):
    """A node of three GPUs."""

    gpus = 3


def _steps(share: int) -> settings:
    return settings(max_examples=share * TIMES, stateful_step_count=STEPS)


TestManyUsers = Three.TestCase
TestManyUsers.settings = _steps(90)
TestOneUser = OneUser.TestCase
TestOneUser.settings = _steps(90)
TestCrowded = Crowded.TestCase
TestCrowded.settings = _steps(90)
