"""What each answer of the API looks like to a person: one function for each, from the decoded answer to its text.

The answers come in with their foreign text made harmless (`render.plain`).
"""

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from mpsd.cli.render import age, columns, percent, plural, size, table

if TYPE_CHECKING:
    from mpsd.cli import shapes

_UNKNOWN = "unknown"


# -- the node ----------------------------------------------------------------------------------------------------------


def status(node: "shapes.Status", gpus: "shapes.Gpus", daemons: "shapes.Daemons", now: datetime) -> str:
    """Say first whether the node is healthy, why not, and what to do; then what there is."""
    verdict = "healthy" if node["healthy"] else "NOT HEALTHY"
    simulated = ", on simulated GPUs" if node["simulated"] else ""
    counts = f"{plural(node['leases'], 'lease')}, {node['waiting']} waiting, {plural(node['clients'], 'client')}"
    version = f"mpsd {node['version']}, up {age(node['since'], now)}{simulated}"
    parts = [
        "\n".join([f"{verdict}: {node['because']}", *_remedies(gpus, daemons, now)]),
        _gpus_in_short(gpus),
        _daemons_in_short(daemons, now),
        "\n".join([f"{counts}; {version}", *(f"note: {note}" for note in node["notes"])]),
    ]
    return "\n\n".join(parts)


def _remedies(gpus: "shapes.Gpus", daemons: "shapes.Daemons", now: datetime) -> Iterator[str]:
    """Give a line for each thing that somebody can do something about."""
    for gpu in gpus["gpus"]:
        if gpu["hint"]:
            yield f"  GPU {gpu['index']}: {gpu['hint']}"
    for daemon in daemons["daemons"]:
        yield from (f"  {daemon['name']}: {_drifted(drift, now)}" for drift in daemon["drift"])
        if daemon["hint"]:
            yield f"  {daemon['name']}: {daemon['hint']}"


def _drifted(drift: "shapes.Drift", now: datetime) -> str:
    """Say what was wanted and what was found, since when, and whose command did it."""
    found, wanted = (_limit(drift["limit"], drift[side]) for side in ("found", "wanted"))
    culprit = f", set by the foreign command '{drift['command']}'" if drift["command"] else ""
    return f"{drift['limit']} is {found}, not {wanted}, since {age(drift['since'], now)}{culprit}"


def _limit(name: str, value: float | None) -> str:
    """Print a limit in its own unit."""
    if value is None:
        return "no limit"
    return percent(value) if name == "active_thread_percentage" else size(int(value))


def _gpus_in_short(gpus: "shapes.Gpus") -> str:
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            _granted_threads(gpu),
            _granted_memory(gpu),
            _granted_clients(gpu),
            gpu["name"] or _UNKNOWN,
        )
        for gpu in gpus["gpus"]
    ]
    return table(("GPU", "HEALTH", "THREADS", "MEMORY", "CLIENTS", "NAME"), rows, none="no GPUs")


def _daemons_in_short(daemons: "shapes.Daemons", now: datetime) -> str:
    rows = [
        (
            daemon["name"],
            daemon["state"],
            age(daemon["since"], now),
            _pid(daemon["pid"]),
            *_limits(daemon),
            _servers(daemon),
        )
        for daemon in daemons["daemons"]
    ]
    headings = ("DAEMON", "STATE", "SINCE", "PID", "THREADS", "MEMORY", "SERVERS")
    return table(headings, rows, none="no control daemons")


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpus(answer: "shapes.Gpus") -> str:
    """List the GPUs, with what was granted of what there is."""
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            _granted_threads(gpu),
            _granted_memory(gpu),
            size(gpu["memory_reserved"]),
            _UNKNOWN if gpu["memory_held"] is None else size(gpu["memory_held"]),
            _granted_clients(gpu),
            gpu["uuid"] or _UNKNOWN,
            gpu["name"] or _UNKNOWN,
        )
        for gpu in answer["gpus"]
    ]
    headings = ("GPU", "HEALTH", "THREADS", "MEMORY", "RESERVED", "HELD", "CLIENTS", "UUID", "NAME")
    troubles = [_trouble(f"GPU {gpu['index']}", gpu) for gpu in answer["gpus"] if gpu["hint"]]
    return "\n".join([table(headings, rows, none="no GPUs"), *troubles])


def _granted_threads(gpu: "shapes.Gpu") -> str:
    return f"{percent(gpu['threads_granted'])} of 100%"


def _granted_memory(gpu: "shapes.Gpu") -> str:
    return f"{size(gpu['memory_granted'])} of {_UNKNOWN if gpu['memory_total'] is None else size(gpu['memory_total'])}"


def _granted_clients(gpu: "shapes.Gpu") -> str:
    return f"{gpu['clients']} of {_UNKNOWN if gpu['clients_max'] is None else gpu['clients_max']}"


def _trouble(name: str, part: "shapes.Gpu | shapes.Daemon") -> str:
    return f"{name}: {part['because']}\n  hint: {part['hint']}"


# -- control daemons ---------------------------------------------------------------------------------------------------


