"""The story of one lease, control daemon or GPU: its events, its present state, and the next steps."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.cells import fold
from mpsd.cli.command import now
from mpsd.cli.history import sentences
from mpsd.cli.history.sentences import GpuNames, Selector, leases_of
from mpsd.cli.leases import find
from mpsd.cli.leases.caller import use
from mpsd.cli.render import (
    age,
    amounts,
    as_here,
    granted_memory,
    keepers,
    lack,
    percent,
    plural,
    state_of,
    until,
    with_remedy,
)
from mpsd.cli.tables import Look
from mpsd.cli.users import name_of
from mpsd.client import Client
from mpsd.core import gpu_names
from mpsd.core.errors import NotFoundError
from mpsd.core.sanitize import plain, text

if TYPE_CHECKING:
    from mpsd.client import answer_types

_LOG_LINES: Final = 10
_LOG_TAIL: Final = 65536
"""Bytes read from the end of a control daemon's log."""


class Story(NamedTuple):
    """A story: its subject, its events, the end of a log, the current state, and the next steps."""

    about: str
    events: "list[answer_types.Event]"
    hidden: int
    """Events of leases of other users."""
    log: list[str]
    now: list[str]
    next: list[str]


def story_of(api: Client, subject: str) -> Story:
    """Return the story of a lease, a control daemon or a GPU.

    Raises NotFoundError for a subject that mpsd does not know, InvalidRequestError for an ambiguous one, and the errors
    of the API.
    """
    node = api.status()
    leases = api.leases(ended=True)["leases"]
    events = [event for _, event in api.events(0, follow=False)]
    visible = {each["id"] for each in leases}

    def sees(event: "answer_types.Event") -> bool:
        uid = event.get("uid")
        if os.getuid() in {0, uid}:
            return True
        about = leases_of(event)
        return any(each in visible for each in about) if about else uid is None

    numbered = [(each["index"], each["uuid"]) for each in node["gpus"]]
    if (index := gpu_names.find(subject, numbered)) is not None:
        gpu = next(each for each in node["gpus"] if each["index"] == index)
        daemon = next((each for each in node["daemons"] if each["gpu"] == gpu["uuid"]), None)
        name = daemon["name"] if daemon else None
        return Story(
            _title(gpu, daemon),
            *events_of_gpu(events, GpuNames(gpu["index"], gpu["uuid"], name), sees),
            log=[] if name is None else _log(api, name),
            now=[*_gpu_now(node, gpu, daemon, leases)],
            next=_gpu_next(node, gpu, daemon),
        )
    seen = [each for each in events if sees(each)]
    lease_id = _lease_id(subject, leases, seen)
    if lease_id is None:
        if gpu_names.is_name(subject):
            detail, hint = gpu_names.unknown(subject, numbered)
            raise NotFoundError(detail, hint=hint)
        api.lease(subject)  # raises the reason: the lease does not exist, or belongs to another user
        raise NotFoundError(f"mpsd has no events of {subject}", hint="see mpsctl leases --all")
    chosen = events_of_lease(seen, lease_id, {each["gpu"]: each["name"] for each in node["daemons"]})
    lease = next((each for each in leases if each["id"] == lease_id), None)
    if lease is None:
        ends = [f"ended: {each.get('because')}" for each in chosen if each["event"] == "lease_ended"]
        return Story(lease_id, chosen, 0, [], ends[-1:] or ["mpsd does not know it any more"], [_ANOTHER])
    named = f" ({lease['name']})" if lease["name"] else ""
    about = f"{lease_id}{named}, a lease of {name_of(lease['owner']['uid'])}"
    return Story(about, chosen, 0, [], [*_lease_now(lease)], [*_lease_next(node, lease)])


def lines_of(found: Story, earlier: int, look: Look) -> Iterator[str]:
    """Yield a story as text: the events in the order of time, then the present state, then the next steps.

    `earlier` is the number of events before these. The texts of the story are harmless already.
    """
    yield from (found.about, "")
    if earlier:
        yield f"({plural(earlier, 'earlier event')}: --last {earlier + len(found.events)})"
    yield from (sentences.line(each, look) for each in found.events) if found.events else ("no events",)
    if found.hidden:
        yield f"({plural(found.hidden, 'event')} of leases of other users)"
    if found.log:
        yield ""
    yield from (fold(each, look.width, 2) for each in found.log)
    for heading, lines in (("now", found.now), ("next", found.next)):
        yield ""
        for number, each in enumerate(lines):
            yield fold(f"{'' if number else heading:<6}{as_here(each)}", look.width, 8)


def _lease_id(subject: str, leases: "list[answer_types.Lease]", events: "list[answer_types.Event]") -> str | None:
    """Return the id of the lease that a subject names, even if only events still tell of it."""
    if (found := find.among(leases, subject)) is not None:
        return found
    known = dict.fromkeys(lease for each in events for lease in leases_of(each) if find.begins(lease, subject))
    if subject in known or len(known) <= 1:
        return subject if subject in known else next(iter(known), None)
    raise find.ambiguous(subject, [*known], next(iter(known)))


