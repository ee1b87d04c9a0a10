"""The desired state of a control daemon, and the next step towards it. Pure.

NVIDIA's `quit` stops a daemon's servers after the last of their clients has exited, however long that takes, even if
the front-end that sent it is gone by then. `quit -t SECONDS` ends them by force, at once or while a `quit` waits
(measured, all versions). A plain `quit` therefore harms no client, not even one that connected at the last moment.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
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
    """The intent of an operator for a control daemon. Each is a promise that survives restarts of mpsd and reboots."""

    promise: str

    def __new__(cls, value: str, promise: str) -> Self:
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
"""The promise of a drain or a restart with a timeout."""


@dataclass(frozen=True, slots=True)
class OperatorCommand:
    intent: Intent
    because: str
    operation: str = ""
    timeout: float | None = None
    """Seconds after which the remaining leases and clients are ended; None: never."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The desired state after the last command of an operator."""

    intent: Intent
    because: str
    since: Moment
    operation: str = ""
    """The id by which the operator can query it."""
    boot: str = ""
    """The boot in which `at`, `deadline` and `replaced` are valid."""
    at: float = 0.0
    """The time of the command, in seconds since boot."""
    deadline: float | None = None
    """The time, in seconds since boot, after which the remaining leases and clients are ended."""
    replaced: ProcessIdentity | None = None
    """The process that a restart must replace; None when no process existed, or its identity was unknown yet."""
    quitting: bool = False
    """Whether that process has got the command to quit, or is about to get it, which cannot be undone.

    A drain whose time has expired replaces the daemon, too, where a client cannot be ended otherwise.
    """
    then: Intent = Intent.RUN
    """The intent that follows a restart."""
    then_because: str = ""
    """The reason for that intent, where it is not to run."""

    @property
    def waits(self) -> bool:
        """Whether the intent has an end to wait for, rather than being a lasting state."""
        return self.intent is Intent.DRAIN or self.intent is Intent.RESTART

    def is_late(self, now: float) -> bool:
        """Tell whether the deadline has passed; `now` is in seconds since boot."""
        return self.deadline is not None and now >= self.deadline


def timeout(desired: DesiredState) -> str:
    """Say when the remaining clients are ended, for the end of a sentence; empty where they never are."""
    if desired.deadline is None:
        return ""
    end = desired.since + timedelta(seconds=desired.deadline - desired.at)
    return f", and ends the remaining clients at {end.isoformat(timespec='seconds')}"


@dataclass(frozen=True, slots=True)
class Blocker:
    """An object that a drain waits for: a lease, a client, or a server whose clients are unknown."""

    what: str
    lease: str | None
    pid: int | None
    since: Moment
    """Since when it exists."""
    is_busy: bool = False
    """Whether it is a server that is busy, and has not named its clients to this mpsd; any other has outlived its
    control daemon."""


