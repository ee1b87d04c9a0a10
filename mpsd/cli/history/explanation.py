"""The story of one lease, control daemon or GPU: its events, its current state, and the next steps."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.command import now
from mpsd.cli.history import story
from mpsd.cli.history.selection import GpuNames, leases_of
from mpsd.cli.leases import find
from mpsd.cli.leases.use import use
from mpsd.cli.render import age, keepers, lack, percent, size, until
from mpsd.cli.users import name_of
from mpsd.client import Api
from mpsd.core.errors import NotFoundError

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
    log: list[str]
    now: list[str]
    next: list[str]


def story_of(api: Api, subject: str) -> Story:
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

    for gpu in node["gpus"]:
        daemon = next((each for each in node["daemons"] if each["gpu"] == gpu["uuid"]), None)
        names = {f"{gpu['index']}", f"GPU {gpu['index']}".lower(), gpu["uuid"], daemon["name"] if daemon else None}
        if subject in names or subject.lower() in names:
            chosen, hidden = story.of_gpu(events, GpuNames(gpu["index"], gpu["uuid"], daemon and daemon["name"]), sees)
            log = [] if daemon is None else _log(api, daemon["name"])
            return Story(
                _title(gpu, daemon),
                chosen,
                hidden,
                log,
                [*_of_gpu(node, gpu, daemon, leases)],
                _remedies(node, gpu, daemon),
            )
    lease_id = _lease_id(subject, leases, (each for each in events if sees(each)))
    if lease_id is None:
        api.lease(subject)  # raises the reason: the lease does not exist, or belongs to another user
        raise NotFoundError(f"mpsd has no events of {subject}", hint="see mpsctl leases --all")
    return _of_lease(node, lease_id, leases, [each for each in events if sees(each)])


def _lease_id(subject: str, leases: "list[answer_types.Lease]", events: "Iterable[answer_types.Event]") -> str | None:
    """Return the id of the lease that a subject names, even if only events still tell of it."""
    if (found := find.among(leases, subject)) is not None:
        return found
    known = dict.fromkeys(lease for each in events for lease in leases_of(each) if find.begins(lease, subject))
    if subject in known or len(known) <= 1:
        return subject if subject in known else next(iter(known), None)
    raise find.ambiguous(subject, [*known], next(iter(known)))


# -- leases ------------------------------------------------------------------------------------------------------------


def _of_lease(
    node: "answer_types.Status",
    lease_id: str,
    leases: "list[answer_types.Lease]",
    events: "list[answer_types.Event]",
) -> Story:
    chosen = story.of_lease(events, lease_id, {each["gpu"]: each["name"] for each in node["daemons"]})
    lease = next((each for each in leases if each["id"] == lease_id), None)
    if lease is None:
        ends = [f"ended: {each.get('because')}" for each in chosen if each["event"] == "lease_ended"]
        return Story(lease_id, chosen, 0, [], ends[-1:] or ["mpsd does not know it any more"], [_ANOTHER])
    name = f" ({lease['name']})" if lease["name"] else ""
    about = f"{lease_id}{name}, a lease of {name_of(lease['owner']['uid'])}"
    return Story(about, chosen, 0, [], [*_lease_now(lease)], [*_lease_next(node, lease)])


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
                f"{percent(each['active_thread_percentage'])} and {size(each['pinned_device_mem_limit'])} on"
                f" {each['daemon']}"
                for each in lease["shares"]
            ]
            state = "" if lease["state"] == "granted" else f", and is {lease['state']}"
            yield f"it was granted {age(lease['granted'] or lease['created'], at)} ago{state}: {', '.join(parts)}"
            yield f"clients: {', '.join(map(str, lease['clients'])) or 'none'}"
            if lost := ", ".join(map(str, lease.get("lost", ()))):
                yield f"the work of clients {lost} ended with their control daemon, and all their calls of CUDA fail"
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
    daemons = {each["daemon"] for each in lease["shares"]}
    yield from (each["hint"] for each in lease["violations"])
    for each in node["reasons"]:
        if each["subject"] in daemons:
            yield f"{each['because']} -> {each['hint']}"
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


def _of_gpu(
    node: "answer_types.Status",
    gpu: "answer_types.Gpu",
    daemon: "answer_types.Daemon | None",
    leases: "list[answer_types.Lease]",
) -> Iterator[str]:
    at = now()
    yield f"GPU {gpu['index']} is {gpu['health']}: {gpu['because']}"
    if daemon is not None:
        state = "drained" if daemon.get("drained") and daemon["state"] == "draining" else daemon["state"]
        yield f"{daemon['name']} has been {state} for {age(daemon['since'], at)}: {daemon['because']}"
        yield from (each["because"] for each in (*daemon["drift"], *daemon["undone"]))
    memory = f"{size(gpu['memory_granted'])} of {size(gpu['memory_total'] or 0)}"
    yield f"granted: {percent(gpu['threads_granted'])} of the threads, {memory}"
    own = [each for each in leases if gpu["uuid"] in each["gpus"] and not each["ended"]]
    yield from (f"{each['id']} of {name_of(each['owner']['uid'])} is {each['state']}" for each in own)
    others = round(gpu["threads_granted"] - sum(_threads(each, gpu) for each in own), 1)
    if others > 0:
        yield f"other users have {percent(others)} of the threads"
    if daemon is not None:
        yield from (each["because"] for each in node["violations"] if each["daemon"] == daemon["name"])


def _threads(lease: "answer_types.Lease", gpu: "answer_types.Gpu") -> float:
    return sum(each["active_thread_percentage"] for each in lease["shares"] if each["gpu"] == gpu["uuid"])


def _remedies(node: "answer_types.Status", gpu: "answer_types.Gpu", daemon: "answer_types.Daemon | None") -> list[str]:
    """Return the remedies for all problems of a GPU, its control daemon, and the node's stores."""
    subjects = {f"GPU {gpu['index']}", "leases", daemon["name"] if daemon else None}
    found = [each for each in (*node["reasons"], *node["warnings"]) if each["subject"] in subjects]
    remedies = [f"{each['because']} -> {each['hint']}" for each in found]
    remedies += [each["hint"] for each in node["violations"] if daemon and each["daemon"] == daemon["name"]]
    return remedies or ["nothing has to be done"]


def _log(api: Api, daemon: str) -> list[str]:
    """Return the end of a control daemon's log, below its path; or the reason why it cannot be read."""
    directory = api.config()["config"]["paths"]["log_dir"]
    path = Path(f"{directory}") / daemon / "control.log"
    try:
        with path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL, 0))
            raw = log.read()
    except OSError as error:
        return [f"its log, {path}, cannot be read here: {error.strerror}"]
    return [f"the end of {path}:", *(f"  {each}" for each in story.said_by_others(raw, _LOG_LINES))]
