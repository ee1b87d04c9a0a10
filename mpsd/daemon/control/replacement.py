"""The replacement of an unused control daemon for its next user, or because its server may serve no client.

Files and connections that the last user still has open do not lead to the next daemon. Servers that their users have
stopped are ended here once they are unused, which is a reason to replace their control daemon as well.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Final

from mpsd.core import health
from mpsd.core.enforcement import violations
from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED, State
from mpsd.core.model import DaemonProcess, GpuUsage, Known, ProcessIdentity, Reading, StoppedServer
from mpsd.core.signal import Signal
from mpsd.core.supervision import stopped
from mpsd.daemon.control.drainer import DaemonLeases, Drainer
from mpsd.daemon.control.observer import Observer, living_clients, living_of
from mpsd.daemon.control.pipe_access import PipeAccess, connected_to
from mpsd.daemon.control.state import Lifecycle, Questions
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.system import clock
from mpsd.system.processes import proc, process, process_table

_RECOVERY: Final = 5.0
"""Seconds for a server to recover from a fatal fault after its last client: it takes up to 0.4 s (measured on 580)."""

_SPACING: Final = 0.5
"""Seconds between two checks for stopped servers."""


class Replacement:
    """Whether one control daemon must be replaced for its next user, and whether that is in progress."""

    def __init__(
        self,
        name: str,
        *,
        lifecycle: Lifecycle,
        questions: Questions,
        pipe_access: PipeAccess,
        observer: Observer,
        drainer: Drainer,
        leases: DaemonLeases,
    ) -> None:
        self._name = name
        self._lifecycle, self._questions = lifecycle, questions
        self._pipe_access, self._leases = pipe_access, leases
        self._observer, self._drainer = observer, drainer
        self.requested = Signal[()]()
        """The daemon is distrusted for another reason, or no longer."""
        self.changed = Signal[()]()
        """A replacement is due no longer: the daemon stays, and callers that wait for a new one continue."""
        self._next_user: tuple[int, Callable[[], bool]] | None = None
        """The next user, and whether the daemon was asked for its clients since."""
        self._distrusted: str | None = None
        """Why its server may serve no client, while there is reason to believe that."""
        self._is_answered: Callable[[], bool] | None = None
        """Tells whether the daemon was asked for its clients since none was left."""
        self._deserted_at = inf
        """Since when the daemon has been deserted although it is distrusted (monotonic clock)."""
        self.is_running = False
        """Whether the daemon is being replaced."""

    @property
    def is_due(self) -> bool:
        """Whether the daemon must be replaced, and was not asked for its clients yet."""
        return self._next_user is not None

    @property
    def _is_used(self) -> bool:
        """Whether the daemon has, or may have, any client."""
        return bool(self._observer.present) or self._may_have_unseen_clients

    @property
    def _may_have_unseen_clients(self) -> bool:
        """Whether the daemon may have clients that mpsd does not see.

        A client of another pid namespace is listed as pid 0 (R580), and mpsd cannot see whether that process lives. A
        server that has been busy since before mpsd started has not named its clients yet.
        """
        return any(0 in each.clients or not each.is_known for each in self._observer.servers)

    def replace_for(self, uid: int) -> bool:
        """Request a replacement where the last user was another one, and is gone; tell whether one is in progress.

        An open FIFO of the log, or an open connection, of the last user does not lead to the daemon of the next user.
        A replacement that is only due counts as in progress, too.
        """
        is_free = self._lifecycle.state is State.READY and not self._is_used and not self._drainer.desired.waits
        if self._next_user is None and is_free and self._pipe_access.was_anothers(uid):
            # Its last user cannot connect any more, so the answer to this question names every client.
            self._next_user = uid, self._questions.ask()
        return self.is_running or self.is_due

    def begin(self) -> int | None:
        """Begin once the daemon has named no client, and return its next user; None when it is not replaced now."""
        if self._next_user is None or not self._next_user[1]():
            return None
        (uid, _), self._next_user = self._next_user, None
        if self._lifecycle.state is not State.READY or self._is_used:
            self.changed.send()
            return None
        self.is_running = True
        return uid

    def distrust(self, because: str | None) -> None:
        """Replace the daemon as soon as it is unused, because its server may serve no client; None withdraws that."""
        if self._distrusted != because:
            self._distrusted = because
            self.requested.send()

    def begin_distrusted(self) -> str | None:
        """Begin once a distrusted daemon is unused, and return why; None when it is not replaced now.

        A daemon is distrusted, too, whose server answers in an unforeseen form, or does not recover from a fault, since
        nothing is granted on it. An operator's command that waits for the daemon decides about it instead. Its use is
        judged by the living processes, and not by the server's list.
        """
        if self._drainer.desired.waits:
            return None
        answers = (health.unforeseen(*each) for each in self._observer.unforeseen)
        because = self._distrusted or next(answers, None) or self._fault
        # 1. No reason is left, or the daemon does not answer, or is used: everything begins anew.
        # 2. A fault should end with its last client, so the server gets a moment to recover.
        # 3. The daemon is asked once more, because a client may have connected meanwhile. The next call sees such a
        #    client in step 1, and otherwise replaces the daemon.
        if because is None or self._lifecycle.state not in ANSWERED or not self.is_deserted:
            self._is_answered, self._deserted_at = None, inf
            return None
        self._deserted_at = min(self._deserted_at, clock.monotonic())
        if because == self._fault and clock.monotonic() < self._deserted_at + _RECOVERY:
            return None
        if self._is_answered is None:
            self._is_answered = self._questions.ask()
        if not self._is_answered():
            return None
        self._is_answered, self.is_running = None, True
        return because

    @property
    def is_deserted(self) -> bool:
        """Whether the daemon has no lease and no living process left."""
        return not any(self._leases.on(self._name)) and not self._has_clients

    @property
    def _has_clients(self) -> bool:
        """Whether a client of the daemon, or a server that outlived one, lives, or may live unseen."""
        return self._may_have_unseen_clients or any(proc.lives(each) for each in self._observer.present)

    @property
    def _fault(self) -> str | None:
        """That a server handles a fatal fault, which should end with its last client; None where none does."""
        faulted = (each.pid for each in self._observer.servers if each.faulted is not None)
        return next((f"server {each} handles a fatal GPU fault, and has no client left" for each in faulted), None)

    @property
    def has_to_force(self) -> bool:
        """Whether a daemon must be forced to quit: a wedged or faulty server may never exit, and has no client left."""
        return (self._distrusted or self._fault) is not None and not self._has_clients

    def follow(self, state: State) -> None:
        self.is_running = self.is_running and state in {State.STOPPING, State.DOWN, State.STARTING}
        if state is not State.READY:
            self._next_user = None
        if state is State.DOWN:
            self._distrusted = None  # that was about the server of a daemon that is gone

    async def is_blocked_by_last_user(self) -> bool:
        """Tell whether a daemon does not answer because of its last user, and has no client.

        That user has its one seat, or has used up the daemon's descriptors: no process can have become a client since.
        """
        if not self.is_deserted:
            return False
        if self._observer.control_log.descriptors_used_up is not None:
            return self._pipe_access.users is not None
        with contextlib.suppress(OSError):
            connected = await connected_to(self._pipe_access.paths.control_sockets)
            return self._pipe_access.are_last_users(connected.values())
        return False


class StoppedServers:
    """The stopped and the hung servers of one control daemon, and the stopped ones of its dead predecessors."""

    def __init__(
        self,
        name: str,
        observer: Observer,
        leases: DaemonLeases,
        *,
        usage: Callable[[], Awaitable[Reading[GpuUsage]]],
        bounded: BoundedLog,
    ) -> None:
        """Take the parts; `usage` reads the GPU, and `bounded` is for entries that a user can cause in a loop."""
        self._name = name
        self._observer, self._leases = observer, leases
        self._usage = usage
        self._log = bounded
        self._found: dict[ProcessIdentity, StoppedServer] = {}
        self._due = 0.0
        self.changed = Signal[()]()
        """`of_daemon` returns something else."""

    @property
    def of_daemon(self) -> tuple[StoppedServer, ...]:
        """Those of the present control daemon."""
        return tuple(each for identity, each in self._found.items() if identity not in self._observer.survivors.all)

    @property
    def trouble(self) -> str:
        """Why no client is served at this very moment; empty where no known server is stopped."""
        try:
            pids = [f"{each.pid}" for each in self._observer.clients if _is_stopped(each)]
        except OSError as error:  # for example without descriptors
            return f"it is unknown whether its server is stopped: {error.strerror}"
        return f"its server {', '.join(pids)} is stopped (SIGSTOP)" if pids else ""

    async def check(self, daemon: DaemonProcess | None, *, silent: float, is_closed: bool) -> str:
        """Report the stopped servers, and end the unused ones; return why the control daemon has to be replaced.

        `silent` says for how many seconds the control daemon has not answered, or has been ending. It may have a server
        then that it never named, and one that is not stopped can be the cause: its user can make it hang in other ways.
        So can one that has not reported its clients; it is ended only where no other uids may use it (`is_closed`).
        """
        if clock.monotonic() < self._due:
            return ""
        self._due = clock.monotonic() + _SPACING
        known = {*self._observer.clients, *self._observer.survivors.all, *self._found}
        unnamed = set[ProcessIdentity]()
        if daemon is not None and silent and not any(map(_is_stopped, known)):
            unnamed = {*await asyncio.to_thread(process_table.in_sessions, [daemon.identity])}
        self._note(known | unnamed)
        late = [each for each, server in self._found.items() if clock.monotonic() - server.at >= stopped.PATIENCE]
        if daemon is not None and not self._found:
            late = [each for each in self._observer.quiet if is_closed and _age(each) >= stopped.HANGS]
            if silent >= stopped.HANGS:
                late += [each for each in unnamed if proc.parent(each.pid) == daemon.identity.pid]
            if late and _is_stopped(daemon.identity):
                late = []
        if not late:
            return ""
        usage, many_users = await self._usage(), daemon is None or daemon.many_users
        return "; ".join(filter(None, [self._end_unused(each, usage, many_users=many_users) for each in late]))

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
            self.changed.send()

    def _end_unused(self, identity: ProcessIdentity, usage: Reading[GpuUsage], *, many_users: bool) -> str:
        """End a server if nothing uses it, and say so; otherwise, note what does."""
        server = self._found.get(identity)
        uid = proc.real_uid(identity.pid) if server is None else server.uid
        if uid is None or (server is None and proc.is_trusted(uid)):
            return ""  # no user can make a server of root hang
        leases = {each.id: violations.users_of(each) for each in self._leases.on(self._name)}
        servers = [each for each in self._observer.servers if each.pid == identity.pid]
        clients = {client for each in servers for client in living_of(each)}
        if isinstance(usage, Known):
            # A hung server may have clients that it has never named, and that mpsd does not see.
            shown = usage.value.clients if server is None else living_clients(usage.value)
            clients |= shown - self._observer.canaries
        because = stopped.used_by(uid, leases, clients, usage, many_users=many_users)
        if not because:
            try:
                return self._end(identity, uid)
            except PermissionError as error:
                because = f"mpsd has no permission to end it: {error.strerror} (CAP_KILL)"
        if server is not None and because != server.used_by:
            self._found[identity] = replace(server, used_by=because)
            self.changed.send()
        return ""

    def _end(self, identity: ProcessIdentity, uid: int) -> str:
        """End a server that nothing uses, and say so. Raises PermissionError."""
        living = process.adopt(identity)
        if living is None:
            return ""
        try:
            if identity in self._found and not _is_stopped(identity):
                return ""
            living.signal(signal.SIGKILL)
        finally:
            living.close()
        self._observer.forget_server(identity)
        did = "was stopped" if self._found.pop(identity, None) else "served nobody any more"
        self.changed.send()
        because = f"server {identity.pid} of uid {uid} {did}, and no lease and no client is left for it"
        self._log.warning(EventName.SERVER_KILLED, server=identity.pid, uid=uid, because=because)
        return because


def _age(server: ProcessIdentity) -> float:
    return clock.since_boot() - clock.since_boot(server.start_ticks)


def _is_stopped(server: ProcessIdentity) -> bool:
    return proc.is_stopped(server.pid) and proc.start_ticks(server.pid) == server.start_ticks
