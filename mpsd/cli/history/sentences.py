"""Events as sentences: one for each kind, with the names of mpsctl's tables, and times in this machine's zone.

The events for them are selected by time, lease, control daemon, GPU, user, or kind.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.cli.cells import fold
from mpsd.cli.render import as_here, fact, limit, percent, size, when
from mpsd.cli.tables import Look
from mpsd.cli.users import name_of
from mpsd.core.errors import InvalidRequestError
from mpsd.core.events import EventName
from mpsd.core.units import briefly

if TYPE_CHECKING:
    from mpsd.client import answer_types

_VERDICTS: Final = {
    "at_once": "mpsd starts it again at once",
    "later": "mpsd starts it again in {delay:.1f} s",
    "give_up": "mpsd does not start it again, because it died too often",
}
_LEFT: Final = {"never": "; the control daemons keep running", "drain": ", and drains the control daemons"}
_MARKS: Final = {"warning": "! ", "error": "!!"}
_COLOURS: Final = {"warning": "yellow", "error": "red"}


@cache
def _name_of(uid: int) -> str:
    """Return a user's name, looked up once: there may be thousands of events."""
    return name_of(uid)


class _Facts(dict[str, str]):
    """The facts of an event as words; a missing fact shows as missing."""

    def __missing__(self, name: str) -> str:
        return f"(no {name})"


def sentence(event: "answer_types.Event") -> str:
    """Return an event as a sentence, with its hint; for an unknown kind, its facts."""
    kind = str(event["event"])
    facts = _facts(event)
    known = EventName.__members__.get(kind.upper())
    template = known.sentence if known is not None else None
    if kind == "lease_refused" and "lease" in event:
        template = "{lease}: refused: {because} [{code}]"
    if template is None:
        said = " ".join(f"{name}={fact(value)}" for name, value in event.items() if name not in _USUAL)
        return f"{kind.replace('_', ' ')}: {said}".rstrip(": ")
    if "because" not in facts and template.endswith(": {because}"):
        template = template.removesuffix(": {because}")
    hint = f" ({event['hint']})" if event.get("hint") else ""
    return f"{template.format_map(facts)}{hint}"


_USUAL: Final = frozenset({"seq", "at", "level", "event"})


def _facts(event: "answer_types.Event") -> _Facts:
    """Return the facts of an event as words."""
    facts = _Facts({name: _words(value) for name, value in event.items()})
    if isinstance(uid := event.get("uid"), int):
        facts["user"] = _name_of(uid)
    if isinstance(because := event.get("because"), str):
        facts["because"] = as_here(because)
    facts.update(_of_daemons(event))
    match event["event"], event:
        case "node_stopping", {"stop_daemons": str(stops)}:
            facts["daemons"] = _LEFT.get(stops, "")
        case "settings_reloaded", {"applied": list(applied), "needs_restart": list(waiting)}:
            later = f"; applied by a restart: {', '.join(map(str, waiting))}" if waiting else ""
            facts["changes"] = f"{', '.join(map(str, applied)) or 'nothing has changed'}{later}"
        case "gpu_health", {"health": "ok"} if not event.get("because"):
            facts["because"] = "it answers"
        case "gpu_admission", {"admits": bool(admits)}:
            facts["requests"] = "requests" if admits else "no request"
    return facts


def _of_daemons(event: "answer_types.Event") -> dict[str, str]:
    """Return the facts of an event about a control daemon that need more than one value."""
    match event["event"], event:
        case "daemon_death", {"verdict": str(verdict), "delay": int() | float() as delay}:
            return {"verdict": _VERDICTS.get(verdict, verdict).format(delay=delay)}
        case "limits_verified", {"active_thread_percentage": threads, "pinned_device_mem_limit": memory}:
            said = f"{_limit('active_thread_percentage', threads)} of the threads and "
            return {"limits": said + _limit("pinned_device_mem_limit", memory)}
        case "limit_drift", {"limit": str(name), "wanted": wanted, "found": found, **others}:
            said = f"{name} is {_limit(name, found)} instead of {_limit(name, wanted)}"
            if command := others.get("command"):
                said += f"; the foreign command '{command}' changed it"
            return {"drift": said}
        case "foreign_command", {"command": command}:
            return {"command": f"'{command}'"}
        case "log_shortened", {"bytes": int(count)}:
            return {"bytes": size(count)}
        case _:
            return {}


def _limit(name: str, value: object) -> str:
    return limit(name, value) if value is None or isinstance(value, (int, float)) else str(value)