# -- leases ------------------------------------------------------------------------------------------------------------

_ANOTHER: Final = "take out another lease: mpsctl admit"


def _lease_now(lease: "answer_types.Lease") -> Iterator[str]:
    at = now()
    match lease:
        case {"state": "waiting", "wait": {"position": place, "waits_for": str(limit), "because": because}}:
            yield f"it has waited {age(lease['created'], at)}, in place {place}{lack(limit)}: {because}"
        case {"ended": str(ended)}:
            yield f"it ended {age(ended, at)} ago: {lease['because']}"
        case _:
            parts = [
                f"{amounts(each['active_thread_percentage'], each['pinned_device_mem_limit'])} on {each['daemon']}"
                for each in lease["shares"]
            ]
            state = "" if lease["state"] == "granted" else f", and is {lease['state']}"
            yield f"it was granted {age(lease['granted'] or lease['created'], at)} ago{state}: {', '.join(parts)}"
            yield f"clients: {', '.join(map(str, lease['clients'])) or 'none'}"
            if lost := ", ".join(map(str, lease.get("lost", ()))):
                yield f"the work of clients {lost} ended with their server, and all their calls of CUDA fail"
            if found := keepers(lease):
                yield f"its holder is gone; it lives for {found}"
            if lease["expires"]:
                yield f"it expires in {until(lease['expires'], at)}, unless it is renewed"
    yield from (f"violation: {each['because']}" for each in lease["violations"])
    yield from (f"unknown: {each}" for each in lease["unknown"])


def _lease_next(node: "answer_types.Status", lease: "answer_types.Lease") -> Iterator[str]:
    if lease["ended"]:
        yield _ANOTHER
        return
    if not lease["holders"]:
        yield f"it is a lease of {name_of(lease['owner']['uid'])}, who can renew and release it, as administrators can"
        return
    daemons = {each["daemon"] for each in lease["shares"]}
    yield from (each["hint"] for each in lease["violations"])
    for each in node["reasons"]:
        if each["subject"] in daemons:
            yield with_remedy(each)
    if lease["expires"]:
        yield f"to keep it: mpsctl renew {lease['id']} --ttl DURATION"
    if borne := keepers(lease):
        yield f"to end it: mpsctl release {lease['id']}"
    match lease:
        case {"state": "waiting"}:
            yield f"to give it up: mpsctl release {lease['id']}"
        case {"clients": []} if not borne:
            yield f"no process uses it yet; {use(lease)}"
        case {"lost": [_, *_] as lost}:
            yield f"end processes {', '.join(map(str, lost))}, and start them again"
        case _:
            yield f"to see whether its processes are within their limits: mpsctl verify {lease['id']}"


# -- GPUs and control daemons ------------------------------------------------------------------------------------------


