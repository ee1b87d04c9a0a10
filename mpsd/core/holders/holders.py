"""What holds a lease: a process, a control group, or a claim that somebody is to take. Pure."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Claim, Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity

MOST: Final = 64
"""Holders that a lease may have at a time: mpsd needs a descriptor for each."""


def processes(lease: Lease) -> Iterator[ProcessIdentity]:
    """Yield the processes that hold a lease."""
    return (each.identity for each in lease.holders if isinstance(each, HoldingProcess))


def groups(lease: Lease) -> Iterator[HoldingGroup]:
    """Yield the control groups that hold a lease."""
    return (each for each in lease.holders if isinstance(each, HoldingGroup))


def claim_of(lease: Lease) -> Claim | None:
    """Return the claim that nobody has taken yet; None where a lease has none."""
    first = lease.holders[0]
    return first if type(first) is Claim else None


def said(holder: Holder) -> str:
    """Say which holder this is, after the words "its holder"."""
    match holder:
        case HoldingProcess():
            return f"pid {holder.identity.pid}"
        case HoldingGroup():
            return f"control group {holder.group.path}"
        case Claim():
            return "a claim" if holder.uid is None else f"a claim for uid {holder.uid}"


def all_said(lease: Lease) -> str:
    """Say who holds a lease, as a subject."""
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
    """Return the holders that a lease has once another one came, or took the place of all others.

    Raises InvalidRequestError where it has too many.
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
    """Return the holders that are left of a lease when one is gone; the last one stays, for people to see."""
    left = tuple(each for each in lease.holders if not are_same(each, gone))
    return left or lease.holders
