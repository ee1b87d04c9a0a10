"""The state of one control daemon, with its one writer; its deaths; the questions to it; its supervisor's heartbeat."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from mpsd.core.events import EventName
from mpsd.core.holders import who_said
from mpsd.core.lifecycle import ANSWERED, Event, State, step
from mpsd.core.settings import ControlDaemon
from mpsd.core.signal import Signal
from mpsd.core.supervision.restart import Death, Decision, RestartPolicy, RestartVerdict, dated, decide, recent
from mpsd.core.supervision.suspects import Crash, LetIn, Quit, is_suspect
from mpsd.daemon.control.pipe_access import LetInRecord, Quarantine
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock

_GRACE: Final = 10.0
"""Seconds that a busy machine may delay a loop before the loop is late."""

_CONVERSATIONS: Final = 20
"""More conversations with a control daemon than one round ever needs; each has its deadline."""

NO_QUIT: Final = (
    "take `echo quit | nvidia-cuda-mps-control` out of the program or job script that has it: mpsd starts and ends the"
    " control daemons; to replace one: mpsctl restart"
)
"""The remedy for a foreign `quit`."""

_DOUBT_SPACING: Final = 1.0
"""Seconds between two questions for doubts."""


class Lifecycle:
    """The state of one control daemon, since when, and why."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._state = State.DOWN
        self.because = "mpsd has not started it yet"
        self.hint: str | None = None
        self.since = clock.now()
        self.ready_since: datetime | None = None
        self._turned = clock.monotonic()
        """When the daemon last fell silent, answered again, or was told to end."""
        self.changed = Signal[()]()
        """The state, or its reason, is another one."""

    @property
    def state(self) -> State:
        """The present state of the daemon."""
        return self._state

    @property
    def is_silent(self) -> bool:
        """Whether the daemon runs and does not answer."""
        return self.state is State.UNRESPONSIVE

    @property
    def steady(self) -> float:
        """For how many seconds the daemon has answered, has not answered, or has been ending, without a change."""
        return clock.monotonic() - self._turned

    def explain(self, because: str, hint: str | None) -> None:
        """Say why the daemon is still in this state."""
        if (because, hint) != (self.because, self.hint):
            self.because, self.hint = because, hint
            self.changed.send()

    def move(self, event: Event, because: str, hint: str | None, pid: int | None, *, then: Event | None = None) -> None:
        """Apply an event of the daemon, which is this process, if any.

        `then` is a second event of the same moment. The two are one move, which is logged with the first event that has
        an effect. The state between them is never published.
        """
        target, effective = self._state, list[Event]()
        for each in (event, then):
            if each is not None and (following := step(target, each)) is not None:
                target = following
                effective.append(each)
        if target is self._state:
            return
        before, self._state = self._state, target
        if not {before, target}.isdisjoint({State.UNRESPONSIVE, State.STOPPING}):
            self._turned = clock.monotonic()
        self.since, self.because, self.hint = clock.now(), because, hint
        if target not in ANSWERED:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = self.since
        self.changed.send()
        # As the journal defines its priorities, an operator must correct an error, and may have to correct a warning.
        write = {State.FAILED: self._log.error, State.UNRESPONSIVE: self._log.warning}.get(target, self._log.info)
        write(EventName.DAEMON_STATE, state=target, before=before, on=effective[0], because=because, pid=pid)


class Questions:
    """The conversations that others request with one control daemon, and whether they were held since.

    A *doubt* is a reason to ask that proves nothing: a line of a server, or an Xid of the GPU. Any user with a client
    can cause both in a loop, so they may neither refuse the requests of others nor occupy the daemon. Doubts are asked
    about once a second at most, and a grant waits for the answer to those before it.
    """

    def __init__(self) -> None:
        self.requested = Signal[()]()
        """A conversation is to begin soon."""
        self.answered = asyncio.Event()
        """Set, and replaced, after every conversation with the daemon."""
        self.is_requested = False
        """Whether a conversation was requested since the last one began."""
        self._begun = self._ended = 0
        """How many conversations have begun, and the last one that has ended."""
        self._is_doubt_answered: Callable[[], bool] | None = None
        """Tells whether the latest doubt was answered; None where there is none."""
        self._last_doubt = -inf
        """When the last question for a doubt was asked."""
        self._next_doubt: asyncio.TimerHandle | None = None

    def ask(self) -> Callable[[], bool]:
        """Request a conversation with the daemon; return a function that tells whether one has ended since.

        A conversation that had begun before the request does not count.
        """
        self.is_requested = True
        self.requested.send()
        return self._answered_later()

    def _answered_later(self) -> Callable[[], bool]:
        begun = self._begun
        return lambda: self._ended > begun

    def begin(self) -> None:
        """Note that a conversation begins; only one is held at a time."""
        self.is_requested = False
        self._begun += 1

    def end(self) -> None:
        """Note that the conversation has ended; one that failed on mpsd's side does not end, and another one begins."""
        self._ended = self._begun
        self.answered.set()
        self.answered = asyncio.Event()

    def doubt(self) -> None:
        """Note a doubt, and ask about it soon."""
        self._is_doubt_answered = self._answered_later()
        if self._next_doubt is None:
            delay = max(0.0, self._last_doubt + _DOUBT_SPACING - clock.monotonic())
            self._next_doubt = asyncio.get_running_loop().call_later(delay, self._ask_about_doubt)

    def _ask_about_doubt(self) -> None:
        self._next_doubt = None
        if self.unanswered_doubts() is not None:
            self._last_doubt = clock.monotonic()
            self.ask()

    def unanswered_doubts(self) -> Callable[[], bool] | None:
        """Return a function that tells whether the doubts so far were answered; None where all are."""
        if self._is_doubt_answered is not None and self._is_doubt_answered():
            self._is_doubt_answered = None
        return self._is_doubt_answered

    def close(self) -> None:
        """Ask no more."""
        if self._next_doubt is not None:
            self._next_doubt.cancel()


