"""mpsd's own log: one line for each decision, to stderr, with the facts as keys. Configured once, at start."""

import logging
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TextIO

import msgspec

from mpsd.core.metrics.tally import Tally
from mpsd.core.model import ViolationKind
from mpsd.core.sanitize import harmless_json, plain
from mpsd.core.settings import LogFormat
from mpsd.daemon.record.encoding import to_json
from mpsd.system import clock
from mpsd.system.journal import Journal
from mpsd.system.log_output import LogOutput


class EventName(StrEnum):
    """The catalogue of mpsd's log; a log line's event is one of these and nothing else."""

    NODE_STARTED = "node_started"
    NODE_STOPPING = "node_stopping"
    NODE_STOPPED = "node_stopped"
    API_LISTENING = "api_listening"
    NODE_NOT_CLOSED = "node_not_closed"
    HOST_REQUIREMENT_MISSING = "host_requirement_missing"
    SOCKET_REPLACED = "socket_replaced"
    PEER_REFUSED = "peer_refused"
    API_DEFECT = "api_defect"
    GPU_FOUND = "gpu_found"
    GPU_XID = "gpu_xid"
    GPU_HEALTH = "gpu_health"
    GPU_ADMISSION = "gpu_admission"
    COMPUTE_MODE_SET = "compute_mode_set"
    COMPUTE_MODE_RESTORED = "compute_mode_restored"
    COMPUTE_MODE_LEFT = "compute_mode_left"
    COMPUTE_MODE_TROUBLE = "compute_mode_trouble"
    COMPUTE_MODE_NOT_STORED = "compute_mode_not_stored"
    DAEMON_STATE = "daemon_state"
    DAEMON_DEATH = "daemon_death"
    OPERATION_BEGUN = "operation_begun"
    OPERATION_RESUMED = "operation_resumed"
    OPERATION_ENDED = "operation_ended"
    DAEMON_FORCED = "daemon_forced"
    LIMITS_VERIFIED = "limits_verified"
    LIMITS_NOT_HELD = "limits_not_held"
    LIMITS_NOT_GIVEN = "limits_not_given"
    ANSWER_UNFORESEEN = "answer_unforeseen"
    LIMIT_DRIFT = "limit_drift"
    LIMIT_DRIFT_ENDED = "limit_drift_ended"
    PIPE_ACCESS_DRIFT = "pipe_access_drift"
    PIPE_ACCESS_NOT_HELD = "pipe_access_not_held"
    SERVER_ORPHANED = "server_orphaned"
    SERVER_STOPPED = "server_stopped"
    SERVER_CONTINUED = "server_continued"
    SERVER_KILLED = "server_killed"
    SERVER_EXITED = "server_exited"
    SERVER_FAILED = "server_failed"
    SERVER_FAULTED = "server_faulted"
    LEASES_FAULTED = "leases_faulted"
    SERVER_RECOVERED = "server_recovered"
    SERVER_SUSPECT = "server_suspect"
    CANARY_ENDED = "canary_ended"
    SERVER_WEDGED = "server_wedged"
    SERVER_SERVES = "server_serves"
    FOREIGN_COMMAND = "foreign_command"
    LOG_SHORTENED = "log_shortened"
    LOG_NOT_SHORTENED = "log_not_shortened"
    LOG_SILENT = "log_silent"
    LOG_RESUMED = "log_resumed"
    LOG_NOT_WATCHED = "log_not_watched"
    FILE_DAMAGED = "file_damaged"
    FILE_NOT_STORED = "file_not_stored"
    UID_QUARANTINED = "uid_quarantined"
    UID_PARDONED = "uid_pardoned"
    SHARED_MEMORY_DIFFERS = "shared_memory_differs"
    MOUNTS_UNKNOWN = "mounts_unknown"
    LEASE_GRANTED = "lease_granted"
    LEASE_REFUSED = "lease_refused"
    LEASE_WAITS = "lease_waits"
    LEASE_RENEWED = "lease_renewed"
    LEASE_CLAIMED = "lease_claimed"
    LEASE_CLAIM_RETURNED = "lease_claim_returned"
    LEASE_CLAIM_EXPIRED = "lease_claim_expired"
    LEASE_HOLDER_ADDED = "lease_holder_added"
    LEASE_HANDED_OVER = "lease_handed_over"
    LEASE_CLOSING = "lease_closing"
    LEASE_BORNE = "lease_borne"
    LEASE_CLIENTS_LOST = "lease_clients_lost"
    LEASE_USER_CHANGED = "lease_user_changed"
    LEASE_EXPIRING = "lease_expiring"
    LEASE_EXPIRED = "lease_expired"
    LEASES_RESTORED = "leases_restored"
    LEASE_NOT_RESTORED = "lease_not_restored"
    LEASE_NOT_RESTORED_ENDED = "lease_not_restored_ended"
    LEASES_INCOMPLETE = "leases_incomplete"
    LEASES_COMPLETE = "leases_complete"
    CLIENT_ATTRIBUTED = "client_attributed"
    VIOLATION = "violation"
    VIOLATION_ENDED = "violation_ended"
    CLIENT_FORCED = "client_forced"
    CLIENT_NOT_ENDED = "client_not_ended"
    CLIENT_LET_GO = "client_let_go"
    CLIENT_END_RESUMED = "client_end_resumed"
    CLIENT_ENDED = "client_ended"
    LEASE_ENDED = "lease_ended"
    LINES_LEFT_OUT = "lines_left_out"
    LISTENER_STUCK = "listener_stuck"
    STORE_FULL = "store_full"
    STORE_WRITABLE = "store_writable"
    STORE_SET_ASIDE = "store_set_aside"
    STORE_REWRITTEN = "store_rewritten"
    HISTORY_NOT_STORED = "history_not_stored"
    HISTORY_STORED = "history_stored"
    EVENTS_LOST = "events_lost"
    SETTINGS_RELOADED = "settings_reloaded"
    SETTINGS_REFUSED = "settings_refused"
    NAMES_UNKNOWN = "names_unknown"
    SUPERVISOR_STUCK = "supervisor_stuck"
    LOG_LINES_LOST = "log_lines_lost"
    LIBRARY_REPORT = "library_report"
    METRICS_LISTENING = "metrics_listening"
    METRICS_NOT_LISTENING = "metrics_not_listening"


