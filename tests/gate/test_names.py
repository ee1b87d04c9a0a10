"""Names are the field's words, one for each concept: the glossary of docs/architecture.md, enforced on the code."""

import ast
import re
from collections.abc import Iterator
from typing import Final

import pytest

from mpsd.core.errors import catalogue
from mpsd.core.events import EventName
from tests.gate.source import Module, modules, nodes

BANNED: Final = {
    "tenant": "holder, or owner",
    "visitor": "peer, principal or user",
    "wish": "desired state, command, or observed",
    "way": "access, pipe access, or path",
    "door": "listener",
    "turn": "batch, slot, or group commit",
}
"""Words of a former vocabulary that come back most easily, each with the words of the glossary."""

_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(name: str) -> Iterator[str]:
    """Yield the words of a name: `_turn_away` and `TurnAway` have two."""
    return (word.lower() for word in _WORD.findall(name))


def names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield each name that a module defines, with its line."""
    yield 1, module.name.rpartition(".")[2]
    for node in nodes(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


def found(module: Module) -> list[str]:
    """Return each name of a module that contains a banned word, and the word of the glossary."""
    return [
        f"{module.path}:{line}: {name} (the glossary has: {BANNED[word]})"
        for line, name in names(module)
        for word in words(name)
        if word in BANNED
    ]


def test_code_has_the_words_of_the_glossary() -> None:
    """No module, class, function, argument or variable of mpsd has a word that the glossary replaced."""
    wrong = [place for module in modules("mpsd") for place in found(module)]
    assert not wrong, "\n".join(wrong)


def test_the_wire_has_the_words_of_the_glossary() -> None:
    """No event and no error code has one, either."""
    codes = [error.code for error in catalogue()]
    assert not [name for name in (*EventName, *codes) if set(words(name)) & BANNED.keys()]


@pytest.mark.parametrize(
    "text", ["def door(): ...", "class Turn: ...", "def f(way): ...", "self._wish = 1", "tenant = 1"]
)
def test_a_banned_word_is_seen(text: str) -> None:
    """A banned word is found in every kind of definition."""
    assert found(Module("mpsd/x.py", text, ast.parse(text)))
