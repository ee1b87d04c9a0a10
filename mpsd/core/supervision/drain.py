"""What an operator wants of a control daemon, and what is to be done next for it. Pure.

NVIDIA's `quit` stops a daemon's servers when the last of their clients is gone, however long that takes, also when the
front-end that said it is gone by then; `quit -t SECONDS` forces them, at once or while a `quit` waits (measured, all
versions). So whoever is patient is sure that nobody is harmed who came at the last moment.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from mpsd.core.model import ProcessIdentity
from mpsd.core.quantities import Moment

_DRAIN: Final = (
    "Stop admission and wait until no leases and no clients are left. Running clients continue for as long as they"
    " need. Admission stays stopped until it is resumed."
)
_RESTART: Final = (
    "Drain a control daemon, then replace it with a new one. Running clients continue for as long as they need. The new"
    " control daemon has the same limits, which are read back before admission resumes."
)


class Intent(StrEnum):
    """What an operator wants of a control daemon. Each is a promise, kept across restarts of mpsd and reboots."""

    promise: str
    """What its user may rely on."""

    def __new__(cls, value: str, promise: str) -> Self:
        """Make a member of its value and its promise."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.promise = promise
        return member

    RUN = "run", "Requests that fit are admitted."
    HOLD = "hold", "Stop admission until it is resumed. Running clients continue, and nothing is stopped."
    DRAIN = "drain", _DRAIN
    RESTART = "restart", _RESTART


TIMEOUT: Final = (
    "After this many seconds, end what is left: the leases, and each client by terminate_client, and by SIGTERM and"
    " SIGKILL once its server has released it. Clients that cannot be ended so are ended with their servers (quit -t)."
)
"""What is promised of a drain or a restart with a timeout."""


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    """What an operator asks for."""

    intent: Intent
    because: str
    operation: str = ""
    timeout: float | None = None
    """Seconds after which those who are still there are ended; None: never."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the last operator who wanted something wants."""

    intent: Intent
    because: str
    since: Moment
    operation: str = ""
    """By what the caller knows it."""
    boot: str = ""
    """The boot in which the three that follow mean anything."""
    at: float = 0.0
    """Seconds since boot when it was wanted."""
    deadline: float | None = None
    """Seconds since boot, after which those who are still there are ended."""
    replaced: ProcessIdentity | None = None
    """The process that a restart is to replace; None when there was none, or none was known yet."""
    quitting: bool = False
    """Whether that was told to quit, or is just about to be: there is no way back.

    A drain whose time is over replaces the daemon, too, where somebody is left who cannot be ended otherwise.
    """
    then: Intent = Intent.RUN
    """What is wanted once a restart is over."""
    then_because: str = ""
    """Why that is wanted, where it is not to run."""

    @property
    def waits(self) -> bool:
        """Whether there is something to wait for, and no more than a state to be in."""
        return self.intent is Intent.DRAIN or self.intent is Intent.RESTART

    def is_late(self, now: float) -> bool:
        """Tell whether nobody is waited for any more; `now` is in seconds since boot."""
        return self.deadline is not None and now >= self.deadline


@dataclass(frozen=True, slots=True)
class Blocker:
    """Somebody who is waited for: a lease, a client, or a server that outlived its control daemon."""

    what: str
    lease: str | None
    pid: int | None
    since: Moment
    """Since when it is there."""


@dataclass(frozen=True, slots=True)
class ObservedState:
    """How it stands with a control daemon."""

    process: ProcessIdentity | None
    answers: bool
    """Whether it answered when it was last asked, with every limit as wanted."""
    blockers: tuple[Blocker, ...]
    tried: bool
    """Whether everything was tried to end those who are there."""
    now: float
    """Seconds since boot."""


class DrainStep(StrEnum):
    """What is to be done next."""

    NOTHING = "nothing"
    WAIT = "wait"
    """For those who are there, or for the daemon to answer."""
    END = "end"
    """End those who are there: they had their time."""
    QUIT = "quit"
    """Nobody is there: have it quit, and wait for those who may come in this very moment."""
    FORCE = "force"
    """Have it quit whoever is there: all else was tried."""
    DONE = "done"
    """What was wanted is so."""


