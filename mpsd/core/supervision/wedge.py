"""Whether the server of a control daemon serves clients: the causes of suspicion, and the proof by canaries. Pure.

A client that is killed while one of its kernels is in flight, with no other client connected, can leave a *wedge*: the
server reports ACTIVE, lists its clients, and logs nothing, but every later client hangs for ever in CUDA's
initialisation. Only a new server ends that. Source: the package text of drain.go in kai-scheduler/gpu-fractioning, pull
request 147, which says that NVIDIA confirmed it. None was seen on 580 (docs/gpu.md).

No state word and no answer of the control pipe shows a wedge. A *canary* does: a client of mpsd's own that initialises
CUDA, makes a context, and reports the result.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from mpsd.core.model import Limits, ProcessIdentity
from mpsd.core.quantities import ActiveThreadPercentage, Pid, PinnedDeviceMemLimit

PLACES: Final = 1
"""Client places of each GPU that are reserved for a canary: without one it could not tell a full GPU from a wedged
one."""

LIMITS: Final = Limits(ActiveThreadPercentage(100), PinnedDeviceMemLimit(512))
"""The ceiling for a canary that an operator requests, and the maximum for the context of any canary: 10 % and 512 MiB.
A context takes 145 MiB with 25 % of the threads, 271 MiB with 50 % and 517 MiB with 100 % (measured on 580, an H200).
The memory comes from `admission.memory_reserve`, whose default is the same size."""

SPACING: Final = 10.0
"""Seconds from the end of a canary to the next one for a suspicion that it did not decide, for one that any user can
cause, and for a wedged server, which may serve again."""

NOT_READY: Final = 807
"""MPS_SERVER_NOT_READY: the server accepts no client now."""

LEFTOVER: Final = 719
"""LAUNCH_FAILED: after a client is killed in mid-kernel, with no other client beside it, the next one gets this error
for its context, and the one after that is served (measured on 580)."""

_NO_PLACE: Final = frozenset({808, 809})
"""MPS_MAX_CLIENTS_REACHED and MPS_MAX_CONNECTIONS_REACHED: only a server that answers returns them."""

_NO_CONTEXT: Final = frozenset({2, 801})
"""OUT_OF_MEMORY and NOT_SUPPORTED, by which CUDA refuses a context, also outside MPS."""


class Cause(StrEnum):
    STILL_LISTED = "client_still_listed"
    """A client ended, and its server still lists it."""
    TERMINATE = "terminate_client"
    """`terminate_client` did not return."""
    ADOPTED = "adopted"
    """The server is older than this mpsd, which does not know what the last one suspected."""
    SILENT = "client_silent"
    """A client has been listed for long, and holds no memory on the GPU."""
    WEDGED = "wedged"
    """It was found wedged, and may serve again."""
    COMMAND = "command"
    """An operator requested an examination."""


STRONG: Final = frozenset({Cause.STILL_LISTED, Cause.TERMINATE})
"""The causes that a working server hardly ever shows. A daemon without users whose server is suspect for one of them is
replaced at once: that takes a moment, and harms no client. So it is where a canary did not decide another cause."""

STOPPING_GRANTS: Final = STRONG | {Cause.ADOPTED}
"""The causes for which nothing is granted until the server is known to serve. Any user can cause the others."""

_BOUNDED: Final = frozenset({Cause.TERMINATE, Cause.ADOPTED})
"""Those that stop grants no longer than until mpsd finds that it can send no canary at all: a client with an endless
kernel can cause the one, and the other says nothing against a server."""


class Listed(NamedTuple):
    """A client in the list of a server."""

    server: Pid
    pid: Pid


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a server may be wedged."""

    cause: Cause
    because: str
    uid: int | None = None
    """The uid of the client in question; None where it is unknown, or there is no client."""
    listed: Listed | None = None
    """The ended client that the server still lists: once it does not, that is refuted."""


