"""The lines of a log, rendered by structlog: JSON for programs, text for a terminal. Both services of mpsd log so.

Other users choose some of the texts in a line, such as the names of leases and processes. None acts on a terminal.
"""

from typing import TextIO

import msgspec
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer
from structlog.typing import EventDict, Processor, WrappedLogger

from mpsd.core.sanitize import harmless_json, plain
from mpsd.core.settings import LogFormat
from mpsd.system.files.encoding import to_json


def _serialized(line: EventDict, **_: object) -> str:
    """Return a line as JSON; the rest is structlog's arguments for `json.dumps`."""
    return harmless_json(to_json(line).decode())


as_json = JSONRenderer(serializer=_serialized)


def harmless(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Return a line of values as JSON has them, for a terminal. A traceback keeps its line ends."""
    known = msgspec.json.decode(to_json(line))
    trace = {name: "\n".join(map(plain, known.pop(name).split("\n"))) for name in ("exception",) if name in known}
    return {**plain(known), **trace}


def rendering(form: LogFormat, stream: TextIO) -> tuple[Processor, ...]:
    """Return the last processors of a log, which render its lines: by default as text on a terminal, else as JSON."""
    if form is LogFormat.TEXT or (form is LogFormat.AUTO and stream.isatty()):
        return harmless, ConsoleRenderer(colors=stream.isatty())
    return (as_json,)
