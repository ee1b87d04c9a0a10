"""Views of the answers about the node: one function for each, from the decoded answer to its text.

The foreign text in the answers is already made harmless (`render.plain`).
"""

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from mpsd.cli.render import age, as_here, columns, fold, limit, percent, pid, plural, size
from mpsd.cli.tables import Column, Figure, Look, bar, table
from mpsd.cli.users import name_of

if TYPE_CHECKING:
    from mpsd.client import answer_types

_UNKNOWN: Final = "unknown"
_IN_SHORT: Final = 7
"""The columns of control daemons in `status`: all but the driver and the pipe directory."""


# -- the node ----------------------------------------------------------------------------------------------------------


def status(node: "answer_types.Status", now: datetime, look: Look) -> str:
    """Show first whether the node is healthy, with the reasons and remedies; then its GPUs and control daemons."""
    simulated = ", on simulated GPUs" if node["simulated"] else ""
    counts = f"{plural(node['leases'], 'lease')}, {node['waiting']} waiting, {plural(node['clients'], 'client')}"
    version = f"mpsd {node['version']}, up {age(node['since'], now)}{simulated}"
    first = node["headline"].partition(":")[0] if node["reasons"] else node["headline"]
    parts = [
        "\n".join([as_here(first), *(fold(as_here(each), look.width, 4) for each in _to_know(node, first, now))]),
        "\n".join([_gpu_table(node["gpus"], None, look), *_unleased(node["gpus"])]),
        _daemon_table(node["daemons"], now, look._replace(sort=None), _IN_SHORT),
        "\n".join([f"{counts}; {version}", *(f"note: {note}" for note in node["notes"])]),
    ]
    return "\n\n".join(parts)


def _to_know(node: "answer_types.Status", first: str, now: datetime) -> Iterator[str]:
    """Yield a line for each problem with its remedy, and for each limit that mpsd restored.

    The lines do not repeat the first line.
    """
    for each in (*node["reasons"], *node["warnings"]):
        yield f"  {each['subject']}: {each['hint']}" if each["because"] in first else f"  {_with_remedy(each)}"
    for violation in node["violations"]:
        subject = f"{violation['kind']}, process {violation['pid']}"
        yield f"  {subject}: {violation['hint']}" if violation["because"] in first else f"  {_with_remedy(violation)}"
    for daemon in node["daemons"]:
        yield from (f"  {_drifted(drift, now)}" for drift in daemon["undone"])


def _with_remedy(each: "answer_types.Reason | answer_types.Violation") -> str:
    """Describe a problem, followed by its remedy."""
    return f"{each['because']} -> {each['hint']}"


def _drifted(drift: "answer_types.Drift", now: datetime) -> str:
    """Describe a drift, and how long ago it was found or undone."""
    if drift["undone"]:
        return f"{drift['because']} ({age(drift['undone'], now)} ago)"
    return f"{drift['because']} (found {age(drift['since'], now)} ago)"


# -- GPUs --------------------------------------------------------------------------------------------------------------


GPUS: Final = (
    Column("GPU"),
    Column("HEALTH"),
    Column("THREADS"),
    Column("MEMORY"),
    Column("", rank=6),
    Column("HELD", rank=3),
    Column("CLIENTS"),
    Column("USERS", rank=2),
    Column("COMPUTE MODE", rank=5),
    Column("RESERVED", wide=True),
    Column("UUID", wide=True),
    Column("NAME", rank=4),
)


def gpus(answer: "answer_types.Gpus", leases: "list[answer_types.Lease]", look: Look) -> str:
    """List the GPUs, with granted and total capacity, and the users of the leases that the caller may see."""
    troubles = [_trouble(f"GPU {gpu['index']}", gpu) for gpu in answer["gpus"] if gpu["hint"]]
    refused = [
        fold(f"GPU {gpu['index']} admits no request: {as_here(gpu['refused'] or '')}", look.width, 2)
        for gpu in answer["gpus"]
        if gpu.get("refused") and not gpu["hint"]
    ]
    return "\n".join([_gpu_table(answer["gpus"], leases, look), *_unleased(answer["gpus"]), *troubles, *refused])


def _gpu_table(gpus: "list[answer_types.Gpu]", leases: "list[answer_types.Lease] | None", look: Look) -> str:
    users: dict[str, set[int]] = {}
    for lease in leases or ():
        for share in lease["shares"]:
            users.setdefault(share["gpu"], set()).add(lease["owner"]["uid"])
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            Figure(f"{percent(gpu['threads_granted'])} of 100%", gpu["threads_granted"]),
            Figure(_granted_memory(gpu), gpu["memory_granted"]),
            bar(_granted_part(gpu)),
            Figure(_UNKNOWN if gpu["memory_held"] is None else size(gpu["memory_held"]), gpu["memory_held"] or 0),
            Figure(_taken_places(gpu), gpu["clients"]),
            ", ".join(sorted(map(name_of, users.get(gpu["uuid"] or "", ())))) or "-",
            gpu["compute_mode"] or _UNKNOWN,
            size(gpu["memory_reserved"]),
            gpu["uuid"] or _UNKNOWN,
            gpu["name"] or _UNKNOWN,
        )
        for gpu in gpus
    ]
    if leases is not None:
        return table(GPUS, rows, look, none="no GPUs")
    known = [number for number, each in enumerate(GPUS) if each.heading != "USERS"]
    return table([GPUS[each] for each in known], [[row[each] for each in known] for row in rows], look, none="no GPUs")


