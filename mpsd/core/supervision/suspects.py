"""The uids and control groups that may have ended a control daemon, and those that mpsd quarantines for it. Pure.

Any user who can connect to a control daemon can crash it (measured, drivers 470 to 555), and nothing shows which user
did: its log ends. All uids with pipe access are therefore suspects, and a uid is named as the cause only if no other
had access. No access list keeps root out, in a container neither. The control group of its container stands for it, and
root outside containers is no suspect.

A control daemon takes a `quit` from root and from its own uid alone (measured, drivers 470 to 555). Root outside
containers sends most of them, so nobody is convicted of some only because no other container had access: the kernel
must have shown the sender of one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

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


class Sender(NamedTuple):
    """The process that gave a control daemon a command, as the kernel showed it at that moment."""

    pid: int
    uid: int
    group: str = ""
    """The control group of its container; empty for a process outside containers."""
    lease: str = ""

    def __str__(self) -> str:
        """Describe it, for a sentence."""
        where = [f"in control group {self.group}"] * bool(self.group) + [f"of lease {self.lease}"] * bool(self.lease)
        return " ".join([f"pid {self.pid} (uid {self.uid})", *where])


class Quit(NamedTuple):
    """A `quit` by others than mpsd, after which a control daemon ends with its last client."""

    command: str
    sender: Sender | None = None
    """None where it was not seen: a daemon without a server ends within a millisecond, and the front-end with it."""

    def let_in(self, access: LetIn) -> LetIn:
        """Return who may have sent it: the one that was seen, else those of root's containers that had access."""
        if self.sender is None:
            return LetIn(groups=access.groups, others=True)
        return LetIn(groups=(self.sender.group,) if self.sender.group else ())


class Crash(Struct, frozen=True):
    """A suspect death: the control daemon, the time (seconds of the monotonic clock), and who may have caused it."""

    daemon: str
    at: float
    let_in: LetIn
    quit: bool = False
    """Whether a `quit` ended it, and no fault of its own."""


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """The number of crashes within a window that is too many for a uid or control group that had access at each.

    Of `quit`s it takes one more: a program may end with one by mistake.
    """

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
    counting, kinds = recent(crashes, policy, now), {False: policy.crashes, True: policy.crashes + 1}
    return tuple(
        each
        for is_quit, most in kinds.items()
        for each in suspects(crash for crash in counting if crash.quit is is_quit)
        if each.crashes >= most and each.alone
    )


def without(crashes: Iterable[Crash], who: Collection[Who]) -> tuple[Crash, ...]:
    """Return the crashes at which none of these had access. The other crashes are explained, or pardoned."""
    return tuple(each for each in crashes if not {*who} & {*each.let_in.known})
