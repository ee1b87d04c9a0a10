"""The catalogue of events has every kind, and each call of the logger uses the level and the facts in its row.

tests/catalogued.py checks facts that a call passes on as `**facts`, when a node of the tests logs them.
"""

import ast
from collections.abc import Iterator
from typing import Final

from mpsd.core.events import COMMON, FACTS, EventName, facts_of
from mpsd.daemon.leases.group_commit import WARNINGS
from tests.gate.source import modules, nodes

LEVELS: Final = {"info": "info", "warning": "warning", "error": "error", "defect": "error"}
"""The level of an event by the called method, except `GroupCommit.change`, which logs the events of leases."""

NOT_LOGGED: Final = "mpsd/daemon/record/"
"""The room that defines the events."""


ADDED: Final = {"daemon", "exception", "lease", "uid", "pid"}
"""Facts that a call need not name: those bound to a logger, a defect's traceback, and those that `change` adds."""


def logged() -> Iterator[tuple[str, EventName, str | None, set[str]]]:
    """Yield each call that names an event: its place, its level if the method determines it, and the facts it names.

    Among the facts, `**` stands for further facts that the call passes on.
    """
    for module in modules("mpsd/daemon"):
        if module.path.startswith(f"{NOT_LOGGED}log"):
            continue
        for node in nodes(module):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            for each in node.args:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "EventName":
                    facts = {keyword.arg or "**" for keyword in node.keywords}
                    name, level = EventName[each.attr], LEVELS.get(method)
                    if method == "change":
                        level = "warning" if name in WARNINGS else "info"
                    yield f"{module.path}:{node.lineno}", name, level, facts


def test_every_kind_is_there() -> None:
    """A member is named after its event; each of its facts has a meaning, and no meaning is without an event."""
    assert {name: name.lower() for name in EventName.__members__} == {kind.name: kind.value for kind in EventName}
    facts = {fact for name in EventName for fact in facts_of(name)}
    assert facts == FACTS.keys()
    assert not facts & COMMON.keys()


def test_rows_are_sound() -> None:
    """A level is one of three."""
    for kind in EventName:
        assert {*kind.levels.split()} <= {"info", "warning", "error"}, kind


def test_each_place_says_what_the_catalogue_says() -> None:
    """Each call of the logger uses a level and facts from the event's row."""
    wrong = []
    for place, name, level, facts in logged():
        if unknown := facts - facts_of(name).keys() - {"**"}:
            wrong.append(f"{place}: {name} has {', '.join(sorted(unknown))}, which the catalogue does not have")
        needed = {fact for fact, always in facts_of(name).items() if always} - ADDED
        if level is not None and "**" not in facts and (left_out := needed - facts):
            wrong.append(
                f"{place}: {name} lacks {', '.join(sorted(left_out))}, which the catalogue says is always there"
            )
        if level is not None and level not in name.levels.split():
            wrong.append(f"{place}: {name} is logged as {level}, and the catalogue says {name.levels}")
    assert not wrong, "\n".join(wrong)
