"""The page's data: mpsd's own answers, with the names and sentences that mpsctl prints for them.

Each answer passes `shown`, as mpsctl's output on a terminal passes `plain`, so that no text of another user hides or
reorders the text beside it. The parts of a lease's environment that are only for its processes are removed.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from mpsd.cli.command import now
from mpsd.cli.history.sentences import leases_of, sentence
from mpsd.cli.history.story import story_of
from mpsd.cli.render import as_here, when
from mpsd.cli.users import name_of
from mpsd.client import Client
from mpsd.core.sanitize import SECRETS, plain
from mpsd.core.supervision.drain import TIMEOUT, Intent

if TYPE_CHECKING:
    from mpsd.client import answer_types

FIRST: Final = 200
"""The number of latest events for a page that has no events yet."""

_HEARTBEAT: Final = 10
"""Seconds without an event after which the server checks that the reader is still there."""


_DAY: Final = 86_400
_HOUR: Final = 3600
"""Seconds."""

_SENTENCES: Final = frozenset({"because", "headline", "hint", "refused", "notes"})
"""The fields whose values are sentences of mpsd."""


def shown(answer: object, field: str = "") -> object:
    """Return an answer, or the value of a field, as the page may show it.

    It has no secrets, its unprintable characters are escaped, and the times and users in its sentences are as mpsctl
    prints them.
    """
    match answer:
        case dict():
            return {plain(name): shown(each, name) for name, each in answer.items() if name not in SECRETS}
        case list():
            return [shown(each, field) for each in answer]
        case str() if field in _SENTENCES:
            return as_here(plain(answer))
        case _:
            return plain(answer)


def node(api: Client) -> object:
    """Return the node for the page: mpsd's answers, and the names of the users in them."""
    status, leases, clients = api.status(), api.leases(ended=True), api.clients()
    uids = {*(each["owner"]["uid"] for each in leases["leases"]), *(each["uid"] for each in clients["clients"])}
    return shown(
        {
            "now": now().isoformat(),
            "status": status,
            "leases": leases["leases"],
            "others": leases["others"],
            "clients": clients["clients"],
            "users": {f"{uid}": name_of(uid) for uid in uids},
        }
    )


_PROMISES: Final = {
    **{str(each): each.promise for each in (Intent.HOLD, Intent.DRAIN, Intent.RESTART)},
    "timeout": TIMEOUT,
    "resume": "Admission resumes. A drain is cancelled, and so is a restart that has not stopped anything yet.",
    "reset": "The deaths of this control daemon and the faults of its GPU are forgotten, and it is started again.",
    "release": "The lease ends. Its clients continue to run, without a lease.",
    "end": "The process ends; its server ends its work on the GPU first, so that no other client is harmed. Its lease"
    " lives on if another process holds it.",
}
"""The effect of each action, shown before the user confirms it."""


def principal(api: Client) -> dict[str, object]:
    """Return the page's user and role, the effect of each action, and the offset of its clock from UTC (s)."""
    found = api.principal()
    return {
        "uid": found["uid"],
        "user": name_of(found["uid"]),
        "role": found["role"],
        "promises": _PROMISES,
        "offset": time.localtime().tm_gmtoff,
    }


def event(found: "answer_types.Event") -> object:
    """Return an event with the sentence that mpsctl prints for it."""
    return shown(
        {
            "seq": found["seq"],
            "level": found.get("level", "info"),
            "event": found["event"],
            "when": when(str(found["at"])),
            "sentence": sentence(plain(found)),
            "leases": [*leases_of(found)],
            "daemon": found.get("daemon"),
        }
    )


def events(api: Client, after: int | None, has_ended: Callable[[], bool], look: float) -> Iterator[bytes]:
    """Yield events as they happen, one line each, and empty lines that check the reader, until `has_ended` is true.

    If `after` is None, the latest stored events come first. `has_ended` is called every `look` seconds. Raises the
    errors of the API.
    """
    if after is None:
        latest = deque((found for _, found in api.events(0, follow=False)), maxlen=FIRST)
        after = 0
        for each in latest:
            after = int(str(each["seq"]))
            yield _line(event(each))
    yield b"\n"  # marks the end of the stored events for the reader

    def meanwhile() -> float:
        if has_ended():
            raise EndedError
        return look

    for _, found in api.events(after, follow=True, heartbeat=_HEARTBEAT, meanwhile=meanwhile):
        yield b"\n" if found["event"] == "heartbeat" else _line(event(found))


def history(api: Client, by: str) -> object:
    """Return the history of the last day for the page, by `gpu`, `user`, `name`, `lease` or `label:KEY`.

    `users` has the names of the users in it. Of GPUs there are few, and mpsd chooses the length of their samples. Of
    other keys there may be a thousand: their samples are hours, so that the answer stays small.
    """
    found = api.history(by=by, since=f"{_DAY}", **({} if by == "gpu" else {"step": f"{_HOUR}"}))
    uids = [each["key"] for each in found["history"] if by == "user" and each["key"]]
    return shown({**found, "users": {uid: name_of(int(uid)) for uid in uids}})


class EndedError(Exception):
    """The page's server ends."""


def _line(answer: object) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def story(api: Client, subject: str) -> object:
    """Return a story with the content that `mpsctl explain` prints. Raises the errors of `story_of`."""
    found = story_of(api, subject)
    return shown(
        {
            "about": found.about,
            "events": [event(each) for each in found.events[-FIRST:]],
            "earlier": max(len(found.events) - FIRST, 0),
            "hidden": found.hidden,
            "log": found.log,
            "now": [as_here(each) for each in found.now],
            "next": [as_here(each) for each in found.next],
        }
    )
