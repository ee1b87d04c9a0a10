"""Events as sentences: one for each kind, with the names of mpsctl's tables, and times in this machine's zone."""

from functools import cache
from typing import TYPE_CHECKING, Final

from mpsd.cli.render import as_here, fact, fold, limit, percent, size, when
from mpsd.cli.tables import Look
from mpsd.cli.users import name_of
from mpsd.core.events import EVENTS, EventName

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
    template = EVENTS[EventName(kind)].sentence if kind in EVENTS else None
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