class Proof(StrEnum):
    """The evidence that the result of a canary gives."""

    CONTEXT = "context"
    """CUDA was initialised, and a context made: the server serves."""
    ERROR = "error"
    """The server refused a place or a context: it answers, so it is no wedge."""
    SILENCE = "silence"
    """No answer came within the deadline."""
    NOTHING = "nothing"
    """It could not be run, it did not reach a server that accepts clients, or something else may have kept it from
    answering."""


@dataclass(frozen=True, slots=True)
class CanaryEnd:
    proof: Proof
    because: str
    """A sentence, which names the canary's pid where there was one."""
    refused: bool = False
    """Whether the server said that it accepts no client now. That is no wedge, and a client would meet the same."""
    unable: bool = False
    """Whether this mpsd can send no canary at all, as without libcuda or CAP_SETUID."""
    mps: bool | None = None
    """Whether CUDA told it that its contexts are of MPS; None where that is unknown."""


def proof(*, made: bool, code: int | None, inside: bool) -> Proof:
    """Return the evidence of a canary's answer: it made a context, or a call returned the error with this code.

    `inside` tells whether it was known to be a client of MPS.
    """
    # 1. A context proves that the server serves, if it is one of MPS.
    # 2. Only a server that answers says that it has no place, so that counts even where MPS is not known.
    # 3. A context that is refused, as under a closed ceiling, is an answer too: in a wedge the canary hangs before.
    # 4. Other errors prove nothing: 805 to 807 say that the server accepts no client now, a process that misses MPS
    #    gets 46 or 100, and LEFTOVER shows only that this client was not served.
    if made:
        return Proof.CONTEXT if inside else Proof.NOTHING
    return Proof.ERROR if code in _NO_PLACE or (inside and code in _NO_CONTEXT) else Proof.NOTHING


class Verdict(StrEnum):
    """The state of a server, as far as it is known."""

    OK = "ok"
    UNKNOWN = "unknown"
    WEDGED = "wedged"


VERDICTS: Final = {
    Proof.CONTEXT: Verdict.OK,
    Proof.ERROR: Verdict.UNKNOWN,
    Proof.NOTHING: Verdict.UNKNOWN,
    Proof.SILENCE: Verdict.WEDGED,
}


class _Open(NamedTuple):
    since: float
    due: float
    """The time from which on it may be examined."""
    stops_grants: bool


@dataclass(slots=True)
class Suspicions:
    """The open suspicions of one control daemon. Times are seconds since boot."""

    _open: dict[Suspicion, _Open] = field(default_factory=dict)
    _next: float = 0.0
    """The earliest time of an examination that any user can cause."""

    def add(self, suspicion: Suspicion, now: float) -> bool:
        """Add a suspicion; False where it is open already."""
        if suspicion in self._open:
            return False
        stops_grants = suspicion.cause in STOPPING_GRANTS
        self._open[suspicion] = _Open(now, now if stops_grants else max(now, self._next), stops_grants)
        return True

    def due(self, now: float) -> Suspicion | None:
        """Return the suspicion to examine now; None where there is none."""
        return next((each for each, when in self._open.items() if when.due <= now), None)

    @property
    def strong(self) -> Suspicion | None:
        """The first open suspicion with a strong cause, or that stops grants and a canary has not decided.

        Its user can hinder each canary, and nothing else may ever decide it.
        """
        for each, when in self._open.items():
            if each.cause in STRONG or (when.stops_grants and when.due > when.since):
                return each
        return None

    @property
    def stopping_grants(self) -> Suspicion | None:
        """The first open suspicion for which nothing is granted."""
        return next((each for each, when in self._open.items() if when.stops_grants), None)

    def conclude(self, now: float, end: CanaryEnd, begun: float) -> None:
        """Note the end of a canary that began at this time: it decides the suspicions of before, if it proves anything.

        The others are examined again after SPACING.
        """
        self._next = now + SPACING
        # 1. A suspicion that is younger than the canary is about a later moment: it needs another canary.
        # 2. A canary with any evidence decides all older ones.
        # 3. Where no canary can be sent at all, some causes stop no grants any longer: these would wait for ever.
        # 4. The canary showed nothing: another one follows.
        for each, when in [*self._open.items()]:
            if when.since > begun:
                continue
            if end.proof is not Proof.NOTHING:
                del self._open[each]
            elif end.unable and each.cause in _BOUNDED:
                self._open[each] = when._replace(due=inf, stops_grants=False)
            else:
                self._open[each] = when._replace(due=self._next)

    def refute(self, listed: Iterable[Listed]) -> None:
        """Drop the suspicions about ended clients that their server lists no more."""
        there = {None, *listed}
        self._open = {each: when for each, when in self._open.items() if each.listed in there}

    def clear(self) -> None:
        """Forget the open suspicions: they were about a server that is gone."""
        self._open.clear()


