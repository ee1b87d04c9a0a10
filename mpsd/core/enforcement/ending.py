"""The steps by which mpsd ends a client of MPS, for any cause: what to do next about it. Pure.

A client that is killed while the GPU works for it leaves that work behind: other clients of its server meet an illegal
address, and if it was the only client, the next one fails (measured on 580) or, as others report, hangs. The server
therefore ends the client's contexts first, by `terminate_client`, and signals follow its answer `0`. A SIGTERM before
that is for programs that finish their work on it, where their lease says so. A handler for the signal proves nothing:
the runtimes of Go and Java have one, and exit in mid-kernel. Sources: NVIDIA's "Multi-Process Service", on terminating
clients; docs/gpu.md.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct, structs

from mpsd.core.model import ProcessIdentity, Stop
from mpsd.core.quantities import Moment

ATTEMPTS: Final = 3
"""How often mpsd asks a server in a row to end the contexts of one client that shares the server with others."""

_RESTS: Final = (300.0, 600.0, 1200.0, 3600.0)
"""Seconds after these attempts until the next one, and after each further one; the last value repeats. An attempt can
occupy the control daemon's only seat for the whole `enforcement.terminate_deadline`, and grants wait meanwhile."""


PATIENCE: Final = 10
"""For how many times `daemon.answer_deadline` the ends of the remaining clients may make no progress, until the control
daemon ends them by force. A control daemon that is only busy or stopped for a moment answers again within that time."""


class EndStep(StrEnum):
    """The last step that was taken to end a process. It is on disk before it is taken."""

    NONE = "none"
    """No step: the ending can still be cancelled."""
    SIGTERM_FIRST = "sigterm_first"
    """SIGTERM, as its lease requests."""
    TERMINATE_CLIENT = "terminate_client"
    SIGTERM = "sigterm"
    """Its contexts are ended, and it got a signal to exit."""
    SIGKILL = "sigkill"


class EndCause(Struct, frozen=True):
    """Why mpsd ends a process, and which part of mpsd requested that: each part can withdraw its own cause."""

    by: str
    because: str


class PendingAnswer(Struct, frozen=True):
    """A server that is ending the contexts of a client, and the front-end that waits for its answer."""

    daemon: str
    server: ProcessIdentity
    front_end: ProcessIdentity
    nonce: str
    until: float
    """Seconds since boot at which the wait for the answer ends."""


class Refused(Struct, frozen=True):
    """A server that did not end the contexts of a client: why, how often, and when mpsd may ask it again."""

    server: ProcessIdentity
    because: str
    attempts: int = 1
    again: float = 0.0
    """Seconds since boot."""
    final: bool = False
    """Whether the server has no such command, so that mpsd never asks it again."""


class Ending(Struct, frozen=True):
    """The progress of the ending of one process."""

    process: ProcessIdentity
    uid: int
    causes: tuple[EndCause, ...]
    boot: str
    began: Moment
    stop: Stop = Stop.TERMINATE
    daemons: tuple[str, ...] = ()
    """The control daemons to ask whose client it is, beside those that list it."""
    lost: bool = False
    """Whether it has no contexts to be ended: a fault destroyed them, or it never had any."""
    step: EndStep = EndStep.NONE
    until: float = 0.0
    """Seconds since boot until which the process may exit after the latest signal."""
    pending: PendingAnswer | None = None
    released: tuple[ProcessIdentity, ...] = ()
    """The servers that have ended its contexts."""
    refused: tuple[Refused, ...] = ()
    unreleased: tuple[tuple[str, ProcessIdentity], ...] = ()
    """The servers, each with its control daemon, whose only client it was, and whose contexts for it a signal ended."""
    late: tuple[tuple[str, ProcessIdentity], ...] = ()
    """The servers, each with its control daemon, that did not return from ending its contexts."""

    @property
    def because(self) -> str:
        """Why the process is ended."""
        return "; ".join(each.because for each in self.causes)

    @property
    def has_begun(self) -> bool:
        """Whether any step was taken: from then on the ending is finished, whatever becomes of the causes."""
        return self.step is not EndStep.NONE


class Place(NamedTuple):
    """A server that lists the process as its client, by its current answer."""

    daemon: str
    server: ProcessIdentity
    alone: bool
    """Whether the server has no other client."""


class Progress(NamedTuple):
    """How far an ending has come."""

    stays: str
    """Why it cannot proceed now; empty while it can."""
    exhausted: bool
    """Whether every attempt was made, so that only its servers' end would end the process."""
    since: float
    """The time of its latest progress, in seconds since boot: a server's answer, a signal, or a new cause."""


class Seen(NamedTuple):
    """The known facts about the process at this moment; `now` is in seconds since boot."""

    gone: bool
    places: tuple[Place, ...]
    unknown: str
    """Why it is unknown of which servers it is a client; empty where it is known."""
    now: float


class Act(StrEnum):
    DONE = "done"
    """Nothing is left to do: the process is gone."""
    AWAIT = "await"
    """Wait for the pending answer."""
    WAIT = "wait"
    """Give the process time, until the returned moment."""
    ASK = "ask"
    """Ask a server to end its contexts."""
    SIGTERM_FIRST = "sigterm_first"
    SIGTERM = "sigterm"
    SIGKILL = "sigkill"
    STAY = "stay"
    """Leave the process and report it: every further step would harm others."""


class Move(NamedTuple):
    """The next action, with its arguments."""

    act: Act
    place: Place | None = None
    until: float = 0.0
    because: str = ""
    suspects: tuple[Place, ...] = ()
    """Servers whose only client the signal ends before they have ended its contexts."""
    exhausted: bool = False
    """Whether the process stays although every attempt was made, and not because a fact is unknown at the moment."""


