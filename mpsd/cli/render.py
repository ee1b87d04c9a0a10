"""The plain-text form of values. Text of other users has passed `sanitize.plain` before."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from mpsd.cli.cells import cells, padded
from mpsd.cli.users import name_of
from mpsd.core.errors import InternalError, InvalidRequestError
from mpsd.core.sanitize import harmless_json, plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

_GAP = "  "
_LONGEST_EVENT = 24
_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_GIB = 1024**3  # importing mpsd.core.units would take too long
_SPANS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def as_json(answer: object) -> str:
    """Return the API's answer, indented: the same document, with unprintable characters escaped."""
    return harmless_json(json.dumps(answer, indent=2, ensure_ascii=False))


_AMBIGUOUS = frozenset("\"'`\\$#")
"""Characters that some readers of an env-file take literally, and others for quotes, escapes, variables or comments."""


def as_exports(variables: Mapping[str, str]) -> str:
    """Return shell lines that export these variables. Raises InternalError for an invalid name."""
    from shlex import quote

    _check_names(variables)
    return "\n".join(f"export {name}={quote(value)}" for name, value in variables.items())


def as_env_file(variables: Mapping[str, str]) -> str:
    """Return lines `KEY=VALUE` that podman and Docker (--env-file), systemd (EnvironmentFile=) and dotenv read alike.

    The values are not quoted, since podman and Docker take quotes as a part of the value. Raises InvalidRequestError
    for a value that such a line cannot carry, and InternalError for an invalid name.
    """
    _check_names(variables)
    for name, value in variables.items():
        if not value.isprintable() or value != value.strip() or _AMBIGUOUS & {*value}:
            raise InvalidRequestError(
                f"the value of {name} is {plain(value)!r}, which a line KEY=VALUE cannot have for all its readers",
                hint="use -o env in a shell, or paths without quotes, blanks at an end, and any of `\\$#",
            )
    return "\n".join(f"{name}={value}" for name, value in variables.items())


def _check_names(variables: Mapping[str, str]) -> None:
    wrong = [name for name in variables if not (name.isascii() and name.isidentifier())]
    if wrong:
        raise InternalError(f"mpsd named a variable {plain(wrong[0])!r}", hint="look at the lease with -o json")


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as aligned columns, without blanks at the ends of lines."""
    rows = list(rows)
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_GAP.join(map(padded, row, widths)).rstrip() for row in rows)


UNKNOWN: Final = "unknown"


def size(count: int | None) -> str:
    """Print bytes as `8GiB`, rounded down to two decimals; `unknown` for None."""
    if count is None:
        return UNKNOWN
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count * 100 // factor / 100:g}{unit}"
    return f"{count}B"


def as_reported(limit: float | None) -> float | None:
    """Return a limit in force as a control daemon reports it: memory from 1 GiB on in whole GiB, rounded down.

    Measured, 535 to 555. A percentage is never that large, and is reported exactly.
    """
    return limit if limit is None or limit < _GIB else int(limit) // _GIB * _GIB


def percent(value: float) -> str:
    """Print a percentage as `25%`."""
    return f"{value:g}%"


def limit(name: str, value: float | None) -> str:
    """Print a limit in its own unit."""
    if value is None:
        return "no limit"
    return percent(value) if name == "active_thread_percentage" else size(int(value))


def amounts(threads: float, memory: int) -> str:
    """Print threads and memory together, as they are granted."""
    return f"{percent(threads)} and {size(memory)}"


_TIME: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)"


def when(at: str) -> str:
    """Print a time of the API in this machine's zone."""
    return datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


_UID: Final = r"(?<![\w-])uid (\d+)(?!\w| of the container)"
"""A user of this machine in a sentence; options such as --trust-uid, and users of containers, do not match."""


_NO_ONE: Final = "nobody"
"""The name of a user that a reader would take for the English word."""


def as_here(text: str) -> str:
    """Return a sentence of mpsd's with its times in this machine's zone, and with the names of users.

    mpsd itself does not look up names, because that can take as long as the network does. A user's own words in a
    sentence, such as a lease's name, are replaced likewise; `-o json` prints them unchanged.
    """
    text = re.sub(_TIME, lambda found: when(found[0]), text)
    return re.sub(_UID, _user, text)


def _user(found: re.Match[str]) -> str:
    name = name_of(int(found[1]))
    if name == found[1]:
        return found[0]
    return f"user {name}" if name == _NO_ONE else name


def pid(number: int | None) -> str:
    """Print a pid, or a dash."""
    return "-" if number is None else str(number)


def age(then: str, now: datetime) -> str:
    """Print the age of a time of the API, by `span`."""
    return span((now - datetime.fromisoformat(then)).total_seconds())


def until(then: str, now: datetime) -> str:
    """Print the time that is left until a time of the API, by `span`."""
    return span((datetime.fromisoformat(then) - now).total_seconds())


def span(exactly: float) -> str:
    """Print seconds in two units, rounded down: `12s`, `1h 58m`, `9d`. An age is at least that, as is what is left."""
    seconds = max(int(exactly), 0)
    for (unit, factor), (below, part) in pairwise((*_SPANS, ("", 1))):
        if seconds >= factor:
            rest = seconds % factor // part
            return f"{seconds // factor}{unit}" + (f" {rest}{below}" if below and rest else "")
    return "0s"


def fact(value: object) -> str:
    """Print a fact of an event in one word, quoted if it would look like several."""
    match value:
        case str() if value and not any(each in value for each in ' "=,'):
            return value
        case list() if value:
            return ",".join(map(fact, value))
        case _:
            return json.dumps(value, ensure_ascii=False)


