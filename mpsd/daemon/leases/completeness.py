"""Whether the leases of each GPU are complete: where leases may be lost, nothing is granted until their clients end.

A new lease store contains no lease. A control daemon that is older than the store may have clients whose leases were in
the previous store, and their shares would be granted again. A GPU therefore counts as incomplete until its control
daemon has reported its clients and those are gone, or an operator declares it complete. The store keeps this state. A
new store marks every GPU in the same commit that creates it, so that no death of mpsd comes between.
"""

from typing import Final

from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, ProcessIdentity
from mpsd.core.signal import Signal
from mpsd.daemon.leases.lease_store import LeaseStore
from mpsd.daemon.record.log import Logger
from mpsd.system import proc

_MOST_NAMED: Final = 8
"""Maximum processes that a sentence names."""


class Completeness:
    """The GPUs of which mpsd may not know every lease, and the processes that have to end until it does."""

    def __init__(self, store: LeaseStore, log: Logger) -> None:
        self.completed = Signal[()]()
        """The leases of a GPU are complete again."""
        self._store = store
        self._log = log
        self._awaited: dict[str, set[ProcessIdentity]] = {}
        """By UUID of a GPU, the processes that may have had a lease, and have not ended."""

    @property
    def is_waiting(self) -> bool:
        """Whether processes have to end before a GPU's leases are complete again."""
        return bool(self._awaited)

    def because(self, gpu: str) -> str:
        """Say why the leases of a GPU may be incomplete; empty where they are complete."""
        because = self._store.incomplete(gpu)
        awaited = sorted(each.pid for each in self._awaited.get(gpu, ()))
        if not because or not awaited:
            return because
        named = ", ".join(map(str, awaited[:_MOST_NAMED])) + (", ..." if len(awaited) > _MOST_NAMED else "")
        return f"{because}; it waits for the end of pid {named}"

    def hold(self, gpu: str, because: str) -> None:
        """Grant nothing on a GPU until its present clients are gone, or an operator resumes it. Raises StorageError."""
        self._store.note_completeness(gpu, because)
        self._awaited.pop(gpu, None)

    def clear(self, gpu: str, because: str) -> None:
        """Declare the leases of a GPU complete. Raises StorageError; nothing has changed then."""
        if not self._store.incomplete(gpu):
            return
        self._store.note_completeness(gpu, "")
        if self._awaited.pop(gpu, None) is not None:
            self._log.info(EventName.LEASES_COMPLETE, gpu=gpu, because=because)
        self.completed.send()

    def look(self, daemon: Daemon) -> str:
        """Return why the leases of a GPU are still incomplete, by its present clients; empty where they are complete.

        Raises StorageError when they are complete and that could not be stored.
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
        left = {each for each in self._awaited.get(gpu, ()) if proc.start_ticks(each.pid) == each.start_ticks}
        if not left:
            self.clear(gpu, "every process that may have had a lease has ended")
            return ""
        self._awaited[gpu] = left
        return self.because(gpu)


def _present(daemon: Daemon) -> set[ProcessIdentity] | None:
    """Return the clients of a control daemon, and servers that outlived one; None while they are unknown."""
    servers = [each for each in daemon.servers if not each.orphan]
    if daemon.state not in ANSWERED or not daemon.verified or not all(each.lists_clients for each in servers):
        return None
    pids = {pid for each in servers for pid in each.clients} | {each.pid for each in daemon.servers if each.orphan}
    started = ((pid, proc.start_ticks(pid)) for pid in pids)
    return {ProcessIdentity(pid, ticks) for pid, ticks in started if ticks is not None}
