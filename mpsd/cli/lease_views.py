"""Views of clients and leases: one function for each answer, from the decoded answer to its text.

The foreign text in the answers is already made harmless (`render.plain`).
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

from mpsd.cli.render import (
    age,
    as_here,
    as_reported,
    columns,
    holders,
    holding_pid,
    keepers,
    lack,
    limit,
    percent,
    pid,
    plural,
    size,
    until,
)
from mpsd.cli.tables import PLAIN, Column, Figure, Look, table
from mpsd.cli.users import name_of
from mpsd.core.sanitize import SECRETS

if TYPE_CHECKING:
    from mpsd.client import answer_types

_UNKNOWN: Final = "unknown"
_SEVERAL: Final = 2
_VERDICTS: Final = {"violation": "not ok", "nothing": "not ok"}


# -- clients -----------------------------------------------------------------------------------------------------------

CLIENTS: Final = (
    Column("PID"),
    Column("USER"),
    Column("DAEMON"),
    Column("SERVER", rank=3),
    Column("LEASE"),
    Column("VERDICT"),
    Column("SM", wide=True),
    Column("UID", wide=True),
    Column("GPU", wide=True),
    Column("NAME", rank=2),
)


def clients(answer: "answer_types.Clients", look: Look) -> str:
    """List the processes that are connected to an MPS server."""
    rows = [
        (
            str(client["pid"]),
            name_of(client["uid"]),
            client["daemon"],
            str(client["server"]),
            client["lease"] or "none",
            client["verdict"],
            sm_activity(client),
            _UNKNOWN if client["uid"] is None else str(client["uid"]),
            client["gpu"],
            client["name"],
        )
        for client in answer["clients"]
    ]
    lines = []
    for client in answer["clients"]:
        lines += [as_here(f"{client['verdict']}: {client['because']}")] if client["because"] else []
        lines += [as_here(f"  hint: {client['hint']}")] if client["hint"] else []
    return "\n".join([table(CLIENTS, rows, look, none="no clients"), *lines])


def sm_activity(client: "answer_types.Client") -> Figure:
    """Print how busy a client kept the SMs; a dash where NVML does not report it."""
    activity = client["sm_activity"]
    return Figure("-", -1) if activity is None else Figure(percent(activity), activity)


VERIFIED: Final = (
    Column("PID"),
    Column("DAEMON", rank=2),
    Column("SERVER", rank=3),
    Column("THREADS"),
    Column("MEMORY"),
    Column("HOLDS"),
    Column("VERDICT"),
)


def verified(answer: "answer_types.Verify", look: Look = PLAIN) -> str:
    """Print the verdict on a lease, then the limits and memory of each of its processes."""
    rows = [
        (
            str(each["pid"]),
            each["daemon"],
            pid(each["server"]),
            _in_force(each, "active_thread_percentage"),
            _in_force(each, "pinned_device_mem_limit"),
            _UNKNOWN if each["memory_held"] is None else size(each["memory_held"]),
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
        return f"{_UNKNOWN} of {limit(name, exact)}" if each["mps"] else f"- of {limit(name, exact)}"
    granted = limit(name, in_force[name] if in_force[name] == as_reported(exact) else exact)  # with the same precision
    most = limit(name, in_force[name])
    least = "?" if at_least is None else limit(name, at_least[name])
    if least != most:
        return f"{least} to {most} of {granted}"
    # A process that may have more than its part can have lowered it itself, which nothing shows.
    is_known = each["verdict"] != _UNKNOWN or in_force[name] == as_reported(exact)
    return f"{most} of {granted}" if is_known else f"up to {most} of {granted}"


# -- leases ------------------------------------------------------------------------------------------------------------

LEASES: Final = (
    Column("LEASE"),
    Column("STATE"),
    Column("GPU"),
    Column("THREADS"),
    Column("MEMORY"),
    Column("USER"),
    Column("PID", rank=4),
    Column("CLIENTS", rank=6),
    Column("AGE", rank=3),
    Column("EXPIRES", rank=5),
    Column("HOLDER", wide=True),
    Column("PRIORITY", wide=True),
    Column("LABELS", wide=True),
    Column("NAME", rank=2),
)


def leases(answer: "answer_types.Leases", now: datetime, look: Look) -> str:
    """List leases: the granted ones, the waiting ones in the order of the queue, and the ended ones.

    Lines below the table show what each lease waits for, its problems, and the sum of the leases that this caller may
    not see.
    """
    ordered = sorted(answer["leases"], key=_queue_position)
    rows = [
        (
            lease["id"],
            _place(lease),
            ",".join(dict.fromkeys(share["daemon"].removeprefix("gpu") for share in lease["shares"])) or "-",
            *_share_figures(lease),
            name_of(lease["owner"]["uid"]),
            holding_pid(lease),
            f"{len(lease['clients'])} of {lease['processes'] * max(len(lease['shares']), 1) or 'any'}",
            Figure(age(lease["created"], now), -datetime.fromisoformat(lease["created"]).timestamp()),
            _expiry(lease, now),
            holders(lease),
            str(lease["priority"]),
            _labels(lease),
            lease["name"] or "-",
        )
        for lease in ordered
    ]
    lines = [line for lease in ordered for line in _judged(lease, now)]
    return "\n".join([table(LEASES, rows, look, none="no leases"), *lines, *_of_others(answer["others"])])


def _expiry(lease: "answer_types.Lease", now: datetime) -> Figure:
    expires = lease["expires"]
    if expires is None or lease["ended"]:
        return Figure("-", float("inf"))
    return Figure(until(expires, now), datetime.fromisoformat(expires).timestamp())


def _labels(lease: "answer_types.Lease") -> str:
    return " ".join(f"{key}={value}" for key, value in lease["labels"].items()) or "-"


def _share_figures(lease: "answer_types.Lease") -> tuple[Figure, Figure]:
    threads, memory = _share(lease)
    return (
        Figure(threads, lease["active_thread_percentage"] or 0.0),
        Figure(memory, lease["pinned_device_mem_limit"] or 0.0),
    )


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


def _queue_position(lease: "answer_types.Lease") -> tuple[bool, int]:
    """Return the sort key: granted leases, then waiting ones, then ended ones."""
    return lease["ended"] is not None, lease["wait"]["position"] if lease["wait"] else 0


def _place(lease: "answer_types.Lease") -> str:
    """Print the state, and the place of a waiting lease."""
    wait = lease["wait"]
    return f"{lease['state']}, place {wait['position']}" if wait else lease["state"]


def _of_others(others: "answer_types.Others") -> list[str]:
    """Describe the sum of the leases that are not listed; empty where there are none."""
    if not others["leases"]:
        return []
    threads, memory = percent(others["threads_granted"]), size(others["memory_granted"])
    waiting = f", {others['waiting']} of them waiting" if others["waiting"] else ""
    return [f"and {plural(others['leases'], 'lease')} of other users, of {threads} and {memory} in all{waiting}"]


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
    each_gpu = " on each GPU" if len(shares) >= _SEVERAL else ""
    most = f"{answer['processes']}{each_gpu} at most" if answer["processes"] else "any number"
    wait, expires, ended = answer["wait"], answer["expires"], answer["ended"]
    exactly = "" if answer["pinned_device_mem_limit"] is None else f" ({answer['pinned_device_mem_limit']} bytes)"
    rows = [
        ("lease", answer["id"]),
        ("state", f"{answer['state']}: {answer['because']}"),
        *([("waits", f"at position {wait['position']} for {wait['waits_for']}: {wait['because']}")] if wait else []),
        ("name", answer["name"] or "-"),
        ("labels", _labels(answer)),
        ("priority", str(answer["priority"])),
        *(_one_gpu(answer) if len(shares) < _SEVERAL else []),
        ("threads", threads),
        ("memory", memory + exactly if len(shares) < _SEVERAL else memory),
        ("holder", holders(answer)),
        ("clients", f"{' '.join(map(str, answer['clients'])) or '-'} (of {most})"),
        *_lost(answer),
        *_what_keeps(answer),
        ("created", f"{answer['created']} ({age(answer['created'], now)} ago)"),
        *([("expires", f"{expires} (in {until(expires, now)}, unless renewed)")] if expires else []),
        *([("ended", f"{ended} ({age(ended, now)} ago)")] if ended else []),
        *(("violation", f"{each['because']}; {each['hint']}") for each in answer["violations"]),
        *(("unknown", each) for each in answer["unknown"]),
        *(_each_gpu(answer) if len(shares) >= _SEVERAL else _environment("env", answer["env"])),
    ]
    return columns((label, as_here(text) if label in _SENTENCES else text) for label, text in rows)


_SENTENCES: Final = frozenset(
    {"state", "waits", "holder", "lost", "created", "expires", "ended", "violation", "unknown"}
)
"""The fields of a lease with sentences of mpsd, not of its user."""


def _lost(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    """Show the clients whose work ended with their control daemon."""
    pids = " ".join(map(str, lease.get("lost", ())))
    return [("lost", f"{pids}: their work ended with their control daemon, and all their calls fail")] if pids else []


def _what_keeps(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    """Show the processes that keep a lease beside its holders, or instead of them."""
    if found := keepers(lease):
        return [("kept by", f"{found}; its holder is gone")]
    return [("kept by", f"{' '.join(map(str, lease['bearers']))} (by its token)")] if lease["bearers"] else []


def _one_gpu(lease: "answer_types.Lease") -> list[tuple[str, str]]:
    return [("daemon", lease["daemon"] or "-"), ("GPU", " ".join(lease["gpus"]) or "-")]


def _each_gpu(lease: "answer_types.Lease") -> Iterator[tuple[str, str]]:
    """Show the share on each of several GPUs, with its number for `show --share`."""
    for number, share in enumerate(lease["shares"]):
        threads, memory = percent(share["active_thread_percentage"]), size(share["pinned_device_mem_limit"])
        yield f"share {number}", f"{share['daemon']}, {share['gpu']}: {threads} and {memory}"
        yield from _environment("  env", share["env"])


def _environment(label: str, variables: "dict[str, str]") -> list[tuple[str, str]]:
    return [(label, f"{name}={value}") for name, value in variables.items() if name not in SECRETS]
