"""Leases of an earlier mpsd that could not be restored: set aside on disk, logged, and their GPUs held.

If a lease cannot be restored for any reason, mpsd starts and restores the others. The shares of that lease may be in
use. Admission on its GPUs is therefore stopped until its processes are gone or an operator declares the GPUs clear
(`mpsctl resume`). Where its processes are unknown, no client whose lease is unknown may be left on the GPU.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.holders import holders
from mpsd.core.model import AttachedProcess, HoldingProcess, Lease, LeaseState, ProcessIdentity
from mpsd.core.sanitize import text
from mpsd.core.signal import Signal
from mpsd.daemon.record.log import Logger
from mpsd.system import proc
from mpsd.system.encoding import NOT_UNDERSTOOD

_MOST_WORDS: Final = 200
"""Maximum characters of an error in a reason."""


@dataclass(frozen=True, slots=True)
class UnrestoredLease:
    """A lease that was set aside, as far as it could be decoded."""

    row: int
    """The number of its row in the store."""
    id: str
    because: str
    gpus: frozenset[str] | None
    """The UUIDs of the GPUs on which it may hold shares; None where they are unknown, which stands for all GPUs."""
    processes: tuple[ProcessIdentity, ...] | None
    """Its holders and its clients; None where they are unknown, as those of a control group are."""

    @classmethod
    def of_row(cls, row: int, data: str, error: Exception) -> "UnrestoredLease":
        """Return the readable parts of a lease that cannot be decoded."""
        found: object = None
        with suppress(*NOT_UNDERSTOOD):
            found = json.loads(data)  # json accepts more than msgspec does
        fields = found if isinstance(found, dict) else {}
        return cls(
            row, text(str(fields.get("id", "?")))[:_MOST_WORDS], _words(error), _gpus(fields), _processes(fields)
        )

    @classmethod
    def of_lease(cls, row: int, lease: Lease, error: Exception) -> "UnrestoredLease":
        """Return a lease that could be decoded, but not restored."""
        gpus = frozenset(share.gpu for share in lease.shares)
        known = all(isinstance(each, HoldingProcess) for each in lease.holders)
        return cls(row, lease.id, _words(error), gpus, (*holders.processes(lease), *lease.clients) if known else None)

    @property
    def reason(self) -> str:
        """Why admission is stopped, in a sentence."""
        waits = "the clients without a lease are gone"
        if self.processes is not None:
            waits = f"pid {', '.join(str(each.pid) for each in self.processes)} has exited"
        return (
            f"lease {self.id} of an earlier mpsd could not be restored, so its share may be in use until {waits}:"
            f" {self.because}"
        )

    def is_on(self, gpu: str) -> bool:
        """Tell whether this lease may hold a share of a GPU."""
        return self.gpus is None or gpu in self.gpus

    def is_clear(self, occupied: Collection[str], gpus: Collection[str]) -> bool:
        """Tell whether no share of this lease is in use.

        Its processes are gone or, where they are unknown, none of its GPUs is `occupied`.
        """
        if self.processes is not None:
            return all(proc.start_ticks(each.pid) != each.start_ticks for each in self.processes)
        return bool(gpus) and not any(self.is_on(each) for each in occupied)


def _words(error: Exception) -> str:
    return text(f"{type(error).__name__}: {error}")[:_MOST_WORDS]


def _gpus(fields: dict[object, object]) -> frozenset[str] | None:
    if fields.get("state") == LeaseState.WAITING:
        return frozenset()
    with suppress(*NOT_UNDERSTOOD):
        shares = msgspec.convert(fields.get("shares"), list[dict[str, object]])
        return frozenset(msgspec.convert(each.get("gpu"), str) for each in shares) or None
    return None


def _processes(fields: dict[object, object]) -> tuple[ProcessIdentity, ...] | None:
    with suppress(*NOT_UNDERSTOOD):
        attached = msgspec.convert(fields.get("attached", ()), tuple[AttachedProcess, ...])
        held = msgspec.convert(fields.get("holders"), tuple[HoldingProcess, ...])
        return (*(each.identity for each in held), *(each.process for each in attached))
    return None


class UnrestoredLeases:
    """The leases that were set aside and are not clear yet."""

    def __init__(self, discard: Callable[[int], None], log: Logger) -> None:
        """Take `discard`, which removes a row from the store and raises StorageError, and the log."""
        self.cleared = Signal[()]()
        """A GPU may no longer be held."""
        self._discard = discard
        self._log = log
        self._leases: list[UnrestoredLease] = []

    def set_aside(self, leases: Iterable[UnrestoredLease]) -> None:
        """Hold the GPUs of these leases, and log each."""
        for each in leases:
            self._leases.append(each)
            gpus = "all" if each.gpus is None else sorted(each.gpus)
            self._log.error(EventName.LEASE_NOT_RESTORED, lease=each.id, gpus=gpus, because=each.because)

    def attempt(self, lease: Lease, steps: Sequence[Callable[[Lease], None]], undo: Callable[[Lease], int]) -> bool:
        """Take the next steps to restore a lease, or set it aside if one fails. Tell whether they were taken.

        `undo` undoes the steps that were taken, and returns the number of the lease's row.
        """
        try:
            for step in steps:
                step(lease)
        except Exception as error:  # noqa: BLE001 - the boundary: one lease must not keep mpsd from starting
            self.set_aside([UnrestoredLease.of_lease(undo(lease), lease, error)])
            return False
        return True

    def on(self, gpu: str) -> tuple[str, ...]:
        """Return why admission on a GPU is stopped; empty where no such lease may hold a share of it."""
        return tuple(each.reason for each in self._leases if each.is_on(gpu))

    def look(self, occupied: Collection[str], gpus: Collection[str]) -> None:
        """Release the leases that are clear. `occupied` has the GPUs of `gpus` with clients whose lease is unknown."""
        self._clear([each for each in self._leases if each.is_clear(occupied, gpus)], "its processes are gone")

    def clear(self, gpu: str) -> None:
        """Release a GPU, and all other shares of its leases, by an operator's command."""
        self._clear([each for each in self._leases if each.is_on(gpu)], "an operator said that all is clear")

    def _clear(self, leases: Collection[UnrestoredLease], because: str) -> None:
        for each in leases:
            with suppress(StorageError):  # the next mpsd sets the lease aside and clears it again
                self._discard(each.row)
            self._leases.remove(each)
            self._log.info(EventName.LEASE_NOT_RESTORED_ENDED, lease=each.id, because=because)
        if leases:
            self.cleared.send()
