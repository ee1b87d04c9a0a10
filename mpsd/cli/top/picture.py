"""The content of `mpsctl top` at one moment: the node's headline, a line for each GPU, a row for each client and lease.

A lease without a client has a row too, since it holds capacity. Foreign text is made harmless here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.command import of_one_version
from mpsd.cli.lease_views import sm_activity
from mpsd.cli.render import holder_in_short, percent, size
from mpsd.cli.tables import Column, Figure, Look, bar, fitting, table
from mpsd.cli.users import name_of
from mpsd.client import Api
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

GPUS: Final = (
    Column("GPU"),
    Column("HEALTH", rank=1),
    Column("DAEMON"),
    Column("THREADS"),
    Column("MEMORY"),
    Column("HELD", rank=2),
    Column("CLIENTS", rank=3),
)

COLUMNS: Final = (
    Column("PID"),
    Column("USER"),
    Column("GPU"),
    Column("THREADS"),
    Column("SM", rank=3),
    Column("HELD"),
    Column("GRANTED"),
    Column("LEASE", rank=2),
    Column("HOLDER", rank=4),
    Column("VERDICT", rank=1),
    Column("COMMAND"),
)

_ENCODING: Final = "utf-8"
"""The encoding of the screen, which Textual uses for its own drawing."""
_NONE: Final = "-"
_UNKNOWN: Final = "unknown"
_NOTHING: Final = Figure(_NONE, 0)


class Entry(NamedTuple):
    """One row: a client of a lease, a client without one, or a lease without a client."""

    key: str
    lease: str | None
    daemon: str
    cells: tuple[str | Figure, ...]
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
    found = [each for each in entries if not text or any(text in _text(cell).lower() for cell in each.cells)]
    return sorted(found, key=lambda each: _order(each.cells[number]))


def gpus(picture: Picture, width: int, most: int) -> str:
    """Return the table of at most this many GPUs."""
    shown = picture.gpus if len(picture.gpus) <= most else picture.gpus[: most - 1]
    more = len(picture.gpus) - len(shown)
    return table(GPUS, shown, Look(width), none="no GPUs") + (f"\nand {more} more: mpsctl gpus" if more else "")


def rows(entries: list[Entry], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that fit."""
    return fitting(COLUMNS, [each.cells for each in entries], Look(width))


def _order(cell: str | Figure) -> tuple[float, str]:
    return (-cell.value, cell.text) if isinstance(cell, Figure) else (0.0, cell)


def _text(cell: str | Figure) -> str:
    return cell.text if isinstance(cell, Figure) else cell


def _gpu(gpu: "answer_types.Gpu", daemons: "dict[str, answer_types.Daemon]") -> tuple[str, ...]:
    """Return the row of a GPU, in the order of GPUS."""
    daemon, total = daemons.get(gpu["uuid"] or ""), gpu["memory_total"]
    part = gpu["memory_granted"] / total if total else 0.0
    return (
        str(gpu["index"]),
        "refused" if gpu["health"] == "ok" and gpu["refused"] else gpu["health"],
        daemon["state"] if daemon is not None else _NONE,
        f"{bar(gpu['threads_granted'] / 100, _ENCODING)} {percent(gpu['threads_granted'])}",
        f"{bar(part, _ENCODING)} {size(gpu['memory_granted'])} of {_UNKNOWN if total is None else size(total)}",
        _UNKNOWN if gpu["memory_held"] is None else size(gpu["memory_held"]),
        f"{gpu['clients'] + gpu['clients_unleased']} of {gpu['clients_max'] or _UNKNOWN}",
    )


def _entries(clients: "list[answer_types.Client]", leases: "list[answer_types.Lease]") -> Iterator[Entry]:
    by_id = {lease["id"]: lease for lease in leases}
    seen = set[tuple[str, str]]()
    for client in clients:
        lease = by_id.get(client["lease"] or "")
        seen.add((client["lease"] or "", client["daemon"]))
        yield Entry(
            f"{client['daemon']}/{client['pid']}",
            client["lease"],
            client["daemon"],
            (
                str(client["pid"]),
                name_of(client["uid"]),
                client["daemon"].removeprefix("gpu"),
                *_granted(lease, client["daemon"], sm_activity(client), _held(client)),
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
                        *_granted(lease, share["daemon"], _NOTHING, _NOTHING),
                        lease["id"],
                        holder_in_short(lease),
                        "idle",
                        lease["name"] or _NONE,
                    ),
                )


def _granted(lease: "answer_types.Lease | None", daemon: str, activity: Figure, held: Figure) -> tuple[Figure, ...]:
    """Return the threads of a lease's share on a GPU, the SM activity, the memory held, and that of the share."""
    for share in lease["shares"] if lease is not None else ():
        if share["daemon"] == daemon:
            threads, memory = share["active_thread_percentage"], share["pinned_device_mem_limit"]
            return Figure(percent(threads), threads), activity, held, Figure(size(memory), memory)
    return _NOTHING, activity, held, _NOTHING


def _held(client: "answer_types.Client") -> Figure:
    held = client["memory_held"]
    return Figure(_UNKNOWN, 0) if held is None else Figure(size(held), held)
