"""What keeps leases alive: their holders, their clients, and the processes that carry their tokens.

`ray start`, `tmux -d` and every program that forks twice leave processes that belong to no family, and that may
become clients of MPS minutes later. When the last process of a lease is gone, mpsd therefore looks for processes of its
owner's real uid that were started with its token, or that may have been; the lease is tied to them, and ends with them.
mpsd looks for them at no other time, and once for all leases of a user that need it at one moment. The reads are
abandoned when they take too long, because a user may have thousands of processes, and may delay who reads them.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement.attribution import TOKEN
from mpsd.core.model import Holder, HoldingGroup, HoldingProcess, Known, Lease, ProcessIdentity
from mpsd.core.signal import Signal
from mpsd.daemon.leases.clients import ChangedUsers, Clients
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holder_watch import HolderWatch, possible_origins
from mpsd.system.processes import foreign_files, foreign_reader
from mpsd.system.processes.foreign_files import Carriers, Titled
from mpsd.system.processes.foreign_reader import ForeignReader

_PATIENCE: Final = foreign_reader.SECONDS
"""Seconds for which a request waits until it is known whether leases of its own user end, as for any such read.

It is milliseconds but for the first read on a busy machine, for which mpsd starts the reader.
"""

_MOST_WATCHED: Final = 8
"""The maximum of watched bearers of a lease, the oldest ones, one descriptor each; when they are gone, mpsd looks
again."""


class Keepers:
    """The processes and groups that leases are tied to."""

    def __init__(
        self,
        ledger: Ledger,
        group_commit: GroupCommit,
        holder_watch: HolderWatch,
        clients: Clients,
        changed_users: ChangedUsers,
        *,
        reader: ForeignReader,
    ) -> None:
        self.gone = Signal[Lease, str]()
        """With a reason: the last known process or group of this lease is gone."""
        self.unborne = Signal[str, str]()
        """With a lease's id and the reason: no process carries its token either."""
        self._ledger = ledger
        self._group_commit = group_commit
        self._watch = holder_watch
        self._clients = clients
        self._changed_users = changed_users
        self._reader = reader
        self._alone: dict[str, str] = {}
        """The leases without a living process, each with the reason why it ends if no process carries its token."""
        self._wanted = asyncio.Event()
        self._undecided = set[str]()
        """The leases without a living process of which is not known yet whether they end."""
        self._decided = asyncio.Event()
        holder_watch.processes.gone.connect(self._process_gone)
        holder_watch.groups.over.connect(self._group_over)
        holder_watch.groups.populated.connect(self._group_populated)

    # -- the end of a holder, a client or a bearer --------------------------------------------------------------------

    def _process_gone(self, lease_id: str, gone: ProcessIdentity) -> None:
        """Remove a process that has exited from its lease, unless it was the last that kept the lease alive."""
        lease = self._ledger.find(lease_id)
        if lease is None:
            return
        held = gone in holders.processes(lease)
        if held:
            self._changed_users.check(lease)
        # 1. Other processes or groups keep the lease alive: it only loses this process, as a client and as a holder.
        # 2. The last one is gone, and the reason says what it was.
        if self._watch.keeps(lease):
            self._clients.remove(lease, gone)
            self._drop(lease_id, HoldingProcess(gone))
            if held:
                self._report_if_borne(lease_id)
            return
        because = f"{holders.all_said(lease)}, has exited"
        if not held:
            last = "process that carries or may carry its token" if gone in lease.bearers else "client"
            have_ended = "have exited" if _are_processes(lease) else "have ended"
            because = f"{holders.all_said(lease)}, and its last {last}, pid {gone.pid}, {have_ended}"
        self.gone.send(lease, because)

    def _group_over(self, lease_id: str, gone: HoldingGroup, because: str) -> None:
        """Remove a control group that no longer holds its lease, as `_process_gone` does."""
        lease = self._ledger.find(lease_id)
        if lease is None:
            return
        if self._watch.keeps(lease):
            self._drop(lease_id, gone)
            self._report_if_borne(lease_id)
        else:
            self.gone.send(lease, f"{holders.all_said(lease)}, {because}")

    def _group_populated(self, lease_id: str, holder: HoldingGroup) -> None:
        """Store that a group got processes, so that the next mpsd knows that an empty group was left by them."""
        lease = self._ledger.leases.get(lease_id)
        if lease is not None:
            left = tuple(holder if holders.are_same(each, holder) else each for each in lease.holders)
            self._group_commit.change(self._ledger.set_holders(lease_id, left))

    def _drop(self, lease_id: str, gone: Holder) -> None:
        """Remove a holder that is gone, unless it was the last: users can then see which holder that was."""
        lease = self._ledger.leases.get(lease_id)
        if lease is None:
            return
        left = holders.without(lease, gone)
        if left != lease.holders:
            self._group_commit.change(self._ledger.set_holders(lease_id, left))

    def _report_if_borne(self, lease_id: str) -> None:
        """Report a lease whose last holder is gone, and that lives on for its clients and bearers."""
        lease = self._ledger.leases.get(lease_id)
        if lease is not None and not any(self._watch.lives(lease_id, each) for each in lease.holders):
            self._clients.report_borne(lease)

    # -- the processes that carry a token -----------------------------------------------------------------------------

    def find_bearers(self, lease: Lease, because: str) -> None:
        """Look for processes that carry the token of a lease whose last process is gone.

        The lease keeps its shares until then. If there is none, `unborne` follows, with this reason.
        """
        self._alone[lease.id] = because
        self._undecided.add(lease.id)
        self._wanted.set()

    async def decide(self, uid: int) -> None:
        """Wait a moment until it is known whether a user's leases without a living process end.

        Thus one program after another gets the whole GPU.
        """
        undecided = (self._ledger.leases.get(each) for each in self._undecided)
        waits_for = {each.id for each in undecided if each is not None and each.owner.uid == uid}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while waits_for & self._undecided:
                    self._decided.clear()
                    await self._decided.wait()

    async def run(self) -> None:
        """Look for carriers of tokens when needed, until cancelled; the next mpsd does the rest."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                alone, self._alone = self._alone, {}
                self._undecided &= self._ledger.leases.keys()  # others were released meanwhile
                self._decided.set()
                by_uid = dict[int, dict[str, str]]()
                for lease_id, because in alone.items():
                    if (lease := self._ledger.leases.get(lease_id)) is not None:
                        by_uid.setdefault(lease.owner.uid, {})[lease_id] = because
                for uid, leases in by_uid.items():
                    group.create_task(self._look(uid, leases))

    async def _look(self, uid: int, alone: Mapping[str, str]) -> None:
        """Look for the carriers of a user's leases, each with the reason why it ends if there is none.

        Only the user's own processes are read, and nobody else's leases wait for that.
        """
        leases = (self._ledger.leases.get(each) for each in alone)  # one may have ended since this was to begin
        tokens = [each.token for each in leases if each is not None]
        unseen, found = "", Carriers()
        try:
            answer = await self._reader.ask(f"uid {uid}", foreign_files.carriers, uid, TOKEN, tokens)
            if isinstance(answer, Known):
                found = answer.value
            else:
                unseen = _unseen(answer.reason)
        except OSError as error:
            unseen = _unseen(error.strerror)
        for lease_id, why in alone.items():
            # Changes since then count: the lease may have been released, or a carrier may have become its client.
            there = self._ledger.leases.get(lease_id)
            if there is None or self._watch.keeps(there):
                continue
            because = why + unseen
            may = [each.process for each in found.titled if self._may_be_left_by(there, each)]
            try:
                is_tied = self._tie(there, found.by_token.get(there.token, may))
            except OSError as error:
                is_tied, because = False, why + _unseen(error.strerror)
            if not is_tied:
                # Not for root: the first process of a container, as of mpsd's own, may be closed to root itself.
                if uid != 0 and found.unread is not None:
                    because += f"; mpsd may not read whether process {found.unread} carries its token"
                self.unborne.send(lease_id, because)
        self._undecided.difference_update(alone)
        self._decided.set()

    def _may_be_left_by(self, lease: Lease, titled: Titled) -> bool:
        """Tell whether a process that shows no environment may have been left behind by a holder of a lease.

        Its parent is older than that holder. It has no other lease, unless that is as uncertain, and its parent has
        none, unless that is an init.
        """
        family = [titled.process] if titled.by_init else [titled.process, titled.parent]
        leases = (self._ledger.leases.get(each) for one in family for each in self._watch.processes.leases_of(one))
        if any(each is not None and titled.process not in each.bearers for each in leases):
            return False
        origins = possible_origins(lease, titled.process, titled.cgroup)
        return any(titled.parent.start_ticks <= each.identity.start_ticks for each in origins)

    def _tie(self, lease: Lease, carriers: Sequence[ProcessIdentity]) -> bool:
        """Tie a lease to the processes that carry its token, or may carry it, and tell whether any of them lives.

        Raises OSError where none of them could be watched.
        """
        for each in carriers[:_MOST_WATCHED]:
            try:
                self._watch.processes.watch_identity(lease.id, each)
            except OSError:
                if not self._watch.keeps(lease):
                    raise
        living = self._watch.processes.of(lease.id)
        if living:
            self._clients.leave_to(lease, living)
        return bool(living)

    # -- the leases of an earlier mpsd --------------------------------------------------------------------------------

    def take_up(self, lease: Lease) -> None:
        """Remove the gone holders of an earlier mpsd's lease; the end of all of them counts as if it came now."""
        if not self._watch.keeps(lease):
            died = "died" if _are_processes(lease) else "ended"
            self.gone.send(lease, f"{holders.all_said(lease)}, {died} while mpsd was not running")
            return
        for holder in lease.holders:
            if not self._watch.lives(lease.id, holder):
                self._drop(lease.id, holder)


def _are_processes(lease: Lease) -> bool:
    """Tell whether all holders of a lease are processes."""
    return all(isinstance(each, HoldingProcess) for each in lease.holders)


def _unseen(because: str | None) -> str:
    """Say why carriers of a token are unknown: the lease ends as if no process carried it."""
    return f"; whether others carry its token could not be read: {because}"
