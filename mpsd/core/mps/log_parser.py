"""The parser of the logs of a control daemon and its servers: lines become events, and commands get their origin.

The log shows foreign commands: each conversation stands between `NEW UI` and `UI closed`, and the daemon serves one at
a time. A conversation that opens with one of mpsd's marks is mpsd's, and any other is foreign.

A line that is not known here is counted, and the latest are kept, so that the messages of a new driver are noticed.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mpsd.core.mps.commands import changes_something, is_mark, nonce_of
from mpsd.core.mps.limits import DEVICE, LIMITS, Limit
from mpsd.core.mps.log_events import (
    ClientArrived,
    ClientConnected,
    ClientLeft,
    ClientStatus,
    ContextsMade,
    DaemonStarted,
    ForeignCommand,
    LimitGiven,
    LogEvent,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
    ServerStarting,
    SharedMemoryMade,
    Unaccounted,
)

_STAMP: Final = re.compile(r"\[(?P<at>[0-9-]+ [0-9:.]+) +(?P<source>[A-Za-z]+(?: [A-Za-z]+)*) +(?P<pid>[0-9]{1,10})\] ")
"""The stamp before the text of each line."""

_MOST_REMEMBERED: Final = 32
"""Maximum number of unknown lines that are kept, the latest last."""

_MOST_WORDS: Final = 200
"""Maximum characters of such a line that are kept: any user may have written it."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: the daemon's local time, its writer (Control, Server, Other), its pid, the text."""

    at: str
    source: str
    pid: int
    text: str


def parse(line: str) -> LogLine | None:
    """Return the line as a value, or None when it does not have the usual form."""
    stamp = _STAMP.match(line)
    return None if stamp is None else _behind(stamp, line)


def _behind(stamp: re.Match[str], line: str) -> LogLine:
    return LogLine(stamp["at"], stamp["source"], int(stamp["pid"]), line[stamp.end() :])


_Meaning = Callable[[LogLine, re.Match[str]], LogEvent | None]


@dataclass(frozen=True, slots=True)
class _Form:
    """A known line."""

    pattern: re.Pattern[str]
    event: _Meaning | None
    """None where the line has no meaning for mpsd."""


def _failed(line: LogLine, _: re.Match[str]) -> LogEvent:
    return ServerFailed(line.pid, line.text[:_MOST_WORDS])


def _status(line: LogLine, found: re.Match[str]) -> LogEvent:
    return ClientStatus(line.pid, int(found["pid"]), int(found["context"]), found["status"])


def _given(limit: Limit) -> _Meaning:
    """Return the meaning of a limit's line; a line about another device than a client's own has none."""

    def event(line: LogLine, found: re.Match[str]) -> LogEvent | None:
        device = found.groupdict().get("device")
        if device is not None and int(device) != DEVICE:
            return None
        return LimitGiven(line.pid, limit, limit.parse_logged(found["value"]))

    return event


_MEANINGS: Final[dict[str, _Meaning | None]] = {
    # Lines of a control daemon; measured, except where a comment says otherwise.
    "Starting control daemon using socket .*": lambda line, _: DaemonStarted(line.pid),
    "Exit with status <N>": None,
    "Starting new server <N> for user <N>": lambda _, found: ServerStarting(int(found[1]), int(found[2])),
    "Server <N> is <busy>": None,
    "Server <N> exited with status <N>": lambda _, found: ServerExited(int(found[1]), int(found[2])),
    "NEW SERVER <N>: Ready": lambda _, found: ServerReady(int(found[1])),  # R580
    "NEW CLIENT <N> from user <N>: Server (is not ready|already exists).*": (  # R580
        lambda _, found: ClientArrived(int(found[1]), int(found[2]), waits=found[3] == "is not ready")
    ),
    "To connect CUDA applications to this daemon, .*": None,
    "Accepting connection.*": None,
    "User did not send valid credentials": None,  # before every client that is served (R580), and harmless
    "Removed Shm file at .*": None,
    "Force shutting down server <N>": None,
    "quit command issued with timeout of <N>": None,
    "Using log directory: .*": None,
    "CUDA MPS Control binary version: .*": None,  # R580
    "Unable to read new connection type information": None,  # R580
    # Lines of a server; R580, except where a comment says otherwise.
    "Server has started": lambda line, _: ServerReady(line.pid),
    "Server encountered a fatal exception.*": _failed,
    "MPS server failed to start": _failed,
    "Failed to start : .*": _failed,  # OLD
    "Invalid CUDA_VISIBLE_DEVICES.*": _failed,  # OLD
    r"Volta MPS: Server is handling a fatal GPU error\.": lambda line, _: ServerFaulted(line.pid),  # OLD
    **{limit.log_line: _given(limit) for limit in LIMITS},
    "Client <C> connected": (lambda line, found: ClientConnected(line.pid, int(found["pid"]), int(found["context"]))),
    "Status of client <C> is (?P<status>[A-Z]{1,20})": _status,
    "status of client <C> is (?P<status>[A-Z]{1,20})": _status,  # OLD
    "Client <C> exit": lambda line, found: ClientLeft(line.pid, int(found["pid"]), int(found["context"])),
    "Receive command failed, assuming client exit.*": None,  # at every end of a client, also a normal one (460)
    "Startup": None,
    "Connecting to control daemon on socket: .*": None,
    "Initializing server process": None,
    "CUDA MPS Server for Linux/Unix.*": None,
    "Display Driver version: .*": None,
    "Creating server context on device .*": lambda line, _: ContextsMade(line.pid),
    "Destroy server context on device .*": None,  # OLD
    "Created anonymous shared memory region .*": None,
    r"Created named shared memory region /(cuda\.shm\.[0-9]{1,10}\.[0-9a-f]{1,8}\.[0-9]{1,10})": (  # OLD
        lambda line, found: SharedMemoryMade(line.pid, found[1])
    ),
    "Created named shared memory region .*": None,  # OLD
    "Server Priority set to .*": None,
    "Received new client request for .*": None,
    "Creating worker thread for client .*": None,
    r"Device .* is associated": None,
    "Priority level of client .*": None,
    "Server has been notified to shutdown": None,
    "Exiting": None,
    "The following .*": None,  # OLD: devices, or clients with a sticky error, a number a line
}
"""The known lines, as regular expressions in which <N> is a number, and <C> a client: its pid and the number of one of
its contexts. None: the line has no meaning for mpsd. Sources: see `core/mps/log_events.py`."""