def next_step(desired: DesiredState, observed: ObservedState) -> DrainStep:
    """Return what is to be done next, however often it was asked before, and by whichever mpsd."""
    if not desired.waits or desired.intent is Intent.DRAIN:
        return _drained(desired, observed) if desired.waits else DrainStep.NOTHING
    if desired.replaced is None or observed.process != desired.replaced:
        # The old one is gone, by our word or its own: what is there now, or comes, is its successor.
        return DrainStep.DONE if observed.process is not None and observed.answers else DrainStep.WAIT
    if not desired.quitting and (observed.blockers or not observed.answers):
        # Who is there is not known of one that does not answer.
        return _emptied(desired, observed)
    return DrainStep.FORCE if desired.is_late(observed.now) and desired.quitting else DrainStep.QUIT


def _drained(desired: DesiredState, observed: ObservedState) -> DrainStep:
    if desired.quitting and observed.process is not None and observed.process == desired.replaced:
        return DrainStep.FORCE if desired.is_late(observed.now) else DrainStep.QUIT
    if observed.answers and not observed.blockers:
        return DrainStep.DONE
    step = _emptied(desired, observed)
    # One that does not answer is not replaced for a drain: nobody knows who is there.
    return DrainStep.WAIT if step is DrainStep.FORCE and not observed.answers else step


def identify(desired: DesiredState, process: ProcessIdentity | None, started: float) -> DesiredState:
    """Return a wish as it stands now that it is known which process there is, `started` so many seconds after boot.

    A restart may be wanted of an mpsd that has just started and not found the control daemon yet: one that ran by then
    is the one to be replaced, and one that came later is its successor.
    """
    if desired.intent is Intent.RESTART and desired.replaced is None and process is not None and started <= desired.at:
        return replace(desired, replaced=process)
    return desired


def _emptied(desired: DesiredState, observed: ObservedState) -> DrainStep:
    """Wait for those who are there; when they are late, end them; and force the daemon once everything was tried."""
    if not desired.is_late(observed.now):
        return DrainStep.WAIT
    return DrainStep.END if observed.blockers and not observed.tried else DrainStep.FORCE


def take_up(desired: DesiredState, boot: str) -> DesiredState:
    """Return a wish as it stands in this boot: of an earlier one no process is left, and no deadline matters."""
    if desired.boot == boot:
        return desired
    return replace(desired, boot=boot, at=0.0, deadline=None, replaced=None, quitting=False)


def revise(before: DesiredState, after: DesiredState, *, silent: bool = False) -> DesiredState:
    """Return what is wanted when one thing is wanted after the other, of a daemon that is `silent` or not.

    The same again is the same operation, with the latest deadline; a successor that answers nobody is what it is to
    replace now. A restart that is beyond recall goes on, and what is wanted after it holds when it is over.
    """
    if before.intent is after.intent and before.waits and before.operation:
        again = replace(before, deadline=after.deadline, because=after.because)
        if silent and after.replaced != before.replaced:
            return replace(again, replaced=after.replaced, quitting=False)
        return again
    if before.intent is Intent.RESTART and before.quitting:
        return replace(before, then=after.intent, then_because=_why(after))
    if after.intent is Intent.RESTART and before.intent is not Intent.RUN:
        return replace(after, then=before.intent, then_because=_why(before))
    return after


def _why(desired: DesiredState) -> str:
    return "" if desired.intent is Intent.RUN else desired.because


class Outcome(StrEnum):
    """How an operation stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """An operator wanted something else before it was done."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operator asked of a control daemon, and what came of it so far."""

    id: str
    daemon: str
    verb: str
    state: Outcome
    because: str
    started: Moment
    ended: Moment | None
    waits_for: tuple[Blocker, ...] = ()
