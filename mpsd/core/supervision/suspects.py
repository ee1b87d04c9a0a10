"""The uids that may have crashed a control daemon, and the uids that mpsd quarantines for it. Pure.

Any user who can connect to a control daemon can crash it (measured, drivers 470 to 555), and nothing shows which user
did: its log ends. All uids with pipe access are therefore suspects, and a uid is named as the cause only if no other
had access.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from mpsd.core.model import Suspect

_FAULTS: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE", "SIGTRAP"})
"""Signals that end a program by its own fault, as bytes on a socket can cause. Only root can send them to it."""


def is_suspect(signal: str | None) -> bool:
    """Tell whether the death of a control daemon by this signal may have been caused by a uid with pipe access."""
    return signal in _FAULTS


class LetIn(Struct, frozen=True):
    """The uids with pipe access to a control daemon at any time since it started, besides root and mpsd's own uid.

    A connection outlives the pipe access that it was made with, so a uid counts to the end.
    """

    uids: tuple[int, ...] = ()
    everybody: bool = False
    """Whether every local user had access, as `enforcement.unadmitted` can allow: then no uid can be named."""
    others: bool = False
    """Whether there may have been more uids: the control daemon was adopted, and no record exists."""

    @property
    def anybody(self) -> bool:
        """Whether any uid had, or may have had, access."""
        return bool(self.uids) or self.everybody or self.others

    def is_alone(self, uid: int) -> bool:
        """Tell whether this uid was the only one."""
        return self.uids == (uid,) and not self.everybody and not self.others

    def and_(self, uids: Collection[int] | None) -> "LetIn":
        """Return these and more uids; None adds every local user."""
        if uids is None:
            return LetIn(self.uids, everybody=True, others=self.others)
        return LetIn(tuple(sorted({*self.uids, *uids})), everybody=self.everybody, others=self.others)

    def __str__(self) -> str:
        """Describe them, for a sentence."""
        if self.everybody:
            return "every local user"
        named = f"uid{'s' if len(self.uids) > 1 else ''} {', '.join(map(str, self.uids))}" if self.uids else ""
        return " and ".join(filter(None, (named, "uids that are not known" if self.others else ""))) or "nobody"


class Crash(Struct, frozen=True):
    """A suspect death: the control daemon, the time (seconds of the monotonic clock), and the uids with access."""

    daemon: str
    at: float
    let_in: LetIn


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """The number of crashes within a window that is too many for a uid that had access at each."""

    crashes: int = 2
    window: float = 3600.0


def recent(crashes: Iterable[Crash], policy: QuarantinePolicy, now: float) -> tuple[Crash, ...]:
    """Return the crashes that still count."""
    return tuple(each for each in crashes if now - each.at <= policy.window)


def suspects(crashes: Iterable[Crash]) -> tuple[Suspect, ...]:
    """Return each uid that had access at one of these crashes, those with most crashes first."""
    found: dict[int, Suspect] = {}
    for crash in crashes:
        for uid in crash.let_in.uids:
            before = found.get(uid, Suspect(uid, 0, 0))
            found[uid] = Suspect(uid, before.crashes + 1, before.alone + crash.let_in.is_alone(uid))
    return tuple(sorted(found.values(), key=lambda each: (-each.crashes, -each.alone, each.uid)))


def to_quarantine(crashes: Sequence[Crash], policy: QuarantinePolicy, now: float) -> tuple[Suspect, ...]:
    """Return the uids to quarantine: with access at several recent crashes, and alone at one of them or more.

    A uid that was never alone is not among them, because another one may have caused the crashes.
    """
    counting = suspects(recent(crashes, policy, now))
    return tuple(each for each in counting if each.crashes >= policy.crashes and each.alone)


def without(crashes: Iterable[Crash], uids: Collection[int]) -> tuple[Crash, ...]:
    """Return the crashes at which none of these uids had access. The other crashes are explained, or pardoned."""
    return tuple(each for each in crashes if not set(uids) & set(each.let_in.uids))
