"""A check that the events of a test's node are in the catalogue: each kind, its level, and its facts."""

from collections.abc import Iterable, Mapping
from typing import Any

from mpsd.core.events import COMMON, EventName, facts_of


def wrong_facts(line: Mapping[str, Any]) -> str:
    """Return the differences between an event and the catalogue; an empty text for none."""
    if line["event"] not in set(EventName):
        return f"{line['event']} is not in the catalogue"
    name = EventName[line["event"].upper()]
    facts, there = facts_of(name), line.keys() - COMMON.keys()
    wrong = [f"the unknown fact {each}" for each in sorted(there - facts.keys())]
    wrong += [f"no fact {each}" for each, always in facts.items() if always and each not in there]
    if line["level"] not in name.levels.split():
        wrong.append(f"the level {line['level']}")
    return f"{name} has {', '.join(wrong)}: see mpsd/core/events.py" if wrong else ""


def check_events(lines: Iterable[Mapping[str, Any]]) -> None:
    """Fail if a node has logged an event that differs from the catalogue."""
    wrong = {found for line in lines if (found := wrong_facts(line))}
    assert not wrong, "\n".join(sorted(wrong))
