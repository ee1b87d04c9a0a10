"""The content of `mpsctl top` at one moment: faults, a row for each GPU, and a row for each client and lease.

A lease without a client has a row too, since it holds capacity, and so has a request that waits. Foreign text is made
harmless here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.command import of_one_version
from mpsd.cli.command_lines import of_clients
from mpsd.cli.render import (
    UNKNOWN,
    amounts,
    as_here,
    for_you,
    holder_in_short,
    holding_pid,
    lack,
    percent,
    plural,
    problems,
    size,
    state_of,
    taken_places,
)
from mpsd.cli.tables import Figure, Look, bar, columns_of, fitting
from mpsd.cli.users import name_of
from mpsd.client import Client
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

GPUS: Final = columns_of(
    ("GPU", "STATE", "THREADS", "GRANTED", "", "HELD", "OF", "UTIL", "TEMP", "POWER", "PLACES", "FOR YOU"),
    drops=("", "OF", "PLACES", "POWER", "TEMP"),
    cuts=(),
)
COLUMNS: Final = columns_of(
    ("PID", "USER", "GPU", "HELD", "GRANTED", "THREADS", "STATE", "NAME", "LEASE", "HOLDER", "COMMAND"),
    drops=("HOLDER", "LEASE", "COMMAND"),
    cuts=("USER", "NAME", "HOLDER", "COMMAND"),
)

_NARROW: Final = 8
"""The columns up to NAME, which is the id of a lease without a name."""
_WITH_MORE: Final = 100
"""The width from which on there are all columns."""
_ENCODING: Final = "utf-8"
"""The encoding of the screen, which Textual uses for its own drawing."""
_NONE: Final = "-"
_NOTHING: Final = Figure(_NONE, -1)
_TIME: Final = "%H:%M:%S"

BAD: Final = frozenset(
    {
        *("violation", "faulty", "failed", "unknown", "misconfigured", "wedged", "unresponsive", "impaired"),
        *("no lease", "lost"),
    }
)
"""The words that stand for a fault."""
IN_ORDER: Final = frozenset({"ok", "idle", "waiting"})


class Fault(NamedTuple):
    """A fault, a violation or a warning, with its remedy."""

    word: str
    because: str
    remedy: str


class GpuRow(NamedTuple):
    """The row of a GPU."""

    daemon: str | None
    cells: tuple[str, ...]
    """In the order of GPUS."""
    details: tuple[str, ...]
    """What is wrong with it, and the remedies."""

    @property
    def state(self) -> str:
        return self.cells[1]


class Entry(NamedTuple):
    """One row: a client of a lease, a client without one, or a lease without a client."""

    key: str
    lease: "answer_types.Lease | None"
    client: "answer_types.Client | None"
    daemon: str | None
    rank: int
    """0 for a client with a violation, then other clients and lost ones, idle leases, and requests that wait."""
    cells: tuple[str, ...]
    """In the order of COLUMNS."""
    command: str = ""
    """The command line of a client, as far as the caller may see it."""


class Picture(NamedTuple):
    """The node at one moment."""

    at: datetime
    """In the zone of this machine."""
    healthy: bool
    faults: tuple[Fault, ...]
    """The gravest first: why the node is not healthy, violations, warnings."""
    gpus: tuple[GpuRow, ...]
    entries: tuple[Entry, ...]
    others: str
    """The sum of the leases that the caller may not see; empty if there are none."""

    @property
    def headline(self) -> str:
        """Whether the node is healthy, with the number of faults of each kind."""
        return ": ".join(filter(None, ("healthy" if self.healthy else "NOT HEALTHY", count(self.faults))))

    @property
    def time(self) -> str:
        return self.at.strftime(_TIME)


def take(api: Client, commands: dict[tuple[int, str], str]) -> Picture:
    """Query mpsd, and return its answers.

    `commands` is what was read of command lines before: each is read once, since that can take long.

    Raises UnreachableError, the errors of mpsd's answers, and InternalError for an mpsd of another version.
    """
    status, gpus = plain(api.status()), plain(api.gpus())
    clients, leases = plain(api.clients()), plain(api.leases())
    with of_one_version():
        _read_commands(clients["clients"], commands)
        daemons = {each["gpu"]: each for each in status["daemons"]}
        return Picture(
            datetime.now(UTC).astimezone(),
            status["healthy"],
            tuple(_faults(status)),
            tuple(_gpu(each, daemons.get(each["uuid"] or "")) for each in gpus["gpus"]),
            tuple(_entries(clients["clients"], leases["leases"], commands)),
            _of_others(leases["others"], clients["others"]),
        )


def _read_commands(clients: "list[answer_types.Client]", commands: dict[tuple[int, str], str]) -> None:
    """Read the command lines of new clients, and forget those of clients that are gone."""
    there = {(each["pid"], each["name"]): each for each in clients}
    for gone in commands.keys() - there:
        del commands[gone]
    found = of_clients(each for key, each in there.items() if key not in commands)
    commands |= {key: found.get(key[0]) or key[1] for key in there if key not in commands}


# -- faults ------------------------------------------------------------------------------------------------------------


def _faults(status: "answer_types.Status") -> Iterator[Fault]:
    for word, each in problems(status):
        yield Fault(word, as_here(each["because"]), as_here(each["hint"]))


def count(faults: Iterable[Fault]) -> str:
    """Count faults by their kind: `4 faults, 1 warning`."""
    words = [each.word for each in faults]
    return ", ".join(plural(words.count(each), each) for each in dict.fromkeys(words))


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _gpu(gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> GpuRow:
    total = gpu["memory_total"]
    cells = (
        str(gpu["index"]),
        _state(gpu, daemon),
        percent(gpu["threads_granted"]),
        size(gpu["memory_granted"]),
        bar(gpu["memory_granted"] / total if total else 0.0, _ENCODING),
        size(gpu["memory_held"]),
        size(total),
        _NONE if gpu["utilization"] is None else percent(gpu["utilization"]),
        _NONE if gpu["temperature"] is None else f"{gpu['temperature']}°C",
        _NONE if gpu["power"] is None else f"{gpu['power']:.0f}W",
        taken_places(gpu),
        for_you(gpu),
    )
    return GpuRow(daemon and daemon["name"], cells, tuple(_details(gpu, daemon)))


def _state(gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> str:
    """Print the worst about a GPU in a word: its health, its control daemon's state, what else is wrong, or `ok`."""
    if gpu["health"] != "ok":
        return gpu["health"]
    if daemon is not None and daemon["wedged"]:
        return "wedged"
    if daemon is not None and daemon["state"] != "ready":
        return state_of(daemon)
    return "impaired" if gpu["impaired"] else "refused" if gpu["refused"] else "ok"


