"""The findings that must persist before they count."""

from math import inf
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.enforcement.violations import PERSISTS, Violation, doubts_about, is_unlimited, next_reading, suspected
from mpsd.core.model import ProcessIdentity, ViolationKind

KINDS: Final = {ViolationKind.PROCESSES, ViolationKind.MEMORY, ViolationKind.OUTSIDE}


def found(kind: ViolationKind) -> Violation:
    return Violation(kind, ProcessIdentity(100, 1), "lease-1", "gpu0", "", "")


@pytest.mark.parametrize("kind", ViolationKind)
def test_persists(kind: ViolationKind) -> None:
    """A finding that honest programs cause for a moment counts after a second, however often mpsd looks."""
    each = found(kind)
    first = suspected([each], [], {}, 10.0, read=True)
    assert first == ({each: 10.0} if kind in KINDS else {})
    for at in (10.001, 10.0 + PERSISTS - 0.001):
        assert suspected([each], [], first, at, read=True) == first
    assert suspected([each], [], first, 10.0 + PERSISTS, read=True) == {}
    # It counts until it is gone, and begins anew after a gap.
    assert suspected([each], [each], {}, 20.0, read=False) == {}
    assert suspected([], [], first, 10.5, read=True) == {}
    assert suspected([each], [], {}, 20.0, read=True) == ({each: 20.0} if kind in KINDS else {})


def test_with_a_reading() -> None:
    """A finding from NVML begins to count with a new reading, not with an old one that is looked at again."""
    memory, processes = found(ViolationKind.MEMORY), found(ViolationKind.PROCESSES)
    since = {memory: 10.0, processes: 10.0}
    assert suspected([memory, processes], [], since, 12.0, read=False) == {memory: 10.0}
    assert suspected([memory], [], {memory: 10.0}, 12.0, read=True) == {}


@given(
    unsettled=st.lists(st.tuples(st.sampled_from(ViolationKind), st.floats(0, 100))),
    last=st.floats(0, 100),
    unlimited=st.booleans(),
)
def test_readings_are_bounded(unsettled: list[tuple[ViolationKind, float]], last: float, *, unlimited: bool) -> None:
    """No findings, at whatever rate they come, make mpsd read the GPUs more than once a second for their sake."""
    at = next_reading({found(kind): since for kind, since in unsettled}, last, unlimited=unlimited)
    assert (at is None) is (not unsettled and not unlimited)
    assert at is None or at >= last + PERSISTS


def test_next_reading() -> None:
    """A client that no memory limit bounds has the GPUs read at once, and again each second while there is one."""
    memory = found(ViolationKind.MEMORY)
    assert next_reading({}, -inf, unlimited=True) == -inf
    assert next_reading({}, 20.0, unlimited=True) == 20.0 + PERSISTS
    assert next_reading({memory: 20.5}, 20.0, unlimited=False) == 20.5 + PERSISTS
    assert next_reading({memory: 20.5}, 20.0, unlimited=True) == 20.0 + PERSISTS
    assert next_reading({}, 20.0, unlimited=False) is None


@pytest.mark.parametrize("kind", ViolationKind)
def test_is_unlimited(kind: ViolationKind) -> None:
    """The kinds with which MPS does not keep the processes of a lease within its memory."""
    assert is_unlimited([found(kind)], []) is (kind in {ViolationKind.LIMITS, ViolationKind.PROCESSES})


def test_doubts() -> None:
    """A finding that does not count yet is a doubt about its lease, and about no other."""
    memory = Violation(ViolationKind.MEMORY, ProcessIdentity(100, 1), "lease-1", "gpu0", "it holds 3GiB", "")
    assert doubts_about([memory], "lease-1") == ["it holds 3GiB; that is a violation if it lasts for 1 s"]
    assert doubts_about([memory], "lease-2") == []
