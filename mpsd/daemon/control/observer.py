"""The knowledge about one control daemon from its answers: its limits, their drift, its servers with their clients.

`Observer` holds the conversations, in which `_AskedServer` is one server, and `OpenedLimits` concludes from them which
limits were open to each client. `Survivors` are the servers of dead control daemons, which no conversation reaches.
"""

import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from mpsd.core.enforcement import ceiling, drift
from mpsd.core.errors import (
    ControlBusyError,
    ControlError,
    ControlGarbledError,
    ControlNoAnswerError,
    ControlUnknownCommandError,
    ControlUnresponsiveError,
    LimitNotHeldError,
)
from mpsd.core.events import EventName
from mpsd.core.model import Drift, GpuUsage, Known, Limits, ProcessIdentity, ReadBack, Reading, Server, UnforeseenAnswer
from mpsd.core.mps import commands
from mpsd.core.mps.limits import (
    CLIENT_PRIORITY,
    LIMITS,
    PINNED_DEVICE_MEM_LIMIT,
    Limit,
    LimitValue,
    reading_of,
    shown,
    widest_read_back,
)
from mpsd.core.mps_facts import SERVER_END
from mpsd.core.quantities import Bounds, Opened
from mpsd.core.signal import Signal
from mpsd.daemon.control.control_log import ControlLog
from mpsd.daemon.control.pipe_access import PipeAccess, connected_to, named
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.mps.control_pipe import ControlPipe, Conversation, Pending
from mpsd.system.processes import proc

T = TypeVar("T")

_MOST_UNDONE: Final = 8
"""Changes of others that mpsd restored and can still report; its events have all of them."""

_MOST_FORMS: Final = 32
"""Forms of unforeseen answers that are remembered as logged."""

_COUNTS: Final = 1.0
"""Seconds between two readings of NVML for the clients of orphans."""

_NUMBER: Final = re.compile(r"[0-9]+")


