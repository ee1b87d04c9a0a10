"""Ceilings: the next client of a control daemon gets at most what the leases need whose clients are still to attach."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from mpsd.core.enforcement.ceiling import (
    SMALLEST,
    UNLIMITED,
    Ceiling,
    CeilingRules,
    ContextProof,
    Expected,
    ExpectedClients,
    context_proof,
    expected_in_turns,
)
from mpsd.core.model import (
    GpuProcess,
    GpuUsage,
    Known,
    Lease,
    LeaseRequest,
    Limits,
    ProcessIdentity,
    Share,
    Unknown,
)
from mpsd.core.mps.limits import widest_limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Attach
from tests.core.admission.scenarios import asked

WINDOW: Final = 30.0
ANYTIME: Final = CeilingRules(SMALLEST, attach=Attach.ANYTIME, window=WINDOW)
STRICT: Final = CeilingRules(SMALLEST, attach=Attach.STRICT, window=WINDOW)


def limits(percent: int, mebibytes: int | None) -> Limits:
    """Return limits of so many percent and MiB."""
    memory = None if mebibytes is None else PinnedDeviceMemLimit(mebibytes)
    return Limits(ActiveThreadPercentage(percent * 10), memory)


QUARTER, HALF = limits(25, 1024), limits(50, 512)


def open_to(expected: ExpectedClients) -> set[str]:
    """Return the leases that the ceiling is open to since the last settle."""
    return {each for each in (*"ab", *map(str, range(1000))) if expected.is_open_to(each)}


def fits(one: Limits, other: Limits) -> bool:
    """Return whether neither limit of the one exceeds that of the other."""
    return widest_limits(one, other) == other


def held(processes: int | None) -> Lease:
    lease = asked(LeaseRequest(ActiveThreadPercentage(500), PinnedDeviceMemLimit(3000), processes=processes))
    share = Share("GPU-0", "gpu0", ActiveThreadPercentage(500), PinnedDeviceMemLimit(3000), {})
    return structs.replace(lease, shares=(share,))


SHOWN, MISSING, UNKNOWN = ContextProof.SHOWN, ContextProof.MISSING, ContextProof.UNKNOWN


@pytest.mark.parametrize(
    ("processes", "proofs", "expected"),
    [
        (1, [], Expected.ALWAYS),
        (3, [], Expected.ALWAYS),
        (1, [MISSING], Expected.ALWAYS),
        (1, [SHOWN], Expected.NOT),
        (1, [UNKNOWN], Expected.ONCE),
        (2, [SHOWN], Expected.ONCE),
        (2, [MISSING], Expected.ALWAYS),
        (2, [SHOWN, SHOWN], Expected.NOT),
        (2, [SHOWN, UNKNOWN], Expected.ONCE),
        (2, [UNKNOWN, MISSING], Expected.ALWAYS),
        (None, [SHOWN, SHOWN], Expected.ONCE),
    ],
)
def test_awaited(processes: int | None, proofs: list[ContextProof], expected: Expected) -> None:
    """The turns of a lease end when the limits of all its processes have bound, or after one more turn."""
    assert expected_in_turns(processes, proofs) is expected


def usage(**memory: int | None) -> Known[GpuUsage]:
    held = {int(name[1:]): Unknown("not reported") if size is None else Known(size) for name, size in memory.items()}
    return Known(GpuUsage(0, {pid: GpuProcess(each, mps=True) for pid, each in held.items()}))


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (usage(p7=1), SHOWN),
        (usage(p7=0), MISSING),
        (usage(p8=1), MISSING),
        (usage(p7=None), UNKNOWN),
        (Unknown("lost"), UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_context_proof(reading: Known[GpuUsage] | Unknown | None, expected: ContextProof) -> None:
    """Memory proves a context, where NVML shows it."""
    assert context_proof(ProcessIdentity(7, 7), reading) is expected


def test_never_below_what_anybody_gets() -> None:
    """Where an operator gives all processes something, a small lease does not reduce it."""
    expected = ExpectedClients()
    expected.expect("a", QUARTER, Expected.ALWAYS)
    assert expected.ceiling(CeilingRules(UNLIMITED, attach=Attach.ANYTIME, window=WINDOW), 0.0).limits == UNLIMITED


class TestStrictly:
    """The ceiling in strict mode."""

    def test_who_does_not_come_has_another_turn(self) -> None:
        """A lease whose client does not come moves to the end and gets another turn."""
        expected = ExpectedClients()
        expected.expect("a", QUARTER, Expected.ALWAYS)
        expected.expect("b", HALF, Expected.ONCE)
        for now, ceiling in (
            (0.0, Ceiling(QUARTER, 30.0)),
            (29.9, Ceiling(QUARTER, 30.0)),
            (30.0, Ceiling(HALF, 60.0)),
            (60.0, Ceiling(QUARTER, 90.0)),
        ):
            assert expected.ceiling(STRICT, now) == ceiling
        assert not expected.expects("b")
        expected.forget("a")
        assert expected.ceiling(STRICT, 61.0) == Ceiling(SMALLEST)

    def test_a_turn_is_held(self) -> None:
        """A held turn does not pass while its lease waits for another GPU; the window begins with the first answer."""
        expected = ExpectedClients()
        expected.expect("a", QUARTER, Expected.ALWAYS)
        expected.expect("b", HALF, Expected.ALWAYS)
        expected.ceiling(STRICT, 0.0)
        expected.keep_slot("b")  # another lease has the turn, so there is nothing to hold
        expected.keep_slot("a")
        assert expected.ceiling(STRICT, 1000.0) == Ceiling(QUARTER)
        expected.answer("a", Expected.ALWAYS, now=1000.0)
        assert expected.ceiling(STRICT, 1000.0) == Ceiling(QUARTER, 1030.0)
        expected.keep_slot("a")
        expected.answer("a", Expected.ALWAYS, now=1010.0)
        assert expected.ceiling(STRICT, 1010.0) == Ceiling(QUARTER, 1030.0)
        assert expected.ceiling(STRICT, 1030.0) == Ceiling(HALF, 1060.0)

    def test_who_asks_is_not_forgotten(self) -> None:
        """While a caller waits for its answer, the lease is not dropped; its turn begins with the answer."""
        expected = ExpectedClients()
        expected.expect("a", QUARTER, Expected.ONCE)
        expected.ceiling(STRICT, 0.0)
        expected.ask("a")
        expected.expect("a", QUARTER, Expected.ONCE, anew=False)
        expected.ceiling(STRICT, 31.0)
        assert open_to(expected) == {"a"}
        expected.answer("a", Expected.ONCE, now=40.0)
        assert expected.ceiling(STRICT, 69.9) == Ceiling(QUARTER, 70.0)
        expected.ceiling(STRICT, 70.0)
        assert not expected.expects("a")

    def test_who_is_waited_for_comes_first(self) -> None:
        """A lease whose client did not come in its turn delays no caller a second time."""
        expected = ExpectedClients()
        expected.expect("late", QUARTER, Expected.ALWAYS)
        expected.ask("late")
        expected.ceiling(STRICT, 0.0)
        expected.answer("late", Expected.ALWAYS, now=0.0)
        expected.expect("a", HALF, Expected.ALWAYS)
        expected.ask("a")
        assert expected.ceiling(STRICT, 29.9) == Ceiling(QUARTER, 30.0)
        assert expected.ceiling(STRICT, 30.0) == Ceiling(HALF, 60.0)
        expected.answer("a", Expected.ALWAYS, now=30.0)
        expected.forget("a")
        assert expected.ceiling(STRICT, 31.0) == Ceiling(QUARTER, 61.0)
        expected.expect("b", HALF, Expected.ALWAYS)
        assert expected.ceiling(STRICT, 32.0) == Ceiling(QUARTER, 61.0)
        expected.ask("b")
        assert expected.ceiling(STRICT, 32.0) == Ceiling(HALF, 62.0)
        expected.forget("b")
        assert expected.ceiling(STRICT, 33.0) == Ceiling(QUARTER, 63.0)

    def test_a_turn_that_has_passed(self) -> None:
        """A repeated check does not bring back a single turn that has passed, until something happens."""
        expected = ExpectedClients()
        expected.expect("a", QUARTER, Expected.ONCE)
        expected.ceiling(STRICT, 0.0)
        assert expected.ceiling(STRICT, 30.0) == Ceiling(SMALLEST)
        expected.expect("a", QUARTER, Expected.ONCE, anew=False)
        assert expected.ceiling(STRICT, 31.0) == Ceiling(SMALLEST)
        expected.expect("a", QUARTER, Expected.ONCE)
        assert expected.ceiling(STRICT, 32.0) == Ceiling(QUARTER, 62.0)
        expected.expect("a", QUARTER, Expected.ALWAYS, anew=False)
        assert expected.ceiling(STRICT, 62.0) == Ceiling(QUARTER, 92.0)


COMINGS: Final = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([QUARTER, HALF, SMALLEST]), st.booleans()))


@given(COMINGS)
def test_what_needs_nothing_else(comings: list[tuple[int, Limits, bool]]) -> None:
    """A lease that comes or goes and is reported to need no other limits leaves the limits unchanged."""
    expected = ExpectedClients()
    for number, size, comes in comings:
        before = expected.ceiling(ANYTIME, 0.0)
        name = str(number)
        is_other = expected.expect(name, size, Expected.ALWAYS) if comes else expected.forget(name)
        assert is_other or expected.ceiling(ANYTIME, 0.0) == before


@given(
    st.lists(st.tuples(st.integers(1, 100), st.none() | st.integers(1, 4096)).map(lambda each: limits(*each))),
    st.sampled_from([SMALLEST, QUARTER, UNLIMITED]),
)
def test_widest_is_an_upper_bound(asked: list[Limits], closed: Limits) -> None:
    """In `anytime` each limit is the greatest that any lease needs or all processes get."""
    expected = ExpectedClients()
    for number, each in enumerate(asked):
        expected.expect(str(number), each, Expected.ALWAYS)
    found = expected.ceiling(CeilingRules(closed, attach=Attach.ANYTIME, window=WINDOW), 0.0).limits
    every = [closed, *asked]
    assert all(fits(each, found) for each in every)
    assert found.active_thread_percentage in {each.active_thread_percentage for each in every}
    assert found.pinned_device_mem_limit in {each.pinned_device_mem_limit for each in every}


class Attachment(RuleBasedStateMachine):
    """Leases come, attach and end in strict mode; no lease is forgotten, and none gets another's limits."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedClients()
        self.now = 0.0
        self.waiting: dict[str, Limits] = {}
        """Leases without a process yet."""
        self.number = 0

    @rule(percent=st.integers(1, 100), mebibytes=st.integers(1, 4096))
    def grant(self, percent: int, mebibytes: int) -> None:
        self.number += 1
        self.waiting[str(self.number)] = limits(percent, mebibytes)
        self.expected.expect(str(self.number), limits(percent, mebibytes), Expected.ALWAYS)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick: int) -> None:
        """Attach a process of a lease, or end the lease."""
        lease_id = list(self.waiting)[pick % len(self.waiting)]
        del self.waiting[lease_id]
        self.expected.forget(lease_id)

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule()
    def everybody_has_a_turn(self) -> None:
        """Check that within as many windows as there are leases, each has had its turn."""
        seen: set[str] = set()
        for _ in range(len(self.waiting) + 1):
            self.expected.ceiling(STRICT, self.now)
            seen |= open_to(self.expected)
            self.now += WINDOW
        assert seen == self.waiting.keys()

    @invariant()
    def exactly_one(self) -> None:
        """Check that the ceiling is open to exactly one lease, under its limits, and closed when none is expected."""
        ceiling = self.expected.ceiling(STRICT, self.now)
        if not self.waiting:
            assert ceiling == Ceiling(SMALLEST)
            return
        (whose,) = open_to(self.expected)
        assert ceiling.limits == self.waiting[whose]


TestAttachment = Attachment.TestCase
