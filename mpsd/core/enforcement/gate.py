"""Whether the processes of a lease that wait for each other may begin, all of them at once. Pure."""

from collections.abc import Collection
from typing import Final, NamedTuple

from mpsd.core import holders
from mpsd.core.enforcement.verification import Verdict, Verification, VerifiedProcess
from mpsd.core.model import Lease, LeaseState


class Outcome(NamedTuple):
    """The end of a wait at a gate, the same for all who wait there."""

    because: str = ""
    """Why they fail, in a sentence; empty where all begin."""
    hint: str = ""


OPEN = Outcome()
"""All of them begin."""

_SEEN: Final = (
    "mpsd sees the environment that a program is started with, and not what it sets itself: start each process by"
    " mpsctl run, or by mpsd.spawn() or mpsd.Pool"
)


def judge(
    lease: Lease, wanted: int, waiting: Collection[int], seen: Verification, *, within: float | None
) -> Outcome | None:
    """Return the outcome of a wait at the gate of a lease; None while it goes on.

    `wanted` processes begin together, `waiting` are the pids of those that are there, and `seen` are the facts about
    the lease. `within` is the time that the wait had, in seconds; None while that is not over.
    """
    # 1. Processes of a lease that has ended never begin.
    # 2. A violation of one that waits is certain, whoever else comes, and so is a doubt that stays. Those of other
    #    processes are their own.
    # 3. All begin when all are there and each is a client within its limits, and nothing about their GPUs is unknown.
    # 4. When the time is over, those that are missing are named first: nobody can say more about the others.
    if lease.state is LeaseState.ENDED:
        return Outcome(f"lease {lease.id} has ended: {lease.because}", "take out another lease for all of them")
    there = [each for each in seen.processes if each.pid in waiting]
    certain = next((each for each in there if each.verdict is Verdict.VIOLATION or each.lasts), None)
    if certain is not None:
        hint = _SEEN if certain.lasts else certain.hint or _again(lease)
        return Outcome(f"no process of lease {lease.id} begins: {certain.because}", hint)
    doubt = next(filter(None, (_doubt(pid, there) for pid in waiting)), "") or next(iter(seen.unknown), "")
    if len(waiting) == wanted and not doubt:
        return OPEN
    if within is None:
        return None
    if len(waiting) == wanted:
        return Outcome(f"not every process of lease {lease.id} is verified after {within:g} s: {doubt}", _again(lease))
    came = f"{len(waiting)} of {wanted} processes came to the gate of lease {lease.id} within {within:g} s"
    said = f"{came}: {holders.processes_said(sorted(waiting))}"
    return Outcome(f"{said}{_missing(waiting, seen)}", _again(lease))


def left(lease_id: str, pid: int, how: str) -> Outcome:
    """Return the outcome where one of those that wait does so no longer; `how` is the verb and what follows."""
    because = f"process {pid} {how} while it waited at the gate of lease {lease_id}, so that no process begins"
    return Outcome(because, f"see why process {pid} did so, and start all of them again")


def _doubt(pid: int, there: Collection[VerifiedProcess]) -> str:
    """Say why a process is not known to be a client within its limits; empty where it is one."""
    own = [each for each in there if each.pid == pid]
    if any(each.mps and each.verdict is Verdict.OK for each in own):
        return next((each.because for each in own if each.verdict is Verdict.UNKNOWN), "")
    return next((each.because for each in own), f"process {pid} is no client of MPS, and waits")


def _missing(waiting: Collection[int], seen: Verification) -> str:
    """Name the processes of the lease that are known and did not come, with what is wrong about the first."""
    others = {each.pid: each for each in seen.processes if each.pid not in waiting}
    if not others:
        return ""
    wrong = next((each.because for each in others.values() if each.verdict is Verdict.VIOLATION), "")
    return f"; {holders.processes_said(sorted(others))} did not" + (f", and {wrong}" if wrong else "")


def _again(lease: Lease) -> str:
    return f"look at the processes of the lease (mpsctl verify {lease.id}), and start all of them again"