def _words(value: object) -> str:
    match value:
        case str():
            return value
        case list():
            return ", ".join(map(_words, value)) or "none"
        case None:
            return "none"
        case float():
            return percent(value).removesuffix("%")
        case _:
            return f"{value}"


def line(event: "answer_types.Event", look: Look) -> str:
    """Return an event as a line: time, severity, and the sentence, folded at the width of the terminal."""
    level = str(event.get("level", ""))
    start = f"{when(str(event['at']))} {_MARKS.get(level, '  ')} "
    text = fold(f"{start}{sentence(event)}", look.width, len(start))
    if look.colour and level in _COLOURS:
        import click

        return text[: len(start)] + click.style(text[len(start) :], fg=_COLOURS[level])
    return text


# -- the selection of events -------------------------------------------------------------------------------------------


def matching_kinds(pattern: str) -> frozenset[str]:
    """Return the kinds of events that match a name, or a pattern such as `lease_*`.

    Raises InvalidRequestError where there are none, with similar names.
    """
    wanted = pattern.replace("-", "_")
    found = frozenset(each for each in EventName if fnmatchcase(each, wanted))
    if found:
        return found
    near = difflib.get_close_matches(wanted, EventName, n=3) or [each for each in EventName if wanted in each][:3]
    meant = f"did you mean {' or '.join(near)}?" if near else "list them: mpsctl events --kinds"
    raise InvalidRequestError(f"there are no events of the kind {briefly(pattern)}", hint=meant)


class GpuNames(NamedTuple):
    number: int
    uuid: str | None
    daemon: str | None


@dataclass
class Selector:
    """Selects events by criteria, of which None, or empty, stands for all.

    It takes the events in their order: the facts that one event has about a lease apply to later events about it.
    """

    since: datetime | None = None
    until: datetime | None = None
    leases: tuple[str, ...] | None = None
    """The ids of leases, or the beginnings of ids."""
    daemon: str | None = None
    gpu: GpuNames | None = None
    uid: int | None = None
    kinds: Collection[str] = ()
    _owners: dict[str, int] = field(default_factory=dict, init=False)
    _gpus: dict[str, frozenset[str]] = field(default_factory=dict, init=False)

    def takes(self, event: "answer_types.Event") -> bool:
        """Tell whether an event is selected."""
        self._learn(event)
        if self.kinds and event["event"] not in self.kinds:
            return False
        if self.since is not None or self.until is not None:
            at = datetime.fromisoformat(str(event["at"]))
            if (self.since and at < self.since) or (self.until and at > self.until):
                return False
        return (
            (self.leases is None or any(each.startswith(self.leases) for each in leases_of(event)))
            and (self.daemon is None or self.daemon in _daemons_of(event))
            and (self.uid is None or self.uid in self._users_of(event))
            and (self.gpu is None or self._is_on(event, self.gpu))
        )

    def _learn(self, event: "answer_types.Event") -> None:
        match event:
            case {"lease": str(lease), "uid": int(uid), **others}:
                self._owners[lease] = uid
                if isinstance(gpus := others.get("gpus"), list):
                    self._gpus[lease] = frozenset(map(str, gpus))

    def _users_of(self, event: "answer_types.Event") -> set[object]:
        suspects = event.get("suspects")
        owners = {self._owners[each] for each in leases_of(event) if each in self._owners}
        return {event.get("uid"), *owners, *(suspects if isinstance(suspects, list) else ())}

    def _is_on(self, event: "answer_types.Event", gpu: GpuNames) -> bool:
        gpus = event.get("gpus")
        named = {event.get("uuid"), event.get("gpu"), *(gpus if isinstance(gpus, list) else ())}
        named.update(*(self._gpus.get(each, ()) for each in leases_of(event)))
        return (
            (gpu.uuid is not None and gpu.uuid in named)
            or (gpu.daemon is not None and gpu.daemon in _daemons_of(event))
            or (event["event"] in _BY_INDEX and event.get("index") == gpu.number)
        )


_BY_INDEX: Final = frozenset(
    {"gpu_found", "gpu_health", "gpu_admission", *(each for each in EventName if each.startswith("compute_mode_"))}
)


def leases_of(event: Mapping[str, object]) -> Iterable[str]:
    """Return the leases that an event is about."""
    match event:
        case {"lease": str(lease)}:
            return (lease,)
        case {"leases": list(leases)}:
            return tuple(map(str, leases))
        case _:
            return ()


def _daemons_of(event: Mapping[str, object]) -> Collection[object]:
    daemons = event.get("daemons")
    return (event.get("daemon"), *(daemons if isinstance(daemons, (list, dict)) else ()))
