"""The uids and control groups that may have crashed a control daemon, and those that mpsd quarantines for it. Pure.

Any user who can connect to a control daemon can crash it (measured, drivers 470 to 555), and nothing shows which user
did: its log ends. All uids with pipe access are therefore suspects, and a uid is named as the cause only if no other
had access. No access list keeps root out, in a container neither. The control group of its container stands for it, and
root outside containers is no suspect.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from msgspec import Struct

from mpsd.core.model import Suspect, Who

_FAULTS: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE", "SIGTRAP"})
"""Signals that end a program by its own fault, as bytes on a socket can cause. Only root can send them to it."""

MOST_GROUPS: Final = 64
"""Control groups that are named as having access to one control daemon."""


def is_suspect(signal: str | None) -> bool:
    """Tell whether the death of a control daemon by this signal may have been caused by anybody with pipe access."""
    return signal in _FAULTS


class LetIn(Struct, frozen=True):
    """Who had pipe access to a control daemon at any time since it started, besides root outside containers.

    A connection outlives the pipe access that it was made with, so a uid counts to the end.
    """

    uids: tuple[int, ...] = ()
    everybody: bool = False
    """Whether every local user had access, as `enforcement.unadmitted` can allow: then no uid can be named."""
    others: bool = False
    """Whether there may have been more: the control daemon was adopted, and no record exists, or they are too many."""
    groups: tuple[str, ...] = ()
    """The control groups of containers with leases of root or of mpsd's own uid, in the order in which they came."""

    @property
    def known(self) -> tuple[Who, ...]:
        """All uids and control groups."""
        return *self.uids, *self.groups

    @property
    def anybody(self) -> bool:
        """Whether anybody had, or may have had, access."""
        return bool(self.known) or self.everybody or self.others

    def is_alone(self, who: Who) -> bool:
        """Tell whether this uid or control group was the only one."""
        return self.known == (who,) and not self.everybody and not self.others

    def and_(self, uids: Collection[int] | None = (), groups: Iterable[str] = ()) -> "LetIn":
        """Return these and more uids and control groups; None adds every local user."""
        every, all_groups = {*self.uids, *(uids or ())}, tuple(dict.fromkeys((*self.groups, *groups)))
        others, everybody = self.others or len(all_groups) > MOST_GROUPS, self.everybody or uids is None
        return LetIn(tuple(sorted(every)), everybody=everybody, others=others, groups=all_groups[-MOST_GROUPS:])

    def __str__(self) -> str:
        """Describe them, for a sentence."""
        if self.everybody:
            return "every local user"
        several = ("uid", self.uids), ("control group", self.groups)
        named = [f"{what}{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}" for what, who in several if who]
        return " and ".join([*named, *["uids that are not known"] * self.others]) or "nobody"


class Crash(Struct, frozen=True):
    """A suspect death: the control daemon, the time (seconds of the monotonic clock), and who had access."""

    daemon: str
    at: float
    let_in: LetIn


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """The number of crashes within a window that is too many for a uid or control group that had access at each."""

    crashes: int = 2
    window: float = 3600.0


def recent(crashes: Iterable[Crash], policy: QuarantinePolicy, now: float) -> tuple[Crash, ...]:
    """Return the crashes that still count."""
    return tuple(each for each in crashes if now - each.at <= policy.window)


def suspects(crashes: Iterable[Crash]) -> tuple[Suspect, ...]:
    """Return everybody who had access at one of these crashes, those with most crashes first, uids before groups."""
    found: dict[Who, Suspect] = {}
    for crash in crashes:
        for who in crash.let_in.known:
            before = found.get(who, Suspect(who, 0, 0))
            found[who] = Suspect(who, before.crashes + 1, before.alone + crash.let_in.is_alone(who))
    return tuple(sorted(found.values(), key=lambda each: (-each.crashes, -each.alone, *_order(each.who))))


def _order(who: Who) -> tuple[float, str]:
    return (who, "") if isinstance(who, int) else (inf, who)


def to_quarantine(crashes: Sequence[Crash], policy: QuarantinePolicy, now: float) -> tuple[Suspect, ...]:
    """Return whom to quarantine: those with access at several recent crashes, and alone at one of them or more.

    Who was never alone is not among them, because somebody else may have caused the crashes.
    """
    counting = suspects(recent(crashes, policy, now))
    return tuple(each for each in counting if each.crashes >= policy.crashes and each.alone)


def without(crashes: Iterable[Crash], who: Collection[Who]) -> tuple[Crash, ...]:
    """Return the crashes at which none of these had access. The other crashes are explained, or pardoned."""
    return tuple(each for each in crashes if not {*who} & {*each.let_in.known})
