"""What a control daemon knows, and what it says to each command, as NVIDIA's does: silences, oddities and all. Pure.

Measured on 470.256.02, 535.261.03, 550.163.01 and 555.58.02 without a GPU; tests/contract holds this module and those
four to the same facts. A server is busy here for as long as it lives, as one without a GPU is.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from mpsd.core.commands import DEVICES, TABLE, echo_of
from mpsd.core.units import GIB, MIB

BRANCHES: Final = (470, 535, 550, 555)
"""The driver branches that can be imitated."""

# What a driver branch does otherwise than those before it, beside the commands that it knows (core's table).
ANNOUNCES_QUIT: Final = 535
"""The log says when `quit -t` is given."""
GUARDS_DEFAULTS: Final = 550
"""Only root and the daemon's own user may change a default; before, any local user could."""
ANNOUNCES_FORCE: Final = 550
"""The log says when a server is forced to shut down."""
CHILD_LOGS_START: Final = 550
"""The line `Starting new server` carries the pid of the server, and not the daemon's."""
PID_FILE: Final = 550
"""There is a pid file in the pipe directory."""

# -- what a reply can ask for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a server for this uid."""

    uid: int


@dataclass(frozen=True, slots=True)
class ForceServer:
    """Interrupt the server with this pid."""

    pid: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Exit when no server is left; interrupt those that are left after so many seconds, or never when None."""

    seconds: int | None


@dataclass(slots=True)
class Reply:
    """What one command comes to: lines to the front-end, lines to the log, and what has to be done."""

    printed: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    effect: StartServer | ForceServer | Quit | None = None

    def say(self, line: str) -> None:
        """Print a line and log it, as most are."""
        self.printed.append(line)
        self.logged.append(line)

    def log(self, line: str) -> None:
        """Log a line that the front-end never sees."""
        self.logged.append(line)

    def tell(self, line: str) -> None:
        """Print a line that the log never sees."""
        self.printed.append(line)


@dataclass(frozen=True, slots=True)
class Server:
    """A process that was started as `nvidia-cuda-mps-server`."""

    pid: int
    uid: int


# -- numbers, as C's library reads them --------------------------------------------------------------------------------

_INTEGER = re.compile(r"[+-]?[0-9]+")
_HEXADECIMAL = r"0[xX](?P<hexadecimal>(?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?)"
_DECIMAL = r"(?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_FLOAT = re.compile(f"(?P<sign>[+-]?)(?:{_HEXADECIMAL}|{_DECIMAL})")


def _digits(text: str) -> tuple[int, str]:
    """Return the number at the start of a text, 0 if there is none, and what stands behind it."""
    match = _INTEGER.match(text)
    return (int(match.group()), text[match.end() :]) if match else (0, text)


def _integer(text: str) -> int:
    """Return the number at the start of a text as a C int, which is what is left of a long (atoi)."""
    number = max(min(_digits(text)[0], 2**63 - 1), -(2**63))
    return (number + 2**31) % 2**32 - 2**31


def _float(text: str) -> float:
    """Return the number at the start of a text, 0 if there is none (strtod; `inf` and `nan` are refused as 0 is)."""
    match = _FLOAT.match(text)
    if match is None:
        return 0.0
    try:
        number = float.fromhex(match["hexadecimal"]) if match["hexadecimal"] else float(match["decimal"])
    except OverflowError:
        return math.inf
    return -number if match["sign"] == "-" else number


def _device(text: str) -> tuple[int, bool]:
    """Return the ordinal that a text starts with, and whether it is nothing but that ordinal."""
    return _integer(text), bool(text) and not _digits(text)[1]


def _limit(text: str) -> int:
    """Return a memory limit in bytes as 64 unsigned bits hold it: whole G, and M for every other unit or none."""
    number, unit = _digits(text)
    number = number % 2**64 if abs(number) < 2**64 else 2**64 - 1
    return number * (GIB if unit[:1] in {"G", "g"} else MIB) % 2**64


def _reported(limit: int) -> str:
    """Print a memory limit: whole GiB from one GiB on, rounded down, and MiB below."""
    return f"{limit // GIB}G" if limit >= GIB else f"{limit // MIB}M"


# -- the daemon --------------------------------------------------------------------------------------------------------


class ControlDaemon:
    """What one control daemon of a driver branch knows. `owner` is the uid that it runs as."""

    def __init__(self, branch: int, owner: int) -> None:
        self.branch = branch
        self.servers: dict[int, Server] = {}
        self.quitting = False
        self.exit_status = 0
        """The first status other than 0 that a server exited with."""
        self._owner = owner
        self._percentage = 100.0
        self._priority = 0
        self._limits: dict[int, int] = {}
        self._pending: list[int] = []

    def take_environment(self, environment: Mapping[str, str]) -> list[str]:
        """Take defaults from the environment as at the start; return what goes into the log.

        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is for the servers: the control daemon itself reports nothing of it.
        """
        logged = []
        percentage = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if percentage is not None and not self._take_percentage(percentage):
            logged.append("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]")
        priority = environment.get("CUDA_MPS_CLIENT_PRIORITY")
        if priority is not None and self._knows("set_default_client_priority") and not self._take_priority(priority):
            logged.append("CUDA_MPS_CLIENT_PRIORITY should be between [0,1]")
        return logged

    def answer(self, line: str, uid: int) -> Reply:
        """Do what a line from a front-end of this uid asks for, and say what NVIDIA's control daemon says."""
        reply = Reply()
        name, *arguments = line.split() or [""]
        if not self._knows(name):
            reply.say(echo_of(name))
            return reply
        # C's programs find an empty text where an argument is missing.
        self.COMMANDS[name](self, reply, [*arguments, "", "", ""], uid)
        return reply

    def started(self, pid: int, uid: int) -> None:
        """Take note of a server that was started."""
        self.servers[pid] = Server(pid, uid)

    def ended(self, pid: int, status: int) -> StartServer | None:
        """Take note of a server's end, and return which to start now: a uid waits while another has the server."""
        del self.servers[pid]
        self.exit_status = self.exit_status or status
        return StartServer(self._pending.pop(0)) if self._pending and not self.quitting else None

    def _knows(self, name: str) -> bool:
        return name in self.COMMANDS and TABLE[name].since <= self.branch

    def _may(self, reply: Reply, uid: int, owner: int, reason: str) -> bool:
        """Tell whether a uid may do what is `owner`'s and root's to do, and say so when it may not."""
        if uid in {0, owner}:
            return True
        reply.say(f"Insufficient privileges for UID {uid}{f'. {reason}' if self.branch >= GUARDS_DEFAULTS else ''}")
        return False

    def _may_change_defaults(self, reply: Reply, uid: int) -> bool:
        # The typing error is NVIDIA's.
        reason = "Control deamon settings can only be modified by the user started it or by the root user."
        return self.branch < GUARDS_DEFAULTS or self._may(reply, uid, self._owner, reason)

    def _server(self, reply: Reply, argument: str) -> Server | None:
        pid = _integer(argument)
        server = self.servers.get(pid)
        if server is None:
            reply.say(f"Server {pid} not found")
        return server

    # -- servers and clients --

    def _get_server_list(self, reply: Reply, _arguments: list[str], _uid: int) -> None:
        for pid in self.servers:
            reply.say(str(pid))

    def _get_server_status(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        if _INTEGER.match(arguments[0]) is None:
            reply.say("A server PID is required")
        elif self._server(reply, arguments[0]) is not None:
            reply.say("INITIALIZING")

    def _start_server(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if arguments[0] != "-uid" or not arguments[1].isdecimal():
            reply.say("A user id (UID) is required to start a new server")
            return
        wanted = int(arguments[1])
        if not self._may(reply, uid, wanted, "Only the root user may start server for another user."):
            return
        if self.quitting:
            reply.say("The MPS control daemon is shutting down")
        elif not self.servers:
            reply.effect = StartServer(wanted)
        elif wanted not in {*self._pending, *(server.uid for server in self.servers.values())}:
            self._pending.append(wanted)

    def _shutdown_server(self, reply: Reply, arguments: list[str], uid: int) -> None:
        server = self._server(reply, arguments[0])
        if server is None or not self._may(
            reply, uid, server.uid, "Only the root user may shutdown another user's server."
        ):
            return
        if arguments[1] == "-f":
            reply.effect = ForceServer(server.pid)
            reply.logged += self.forced(server.pid)

    def forced(self, pid: int) -> list[str]:
        """Return what goes into the log when a server is forced to shut down."""
        return [f"Force shutting down server {pid}"] if self.branch >= ANNOUNCES_FORCE else []

    def _get_client_list(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        self._server(reply, arguments[0])

    def _get_device_client_list(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if _integer(arguments[0]) != 0:
            self._ask_server(reply, arguments, uid)
        for pid in self.servers if _integer(arguments[0]) == 0 else ():
            reply.log(f"Server {pid} is <busy>")

    def _ps(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if not arguments[0].startswith("-p"):
            for pid in self.servers:
                reply.log(f"Server {pid} is <busy>")
            reply.say("Server not found")
            return
        named = arguments[0].removeprefix("-p") or arguments[1]
        self._ask_server(reply, [named], uid)
        reply.say(f"Server {_integer(named)} not found")
        reply.tell("")

    def _terminate_client(self, reply: Reply, arguments: list[str], uid: int) -> None:
        self._ask_server(reply, arguments, uid)
        reply.say(f"Server {_integer(arguments[0])} not found!")
        reply.say("1")

    def _ask_server(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        """Answer what only the server knows, or would have to do: it is busy."""
        server = self._server(reply, arguments[0])
        if server is not None:
            reply.log(f"Server {server.pid} is <busy>")

    # -- defaults --

    def _take_percentage(self, text: str) -> bool:
        percentage = _float(text)
        if not 0 < percentage <= 100:  # noqa: PLR2004 - it is a percentage
            return False
        self._percentage = percentage
        return True

    def _take_priority(self, text: str) -> bool:
        priority = _integer(text)
        if priority not in {0, 1}:
            return False
        self._priority = priority
        return True

    def _set_default_active_thread_percentage(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if not self._may_change_defaults(reply, uid):
            return
        if not self._take_percentage(arguments[0]):
            reply.log("Invalid percentage, expected between (0.0, 100.0]")
        reply.say(f"{self._percentage:.1f}")

    def _get_default_active_thread_percentage(self, reply: Reply, _arguments: list[str], _uid: int) -> None:
        reply.say(f"{self._percentage:.1f}")

    def _set_default_device_pinned_mem_limit(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if not self._may_change_defaults(reply, uid):
            return
        device, whole = _device(arguments[0])
        if not 0 <= device < DEVICES:
            reply.log("Invalid device ordinal!")
            return
        # A device that is no ordinal, such as a GPU's UUID, clears the limit of the ordinal that it starts with: 0.
        self._limits[device] = _limit(arguments[1]) if whole else 0

    def _get_default_device_pinned_mem_limit(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        device, _ = _device(arguments[0])
        if not 0 <= device < DEVICES:
            reply.log("Invalid device ordinal!")
        elif not self._limits.get(device):
            reply.log("No default pinned memory limit set for the device!")
        else:
            reply.say(_reported(self._limits[device]))

    def _set_default_client_priority(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if self._may_change_defaults(reply, uid) and not self._take_priority(arguments[0]):
            reply.say("Invalid priority value - must be 0 or 1!")

    def _get_default_client_priority(self, reply: Reply, _arguments: list[str], _uid: int) -> None:
        reply.say(str(self._priority))

    def _quit(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if uid not in {0, self._owner}:
            reply.say("Not enough privilege to execute quit command")
            return
        self.quitting = True
        if arguments[0] != "-t" or _INTEGER.match(arguments[1]) is None:
            reply.effect = Quit(None)
            return
        seconds = _integer(arguments[1]) % 2**32
        reply.effect = Quit(seconds)
        if self.branch >= ANNOUNCES_QUIT:
            reply.log(f"quit command issued with timeout of {seconds}")

    COMMANDS: ClassVar[Mapping[str, Callable[["ControlDaemon", Reply, list[str], int], None]]] = {
        "get_server_list": _get_server_list,
        "get_server_status": _get_server_status,
        "start_server": _start_server,
        "shutdown_server": _shutdown_server,
        "get_client_list": _get_client_list,
        "get_device_client_list": _get_device_client_list,
        "ps": _ps,
        "terminate_client": _terminate_client,
        "set_default_active_thread_percentage": _set_default_active_thread_percentage,
        "get_default_active_thread_percentage": _get_default_active_thread_percentage,
        "set_active_thread_percentage": _ask_server,
        "get_active_thread_percentage": _ask_server,
        "set_default_device_pinned_mem_limit": _set_default_device_pinned_mem_limit,
        "get_default_device_pinned_mem_limit": _get_default_device_pinned_mem_limit,
        "set_device_pinned_mem_limit": _ask_server,
        "get_device_pinned_mem_limit": _ask_server,
        "set_default_client_priority": _set_default_client_priority,
        "get_default_client_priority": _get_default_client_priority,
        "quit": _quit,
    }
    """The answer to each command of core's table; which of them a driver knows, that table says."""
