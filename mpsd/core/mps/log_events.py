"""What the log of a control daemon, and of its servers, can tell of: one type for each kind of news.

Sources: "measured" is 470.256.02, 535.261.03, 550.163.01 and 555.58.02 without a GPU; R580 are logs that users of that
driver published; OLD is NVIDIA's documentation before R590. `core/mps/log_parser.py` has the lines.
"""

from dataclasses import dataclass
from typing import Final

from mpsd.core.mps.limits import Limit, LimitValue


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    """A command of somebody else's that can have changed something: `Cmd:...` in no conversation of mpsd's (measured).

    It is logged before it is carried out, or refused, and so it can also have changed nothing.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Unaccounted:
    """A line of somebody else's conversation that changes nothing by its words, or a line without a stamp.

    A command that holds the end of a line is logged as two lines, of which the second has no stamp, and can be any
    command (measured): so each of these can stand for a change that nobody sees.
    """

    text: str


@dataclass(frozen=True, slots=True)
class DaemonStarted:
    """`Starting control daemon using socket ...`: the first line of every control daemon (measured)."""

    pid: int


@dataclass(frozen=True, slots=True)
class ServerStarting:
    """`Starting new server N for user U` (measured; from 550 on it is the server itself that says so)."""

    server: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    """`NEW SERVER N: Ready` in control.log, and `Server has started` in server.log (R580)."""

    server: int


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """A server that could not start, in its own words, or ran into what it cannot survive (R580, OLD)."""

    server: int
    words: str


@dataclass(frozen=True, slots=True)
class ServerExited:
    """`Server N exited with status S` (measured). A server that a signal ended has status 0 (measured)."""

    server: int
    status: int


@dataclass(frozen=True, slots=True)
class ServerFaulted:
    """`Volta MPS: Server is handling a fatal GPU error.`: it takes no client until those that it has are gone (OLD)."""

    server: int


@dataclass(frozen=True, slots=True)
class ContextsMade:
    """`Creating server context on device N`: said at the start, and when a fatal fault is over (R580, OLD)."""

    server: int


@dataclass(frozen=True, slots=True)
class SharedMemoryMade:
    """`Created named shared memory region /cuda.shm.U.S.N`: uid, server in hexadecimal, and a number (OLD, R580).

    Newer servers say `anonymous`, and leave nothing.
    """

    server: int
    name: str


@dataclass(frozen=True, slots=True)
class LimitGiven:
    """What a server gives each client process at most, as the `log_line` of the limit tells (R580)."""

    server: int
    limit: Limit
    value: LimitValue
    """As the pipe would report it."""


@dataclass(frozen=True, slots=True)
class ClientArrived:
    """`NEW CLIENT P from user U: ...` (R580). The pid is 0 for one of another pid namespace (R580)."""

    pid: int
    uid: int
    waits: bool
    """Whether its server is not ready yet."""


@dataclass(frozen=True, slots=True)
class ClientConnected:
    """`Client {PID: P, Context ID: C} connected`, said by its server (R580)."""

    server: int
    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """`Status of client {P, C} is ACTIVE` (R580); INACTIVE is one that met a fatal fault (OLD)."""

    server: int
    pid: int
    context: int
    status: str


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """`Client {P, C} exit` (R580)."""

    server: int
    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class ClientLost:
    """`Receive command failed, assuming client exit...`: a client's process was gone without a word (R580)."""

    server: int


LogEvent = (
    ForeignCommand
    | Unaccounted
    | DaemonStarted
    | ServerStarting
    | ServerReady
    | ServerFailed
    | ServerExited
    | ServerFaulted
    | ContextsMade
    | SharedMemoryMade
    | LimitGiven
    | ClientArrived
    | ClientConnected
    | ClientStatus
    | ClientLeft
    | ClientLost
)

REASONS_TO_ASK: Final = (
    ForeignCommand,
    Unaccounted,
    ServerStarting,
    ServerReady,
    ServerFailed,
    ServerExited,
    ServerFaulted,
    ContextsMade,
    LimitGiven,
    ClientArrived,
    ClientConnected,
    ClientStatus,
    ClientLeft,
    ClientLost,
)
"""Events after which limits, servers or clients may be others than before.

None of them comes of a question: what mpsd asks must not be what makes it ask again."""
