"""Whether the server of a control daemon serves at all: what makes it suspect, and what canaries prove. Pure.

A client that is killed while a kernel of its is in flight, with nobody beside it, can leave a *wedge*: the server says
ACTIVE, lists its clients, logs nothing, and every later client hangs when it initialises CUDA, for ever. Only a new
server clears that. Source: the package text of drain.go in kai-scheduler/gpu-fractioning, pull request 147; NVIDIA is
said there to have confirmed it.

No state word and no answer of the control pipe shows it. A *canary* does: a client of mpsd's own that initialises CUDA,
makes a context, and says what came of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mpsd.core.model import Limits, ProcessIdentity
from mpsd.core.quantities import ActiveThreadPercentage, Pid, PinnedDeviceMemLimit

PLACES: Final = 1
"""Client places of each GPU that are kept for a canary: without one it could not tell a full GPU from a wedged one."""

LIMITS: Final = Limits(ActiveThreadPercentage(100), PinnedDeviceMemLimit(512))
"""What a canary's context gets at most: 10 % and 512 MiB. The ceiling is opened so far for an operator's alone.

One that is sent on suspicion finds the ceiling as it is: where that is closed, its context is refused with an error,
which proves as well that CUDA answers, and nobody gets more than before because somebody has killed a client.

A context takes some 300 to 500 MiB on a data centre GPU, and less with fewer threads. The memory is that of
`admission.memory_reserve`, whose default is as much.
"""

FAILURES: Final = 3
"""Canaries in a row without an answer that make a wedge. One may meet a machine that is too busy to answer in time."""

SPACING: Final = 60.0
"""Seconds between two examinations that one uid brings about: any user can kill its own client, as often as it likes.
Also between two of a server that is wedged, since an answer shows that it is not."""

LONG: Final = 120.0
"""Seconds for which a client may be listed without memory on the GPU before that is suspect.

A program may initialise CUDA early and make its context late, so such a client is no evidence; one that hangs in CUDA's
initialisation looks the same.
"""


class Cause(StrEnum):
    """What made a server suspect."""

    LOST = "client_lost"
    """A client ended without saying goodbye: the server noticed, and logged it."""
    STILL_LISTED = "client_still_listed"
    """A client ended, and its server still lists it."""
    TERMINATE = "terminate_client"
    """`terminate_client` did not come back."""
    SILENT = "client_silent"
    """A client has been listed for long, and holds no memory on the GPU."""
    WEDGED = "wedged"
    """It was found wedged, and may serve again."""
    COMMAND = "command"
    """An operator wants to know."""


STRONG: Final = frozenset({Cause.STILL_LISTED, Cause.TERMINATE})
"""The causes that a server which serves hardly ever shows. A daemon whose server is suspect for one of them, and which
nobody uses, is replaced at once: that costs a moment, and harms nobody."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a server may be wedged."""

    cause: Cause
    because: str
    uid: int | None = None
    """Whose client it was; None where that is not known, or nobody's."""


class Proof(StrEnum):
    """How a canary ended, by what that proves."""

    CONTEXT = "context"
    """CUDA was initialised, and a context made: the server serves."""
    ERROR = "error"
    """A call returned an error: CUDA answers, and so it is no wedge."""
    SILENCE = "silence"
    """No answer came within the deadline."""
    NOTHING = "nothing"
    """It could not be run, or something else may have kept it from answering."""


@dataclass(frozen=True, slots=True)
class CanaryEnd:
    """How one canary ended."""

    proof: Proof
    because: str
    """A sentence, which names the canary's pid where there was one."""


class Verdict(StrEnum):
    """What is known of a server."""

    OK = "ok"
    UNKNOWN = "unknown"
    WEDGED = "wedged"


def verdict(ends: Sequence[CanaryEnd]) -> Verdict | None:
    """Return what the canaries of one examination prove; None while another is to be sent."""
    match ends[-1].proof:
        case Proof.CONTEXT:
            return Verdict.OK
        case Proof.ERROR | Proof.NOTHING:
            return Verdict.UNKNOWN
        case Proof.SILENCE if len(ends) < FAILURES:
            return None
        case Proof.SILENCE:
            return Verdict.WEDGED