_AMOUNTS: Final = frozenset({"threads", "memory", "clients"})


def lack(limit: str) -> str:
    """Print the limit that a request waits for, after a verb, if it is an amount; of any other, the reason says all."""
    return f" for {limit}" if limit in _AMOUNTS else ""


def plural(count: int, noun: str) -> str:
    """Print a count with its noun, whose plural has a plain s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def granted_threads(gpu: "answer_types.Gpu") -> str:
    """Print how much of a GPU's threads is granted, of what may be."""
    return f"{percent(gpu['threads_granted'])} of {percent(gpu['threads_total'])}"


def granted_memory(gpu: "answer_types.Gpu") -> str:
    """Print how much of a GPU's memory is granted."""
    return f"{size(gpu['memory_granted'])} of {size(gpu['memory_total'])}"


def taken_places(gpu: "answer_types.Gpu") -> str:
    """Print how many clients a GPU has, and how many it can have."""
    most = UNKNOWN if gpu["clients_max"] is None else gpu["clients_max"]
    return f"{gpu['clients'] + gpu['clients_unleased']} of {most}"


def state_of(daemon: "answer_types.Daemon") -> str:
    """Print the state of a control daemon; a drain that is complete has a word of its own."""
    return "drained" if daemon.get("drained") and daemon["state"] == "draining" else daemon["state"]


def numbers_of_gpus(lease: "answer_types.Lease", separator: str = ", ") -> str:
    """Print the GPUs of a lease, by number, each once."""
    return separator.join(dict.fromkeys(share["daemon"].removeprefix("gpu") for share in lease["shares"]))


def problems(node: "answer_types.Status") -> "Iterator[tuple[str, answer_types.Reason | answer_types.Violation]]":
    """Yield the problems of a node, the gravest first, each as a `fault`, a `violation` or a `warning`.

    Clients that linger after a fault come last: the fault names them all.
    """
    lingering = [each for each in node["violations"] if each["kind"] == "lingers"]
    yield from (("fault", each) for each in node["reasons"])
    yield from (("violation", each) for each in node["violations"] if each not in lingering)
    yield from (("warning", each) for each in node["warnings"])
    yield from (("violation", each) for each in lingering)


def with_remedy(problem: "answer_types.Reason | answer_types.Violation") -> str:
    """Describe a problem, followed by its remedy."""
    return f"{problem['because']} -> {problem['hint']}"


def event(answer: Mapping[str, object]) -> str:
    """Return an event in one line: time, kind, and facts, the number first; the level only where it is not `info`."""
    facts = [
        f"{name}={fact(value)}"
        for name, value in answer.items()
        if name not in {"at", "event"} and (name, value) != ("level", "info")
    ]
    return f"{answer['at']}  {answer['event']!s:<{_LONGEST_EVENT}}  {' '.join(facts)}".rstrip()


_OBSTACLES: Final = {
    "user": "another user",
    "turn": "queue",
    "hold": "held",
    "health": "fault",
    **dict.fromkeys(("threads", "memory", "clients", "admission.smallest_share"), "full"),
}
"""What keeps a user from a GPU, by the limit that a refusal names."""


def for_you(gpu: "answer_types.Gpu") -> str:
    """Print whether the caller can have something of a GPU now, or what prevents it, in a word or two."""
    if (found := gpu["obstacle"]) is None:
        return "yes"
    limit = found["limit"] or found["code"]
    return "no: quota" if limit.startswith("quota") else f"no: {_OBSTACLES.get(limit, limit)}"


def holding_pid(lease: "answer_types.Lease") -> str:
    """Print the process that holds a lease; a dash where none does."""
    held_by = lease["owner"]["pid"]
    is_gone = any(each.get("pid") == held_by and each.get("gone") for each in lease["holders"])
    return f"{held_by or '-'}{' (gone)' if is_gone else ''}"


def holders(lease: "answer_types.Lease") -> str:
    """Print all holders of a lease, and its owner."""
    return ", ".join([*map(_holder, lease["holders"]), f"uid {lease['owner']['uid']}"])


def holder_in_short(lease: "answer_types.Lease") -> str:
    """Print the holder of a lease in a word or two: a pid, a unit, a container, a pod, or a group's last name."""
    holder = lease["holders"][0] if lease["holders"] else None
    if holder is None:
        return "-"
    named = next((str(holder[key]) for key in ("unit", "container", "pod") if holder.get(key)), None)
    if named is None and holder["kind"] == "cgroup":
        named = str(holder.get("cgroup")).rpartition("/")[2]
    return named or (f"pid {holder.get('pid')}" if holder["kind"] == "process" else holder["kind"])


def keepers(lease: "answer_types.Lease") -> str:
    """Print the processes that keep a lease whose holders are gone; empty for any other."""
    return ", ".join(f"{each['kind']} {each['pid']} ({each['name']})" for each in lease.get("keepers", ()))


def _holder(holder: "answer_types.Holder") -> str:
    return _named(holder) + (" (gone)" if holder.get("gone") else "")


def _named(holder: "answer_types.Holder") -> str:
    match holder["kind"]:
        case "process":
            return f"pid {holder['pid']}"
        case "cgroup":
            names = (("unit", holder.get("unit")), ("container", holder.get("container")), ("pod", holder.get("pod")))
            said = ", ".join(f"{what} {name}" for what, name in names if name)
            return f"control group {holder['cgroup']}" + (f" ({said})" if said else "")
        case "claim":
            whose = "anybody" if holder.get("uid") is None else f"uid {holder.get('uid')}"
            until = holder.get("deadline")
            return f"a claim for {whose}" + (f", until {until}" if until else "")
        case kind:  # a kind that only a newer mpsd has
            return kind
