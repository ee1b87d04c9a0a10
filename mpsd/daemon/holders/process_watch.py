"""The processes that keep leases alive: each is watched through a pidfd, which a reused pid cannot deceive."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from mpsd.core.model import ProcessIdentity
from mpsd.system import process
from mpsd.system.descriptors import Purpose
from mpsd.system.process import Process


@dataclass(slots=True)
class _Watched:
    """A watched process that leases are bound to, as holder or client.

    Without a lease, its watch ends at the next tick.
    """

    process: Process
    leases: set[str] = field(default_factory=set)


class ProcessWatch:
    """The processes that leases are bound to; one descriptor serves all leases of a process."""

    def __init__(self, gone: Callable[[str, ProcessIdentity], None]) -> None:
        """`gone` is called from the running loop with a lease and its dead process, after the watch has ended."""
        self._gone = gone
        self._watched: dict[ProcessIdentity, _Watched] = {}
        self._of: dict[str, tuple[ProcessIdentity, ...]] = {}
        self._loose: set[ProcessIdentity] = set()
        """Watched processes whose last lease ended: such a process often requests another lease at once."""

    def of(self, lease_id: str) -> tuple[ProcessIdentity, ...]:
        """Return the living processes that a lease is bound to."""
        return self._of.get(lease_id, ())

    def leases_of(self, identity: ProcessIdentity) -> Collection[str]:
        """Return the leases that are bound to a process."""
        watched = self._watched.get(identity)
        return watched.leases if watched is not None else ()

    def watch(self, lease_id: str, living: Process, purpose: Purpose) -> None:
        """Watch a process, watched elsewhere too, for a lease. Raises the errors of `descriptors.duplicate`."""
        watched = self._watched.get(living.identity)
        self._add(lease_id, watched if watched is not None else self._watch(living.duplicate(purpose)))

    def watch_identity(self, lease_id: str, identity: ProcessIdentity) -> bool:
        """Watch the process with this identity for a lease; False when it is gone, or another process has its pid."""
        watched = self._watched.get(identity)
        if watched is not None:
            self._add(lease_id, watched)
            return True
        living = process.adopt(identity)
        if living is None:
            return False
        self._add(lease_id, self._watch(living))
        return True

    def _watch(self, living: Process) -> _Watched:
        """Watch a process, and take over the object."""
        watched = self._watched[living.identity] = _Watched(living)
        living.when_gone(partial(self._process_ended, watched))
        return watched

    def _add(self, lease_id: str, watched: _Watched) -> None:
        identity = watched.process.identity
        watched.leases.add(lease_id)
        self._loose.discard(identity)
        others = self._of.get(lease_id, ())
        if identity not in others:
            self._of[lease_id] = (*others, identity)

    def unwatch(self, lease_id: str) -> None:
        for identity in self._of.pop(lease_id, ()):
            self._loosen(lease_id, identity)

    def cut(self, lease_id: str, identity: ProcessIdentity) -> None:
        """End the watch of one of a lease's processes, if there is one."""
        others = self._of.get(lease_id, ())
        if identity in others:
            self._of[lease_id] = tuple(each for each in others if each != identity)
            self._loosen(lease_id, identity)

    def _loosen(self, lease_id: str, identity: ProcessIdentity) -> None:
        watched = self._watched[identity]
        watched.leases.discard(lease_id)
        if not watched.leases:
            self._loose.add(identity)

    def let_go(self) -> None:
        """Stop watching the processes that have had no lease since the last call."""
        for identity in self._loose:
            self._watched.pop(identity).process.close()
        self._loose.clear()

    def close(self) -> None:
        """End all watches, which does not affect the processes."""
        for watched in self._watched.values():
            watched.process.close()

    def _process_ended(self, watched: _Watched) -> None:
        identity = watched.process.identity
        del self._watched[identity]
        self._loose.discard(identity)
        watched.process.close()
        for lease_id in watched.leases:
            self._of[lease_id] = tuple(each for each in self._of[lease_id] if each != identity)
        for lease_id in tuple(watched.leases):
            self._gone(lease_id, identity)
