"""Leases of an earlier mpsd that could not be taken up again: set aside on disk, told, and their GPUs held.

Whatever is wrong with one lease, mpsd starts and takes up the others. What that lease holds may be in use, and so
nobody is admitted on its GPUs until its processes are gone or an operator says that all is clear (`mpsctl resume`).
Where it is not known which processes it has, nobody may be left on the GPU whose lease is not known.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.holders import holders
from mpsd.core.model import HoldingProcess, Lease, LeaseState, ProcessIdentity
from mpsd.core.sanitize import text
from mpsd.daemon.record.encoding import NOT_UNDERSTOOD
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import proc

_MOST_WORDS: Final = 200
"""Characters of an error that are worth repeating."""


@dataclass(frozen=True, slots=True)
class UnrestoredLease:
    """A lease that was set aside, as far as it could be understood."""

    row: int
    """The number of its row in the store."""
    id: str
    because: str
    gpus: frozenset[str] | None
    """The UUIDs of the GPUs that it may hold something of; None where that is not known, and so all of them."""
    processes: tuple[ProcessIdentity, ...] | None
    """Its holders and its clients; None where that is not known, as of a control group."""

    @classmethod
    def of_row(cls, row: int, data: str, error: Exception) -> "UnrestoredLease":
        """Return what can be understood of a lease that cannot be decoded."""
        found: object = None
        with suppress(*NOT_UNDERSTOOD):
            found = json.loads(data)  # which takes more than msgspec does
        fields = found if isinstance(found, dict) else {}
        return cls(
            row, text(str(fields.get("id", "?")))[:_MOST_WORDS], _words(error), _gpus(fields), _processes(fields)
        )

    @classmethod
    def of_lease(cls, row: int, lease: Lease, error: Exception) -> "UnrestoredLease":
        """Return a lease that could be decoded, and not taken up."""
        gpus = frozenset(share.gpu for share in lease.shares)
        known = all(isinstance(each, HoldingProcess) for each in lease.holders)
        return cls(row, lease.id, _words(error), gpus, (*holders.processes(lease), *lease.clients) if known else None)

    @property
    def reason(self) -> str:
        """Why nobody is admitted, in a sentence."""
        waits = "the clients without a lease are gone"
        if self.processes is not None:
            waits = f"pid {', '.join(str(each.pid) for each in self.processes)} has exited"
        return (
            f"lease {self.id} of an earlier mpsd could not be restored, so its share may be in use until {waits}:"
            f" {self.because}"
        )

    def is_on(self, gpu: str) -> bool:
        """Tell whether it may hold something of a GPU."""
        return self.gpus is None or gpu in self.gpus

    def is_clear(self, occupied: Collection[str], gpus: Collection[str]) -> bool:
        """Tell whether nothing of what it holds is in use, by its processes, or by which GPUs may be occupied."""
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
        clients = msgspec.convert(fields.get("clients", ()), tuple[ProcessIdentity, ...])
        held = msgspec.convert(fields.get("holders"), tuple[HoldingProcess, ...])
        return (*(each.identity for each in held), *clients)
    return None


class UnrestoredLeases:
    """The leases that were set aside and are not clear yet."""

    def __init__(self, discard: Callable[[int], None], log: Logger) -> None:
        """`discard` removes a row from the store. Raises StorageError."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a GPU may be held no more."""
        self._discard = discard
        self._log = log
        self._leases: list[UnrestoredLease] = []

    def set_aside(self, leases: Iterable[UnrestoredLease]) -> None:
        """Hold the GPUs of these, and tell of each."""
        for each in leases:
            self._leases.append(each)
            gpus = "all" if each.gpus is None else sorted(each.gpus)
            self._log.error(EventName.LEASE_NOT_RESTORED, lease=each.id, gpus=gpus, because=each.because)

    def attempt(self, lease: Lease, steps: Sequence[Callable[[Lease], None]], undo: Callable[[Lease], int]) -> bool:
        """Take the next steps to restore a lease; whatever goes wrong, it is set aside. Tell whether they were taken.

        `undo` takes back what was done of them, and returns the number of the lease's row.
        """
        try:
            for step in steps:
                step(lease)
        except Exception as error:  # noqa: BLE001 - the boundary: one lease must not keep mpsd from starting
            self.set_aside([UnrestoredLease.of_lease(undo(lease), lease, error)])
            return False
        return True

    def on(self, gpu: str) -> tuple[str, ...]:
        """Return why nobody is admitted on a GPU; nothing where it is held for no lease."""
        return tuple(each.reason for each in self._leases if each.is_on(gpu))

    def look(self, occupied: Collection[str], gpus: Collection[str]) -> None:
        """Hold no more what is clear. `occupied` are the GPUs, of these, with clients whose lease is not known."""
        self._clear([each for each in self._leases if each.is_clear(occupied, gpus)], "its processes are gone")

    def clear(self, gpu: str) -> None:
        """Hold a GPU no more, nor what else its leases hold, at an operator's word."""
        self._clear([each for each in self._leases if each.is_on(gpu)], "an operator said that all is clear")

    def _clear(self, leases: Collection[UnrestoredLease], because: str) -> None:
        for each in leases:
            with suppress(StorageError):  # the next mpsd sets it aside again, and clears it again
                self._discard(each.row)
            self._leases.remove(each)
            self._log.info(EventName.LEASE_NOT_RESTORED_ENDED, lease=each.id, because=because)
        if leases:
            self.changed()
