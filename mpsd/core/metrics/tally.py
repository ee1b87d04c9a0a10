"""The counters of mpsd. They follow the lines of its log, each of which is an event. Pure.

Counters and events agree because both come from the same place: the line that is about to be written. Events that the
log leaves out, because their user has too many, are counted by `count_omitted`.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final, TypeAlias, cast

from mpsd.core.events import EventName
from mpsd.core.lifecycle import Event
from mpsd.core.metrics import families
from mpsd.core.metrics.families import Histogram, Labels, Samples
from mpsd.core.model import ViolationKind
from mpsd.core.mps.limits import LIMITS

Facts: TypeAlias = Mapping[str, object]

_REFUSALS: Final = ("does_not_fit", "never_fits", "quota", "daemon_not_ready", "queue_full", "quarantined", "storage")
_CAUSES: Final = ("exit", "start", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM")
_STARTS: Final = ("first", "death", "operator", "renewal")
_FAILURES: Final = ("control_unresponsive", "control_unreachable", "control_busy", "control_broken")
"""Likely values of labels: their series exist, at 0, before the first occurrence."""

_LEVELS: Final = ("info", "warning", "error")

_WAITS: Final = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
_GRANTS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_CONVERSATIONS: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 5.0)
_RECOVERIES: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 3600.0)


class Tally:
    """The counters of one mpsd, from its start on."""

    def __init__(self, began: datetime) -> None:
        """Begin at 0 for each event and kind, so that its first occurrence is an increase. No line precedes `began`."""
        self.began = began
        self._events = Counter[str](dict.fromkeys(EventName, 0))
        self._omitted = Counter[str]()
        """Events that were left out of the log."""
        self._levels = Counter(dict.fromkeys(_LEVELS, 0))
        self._refused = Counter[str](dict.fromkeys(_REFUSALS, 0))
        self._violations = Counter[str](dict.fromkeys(ViolationKind, 0))
        self._deaths = Counter[Labels]()
        self._hangs = Counter[str]()
        self._starts = Counter[Labels]()
        self._found = Counter[Labels]()
        self._undone = Counter[Labels]()
        self._foreign = Counter[str]()
        self._xids = Counter[Labels]()
        self._left_out = 0
        self._waits = Histogram(_WAITS)
        self.grants = Histogram(_GRANTS)
        self._recoveries = defaultdict[str, Histogram](lambda: Histogram(_RECOVERIES))
        self._conversations = defaultdict[str, Histogram](lambda: Histogram(_CONVERSATIONS))
        self._failures = Counter[Labels]()
        self._down: dict[str, datetime] = {}
        """By control daemon, the time since when it is dead or silent."""
        self._why_down: dict[str, str] = {}
        """By control daemon, the cause of its next start, if it is known."""
        self._restarting: set[str] = set()
        """The control daemons that an operator restarts."""

    def count(self, at: datetime, level: str, event: str, facts: Facts) -> None:
        """Count a line that is about to be written."""
        self._levels[level] += 1
        self._events[event] += 1
        self._note(at, event, facts)

    def count_omitted(self, at: datetime, event: str, facts: Facts) -> None:
        """Count an event that is left out of the log."""
        self._omitted[event] += 1
        self._note(at, event, facts)

    def conversation(self, daemon: str, seconds: float, failure: str | None) -> None:
        """Count a conversation on a control pipe; `failure` is the code of the error that ended it."""
        self._conversations[daemon].observe(seconds)
        if failure is not None:
            self._failures[daemon, failure] += 1

    # -- facts --------------------------------------------------------------------------------------------------------

    def _note(self, at: datetime, event: str, facts: Facts) -> None:
        """Count the facts of an event that has a counter of its own."""
        match event:
            case EventName.LEASE_GRANTED:
                self._waits.observe(cast("float", facts.get("waited", 0.0)))
            case EventName.LEASE_REFUSED:
                self._refused[_word(facts, "code")] += 1
            case EventName.LEASE_ENDED if "code" in facts:  # it never was granted: the request had waited
                self._refused[_word(facts, "code")] += 1
            case EventName.VIOLATION:
                self._violations[_word(facts, "kind")] += 1
            case EventName.GPU_XID:
                self._xids[_word(facts, "uuid"), _word(facts, "xid")] += 1 + _left_out(facts)
            case EventName.LINES_LEFT_OUT:
                self._left_out += _left_out(facts)
            case _:
                self._note_daemon(at, event, _word(facts, "daemon"), facts)

    def _note_daemon(self, at: datetime, event: str, daemon: str, facts: Facts) -> None:
        """Count the facts of an event about a control daemon."""
        match event:
            case EventName.DAEMON_DEATH:
                self._deaths[daemon, _word(facts, "cause")] += 1
                self._down.setdefault(daemon, at)
                self._why_down[daemon] = "death"
            case EventName.DAEMON_STATE:
                self._move(at, daemon, facts.get("on"))
            case EventName.OPERATION_BEGUN | EventName.OPERATION_RESUMED if facts.get("verb") == "restart":
                self._restarting.add(daemon)
            case EventName.OPERATION_ENDED:
                self._restarting.discard(daemon)
            case EventName.LIMIT_DRIFT:
                self._found[daemon, _word(facts, "limit")] += 1 + _left_out(facts)
            case EventName.LIMIT_DRIFT_ENDED:
                for limit in cast("list[str]", facts.get("limits", [])):
                    self._undone[daemon, limit] += 1 + _left_out(facts)
            case EventName.FOREIGN_COMMAND:
                self._foreign[daemon] += 1 + _left_out(facts)

    def _move(self, at: datetime, daemon: str, on: object) -> None:
        """Count a change of a control daemon's state."""
        match on:
            case Event.SILENT:
                self._hangs[daemon] += 1
                self._down.setdefault(daemon, at)
            case Event.STOP:
                self._down.pop(daemon, None)
                self._why_down[daemon] = "operator" if daemon in self._restarting else "renewal"
            case Event.STARTED:
                self._starts[daemon, self._why_down.pop(daemon, "first")] += 1
            case Event.VERIFIED if daemon in self._down:
                seconds = (at - self._down.pop(daemon)).total_seconds()
                self._recoveries[daemon].observe(max(seconds, 0.0))

    # -- samples ------------------------------------------------------------------------------------------------------

    def samples(self, daemons: Collection[str]) -> Samples:
        """Return the counters as samples. The series of each control daemon exist, at 0, from the start."""
        limits = [limit.name for limit in LIMITS]
        return Samples(
            {
                families.START_TIME: {(): self.began.timestamp()},
                families.EVENTS: _by_name(self._events),
                families.LOG_LINES: _by_name(self._levels),
                families.LINES_LEFT_OUT: {(): self._left_out},
                families.ADMISSIONS: {
                    ("granted", ""): self._of("lease_granted"),
                    **{("refused", code): count for code, count in self._refused.items()},
                },
                families.QUEUED: {(): self._of("lease_waits")},
                families.ENDED: {(): self._of("lease_ended")},
                families.VIOLATIONS: _by_name(self._violations),
                families.CLIENTS_ENDED: {(): self._of("client_ended")},
                families.DEATHS: _each(self._deaths, daemons, _CAUSES),
                families.HANGS: {(daemon,): self._hangs[daemon] for daemon in daemons},
                families.STARTS: _each(self._starts, daemons, _STARTS),
                families.CONVERSATION_FAILURES: _each(self._failures, daemons, _FAILURES),
                families.DRIFT_FOUND: _each(self._found, daemons, limits),
                families.DRIFT_UNDONE: _each(self._undone, daemons, limits),
                families.FOREIGN_COMMANDS: {(daemon,): self._foreign[daemon] for daemon in daemons},
                families.GPU_XIDS: dict(self._xids),
            },
            {
                families.WAIT: {(): self._waits.buckets()},
                families.GRANT: {(): self.grants.buckets()},
                families.RECOVERY: {(daemon,): self._recoveries[daemon].buckets() for daemon in daemons},
                families.CONVERSATION: {(daemon,): self._conversations[daemon].buckets() for daemon in daemons},
            },
        )

    def _of(self, event: str) -> int:
        """Return the number of occurrences of an event, including those left out of the log."""
        return self._events[event] + self._omitted[event]


def _by_name(counted: Counter[str]) -> dict[Labels, float]:
    return {(name,): count for name, count in counted.items()}


def _each(counted: Counter[Labels], daemons: Iterable[str], likely: Iterable[str]) -> dict[Labels, float]:
    """Return the counts, and 0 for each likely value that has none, so that its first occurrence is an increase."""
    return {**{(daemon, each): 0 for daemon in daemons for each in likely}, **counted}


def _word(facts: Facts, name: str) -> str:
    """Return a fact as the value of a label; an empty text if a line lacks it, since the line must be logged anyway."""
    return str(facts.get(name, ""))


def _left_out(facts: Facts) -> int:
    """Return the number of further occurrences that a line stands for, if there were too many to log each."""
    return cast("int", facts.get("left_out", 0))