def next_move(ending: Ending, seen: Seen) -> Move:
    """Return the next action.

    It follows from the stored state and the observation alone, so that any mpsd can continue.
    """
    # 1. A server has not answered yet, as when an earlier mpsd asked it. Its answer may change every case below.
    # 2. The process is gone, whether by a step of mpsd or by itself.
    # 3. The time that the last signal gave the process has not passed.
    # 4. A request may want SIGTERM first: the program can use its contexts while it stops.
    # 5. A server ends the contexts before any signal, since a signal in mid-kernel can harm its other clients. Contexts
    #    that are lost already need no server.
    # 6. Only signals are left: SIGTERM, and after that SIGKILL.
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
    """Return what to do about contexts that no server has ended; None where signals harm no other client."""
    # 1. Of which servers it is a client is unknown, so a signal might harm others: it stays until that is known.
    # 2. A server that was never asked is asked. One that refused is asked again only where it has other clients, its
    #    refusal may change, and the pause is over.
    # 3. On servers without other clients, a refusal is enough: a signal harms nobody else there.
    # 4. A server with other clients has attempts left: its pause is waited for.
    # 5. All attempts were made: it stays, since its servers' end alone would end it.
    if seen.unknown:
        return Move(Act.STAY, because=seen.unknown)
    refused = {each.server: each for each in ending.refused}
    for place in left:
        refusal = refused.get(place.server)
        if refusal is None or (not place.alone and not refusal.final and refusal.again <= seen.now):
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
    return Move(Act.STAY, because=because, exhausted=True)


def are_tried(ends: Collection[Progress | None], *, silent: bool, steady: float, now: float, patience: float) -> bool:
    """Tell whether the clients of a control daemon run after every attempt to end them; None: an end has not begun.

    `silent` says that the daemon does not answer, and `steady` for how many seconds that, or the contrary, was so.

    An end that something else obstructs, such as a silent control daemon, counts as tried only after `patience` seconds
    in which no end made progress, and the daemon did not change between silence and answers. The clients of a silent
    daemon are unknown, so it must have been silent for that long in any case.
    """
    is_steady = steady >= patience
    if silent and not is_steady:
        return False
    is_stuck = is_steady and all(now - each.since >= patience for each in ends if each is not None)
    return all(each is not None and (each.exhausted or (bool(each.stays) and is_stuck)) for each in ends)


def let_go(ending: Ending, by: str) -> Ending | None:
    """Return an ending without the causes that `by` withdraws; None: no cause is left.

    An ending that has begun is finished: a program that got a signal to exit, or whose server is ending its contexts,
    cannot return to normal operation, and an incomplete ending is worse than a complete one.
    """
    left = tuple(each for each in ending.causes if each.by != by)
    if left == ending.causes or ending.has_begun:
        return ending
    return structs.replace(ending, causes=left) if left else None


def joined(ending: Ending, cause: EndCause, *, lost: bool) -> Ending:
    """Return an ending with one more cause, or the same ending where that adds nothing.

    After a new cause, mpsd asks the servers that refused once more. `lost` says that the process has lost its contexts,
    whatever was known before.
    """
    if lost and not ending.lost:
        ending = structs.replace(ending, lost=True)
    if any(each.by == cause.by for each in ending.causes):
        return ending
    return structs.replace(ending, causes=(*ending.causes, cause), refused=())


def unheard(ending: Ending) -> Ending:
    """Return an ending whose server did not receive the request, in the state before the request."""
    step = ending.step
    if step is EndStep.TERMINATE_CLIENT and not ending.released and not ending.late:
        # No step that cannot be undone was taken: no server has ended its contexts, or may still do so.
        step = EndStep.SIGTERM_FIRST if ending.stop is Stop.SIGTERM else EndStep.NONE
    return structs.replace(ending, pending=None, step=step)


def refused(
    ending: Ending, pending: PendingAnswer, because: str, *, final: bool, late: bool, now: float, grace: float
) -> Ending:
    """Return an ending that the server of a pending answer refused, or did not answer.

    A `final` refusal will not change later. One that is `late` may still turn out as a success. `now` is in seconds
    since boot; `grace` are the seconds between the first attempts.
    """
    before = next((each.attempts for each in ending.refused if each.server == pending.server), 0)
    attempts = ATTEMPTS if final else before + 1
    rest = grace if attempts < ATTEMPTS else _RESTS[min(attempts - ATTEMPTS, len(_RESTS) - 1)]
    refusal = Refused(pending.server, because, attempts, now + rest, final)
    others = tuple(each for each in ending.refused if each.server != pending.server)
    if not late:
        return structs.replace(unheard(ending), refused=(*others, refusal))
    place = (pending.daemon, pending.server)
    suspects = ending.late if place in ending.late else (*ending.late, place)
    return structs.replace(ending, pending=None, refused=(*others, refusal), late=suspects)


def asking(ending: Ending, pending: PendingAnswer) -> Ending:
    """Return an ending for which a server is being asked."""
    signalled = ending.step in {EndStep.SIGTERM, EndStep.SIGKILL}
    return structs.replace(ending, pending=pending, step=ending.step if signalled else EndStep.TERMINATE_CLIENT)


def released(ending: Ending, server: ProcessIdentity) -> Ending:
    """Return an ending whose contexts a server has ended."""
    return structs.replace(ending, pending=None, released=(*ending.released, server))