def named(blocker: Blocker) -> str:
    """Describe a blocker, for use after "waiting for"."""
    since = blocker.since.isoformat(timespec="seconds")
    if blocker.lease is not None:
        return f"{blocker.lease} (pid {blocker.pid}, since {since})"
    if not blocker.pid:
        return f"a client that cannot be identified (pid 0, as in another pid namespace; since {since})"
    if blocker.is_busy:
        return f"{blocker.what} {blocker.pid}, which is busy and has not named its clients (since {since})"
    return f"{blocker.what} {blocker.pid} (since {since})"


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The observed state of a control daemon."""

    process: ProcessIdentity | None
    answers: bool
    """Whether it answered the last query, so that its clients are known."""
    proved: bool
    """Whether it did, with every limit as wanted."""
    blockers: tuple[Blocker, ...]
    tried: bool
    """Whether every way to end the blockers was tried."""
    now: float
    """Seconds since boot."""


class DrainStep(StrEnum):
    NOTHING = "nothing"
    WAIT = "wait"
    """Wait for the blockers to end, or for the daemon to answer."""
    END = "end"
    """End the blockers: their time has expired."""
    QUIT = "quit"
    """No blocker is left: send `quit` to the daemon, and wait for clients that may connect at this very moment."""
    FORCE = "force"
    """Make the daemon end its clients by force: everything else was tried."""
    DONE = "done"
    """The desired state is reached."""


def next_step(desired: DesiredState, observed: ObservedState) -> DrainStep:
    """Return the next step; repeated calls, also by another mpsd, are safe."""
    # 1. To run and to hold have no end to wait for. A drain has its own order, since it keeps the daemon.
    # 2. A restart had no process to replace, or that process is gone, by mpsd's command or by itself. Any other process
    #    is the successor, and the restart is done once the successor answers with every limit.
    # 3. Before `quit`, the blockers must end. A daemon that does not answer is treated as if it had some: its clients
    #    are unknown.
    # 4. `quit` is sent, and again by each later call. It becomes `quit -t` only where it was sent before and the
    #    deadline has passed.
    if not desired.waits or desired.intent is Intent.DRAIN:
        return _drained(desired, observed) if desired.waits else DrainStep.NOTHING
    if desired.replaced is None or observed.process != desired.replaced:
        return DrainStep.DONE if observed.process is not None and observed.proved else DrainStep.WAIT
    if not desired.quitting and (observed.blockers or not observed.answers):
        return _emptied(desired, observed)
    return DrainStep.FORCE if desired.is_late(observed.now) and desired.quitting else DrainStep.QUIT


def _drained(desired: DesiredState, observed: ObservedState) -> DrainStep:
    # 1. A process that got `quit` cannot be kept, even if its blockers are gone by now.
    # 2. Nothing is left, and the daemon stays.
    # 3. The blockers must end. A daemon that does not answer is not forced for a drain, since its clients are unknown.
    if desired.quitting and observed.process is not None and observed.process == desired.replaced:
        return DrainStep.FORCE if desired.is_late(observed.now) else DrainStep.QUIT
    if observed.answers and not observed.blockers:
        return DrainStep.DONE
    step = _emptied(desired, observed)
    return DrainStep.WAIT if step is DrainStep.FORCE and not observed.answers else step


def identify(desired: DesiredState, process: ProcessIdentity | None, started: float) -> DesiredState:
    """Return a desired state with the process that a restart must replace, once the process is known.

    `started` is its start in seconds after boot. The command may reach an mpsd that has just started and not found the
    control daemon yet: a process that ran by then is the one to replace, and one that started later is its successor.
    """
    if desired.intent is Intent.RESTART and desired.replaced is None and process is not None and started <= desired.at:
        return replace(desired, replaced=process)
    return desired


def _emptied(desired: DesiredState, observed: ObservedState) -> DrainStep:
    """Wait for the blockers; after the deadline, end them; and force the daemon once everything was tried."""
    if not desired.is_late(observed.now):
        return DrainStep.WAIT
    if observed.tried:
        return DrainStep.FORCE
    return DrainStep.END if observed.blockers else DrainStep.WAIT


def take_up(desired: DesiredState, boot: str) -> DesiredState:
    """Adapt a desired state to this boot: no process and no deadline of an earlier boot is valid."""
    if desired.boot == boot:
        return desired
    return replace(desired, boot=boot, at=0.0, deadline=None, replaced=None, quitting=False)


def revise(before: DesiredState, after: DesiredState, *, fails: bool = False) -> DesiredState:
    """Return the desired state after a second command.

    `fails` says whether the daemon does not answer, or not with every limit as wanted.
    """
    # 1. The same command again continues the operation, with the new deadline. If the successor of the old process
    #    fails, the successor is to be replaced instead. A process that is being forced to quit is still forced: its
    #    clients may be gone already, and an unreachable process does not end otherwise.
    # 2. A restart that has sent `quit` cannot be undone: the second command takes effect after it.
    # 3. A restart of a daemon that is not to run, as after a hold, returns to that state.
    # 4. Any other command replaces the one before.
    if before.intent is after.intent and before.waits and before.operation:
        again = replace(before, deadline=after.deadline, because=after.because)
        if fails and after.replaced != before.replaced:
            return replace(again, replaced=after.replaced, quitting=False)
        is_forced = before.quitting and before.is_late(after.at)
        return before if is_forced else again
    if before.intent is Intent.RESTART and before.quitting:
        return replace(before, then=after.intent, then_because=_why(after))
    if after.intent is Intent.RESTART and before.intent is not Intent.RUN:
        return replace(after, then=before.intent, then_because=_why(before))
    return after


def _why(desired: DesiredState) -> str:
    return "" if desired.intent is Intent.RUN else desired.because


class Outcome(StrEnum):
    """The state of an operation."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """An operator gave another command before it was finished."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator's command to a control daemon, and its progress."""

    id: str
    daemon: str
    verb: str
    state: Outcome
    because: str
    started: Moment
    ended: Moment | None
    waits_for: tuple[Blocker, ...] = ()