def _details(gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> Iterator[str]:
    yield f"GPU {gpu['index']}: {gpu['name'] or UNKNOWN}, {gpu['uuid'] or UNKNOWN}"
    said = [(gpu["health"], gpu["because"]), ("hint", gpu["hint"])]
    if (obstacle := gpu["obstacle"]) is not None:
        said += [("not for you now", obstacle["because"]), ("hint", obstacle["hint"])]
    if gpu["power"] is not None and gpu["power_limit"] is not None:
        said.append(("power", f"{gpu['power']:.0f} of {gpu['power_limit']:.0f} W"))
    if daemon is not None:
        said += [(f"{daemon['name']} is {state_of(daemon)}", daemon["because"]), ("hint", daemon["hint"])]
        said.append(("operation", daemon["operation"]))
    yield from (f"{what}: {as_here(text)}" for what, text in said if text)


# -- clients and leases ------------------------------------------------------------------------------------------------


def _entries(
    clients: "list[answer_types.Client]", leases: "list[answer_types.Lease]", commands: Mapping[tuple[int, str], str]
) -> Iterator[Entry]:
    by_id = {lease["id"]: lease for lease in leases}
    seen = {(client["lease"], client["daemon"]) for client in clients}
    for client in clients:
        lease, held = by_id.get(client["lease"] or ""), client["memory_held"]
        command = commands[client["pid"], client["name"]]
        state = client["verdict"] if client["lease"] or client["verdict"] != "ok" else "no lease"
        cells = (
            Figure(str(client["pid"]), client["pid"]),
            name_of(client["uid"]),
            client["daemon"].removeprefix("gpu"),
            Figure(size(held), held),
            *_granted(lease, client["daemon"]),
            state,
            (lease["name"] or lease["id"]) if lease is not None else client["name"],
            client["lease"] or "none",
            _NONE if lease is None else holder_in_short(lease),
            _program(command),
        )
        rank = 0 if state in BAD and state != UNKNOWN else 1
        yield Entry(f"{client['daemon']}/{client['pid']}", lease, client, client["daemon"], rank, cells, command)
    for lease in leases:
        for share in lease["shares"]:
            if (lease["id"], share["daemon"]) not in seen:
                is_lost = lease.get("lost")
                yield _idle(lease, share["daemon"], 1 if is_lost else 2, "lost" if is_lost else "idle")
        if not lease["shares"]:
            yield _idle(lease, None, 3, "waiting")


def _program(command: str) -> str:
    """Shorten a command line by the directory of its program."""
    first, space, rest = command.partition(" ")
    return f"{first.rpartition('/')[2]}{space}{rest}"


def _idle(lease: "answer_types.Lease", daemon: str | None, rank: int, state: str) -> Entry:
    """Return the row of a lease without a client there, or of a request that waits."""
    cells = (
        _NOTHING,
        name_of(lease["owner"]["uid"]),
        _NONE if daemon is None else daemon.removeprefix("gpu"),
        _NOTHING,
        *_granted(lease, daemon),
        f"place {lease['wait']['position']}" if lease["wait"] else state,
        lease["name"] or lease["id"],
        lease["id"],
        holder_in_short(lease),
        _NONE,
    )
    return Entry(f"{daemon}/{lease['id']}", lease, None, daemon, rank, cells)


def _granted(lease: "answer_types.Lease | None", daemon: str | None) -> tuple[Figure, Figure]:
    """Return memory and threads of a lease's share on a GPU; of a request that waits, those it requests."""
    if lease is None:
        return _NOTHING, _NOTHING
    wanted = next((each for each in lease["shares"] if each["daemon"] == daemon), lease)
    memory, threads = wanted["pinned_device_mem_limit"], wanted["active_thread_percentage"]
    return (
        _NOTHING if memory is None else Figure(size(memory), memory),
        _NOTHING if threads is None else Figure(percent(threads), threads),
    )


def _of_others(leases: "answer_types.Others", clients: "answer_types.OtherClients") -> str:
    granted = amounts(leases["threads_granted"], leases["memory_granted"])
    parts = [f"{plural(leases['leases'], 'lease')} of other users, of {granted}"] if leases["leases"] else []
    held = f", with {size(clients['memory_held'])}"
    parts += [f"{plural(clients['clients'], 'client')} of other users{held}"] if clients["clients"] else []
    return ", ".join(parts)


# -- what is shown of it -----------------------------------------------------------------------------------------------


def arranged(entries: Sequence[Entry], *, sort: str, text: str, reverse: bool = False) -> list[Entry]:
    """Return the entries that contain a text, sorted by a column: the largest figures first, and violations above all.

    By memory, which is the usual order, clients come before idle leases, and these before requests that wait.
    """
    number = [each.heading for each in COLUMNS].index(sort)
    text = text.lower()
    found = [each for each in entries if any(text in cell.lower() for cell in each.cells)]
    found.sort(key=lambda each: _order(each.cells[number]), reverse=reverse)
    return sorted(found, key=lambda each: each.rank if sort == "HELD" else min(each.rank, 1))


def _order(cell: str) -> tuple[float, str]:
    if isinstance(cell, Figure):
        return -inf if cell.value is None else -cell.value, ""
    return (float(cell), "") if cell.isdecimal() else (inf, cell)


def gpus_shown(gpus: Sequence[GpuRow], most: int) -> Sequence[GpuRow]:
    """Return the GPUs in the order of their rows: where there is no room for all, those with a fault come first."""
    return gpus if len(gpus) <= most else sorted(gpus, key=lambda each: each.state in IN_ORDER)


def gpu_rows(gpus: Sequence[GpuRow], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that fit."""
    return fitting(GPUS, [each.cells for each in gpus], Look(width))


def rows(entries: Sequence[Entry], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that fit, with long names cut."""
    most = len(COLUMNS) if width >= _WITH_MORE else _NARROW
    return fitting(COLUMNS[:most], [each.cells[:most] for each in entries], Look(width))


def whole(entry: Entry) -> list[str]:
    """Return everything about a row, a line each."""
    said = [(column.heading.lower(), cell) for column, cell in zip(COLUMNS, entry.cells, strict=True)]
    if entry.lease is not None:
        said.append((f"lease {entry.lease['state']}", entry.lease["because"]))
        said.append(("held by", f"process {holding_pid(entry.lease)}, since {entry.lease['granted'] or _NONE}"))
        if wait := entry.lease["wait"]:
            said.append((f"waits{lack(wait['waits_for'])}", wait["because"]))
    if entry.client is not None:
        said += [
            ("command line", entry.command),
            (entry.client["verdict"], entry.client["because"]),
            ("hint", entry.client["hint"]),
        ]
    return [f"{what}: {as_here(text)}" for what, text in said if text]


# -- what the questions name -------------------------------------------------------------------------------------------


def lease_in_words(lease: "answer_types.Lease") -> str:
    """Describe a lease to an operator who is about to end it: its name, its user, and its share of each GPU."""
    shares = (
        f"{amounts(each['active_thread_percentage'], each['pinned_device_mem_limit'])}"
        f" on GPU {each['daemon'].removeprefix('gpu')}"
        for each in lease["shares"]
    )
    name = f" ({lease['name']})" if lease["name"] else ""
    return f"{lease['id']}{name} of {name_of(lease['owner']['uid'])}: {', '.join(shares) or 'it waits'}"


def client_in_words(entry: Entry) -> str:
    """Describe a client to an operator who is about to end it."""
    pid, user, gpu, held, *_ = entry.cells
    lease = "without a lease" if entry.lease is None else f"of {lease_in_words(entry.lease)}"
    return f"process {pid} ({entry.command}) of {user}, which holds {held} on GPU {gpu}, {lease}"


def load_of(picture: Picture, daemon: str) -> str:
    """Count the leases and the clients on the GPU of a control daemon, with their users."""
    there = [each for each in picture.entries if each.daemon == daemon]
    leases = {each.lease["id"] for each in there if each.lease is not None}
    users = ", ".join(sorted({each.cells[1] for each in there}))
    clients = sum(each.client is not None for each in there)
    return f"{plural(len(leases), 'lease')} and {plural(clients, 'client')}{users and f' of {users}'}"
