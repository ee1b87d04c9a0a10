"""Texts for users are plain English: helps, errors with their hints, and the documents.

The gate checks the beginning and the end of a help, and searches every text for six words that hide the actor: "nobody
is let in" is "admission is stopped", "it waited in vain" is "it timed out". Readers judge docstrings and comments.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Final

import click
import pytest

from mpsd.__main__ import cli as mpsd
from mpsd.cli.group import mpsctl
from mpsd.core.errors import MpsdError, catalogue
from mpsd.core.settings import quota_rows, rows
from tests.gate.source import ROOT, dotted, modules, nodes

pytestmark = pytest.mark.thorough

Check = Callable[[str], Iterator[str]]
"""Yields the faults of a text."""

_START: Final = re.compile(r"[A-Z`0-9]|mpsctl |mpsd ")
"""A capital, a literal, a number, or the name of a program, which is in lower case."""

_DEFAULT: Final = re.compile(r"  \[[^\[\]]+\]$")
"""The suffix that click adds to an option's help."""

_UNWANTED: Final = {
    r"\bwho(?:m)?ever\b": "name them: clients, the caller, processes",
    r"\b(?:no|any|every)body\b": "name them: no client, all users",
    r"\bpeople\b": "users, clients",
    r"\bin vain\b": "timed out",
    r"\b(?:is|are|was|were|be) told\b(?! apart)": "say what the program does: reports, logs, answers",
    r"\b(?:go|goes|going|went) on\b": "continue, keep running",
}
"""Words that no text may contain, as regular expressions, with their replacements."""


def _words(text: str) -> Iterator[str]:
    for unwanted, instead in _UNWANTED.items():
        found = re.search(unwanted, text, re.IGNORECASE)
        if found is not None:
            yield f"says {found.group()!r}; say instead: {instead}"


def _phrase(text: str) -> Iterator[str]:
    """Check a text that stands alone: in a table or a manual page."""
    if not _START.match(text):
        yield "does not begin with a capital, a number or a literal"
    if not text.endswith("."):
        yield "does not end with a full stop"
    yield from _words(text)


def _summary(text: str) -> Iterator[str]:
    """Check the first sentence of a command's help, which is an imperative: List, not Lists."""
    if not re.match(r"[A-Z][a-z]+(?<!s)\b", text):
        yield "does not begin with a verb in the imperative"
    yield from _phrase(text)


def _detail(text: str) -> Iterator[str]:
    """Check the detail of an error, which is followed by its code on the same line."""
    if text.endswith("."):
        yield "ends with a full stop"
    yield from _words(text)


# -- what there is to read ---------------------------------------------------------------------------------------------


def _settings() -> Iterator[tuple[str, str, Check]]:
    yield from ((row.key, row.help, _phrase) for row in (*rows(), *quota_rows()))


def _commands() -> Iterator[tuple[str, str, Check]]:
    for program in (mpsd, mpsctl):
        assert program.name is not None
        yield from _command(program, click.Context(program, info_name="mpsctl" if program is mpsctl else "mpsd"))


def _command(command: click.Command, context: click.Context) -> Iterator[tuple[str, str, Check]]:
    name = context.command_path
    first, *more = (" ".join(each.split()) for each in (command.help or "").split("\n\n"))
    yield name, first, _summary
    yield from ((name, each, _words) for each in more)
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield f"{name} {parameter.opts[-1]}", _DEFAULT.sub("", parameter.help or ""), _phrase
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=each, parent=context))


def _errors() -> Iterator[tuple[str, str, Check]]:
    yield from ((error.code, " ".join((error.__doc__ or "").split()), _phrase) for error in catalogue())


DOCUMENTS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/*.md", "docs/**/*.md")
"""Documents whose text is checked, by their paths from the root of the tree."""

_LITERAL: Final = re.compile(r"(?s)<!--.*?-->|<[^>]+>|```.*?```|`[^`]*`")


def _documents() -> Iterator[tuple[str, str, Check]]:
    """Yield each paragraph of the documents, without literals."""
    for path in sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern)):
        text = _LITERAL.sub("X", path.read_text(encoding="utf-8"))
        yield from ((f"{path.relative_to(ROOT)}", " ".join(each.split()), _words) for each in text.split("\n\n"))


_RAISED: Final = {error.__name__ for error in catalogue()} | {MpsdError.__name__}


def _details() -> Iterator[tuple[str, str, Check]]:
    """Yield the detail and the hint of each error that mpsd makes."""
    for module in modules("mpsd"):
        for node in nodes(module):
            if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in _RAISED:
                named = {each.arg: each.value for each in node.keywords}
                detail, hint = (*node.args, named.get("detail"))[0], named.get("hint")
                yield from ((f"{module.path}:{node.lineno}", text, _detail) for text in _texts(detail))
                yield from ((f"{module.path}:{node.lineno}", text, _words) for text in _texts(hint))


def _texts(node: ast.expr | None) -> Iterator[str]:
    """Yield the texts of an expression, with `{}` for inserted values."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in parts)
        case None:
            pass
        case _:
            yield from (
                text for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr) for text in _texts(each)
            )


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [_settings, _commands, _errors, _details, _documents])
def test_reads_well(texts: Callable[[], Iterator[tuple[str, str, Check]]]) -> None:
    """Every help and error begins and ends correctly, and no text contains an unwanted word."""
    all_of_it = list(texts())
    assert len(all_of_it) > 30  # each kind has more: none was lost
    wrong = [f"{where}: {text!r} {what}" for where, text, check in all_of_it for what in check(text)]
    assert not wrong, "\n".join(wrong)
