"""Whether the leases of each GPU are complete: where leases may be missing, nothing is granted until their clients end.

Two causes make a GPU incomplete.

1. The lease store is new, and contains no lease. A control daemon that is older than the store may have clients whose
   leases were in the previous store, and their shares would be granted again. This ends when the control daemon has
   reported its clients and those are gone. The store keeps this state. A new store marks every GPU in the same commit
   that creates it, so that no death of mpsd comes between.
2. A lease of an earlier mpsd cannot be restored, for any reason. It is set aside on disk and logged, and mpsd restores
   the others. This ends when its processes are gone. Where those are unknown, no client whose lease is unknown may be
   left on the GPU.

An operator can end both (`mpsctl resume`).
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final

from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, Lease, ProcessIdentity
from mpsd.core.signal import Signal
from mpsd.daemon.leases.lease_store import LeaseStore, UnrestoredLease
from mpsd.daemon.record.log import Logger
from mpsd.system.processes import proc

_MOST_NAMED: Final = 8
"""Maximum processes that a sentence names."""


class Completeness:
    """The GPUs that may have clients whose leases mpsd does not know."""

    def __init__(self, store: LeaseStore, log: Logger) -> None:
        self.changed = Signal[()]()
        """The leases of a GPU may be complete now."""
        self._store = store
        self._log = log
        self._awaited: dict[str, set[ProcessIdentity]] = {}
        """By UUID of a GPU, the processes that may have had a lease, and have not ended."""
        self._unrestored: list[UnrestoredLease] = []

    def is_complete(self, gpu: str) -> bool:
        """Tell whether every client on a GPU has a lease that mpsd knows."""
        return not (self._store.incomplete(gpu) or self.unrestored(gpu))

    def clear(self, gpu: str, because: str) -> None:
        """Declare the leases of a GPU complete, by an operator's command. Unrestored leases lose all their shares.

        Raises StorageError; nothing has changed then.
        """
        self._end_wait(gpu, because)
        self._forget([each for each in self._unrestored if each.is_on(gpu)], "an operator said that all is clear")

    # -- a new store --------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether processes have to end before a GPU's leases are complete again."""
        return bool(self._awaited)

    def check(self, daemon: Daemon) -> str:
        """Return why a new store may lack leases of a GPU, by its present clients; empty where it lacks none.

        Raises StorageError when it lacks none any more and that could not be stored.
        """
        # 1. Nothing is missing on this GPU.
        # 2. Its clients are not known yet, so anything may be in use.
        # 3. The clients of that moment are noted once: later ones have leases that mpsd knows.
        # 4. The leases are complete when all of these have ended.
        gpu = daemon.gpu
        because = self._store.incomplete(gpu)
        if not because:
            return ""
        if gpu not in self._awaited:
            present = _present(daemon)
            if present is None:
                return because
            if present:
                self._awaited[gpu] = present
                pids = sorted(each.pid for each in present)
                self._log.error(EventName.LEASES_INCOMPLETE, daemon=daemon.name, gpu=gpu, because=because, pids=pids)
        left = {each for each in self._awaited.get(gpu, ()) if proc.may_live(each)}
        if not left:
            self._end_wait(gpu, "every process that may have had a lease has ended")
            return ""
        self._awaited[gpu] = left
        awaited = sorted(each.pid for each in left)
        named = ", ".join(map(str, awaited[:_MOST_NAMED])) + (", ..." if len(awaited) > _MOST_NAMED else "")
        return f"{because}; it waits for the end of pid {named}"

    def _end_wait(self, gpu: str, because: str) -> None:
        if not self._store.incomplete(gpu):
            return
        self._store.note_completeness(gpu, "")
        if self._awaited.pop(gpu, None) is not None:
            self._log.info(EventName.LEASES_COMPLETE, gpu=gpu, because=because)
        self.changed.send()

    # -- leases that could not be restored ----------------------------------------------------------------------------

    def unrestored(self, gpu: str) -> tuple[str, ...]:
        """Return why admission on a GPU is stopped; empty where no unrestored lease may hold a share of it."""
        return tuple(each.reason for each in self._unrestored if each.is_on(gpu))

    def set_aside(self, leases: Iterable[UnrestoredLease]) -> None:
        """Hold the GPUs of these leases, and log each."""
        for each in leases:
            self._unrestored.append(each)
            gpus = "all" if each.gpus is None else sorted(each.gpus)
            self._log.error(EventName.LEASE_NOT_RESTORED, lease=each.id, gpus=gpus, because=each.because)

    def attempt(self, lease: Lease, step: Callable[[Lease], None], undo: Callable[[Lease], int]) -> bool:
        """Take the next step to restore a lease, or set it aside if that fails. Tell whether it was taken.

        `undo` undoes the steps that were taken, and returns the number of the lease's row.
        """
        try:
            step(lease)
        except Exception as error:  # noqa: BLE001 - the boundary: one lease must not keep mpsd from starting
            self.set_aside([UnrestoredLease.of_lease(undo(lease), lease, error)])
            return False
        return True

    def check_unrestored(self, occupied: Collection[str], gpus: Collection[str]) -> None:
        """Forget the leases that are clear. `occupied` has the GPUs of `gpus` with clients whose lease is unknown."""
        self._forget([each for each in self._unrestored if each.is_clear(occupied, gpus)], "its processes are gone")

    def _forget(self, leases: Collection[UnrestoredLease], because: str) -> None:
        for each in leases:
            with suppress(StorageError):  # the next mpsd sets the lease aside and clears it again
                self._store.discard(each.row)
            self._unrestored.remove(each)
            self._log.info(EventName.LEASE_NOT_RESTORED_ENDED, lease=each.id, because=because)
        if leases:
            self.changed.send()


def _present(daemon: Daemon) -> set[ProcessIdentity] | None:
    """Return the clients of a control daemon, and servers that outlived one; None while they are unknown."""
    servers = [each for each in daemon.servers if not each.orphan]
    if daemon.state not in ANSWERED or not daemon.verified or not all(each.lists_clients for each in servers):
        return None
    pids = {pid for each in servers for pid in each.clients} | {each.pid for each in daemon.servers if each.orphan}
    try:
        found = [proc.identify(pid) for pid in pids]
    except OSError:
        return None
    return {each for each in found if each is not None}
