"""The result of a command to a control daemon: the lines to print and to log, and the effect. Pure.

The simulator has no dataclasses: with them, a control daemon takes a third longer to start.
"""

from typing import NamedTuple


class StartServer(NamedTuple):
    """Start a server for this uid."""

    uid: int


class ForceServer(NamedTuple):
    """Interrupt the server with this pid."""

    pid: int


class Leave(NamedTuple):
    """Make the server with this pid exit after its last client."""

    pid: int


class PassOn(NamedTuple):
    """Pass the client on to the server with this pid."""

    pid: int


class Quit(NamedTuple):
    """Exit when no server is left; interrupt the remaining ones after this many seconds, or never if None."""

    seconds: int | None


class AskServer(NamedTuple):
    """Make the server with this pid answer a command that may take long; its front-end waits for that."""

    pid: int
    name: str
    arguments: tuple[str, ...]


class Reply:
    """The result of one command: lines for the front-end, lines for the log, and the effect."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.logged: list[str] = []
        self.effect: StartServer | ForceServer | Leave | PassOn | AskServer | Quit | None = None

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


class Following(NamedTuple):
    """The consequence of a server's end: the server to start now, and whether the waiting clients are refused."""

    start: StartServer | None = None
    given_up: bool = False
