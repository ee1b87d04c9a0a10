"""The parser of the logs of a control daemon and its servers: lines become events, and commands get their origin.

The log shows foreign commands: each conversation stands between `NEW UI` and `UI closed`, and the daemon serves one at
a time. A conversation that opens with one of mpsd's marks is mpsd's, and any other is foreign.

A line that is not known here is counted, and the latest are kept, so that the messages of a new driver are noticed. One
of a server is a reason to ask that server at once.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mpsd.core.mps.commands import changes_something, is_mark, is_quit, nonce_of
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, DEVICE, LIMITS, Limit, LimitValue

# -- log events --------------------------------------------------------------------------------------------------------

# The events that the logs of a control daemon and its servers can report: one type for each kind.
#
# Sources: "measured" is 470.256.02, 535.261.03, 550.163.01 and 555.58.02 without a GPU; 580 is 580.159.04 on a GPU;
# R580 are logs that users of that driver published; OLD is NVIDIA's documentation before R590. The table of known
# lines has their sources.


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    """A foreign command that can have changed something: `Cmd:...` outside mpsd's conversations (measured).

    It is logged before it is carried out or refused, so it may have changed nothing.
    """

    text: str


@dataclass(frozen=True, slots=True)
class QuitRefused:
    """`Not enough privilege to execute quit command`, for any user but root and the daemon's own uid (measured)."""


@dataclass(frozen=True, slots=True)
class Unaccounted:
    """A line of a foreign conversation that changes nothing by its words, or a line without a stamp.

    A command that contains a line end is logged as two lines. The second has no stamp, and can be any command
    (measured): each of these lines can therefore stand for an unseen change.
    """

    text: str


@dataclass(frozen=True, slots=True)
class DaemonStarted:
    """`Starting control daemon using socket ...`: the first line of every control daemon (measured)."""

    pid: int


@dataclass(frozen=True, slots=True)
class ServerStarting:
    """`Starting new server N for user U` (measured; from 550 on the server itself logs it)."""

    server: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    """`NEW SERVER N: Ready` in control.log, and `Server has started` in server.log (R580)."""

    server: int


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """A server that could not start, or met an error that it cannot survive, with its own words (R580, OLD)."""

    server: int
    words: str


@dataclass(frozen=True, slots=True)
class ServerExited:
    """`Server N exited with status S` (measured). A server that a signal ended has status 0 (measured)."""

    server: int
    status: int


@dataclass(frozen=True, slots=True)
class ServerFaulted:
    """A word of a server about a fatal GPU fault, after which it accepts no client until its own are gone (580, OLD).

    One fault has several: `Client {...} encountered a fatal GPU error.`, `Server is handling a fatal GPU error.`, and
    those after them.
    """

    server: int


@dataclass(frozen=True, slots=True)
class UnknownLine:
    """A line of a server that mpsd does not know: it may say anything."""


@dataclass(frozen=True, slots=True)
class ContextsMade:
    """`Creating server context on device N`: logged at the start, and after a fatal fault is handled (R580, OLD)."""

    server: int


@dataclass(frozen=True, slots=True)
class SharedMemoryMade:
    """`Created named shared memory region /cuda.shm.U.S.N`: uid, server in hexadecimal, and a number (OLD, R580).

    Newer servers log `anonymous`, and leave nothing.
    """

    server: int
    name: str


@dataclass(frozen=True, slots=True)
class LimitGiven:
    """The maximum that a server gives each client process, from the `log_line` of the limit (R580)."""

    server: int
    limit: Limit
    value: LimitValue
    """In the form in which the pipe reports it."""


@dataclass(frozen=True, slots=True)
class ClientArrived:
    """`NEW CLIENT P from user U: ...` (R580). The pid is 0 for a client of another pid namespace (R580)."""

    pid: int
    uid: int
    waits: bool
    """Whether its server is not ready yet."""


@dataclass(frozen=True, slots=True)
class ClientsChanged:
    """A line of a server that shows that a client came, made or lost a context, or left."""


LogEvent = (
    ForeignCommand
    | QuitRefused
    | Unaccounted
    | DaemonStarted
    | ServerStarting
    | ServerReady
    | ServerFailed
    | ServerExited
    | ServerFaulted
    | UnknownLine
    | ContextsMade
    | SharedMemoryMade
    | LimitGiven
    | ClientArrived
    | ClientsChanged
)