class Observer:
    """The knowledge about one control daemon, and the ways to renew it."""

    def __init__(
        self,
        pipe_access: PipeAccess,
        control_log: ControlLog,
        pipe: ControlPipe,
        *,
        survivors: "Survivors",
        bounded: BoundedLog,
    ) -> None:
        """Take the parts; `bounded` is for entries that a lease holder can cause in a loop."""
        self._pipe_access, self.control_log, self._pipe = pipe_access, control_log, pipe
        self.survivors = survivors
        self._bounded = bounded
        self.read_back: ReadBack | None = None
        self.drift: tuple[Drift, ...] = ()
        """The limits that others changed and that are not restored yet."""
        self.undone: tuple[Drift, ...] = ()
        """The limits that others changed and mpsd restored, the latest last."""
        self.canaries: set[int] = set()
        """The pids of mpsd's own running canaries."""
        self.opened = OpenedLimits(control_log, bounded)
        self.has_client_priority = True
        """Whether the driver has a client priority, as far as known."""
        self._priority: int | None = None
        """The default priority of clients, as read last; None where it was not read, or the driver has none."""
        self._limits: tuple[Limit, ...] = LIMITS
        """The limits that the driver has, as far as known."""
        self._servers: dict[ProcessIdentity, Server] = {}
        self._in_force_since = 0.0
        """Seconds since boot from which the present defaults apply: a server that was started later has got them."""
        self._forms: list[tuple[str, str]] = []
        """The forms of unforeseen answers that are logged, the latest last."""

    # -- the facts of the last answer ---------------------------------------------------------------------------------

    @property
    def has_mem_limit(self) -> bool:
        """Whether the driver has a pinned device memory limit, as far as known."""
        return PINNED_DEVICE_MEM_LIMIT in self._limits

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers of this daemon, and living servers of its dead predecessors."""
        faults, reported = self.control_log.serving.faults, self.control_log.serving.reported
        return (
            *(
                replace(each, faulted=faults.get(each.pid), fault_reported=reported.get(each.pid))
                for each in self._servers.values()
            ),
            *self.survivors.servers,
        )

    @property
    def clients(self) -> dict[ProcessIdentity, set[ProcessIdentity]]:
        """The clients of each server of this daemon."""
        return {identity: {*server.opened} for identity, server in self._servers.items()}

    @property
    def present(self) -> dict[ProcessIdentity, int | None]:
        """The processes that use the GPU through MPS: each client, with its server; each orphaned server, with None.

        An orphaned server cannot be asked for its clients, so it counts as having some unless NVML shows that it has
        none.
        """
        clients = {client: server.pid for server in self._servers.values() for client in server.opened}
        return {**clients, **dict.fromkeys(self.survivors.used)}

    @property
    def starting(self) -> list[int]:
        """The servers that do not report the limits of their clients yet, and may have started under other limits."""
        return [
            server.pid
            for identity, server in self._servers.items()
            if not server.lists_clients and clock.since_boot(identity.start_ticks) < self._in_force_since
        ]

    @property
    def quiet(self) -> list[ProcessIdentity]:
        """The servers that did not report their clients at the last answer of the daemon."""
        return [identity for identity, server in self._servers.items() if not server.lists_clients]

    @property
    def unforeseen(self) -> list[tuple[int, UnforeseenAnswer]]:
        """The servers that answer in a form that this mpsd does not know, with the answer."""
        return [(each.pid, each.unforeseen) for each in self._servers.values() if each.unforeseen is not None]

    def forget_server(self, server: ProcessIdentity) -> None:
        self._servers.pop(server, None)

    def forget(self) -> None:
        """Forget the answers of a daemon that is gone."""
        self.read_back, self.drift, self._servers, self._priority = None, (), {}, None
        self.has_client_priority = True  # the next one may be of another program, which is asked

    # -- the two conversations: set every limit, or only read them ----------------------------------------------------

    async def set(self, wanted: Limits) -> None:
        """Set every limit, the daemon's defaults and those of its servers, and read it back.

        That undoes the changes of others, and logs them. Raises ControlError as `ControlPipe.converse` does,
        LimitNotHeldError when a limit was not set, and ControlUnknownCommandError when the driver has no such limit.
        """
        foreign = self.control_log.foreign
        await self._query(wanted, apply=True)
        for server in self._servers.values():
            differs = drift.differing(wanted, server)
            if differs:
                raise LimitNotHeldError(
                    f"{' and '.join(differs)} of server {server.pid} could not be set",
                    hint="the control daemon's log has its reason",
                    limit=differs[0],
                )
        if self.drift:
            now, limits = clock.now(), [each.limit for each in self.drift]
            self.undone = (*self.undone, *(replace(each, undone=now) for each in self.drift))[-_MOST_UNDONE:]
            self.drift = ()
            self._bounded.info(EventName.LIMIT_DRIFT_ENDED, limits=limits, because="mpsd set it back")
        self.control_log.note_explained(foreign)

    async def read(self, wanted: Limits, own: Collection[ReadBack]) -> bool:
        """Read every limit back, log the changes of others, and return whether all are as wanted.

        `own` contains what mpsd itself set. Raises ControlError as `ControlPipe.converse` does.
        """
        known, foreign = {*self._servers}, self.control_log.foreign
        found = await self._query(wanted, apply=False)
        self.control_log.read()
        # A server that was not known before may have started under other limits: that is no change by others.
        servers = tuple(server for identity, server in self._servers.items() if identity in known)
        self._note_drift(wanted, found, servers, own)
        self.control_log.note_explained(foreign)
        return drift.are_in_force(wanted, found, self._servers.values()) and not self._priority

    def _note_drift(
        self, wanted: Limits, found: ReadBack, servers: tuple[Server, ...], own: Collection[ReadBack]
    ) -> None:
        """Note the changes of others, and log their beginning and end."""
        before, foreign, now = self.drift, self.control_log.unexplained, clock.now()
        self.drift = (
            *drift.drift(wanted, found, before, foreign, now, servers=servers, own=own),
            *drift.priority_drift(self._priority, before, foreign, now),
        )
        for each in self.drift:
            if each not in before:
                self._bounded.warning(
                    EventName.LIMIT_DRIFT, limit=each.limit, wanted=each.wanted, found=each.found, command=each.command
                )
        if before and not self.drift:
            self._bounded.info(EventName.LIMIT_DRIFT_ENDED, because="another program restored the limit")

    async def _query(self, wanted: Limits, *, apply: bool) -> ReadBack:
        """Ask for everything, after setting the limits if required; note the answers, and return the defaults."""
        # 1. One conversation asks for the defaults and the list of servers, and the servers that are known already for
        #    theirs. Another one asks the servers that are new in the list.
        # 2. Before the clients of a server are noted, the log is read if any is new: limit changes by others while a
        #    client connected count for that client.
        # 3. The error of a limit is raised last, because the servers and their clients are known nevertheless.
        talk, limits = Conversation(), wanted if apply else None
        defaults = {limit: self._ask_default(talk, limit, wanted, apply=apply) for limit in LIMITS}
        priority = self._ask_priority(talk, apply=apply)
        pids = talk.ask(commands.get_server_list())
        known = [_AskedServer(talk, identity, limits, self._limits) for identity in self._servers]
        await self._converse(talk)
        before, found = self.read_back, self._take_defaults(defaults)
        self._take_priority(priority)
        if before != found:
            self.read_back, self._in_force_since = found, clock.since_boot()
        reported = await self._ask_servers(pids.answer, known, limits)
        if any(not self.opened.has_all(identity, server) for identity, server in reported.items()):
            self.control_log.read()
        for each, served in self.clients.items():
            if each not in reported and not proc.lives(each):
                self.survivors.await_end((each,), served, f"server {each.pid} has ended")
        self._servers = {each: self.opened.note(each, server, before, found) for each, server in reported.items()}
        self.opened.forget_ended(self._servers)
        self._log_unforeseen()
        self.control_log.note_servers(reported)
        asked = [limit for limit in LIMITS if limit in self._limits or limit.wanted(wanted) is not None]
        return reading_of({limit: defaults[limit].answer for limit in asked})

    def _ask_default(self, talk: Conversation, limit: Limit, wanted: Limits, *, apply: bool) -> Pending[LimitValue]:
        """Ask for a default of the daemon, after setting it if required."""
        # A limit that is not wanted is removed only where there is one: an older driver does not know the command.
        there = self.read_back is not None and limit.found(self.read_back) is not None
        if apply and (there or limit.wanted(wanted) is not None):
            return talk.ask(limit.default_setting(wanted))
        return talk.ask(limit.ask_default())

    def _take_defaults(self, defaults: Mapping[Limit, Pending[LimitValue]]) -> ReadBack:
        """Return the defaults, as wanted or not; a driver without the commands has no such limit."""
        found = dict[Limit, LimitValue]()
        for limit, pending in defaults.items():
            with contextlib.suppress(ControlUnknownCommandError):
                found[limit] = pending.found
        self._limits = (*found,)
        return reading_of(found)

    def _ask_priority(self, talk: Conversation, *, apply: bool) -> Pending[int] | None:
        """Ask for the default priority of clients, after restoring it if others changed it; None before driver 535."""
        if not self.has_client_priority:
            return None
        return talk.ask(CLIENT_PRIORITY if apply and self._priority else CLIENT_PRIORITY.getter)

    def _take_priority(self, pending: Pending[int] | None) -> None:
        try:
            self._priority = None if pending is None else pending.answer
        except ControlUnknownCommandError:
            self._priority, self.has_client_priority = None, False

    async def _ask_servers(
        self, pids: tuple[int, ...], known: "list[_AskedServer]", limits: Limits | None
    ) -> dict[ProcessIdentity, Server]:
        """Ask the servers that are not `known` yet, and return what each of the listed ones reports."""
        talk, ours = Conversation(), {each.identity.pid for each in known}
        for identity in map(proc.identify, pids):
            if identity is not None and identity.pid not in ours:
                known.append(_AskedServer(talk, identity, limits, self._limits))
        if talk.pending:
            await self._converse(talk)
        listed = [each for each in known if each.identity.pid in pids]
        reports = {each.identity: each.report(self.canaries, self._servers.get(each.identity)) for each in listed}
        return {identity: server for identity, server in reports.items() if server is not None}

    async def _converse(self, talk: Conversation) -> None:
        """Hold a conversation, or raise its error with what keeps the daemon from it."""
        try:
            await self._pipe.converse(talk)
            self.control_log.expect(self._pipe.nonce)
        except (ControlBusyError, ControlUnresponsiveError) as error:
            paths = self._pipe_access.paths
            if most := self.control_log.descriptors_used_up:
                # A process that waits for the seat is connected as well, but does not occupy it.
                let_in = self._pipe_access.let_in.so_far
                error.detail += f"; all of its {most} descriptors are in use; had pipe access: {let_in}"
                name = paths.pipe_directory.name
                error.hint = f"no new client can reach it until it is replaced: mpsctl restart {name}"
            else:
                try:
                    error.detail += named(await connected_to(paths.control_sockets))
                except OSError as unknown:
                    error.detail += f"; the processes that are connected to it are unknown: {unknown.strerror}"
            raise

    def _log_unforeseen(self) -> None:
        """Log each form of an unforeseen answer once: a command's name, and an answer without its numbers."""
        for pid, (command, answer) in self.unforeseen:
            form = command.partition(" ")[0], _NUMBER.sub("N", answer)
            if form not in self._forms:
                self._forms = [*self._forms, form][-_MOST_FORMS:]
                self._bounded.warning(EventName.ANSWER_UNFORESEEN, server=pid, command=command, answer=answer)