def _title(gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> str:
    name = f"GPU {gpu['index']}, a {gpu['name'] or 'GPU of unknown name'}"
    return f"{name}, has no control daemon" if daemon is None else f"{daemon['name']}, the control daemon of {name}"


def _gpu_now(
    node: "answer_types.Status",
    gpu: "answer_types.Gpu",
    daemon: "answer_types.Daemon | None",
    leases: "list[answer_types.Lease]",
) -> Iterator[str]:
    at = now()
    yield f"GPU {gpu['index']} is {gpu['health']}: {gpu['because']}"
    if daemon is not None:
        yield f"{daemon['name']} has been {state_of(daemon)} for {age(daemon['since'], at)}: {daemon['because']}"
        yield from (each["because"] for each in (*daemon["drift"], *daemon["undone"]))
    yield f"granted: {percent(gpu['threads_granted'])} of the threads, {granted_memory(gpu)}"
    own = [each for each in leases if gpu["uuid"] in each["gpus"] and not each["ended"]]
    yield from (f"{each['id']} of {name_of(each['owner']['uid'])} is {each['state']}" for each in own)
    others = round(gpu["threads_granted"] - sum(_threads(each, gpu) for each in own), 1)
    if others > 0:
        yield f"other users have {percent(others)} of the threads"
    if daemon is not None:
        yield from (each["because"] for each in node["violations"] if each["daemon"] == daemon["name"])


def _threads(lease: "answer_types.Lease", gpu: "answer_types.Gpu") -> float:
    return sum(each["active_thread_percentage"] for each in lease["shares"] if each["gpu"] == gpu["uuid"])


def _gpu_next(node: "answer_types.Status", gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> list[str]:
    """Return the remedies for all problems of a GPU, its control daemon, and the node's stores."""
    subjects = {f"GPU {gpu['index']}", "leases", daemon["name"] if daemon else None}
    found = [each for each in (*node["reasons"], *node["warnings"]) if each["subject"] in subjects]
    remedies = [with_remedy(each) for each in found]
    remedies += [each["hint"] for each in node["violations"] if daemon and each["daemon"] == daemon["name"]]
    return remedies or ["nothing has to be done"]


# -- events ------------------------------------------------------------------------------------------------------------

_OF_THE_NODE: Final = frozenset(
    {
        "node_started",
        "node_stopping",
        "node_stopped",
        "settings_reloaded",
        "store_full",
        "store_writable",
        "events_lost",
    }
)
"""Events of the whole node that belong to each story."""

_REPEATED: Final = frozenset({"limits_verified", "api_listening", "log_shortened"})
"""Events that repeat facts of other events in a story."""

_SETTLED: Final = frozenset({"limit_drift_ended", "server_recovered", "server_serves", "log_resumed"})
_OPERATED: Final = frozenset({"operation_begun", "operation_resumed", "operation_ended"})
_PASSING: Final = frozenset({"cooling", "down"})
"""States of a control daemon between its death, which has its own event, and its start."""


def _is_new(event: "answer_types.Event") -> bool:
    """Tell whether an event adds a fact to those before it."""
    is_passing = event["event"] == "daemon_state" and event.get("state") in _PASSING
    return not is_passing and event["event"] not in _REPEATED


def events_of_lease(
    events: Sequence["answer_types.Event"], lease: str, daemons: Mapping[str, str]
) -> list["answer_types.Event"]:
    """Return the events that belong to a lease: its own, and those of its control daemons and of mpsd meanwhile.

    `daemons` has the control daemon of each GPU, by the GPU's UUID.
    """
    own = [number for number, event in enumerate(events) if lease in leases_of(event)]
    if not own:
        return []
    ended = events[own[-1]]["event"] in {"lease_ended", "lease_refused"}
    during = events[own[0] : own[-1] + 1] if ended else events[own[0] :]
    names = {daemons.get(gpu) for number in own for gpu in _gpus(events[number])}
    return [event for event in during if _is_new(event) and (lease in leases_of(event) or _befell(event, names))]


def _gpus(event: "answer_types.Event") -> list[str]:
    gpus = event.get("gpus")
    return [str(each) for each in gpus] if isinstance(gpus, list) else []


def _befell(event: "answer_types.Event", daemons: Collection[object]) -> bool:
    """Tell whether an event may have affected the leases on these control daemons."""
    if event["event"] in _OF_THE_NODE:
        return True
    if event.get("daemon") not in daemons or leases_of(event):
        return False
    return event.get("level") != "info" or event["event"] in {"daemon_state", *_SETTLED, *_OPERATED}


def events_of_gpu(
    events: Iterable["answer_types.Event"], gpu: GpuNames, sees: Callable[["answer_types.Event"], bool]
) -> tuple[list["answer_types.Event"], int]:
    """Return the events of a GPU and its control daemon, and how many of them this reader may not see."""
    selector = Selector(gpu=gpu)
    found = [each for each in events if selector.takes(each) or each["event"] in _OF_THE_NODE]
    chosen = [each for each in found if _is_new(each)]
    seen = [each for each in chosen if sees(each)]
    return seen, len(chosen) - len(seen)


# -- the log of a control daemon ---------------------------------------------------------------------------------------

_MARK: Final = re.compile(rb"mpsd-[0-9a-f]{16,}-\d")
"""The mark in each of mpsd's own conversations with a control daemon."""

_BEGINS: Final = b"NEW UI"
_ENDS: Final = b"UI closed"
_STARTS: Final = b"Starting control daemon using socket"
_WAITS: Final = b"Accepting connection..."


def _log(api: Client, daemon: str) -> list[str]:
    """Return the end of a control daemon's log, below its path; or the reason why it cannot be read."""
    directory = api.config()["config"]["paths"]["log_dir"]
    path = Path(f"{directory}") / daemon / "control.log"
    try:
        with path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL, 0))
            raw = log.read()
    except OSError as error:
        return [f"its log, {path}, cannot be read here: {error.strerror}"]
    return [f"the end of {path}:", *(f"  {each}" for each in said_by_others(raw, _LOG_LINES))]


def said_by_others(raw: bytes, most: int) -> list[str]:
    """Return the last lines of a control daemon's log that are not from mpsd's own conversations with it."""
    lines = [plain(text(each)) for each in _others(raw.split(b"\n")) if each.strip()]
    return lines[-most:]


def _others(lines: Iterable[bytes]) -> Iterator[bytes]:
    conversation: list[bytes] = []
    for line in lines:
        if _BEGINS in line or _STARTS in line:  # the daemon may have died in the conversation before
            yield from _unless_own(conversation)
            conversation = []
        is_part = _BEGINS in line or bool(conversation)
        if is_part:
            conversation.append(line)
        elif not line.endswith(_WAITS):
            yield line
        if is_part and _ENDS in line:
            yield from _unless_own(conversation)
            conversation = []
    yield from _unless_own(conversation)


def _unless_own(conversation: Sequence[bytes]) -> Sequence[bytes]:
    return () if any(map(_MARK.search, conversation)) else conversation
