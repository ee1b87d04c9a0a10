"""Pipe access to each control daemon, by the leases: opened before a grant is answered, closed with the last lease.

Any local user who can connect to a control daemon's socket can be its client, and take its only seat; drivers 470 and
535 obey any such user (from 550 on other users may not change defaults). mpsd therefore guards the access: the pipe
directory, and the socket too, because a process that has opened the socket with O_PATH can connect to it later, however
closed the directory is by then (both measured: docs/internals/enforcement.md).

The control daemon opens its other files there to all users: the lock that its successor needs, its pid file, and the
FIFO `log` that carries its own log and that of its servers. A process that reads the FIFO takes lines away, and one
byte that is written to it ends the log (measured, all versions). A server runs as its client's uid and writes there;
with many users it runs as root.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import ceiling
from mpsd.core.errors import PipeAccessError
from mpsd.core.events import EventName
from mpsd.core.model import DaemonProcess, Lease, ProcessIdentity, Who
from mpsd.core.reload import LiveSettings
from mpsd.core.supervision import suspects
from mpsd.core.supervision.suspects import Crash, LetIn
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system.files import acl
from mpsd.system.files.acl import EXECUTE, READ, WRITE, Acl
from mpsd.system.files.rundir import DaemonPaths
from mpsd.system.processes import control_groups, proc, process_table
from mpsd.system.sockets import credentials, sock_diag

_MOST_NAMED: Final = 8
"""Maximum connected processes that a sentence names."""


class Admitted(NamedTuple):
    """The processes that have access, beside those of root and of mpsd's own uid."""

    uids: frozenset[int] | None = frozenset()
    """None for all uids."""
    group: int | None = None
    """A group whose members have access, whatever their uid is."""


class Quarantine(Protocol):
    """The quarantined uids and control groups, and the record of crashes."""

    @property
    def uids(self) -> Collection[int]: ...

    def remaining_groups(self) -> Collection[str]:
        """Return the quarantined control groups that exist: nothing shuts them out."""

    def crashed(self, crash: Crash) -> Collection[Who]:
        """Record a crash; return who is quarantined for it."""


class _LetIn(Struct, forbid_unknown_fields=True):
    process: ProcessIdentity
    let_in: LetIn


class LetInRecord:
    """Who had pipe access to the running control daemon, at any time since it started."""

    def __init__(self, paths: DaemonPaths, leases: Callable[[], Iterable[Lease]], log: Logger) -> None:
        """Take the files of the daemon; `leases` returns the leases on it."""
        self._leases = leases
        self._control_socket = paths.control_socket
        self.daemon = paths.pipe_directory.name
        """The name of the control daemon."""
        self._record = Record(paths.let_in, _LetIn, log)
        self._process: ProcessIdentity | None = None
        self.so_far = LetIn()

    def begin(self, process: ProcessIdentity) -> None:
        """Begin the record of a control daemon that was just started: only root, in containers too, has access yet."""
        self._process, self.so_far = process, LetIn(groups=self._contained())
        self._write()

    def resume(self, process: ProcessIdentity) -> None:
        """Restore an earlier mpsd's record of an adopted control daemon, and add the uids in its access list.

        Where there is no readable record, there may have been other uids.
        """
        stored = self._record.load()
        noted = stored.let_in if stored is not None and stored.process == process else None
        try:
            now = [each.who for each in acl.read(self._control_socket) if each.tag == acl.Tag.USER]
        except OSError:
            now = []
        self._process, before = process, self.so_far
        found = (noted or LetIn(others=True)).and_({*now, *before.uids}, (*before.groups, *self._contained()))
        self.so_far = found.and_(None) if before.everybody else found
        self._write()

    def note(self, uids: frozenset[int] | None) -> None:
        """Record the uids that have pipe access from now on, None for all; call it before they have access."""
        if (uids is None and not self.so_far.everybody) or (uids is not None and not uids <= {*self.so_far.uids}):
            self.so_far = self.so_far.and_(uids)
            self._write()

    def note_lease(self, lease: Lease) -> None:
        """Record the control groups of a lease whose uid no access list keeps out; call it before it is answered."""
        known = self.so_far.groups
        if new := _contained(lease).difference(known):
            there = filter(control_groups.may_exist, known) if len(known) + len(new) > suspects.MOST_GROUPS else known
            self.so_far = replace(self.so_far, groups=()).and_(groups=(*there, *new))
            self._write()

    def _contained(self) -> tuple[str, ...]:
        return tuple(sorted({group for lease in self._leases() for group in _contained(lease)}))

    def _write(self) -> None:
        if self._process is not None:
            self._record.store(_LetIn(self._process, self.so_far))