REASONS_TO_ASK: Final = (
    ForeignCommand,
    Unaccounted,
    ServerStarting,
    ServerReady,
    ServerFailed,
    ServerExited,
    ContextsMade,
    LimitGiven,
    ClientArrived,
    ClientsChanged,
)
"""Events after which limits, servers or clients may have changed. None of them results from a query: mpsd's own queries
must not cause further queries."""

REASONS_TO_DOUBT: Final = (ServerFaulted, UnknownLine)
"""Events after which a server may handle a fatal fault. They prove nothing: a server runs as the user of its clients,
who can write such lines in a loop. The server is asked, at most once a second."""


# -- the parser --------------------------------------------------------------------------------------------------------

_STAMP: Final = re.compile(r"\[(?P<at>[0-9-]+ [0-9:.]+) +(?P<source>[A-Za-z]+(?: [A-Za-z]+)*) +(?P<pid>[0-9]{1,10})\] ")
"""The stamp before the text of each line."""

_QUIT_REFUSED: Final = "Not enough privilege to execute quit command"

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


# -- the known lines ---------------------------------------------------------------------------------------------------

_Meaning = Callable[[LogLine, re.Match[str]], LogEvent | None]


@dataclass(frozen=True, slots=True)
class KnownLine:
    pattern: str
    """A regular expression, in which <N> is a number, and <C> a client: its pid and the number of one of its
    contexts."""
    sources: str
    """The logs that have it, by their names in tests/core/mps/logs."""
    event: _Meaning | None = None
    """None where the line has no meaning for mpsd."""


def _ready(line: LogLine, _: re.Match[str]) -> LogEvent:
    return ServerReady(line.pid)


def _failed(line: LogLine, _: re.Match[str]) -> LogEvent:
    return ServerFailed(line.pid, line.text[:_MOST_WORDS])


def _faulted(line: LogLine, _: re.Match[str]) -> LogEvent:
    return ServerFaulted(line.pid)


def _clients(_: LogLine, __: re.Match[str]) -> LogEvent:
    return ClientsChanged()


def _given(limit: Limit) -> _Meaning:
    """Return the meaning of a limit's line; a line about another device than a client's own has none."""

    def event(line: LogLine, found: re.Match[str]) -> LogEvent | None:
        device = found.groupdict().get("device")
        if device is not None and int(device) != DEVICE:
            return None
        return LimitGiven(line.pid, limit, limit.parse_logged(found["value"]))

    return event


_PREFIXES: Final = ("Volta MPS: ", "Volta MPS Server: ", "MPS Server: ")
"""The beginnings of most lines of a server of driver 460, and of those in NVIDIA's documentation of that time. They
mean nothing, and neither does the case of the letter after them."""

