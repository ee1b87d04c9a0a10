"""mpsd's own log: one line for each decision, to stderr, with the facts as keys. Configured once, at start."""

import logging
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple, TextIO

import msgspec

from mpsd.core.events import EventName
from mpsd.core.metrics.tally import Tally
from mpsd.core.sanitize import harmless_json, plain
from mpsd.core.settings import LogFormat
from mpsd.daemon.record.encoding import to_json
from mpsd.system import clock
from mpsd.system.journal import Journal
from mpsd.system.log_output import LogOutput

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
    tally = Tally(clock.now())

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
