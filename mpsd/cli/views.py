"""What each answer of the API looks like to a person: one function for each, from the decoded answer to its text.

The answers come in with their foreign text made harmless (`render.plain`).
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from mpsd.cli.render import age, as_reported, columns, holders, holding_pid, percent, plural, size, table, until
from mpsd.core.sanitize import SECRETS

if TYPE_CHECKING:
    from mpsd.cli import answer_types

_UNKNOWN = "unknown"
_SEVERAL = 2
_VERDICTS = {"violation": "not ok", "nothing": "not ok"}


# -- the node ----------------------------------------------------------------------------------------------------------


def status(node: "answer_types.Status", now: datetime) -> str:
    """Say first whether the node is healthy, why not, and what to do; then what there is."""
    simulated = ", on simulated GPUs" if node["simulated"] else ""
    counts = f"{plural(node['leases'], 'lease')}, {node['waiting']} waiting, {plural(node['clients'], 'client')}"
    version = f"mpsd {node['version']}, up {age(node['since'], now)}{simulated}"
    parts = [
        "\n".join([node["headline"], *_to_know(node, now)]),
        _gpus_in_short(node["gpus"]),
        _daemons_in_short(node["daemons"], now),
        "\n".join([f"{counts}; {version}", *(f"note: {note}" for note in node["notes"])]),
    ]
    return "\n\n".join(parts)


def _to_know(node: "answer_types.Status", now: datetime) -> Iterator[str]:
    """Give a line for each thing that somebody can do something about, and for each limit that mpsd put back."""
    yield from (f"  {reason['subject']}: {reason['hint']}" for reason in node["reasons"])
    for warning in node["warnings"]:
        yield from () if warning["because"] in node["headline"] else (f"  {warning['because']}",)
        yield f"  {warning['subject']}: {warning['hint']}"
    for violation in node["violations"]:
        yield f"  {violation['kind']}, process {violation['pid']}: {violation['hint']}"
    for daemon in node["daemons"]:
        yield from (f"  {_drifted(drift, now)}" for drift in daemon["undone"])


def _drifted(drift: "answer_types.Drift", now: datetime) -> str:
    """Say what differed from what mpsd set, and how long ago it was found, or put back."""
    if drift["undone"]:
        return f"{drift['because']} ({age(drift['undone'], now)} ago)"
    return f"{drift['because']} (found {age(drift['since'], now)} ago)"


def _limit(name: str, value: float | None) -> str:
    """Print a limit in its own unit."""
    if value is None:
        return "no limit"
    return percent(value) if name == "active_thread_percentage" else size(int(value))


def _gpus_in_short(gpus: "list[answer_types.Gpu]") -> str:
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            gpu["compute_mode"] or _UNKNOWN,
            _granted_threads(gpu),
            _granted_memory(gpu),
            _taken_places(gpu),
            gpu["name"] or _UNKNOWN,
        )
        for gpu in gpus
    ]
    headings = ("GPU", "HEALTH", "COMPUTE MODE", "THREADS", "MEMORY", "CLIENTS", "NAME")
    return "\n".join([table(headings, rows, none="no GPUs"), *_unleased(gpus)])


def _daemons_in_short(daemons: "list[answer_types.Daemon]", now: datetime) -> str:
    rows = [
        (
            daemon["name"],
            daemon["state"],
            age(daemon["since"], now),
            _pid(daemon["pid"]),
            *_limits(daemon),
            _servers(daemon),
        )
        for daemon in daemons
    ]
    headings = ("DAEMON", "STATE", "SINCE", "PID", "THREADS", "MEMORY", "SERVERS")
    return table(headings, rows, none="no control daemons")


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpus(answer: "answer_types.Gpus") -> str:
    """List the GPUs, with what was granted of what there is."""
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            gpu["compute_mode"] or _UNKNOWN,
            _granted_threads(gpu),
            _granted_memory(gpu),
            size(gpu["memory_reserved"]),
            _UNKNOWN if gpu["memory_held"] is None else size(gpu["memory_held"]),
            _taken_places(gpu),
            gpu["uuid"] or _UNKNOWN,
            gpu["name"] or _UNKNOWN,
        )
        for gpu in answer["gpus"]
    ]
    headings = ("GPU", "HEALTH", "COMPUTE MODE", "THREADS", "MEMORY", "RESERVED", "HELD", "CLIENTS", "UUID", "NAME")
    troubles = [_trouble(f"GPU {gpu['index']}", gpu) for gpu in answer["gpus"] if gpu["hint"]]
    return "\n".join([table(headings, rows, none="no GPUs"), *_unleased(answer["gpus"]), *troubles])


def _unleased(gpus: "list[answer_types.Gpu]") -> Iterator[str]:
    """Say what clients use that no lease has, and who they are."""
    for gpu in gpus:
        if gpu["clients_unleased"]:
            used = f"{percent(gpu['threads_unleased'])} and {size(gpu['memory_unleased'])}"
            clients = plural(gpu["clients_unleased"], "client")
            yield f"GPU {gpu['index']}: {used} count as used by {clients} without a lease (mpsctl clients)"


def _granted_threads(gpu: "answer_types.Gpu") -> str:
    return f"{percent(gpu['threads_granted'])} of 100%"


def _granted_memory(gpu: "answer_types.Gpu") -> str:
    return f"{size(gpu['memory_granted'])} of {_UNKNOWN if gpu['memory_total'] is None else size(gpu['memory_total'])}"


def _taken_places(gpu: "answer_types.Gpu") -> str:
    taken = gpu["clients"] + gpu["clients_unleased"]
    return f"{taken} of {_UNKNOWN if gpu['clients_max'] is None else gpu['clients_max']}"


def _trouble(name: str, part: "answer_types.Gpu | answer_types.Daemon") -> str:
    return f"{name}: {part['because']}\n  hint: {part['hint']}"


# -- control daemons ---------------------------------------------------------------------------------------------------


def daemons(answer: "answer_types.Daemons", now: datetime) -> str:
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
        lines += [_drifted(drift, now) for drift in daemon["drift"] + daemon["undone"]]
        if daemon["hint"]:
            lines.append(_trouble(daemon["name"], daemon))
        if daemon["restart_for"]:
            settings, name = ", ".join(daemon["restart_for"]), daemon["name"]
            lines.append(
                f"{name}: it was started with a different {settings}; to apply the change: mpsctl restart {name}"
            )
    return "\n".join(lines)


def _limits(daemon: "answer_types.Daemon") -> tuple[str, str]:
    """Print both limits as they read back; one that drifted is marked. Whoever reports no threads was not heard yet."""
    limits, drifted = daemon["limits"], {drift["limit"] for drift in daemon["drift"] if drift["server"] is None}
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


def _servers(daemon: "answer_types.Daemon") -> str:
    return ", ".join(f"{server['pid']}{' (orphan)' if server['orphan'] else ''}" for server in daemon["servers"]) or "-"


def _pid(pid: int | None) -> str:
    return "-" if pid is None else str(pid)


# -- clients and leases ------------------------------------------------------------------------------------------------


def clients(answer: "answer_types.Clients") -> str:
    """List the processes that are connected to an MPS server."""
    rows = [
        (
            str(client["pid"]),
            _UNKNOWN if client["uid"] is None else str(client["uid"]),
            client["daemon"],
            str(client["server"]),
            client["lease"] or "none",
            client["verdict"],
            client["name"],
        )
        for client in answer["clients"]
    ]
    lines = [f"{client['verdict']}: {client['because']}" for client in answer["clients"] if client["because"]]
    heads = ("PID", "UID", "DAEMON", "SERVER", "LEASE", "VERDICT", "NAME")
    return "\n".join([table(heads, rows, none="no clients"), *lines])


def verified(answer: "answer_types.Verify") -> str:
    """Say what verifying a lease came to, then what each of its processes can use of what it was granted."""
    rows = [
        (
            str(each["pid"]),
            each["daemon"],
            _pid(each["server"]),
            _in_force(each, "active_thread_percentage"),
            _in_force(each, "pinned_device_mem_limit"),
            _UNKNOWN if each["memory_held"] is None else size(each["memory_held"]),
            "ok" if each["ok"] else each["because"],
        )
        for each in answer["processes"]
    ]
    lines = [f"{_VERDICTS.get(answer['verdict'], answer['verdict'])}: {answer['because']}"]
    lines += [f"  {each}" for each in answer["violations"] if each not in answer["because"]]
    lines += [f"  unknown: {each}" for each in answer["unknown"] if each != answer["because"]]
    if rows:
        heads = ("PID", "DAEMON", "SERVER", "THREADS", "MEMORY", "HOLDS", "VERDICT")
        lines += ["", table(heads, rows, none="")]
    return "\n".join(lines)


def _in_force(
    each: "answer_types.Process", name: Literal["active_thread_percentage", "pinned_device_mem_limit"]
) -> str:
    """Print a limit that a process really has, of the one that it was granted: between what and what, if it differs."""
    exact, in_force, at_least = each["limits_granted"][name], each["limits_in_force"], each["limits_at_least"]
    if in_force is None:
        return f"{_UNKNOWN} of {_limit(name, exact)}" if each["mps"] else f"- of {_limit(name, exact)}"
    granted = _limit(name, in_force[name] if in_force[name] == as_reported(exact) else exact)  # with as many digits
    most = _limit(name, in_force[name])
    least = most if at_least is None else _limit(name, at_least[name])
    return f"{most} of {granted}" if least == most else f"{least} to {most} of {granted}"


def leases(answer: "answer_types.Leases", now: datetime) -> str:
    """List the leases that have not ended, and tell in a line of those that this caller may not see."""
    rows = [
        (
            lease["id"],
            _place(lease),
            _alike(share["daemon"] for share in lease["shares"]) or "-",
            *_share(lease),
            str(lease["owner"]["uid"]),
            holding_pid(lease),
            age(lease["created"], now),
            lease["name"] or "-",
        )
        for lease in sorted(answer["leases"], key=_queue_position)
    ]
    headings = ("LEASE", "STATE", "DAEMON", "THREADS", "MEMORY", "UID", "PID", "AGE", "NAME")
    lines = [line for lease in answer["leases"] for line in _judged(lease)]
    return "\n".join([table(headings, rows, none="no leases"), *lines, *_of_others(answer["others"])])


def _judged(lease: "answer_types.Lease") -> Iterator[str]:
    """Give the lines about a lease's open violations, and about what is not known of its processes."""
    for each in lease["violations"]:
        yield from (f"{lease['id']}: violation: {each['because']}", f"  hint: {each['hint']}")
    yield from (f"{lease['id']}: unknown: {each}" for each in lease["unknown"])


