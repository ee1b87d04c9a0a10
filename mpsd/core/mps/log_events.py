"""The events that the logs of a control daemon and its servers can report: one type for each kind.

Sources: "measured" is 470.256.02, 535.261.03, 550.163.01 and 555.58.02 without a GPU; 580 is 580.159.04 on a GPU; R580
are logs that users of that driver published; OLD is NVIDIA's documentation before R590. `core/mps/log_parser.py` has
the lines with their sources.
"""

from dataclasses import dataclass
from typing import Final

from mpsd.core.mps.limits import Limit, LimitValue


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    """A foreign command that can have changed something: `Cmd:...` outside mpsd's conversations (measured).

    It is logged before it is carried out or refused, so it may have changed nothing.
    """

    text: str


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
