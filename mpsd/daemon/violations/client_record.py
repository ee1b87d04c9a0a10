"""The facts about clients that nothing reports later, on disk, since the next mpsd must know them.

These are the limits that were open to each client, the environment of each, and the parts of the clients that their
leases left behind. The file is in the runtime directory, since no client outlives the boot. It is not synchronised to
the disk, and closed to others, since it has tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from msgspec import Struct

from mpsd.core.admission.admission import Amount
from mpsd.core.model import ProcessIdentity, ReadBack
from mpsd.core.quantities import Bounds, Opened, Pid
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system.processes import proc

T = TypeVar("T")

ClientKey: TypeAlias = tuple[str, ProcessIdentity]
"""A client: its control daemon, and its process."""


@dataclass(frozen=True, slots=True)
class KnownClient:
    """The facts about a client that no later inspection shows."""

    server: int
    opened: Opened | None
    has_context: bool
    """Whether NVML has listed it, which proves that it has had a context."""
    environment: Mapping[str, str] | None
    """The variables that it was started with, which it may have overwritten since; None where they were never read."""


class _Row(Struct, forbid_unknown_fields=True):
    daemon: str
    process: ProcessIdentity
    server: Pid
    has_context: bool
    connecting: tuple[ReadBack, ReadBack] | None
    since: tuple[ReadBack, ReadBack] | None
    later: ReadBack | None
    environment: Mapping[str, str] | None = None


class _LeftBehind(Struct, forbid_unknown_fields=True):
    daemon: str
    process: ProcessIdentity
    part: Amount


class _Clients(Struct, forbid_unknown_fields=True):
    clients: tuple[_Row, ...]
    left_behind: tuple[_LeftBehind, ...] = ()


class ClientRecord:
    """The known clients, in memory and on disk; one that has ended is forgotten at the next write."""

    def __init__(self, path: Path, log: Logger) -> None:
        """Load the clients that an earlier mpsd knew."""
        self._record = Record(path, _Clients, log)
        self._is_stored = True
        self._clients: dict[ClientKey, KnownClient] = {}
        self.left_behind: Mapping[ClientKey, Amount] = {}
        """The part that each client had of its lease, which has ended: at least this counts against capacity."""
        found = self._record.load()
        if found is not None:
            self._clients = {(row.daemon, row.process): _known(row) for row in found.clients}
            self.left_behind = {(row.daemon, row.process): row.part for row in found.left_behind}

    def of(self, key: ClientKey, server: int) -> KnownClient | None:
        """Return the facts about a client of a server; None for one that was not seen yet."""
        known = self._clients.get(key)
        return known if known is not None and known.server == server else None

    def store(self, clients: Mapping[ClientKey, KnownClient]) -> None:
        """Store the present facts, if they have changed. Where that fails, this mpsd still knows them, and tries again.

        A client that its server does not list for a while is kept as long as its process lives.
        """
        if self._is_stored and clients.items() <= self._clients.items():
            return
        others = {each: self._clients[each] for each in self._clients.keys() - clients.keys()}
        self._clients, self.left_behind = {**_living(others), **clients}, _living(self.left_behind)
        self._write()

    def leave_behind(self, parts: Mapping[ClientKey, Amount]) -> None:
        """Store the parts of the clients of a lease that ends, before its end is stored.

        Where that fails, this mpsd still knows them, and tries again with the next change. Those that have exited are
        forgotten at another time: an end must not fail because a process cannot be read.
        """
        self.left_behind = {**self.left_behind, **parts}
        self._write()

    def _write(self) -> None:
        clients = tuple(_row(key, known) for key, known in self._clients.items())
        left = tuple(_LeftBehind(*key, part) for key, part in self.left_behind.items())
        self._is_stored = self._record.store(_Clients(clients, left))


def _living(facts: Mapping[ClientKey, T]) -> dict[ClientKey, T]:
    return {key: fact for key, fact in facts.items() if proc.lives(key[1])}


def _row(key: ClientKey, known: KnownClient) -> _Row:
    daemon, identity = key
    opened = known.opened
    if opened is None:
        return _Row(daemon, identity, known.server, known.has_context, None, None, None, known.environment)
    connecting, since = opened.connecting, opened.since
    bounds = (connecting.least, connecting.most), (since.least, since.most)
    return _Row(daemon, identity, known.server, known.has_context, *bounds, opened.later, known.environment)


def _known(row: _Row) -> KnownClient:
    opened = None
    if row.connecting is not None and row.since is not None:
        opened = Opened(Bounds(*row.connecting), Bounds(*row.since), row.later)
    return KnownClient(row.server, opened, row.has_context, row.environment)
