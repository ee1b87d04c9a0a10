"""Who can reach which control daemon, as the leases say: opened before a grant is told, closed when the last one ends.

Any local user who can connect to a control daemon's socket can be its client, and take its only seat; drivers 470 and
535 obey any of them (from 550 on others may not change defaults). So the way there is what is guarded: the pipe
directory, and the socket too, since a process that has opened the socket with O_PATH can connect to it later, however
closed the directory is by then (both measured: docs/enforcement.md).

What else it makes there it opens to everybody: the lock that its successor needs, its pid file, and the FIFO `log` that
carries its own log and that of its servers. Whoever reads the FIFO takes lines away, and one byte that is written to it
ends the log (measured, all versions). A server runs as its client's uid and writes there; with many users it runs as
root.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from mpsd.core.enforcement import access
from mpsd.core.errors import PipeAccessError
from mpsd.core.model import DaemonProcess, Lease
from mpsd.core.reload import LiveSettings
from mpsd.core.supervision.suspects import Crash
from mpsd.daemon.control.death_tally import LetInRecord
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import acl, process_table
from mpsd.system.acl import EXECUTE, READ, WRITE, Acl
from mpsd.system.rundir import DaemonPaths


class PipeAccess:
    """The way to one control daemon: who is let in there is decided by `wanted`, and written here and nowhere else."""

    def __init__(
        self,
        paths: DaemonPaths,
        wanted: Callable[[], frozenset[int] | None],
        crashed: Callable[[Crash], Collection[int]],
        log: Logger,
    ) -> None:
        """`wanted` returns the uids to be let in now, beside root's and mpsd's own, or None for everybody.

        `crashed` is told of each suspect death, and returns the uids that are shut out for it.
        """
        self.paths = paths
        self.let_in = LetInRecord(paths, crashed, log)
        self._many_users: bool | None = None
        """Whether the control daemon serves many users; None before there is one."""
        self._admitted = wanted
        self._log = log
        self._latest: tuple[object, tuple[tuple[Path, Acl], ...]] = None, ()
        """What `_acls` returned last, since it is asked for every second, and for what."""
        self._is_shut = self._was_shut()
        self._sure = False
        """Whether `_held` was written and read back, and nothing has failed since."""
        self._held: frozenset[int] | None = frozenset()

    def _was_shut(self) -> bool:
        """Tell whether an earlier mpsd let nobody in, as until the limits hold: it may have died before that."""
        path, closed = self._acls(frozenset())[0]
        try:
            return acl.read(path) == closed
        except OSError:
            return False  # there is nothing yet, or nothing that can be read: a start, or a look, says so

    def shut(self, *, many_users: bool) -> None:
        """Let nobody in until `admit`: a control daemon that starts has no limits yet, and makes its lock.

        `many_users` tells whether it is to serve many users. Raises PipeAccessError.
        """
        self._is_shut, self._many_users = True, many_users
        self.hold()

    def adopted(self, daemon: DaemonProcess) -> None:
        """Take up who was let in to a control daemon that an earlier mpsd started."""
        self._sure, self._many_users = False, daemon.many_users
        self.let_in.resume(daemon.identity)

    def admit(self) -> None:
        """Let those in who are wanted, now that the limits hold. Raises PipeAccessError."""
        self._is_shut = False
        self.hold()

    def _wanted(self) -> frozenset[int] | None:
        return frozenset() if self._is_shut else self._admitted()

    @property
    def users(self) -> frozenset[int] | None:
        """The uids that a control daemon which serves one user at a time has let in; None where it may be anybody."""
        let_in = self.let_in.let_in
        is_known = self._many_users is False and not let_in.everybody and not let_in.others
        return frozenset(let_in.uids) if is_known and let_in.uids else None

    def was_anothers(self, uid: int) -> bool:
        """Tell whether the control daemon, which serves one user at a time, has let in another uid before this one.

        Where it serves many, or is open to everybody, it is all of theirs at any time.
        """
        let_in = self.let_in.let_in
        if self._many_users is not False or let_in.everybody:
            return False
        return let_in.others or let_in.uids not in {(), (uid,)}

    def are_last_users(self, uids: Collection[int | None]) -> bool:
        """Tell whether all of these are uids that a control daemon let in which serves one user at a time."""
        let_in = self.let_in.let_in
        return self._many_users is False and not let_in.everybody and bool(uids) and {*uids} <= {*let_in.uids}

    def open(self, uid: int) -> None:
        """Let a uid in that is wanted by now. Raises PipeAccessError."""
        if self._sure and (self._held is None or uid in self._held):
            return
        if not self.hold():
            raise PipeAccessError(
                f"{self.paths.control_socket} is gone, so uid {uid} cannot reach the control daemon",
                hint="try again in a moment; for its state: mpsctl daemons",
                limit="enforcement.unadmitted",
            )

    def close(self) -> None:
        """Let nobody in any more who is not wanted. What fails is told, and tried again at the next look."""
        if self._many_users is None or (self._sure and self._held == self._wanted()):
            return
        try:
            self.hold()
        except PipeAccessError as error:
            self._log.error(EventName.PIPE_ACCESS_NOT_HELD, because=error.detail)

    def hold(self) -> bool:
        """Let in just those who are wanted, and read it back; False where there is nothing yet to be let in to.

        Raises PipeAccessError.
        """
        wanted = self._wanted()
        self.let_in.note(wanted)
        before = dict(self._acls(self._held)) if self._sure and self._held != wanted else {}
        self._sure, self._held = False, wanted
        for path, meant in self._acls(wanted):
            try:
                # Where others are let in so far than are wanted now, there is no use in asking first.
                found = None if before.get(path, meant) != meant else acl.read(path)
                if found != meant:
                    acl.write(path, meant)
                    found = acl.read(path)
            except FileNotFoundError:
                if path in {self.paths.pipe_directory, self.paths.control_socket}:
                    return False
                continue  # nobody can open what is not there, and older drivers make no pid file
            except OSError as error:
                raise self._failed(path, meant, error.strerror or str(error)) from error
            if found != meant:
                raise self._failed(path, meant, f"it reads back as {acl.text(found)}")
        self._sure = True
        return True

    def look(self) -> bool:
        """See whether somebody else has changed who is let in, and put it back; False when that failed."""
        try:
            if not (self._sure and self._held == self._wanted() and self._is_unchanged()):
                self.hold()
        except (OSError, PipeAccessError):
            return False
        return True

    def _is_unchanged(self) -> bool:
        """Tell whether every file is as it was written, and log those that others have changed. Raises OSError."""
        is_unchanged = True
        for path, meant in self._acls(self._held):
            try:
                if acl.is_in_force(path, meant):
                    continue
                found = acl.read(path)
            except FileNotFoundError:
                is_unchanged = is_unchanged and path not in {self.paths.pipe_directory, self.paths.control_socket}
                continue
            is_unchanged = False
            facts = {"wanted": acl.text(meant), "found": acl.text(found)}
            self._log.warning(EventName.PIPE_ACCESS_DRIFT, path=str(path), **facts)
        return is_unchanged

    def _acls(self, uids: frozenset[int] | None) -> tuple[tuple[Path, Acl], ...]:
        """Return what each file is to have: what its owner may do with it, and what those may who are let in."""
        if self._latest[0] != (uids, self._many_users):
            servers_write = frozenset() if self._many_users else uids
            acls = tuple(
                (path, acl.public(owner, others) if users is None else acl.private(owner, users, others))
                for path, owner, users, others in (
                    (self.paths.pipe_directory, READ | WRITE | EXECUTE, uids, READ | EXECUTE),
                    (self.paths.control_socket, READ | WRITE, uids, READ | WRITE),
                    (self.paths.log_fifo, READ | WRITE, servers_write, WRITE),
                    (self.paths.control_lock, READ | WRITE, frozenset(), 0),
                    (self.paths.pid_file, READ | WRITE, frozenset(), 0),
                )
            )
            self._latest = (uids, self._many_users), acls
        return self._latest[1]

    @staticmethod
    def _failed(path: Path, meant: Acl, because: str) -> PipeAccessError:
        return PipeAccessError(
            f"the pipe access of {path} cannot be set to {acl.text(meant)}: {because}",
            hint="check that its file system supports POSIX ACLs, and that mpsd's user namespace maps each uid",
            limit="enforcement.unadmitted",
        )


class Quarantine(Protocol):
    """Who is shut out of all control daemons, and who takes note of crashes."""

    @property
    def uids(self) -> Collection[int]:
        """The uids that are quarantined."""

    def crashed(self, crash: Crash) -> Collection[int]:
        """Take note of a crash; return the uids that are quarantined for it."""


class NodePipeAccess:
    """Who may reach each control daemon of the node."""

    def __init__(
        self,
        paths: Callable[[str], DaemonPaths],
        holders: Callable[[str], Collection[int]],
        quarantine: Quarantine,
        *,
        settings: LiveSettings,
        log: Logger,
    ) -> None:
        """`paths` returns where a daemon's files are, `holders` the uids that hold a lease on a GPU now."""
        self._paths = paths
        self._holders = holders
        self._quarantine = quarantine
        self._settings = settings
        self._log = log
        self._accesses: dict[str, PipeAccess] = {}
        self._canaries: dict[str, int] = {}
        """By GPU, the uid of a canary that is out."""
        settings.follow(lambda _: self.apply())

    def of(self, name: str, gpu: str) -> PipeAccess:
        """Return the access to a GPU's control daemon, which follows the leases from now on."""
        if name not in self._accesses:
            wanted, log = partial(self._wanted, gpu), self._log.bind(daemon=name)
            self._accesses[name] = PipeAccess(self._paths(name), wanted, self._quarantine.crashed, log)
        return self._accesses[name]

    def _wanted(self, gpu: str) -> frozenset[int] | None:
        unadmitted, own = self._settings.current.unadmitted, process_table.own_uid()
        canary = [self._canaries[gpu]] if gpu in self._canaries else []
        return access.admitted(unadmitted, {*self._holders(gpu), *canary}, own, self._quarantine.uids)

    @contextlib.contextmanager
    def opened_for_canary(self, name: str, gpu: str, uid: int) -> Iterator[None]:
        """Let a canary of this uid in, whose server is there, until this is left. Raises PipeAccessError."""
        self._canaries[gpu] = uid
        try:
            if not _is_let_in(uid):
                self._accesses[name].open(uid)
            yield
        finally:
            del self._canaries[gpu]
            self._accesses[name].close()

    def open(self, lease: Lease) -> None:
        """Let a lease's uid in wherever it was granted something. Raises PipeAccessError."""
        if _is_let_in(lease.owner.uid):
            return
        for share in lease.shares:
            self._accesses[share.daemon].open(lease.owner.uid)

    def close(self, lease: Lease) -> None:
        """Let the uid of a lease that has ended in no more, unless it has another lease there."""
        if _is_let_in(lease.owner.uid):
            return
        for share in lease.shares:
            if share.daemon in self._accesses:  # the GPU of a lease of an earlier mpsd may be gone
                self._accesses[share.daemon].close()

    def apply(self) -> None:
        """Admit to each control daemon the uids that the leases and the settings name, and no others."""
        for each in self._accesses.values():
            each.close()


def _is_let_in(uid: int) -> bool:
    """Tell whether a uid is let in whatever it holds: root's, or mpsd's own."""
    return uid in {0, process_table.own_uid()}
