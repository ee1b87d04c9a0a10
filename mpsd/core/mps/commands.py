"""The commands of the control pipe: name, arguments, answer, and first driver of each.

The table is data for everything that uses or imitates the control pipe: `system/control_pipe` uses it for
conversations, the contract suite for the answers of each driver, and the simulator to answer. Every driver answers an
unknown command with `Unknown command "..."` and status 0 (measured: 470.256.02, 535.261.03, 550.163.01, 555.58.02).
mpsd detects unknown commands by that answer, and frames conversations with it (see `mark`).
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from mpsd.core.errors import ControlGarbledError, ControlNoAnswerError, ControlUnknownCommandError, ServerNotFoundError
from mpsd.core.units import briefly

T = TypeVar("T")


class CommandRow(NamedTuple):
    """One command of NVIDIA's front-end."""

    name: str
    grammar: str
    """Its arguments, in the words of NVIDIA's man page."""
    since: int
    """The oldest of the measured driver branches that has it."""
    one_line: bool = False
    """Whether a normal answer is one line. Answers have no delimiter, so this decides the framing."""
    changes: bool = False
    """Whether it changes anything: only then does a command of others matter."""


ROWS: Final = (
    CommandRow("get_server_list", "", 470),
    CommandRow("get_server_status", "PID", 550),
    CommandRow("start_server", "-uid UID", 470, changes=True),
    CommandRow("shutdown_server", "PID [-f]", 470, changes=True),
    CommandRow("get_client_list", "PID", 470),
    CommandRow("get_device_client_list", "[PID]", 470),
    CommandRow("ps", "[-p PID]", 535),
    CommandRow("terminate_client", "SERVER_PID CLIENT_PID", 535, changes=True),
    CommandRow("set_default_active_thread_percentage", "PERCENTAGE", 470, one_line=True, changes=True),
    CommandRow("get_default_active_thread_percentage", "", 470, one_line=True),
    CommandRow("set_active_thread_percentage", "PID PERCENTAGE", 470, changes=True),
    CommandRow("get_active_thread_percentage", "PID", 470),
    CommandRow("set_default_device_pinned_mem_limit", "DEVICE VALUE", 535, changes=True),
    CommandRow("get_default_device_pinned_mem_limit", "DEVICE", 535),
    CommandRow("set_device_pinned_mem_limit", "PID DEVICE VALUE", 535, changes=True),
    CommandRow("get_device_pinned_mem_limit", "PID DEVICE", 535),
    CommandRow("set_default_client_priority", "PRIORITY", 535, changes=True),
    CommandRow("get_default_client_priority", "", 535, one_line=True),
    CommandRow("quit", "[-t SECONDS]", 470, changes=True),
)
"""`core/mps/limits.py` says which setter and getter belong to one limit."""

TABLE: Final = {row.name: row for row in ROWS}


class Command(NamedTuple, Generic[T]):
    """One line to the control daemon, and the parser of its answer."""

    row: CommandRow
    arguments: tuple[str, ...]
    parse: Callable[[Sequence[str]], T]
    """Converts the lines of the answer to a value; raises ControlError for lines that do not parse."""

    @property
    def line(self) -> str:
        """The command as one line, without the newline."""
        return " ".join((self.row.name, *self.arguments))

    @property
    def script(self) -> tuple[str, ...]:
        """The lines to send."""
        return (self.line,)

    @property
    def expects(self) -> int | None:
        """The number of lines of a normal answer, or None when it is not known in advance."""
        return 1 if self.row.one_line else None


# -- words -------------------------------------------------------------------------------------------------------------

_WORD: Final = re.compile(r"[^ \t\v\f\r]+")
"""Unlike `str.split`, this treats Unicode's further spaces as parts of a word, as a control daemon does (measured)."""


def words(line: str) -> list[str]:
    """Return the words of a command, separated by ASCII spaces of any kind, also before the first (measured)."""
    return _WORD.findall(line)


# -- framing -----------------------------------------------------------------------------------------------------------

_UNKNOWN = re.compile(r'Unknown command "(.*)"')
_SERVER_NOT_FOUND = re.compile(r"Server (?:[0-9]+ )?not found!?")


def mark(nonce: str, number: int) -> str:
    """Return a line that no control daemon knows, and that each therefore echoes: a delimiter for answers."""
    return f"mpsd-{nonce}-{number}"


def is_mark(line: str, key: str = "") -> bool:
    """Tell whether a command in the control daemon's log is a mark of mpsd's whose nonce begins with this key."""
    return line.startswith(f"mpsd-{key}")


def nonce_of(line: str) -> str:
    """Return the nonce of a mark."""
    return line.removeprefix("mpsd-").partition("-")[0]


def echo_of(line: str) -> str:
    """Return the answer of a control daemon to an unknown command."""
    return f'Unknown command "{line}"'