def _compiled(pattern: str) -> re.Pattern[str]:
    client = r"\{(?:PID: )?(?P<pid>[0-9]{1,10}), (?:Context ID: )?(?P<context>[0-9]{1,10})\}"
    return re.compile(pattern.replace("<N>", "([0-9]{1,10})").replace("<C>", client))


def _by_first_word() -> dict[str, tuple[_Form, ...]]:
    forms: dict[str, tuple[_Form, ...]] = {}
    for pattern, event in _MEANINGS.items():
        word = pattern.partition(" ")[0]
        forms[word] = (*forms.get(word, ()), _Form(_compiled(pattern), event))
    return forms


_FORMS: Final = _by_first_word()


def _form(text: str) -> tuple[_Form, re.Match[str]] | None:
    """Find the known form of a line, with its match."""
    for form in _FORMS.get(text.partition(" ")[0], ()):
        found = form.pattern.fullmatch(text)
        if found is not None:
            return form, found
    return None


# -- reading -----------------------------------------------------------------------------------------------------------


class CommandOrigin(StrEnum):
    """The origin of the conversation at the current position of the log."""

    NOBODYS = "nobody's"
    UNKNOWN = "unknown"
    OURS = "ours"
    FOREIGN = "foreign"


class LogReader:
    """Reads a log in consecutive pieces, and returns the events in it.

    Any user with access to a control daemon can write the same lines to its log as mpsd, except for the key with which
    the nonces of mpsd's marks begin.
    """

    def __init__(self, key: str = "", origin: CommandOrigin = CommandOrigin.NOBODYS) -> None:
        """`origin` is the state in which an earlier reader stopped."""
        self.origin = origin
        self.last_nonce = ""
        """The nonce of the last conversation of mpsd's in the log."""
        self.unknown = 0
        """The number of unknown lines."""
        self.latest: deque[str] = deque(maxlen=_MOST_REMEMBERED)
        """The latest of them."""
        self._keys: tuple[str, ...] = (key,)

    def renew(self, key: str) -> None:
        """Add the key for a control daemon that is about to start.

        Lines with the key of the one before it may still follow.
        """
        self._keys = (key, *self._keys[:1])

    def read(self, lines: Iterable[str]) -> list[LogEvent]:
        """Return the events of these lines, in order; most lines have none."""
        events: list[LogEvent] = []
        for line in lines:
            # Most lines are no events, so a line becomes a value only when it is one.
            stamp = _STAMP.match(line)
            if stamp is None:
                self._wonder(line)
                events.append(Unaccounted(line[:_MOST_WORDS]))
                continue
            text = line[stamp.end() :]
            if text.startswith("Cmd:"):
                self._command(text.removeprefix("Cmd:"), events)
            elif text == "NEW UI":
                self.origin = CommandOrigin.UNKNOWN
            elif text == "UI closed":
                self.origin = CommandOrigin.NOBODYS
            else:
                self._other(stamp, text, line, events)
        return events

    def _command(self, command: str, events: list[LogEvent]) -> None:
        """Judge a conversation by its first command. Where that was not seen, the conversation counts as foreign."""
        if self.origin is CommandOrigin.UNKNOWN:
            ours = any(is_mark(command, key) for key in self._keys)
            self.origin = CommandOrigin.OURS if ours else CommandOrigin.FOREIGN
            self.last_nonce = nonce_of(command) if ours else self.last_nonce
        elif self.origin is CommandOrigin.NOBODYS:
            self.origin = CommandOrigin.FOREIGN
        if self.origin is CommandOrigin.FOREIGN:
            changes = changes_something(command)
            events.append(ForeignCommand(command) if changes else Unaccounted(command[:_MOST_WORDS]))

    def _other(self, stamp: re.Match[str], text: str, line: str, events: list[LogEvent]) -> None:
        known = _form(text)
        if known is not None:
            form, found = known
            event = None if form.event is None else form.event(_behind(stamp, line), found)
            if isinstance(event, DaemonStarted):
                self.origin = CommandOrigin.NOBODYS  # whatever conversation the earlier daemon had
                self._keys = self._keys[:1]
            if event is not None:
                events.append(event)
        elif not text.isdecimal() and (self.origin is CommandOrigin.NOBODYS or stamp["source"] != "Control"):
            self._wonder(line)
        # Other lines within a conversation are answers, and a number is an answer or an entry of a list.

    def _wonder(self, line: str) -> None:
        self.unknown += 1
        self.latest.append(line[:_MOST_WORDS])