_NAMESPACE: Final = uuid.UUID("6e9c2f64-0d5b-4f0e-9a55-b1c1a1d7f2c3")

MESSAGE_IDS: Final = {each: uuid.uuid5(_NAMESPACE, each).hex for each in EventName}
"""The ids of the kinds of event in the journal: `journalctl MESSAGE_ID=...`. An id stays as long as the event's
name."""


_SPECIAL: Final = set(' "=')
"""Characters that a plain word does not contain; a value with one of them is quoted in a text."""

_LAST_WORDS: Final = 0.5
"""Seconds for a slow reader to take what is left when mpsd ends."""

_PRIORITIES: Final = {"info": "6", "warning": "4", "error": "3"}
"""The numbers of the levels in syslog(3)."""


class LogRecord(NamedTuple):
    """An event, with its time, its severity and the facts."""

    at: datetime
    level: str
    event: EventName
    facts: Mapping[str, object]


class Logger:
    """Logs what happens, each time with the facts."""

    def __init__(
        self,
        write: Callable[[Sequence[LogRecord]], None],
        sink: "Journal | LogOutput",
        tally: Tally,
        **bound: object,
    ) -> None:
        """Take `write`, which gets the lines, and the facts for all lines (`bound`)."""
        self.tally = tally
        """Counts the lines, and everything else that the metrics count."""
        self.write = write
        """Logs events whose times are known already."""
        self._sink = sink
        self._bound = bound

    def bind(self, **bound: object) -> "Logger":
        """Return a logger that adds these facts to all of its lines."""
        return Logger(self.write, self._sink, self.tally, **{**self._bound, **bound})

    @property
    def lost(self) -> int:
        """How many lines were lost since mpsd started, because the reader was gone or the file system full."""
        return self._sink.lost

    def close(self) -> None:
        """Write the pending lines, for a moment at most, because the reader may be gone; logging ends here."""
        self._sink.close(_LAST_WORDS)

    def info(self, event: EventName, **facts: object) -> None:
        self._say("info", event, facts)

    def warning(self, event: EventName, **facts: object) -> None:
        """Log a problem that mpsd handles."""
        self._say("warning", event, facts)

    def error(self, event: EventName, **facts: object) -> None:
        """Log a problem that an operator has to examine."""
        self._say("error", event, facts)

    def _say(self, level: str, event: EventName, facts: Mapping[str, object]) -> None:
        self.write((LogRecord(clock.now(), level, event, {**self._bound, **facts}),))

    def defect(self, event: EventName, error: BaseException, **facts: object) -> None:
        """Log a defect of mpsd, with its traceback."""
        self.error(event, **facts, exception="".join(traceback.format_exception(error)).rstrip("\n"))