class PipeAccess:
    """The access to one control daemon: `wanted` decides which uids have it, and only this class writes it."""

    def __init__(
        self, paths: DaemonPaths, wanted: Callable[[], Admitted], leases: Callable[[], Iterable[Lease]], log: Logger
    ) -> None:
        """Take the paths; `wanted` returns the processes to admit now, and `leases` the leases on the daemon."""
        self.paths = paths
        self.let_in = LetInRecord(paths, leases, log)
        self._many_users: bool | None = None
        """Whether the control daemon serves many users; None before there is one."""
        self._admitted = wanted
        self._log = log
        self._latest: tuple[object, tuple[tuple[Path, Acl], ...]] = None, ()
        """The last result of `_acls` with its arguments, because it is needed every second."""
        self._is_shut = self._was_shut()
        self._sure = False
        """Whether `_written` read back, and nothing has failed since."""
        self._written = Admitted()

    def _was_shut(self) -> bool:
        """Tell whether an earlier mpsd admitted no uid, as until the limits hold: it may have died before that."""
        path, closed = self._acls(Admitted())[0]
        try:
            return acl.read(path) == closed
        except OSError:
            return False  # nothing exists yet or is readable: a start, or a check, reports it

    def shut(self, *, many_users: bool) -> None:
        """Admit no uid until `admit`: a control daemon that starts has no limits yet, and makes its lock.

        `many_users` tells whether the daemon serves many users. Raises PipeAccessError.
        """
        self._is_shut, self._many_users = True, many_users
        self.enforce()

    def adopted(self, daemon: DaemonProcess) -> None:
        """Restore the record of pipe access to a control daemon that an earlier mpsd started."""
        self._sure, self._many_users = False, daemon.many_users
        self.let_in.resume(daemon.identity)

    def admit(self) -> None:
        """Admit the wanted uids, now that the limits hold. Raises PipeAccessError.

        That is called after each conversation: a change by another process during one is reported, as at a check.
        """
        was_shut, self._is_shut = self._is_shut, False
        if was_shut or not self.check():
            self.enforce()

    def _wanted(self) -> Admitted:
        return Admitted() if self._is_shut else self._admitted()

    @property
    def users(self) -> frozenset[int] | None:
        """The uids that a control daemon for one user at a time has admitted; None where it may be any."""
        let_in = self.let_in.so_far
        is_known = self._many_users is False and not let_in.everybody and not let_in.others
        return frozenset(let_in.uids) if is_known and let_in.uids else None

    def was_anothers(self, uid: int) -> bool:
        """Tell whether the control daemon, which serves one user at a time, has admitted another uid before this one.

        Where it serves many users, or is open to all, it never belongs to one of them.
        """
        let_in = self.let_in.so_far
        if self._many_users is not False or let_in.everybody:
            return False
        return let_in.others or let_in.uids not in {(), (uid,)}

    def are_last_users(self, uids: Collection[int | None]) -> bool:
        """Tell whether the control daemon serves one user at a time, and has admitted all of these uids."""
        let_in = self.let_in.so_far
        return self._many_users is False and not let_in.everybody and bool(uids) and {*uids} <= {*let_in.uids}

    def open(self, uid: int) -> None:
        """Admit a uid that is wanted by now. Raises PipeAccessError."""
        if self._sure and (self._written.uids is None or uid in self._written.uids):
            return
        if not self.enforce():
            raise PipeAccessError(
                f"{self.paths.control_socket} is gone, so uid {uid} cannot reach the control daemon",
                hint="try again in a moment; for its state: mpsctl daemons",
                limit="enforcement.unadmitted",
            )

    def close(self) -> None:
        """Remove the access of uids that are no longer wanted. A failure is logged, and retried at the next check."""
        if self._many_users is None or (self._sure and self._written == self._wanted()):
            return
        try:
            self.enforce()
        except PipeAccessError as error:
            self._log.error(EventName.PIPE_ACCESS_NOT_HELD, because=error.detail)

    def enforce(self) -> bool:
        """Admit exactly the wanted uids, and read that back; False where there are no files yet.

        Raises PipeAccessError.
        """
        wanted = self._wanted()
        self.let_in.note(wanted.uids)
        before = dict(self._acls(self._written)) if self._sure and self._written != wanted else {}
        self._sure, self._written = False, wanted
        for path, meant in self._acls(wanted):
            try:
                # A file that is known to have another access list need not be read before it is written.
                found = None if before.get(path, meant) != meant else acl.read(path)
                if found != meant:
                    acl.write(path, meant)
                    found = acl.read(path)
            except FileNotFoundError:
                if path in {self.paths.pipe_directory, self.paths.control_socket}:
                    return False
                continue  # no process can open a missing file, and older drivers make no pid file
            except OSError as error:
                raise self._failed(path, meant, error.strerror or str(error)) from error
            if found != meant:
                raise self._failed(path, meant, f"it reads back as {acl.text(found)}")
        self._sure = True
        return True

    def check(self) -> bool:
        """Check whether another process has changed the access, and restore it; False when that failed."""
        try:
            if not (self._sure and self._written == self._wanted() and self._is_unchanged()):
                self.enforce()
        except (OSError, PipeAccessError):
            return False
        return True

    def _is_unchanged(self) -> bool:
        """Tell whether every file is as it was written, and log those that others have changed. Raises OSError."""
        is_unchanged = True
        for path, meant in self._acls(self._written):
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

    def _acls(self, admitted: Admitted) -> tuple[tuple[Path, Acl], ...]:
        """Return the access list of each file: the rights of its owner, and those of the admitted processes."""
        if self._latest[0] != (admitted, self._many_users):
            uids, groups = admitted.uids, () if admitted.group is None else (admitted.group,)
            servers_write = frozenset() if self._many_users else uids
            acls = tuple(
                (path, acl.public(owner, others) if users is None else acl.private(owner, users, others, members))
                for path, owner, users, members, others in (
                    (self.paths.pipe_directory, READ | WRITE | EXECUTE, uids, groups, READ | EXECUTE),
                    (self.paths.control_socket, READ | WRITE, uids, groups, READ | WRITE),
                    (self.paths.log_fifo, READ | WRITE, servers_write, (), WRITE),
                    (self.paths.control_lock, READ | WRITE, frozenset(), (), 0),
                    (self.paths.pid_file, READ | WRITE, frozenset(), (), 0),
                )
            )
            self._latest = (admitted, self._many_users), acls
        return self._latest[1]

    @staticmethod
    def _failed(path: Path, meant: Acl, because: str) -> PipeAccessError:
        return PipeAccessError(
            f"the pipe access of {path} cannot be set to {acl.text(meant)}: {because}",
            hint="check that its file system supports POSIX ACLs, and that mpsd's user namespace maps each uid",
            limit="enforcement.unadmitted",
        )


