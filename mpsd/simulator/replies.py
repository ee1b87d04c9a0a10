"""The result of a command to a control daemon: the lines to print and to log, and the effect. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a server for this uid."""

    uid: int


@dataclass(frozen=True, slots=True)
class ForceServer:
    """Interrupt the server with this pid."""

    pid: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Make the server with this pid exit after its last client."""

    pid: int


@dataclass(frozen=True, slots=True)
class PassOn:
    """Pass the client on to the server with this pid."""

    pid: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Exit when no server is left; interrupt the remaining ones after this many seconds, or never if None."""

    seconds: int | None


@dataclass(frozen=True, slots=True)
class AskServer:
    """Make the server with this pid answer a command that may take long; its front-end waits for that."""

    pid: int
    name: str
    arguments: tuple[str, ...]


@dataclass(slots=True)
class Reply:
    """The result of one command: lines for the front-end, lines for the log, and the effect."""

    printed: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    effect: StartServer | ForceServer | Leave | PassOn | AskServer | Quit | None = None

    def say(self, line: str) -> None:
        """Print a line and log it, which is the usual case."""
        self.printed.append(line)
        self.logged.append(line)

    def log(self, line: str) -> None:
        """Log a line that the front-end never sees."""
        self.logged.append(line)

    def say_and_log(self, line: str) -> None:
        """Print a line that the log never sees."""
        self.printed.append(line)


@dataclass(frozen=True, slots=True)
class Following:
    """The consequence of a server's end: the server to start now, and whether the waiting clients are refused."""

    start: StartServer | None = None
    given_up: bool = False