@dataclass(slots=True)
class Suspicions:
    """The open suspicions of one control daemon, and when they are looked into. Times are monotonic seconds."""

    _open: list[tuple[float, Suspicion]] = field(default_factory=list)
    """With the moment from which each is looked into."""
    _last: dict[int | None, float] = field(default_factory=dict)
    """By uid, when one of its was looked into last."""

    def add(self, suspicion: Suspicion, now: float) -> bool:
        """Take in a suspicion; False where one like it is open."""
        if any((each.cause, each.uid) == (suspicion.cause, suspicion.uid) for _, each in self._open):
            return False
        due = max(now, self._last[suspicion.uid] + SPACING) if suspicion.uid in self._last else now
        self._open.append((due, suspicion))
        return True

    def due(self, now: float) -> Suspicion | None:
        """Return the suspicion that is to be looked into now, if one is."""
        return next((each for due, each in self._open if due <= now), None)

    @property
    def strong(self) -> Suspicion | None:
        """The first open suspicion that a server which serves hardly ever shows."""
        return next((each for _, each in self._open if each.cause in STRONG), None)

    def settle(self, now: float, *, proven: bool) -> None:
        """Note that the server was examined: whatever was open is answered by that.

        Where that proved nothing, what a server that serves hardly ever shows stays open, for another time.
        """
        self._last = {uid: at for uid, at in self._last.items() if at + SPACING > now}
        self._last.update((each.uid, now) for due, each in self._open if due <= now)
        stays = [] if proven else [each for _, each in self._open if each.cause in STRONG]
        self._open = [(now + SPACING, each) for each in stays]

    def clear(self) -> None:
        """Forget what is open: it was about a server that is gone."""
        self._open.clear()


@dataclass(frozen=True, slots=True)
class Listed:
    """A client as a server lists it."""

    server: Pid
    pid: Pid


@dataclass(slots=True)
class ListedClients:
    """The clients that the servers of one control daemon list, and what of that is suspect."""

    _known: dict[Listed, tuple[ProcessIdentity, int | None, float]] = field(default_factory=dict)
    """What each was when it lived: which process, whose, and since when it is listed."""
    _suspected: set[Listed] = field(default_factory=set)
    """Those that were suspect already: once is enough."""

    def living(self, listed: Listed, process: ProcessIdentity, uid: int | None, now: float) -> None:
        """Take note of a client that is listed and lives."""
        before = self._known.get(listed)
        if before is None or before[0] != process:
            self._known[listed] = (process, uid, now)
            self._suspected.discard(listed)

    def keep(self, listed: Iterable[Listed]) -> None:
        """Forget all clients but those that are still listed."""
        there = {*listed}
        self._known = {each: known for each, known in self._known.items() if each in there}
        self._suspected &= there

    def dead(self, listed: Iterable[Listed], start_ticks: Callable[[Pid], int | None]) -> list[Listed]:
        """Return those of the listed whose process is gone; `start_ticks` says what the kernel has for a pid now."""
        found = []
        for each in listed:
            known, ticks = self._known.get(each), start_ticks(each.pid)
            if ticks is None or (known is not None and known[0].start_ticks != ticks):
                found.append(each)
        return found

    def still_listed(self, listed: Listed) -> Suspicion | None:
        """Suspect the server of a client that ended and is still listed; None where that was said."""
        if listed in self._suspected:
            return None
        self._suspected.add(listed)
        because = f"server {listed.server} still lists client {listed.pid}, which has ended"
        known = self._known.get(listed)
        return Suspicion(Cause.STILL_LISTED, because, known[1] if known is not None else None)

    def silent(self, with_memory: Iterable[Pid], now: float) -> Suspicion | None:
        """Suspect the server of a client that has long been listed and is none of those `with_memory` on the GPU."""
        there = {*with_memory}
        for listed, (_, uid, since) in self._known.items():
            if listed.pid in there or now - since < LONG or listed in self._suspected:
                continue
            self._suspected.add(listed)
            because = f"client {listed.pid} of server {listed.server} has held no memory on the GPU for {LONG:g} s"
            return Suspicion(Cause.SILENT, because, uid)
        return None
