"""Who may begin at a gate: everybody or nobody, by what was seen of each of them."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import pytest
from msgspec import structs

from mpsd.core.enforcement.gate import OPEN, judge
from mpsd.core.enforcement.verification import Verdict, Verification, VerifiedProcess
from mpsd.core.model import HoldingProcess, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity, ReadBack

LEASE: Final = Lease(
    id="lease-1",
    state=LeaseState.ACTIVE,
    because="",
    owner=Owner(0, 0, 100, None),
    holders=(HoldingProcess(ProcessIdentity(100, 1)),),
    request=LeaseRequest(processes=2),
    arrival=1,
    created=datetime.now(UTC),
)


def seen(*verdicts: tuple[int, Verdict], unknown: tuple[str, ...] = ()) -> Verification:
    """Return what was seen of processes that are clients; `nothing` is one that is none."""
    processes = tuple(
        VerifiedProcess(
            pid, "gpu0", "GPU-0", ReadBack(1, 1), each, f"{pid} {each}", mps=None if each is Verdict.NOTHING else True
        )
        for pid, each in verdicts
    )
    return Verification(Verdict.OK, "", processes, unknown)


def lasting(facts: Verification) -> Verification:
    """Return the same, where the doubts stay."""
    processes = tuple(replace(each, lasts=each.verdict is Verdict.UNKNOWN) for each in facts.processes)
    return replace(facts, processes=processes)


WELL: Final = ((1, Verdict.OK), (2, Verdict.OK))


@pytest.mark.parametrize(
    ("waiting", "facts", "now", "at_last"),
    [
        ([1, 2], seen(*WELL), "", ""),
        # On the second GPU of its lease, a client of the first was not seen.
        ([1, 2], seen(*WELL, (2, Verdict.NOTHING)), "", ""),
        ([1, 2], seen(*WELL, (3, Verdict.VIOLATION)), "", ""),
        ([1], seen(*WELL), None, "1 of 2 processes came"),
        ([1], seen(*WELL, (2, Verdict.VIOLATION)), None, "; process 2 did not, and 2 violation"),
        ([1, 3], seen(*WELL), None, "process 3 is no client of MPS, and waits"),
        ([1, 2], seen((1, Verdict.OK), (2, Verdict.NOTHING)), None, "is verified after 5 s: 2 nothing"),
        ([1, 2], seen((1, Verdict.OK), (2, Verdict.UNKNOWN)), None, "is verified after 5 s: 2 unknown"),
        ([1], lasting(seen((1, Verdict.UNKNOWN))), "lease-1 begins: 1 unknown", "lease-1 begins: 1 unknown"),
        ([1, 2], lasting(seen(*WELL, (3, Verdict.UNKNOWN))), "", ""),
        ([1, 2], seen(*WELL, (2, Verdict.UNKNOWN)), None, "is verified after 5 s: 2 unknown"),
        ([1, 2], seen(*WELL, unknown=("gpu0 did not answer in time",)), None, "gpu0 did not answer in time"),
        ([1], seen((1, Verdict.VIOLATION)), "lease-1 begins: 1 violation", "lease-1 begins: 1 violation"),
        ([1, 2], seen(*WELL, (2, Verdict.VIOLATION)), "begins: 2 violation", "begins: 2 violation"),
    ],
)
def test_judgement(waiting: list[int], facts: Verification, now: str | None, at_last: str) -> None:
    """The outcome, with its reason, while there is time (None: they wait) and when the time of 5 s is over."""
    for outcome, expected in (
        (judge(LEASE, 2, waiting, facts, within=None), now),
        (judge(LEASE, 2, waiting, facts, within=5), at_last),
    ):
        if expected is None or outcome is None:
            assert expected is None
            assert outcome is None
        elif expected:
            assert expected in outcome.because
            assert outcome.hint
        else:
            assert outcome == OPEN


def test_ended() -> None:
    """Nobody begins under a lease that has ended."""
    ended = structs.replace(LEASE, state=LeaseState.ENDED, because="it was released")
    outcome = judge(ended, 2, [1, 2], seen(*WELL), within=None)
    assert outcome is not None
    assert outcome.because == "lease lease-1 has ended: it was released"