def _queue_position(lease: "answer_types.Lease") -> int:
    """Return its place in the queue; what has been granted stands before that."""
    return lease["wait"]["position"] if lease["wait"] else 0


def _place(lease: "answer_types.Lease") -> str:
    """Print the state, and of what waits, where it stands and what for."""
    wait = lease["wait"]
    return f"{lease['state']}, place {wait['position']}, for {wait['waits_for']}" if wait else lease["state"]


def _of_others(others: "answer_types.Others") -> list[str]:
    """Tell what those have whose leases are not listed; nothing where there are none."""
    if not others["leases"]:
        return []
    threads, memory = percent(others["threads_granted"]), size(others["memory_granted"])
    waiting = f", {others['waiting']} of them waiting" if others["waiting"] else ""
    return [f"and {plural(others['leases'], 'lease')} of other users, of {threads} and {memory} in all{waiting}"]


def _share(lease: "answer_types.Lease") -> tuple[str, str]:
    """Print threads and memory on each GPU; one that waits for a fraction has none yet."""
    if lease["shares"]:
        threads = _alike(percent(share["active_thread_percentage"]) for share in lease["shares"])
        return threads, _alike(size(share["pinned_device_mem_limit"]) for share in lease["shares"])
    wanted, memory = lease["active_thread_percentage"], lease["pinned_device_mem_limit"]
    return "-" if wanted is None else percent(wanted), "-" if memory is None else size(memory)