class NodePipeAccess:
    """The pipe access to each control daemon of the node."""

    def __init__(
        self,
        paths: Callable[[str], DaemonPaths],
        ledger: Ledger,
        quarantine: Quarantine,
        *,
        settings: LiveSettings,
        log: Logger,
    ) -> None:
        """Take the parts; `paths` returns the files of a daemon."""
        self._paths = paths
        self._ledger = ledger
        self._quarantine = quarantine
        self._settings = settings
        self._log = log
        self._accesses: dict[str, PipeAccess] = {}
        self._canaries: dict[str, int] = {}
        """By GPU, the group that a running canary alone is in."""
        settings.follow(lambda _: self.apply())

    def of(self, name: str, gpu: str) -> PipeAccess:
        """Return the access to a GPU's control daemon, which follows the leases from now on."""
        if name not in self._accesses:
            wanted, leases = partial(self._wanted, gpu), partial(self._ledger.on, name)
            self._accesses[name] = PipeAccess(self._paths(name), wanted, leases, self._log.bind(daemon=name))
        return self._accesses[name]

    def _wanted(self, gpu: str) -> Admitted:
        unadmitted, own = self._settings.current.unadmitted, os.geteuid()
        uids = ceiling.admitted(unadmitted, self._ledger.holders(gpu), own, self._quarantine.uids)
        return Admitted(uids, self._canaries.get(gpu))

    @contextlib.contextmanager
    def opened_for_canary(self, name: str, gpu: str) -> Iterator[int]:
        """Admit the members of a group, which no process but a canary may be given, until the context is left.

        Its uid gets no access: other processes of that user would have it, too. Raises PipeAccessError and OSError.
        """
        self._canaries[gpu] = credentials.unused_group()
        try:
            self._accesses[name].enforce()
            yield self._canaries[gpu]
        finally:
            del self._canaries[gpu]
            self._accesses[name].close()

    def note(self, lease: Lease) -> None:
        """Note who may use a lease, before it is answered, where its uid has access anyway."""
        for share in lease.shares if _is_let_in(lease.owner.uid) else ():
            if share.daemon in self._accesses:
                self._accesses[share.daemon].let_in.note_lease(lease)

    def open(self, lease: Lease) -> None:
        """Admit a lease's uid on each of its GPUs. Raises PipeAccessError."""
        if _is_let_in(lease.owner.uid):
            return
        for share in lease.shares:
            if share.daemon not in self._accesses:  # the GPU of a lease of an earlier mpsd may be gone
                raise PipeAccessError(
                    f"{share.daemon} is not supervised: mpsd cannot read GPU {share.gpu}, or it is gone",
                    hint="for the state of the GPUs: mpsctl gpus",
                )
            self._accesses[share.daemon].open(lease.owner.uid)

    def close(self, lease: Lease) -> None:
        """Remove the access of an ended lease's uid, unless it has another lease there."""
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
    """Tell whether a uid always has access: root's, or mpsd's own."""
    return uid == 0 or uid == os.geteuid()


