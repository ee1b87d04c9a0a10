"""The state of a control daemon, and its answers to commands: those of NVIDIA's, with all silences and oddities. Pure.

Measured on 470.256.02, 535.261.03, 550.163.01 and 555.58.02 without a GPU; tests/contract checks this module and those
four against the same facts. A server is busy until it reports that it is ready, which it does only on a simulated GPU:
without a GPU it is busy for its whole life. `server_state` has the answers of a ready server.

The simulator has no dataclasses: with them, a control daemon takes a third longer to start.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from mpsd.core.mps.commands import TABLE, echo_of, words
from mpsd.simulator import figures

BRANCHES: Final = (470, 535, 550, 555, 580)
"""The driver branches that can be imitated. Of 580 only the words of a server's log differ from those of 555 here."""

# The first driver branch with each difference in behaviour, beside the commands that it knows (core's table).
ANNOUNCES_QUIT: Final = 535
"""The log reports each `quit -t`."""
GUARDS_DEFAULTS: Final = 550
"""Only root and the daemon's own user may change a default; on older branches, any local user can."""
ANNOUNCES_FORCE: Final = 550
"""The log reports each forced shutdown of a server."""
CHILD_LOGS_START: Final = 550
"""The line `Starting new server` carries the pid of the server instead of the daemon's."""
PID_FILE: Final = 550
"""The pipe directory has a pid file."""

DEVICES: Final = 32
"""Ordinals below this count as devices, with or without a GPU; others are ignored, and only the log says so."""

_STARTS: Final = 6
"""The number of starts of a server for a client before the daemon gives up: one and five retries (users report)."""

Ask: TypeAlias = Callable[[str, Sequence[str]], list[str]]
"""Asks a server for its answer to a command about itself: the name, and the words after the server's pid."""


class Server:
    """A process that was started as `nvidia-cuda-mps-server`."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.ask: Ask | None = None
        """None while it is busy."""
        self.leaving = False
        """Whether it exits with its last client, and gets no other."""


# -- the effects of a command, and its result --------------------------------------------------------------------------


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


class Following(NamedTuple):
    """The consequence of a server's end: the server to start now, and whether the waiting clients are refused."""

    start: StartServer | None = None
    given_up: bool = False


# -- the daemon --------------------------------------------------------------------------------------------------------


