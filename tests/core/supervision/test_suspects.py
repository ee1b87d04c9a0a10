"""Suspects of a crash: all who had access are named, and one that was there alone is quarantined."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mpsd.core.model import Suspect, Who
from mpsd.core.supervision.suspects import (
    MOST_GROUPS,
    Crash,
    LetIn,
    QuarantinePolicy,
    is_suspect,
    recent,
    suspects,
    to_quarantine,
    without,
)

ANN, BOB, CAT = 1001, 1002, 1003
POLICY: Final = QuarantinePolicy(crashes=2, window=100.0)


def crash(*who: Who, at: float = 100.0, everybody: bool = False, others: bool = False) -> Crash:
    """Return a crash at which these uids and control groups had access."""
    uids, groups = (each for each in who if isinstance(each, int)), (each for each in who if isinstance(each, str))
    return Crash("gpu0", at, LetIn(everybody=everybody, others=others).and_(set(uids), groups))


def by_quit(*who: Who, others: bool = False) -> Crash:
    return replace(crash(*who, others=others), quit=True)


def shut_out(*crashes: Crash, now: float = 100.0, policy: QuarantinePolicy = POLICY) -> list[Who]:
    return [each.who for each in to_quarantine(crashes, policy, now)]


@pytest.mark.parametrize(
    ("signal", "suspect"),
    [
        ("SIGSEGV", True),
        ("SIGBUS", True),
        ("SIGILL", True),
        ("SIGABRT", True),
        ("SIGFPE", True),
        ("SIGTRAP", True),
        ("SIGKILL", False),  # by root, or by the kernel for lack of memory
        ("SIGTERM", False),
        ("signal 40", False),
        (None, False),
    ],
)
def test_which_deaths_are_suspect(signal: str | None, *, suspect: bool) -> None:
    """Deaths by a fault of the program itself are suspect."""
    assert is_suspect(signal) is suspect


@pytest.mark.parametrize(
    ("crashes", "who"),
    [
        ([], []),
        ([crash(ANN)], []),
        ([crash(ANN), crash(ANN)], [ANN]),
        ([crash(ANN, BOB), crash(ANN)], [ANN]),
        ([crash(ANN), crash(ANN, BOB)], [ANN]),
        ([crash(ANN, BOB)] * 9, []),
        ([crash(ANN, BOB), crash(ANN, CAT), crash(BOB, CAT)], []),
        ([crash(ANN, BOB), crash(BOB, ANN), crash(ANN, BOB), crash(ANN)], [ANN]),
        ([crash(), crash(ANN)], []),
        ([crash(ANN, others=True), crash(ANN, others=True)], []),
        ([crash(ANN, everybody=True), crash(ANN, everybody=True)], []),
        ([crash(ANN), crash(BOB)], []),
        ([crash(ANN), crash(BOB), crash(ANN), crash(BOB)], [ANN, BOB]),
        ([crash(ANN, at=0.0), crash(ANN, at=100.0)], [ANN]),
        ([crash(ANN, at=-0.5), crash(ANN, at=100.0)], []),
        ([crash(ANN, at=-0.5), crash(ANN, BOB), crash(ANN, BOB)], []),
        ([crash("/a"), crash("/a")], ["/a"]),
        ([crash("/a", ANN), crash("/a", ANN)], []),
        ([crash("/a"), crash("/a", "/b")], ["/a"]),
        ([by_quit("/a"), by_quit("/a")], []),
        ([by_quit("/a"), by_quit("/a"), by_quit("/a")], ["/a"]),
        ([by_quit("/a", others=True), by_quit("/a", others=True), by_quit("/a")], ["/a"]),
        ([by_quit("/a", others=True)] * 9, []),
        ([by_quit("/a"), by_quit("/a"), crash("/a")], []),
    ],
)
def test_who_is_shut_out(crashes: list[Crash], who: list[Who]) -> None:
    """Somebody is quarantined that had access at the given number of crashes within the window, at least once alone."""
    assert shut_out(*crashes) == who


def test_policy() -> None:
    """The number and the window are settings."""
    assert shut_out(crash(ANN), policy=QuarantinePolicy(crashes=1)) == [ANN]
    assert shut_out(crash(ANN), crash(ANN), policy=QuarantinePolicy(crashes=3)) == []
    assert shut_out(crash(ANN, at=1.0), crash(ANN), policy=QuarantinePolicy(window=10)) == []


def test_who_is_named() -> None:
    """All who had access are named, the most frequent first."""
    found = suspects([crash(ANN, BOB, "/a"), crash(ANN), crash(CAT, everybody=True)])
    assert found == (Suspect(ANN, 2, 1), Suspect(BOB, 1, 0), Suspect(CAT, 1, 0), Suspect("/a", 1, 0))


def test_what_is_explained_speaks_against_nobody() -> None:
    """Crashes with a uid that was quarantined or pardoned are forgotten; the others stay."""
    assert without([crash(ANN), crash(ANN, BOB), crash(BOB)], [ANN]) == (crash(BOB),)


@pytest.mark.parametrize(
    ("let_in", "anybody", "words"),
    [
        (LetIn(), False, "nobody"),
        (LetIn((ANN,)), True, "uid 1001"),
        (LetIn((ANN, BOB)), True, "uids 1001, 1002"),
        (LetIn((ANN,), others=True), True, "uid 1001 and uids that are not known"),
        (LetIn(others=True), True, "uids that are not known"),
        (LetIn((ANN,), everybody=True), True, "every local user"),
        (LetIn((ANN,), groups=("/a",)), True, "uid 1001 and control group /a"),
        (LetIn(groups=("/a", "/b")), True, "control groups /a, /b"),
    ],
)
def test_let_in(let_in: LetIn, words: str, *, anybody: bool) -> None:
    """The text names the uids, and whether there were any."""
    assert (let_in.anybody, str(let_in)) == (anybody, words)


def test_more_are_let_in() -> None:
    """No uid is forgotten, and once all users had access, that is remembered."""
    assert LetIn((BOB,)).and_({ANN}) == LetIn((ANN, BOB))
    assert LetIn((BOB,), others=True).and_(None).and_({ANN}) == LetIn((ANN, BOB), everybody=True, others=True)
    assert LetIn((BOB,)).and_(groups=("/b", "/a")).and_(groups=("/a",)) == LetIn((BOB,), groups=("/b", "/a"))


def test_too_many_groups() -> None:
    """Where there are too many control groups, the oldest are forgotten, and nobody counts as alone."""
    found = LetIn().and_(groups=map(str, range(MOST_GROUPS + 1)))
    assert (found.groups[0], len(found.groups), found.others) == ("1", MOST_GROUPS, True)


_UIDS: Final = st.frozensets(st.sampled_from([ANN, BOB, CAT]))
_CRASHES: Final = st.lists(
    st.builds(
        lambda uids, at, everybody, others: crash(*uids, at=at, everybody=everybody, others=others),
        _UIDS,
        st.floats(0, 200),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


@given(_CRASHES, st.integers(1, 5))
def test_never_one_who_was_always_accompanied(crashes: list[Crash], most: int) -> None:
    """A quarantined uid was present at that many recent crashes, once alone; a uid that was never alone is spared."""
    policy = QuarantinePolicy(crashes=most, window=100.0)
    counting = recent(crashes, policy, 200.0)
    for each in to_quarantine(crashes, policy, 200.0):
        with_it = [found for found in counting if each.who in found.let_in.known]
        assert len(with_it) == each.crashes >= most
        assert any(found.let_in.is_alone(each.who) for found in with_it)
    always = {ANN, BOB}
    accompanied = [each for each in crashes if always <= set(each.let_in.uids) or not always & set(each.let_in.uids)]
    assert not always & set(shut_out(*accompanied, now=200.0, policy=policy))