def _contained(lease: Lease) -> set[str]:
    """Return the control groups that a lease came from, if no access list keeps its uid out."""
    return holders.origins(lease) if _is_let_in(lease.owner.uid) else set()


async def connected_to(sockets: Collection[Path]) -> dict[int, int | None]:
    """Return the processes that are connected to a daemon, according to the kernel, each with its real uid.

    One of them has the daemon's only seat. Those that mpsd cannot see are returned as process 0. Raises OSError.
    """
    return await asyncio.to_thread(_connected, sockets)


def _connected(sockets: Collection[Path]) -> dict[int, int | None]:
    peers = _peers(sockets)
    found = process_table.holding(peers)
    # Those of mpsd's own front-ends that were turned away meanwhile are nobody's any more.
    lasting = peers & _peers(sockets)
    unseen = lasting.difference(*found.values())
    return {pid: proc.real_uid(pid) for pid in found if found[pid] & lasting} | dict.fromkeys(range(bool(unseen)))


def _peers(sockets: Collection[Path]) -> set[int]:
    return {inode for each in sockets for inode in sock_diag.connected(each)}


async def only_connected(sockets: Collection[Path]) -> tuple[int, int] | None:
    """Return the only process beside mpsd's own that is connected to a daemon, with its real uid.

    None if there is none, or several, or one that mpsd cannot see. Raises OSError.
    """
    found = await connected_to(sockets)
    others = [(pid, uid) for pid, uid in found.items() if not pid or proc.parent(pid) != os.getpid()]
    pid, uid = others[0] if len(others) == 1 else (0, None)
    return (pid, uid) if pid and uid is not None else None


def named(connected: Mapping[int, int | None]) -> str:
    """Name the connected processes, for the end of a sentence."""
    names = [f"pid {pid} (uid {uid})" for pid, uid in connected.items() if pid][:_MOST_NAMED]
    if 0 in connected:
        names.append("a process that mpsd cannot see, as in another pid namespace, or without CAP_DAC_READ_SEARCH")
    return f"; connected to it: {', '.join(names)}" if names else ""