def _granted_part(gpu: "answer_types.Gpu") -> float:
    """Return the larger of the granted parts of its threads and memory."""
    memory = gpu["memory_granted"] / gpu["memory_total"] if gpu["memory_total"] else 0.0
    return max(gpu["threads_granted"] / 100, memory)


def _unleased(gpus: "list[answer_types.Gpu]") -> Iterator[str]:
    """Describe the usage of clients without a lease."""
    for gpu in gpus:
        if gpu["clients_unleased"]:
            used = f"{percent(gpu['threads_unleased'])} and {size(gpu['memory_unleased'])}"
            clients = plural(gpu["clients_unleased"], "client")
            yield f"GPU {gpu['index']}: {used} count as used by {clients} without a lease (mpsctl clients)"


def _granted_memory(gpu: "answer_types.Gpu") -> str:
    return f"{size(gpu['memory_granted'])} of {_UNKNOWN if gpu['memory_total'] is None else size(gpu['memory_total'])}"


def _taken_places(gpu: "answer_types.Gpu") -> str:
    taken = gpu["clients"] + gpu["clients_unleased"]
    return f"{taken} of {_UNKNOWN if gpu['clients_max'] is None else gpu['clients_max']}"


def _trouble(name: str, part: "answer_types.Gpu | answer_types.Daemon") -> str:
    return f"{name}: {as_here(part['because'])}\n  hint: {part['hint']}"


# -- control daemons ---------------------------------------------------------------------------------------------------


DAEMONS: Final = (
    Column("DAEMON"),
    Column("STATE"),
    Column("SINCE"),
    Column("PID", rank=2),
    Column("THREADS"),
    Column("MEMORY"),
    Column("SERVERS", rank=1),
    Column("DRIVER", rank=3),
    Column("PIPE DIRECTORY", rank=4),
)


def daemons(answer: "answer_types.Daemons", now: datetime, look: Look) -> str:
    """List the control daemons, with their limits as read back, and the problems of each."""
    lines = [_daemon_table(answer["daemons"], now, look)]
    for daemon in answer["daemons"]:
        lines += [as_here(_drifted(drift, now)) for drift in daemon["drift"] + daemon["undone"]]
        if daemon["hint"]:
            lines.append(_trouble(daemon["name"], daemon))
        if daemon["restart_for"]:
            settings, name = ", ".join(daemon["restart_for"]), daemon["name"]
            lines.append(
                f"{name}: it was started with a different {settings}; to apply the change: mpsctl restart {name}"
            )
    return "\n".join(lines)


def _daemon_table(daemons: "list[answer_types.Daemon]", now: datetime, look: Look, columns: int | None = None) -> str:
    rows = [
        (
            daemon["name"],
            "drained" if daemon.get("drained") and daemon["state"] == "draining" else daemon["state"],
            Figure(age(daemon["since"], now), -datetime.fromisoformat(daemon["since"]).timestamp()),
            pid(daemon["pid"]),
            *_limits(daemon),
            _servers(daemon),
            daemon["version"] or _UNKNOWN,
            daemon["pipe_directory"],
        )
        for daemon in daemons
    ]
    return table(DAEMONS[:columns], [row[:columns] for row in rows], look, none="no control daemons")


def _limits(daemon: "answer_types.Daemon") -> tuple[str, str]:
    """Print both limits as read back, and mark drift. A daemon without a threads value has not answered yet."""
    limits, drifted = daemon["limits"], {drift["limit"] for drift in daemon["drift"] if drift["server"] is None}
    if limits["active_thread_percentage"] is None:
        return _UNKNOWN, _UNKNOWN
    threads, memory = (
        limit(name, value) + (" (drift)" if name in drifted else "")
        for name, value in (
            ("active_thread_percentage", limits["active_thread_percentage"]),
            ("pinned_device_mem_limit", limits["pinned_device_mem_limit"]),
        )
    )
    return threads, memory


def _servers(daemon: "answer_types.Daemon") -> str:
    return ", ".join(f"{each['pid']}{_kind(each)}" for each in daemon["servers"]) or "-"


def _kind(server: "answer_types.Server") -> str:
    return " (orphan)" if server["orphan"] else " (ending)" if server.get("dying") else ""


# -- settings and operations -------------------------------------------------------------------------------------------


def config(answer: "answer_types.Config") -> str:
    """List the settings in force."""
    return columns(
        (f"{section}.{key}", _setting(value))
        for section, settings in answer["config"].items()
        for key, value in settings.items()
    )


def _setting(value: object) -> str:
    """Print a setting nearly as in the configuration file."""
    match value:
        case None | [] | "":
            return "-"
        case bool():
            return str(value).lower()
        case list():
            return " ".join(map(str, value))
        case _:
            return str(value)


def operation(answer: "answer_types.Operation") -> str:
    """Describe the result of an operation."""
    return f"{answer['id']} {answer['state']}: {as_here(answer['because'])}"
