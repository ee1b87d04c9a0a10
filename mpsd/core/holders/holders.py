"""The holders of a lease: processes, control groups, or a claim that a holder will take. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Claim, Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity

MOST: Final = 64
"""Maximum holders of a lease at a time: mpsd needs a descriptor for each."""


def processes(lease: Lease) -> Iterator[ProcessIdentity]:
    """Yield the processes that hold a lease."""
    return (each.identity for each in lease.holders if isinstance(each, HoldingProcess))


def groups(lease: Lease) -> Iterator[HoldingGroup]:
    """Yield the control groups that hold a lease."""
    return (each for each in lease.holders if isinstance(each, HoldingGroup))


def claim_of(lease: Lease) -> Claim | None:
    """Return the claim of a lease that no holder has taken yet; None where there is none."""
    first = lease.holders[0]
    return first if type(first) is Claim else None


def said(holder: Holder) -> str:
    """Describe this holder, for use after the words "its holder"."""
    match holder:
        case HoldingProcess():
            return f"pid {holder.identity.pid}"
        case HoldingGroup():
            return f"control group {holder.group.path}"
        case Claim():
            return "a claim" if holder.uid is None else f"a claim for uid {holder.uid}"


def processes_said(pids: Sequence[int]) -> str:
    """Describe one or more processes by their pids."""
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"


def all_said(lease: Lease) -> str:
    """Describe the holders of a lease, as the subject of a sentence."""
    first, *others = map(said, lease.holders)
    return f"its holder, {first}" if not others else f"its holders, {', '.join((first, *others))}"


def are_same(one: Holder, other: Holder) -> bool:
    """Tell whether two holders are the same process or control group."""
    match one, other:
        case HoldingProcess(), HoldingProcess():
            return one.identity == other.identity
        case HoldingGroup(), HoldingGroup():
            first, second = one.group, other.group
            return (first.hierarchy, first.inode) == (second.hierarchy, second.inode)
        case Claim(), Claim():
            return (one.seconds, one.uid) == (other.seconds, other.uid)
    return False


def with_another(lease: Lease, holder: Holder, *, replace: bool) -> tuple[Holder, ...]:
    """Return the holders of a lease after a further one was added, or has replaced all others.

    Raises InvalidRequestError where there would be too many.
    """
    others = () if replace else tuple(each for each in lease.holders if not are_same(each, holder))
    if len(others) >= MOST:
        raise InvalidRequestError(
            f"lease {lease.id} has {len(others)} holders, the maximum",
            hint="hand it over instead: mpsctl hand-over",
            limit="holders",
        )
    return (*others, holder)


def without(lease: Lease, gone: Holder) -> tuple[Holder, ...]:
    """Return the holders of a lease without one that is gone; the last holder stays, for output."""
    left = tuple(each for each in lease.holders if not are_same(each, gone))
    return left or lease.holders