class LibraryReports(logging.Handler):
    """The reports of libraries, asyncio among them, by Python's own logging, as lines of mpsd's log.

    Without this handler they would go to stderr, and block there if no process reads it.
    """

    def __init__(self, log: Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, object] = {"library": record.name, "because": record.getMessage()}
        if record.exc_info:
            facts["exception"] = logging.Formatter().formatException(record.exc_info)
        self._log.error(EventName.LIBRARY_REPORT, **facts)

    def close(self) -> None:
        """Accept no more reports."""
        logging.getLogger().removeHandler(self)
        super().close()


def _entry(level: str, facts: Mapping[str, object], trace: str) -> dict[str, str]:
    """Return the fields of an entry in the journal: the text for a reader, and each fact by itself."""
    texts = {name: value if isinstance(value, str) else to_json(value).decode() for name, value in facts.items()}
    event = texts.pop("event")
    said = " ".join(
        f"{name}={to_json(text).decode() if set(text) & _SPECIAL else text}" for name, text in texts.items()
    )
    return {
        "MESSAGE": "\n".join(filter(None, (f"{event} {said}".rstrip(), trace))),
        "PRIORITY": _PRIORITIES[level],
        "MESSAGE_ID": MESSAGE_IDS[EventName(event)],
        "SYSLOG_IDENTIFIER": "mpsd",
        "MPSD_EVENT": event,
        **{f"MPSD_{name.upper()}": value for name, value in texts.items()},
    }


def _one_by_one(write: Callable[[LogRecord], None], tally: Tally, lines: Sequence[LogRecord]) -> None:
    tally.count(lines)
    for line in lines:
        write(line)


def configure(
    form: LogFormat,
    record: Callable[[float, bytes], None] | None = None,
    stream: TextIO = sys.stderr,
    *,
    journal: Journal | None = None,
) -> Logger:
    """Return the logger of this process.

    `form` selects the form of the lines; by default it is text on a terminal, fields where the stream leads to the
    journal, and JSON elsewhere. `record` gets the time of each line, in seconds since 1970, and the line as JSON. Lines
    of defects are excluded, because their tracebacks are for the log alone. Log lines and events are thus the same, and
    rendered once.
    """
    tally = Tally(clock.now(), EventName, ViolationKind)

    def rendered(line: LogRecord) -> bytes:
        # A reader looks first for the time, the severity, and the event.
        at, level, event, facts = line
        text = to_json({"at": at, "level": level, "event": event, **facts})
        if not text.isascii() or b"\x7f" in text:  # rare: it may contain characters that act on a terminal
            text = harmless_json(text.decode()).encode()
        if record is not None and "exception" not in facts:
            record(at.timestamp(), text)
        return text + b"\n"

    def parts(line: LogRecord) -> tuple[dict[str, object], dict[str, str]]:
        known = msgspec.json.decode(rendered(line))
        trace = {name: "\n".join(map(plain, known.pop(name).split("\n"))) for name in ("exception",) if name in known}
        return plain(known), trace

    # The stream may be a file on a full disk, or a pipe without a reader: a line is lost, and mpsd continues.

    def as_text(console: Callable[[object, str, dict[str, object]], str], line: LogRecord) -> bytes:
        known, trace = parts(line)
        return f"{console(None, line.level, {**known, **trace})}\n".encode(errors="backslashreplace")

    def as_entry(line: LogRecord) -> dict[str, str]:
        known, trace = parts(line)
        del known["at"], known["level"]  # the journal has its own
        return _entry(line.level, known, trace.get("exception", ""))

    if form is LogFormat.AUTO and journal is not None:
        journal.gap = lambda lines: as_entry(_gap(lines, tally))
        return Logger(partial(_one_by_one, lambda line: journal.send(as_entry(line)), tally), journal, tally)
    render = rendered
    if form is LogFormat.TEXT or (form is LogFormat.AUTO and stream.isatty()):
        from structlog.dev import ConsoleRenderer  # noqa: PLC0415 - a third of all imports, and no service needs it

        render = partial(as_text, ConsoleRenderer(colors=stream.isatty()))
    output = LogOutput(stream.fileno())
    output.gap = lambda lines: render(_gap(lines, tally))

    def write(lines: Sequence[LogRecord]) -> None:
        tally.count(lines)
        output.write([render(line) for line in lines])

    return Logger(write, output, tally)


def _gap(lines: int, tally: Tally) -> LogRecord:
    """Return the line that stands in place of lost ones, and count it."""
    because = "its reader was gone or too slow, or its file system full"
    gap = LogRecord(clock.now(), "warning", EventName.LOG_LINES_LOST, {"lines": lines, "because": because})
    tally.count((gap,))
    return gap