def changes_something(line: str) -> bool:
    """Tell whether a command in the log can have changed anything. An unknown command changes nothing."""
    row = TABLE.get(next(iter(words(line)), ""))
    return row is not None and row.changes


def is_quit(line: str) -> bool:
    """Tell whether a command in the log is a `quit`."""
    return words(line)[:1] == ["quit"]


# -- parsing -----------------------------------------------------------------------------------------------------------


def check_refusal(command: str, lines: Sequence[str]) -> None:
    """Raise ControlError for an answer that is one of the refusals that all commands share."""
    if not lines:
        return
    name = command.split(" ", 1)[0]
    unknown = _UNKNOWN.fullmatch(lines[0])
    if unknown is not None and unknown.group(1) == name:
        row = TABLE[name]
        raise ControlUnknownCommandError(
            f"the control daemon does not know the command {name}",
            hint=f"use driver {row.since} or newer, which has this command, or do without it",
        )
    if _SERVER_NOT_FOUND.fullmatch(lines[0]) is not None:
        raise ServerNotFoundError(
            f"the control daemon answered {lines[0]!r} to {command!r}", hint="list its servers with: mpsctl daemons"
        )


def garbled(command: str, lines: Sequence[str]) -> ControlGarbledError:
    """Return the error for an answer that no known driver gives to this command."""
    return ControlGarbledError(
        f"the control daemon answered {briefly(lines)} to {command!r}, a form that this mpsd does not know",
        hint="report this answer with the version of the driver",
    )


def one_line(command: str, lines: Sequence[str]) -> str:
    """Return the single line of an answer. Raises ControlError for a refusal, for no line and for several."""
    check_refusal(command, lines)
    if not lines:
        raise ControlNoAnswerError(
            f"the control daemon accepted {command!r} and did not answer, as it does while a server is busy",
            hint="try again when the server is ready; its log says why it is not",
        )
    if len(lines) != 1:
        raise garbled(command, lines)
    return lines[0]


_PID = re.compile(r" *[0-9]{1,10} *")


def parse_pids(command: str, lines: Sequence[str]) -> tuple[int, ...]:
    """Parse one pid per line, or no line."""
    check_refusal(command, lines)
    if not all(_PID.fullmatch(line) for line in lines):
        raise garbled(command, lines)
    return tuple(int(line) for line in lines)


_STATES: Final = frozenset({"INITIALIZING", "ACTIVE", "FAULT"})
"""The state words of servers; what another word means for clients is unknown. Source: NVIDIA's man page."""


def _parse_status(command: str, lines: Sequence[str]) -> str:
    line = one_line(command, lines)
    if line not in _STATES:
        raise garbled(command, lines)
    return line


def _parse_nothing(command: str, lines: Sequence[str]) -> None:
    check_refusal(command, lines)
    if lines:
        raise garbled(command, lines)


_ENDED: Final = frozenset({"0", "CUDA_SUCCESS"})
"""The answers of a successful `terminate_client`: NVIDIA's documents have both, a number and its name."""


def _parse_ended(command: str, lines: Sequence[str]) -> None:
    if one_line(command, lines).strip() not in _ENDED:
        raise garbled(command, lines)


# -- the commands that mpsd uses ---------------------------------------------------------------------------------------


def command(name: str, arguments: tuple[str | int, ...], parse: Callable[[str, Sequence[str]], T]) -> Command[T]:
    """Return a command of the table."""
    texts = tuple(str(argument) for argument in arguments)
    line = " ".join((name, *texts))
    return Command(TABLE[name], texts, lambda lines: parse(line, lines))


def get_server_list() -> Command[tuple[int, ...]]:
    """Query the pids of the servers."""
    return command("get_server_list", (), parse_pids)


def get_server_status(server: int) -> Command[str]:
    """Query a server's state word: INITIALIZING, ACTIVE or FAULT."""
    return command("get_server_status", (server,), _parse_status)


def get_client_list(server: int) -> Command[tuple[int, ...]]:
    """Query the pids of a server's clients. The answer of a busy server is empty, like that of one without clients."""
    return command("get_client_list", (server,), parse_pids)


def terminate_client(server: int, client: int) -> Command[None]:
    """End the contexts of a client without affecting the other clients of its server.

    The daemon answers 0 or CUDA_SUCCESS once the client's work on the GPU has ended. On 580 no kernel delays it (0.01 s
    into one of 12 s, measured); other drivers may let a kernel finish. The process itself continues, and its CUDA calls
    fail. Sources: NVIDIA's man page, and "Multi-Process Service", mpsv2-interface.
    """
    return command("terminate_client", (server, client), _parse_ended)


def quit_daemon(seconds: int | None) -> Command[None]:
    """Stop the control daemon; with `seconds`, it ends its servers by force after that time."""
    return command("quit", () if seconds is None else ("-t", seconds), _parse_nothing)