KNOWN_LINES: Final = (
    # Lines of a control daemon.
    KnownLine(
        "Starting control daemon using socket .*",
        "2021 470-555 580 580-public documented",
        lambda line, _: DaemonStarted(line.pid),
    ),
    KnownLine("To connect CUDA applications to this daemon, .*", "2021 470-555 580 580-public"),
    KnownLine("CUDA MPS Control binary version: .*", "580 580-public"),
    KnownLine("Using log directory: .*", "470-555"),
    KnownLine("Accepting connection.*", "460 2021 2024 470-555 580 580-public"),
    KnownLine("Unable to accept connection", "580"),
    # This one comes before every client that is served.
    KnownLine("User did not send valid credentials", "460 2021 2024 580 580-public"),
    KnownLine("Unable to read new connection type information", "580-public"),
    KnownLine(
        "NEW CLIENT <N> from user <N>: Server (is not ready|already exists).*",
        "460 2021 2024 580 580-public",
        lambda _, found: ClientArrived(int(found[1]), int(found[2]), waits=found[3] == "is not ready"),
    ),
    KnownLine(
        "Starting new server <N> for user <N>",
        "460 2021 2024 470-555 580 580-public documented",
        lambda _, found: ServerStarting(int(found[1]), int(found[2])),
    ),
    KnownLine("NEW SERVER <N>: Ready", "460 580 580-public", lambda _, found: ServerReady(int(found[1]))),
    KnownLine("Server <N> is <busy>", "470-555 580"),
    KnownLine(
        "Server <N> exited with status <N>",
        "2024 470-555 580 580-public documented",
        lambda _, found: ServerExited(int(found[1]), int(found[2])),
    ),
    # The control daemon's own words for the end of a server that it does not name; the line before this one follows.
    KnownLine(r"Server encountered a fatal exception\. Shutting down", "2024"),
    KnownLine("Removed Shm file at .*", "470-555"),
    KnownLine("Force shutting down server <N>", "470-555"),
    KnownLine("Try shutting down server <N>, backoff is (disabled|enabled)", "580"),
    KnownLine(r"Server <N> has <N> active worker threads\. Server will not shutdown\.", "580"),
    KnownLine("Control will try shutting down server <N> again in at most <N>ms", "580"),
    KnownLine("Quit command issued with timeout of <N>", "470-555 580"),
    KnownLine("Exit with status <N>", "470-555 580"),
    KnownLine("Invalid percentage, expected between .*", "470-555"),
    KnownLine("Invalid device ordinal!", "470-555"),
    KnownLine("Invalid priority value - must be 0 or 1!", "470-555"),
    KnownLine("No default pinned memory limit set for the device!", "470-555 580"),
    # Lines of a server: its start, its limits and its end.
    KnownLine("Start", "460 2021"),
    KnownLine("Startup", "2025 580 580-public"),
    KnownLine("MPS Server connecting to control daemon on socket: .*", "2021"),
    KnownLine("Connecting to control daemon on socket: .*", "2025 580 580-public"),
    KnownLine("Initializing server process", "2025 580 580-public"),
    KnownLine(
        "Creating server context on device .*",
        "460 2025 580 580-public documented",
        lambda line, _: ContextsMade(line.pid),
    ),
    KnownLine("Destroy server context on device .*", "580 documented"),
    KnownLine("Created anonymous shared memory region .*", "580 580-public"),
    KnownLine(
        r"Created named shared memory region /(cuda\.shm\.[0-9]{1,10}\.[0-9a-f]{1,8}\.[0-9]{1,10})",
        "2025 documented",
        lambda line, found: SharedMemoryMade(line.pid, found[1]),
    ),
    KnownLine("Created named shared memory region .*", "documented"),
    KnownLine("CUDA MPS Server for Linux/Unix.*", "580 580-public"),
    KnownLine("Display Driver version: .*", "580 580-public"),
    *(KnownLine(limit.log_line, "2025 580 580-public", _given(limit)) for limit in LIMITS),
    KnownLine(
        r"ActiveThreadsPercentage set to (?P<value>[0-9]{1,3}\.[0-9]{6})", "460", _given(ACTIVE_THREAD_PERCENTAGE)
    ),
    KnownLine("Server Priority set to .*", "2025 580 580-public"),
    KnownLine("MPS Server is started", "460", _ready),
    KnownLine("Server has started", "2025 580 580-public", _ready),
    KnownLine("MPS server failed to start", "documented", _failed),
    KnownLine("Failed to start : .*", "documented", _failed),
    KnownLine("Invalid CUDA_VISIBLE_DEVICES.*", "documented", _failed),
    KnownLine("Server has been notified to shutdown", "580 documented"),
    KnownLine("Server was unable to shutdown due to <N> active clients", "580"),
    KnownLine("Waiting for current clients to finish", "580"),
    KnownLine("Exiting", "580 documented"),
    # Lines of a server about its clients. The pid in a request may be no pid: -1333654781, or 1073741824 (580).
    KnownLine("Received new client request.*", "460 2025 580 580-public"),
    KnownLine("Client <C> connected", "580 580-public", _clients),
    KnownLine("Worker created", "460 2025"),
    KnownLine("Creating worker thread.*", "460 2025 580 580-public"),
    KnownLine(r"Device .* is associated", "460 2025 580 580-public", _clients),
    KnownLine("Status of client <C> is [A-Z]{1,20}", "580 580-public documented", _clients),
    KnownLine("Priority level of client .*", "580-public"),
    KnownLine(r"MPS server requesting client <C> to exit", "580"),
    KnownLine(r"Client termination succeeded\.", "580"),
    # Drivers print these at every end of a client, the normal one included (460, 580).
    KnownLine("Receive command failed, assuming client exit.*", "460 2021"),
    KnownLine("Server failed to recevie command with status <N>, assuming client <C> exit", "580"),
    KnownLine("Client <C> exit", "580-public", _clients),
    KnownLine(r"Client <C> exiting\. Number of active client contexts is <N>\.", "580", _clients),
    KnownLine("Client disconnected. Number of active client contexts is <N>", "460", _clients),
    KnownLine("Client process (<N> )?disconnected", "460 580", _clients),
    # Lines of a server about a fatal fault. It refuses clients until those that it has are gone.
    KnownLine(r"Client <C> encountered a fatal GPU error\.", "580", _faulted),
    KnownLine(r"Server is handling a fatal GPU error\.", "580 documented", _faulted),
    KnownLine("Client <C> on (device <N>|the error-trigging process <N>) to be torn down", "580", _faulted),
    KnownLine("All clients belonging to error trigging process <N> will be torn down", "580", _faulted),
    KnownLine("The following (devices|client).*", "580 documented", _faulted),  # a number a line follows
    KnownLine("Server teardown in progress. Refusing to accept new client <C>", "580", _faulted),
    KnownLine("Failed to accept client <C> with status <N>", "580"),  # 807 after the line above
)
"""The known lines. A word in another case, and the typing errors, are NVIDIA's."""


