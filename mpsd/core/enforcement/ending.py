"""The one ladder by which mpsd ends a client of MPS, whatever for: what is to be done next about it. Pure.

A client that is killed while the GPU works for it leaves that work behind: other clients of its server may meet an
illegal address, and with nobody left, whoever comes later can hang. So the server ends its contexts first, by
`terminate_client`, and signals come after its `0`. A SIGTERM before that is for programs that finish their work on it,
as their lease says: that a program catches the signal proves nothing, since the runtimes of Go and Java catch it and
exit in mid-kernel. Sources: NVIDIA's "Multi-Process Service", on terminating clients; mps-facts B4.3.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct, structs

from mpsd.core.model import ProcessIdentity, Stop
from mpsd.core.quantities import Moment

ATTEMPTS: Final = 3
"""How often a server is asked to end the contexts of one client that shares it with others."""


class EndStep(StrEnum):
    """What was done last to end a process. It is on disk before it is done."""

    NONE = "none"
    """Nothing: it can still be let go."""
    SIGTERM_FIRST = "sigterm_first"
    """SIGTERM, as its lease asks for."""
    TERMINATE_CLIENT = "terminate_client"
    SIGTERM = "sigterm"
    """Its contexts are ended, and it has been told to exit."""
    SIGKILL = "sigkill"


class EndCause(Struct, frozen=True):
    """Why somebody wants a process ended, and who that is: each can take back its own cause."""

    by: str
    because: str


class PendingAnswer(Struct, frozen=True):
    """A server that is ending the contexts of a client, and the front-end that waits for its answer."""

    daemon: str
    server: ProcessIdentity
    front_end: ProcessIdentity
    nonce: str
    until: float
    """Seconds since boot: when it is not waited for any longer."""


class Refused(Struct, frozen=True):
    """A server that did not end the contexts of a client: why, how often, and when it may be asked again."""

    server: ProcessIdentity
    because: str
    attempts: int = 1
    again: float = 0.0
    """Seconds since boot."""


class Ending(Struct, frozen=True):
    """How far the end of one process is."""

    process: ProcessIdentity
    uid: int
    causes: tuple[EndCause, ...]
    boot: str
    began: Moment
    stop: Stop = Stop.TERMINATE
    daemons: tuple[str, ...] = ()
    """The control daemons that are asked whose client it is, beside those that list it."""
    lost: bool = False
    """Whether it has no contexts to be ended: a fault took them, or it never had any."""
    step: EndStep = EndStep.NONE
    until: float = 0.0
    """Seconds since boot: how long it has to exit after the latest signal."""
    pending: PendingAnswer | None = None
    released: tuple[ProcessIdentity, ...] = ()
    """The servers that have ended its contexts."""
    refused: tuple[Refused, ...] = ()
    unreleased: tuple[tuple[str, ProcessIdentity], ...] = ()
    """Control daemons and servers whose only client it was, and that had not ended its contexts before a signal did."""

    @property
    def because(self) -> str:
        """Why it is ended."""
        return "; ".join(each.because for each in self.causes)

    @property
    def has_begun(self) -> bool:
        """Whether anything was done to it: from then on its end is finished, whatever becomes of the causes."""
        return self.step is not EndStep.NONE


class Place(NamedTuple):
    """A server that lists the process as its client, by the answer to a question that was asked just now."""

    daemon: str
    server: ProcessIdentity
    alone: bool
    """Whether it has no other client."""


class Seen(NamedTuple):
    """What is known about the process at this moment; `now` is in seconds since boot."""

    gone: bool
    places: tuple[Place, ...]
    unknown: str
    """Why it is not known of which servers it is a client; empty where it is known."""
    now: float


class Act(StrEnum):
    """What there is to do."""

    DONE = "done"
    """It is gone."""
    AWAIT = "await"
    """Wait for the answer that is due."""
    WAIT = "wait"
    """Give it time, until the moment that is named."""
    ASK = "ask"
    """Have a server end its contexts."""
    SIGTERM_FIRST = "sigterm_first"
    SIGTERM = "sigterm"
    SIGKILL = "sigkill"
    STAY = "stay"
    """Nothing can be done without harm to others: it stays, and that is reported."""


class Move(NamedTuple):
    """What to do next, and what that takes."""

    act: Act
    place: Place | None = None
    until: float = 0.0
    because: str = ""
    suspects: tuple[Place, ...] = ()
    """Servers that the signal leaves without their only client, and that had not ended its contexts."""


def next_move(ending: Ending, seen: Seen) -> Move:
    """Return what to do next, by whichever mpsd: it follows from what is on disk and from what is seen alone."""
    if ending.pending is not None:
        return Move(Act.AWAIT)
    if seen.gone:
        return Move(Act.DONE)
    if seen.now < ending.until:
        return Move(Act.WAIT, until=ending.until)
    if ending.stop is Stop.SIGTERM and not ending.has_begun:
        return Move(Act.SIGTERM_FIRST)
    left = tuple(place for place in seen.places if place.server not in ending.released)
    if not ending.lost and (first := _end_contexts(ending, left, seen)) is not None:
        return first
    signalled = ending.step in {EndStep.SIGTERM, EndStep.SIGKILL}
    return Move(Act.SIGKILL if signalled else Act.SIGTERM, suspects=() if ending.lost else left)


def _end_contexts(ending: Ending, left: tuple[Place, ...], seen: Seen) -> Move | None:
    """Return what to do about contexts that no server has ended; None where signals harm nobody."""
    if seen.unknown:
        return Move(Act.STAY, because=seen.unknown)
    refused = {each.server: each for each in ending.refused}
    for place in left:
        refusal = refused.get(place.server)
        if refusal is None or (not place.alone and refusal.attempts < ATTEMPTS and refusal.again <= seen.now):
            return Move(Act.ASK, place)
    shared = [place for place in left if not place.alone]
    if not shared:
        return None
    first = min(shared, key=lambda place: refused[place.server].attempts)
    refusal = refused[first.server]
    because = (
        f"server {first.server.pid} of {first.daemon} has other clients, and did not end the contexts of process"
        f" {ending.process.pid}: {refusal.because}"
    )
    if refusal.attempts < ATTEMPTS:
        return Move(Act.WAIT, until=refusal.again, because=because)
    return Move(Act.STAY, because=because)


def let_go(ending: Ending, by: str) -> Ending | None:
    """Return an end without the causes of somebody who takes them back; None: nobody wants it any more.

    An end that has begun is finished: a program that was told to exit, or whose contexts its server is ending, has no
    way back, and half an end is worse than a whole one.
    """
    left = tuple(each for each in ending.causes if each.by != by)
    if left == ending.causes or ending.has_begun:
        return ending
    return structs.replace(ending, causes=left) if left else None


def joined(ending: Ending, cause: EndCause) -> Ending:
    """Return an end that one more wants, or the same where that one wants it already.

    What servers refused for the others they are asked once more.
    """
    if any(each.by == cause.by for each in ending.causes):
        return ending
    return structs.replace(ending, causes=(*ending.causes, cause), refused=())


def unheard(ending: Ending) -> Ending:
    """Return an end whose server was not heard, so that it is as it was before that was asked."""
    step = ending.step
    if step is EndStep.TERMINATE_CLIENT and not ending.released:
        # Nothing has happened to it that has no way back.
        step = EndStep.SIGTERM_FIRST if ending.stop is Stop.SIGTERM else EndStep.NONE
    return structs.replace(ending, pending=None, step=step)


def refused(
    ending: Ending, server: ProcessIdentity, because: str, *, final: bool, settled: bool, again: float
) -> Ending:
    """Return an end that a server has refused, or not answered to.

    A `final` refusal will not be otherwise later. One that is not `settled` may still come to something.
    """
    before = next((each.attempts for each in ending.refused if each.server == server), 0)
    refusal = Refused(server, because, ATTEMPTS if final else min(before + 1, ATTEMPTS), again)
    others = tuple(each for each in ending.refused if each.server != server)
    after = unheard(ending) if settled else structs.replace(ending, pending=None)
    return structs.replace(after, refused=(*others, refusal))


def asking(ending: Ending, pending: PendingAnswer) -> Ending:
    """Return an end for which a server is being asked."""
    signalled = ending.step in {EndStep.SIGTERM, EndStep.SIGKILL}
    return structs.replace(ending, pending=pending, step=ending.step if signalled else EndStep.TERMINATE_CLIENT)


def released(ending: Ending, server: ProcessIdentity) -> Ending:
    """Return an end whose contexts a server has ended."""
    return structs.replace(ending, pending=None, released=(*ending.released, server))