class _AskedServer:
    """One server in a conversation, which may set its limits first: the questions to it, and its answers."""

    def __init__(
        self, talk: Conversation, identity: ProcessIdentity, wanted: Limits | None, limits: Iterable[Limit]
    ) -> None:
        """Send the questions; `limits` are those that the driver has."""
        self.identity, pid = identity, identity.pid
        if wanted is not None:
            for limit in limits:
                talk.ask(limit.set_on_server(pid, wanted))
        # The list of a busy server is empty like that of one without clients: its neighbours tell the two apart.
        self._limits = {limit: talk.ask(limit.ask_server(pid)) for limit in limits}
        self._clients = talk.ask(commands.get_client_list(pid))
        self._status = talk.ask(commands.get_server_status(pid))
        self._unforeseen: UnforeseenAnswer | None = None

    def report(self, canaries: Collection[int], last: Server | None) -> Server | None:
        """Return the server as reported, with the canaries apart; None when it is gone, or ended between two questions.

        A server that was busy has no limits here, and those of the clients of its `last` report that live.
        """
        if proc.start_ticks(self.identity.pid) != self.identity.start_ticks:
            return None
        status, limits, is_busy = None, None, False
        try:
            limits = reading_of({limit: self._value(pending) for limit, pending in self._limits.items()})
        except ControlError:
            is_busy = True
        if self._unforeseen:
            limits = None
        try:
            status = self._value(self._status)
        except ControlNoAnswerError:
            limits, is_busy = None, True
        except ControlError:  # drivers before 550 have no word for it
            pass
        try:
            listed = self._value(self._clients)
        except ControlError:
            return None
        lists_clients = listed is not None and not is_busy
        clients = [each for each in listed or () if each not in canaries]
        if not lists_clients and last is not None:
            clients += [each for each in living_of(last) if each not in clients]
        return Server(
            self.identity.pid,
            status,
            (*clients,),
            tuple(each for each in listed or () if each in canaries),
            limits=limits,
            is_known=lists_clients or (listed is not None and last is not None and last.is_known),
            lists_clients=lists_clients,
            unforeseen=self._unforeseen,
        )

    def _value(self, pending: Pending[T]) -> T | None:
        """Return the value of an answer; None, with a note, for one in a form that this mpsd does not know.

        Raises ControlError where there is no answer, or a refusal.
        """
        try:
            return pending.answer
        except ControlGarbledError:
            self._unforeseen = self._unforeseen or pending.unforeseen
            return None