def _compiled(pattern: str) -> re.Pattern[str]:
    client = r"\{(?:PID: )?[0-9]{1,10}, (?:Context(?: ID)?: )?[0-9]{1,10}\}"
    return re.compile(pattern.replace("<N>", "([0-9]{1,10})").replace("<C>", client))


def _by_first_word() -> dict[str, tuple[tuple[re.Pattern[str], KnownLine], ...]]:
    forms: dict[str, tuple[tuple[re.Pattern[str], KnownLine], ...]] = {}
    for known in KNOWN_LINES:
        word = known.pattern.partition(" ")[0]
        forms[word] = (*forms.get(word, ()), (_compiled(known.pattern), known))
    return forms


_FORMS: Final = _by_first_word()


def find_known(text: str) -> tuple[KnownLine, re.Match[str]] | None:
    """Find the row of a line's text, with the match; None for a line that is not known."""
    text = _plain(text)
    for pattern, known in _FORMS.get(text.partition(" ")[0], ()):
        found = pattern.fullmatch(text)
        if found is not None:
            return known, found
    return None


def _plain(text: str) -> str:
    """Return a text without one of the prefixes, and with a capital at its beginning."""
    if text.startswith(_PREFIXES):
        text = text.partition(": ")[2]
    return text[:1].upper() + text[1:]


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
        self.is_quit_open = False
        """Whether the foreign conversation at this position has given a `quit` that was not refused."""
        self.unknown = 0
        """The number of unknown lines."""
        self.latest: deque[str] = deque(maxlen=_MOST_REMEMBERED)
        """The latest unknown lines, shortened."""
        self._keys: tuple[str, ...] = (key,)

    def add_key(self, key: str) -> None:
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
                self.origin, self.is_quit_open = CommandOrigin.UNKNOWN, False
            elif text == "UI closed":
                self.origin, self.is_quit_open = CommandOrigin.NOBODYS, False
            elif text == _QUIT_REFUSED and self.is_quit_open:
                self.is_quit_open = False
                events.append(QuitRefused())
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
            self.is_quit_open = self.is_quit_open or is_quit(command)

    def _other(self, stamp: re.Match[str], text: str, line: str, events: list[LogEvent]) -> None:
        known = find_known(text)
        if known is not None:
            row, found = known
            event = None if row.event is None else row.event(_behind(stamp, line), found)
            if isinstance(event, DaemonStarted):
                self.origin = CommandOrigin.NOBODYS  # whatever conversation the earlier daemon had
                self._keys = self._keys[:1]
            if event is not None:
                events.append(event)
        elif not _plain(text).isdecimal() and (self.origin is CommandOrigin.NOBODYS or stamp["source"] != "Control"):
            self._wonder(line)
            if stamp["source"] != "Control":
                events.append(UnknownLine())
        # Other lines within a conversation are answers, and a number is an answer or an entry of a list.

    def _wonder(self, line: str) -> None:
        self.unknown += 1
        self.latest.append(line[:_MOST_WORDS])