def _alike(values: Iterable[str]) -> str:
    """Print values, one time where they are all the same."""
    return ",".join(dict.fromkeys(values))


def lease(answer: "answer_types.Lease", now: datetime) -> str:
    """Show everything about one lease."""
    threads, memory = _share(answer)
    most = f"{answer['processes']} at most" if answer["processes"] else "any number"
    shares = answer["shares"]
    wait, expires, ended = answer["wait"], answer["expires"], answer["ended"]
    exactly = "" if answer["pinned_device_mem_limit"] is None else f" ({answer['pinned_device_mem_limit']} bytes)"
    return columns(
        [
            ("lease", answer["id"]),
            ("state", f"{answer['state']}: {answer['because']}"),
            *(
                [("waits", f"at position {wait['position']} for {wait['waits_for']}: {wait['because']}")]
                if wait
                else []
            ),
            ("name", answer["name"] or "-"),
            ("labels", " ".join(f"{key}={value}" for key, value in answer["labels"].items()) or "-"),
            ("priority", str(answer["priority"])),
            *(_one_gpu(answer) if len(shares) < _SEVERAL else []),
            ("threads", threads),
            ("memory", memory + exactly if len(shares) < _SEVERAL else memory),
            ("holder", holders(answer)),
            ("clients", f"{' '.join(map(str, answer['clients'])) or '-'} (of {most})"),
            *([("kept by", f"{' '.join(map(str, answer['bearers']))} (by its token)")] if answer["bearers"] else []),
            ("created", f"{answer['created']} ({age(answer['created'], now)} ago)"),
            *([("expires", f"{expires} (in {until(expires, now)}, unless renewed)")] if expires else []),
            *([("ended", f"{ended} ({age(ended, now)} ago)")] if ended else []),
            *(("violation", f"{each['because']}; {each['hint']}") for each in answer["violations"]),
            *(("unknown", each) for each in answer["unknown"]),
            *(_each_gpu(answer) if len(shares) >= _SEVERAL else _environment("env", answer["env"])),
        ]
    )


def _one_gpu(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    return [("daemon", lease["daemon"] or "-"), ("GPU", " ".join(lease["gpus"]) or "-")]


def _each_gpu(lease: "answer_types.Lease") -> Iterator[tuple[str, str]]:
    """Show what it has on each of several GPUs, under the number by which `show --share` takes it."""
    for number, share in enumerate(lease["shares"]):
        threads, memory = percent(share["active_thread_percentage"]), size(share["pinned_device_mem_limit"])
        yield f"share {number}", f"{share['daemon']}, {share['gpu']}: {threads} and {memory}"
        yield from _environment("  env", share["env"])


def _environment(label: str, variables: "dict[str, str]") -> list[tuple[str, str]]:
    return [(label, f"{name}={value}") for name, value in variables.items() if name not in SECRETS]


# -- settings and operations -------------------------------------------------------------------------------------------


def config(answer: "answer_types.Config") -> str:
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


def operation(answer: "answer_types.Operation") -> str:
    """Say what came of an operation."""
    return f"{answer['id']} {answer['state']}: {answer['because']}"