@dataclass(slots=True)
class ListedClients:
    """The clients that the servers of one control daemon list, and the suspicions about them."""

    _known: dict[Listed, tuple[ProcessIdentity, int | None, float]] = field(default_factory=dict)
    """The process of each client, its uid, and since when it has been listed."""
    _silent: set[Listed] = field(default_factory=set)
    """Clients that caused a suspicion by their silence already; one is enough."""
    _ended: set[Listed] = field(default_factory=set)
    """Clients that caused a suspicion by their end already."""
    _dead: set[Listed] = field(default_factory=set)
    """Listed clients that had ended at the last check."""
    _questioned: set[Listed] = field(default_factory=set)
    """Listed clients that had ended one check before the daemon was asked for its clients."""

    def living(self, listed: Listed, process: ProcessIdentity, uid: int | None, now: float) -> None:
        before = self._known.get(listed)
        if before is None or before[0] != process:
            self._known[listed] = (process, uid, now)
            self._silent.discard(listed)
            self._ended.discard(listed)

    def keep(self, listed: Iterable[Listed]) -> None:
        """Forget all clients except those that are still listed."""
        there = {*listed}
        self._known = {each: known for each, known in self._known.items() if each in there}
        self._silent &= there
        self._ended &= there

    def still_listed(
        self, listed: Iterable[Listed], start_ticks: Callable[[Pid], int | None], *, answered: bool
    ) -> list[Suspicion]:
        """Suspect the server of each client that had ended before the daemon was asked, and is listed in its answer.

        `answered` tells whether the daemon has answered since `has_to_query` became true: the list before may be older
        than the end of a client. That is one check after the end was seen, since a server takes a moment for an end (up
        to 0.3 s between its first and its last line about one, measured on 580). `start_ticks` returns the kernel's
        value for a pid now.
        """
        dead = [each for each in listed if each not in self._ended and self._has_ended(each, start_ticks)]
        found = [each for each in dead if answered and each in self._questioned]
        self._ended.update(found)
        if answered or not self._questioned:
            self._questioned = self._dead.intersection(dead) - self._ended
        self._dead = {*dead}
        return [self._still_listed(each) for each in found]

    @property
    def has_to_query(self) -> bool:
        """Whether the daemon must be asked for its clients, because it lists some that have ended."""
        return bool(self._questioned)

    def _has_ended(self, listed: Listed, start_ticks: Callable[[Pid], int | None]) -> bool:
        known, ticks = self._known.get(listed), start_ticks(listed.pid)
        return ticks is None or (known is not None and known[0].start_ticks != ticks)

    def _still_listed(self, listed: Listed) -> Suspicion:
        because = f"server {listed.server} still lists client {listed.pid}, which has ended"
        known = self._known.get(listed)
        return Suspicion(Cause.STILL_LISTED, because, known[1] if known is not None else None, listed)

    def silent(self, with_memory: Iterable[Pid], now: float, *, patience: float) -> Suspicion | None:
        """Suspect the server of a client that is not among those `with_memory` on the GPU, after this many seconds.

        A program may initialise CUDA early and make its context late, so such a client is no evidence; a client that
        hangs in CUDA's initialisation looks the same.
        """
        there = {*with_memory}
        for listed, (_, uid, since) in self._known.items():
            if listed.pid in there or now - since < patience or listed in self._silent:
                continue
            self._silent.add(listed)
            because = f"client {listed.pid} of server {listed.server} has held no memory on the GPU for {patience:g} s"
            return Suspicion(Cause.SILENT, because, uid)
        return None