class OpenedLimits:
    """The limits that were open to each client of one control daemon, as far as its answers and its log tell."""

    def __init__(self, control_log: ControlLog, bounded: BoundedLog) -> None:
        self._control_log, self._bounded = control_log, bounded
        self.left: Bounds | None = None
        """The limits that an earlier mpsd left, if they are known: they apply until the first conversation."""
        self._given: dict[ProcessIdentity, Bounds | None] = {}
        """By server, the bounds of the limits of its next client since it last reported them; None: unknown."""
        self._opened: dict[ProcessIdentity, Mapping[ProcessIdentity, Opened | None]] = {}
        """By server, also one that does not answer for a while, the limits that were open to each of its clients."""

    def has_all(self, server: ProcessIdentity, found: Server) -> bool:
        """Tell whether a server lists only clients that it listed before."""
        return {*found.clients} <= {each.pid for each in self._opened.get(server, ())}

    def note(self, identity: ProcessIdentity, server: Server, before: ReadBack | None, found: ReadBack) -> Server:
        """Note the limits open to a server's clients: new ones connected between the last conversation and this one.

        `before` and `found` are the daemon's defaults then and now, with which a server starts.
        """
        # 1. The bounds span the limits then and now, and what commands of others set in between.
        # 2. The log of an honest server proves which limits apply. Where it shows wider ones, it is unknown which do,
        #    because it is unknown whether this server is honest.
        # 3. They are unknown, too, where a command of another user may not have been seen, or an answer is unforeseen.
        last = self._given.get(identity, self.left if before is None else Bounds(before, before))
        foreign = ceiling.by_commands(self._control_log.unexplained, server.pid, fresh=identity not in self._given)
        meanwhile = ceiling.between(last, server.limits or found, foreign)
        given = self._control_log.serving.given.pop(server.pid, None)
        if given is not None and meanwhile is not None and widest_read_back(meanwhile.most, given) != meanwhile.most:
            facts = {"command": shown(meanwhile.most), "given": shown(given)}
            self._bounded.error(EventName.LIMITS_NOT_GIVEN, server=server.pid, **facts)
            meanwhile = None
        if not self._control_log.shows_all_commands or server.unforeseen is not None:
            meanwhile = None
        self._given[identity] = meanwhile if server.limits is None else Bounds(server.limits, server.limits)
        known = self._opened.get(identity, {})
        clients = (each for each in map(proc.identify, server.clients) if each is not None)
        now = {each: ceiling.opened(known.get(each), meanwhile, new=each not in known) for each in clients}
        self._opened[identity] = now
        return replace(server, opened=now)

    def forget_ended(self, present: Collection[ProcessIdentity]) -> None:
        """Forget the servers that have ended; those `present` have not."""
        for identity in self._opened.keys() - present:
            if proc.start_ticks(identity.pid) != identity.start_ticks:
                del self._opened[identity], self._given[identity]


