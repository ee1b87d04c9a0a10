"""Views of answers: one function for each, from the decoded answer to its text.

The foreign text in the answers is already made harmless (`sanitize.plain`).
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

from mpsd.cli.cells import fold
from mpsd.cli.render import (
    UNKNOWN,
    age,
    amounts,
    as_here,
    as_reported,
    columns,
    for_you,
    granted_memory,
    granted_threads,
    holders,
    holding_pid,
    keepers,
    lack,
    limit,
    numbers_of_gpus,
    percent,
    pid,
    plural,
    problems,
    size,
    state_of,
    taken_places,
    until,
    with_remedy,
)
from mpsd.cli.tables import PLAIN, Figure, Listed, Look, bar, columns_of, table
from mpsd.cli.users import name_of
from mpsd.core.sanitize import SECRETS

if TYPE_CHECKING:
    from mpsd.client import answer_types

_IN_SHORT: Final = 7
"""The columns of control daemons in `status`: all but the driver and the pipe directory."""

_SEVERAL: Final = 2


# -- the node ----------------------------------------------------------------------------------------------------------


def status(node: "answer_types.Status", now: datetime, look: Look) -> str:
    """Show first whether the node is healthy, with the reasons and remedies; then its GPUs and control daemons."""
    simulated = ", on simulated GPUs" if node["simulated"] else ""
    counts = f"{plural(node['leases'], 'lease')}, {node['waiting']} waiting, {plural(node['clients'], 'client')}"
    version = f"mpsd {node['version']}, up {age(node['since'], now)}{simulated}"
    first = node["headline"].partition(":")[0] if node["reasons"] else node["headline"]
    parts = [
        "\n".join([as_here(first), *(fold(as_here(each), look.width, 4) for each in _to_know(node, first, now))]),
        _gpus(node["gpus"])._replace(below=[*_unleased(node["gpus"])]).text(look),
        _daemons(node["daemons"], now, _IN_SHORT).text(look),
        "\n".join([f"{counts}; {version}", *(f"note: {note}" for note in node["notes"])]),
    ]
    return "\n\n".join(parts)


def _to_know(node: "answer_types.Status", first: str, now: datetime) -> Iterator[str]:
    """Yield a line for each problem with its remedy, and for each limit that mpsd restored.

    The lines do not repeat the first line.
    """
    for _, each in problems(node):
        subject = each.get("subject") or f"{each['kind']}, process {each.get('pid')}"
        yield f"  {subject}: {each['hint']}" if each["because"] in first else f"  {with_remedy(each)}"
    for daemon in node["daemons"]:
        yield from (f"  {_drifted(drift, now)}" for drift in daemon["undone"])


def _drifted(drift: "answer_types.Drift", now: datetime) -> str:
    """Describe a drift, and how long ago it was found or undone."""
    if drift["undone"]:
        return f"{drift['because']} ({age(drift['undone'], now)} ago)"
    return f"{drift['because']} (found {age(drift['since'], now)} ago)"


# -- GPUs --------------------------------------------------------------------------------------------------------------


GPUS: Final = columns_of(
    (
        *("GPU", "HEALTH", "FOR YOU", "THREADS", "THREADS TOTAL", "MEMORY", "MEMORY TOTAL", ""),
        *("HELD", "PLACES", "PLACES TOTAL", "USERS", "COMPUTE MODE", "RESERVED", "UUID", "NAME"),
    ),
    drops=("", "COMPUTE MODE", "NAME", "HELD", "USERS"),
    wide=("RESERVED", "UUID"),
    data=("THREADS TOTAL", "MEMORY TOTAL", "PLACES TOTAL"),
    cuts=("USERS", "NAME"),
)


def gpus(answer: "answer_types.Gpus") -> Listed:
    """List the GPUs, with granted and total capacity, their users as far as known, and why the caller gets nothing."""
    troubles = [line for gpu in answer["gpus"] if gpu["hint"] for line in _trouble(f"GPU {gpu['index']}", gpu)]
    obstacles = [
        as_here(line)
        for gpu in answer["gpus"]
        if (found := gpu["obstacle"]) and not gpu["hint"]
        for line in (f"GPU {gpu['index']} is not for you now: {found['because']}", f"  hint: {found['hint']}")
    ]
    return _gpus(answer["gpus"])._replace(below=[*_unleased(answer["gpus"]), *troubles, *obstacles])


def _gpus(gpus: "list[answer_types.Gpu]") -> Listed:
    rows = [
        (
            str(gpu["index"]),
            gpu["health"],
            for_you(gpu),
            Figure(granted_threads(gpu), gpu["threads_granted"]),
            Figure(percent(gpu["threads_total"]), gpu["threads_total"]),
            Figure(granted_memory(gpu), gpu["memory_granted"]),
            bytes_of(gpu["memory_total"]),
            bar(_granted_part(gpu)),
            bytes_of(gpu["memory_held"]),
            Figure(taken_places(gpu), gpu["clients"] + gpu["clients_unleased"]),
            Figure(f"{gpu['clients_max']}", gpu["clients_max"]),
            ", ".join(sorted(map(name_of, gpu.get("users", ())))) or "-",
            gpu["compute_mode"] or UNKNOWN,
            bytes_of(gpu["memory_reserved"]),
            gpu["uuid"] or UNKNOWN,
            gpu["name"] or UNKNOWN,
        )
        for gpu in gpus
    ]
    return Listed(GPUS, rows, "no GPUs")


def bytes_of(count: int | None) -> Figure:
    """Return a cell with an amount of memory."""
    return Figure(size(count), count)


def _since(then: str, now: datetime) -> Figure:
    """Return a cell with the age of a time; CSV has the time."""
    return Figure(age(then, now), -datetime.fromisoformat(then).timestamp(), then)


def _granted_part(gpu: "answer_types.Gpu") -> float:
    """Return the larger of the granted parts of its threads and memory."""
    memory = gpu["memory_granted"] / gpu["memory_total"] if gpu["memory_total"] else 0.0
    return max(gpu["threads_granted"] / gpu["threads_total"], memory)


def _unleased(gpus: "list[answer_types.Gpu]") -> Iterator[str]:
    """Describe the usage of clients without a lease."""
    for gpu in gpus:
        if gpu["clients_unleased"]:
            used = amounts(gpu["threads_unleased"], gpu["memory_unleased"])
            clients = plural(gpu["clients_unleased"], "client")
            end = "list them: mpsctl clients; end one: mpsctl end PID"
            yield f"GPU {gpu['index']}: {used} count as used by {clients} without a lease ({end})"


def _trouble(name: str, part: "answer_types.Gpu | answer_types.Daemon") -> Iterator[str]:
    yield f"{name}: {as_here(part['because'])}"
    yield f"  hint: {part['hint']}"


# -- control daemons ---------------------------------------------------------------------------------------------------


DAEMONS: Final = columns_of(
    ("DAEMON", "STATE", "SINCE", "PID", "THREADS", "MEMORY", "SERVERS", "DRIVER", "PIPE DIRECTORY"),
    drops=("PIPE DIRECTORY", "DRIVER", "PID", "SERVERS"),
    cuts=("SERVERS",),
)


def daemons(answer: "answer_types.Daemons", now: datetime) -> Listed:
    """List the control daemons, with their limits, and the problems of each."""
    listed, lines = _daemons(answer["daemons"], now), list[str]()
    for daemon in answer["daemons"]:
        lines += [as_here(_drifted(drift, now)) for drift in daemon["drift"] + daemon["undone"]]
        if daemon["hint"]:
            lines += _trouble(daemon["name"], daemon)
        if daemon["restart_for"]:
            settings, name = ", ".join(daemon["restart_for"]), daemon["name"]
            lines.append(
                f"{name}: it was started with a different {settings}; to apply the change: mpsctl restart {name}"
            )
    return listed._replace(below=lines)


def _daemons(daemons: "list[answer_types.Daemon]", now: datetime, columns: int | None = None) -> Listed:
    rows = [
        (
            daemon["name"],
            state_of(daemon),
            _since(daemon["since"], now),
            pid(daemon["pid"]),
            *_limits(daemon),
            ", ".join(f"{each['pid']}{_kind(each)}" for each in daemon["servers"]) or "-",
            daemon["version"] or UNKNOWN,
            daemon["pipe_directory"],
        )
        for daemon in daemons
    ]
    return Listed(DAEMONS[:columns], [row[:columns] for row in rows], "no control daemons")


def _limits(daemon: "answer_types.Daemon") -> tuple[str, str]:
    """Print both limits as read back, and mark drift. A daemon without a threads value has not answered yet."""
    limits, drifted = daemon["limits"], {drift["limit"] for drift in daemon["drift"] if drift["server"] is None}
    if limits["active_thread_percentage"] is None:
        return Figure(UNKNOWN, None), Figure(UNKNOWN, None)
    memory, wanted = limits["pinned_device_mem_limit"], daemon["limits_wanted"]["pinned_device_mem_limit"]
    return (
        _marked("active_thread_percentage", limits["active_thread_percentage"], drifted),
        _marked("pinned_device_mem_limit", _as_set(memory, wanted), drifted),
    )


def _as_set(reported: float | None, wanted: float | None) -> float | None:
    """Return the limit that was set where the report agrees with it: control daemons report memory in whole GiB."""
    return wanted if reported == as_reported(wanted) else reported


def _marked(name: str, value: float | None, drifted: Container[str]) -> Figure:
    return Figure(limit(name, value) + (" (drift)" if name in drifted else ""), value)


def _kind(server: "answer_types.Server") -> str:
    return " (orphan)" if server["orphan"] else " (ending)" if server.get("dying") else ""


# -- clients -----------------------------------------------------------------------------------------------------------

CLIENTS: Final = columns_of(
    (
        *("PID", "USER", "GPU", "HELD", "MEMORY", "THREADS", "LEASE", "NAME", "VERDICT"),
        *("DAEMON", "SERVER", "UID", "UUID", "COMMAND"),
    ),
    drops=("VERDICT", "NAME", "LEASE"),
    wide=("DAEMON", "SERVER", "UID", "UUID"),
    data=("MEMORY",),
    cuts=("USER", "NAME", "COMMAND"),
)


def clients(
    answer: "answer_types.Clients", leases: "Sequence[answer_types.Lease]", commands: Mapping[int, str]
) -> Listed:
    """List the processes that are connected to an MPS server, with what they hold and what their lease grants.

    `commands` has command lines by pid; another process is shown by its name.
    """
    by_id = {lease["id"]: lease for lease in leases}
    rows = [
        (
            str(client["pid"]),
            name_of(client["uid"]),
            client["daemon"].removeprefix("gpu"),
            *_held(client, lease),
            client["lease"] or "none",
            (lease["name"] if lease else "") or "-",
            client["verdict"],
            client["daemon"],
            str(client["server"]),
            UNKNOWN if client["uid"] is None else str(client["uid"]),
            client["gpu"],
            commands.get(client["pid"]) or client["name"] or "-",
        )
        for client in answer["clients"]
        for lease in [by_id.get(client["lease"] or "")]
    ]
    lines = []
    for client in answer["clients"]:
        lines += [as_here(f"{client['verdict']}: {client['because']}")] if client["because"] else []
        lines += [as_here(f"  hint: {client['hint']}")] if client["hint"] else []
    if (others := answer["others"])["clients"]:
        lines.append(f"and {plural(others['clients'], 'client')} of other users, with {size(others['memory_held'])}")
    return Listed(CLIENTS, rows, "no clients", lines)


def _held(client: "answer_types.Client", lease: "answer_types.Lease | None") -> tuple[Figure, Figure, Figure]:
    """Return what a client holds, beside the memory that its lease grants on that GPU; that memory; and the threads."""
    held = client["memory_held"]
    share = next((each for each in lease["shares"] if each["gpu"] == client["gpu"]), None) if lease else None
    if share is None:
        return bytes_of(held), Figure("-", None), Figure("-", None)
    memory, threads = share["pinned_device_mem_limit"], share["active_thread_percentage"]
    return Figure(f"{size(held)} of {size(memory)}", held), bytes_of(memory), Figure(percent(threads), threads)


VERIFIED: Final = columns_of(
    ("PID", "DAEMON", "SERVER", "THREADS", "MEMORY", "HELD", "VERDICT"), drops=("SERVER", "DAEMON")
)
_VERDICTS: Final = {"violation": "not ok", "nothing": "not ok"}


def verified(answer: "answer_types.Verify", look: Look = PLAIN) -> str:
    """Print the verdict on a lease, then the limits and memory of each of its processes."""
    rows = [
        (
            str(each["pid"]),
            each["daemon"],
            pid(each["server"]),
            _in_force(each, "active_thread_percentage"),
            _in_force(each, "pinned_device_mem_limit"),
            size(each["memory_held"]),
            "ok" if each["ok"] else as_here(each["because"]),
        )
        for each in answer["processes"]
    ]
    lines = [f"{_VERDICTS.get(answer['verdict'], answer['verdict'])}: {answer['because']}"]
    lines += [f"  hint: {answer['hint']}"] if answer["hint"] else []
    lines += [f"  {each}" for each in answer["violations"] if each not in answer["because"]]
    lines += [f"  unknown: {each}" for each in answer["unknown"] if each != answer["because"]]
    lines = [as_here(each) for each in lines]
    if rows:
        lines += ["", table(VERIFIED, rows, look, none="")]
    return "\n".join(lines)


def _in_force(
    each: "answer_types.Process", name: Literal["active_thread_percentage", "pinned_device_mem_limit"]
) -> str:
    """Print the limit of a process beside its granted limit; as a range, if only the bounds are known."""
    exact, in_force, at_least = each["limits_granted"][name], each["limits_in_force"], each["limits_at_least"]
    if in_force is None:
        return f"{UNKNOWN if each['mps'] else '-'} of {limit(name, exact)}"
    granted, most = limit(name, exact), limit(name, _as_set(in_force[name], exact))
    least = "?" if at_least is None else limit(name, _as_set(at_least[name], exact))
    if least != most:
        return f"{least} to {most} of {granted}"
    # A process that may have more than its part can have lowered it itself, which nothing shows.
    is_known = each["verdict"] != UNKNOWN or in_force[name] == as_reported(exact)
    return f"{most} of {granted}" if is_known else f"up to {most} of {granted}"


# -- leases ------------------------------------------------------------------------------------------------------------

LEASES: Final = columns_of(
    (
        *("LEASE", "STATE", "GPU", "THREADS", "MEMORY", "USER", "PID", "CLIENTS", "AGE", "EXPIRES"),
        *("HOLDER", "PRIORITY", "LABELS", "NAME"),
    ),
    drops=("CLIENTS", "EXPIRES", "PID", "AGE", "NAME"),
    wide=("HOLDER", "PRIORITY", "LABELS"),
    cuts=("GPU", "USER", "CLIENTS", "NAME"),
)


def leases(answer: "answer_types.Leases", now: datetime) -> Listed:
    """List leases: the granted ones, the waiting ones in the order of the queue, and the ended ones.

    Lines below the table show what each lease waits for, its problems, and the sum of the leases that this caller may
    not see.
    """
    ordered = sorted(answer["leases"], key=_queue_position)
    rows = [
        (
            lease["id"],
            _place(lease),
            numbers_of_gpus(lease, ",") or "-",
            *_share_figures(lease),
            name_of(lease["owner"]["uid"]),
            holding_pid(lease),
            _clients(lease),
            _since(lease["created"], now),
            _expiry(lease, now),
            holders(lease),
            Figure(str(lease["priority"]), lease["priority"]),
            _labels(lease),
            lease["name"] or "-",
        )
        for lease in ordered
    ]
    lines = [line for lease in ordered for line in _judged(lease, now)]
    return Listed(LEASES, rows, "no leases", [*lines, *_of_others(answer["others"])])


def _queue_position(lease: "answer_types.Lease") -> tuple[bool, int]:
    """Return the sort key: granted leases, then waiting ones, then ended ones."""
    return lease["ended"] is not None, lease["wait"]["position"] if lease["wait"] else 0


def _place(lease: "answer_types.Lease") -> str:
    """Print the state, and the place of a waiting lease."""
    wait = lease["wait"]
    return f"{lease['state']}, place {wait['position']}" if wait else lease["state"]


def _share_figures(lease: "answer_types.Lease") -> tuple[Figure, Figure]:
    threads, memory = _share(lease)
    return (Figure(threads, lease["active_thread_percentage"]), Figure(memory, lease["pinned_device_mem_limit"]))


def _expiry(lease: "answer_types.Lease", now: datetime) -> Figure:
    expires = lease["expires"]
    if expires is None or lease["ended"]:
        return Figure("-", None)
    return Figure(until(expires, now), datetime.fromisoformat(expires).timestamp(), expires)


def _labels(lease: "answer_types.Lease") -> str:
    return " ".join(f"{key}={value}" for key, value in lease["labels"].items()) or "-"


def _judged(lease: "answer_types.Lease", now: datetime) -> Iterator[str]:
    """Yield lines about the wait of a lease, its open violations, and its unknown processes."""
    if wait := lease["wait"]:
        waited = f"has waited {age(lease['created'], now)}{lack(wait['waits_for'])}"
        yield as_here(f"{lease['id']}: {waited}: {wait['because']}")
    if found := keepers(lease):
        yield f"{lease['id']}: its holder is gone; it lives for {found}; to end it: mpsctl release {lease['id']}"
    for each in lease["violations"]:
        yield from (as_here(f"{lease['id']}: violation: {each['because']}"), as_here(f"  hint: {each['hint']}"))
    yield from (f"{lease['id']}: unknown: {each}" for each in lease["unknown"])


def _of_others(others: "answer_types.Others") -> list[str]:
    """Describe the sum of the leases that are not listed; empty where there are none."""
    if not others["leases"]:
        return []
    waiting = f", {others['waiting']} of them waiting" if others["waiting"] else ""
    granted = amounts(others["threads_granted"], others["memory_granted"])
    return [f"and {plural(others['leases'], 'lease')} of other users, of {granted} in all{waiting}"]


def _share(lease: "answer_types.Lease") -> tuple[str, str]:
    """Print threads and memory on each GPU; a lease that waits for a fraction has none yet."""
    if lease["shares"]:
        threads = _alike(percent(share["active_thread_percentage"]) for share in lease["shares"])
        return threads, _alike(size(share["pinned_device_mem_limit"]) for share in lease["shares"])
    wanted, memory = lease["active_thread_percentage"], lease["pinned_device_mem_limit"]
    return "-" if wanted is None else percent(wanted), "-" if memory is None else size(memory)


def _alike(values: Iterable[str]) -> str:
    """Print values, only once where they are all the same."""
    return ",".join(dict.fromkeys(values))


def lease(answer: "answer_types.Lease", now: datetime) -> str:
    """Show all facts about one lease."""
    threads, memory = _share(answer)
    shares = answer["shares"]
    is_on_several = len(shares) >= _SEVERAL
    each_gpu = " on each GPU" if is_on_several else ""
    most = f"{answer['processes']}{each_gpu} at most" if answer["processes"] else "any number"
    wait, expires, ended = answer["wait"], answer["expires"], answer["ended"]
    if answer["pinned_device_mem_limit"] is not None and not is_on_several:
        memory += f" ({answer['pinned_device_mem_limit']} bytes)"
    rows = [
        ("lease", answer["id"]),
        ("state", f"{answer['state']}: {answer['because']}"),
        *([("waits", f"at position {wait['position']} for {wait['waits_for']}: {wait['because']}")] if wait else []),
        ("name", answer["name"] or "-"),
        ("labels", _labels(answer)),
        ("priority", str(answer["priority"])),
        *([] if is_on_several else [("daemon", answer["daemon"] or "-"), ("GPU", " ".join(answer["gpus"]) or "-")]),
        ("threads", threads),
        ("memory", memory),
        ("holder", holders(answer)),
        ("clients", f"{' '.join(map(str, answer['clients'])) or '-'} (of {most})"),
        *_lost(answer),
        *_what_keeps(answer),
        ("created", f"{answer['created']} ({age(answer['created'], now)} ago)"),
        *([("expires", f"{expires} (in {until(expires, now)}, unless renewed)")] if expires else []),
        *([("ended", f"{ended} ({age(ended, now)} ago)")] if ended else []),
        *(("violation", f"{each['because']}; {each['hint']}") for each in answer["violations"]),
        *(("unknown", each) for each in answer["unknown"]),
        *(_each_gpu(answer) if is_on_several else _environment("env", answer["env"])),
    ]
    return columns((label, as_here(text) if label in _SENTENCES else text) for label, text in rows)


_SENTENCES: Final = frozenset(
    {"state", "waits", "holder", "lost", "created", "expires", "ended", "violation", "unknown"}
)
"""The fields of a lease with sentences of mpsd, not of its user."""


def _clients(lease: "answer_types.Lease") -> str:
    """Return the number of a lease's clients, without those that lost their server."""
    lost = len(lease.get("lost", ()))
    most = lease["processes"] * max(len(lease["shares"]), 1) or "any"
    return f"{len(lease['clients']) - lost} of {most}" + (f", {lost} lost" if lost else "")


def _lost(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    """Show the clients whose work ended with their server."""
    pids = " ".join(map(str, lease.get("lost", ())))
    return [("lost", f"{pids}: their work ended with their server, and all their calls fail")] if pids else []


def _what_keeps(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    """Show the processes that keep a lease beside its holders, or instead of them."""
    if found := keepers(lease):
        return [("kept by", f"{found}; its holder is gone")]
    bearers = " ".join(map(str, lease["bearers"]))
    return [("kept by", f"{bearers} (by its token, as far as is known)")] if bearers else []


def _each_gpu(lease: "answer_types.Lease") -> Iterator[tuple[str, str]]:
    """Show the share on each of several GPUs, with its number for `show --share`."""
    for number, share in enumerate(lease["shares"]):
        granted = amounts(share["active_thread_percentage"], share["pinned_device_mem_limit"])
        yield f"share {number}", f"{share['daemon']}, {share['gpu']}: {granted}"
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
