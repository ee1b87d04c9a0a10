"""The content of `mpsctl top` at one moment: the node's headline, a line for each GPU, a row for each client and lease.

A lease without a client has a row too, since it holds capacity. Foreign text is made harmless here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.command import of_one_version
from mpsd.cli.render import granted_memory, holder_in_short, percent, size, taken_places
from mpsd.cli.tables import Figure, Look, bar, columns_of, fitting, table
from mpsd.cli.users import name_of
from mpsd.client import Api
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

GPUS: Final = columns_of(
    ("GPU", "HEALTH", "DAEMON", "THREADS", "MEMORY", "HELD", "CLIENTS"), drops=("CLIENTS", "HELD", "HEALTH")
)
COLUMNS: Final = columns_of(
    ("PID", "USER", "GPU", "THREADS", "HELD", "GRANTED", "LEASE", "HOLDER", "VERDICT", "COMMAND"),
    drops=("HOLDER", "LEASE", "VERDICT"),
)

_ENCODING: Final = "utf-8"
"""The encoding of the screen, which Textual uses for its own drawing."""
_NONE: Final = "-"
_NOTHING: Final = Figure(_NONE, 0)


class Entry(NamedTuple):
    """One row: a client of a lease, a client without one, or a lease without a client."""

    key: str
    lease: str | None
    daemon: str
    cells: tuple[str, ...]
    """The cells, in the order of COLUMNS."""

    @property
    def is_client(self) -> bool:
        """Whether it is a process, rather than a lease without one."""
        return self.cells[0] != _NONE


class Picture(NamedTuple):
    """The node at one moment."""

    headline: str
    gpus: tuple[tuple[str, ...], ...]
    """A row for each GPU, in the order of GPUS."""
    entries: tuple[Entry, ...]


def take(api: Api) -> Picture:
    """Query mpsd, and return its answers.

    Raises UnreachableError, the errors of mpsd's answers, and InternalError for an mpsd of another version.
    """
    status, clients, leases = plain(api.status()), plain(api.clients()), plain(api.leases())
    with of_one_version():
        daemons = {each["gpu"]: each for each in status["daemons"]}
        return Picture(
            status["headline"],
            tuple(_gpu(each, daemons) for each in status["gpus"]),
            tuple(_entries(clients["clients"], leases["leases"])),
        )


def arranged(entries: tuple[Entry, ...], *, sort: str, text: str) -> list[Entry]:
    """Return the entries that contain a text, sorted by a column; the largest figures first."""
    number = [each.heading for each in COLUMNS].index(sort)
    text = text.lower()
    found = [each for each in entries if any(text in cell.lower() for cell in each.cells)]
    return sorted(found, key=lambda each: _order(each.cells[number]))


def gpus(picture: Picture, width: int, most: int) -> str:
    """Return the table of at most this many GPUs."""
    shown = picture.gpus if len(picture.gpus) <= most else picture.gpus[: most - 1]
    more = len(picture.gpus) - len(shown)
    return table(GPUS, shown, Look(width), none="no GPUs") + (f"\nand {more} more: mpsctl gpus" if more else "")


def rows(entries: list[Entry], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that fit."""
    return fitting(COLUMNS, [each.cells for each in entries], Look(width))


def _order(cell: str) -> tuple[float, str]:
    return (-(cell.value or 0.0) if isinstance(cell, Figure) else 0.0), cell


def _gpu(gpu: "answer_types.Gpu", daemons: "dict[str, answer_types.Daemon]") -> tuple[str, ...]:
    """Return the row of a GPU, in the order of GPUS."""
    daemon, total = daemons.get(gpu["uuid"] or ""), gpu["memory_total"]
    part = gpu["memory_granted"] / total if total else 0.0
    return (
        str(gpu["index"]),
        "refused" if gpu["health"] == "ok" and gpu["refused"] else gpu["health"],
        daemon["state"] if daemon is not None else _NONE,
        f"{bar(gpu['threads_granted'] / gpu['threads_total'], _ENCODING)} {percent(gpu['threads_granted'])}",
        f"{bar(part, _ENCODING)} {granted_memory(gpu)}",
        size(gpu["memory_held"]),
        taken_places(gpu),
    )


def _entries(clients: "list[answer_types.Client]", leases: "list[answer_types.Lease]") -> Iterator[Entry]:
    by_id = {lease["id"]: lease for lease in leases}
    seen = {(client["lease"], client["daemon"]) for client in clients}
    for client in clients:
        lease = by_id.get(client["lease"] or "")
        held = client["memory_held"]
        yield Entry(
            f"{client['daemon']}/{client['pid']}",
            client["lease"],
            client["daemon"],
            (
                str(client["pid"]),
                name_of(client["uid"]),
                client["daemon"].removeprefix("gpu"),
                *_granted(lease, client["daemon"], Figure(size(held), held or 0)),
                client["lease"] or "none",
                _NONE if lease is None else holder_in_short(lease),
                client["verdict"],
                client["name"],
            ),
        )
    for lease in leases:
        for share in lease["shares"]:
            if (lease["id"], share["daemon"]) not in seen:
                yield Entry(
                    f"{share['daemon']}/{lease['id']}",
                    lease["id"],
                    share["daemon"],
                    (
                        _NONE,
                        name_of(lease["owner"]["uid"]),
                        share["daemon"].removeprefix("gpu"),
                        *_granted(lease, share["daemon"], _NOTHING),
                        lease["id"],
                        holder_in_short(lease),
                        "idle",
                        lease["name"] or _NONE,
                    ),
                )


def _granted(lease: "answer_types.Lease | None", daemon: str, held: Figure) -> tuple[Figure, ...]:
    """Return the threads of a lease's share on a GPU, the memory held, and that of the share."""
    for share in lease["shares"] if lease is not None else ():
        if share["daemon"] == daemon:
            threads, memory = share["active_thread_percentage"], share["pinned_device_mem_limit"]
            return Figure(percent(threads), threads), held, Figure(size(memory), memory)
    return _NOTHING, held, _NOTHING
