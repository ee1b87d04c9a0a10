"""Who may have crashed a control daemon, and whom mpsd shuts out for it. Pure.

Whoever can connect to a control daemon can crash it (measured, drivers 470 to 555), and nothing tells who did: its log
ends. So all who were let in are suspects, and only one who was there alone can be named as the one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from mpsd.core.model import Suspect

_FAULTS: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE", "SIGTRAP"})
"""How a program ends by a fault of its own, as bytes on a socket can bring about. Nobody but root can send it these."""


def is_suspect(signal: str | None) -> bool:
    """Tell whether the end of a control daemon by this signal may be the work of somebody who was let in."""
    return signal in _FAULTS


class LetIn(Struct, frozen=True):
    """Who was let in to a control daemon at any time since it started, beside root and mpsd's own uid.

    A connection outlives the access that it was made by, so whoever was let in once counts to the end.
    """

    uids: tuple[int, ...] = ()
    everybody: bool = False
    """Whether every local user was let in, as `enforcement.unadmitted` can say: then nobody can be named."""
    others: bool = False
    """Whether there may have been more uids: the control daemon was adopted, and nobody noted them."""

    @property
    def anybody(self) -> bool:
        """Whether there was, or may have been, anybody at all."""
        return bool(self.uids) or self.everybody or self.others

    def is_alone(self, uid: int) -> bool:
        """Tell whether this uid was the only one."""
        return self.uids == (uid,) and not self.everybody and not self.others

    def and_(self, uids: Collection[int] | None) -> "LetIn":
        """Return these and more uids, None for everybody."""
        if uids is None:
            return LetIn(self.uids, everybody=True, others=self.others)
        return LetIn(tuple(sorted({*self.uids, *uids})), everybody=self.everybody, others=self.others)

    def __str__(self) -> str:
        """Name them, for a sentence."""
        if self.everybody:
            return "every local user"
        named = f"uid{'s' if len(self.uids) > 1 else ''} {', '.join(map(str, self.uids))}" if self.uids else ""
        return " and ".join(filter(None, (named, "uids that are not known" if self.others else ""))) or "nobody"


class Crash(Struct, frozen=True):
    """A suspect death: of which control daemon, when (seconds of the clock that does not jump), and who was let in."""

    daemon: str
    at: float
    let_in: LetIn


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """How many crashes within how many seconds are too many for a uid that was let in at each."""

    crashes: int = 2
    window: float = 3600.0


def recent(crashes: Iterable[Crash], policy: QuarantinePolicy, now: float) -> tuple[Crash, ...]:
    """Return the crashes that still count."""
    return tuple(each for each in crashes if now - each.at <= policy.window)


def suspects(crashes: Iterable[Crash]) -> tuple[Suspect, ...]:
    """Return each uid that was let in at one of these crashes, the one that was let in at most of them first."""
    found: dict[int, Suspect] = {}
    for crash in crashes:
        for uid in crash.let_in.uids:
            before = found.get(uid, Suspect(uid, 0, 0))
            found[uid] = Suspect(uid, before.crashes + 1, before.alone + crash.let_in.is_alone(uid))
    return tuple(sorted(found.values(), key=lambda each: (-each.crashes, -each.alone, each.uid)))


def to_quarantine(crashes: Sequence[Crash], policy: QuarantinePolicy, now: float) -> tuple[Suspect, ...]:
    """Return the uids that are to be shut out: let in at several recent crashes, and at least at one of them alone.

    One that was always accompanied is never among them: the other one may have done it.
    """
    counting = suspects(recent(crashes, policy, now))
    return tuple(each for each in counting if each.crashes >= policy.crashes and each.alone)


def without(crashes: Iterable[Crash], uids: Collection[int]) -> tuple[Crash, ...]:
    """Return the crashes at which none of these uids was let in: the others are explained, or forgiven."""
    return tuple(each for each in crashes if not set(uids) & set(each.let_in.uids))
