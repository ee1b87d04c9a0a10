"""What a command to a control daemon comes to: what is printed, what is logged, and what has to be done. Pure."""

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
    """Have the server with this pid exit when its last client has."""

    pid: int


@dataclass(frozen=True, slots=True)
class PassOn:
    """Pass the client on to the server with this pid."""

    pid: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Exit when no server is left; interrupt those that are left after so many seconds, or never when None."""

    seconds: int | None


@dataclass(frozen=True, slots=True)
class AskServer:
    """Have the server with this pid answer a command that may take it long; its front-end waits for that."""

    pid: int
    name: str
    arguments: tuple[str, ...]


@dataclass(slots=True)
class Reply:
    """What one command comes to: lines to the front-end, lines to the log, and what has to be done."""

    printed: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    effect: StartServer | ForceServer | Leave | PassOn | AskServer | Quit | None = None

    def say(self, line: str) -> None:
        """Print a line and log it, as most are."""
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
    """What follows the end of a server: which to start now, and whether those who waited for it wait in vain."""

    start: StartServer | None = None
    given_up: bool = False