class ControlDaemon:
    """The state of one control daemon of a driver branch.

    `owner` is the uid that it runs as; `many_users` says whether one server serves all uids (-multiuser-server).
    """

    def __init__(self, branch: int, owner: int, *, many_users: bool = False) -> None:
        self.branch = branch
        self.servers: dict[int, Server] = {}
        self.quitting = False
        self.exit_status = 0
        """The first status other than 0 that a server exited with."""
        self._owner = owner
        self._percentage = 100.0
        self._priority = 0
        self._limits: dict[int, int] = {}
        self._many_users = many_users
        self._pending: list[int] = []
        self._failures: dict[int, int] = {}
        """The number of servers in a row that ended before they were ready, by uid."""

    def take_environment(self, environment: Mapping[str, str]) -> list[str]:
        """Apply the defaults in the environment, as at the start; return the lines for the log.

        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is for the servers: the control daemon itself does not report it.
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
        """Execute a line from a front-end of this uid, and return the reply of NVIDIA's control daemon.

        The method `_NAME` answers the command NAME; where there is none, the server that the first argument names does.
        """
        reply = Reply()
        name, *arguments = words(line) or [""]
        if not self._knows(name):
            reply.say(echo_of(name))
            return reply
        arguments += ["", "", ""]  # C programs find an empty text where an argument is missing
        command = getattr(self, f"_{name}", None)
        if command is not None:
            command(reply, arguments, uid)
        else:
            self._ask_named(reply, name, arguments)
        return reply

    @property
    def defaults(self) -> dict[str, object]:
        """The values that the next server starts with."""
        values = {"percentage": self._percentage, "limits": self._limits, "priority": self._priority}
        return {**values, "branch": self.branch}

    def started(self, pid: int, uid: int) -> None:
        """Record a server that was started."""
        self.servers[pid] = Server(pid, uid)

    def ready(self, pid: int, ask: Ask) -> Reply:
        """Record that a server is ready, and how to ask it. If other uids wait, it exits after its last client."""
        server, reply = self.servers[pid], Reply()
        server.ask = ask
        self._failures.pop(server.uid, None)
        reply.log(f"NEW SERVER {pid}: Ready")
        if self.quitting or self._pending:
            reply.effect = self._leave(server)
        return reply

    def serves(self, pid: int, uid: int) -> bool:
        """Tell whether a server is the one for clients of this uid."""
        return self.servers[pid].uid == self._served(uid)

    def arrived(self, pid: int, uid: int) -> Reply:
        """Return the reply to a client that connected: it is passed on, or waits for a server.

        One server serves one uid, or all of them, and there is one at a time; the server of another uid exits after its
        last client. Source: NVIDIA, "Multi-Process Service", "Architecture".
        """
        reply, served = Reply(), self._served(uid)
        servers = (server for server in self.servers.values() if server.uid == served and not server.leaving)
        server = next(servers, None)
        if server is not None and server.ask is not None:
            reply.log(f"NEW CLIENT {pid} from user {uid}: Server already exists")
            reply.effect = PassOn(server.pid)
            return reply
        reply.log(f"NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list")
        if server is None:
            reply.effect = self._want(uid)
        return reply

    def _served(self, uid: int) -> int:
        """Return the uid of the server that serves a uid's clients."""
        return self._owner if self._many_users else uid

    def _want(self, uid: int) -> StartServer | Leave | None:
        """Return the action that gives a uid without a server one."""
        uid = self._served(uid)
        if not self.servers:
            return StartServer(uid)
        if uid in {*self._pending, *(server.uid for server in self.servers.values() if not server.leaving)}:
            return None
        self._pending.append(uid)
        return self._leave(next(iter(self.servers.values())))

    @staticmethod
    def _leave(server: Server) -> Leave | None:
        """Make a server accept no more clients and exit after its last one; a busy server does not get the message."""
        server.leaving = server.ask is not None
        return Leave(server.pid) if server.leaving else None

    def ended(self, pid: int, status: int, *, awaited: bool = False) -> Following:
        """Record a server's end, and return the next action: a uid may wait while another one has the server.

        `awaited` says whether clients wait for this server: if it never became ready, it is started again, a few times.
        """
        server = self.servers.pop(pid)
        self.exit_status = self.exit_status or status
        failures = 0
        if awaited and server.ask is None and not self.quitting:
            failures = self._failures[server.uid] = self._failures.get(server.uid, 0) + 1
            if failures < _STARTS:
                return Following(StartServer(server.uid))
            del self._failures[server.uid]
        start = StartServer(self._pending.pop(0)) if self._pending and not self.quitting else None
        return Following(start, given_up=failures > 0)

    def _knows(self, name: str) -> bool:
        return name in TABLE and TABLE[name].since <= self.branch

    def _may(self, reply: Reply, uid: int, owner: int, reason: str) -> bool:
        """Tell whether a uid is `owner` or root; where it is neither, add the refusal to the reply."""
        if uid in {0, owner}:
            return True
        reply.say(f"Insufficient privileges for UID {uid}{f'. {reason}' if self.branch >= GUARDS_DEFAULTS else ''}")
        return False

    def _may_change_defaults(self, reply: Reply, uid: int) -> bool:
        # The typing error is NVIDIA's.
        reason = "Control deamon settings can only be modified by the user started it or by the root user."
        return self.branch < GUARDS_DEFAULTS or self._may(reply, uid, self._owner, reason)

    def _server(self, reply: Reply, argument: str) -> Server | None:
        pid = figures.integer(argument)
        server = self.servers.get(pid)
        if server is None:
            reply.say(f"Server {pid} not found")
        return server

    # -- servers and clients --

    def _get_server_list(self, reply: Reply, _arguments: list[str], _uid: int) -> None:
        for pid in self.servers:
            reply.say(str(pid))

    def _get_server_status(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        if figures.INTEGER.match(arguments[0]) is None:
            reply.say("A server PID is required")
            return
        server = self._server(reply, arguments[0])
        if server is not None:
            for word in ["INITIALIZING"] if server.ask is None else server.ask("get_server_status", ()):
                reply.say(word)

    def _start_server(self, reply: Reply, arguments: list[str], uid: int) -> None:
        if arguments[0] != "-uid" or not arguments[1].isdecimal():
            reply.say("A user id (UID) is required to start a new server")
            return
        wanted = int(arguments[1])
        if self.quitting:
            reply.say("The MPS control daemon is shutting down")
        elif self._may(reply, uid, wanted, "Only the root user may start server for another user."):
            reply.effect = self._want(wanted)

    def _shutdown_server(self, reply: Reply, arguments: list[str], uid: int) -> None:
        server = self._server(reply, arguments[0])
        if server is None or not self._may(
            reply, uid, server.uid, "Only the root user may shutdown another user's server."
        ):
            return
        if arguments[1] == "-f":
            reply.effect = ForceServer(server.pid)
            reply.logged += self.forced(server.pid)
        else:
            reply.effect = self._leave(server)

    def forced(self, pid: int) -> list[str]:
        """Return the log lines of a forced shutdown of a server."""
        return [f"Force shutting down server {pid}"] if self.branch >= ANNOUNCES_FORCE else []

    def _get_client_list(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        server = self._server(reply, arguments[0])
        if server is not None and server.ask is not None:
            self._ask(reply, server, "get_client_list")

    def _get_device_client_list(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        if figures.integer(arguments[0]) != 0:
            self._ask_named(reply, "get_device_client_list", arguments)
            return
        for server in self.servers.values():
            self._ask(reply, server, "get_device_client_list")

    def _ps(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        if not arguments[0].startswith("-p"):
            answered = [self._ask(reply, server, "ps") for server in self.servers.values()]
            if not any(answered):
                reply.say("Server not found")
            return
        named = arguments[0].removeprefix("-p") or arguments[1]
        if not self._ask_named(reply, "ps", [named]):
            reply.say(f"Server {figures.integer(named)} not found")
            reply.printed.append("")  # not in the log

    def _terminate_client(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        server = self._server(reply, arguments[0])
        if server is not None and server.ask is not None:
            reply.effect = AskServer(server.pid, "terminate_client", tuple(arguments[1:]))
            return
        if server is not None:
            reply.log(f"Server {server.pid} is <busy>")
        reply.say(f"Server {figures.integer(arguments[0])} not found!")
        reply.say("1")

    def _ask_named(self, reply: Reply, name: str, arguments: list[str]) -> bool:
        """Let the server that the first argument names answer this command; tell whether it did."""
        server = self._server(reply, arguments[0])
        return server is not None and self._ask(reply, server, name, arguments[1:])

    @staticmethod
    def _ask(reply: Reply, server: Server, name: str, arguments: Sequence[str] = ()) -> bool:
        """Let a server answer or execute a command; False when it is busy."""
        if server.ask is None:
            reply.log(f"Server {server.pid} is <busy>")
            return False
        for line in server.ask(name, arguments):
            reply.say(line)
        return True

    # -- defaults --

    def _take_percentage(self, text: str) -> bool:
        percentage = figures.real(text)
        if not 0 < percentage <= 100:  # noqa: PLR2004 - it is a percentage
            return False
        self._percentage = percentage
        return True

    def _take_priority(self, text: str) -> bool:
        priority = figures.integer(text)
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
        device, whole = figures.device(arguments[0])
        if not 0 <= device < DEVICES:
            reply.log("Invalid device ordinal!")
            return
        # A text that is not an ordinal, such as a GPU's UUID, clears the limit of the ordinal that it starts with: 0.
        self._limits[device] = figures.limit(arguments[1]) if whole else 0

    def _get_default_device_pinned_mem_limit(self, reply: Reply, arguments: list[str], _uid: int) -> None:
        device, _ = figures.device(arguments[0])
        if not 0 <= device < DEVICES:
            reply.log("Invalid device ordinal!")
        elif not self._limits.get(device):
            reply.log("No default pinned memory limit set for the device!")
        else:
            reply.say(figures.reported(self._limits[device]))

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
        if arguments[0] != "-t" or figures.INTEGER.match(arguments[1]) is None:
            reply.effect = Quit(None)
            return
        seconds = figures.integer(arguments[1]) % 2**32
        reply.effect = Quit(seconds)
        if self.branch >= ANNOUNCES_QUIT:
            reply.log(f"quit command issued with timeout of {seconds}")
