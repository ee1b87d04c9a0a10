"""The servers of one GPU that their users have stopped: reported, and ended where no lease and no client is left."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace

from mpsd.core.enforcement import change_of_user
from mpsd.core.events import EventName
from mpsd.core.model import DaemonProcess, GpuUsage, Known, ProcessIdentity, Reading, StoppedServer
from mpsd.core.supervision import stopped
from mpsd.daemon.control.drainer import DaemonLeases
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.survivors import living_clients
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, proc, process, process_table


class StoppedServers:
    """The stopped servers of one control daemon, and of its dead predecessors."""

    def __init__(
        self,
        name: str,
        observer: Observer,
        leases: DaemonLeases,
        *,
        usage: Callable[[], Awaitable[Reading[GpuUsage]]],
        changed: Callable[[], None],
        log: Logger,
    ) -> None:
        """Take the parts; `usage` reads the GPU, and `changed` is called when `of_daemon` returns something else."""
        self._name = name
        self._observer, self._leases = observer, leases
        self._usage, self._changed = usage, changed
        self._log = BoundedLog(log)  # a user can stop its server, and continue it, in a loop
        self._found: dict[ProcessIdentity, StoppedServer] = {}

    @property
    def of_daemon(self) -> tuple[StoppedServer, ...]:
        """Those of the present control daemon."""
        return tuple(each for identity, each in self._found.items() if identity not in self._observer.survivors.all)

    @property
    def trouble(self) -> str:
        """Why no client is served at this very moment; empty where no known server is stopped."""
        try:
            pids = [f"{each.pid}" for each in self._observer.identities if _is_stopped(each)]
        except OSError as error:  # for example without descriptors
            return f"it is unknown whether its server is stopped: {error.strerror}"
        return f"its server {', '.join(pids)} is stopped (SIGSTOP)" if pids else ""

    async def look(self, daemon: DaemonProcess | None, *, silent: bool) -> str:
        """Report the stopped servers, and end the unused ones; return why the control daemon has to be replaced.

        `silent` says whether the control daemon does not answer, so that it may have a server that it never named.
        """
        self._log.settle()
        known = {*self._observer.identities, *self._observer.survivors.all, *self._found}
        if daemon is not None and silent and not any(map(_is_stopped, known)):
            known |= {*await asyncio.to_thread(process_table.in_sessions, [daemon.identity])}
        self._note(known)
        late = [each for each, server in self._found.items() if clock.monotonic() - server.at >= stopped.PATIENCE]
        if not late:
            return ""
        usage, many_users = await self._usage(), daemon is None or daemon.many_users
        return "; ".join(filter(None, [self._settle(each, usage, many_users=many_users) for each in late]))

    def _note(self, known: Iterable[ProcessIdentity]) -> None:
        """Log which servers were stopped or continued since the last time."""
        before, now = self._found, {each for each in known if _is_stopped(each)}
        self._found = {each: server for each, server in before.items() if each in now}
        for each in now - before.keys():
            uid = proc.real_uid(each.pid)
            if uid is not None:
                self._found[each] = StoppedServer(each.pid, uid, clock.now(), clock.monotonic())
                self._log.warning(EventName.SERVER_STOPPED, server=each.pid, uid=uid)
        for each in before.keys() - now:
            if proc.lives(each):
                self._log.info(EventName.SERVER_CONTINUED, server=each.pid, uid=before[each].uid)
        if before.keys() != self._found.keys():
            self._changed()

    def _settle(self, identity: ProcessIdentity, usage: Reading[GpuUsage], *, many_users: bool) -> str:
        """End a server if nothing uses it, and say so; otherwise, note what does."""
        server = self._found[identity]
        leases = {each.id: change_of_user.users(each) for each in self._leases.on(self._name)}
        clients = {*self._listed(identity)}
        if isinstance(usage, Known):
            clients |= living_clients(usage.value) - self._observer.canaries
        because = stopped.used_by(server.uid, leases, clients, usage, many_users=many_users)
        if not because:
            try:
                return self._end(identity, server)
            except PermissionError as error:
                because = f"mpsd has no permission to end it: {error.strerror} (CAP_KILL)"
        if because != server.used_by:
            self._found[identity] = replace(server, used_by=because)
            self._changed()
        return ""

    def _end(self, identity: ProcessIdentity, server: StoppedServer) -> str:
        """End a server that nothing uses, and say so. Raises PermissionError."""
        living = process.adopt(identity)
        if living is None or not _is_stopped(identity):
            return ""
        try:
            living.signal(signal.SIGKILL)
        finally:
            living.close()
        self._observer.forget(identity)
        del self._found[identity]
        self._changed()
        because = f"server {server.pid} of uid {server.uid} was stopped, and no lease and no client is left for it"
        self._log.warning(EventName.SERVER_KILLED, server=server.pid, uid=server.uid, because=because)
        return because

    def _listed(self, identity: ProcessIdentity) -> Iterator[int]:
        """Yield the living clients of a server, by its last answer; 0 for one that mpsd does not see."""
        for server in self._observer.servers:
            if server.pid == identity.pid and 0 in server.clients:
                yield 0
        for client in self._observer.clients.get(identity, ()):
            if proc.lives(client):
                yield client.pid


def _is_stopped(server: ProcessIdentity) -> bool:
    return proc.is_stopped(server.pid) and proc.start_ticks(server.pid) == server.start_ticks
