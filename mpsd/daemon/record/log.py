"""mpsd's own log: one line for each decision, to stderr, with the facts as keys. Configured once, at start."""

import logging
import sys
import uuid
from collections.abc import Callable
from functools import partial
from typing import Final, TextIO

import structlog
from structlog.processors import format_exc_info
from structlog.typing import EventDict, Processor, WrappedLogger

from mpsd.core.events import EventName
from mpsd.core.metrics.tally import Tally
from mpsd.core.settings import LogFormat
from mpsd.system import clock
from mpsd.system.files.encoding import to_json
from mpsd.system.host import log_output
from mpsd.system.host.journal import Journal
from mpsd.system.host.journal import entry as journal_entry
from mpsd.system.host.log_output import LogOutput

_NAMESPACE: Final = uuid.UUID("6e9c2f64-0d5b-4f0e-9a55-b1c1a1d7f2c3")

MESSAGE_IDS: Final[dict[str, str]] = {each: uuid.uuid5(_NAMESPACE, each).hex for each in EventName}
"""The ids of the kinds of event in the journal: `journalctl MESSAGE_ID=...`. An id stays as long as the event's
name."""

_SPECIAL: Final = set(' "=')
"""Characters that a plain word does not contain; a value with one of them is quoted in a text."""

_LAST_WORDS: Final = 0.5
"""Seconds for a slow reader to take what is left when mpsd ends."""

_PRIORITIES: Final = {"info": "6", "warning": "4", "error": "3"}
"""The numbers of the levels in syslog(3)."""


class Logger:
    """Logs what happens, each time with the facts. `at` is the time of an event, if it is not now."""

    def __init__(self, lines: structlog.BoundLogger, sink: Journal | LogOutput, tally: Tally) -> None:
        self.tally = tally
        """Counts the lines, and everything else that the metrics count."""
        self._lines = lines
        self._sink = sink

    def bind(self, **bound: object) -> "Logger":
        """Return a logger that adds these facts to all of its lines."""
        return Logger(self._lines.bind(**bound), self._sink, self.tally)

    @property
    def lost(self) -> int:
        """How many lines were lost since mpsd started, because the reader was gone or the file system full."""
        return self._sink.lost

    def close(self) -> None:
        """Write the pending lines, for a moment at most, because the reader may be gone; logging ends here."""
        self._sink.close(_LAST_WORDS)

    def info(self, event: EventName, **facts: object) -> None:
        self._lines.info(event, **facts)

    def warning(self, event: EventName, **facts: object) -> None:
        """Log a problem that mpsd handles."""
        self._lines.warning(event, **facts)

    def error(self, event: EventName, **facts: object) -> None:
        """Log a problem that an operator has to examine."""
        self._lines.error(event, **facts)

    def defect(self, event: EventName, error: BaseException, **facts: object) -> None:
        """Log a defect of mpsd, with its traceback."""
        self._lines.error(event, **facts, exc_info=error)


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
            facts["exc_info"] = record.exc_info
        self._log.error(EventName.LIBRARY_REPORT, **facts)

    def close(self) -> None:
        """Accept no more reports."""
        logging.getLogger().removeHandler(self)
        super().close()


class _Sink:
    """A logger in the sense of structlog: its methods write a rendered line."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.info = self.warning = self.error = write


# -- processors --------------------------------------------------------------------------------------------------------


def _headed(_: WrappedLogger, level: str, line: EventDict) -> EventDict:
    """Begin with what a reader looks for first: the time, the severity, and the event."""
    return {"at": line.pop("at", None) or clock.now(), "level": level, "event": line.pop("event"), **line}


def _counted(tally: Tally, _: WrappedLogger, level: str, line: EventDict) -> EventDict:
    tally.count(line["at"], level, line["event"], line)
    return line


def _recorded(record: Callable[[float, bytes], None], logger: WrappedLogger, level: str, line: EventDict) -> EventDict:
    """Record a line as an event. One with a traceback, which is for the log alone, is none."""
    if "exception" not in line:
        record(line["at"].timestamp(), str(log_output.as_json(logger, level, line)).encode())
    return line


def _encoded(_: WrappedLogger, __: str, line: object) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _entry(_: WrappedLogger, level: str, line: EventDict) -> bytes:
    """Return an entry of the journal: the text for a reader, and each fact by itself. The journal has its own time."""
    texts = {name: value if isinstance(value, str) else to_json(value).decode() for name, value in line.items()}
    del texts["at"], texts["level"]
    event, trace = texts.pop("event"), texts.pop("exception", "")
    said = " ".join(
        f"{name}={to_json(text).decode() if set(text) & _SPECIAL else text}" for name, text in texts.items()
    )
    fields = {
        "MESSAGE": "\n".join(filter(None, (f"{event} {said}".rstrip(), trace))),
        "PRIORITY": _PRIORITIES[level],
        "MESSAGE_ID": MESSAGE_IDS[event],
        "SYSLOG_IDENTIFIER": "mpsd",
        "MPSD_EVENT": event,
        **{f"MPSD_{name.upper()}": value for name, value in texts.items()},
    }
    return journal_entry(fields)


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
    of defects are excluded, because their tracebacks are for the log alone. Log lines and events are thus the same.
    """
    tally = Tally(clock.now())
    processors: list[Processor] = [_headed, partial(_counted, tally), format_exc_info]
    if record is not None:
        processors.append(partial(_recorded, record))
    # The stream may be a file on a full disk, or a pipe without a reader: a line is lost, and mpsd continues.
    sink: Journal | LogOutput
    if form is LogFormat.AUTO and journal is not None:
        sink = journal
        processors += [log_output.harmless, _entry]
    else:
        sink = LogOutput(stream.fileno())
        processors += [*log_output.rendering(form, stream), _encoded]
    rendered = structlog.wrap_logger(structlog.ReturnLogger(), processors, structlog.BoundLogger).bind()

    def gap(lost: int) -> bytes:
        because = "its reader was gone or too slow, or its file system full"
        line: bytes = rendered.warning(EventName.LOG_LINES_LOST, lines=lost, because=because)
        return line

    sink.gap = gap
    lines = structlog.wrap_logger(_Sink(sink.write), processors, structlog.BoundLogger).bind()
    return Logger(lines, sink, tally)