class Ended(NamedTuple):
    """How a control daemon ended: in words, and by which signal if it was one."""

    how: str
    signal: str | None = None
    started: bool = True
    """Whether there was a process at all."""
    listened: bool = False
    """Whether it had made its socket, so that other processes could reach it."""
    quit: Quit | None = None
    """The `quit` of others that it has obeyed."""
    clients: tuple[int, ...] = ()
    """The pids of the clients that ended with it."""

    @property
    def cause(self) -> str:
        """The end in a word, as metrics count it."""
        return self.signal or ("quit" if self.quit is not None else "exit" if self.started else "start")


class _Tally(Struct, forbid_unknown_fields=True):
    deaths: tuple[Death, ...]
    failed: str | None


class DeathTally:
    """The deaths that count, and the reason for giving up where that was decided."""

    def __init__(self, path: Path, let_in: LetInRecord, quarantine: Quarantine, log: Logger) -> None:
        self._record = Record(path, _Tally, log)
        self._let_in, self._quarantine = let_in, quarantine
        self._log = log
        # Deaths before a reboot are forgiven, as are those of a damaged file, which is mpsd's own: a forgiven death
        # harms no client.
        found = self._record.load() or _Tally((), None)
        self._deaths, self.failed = found.deaths, found.failed

    def count(self, ended: Ended, settings: ControlDaemon) -> Decision:
        """Note a death, and return the decision that follows from it and the earlier ones.

        A crash of a daemon that listened, and its obedience to a `quit`, name those who may have caused it, and do not
        count towards giving up: nobody must be able to disable the GPU, and no access list keeps root out of the
        socket, in a container without a lease neither. After somebody is quarantined for it, the deaths with that
        access are forgotten.
        """
        now, policy = clock.monotonic(), RestartPolicy(deaths=settings.deaths, window=settings.death_window)
        jitter = random.random()  # noqa: S311 - it is no secret
        let_in, how, is_crash = LetIn(), ended.how, ended.listened and is_suspect(ended.signal)
        if is_crash or ended.quit is not None:
            let_in = self._let_in.so_far.and_(groups=self._quarantine.remaining_groups())
        if is_crash:
            how = f"{how}; {let_in if let_in.anybody else 'root alone'} had pipe access"
        if ended.quit is not None:
            let_in = ended.quit.let_in(let_in)
        death = Death(now, how, let_in.known, counts=not (is_crash or ended.quit))
        deaths = (*recent(self._deaths, policy, now), death)
        decision = dated(decide(deaths, policy, now, jitter), deaths, now, clock.now())
        self._note(deaths, decision)
        crash = Crash(self._let_in.daemon, now, let_in, quit=ended.quit is not None)
        if let_in.known and (shut_out := {*self._quarantine.crashed(crash)}):
            deaths = tuple(each for each in deaths if not shut_out & {*each.suspects})
            named = ", ".join(sorted(map(who_said, shut_out)))
            decision = replace(decide(deaths, policy, now, jitter), because=f"{how}; quarantined for it: {named}")
            self._note(deaths, decision)
        self._log.warning(
            EventName.DAEMON_DEATH,
            how=how,
            cause=ended.cause,
            verdict=decision.verdict,
            delay=decision.delay,
            suspects=list(let_in.uids),
            cgroups=list(let_in.groups),
            **_facts(ended),
        )
        return decision

    def forget(self) -> None:
        """Forget the deaths, by an operator's command."""
        self._note((), None)

    def _note(self, deaths: tuple[Death, ...], decision: Decision | None) -> None:
        """Replace the record; where it cannot be written, mpsd still knows it."""
        gives_up = decision is not None and decision.verdict is RestartVerdict.GIVE_UP
        self._deaths, self.failed = deaths, decision.because if decision is not None and gives_up else None
        self._record.store(_Tally(deaths, self.failed))


def _facts(ended: Ended) -> dict[str, object]:
    """Return what an event says of a `quit`."""
    if ended.quit is None:
        return {}
    facts: dict[str, object] = {"command": ended.quit.command, "clients": list(ended.clients), "hint": NO_QUIT}
    sender = ended.quit.sender
    if sender is not None:
        facts |= {"uid": sender.uid} | ({"lease": sender.lease} if sender.lease else {})
    return facts


class Heartbeat:
    """The promise of a supervisor, before each action and each wait, when it will be back.

    mpsd/daemon/service_manager.py feeds the watchdog only while no supervisor has broken its promise.
    """

    def __init__(self) -> None:
        self._until = inf

    def back_in(self, seconds: float | None) -> None:
        """Promise to call this again within this many seconds; None is for a wait that only an event ends."""
        self._until = inf if seconds is None else clock.monotonic() + seconds + _GRACE

    @property
    def is_late(self) -> bool:
        """Whether the promise was broken."""
        return clock.monotonic() > self._until


def longest_round(settings: ControlDaemon) -> float:
    """Return the seconds that a supervisor's round may take: a start, and conversations, each to its deadline."""
    return settings.start_deadline + _CONVERSATIONS * settings.answer_deadline