class _Awaited(NamedTuple):
    """The clients of servers that end or have ended, and why: their contexts end with the servers."""

    servers: frozenset[ProcessIdentity]
    clients: frozenset[ProcessIdentity]
    because: str


class Survivors:
    """The living servers of the dead control daemons of one GPU.

    A server ends soon after its control daemon, and the contexts of its clients end with it, while their processes may
    live on (measured on 580). A server that is still there after that time is an orphan. It cannot be asked for its
    clients, but NVML shows whether any client of MPS is on the GPU.
    """

    def __init__(self, usage: Callable[[], Awaitable[Reading[GpuUsage]]], log: Logger) -> None:
        """`usage` reads the GPU."""
        self._usage = usage
        self._log = log
        self.lost = Signal[Collection[ProcessIdentity], str]()
        """The contexts of these clients have ended with their server, for this reason."""
        self._servers: dict[ProcessIdentity, float] = {}
        """Since when each is known to have outlived its control daemon, in seconds of the monotonic clock."""
        self._orphans: set[ProcessIdentity] = set()
        """Those that have had the time to end, and are reported."""
        self._awaited: list[_Awaited] = []
        self._unused = False
        """Whether NVML has shown that no orphan has a client."""
        self._count_due = 0.0

    @property
    def servers(self) -> tuple[Server, ...]:
        """The survivors, each with whether it may still be about to end."""
        return tuple(Server(each.pid, orphan=True, dying=each not in self._orphans) for each in self._servers)

    @property
    def all(self) -> tuple[ProcessIdentity, ...]:
        """The survivors, those that may still be about to end included."""
        return (*self._servers,)

    @property
    def used(self) -> tuple[ProcessIdentity, ...]:
        """The survivors that may have clients; one that may still be about to end counts."""
        return tuple(each for each in self._servers if not (self._unused and each in self._orphans))

    def add(self, found: Iterable[ProcessIdentity]) -> None:
        """Add servers whose control daemon is dead, as far as they live."""
        for each in found:
            if each not in self._servers and proc.lives(each):
                self._servers[each] = clock.monotonic()

    def await_end(self, servers: Iterable[ProcessIdentity], clients: Iterable[ProcessIdentity], because: str) -> None:
        """Note clients whose contexts end with the last of these servers, and why."""
        if lost := frozenset(clients):
            self._awaited.append(_Awaited(frozenset(servers), lost, because))

    async def check(self) -> None:
        """Report the orphans, and the clients whose servers have ended; find out whether orphans have clients.

        They have none if NVML shows no client on the GPU.
        """
        now = clock.monotonic()
        self._servers = {each: since for each, since in self._servers.items() if proc.lives(each)}
        self._orphans &= self._servers.keys()
        for each, since in self._servers.items():
            if each not in self._orphans and now - since >= SERVER_END:
                self._orphans.add(each)
                self._unused, self._count_due = False, 0.0
                self._log.warning(EventName.SERVER_ORPHANED, server=each.pid)
        for ended in [each for each in self._awaited if not any(map(proc.lives, each.servers))]:
            self._awaited.remove(ended)
            self.lost.send(ended.clients, ended.because)
        if self._orphans and now >= self._count_due:
            usage = await self._usage()
            self._count_due = clock.monotonic() + _COUNTS
            self._unused = isinstance(usage, Known) and not living_clients(usage.value)


def living_of(server: Server) -> Iterator[int]:
    """Yield the pids of a server's clients that have not ended; those that mpsd cannot see, as 0, count as living."""
    yield from (0 for _ in range(server.clients.count(0)))
    yield from (each.pid for each in server.opened if proc.lives(each))


def living_clients(usage: GpuUsage) -> set[int]:
    """Return the living clients of MPS on a GPU: NVML may list one that has ended."""
    return {pid for pid in usage.clients if proc.live_ticks(pid) is not None}