def daemons(answer: "shapes.Daemons", now: datetime) -> str:
    """List the control daemons, with their limits as they read back, and what is wrong with each."""
    rows = [
        (
            daemon["name"],
            daemon["state"],
            age(daemon["since"], now),
            _pid(daemon["pid"]),
            *_limits(daemon),
            _servers(daemon),
            daemon["version"] or _UNKNOWN,
            daemon["pipe_directory"],
        )
        for daemon in answer["daemons"]
    ]
    headings = ("DAEMON", "STATE", "SINCE", "PID", "THREADS", "MEMORY", "SERVERS", "DRIVER", "PIPE DIRECTORY")
    lines = [table(headings, rows, none="no control daemons")]
    for daemon in answer["daemons"]:
        lines += [f"{daemon['name']}: {_drifted(drift, now)}" for drift in daemon["drift"]]
        if daemon["hint"]:
            lines.append(_trouble(daemon["name"], daemon))
    return "\n".join(lines)


def _limits(daemon: "shapes.Daemon") -> tuple[str, str]:
    """Print both limits as they read back; one that drifted is marked. Whoever reports no threads was not heard yet."""
    limits, drifted = daemon["limits"], {drift["limit"] for drift in daemon["drift"]}
    if limits["active_thread_percentage"] is None:
        return _UNKNOWN, _UNKNOWN
    threads, memory = (
        _limit(name, value) + (" (drift)" if name in drifted else "")
        for name, value in (
            ("active_thread_percentage", limits["active_thread_percentage"]),
            ("pinned_device_mem_limit", limits["pinned_device_mem_limit"]),
        )
    )
    return threads, memory


def _servers(daemon: "shapes.Daemon") -> str:
    return ", ".join(f"{server['pid']}{' (orphan)' if server['orphan'] else ''}" for server in daemon["servers"]) or "-"


def _pid(pid: int | None) -> str:
    return "-" if pid is None else str(pid)


# -- clients and leases ------------------------------------------------------------------------------------------------


def clients(answer: "shapes.Clients") -> str:
    """List the processes that are connected to an MPS server."""
    rows = [
        (
            str(client["pid"]),
            _UNKNOWN if client["uid"] is None else str(client["uid"]),
            client["daemon"],
            str(client["server"]),
            client["lease"] or "none",
            client["name"],
        )
        for client in answer["clients"]
    ]
    return table(("PID", "UID", "DAEMON", "SERVER", "LEASE", "NAME"), rows, none="no clients")


def leases(answer: "shapes.Leases", now: datetime) -> str:
    """List the leases that have not ended, and say when there are others that this caller may not see."""
    rows = [
        (
            lease["id"],
            lease["state"],
            lease["daemon"] or "-",
            *_share(lease),
            *_holder(lease),
            age(lease["created"], now),
            lease["name"] or "-",
        )
        for lease in answer["leases"]
    ]
    headings = ("LEASE", "STATE", "DAEMON", "THREADS", "MEMORY", "UID", "PID", "AGE", "NAME")
    hidden = answer["others"]["leases"]
    others = [f"and {plural(hidden, 'lease')} of other users"] if hidden else []
    return "\n".join([table(headings, rows, none="no leases"), *others])


def _share(lease: "shapes.Lease") -> tuple[str, str]:
    """Print threads and memory; one that waits on a fraction has none yet."""
    threads, memory = lease["active_thread_percentage"], lease["pinned_device_mem_limit"]
    return "-" if threads is None else percent(threads), "-" if memory is None else size(memory)


def _holder(lease: "shapes.Lease") -> tuple[str, str]:
    """Print uid and pid of whom it is tied to."""
    owner = lease["owner"]
    return ("-", "-") if owner is None else (str(owner["uid"]), str(owner["pid"]))


def lease(answer: "shapes.Lease", now: datetime) -> str:
    """Show everything about one lease."""
    threads, memory = _share(answer)
    uid, pid = _holder(answer)
    exactly = "" if answer["pinned_device_mem_limit"] is None else f" ({answer['pinned_device_mem_limit']} bytes)"
    wait, expires, ended = answer["wait"], answer["expires"], answer["ended"]
    return columns(
        [
            ("lease", answer["id"]),
            ("state", f"{answer['state']}: {answer['because']}"),
            *([("waits", f"in place {wait['position']} for {wait['waits_for']}: {wait['because']}")] if wait else []),
            ("name", answer["name"] or "-"),
            ("labels", " ".join(f"{key}={value}" for key, value in answer["labels"].items()) or "-"),
            ("daemon", answer["daemon"] or "-"),
            ("GPU", " ".join(answer["gpus"]) or "-"),
            ("threads", threads),
            ("memory", memory + exactly),
            ("holder", f"pid {pid}, uid {uid}"),
            ("clients", " ".join(map(str, answer["clients"])) or "-"),
            ("created", f"{answer['created']} ({age(answer['created'], now)} ago)"),
            *([("expires", expires)] if expires else []),
            *([("ended", f"{ended} ({age(ended, now)} ago)")] if ended else []),
            *(("env", f"{name}={value}") for name, value in answer["env"].items()),
        ]
    )


# -- settings and operations -------------------------------------------------------------------------------------------


def config(answer: "shapes.Config") -> str:
    """List the settings in force."""
    return columns(
        (f"{section}.{key}", _setting(value))
        for section, settings in answer["config"].items()
        for key, value in settings.items()
    )


def _setting(value: object) -> str:
    """Print a setting nearly as its file has it."""
    match value:
        case None | [] | "":
            return "-"
        case bool():
            return str(value).lower()
        case list():
            return " ".join(map(str, value))
        case _:
            return str(value)


def operation(answer: "shapes.Operation") -> str:
    """Say what came of an operation."""
    return f"{answer['id']} {answer['state']}: {answer['because']}"
