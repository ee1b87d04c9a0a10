"""Texts for users are plain English: helps, errors, hints, every other sentence of the code, and the documents.

The gate checks the beginning and the end of a phrase, and searches every text for words that this project no longer
uses, since each of them hides the actor: "nobody is let in" is "admission is stopped", "it waited in vain" is "it timed
out".
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Final

import click
import pytest

from mpsd.__main__ import cli as mpsd
from mpsd.cli.group import mpsctl
from mpsd.core.errors import MpsdError, catalogue
from mpsd.core.settings import quota_rows, rows
from tests.gate.source import ROOT, Module, dotted, modules, nodes

pytestmark = pytest.mark.thorough

Check = Callable[[str], Iterator[str]]
"""Yields the faults of a text."""

_START: Final = re.compile(r"[A-Z`0-9]|mpsctl |mpsd ")
"""A capital, a literal, a number, or the name of a program, which is in lower case."""

_SHORTHAND: Final = re.compile(
    r"(?:For which|Of|That|Those|These|Who|Whose|Whom|Which|With which|(?:After|Before|Between|On|In|To) (?:which|so)"
    r"|What (?:is|are|was|were|becomes|it|they)|And|But|It|Its|They|There|As (?:many|much)|So|Somebody|Something)\b"
)
"""Openings that continue a sentence elsewhere, or that name nothing."""

_DEFAULT: Final = re.compile(r"  \[[^\[\]]+\]$")
"""The suffix that click adds to an option's help."""

_UNWANTED: Final = {
    r"\bwhoever\b": "name them: clients, the caller, processes",
    r"\b(?:nobody|anybody|everybody)\b": "name them: no client, all users",
    r"\b(?:let|lets|letting) (?:\w+ ){0,3}in\b": "admit, grant a lease, resume admission",
    r"\blets (?:no|uid)\b": "may not traverse",
    r"\b(?:those|anyone|one) who\b": "name them: clients that, users that",
    r"\bwho (?:is|are|was|were) (?:there|here|left)\b": "clients that are still connected",
    r"\bwho asks\b": "the caller",
    r"\bpeople\b": "users, clients",
    r"\bin vain\b": "timed out",
    r"\b(?:is|are|was|were|be) told\b(?! apart)": "say what the program does: reports, logs, answers",
    r"\b(?:go|goes|going|went) on\b": "continue, keep running",
    r"\b(?:gets?|got) (?:on|round|past)\b": "continue, bypass",
    r"\bcomes? to\b": "is, results in",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bway (?:out|in|to)\b": "fix, access, path",
    r"\bof others'": "of other users",
    r"\bas (?:many|much) as (?:it|they|one|you|who) ": "the maximum",
    r"\basked for\b": "requested",
    r"\bask for (?:less|more|fewer|it)\b": "request less",
    r"\bunderst(?:and|ood)\b": "parse",
    r"\bno client notices\b": "clients are not affected",
    r"\blooks? again\b": "retries, try again",
    r"\b(?:gives|gave|given) (?:\w+ ){0,2}back\b|\bgive \w+ back\b": "restore",
    r"\bstruck out\b": "removed",
    r"(?<!there )\bis no (?!longer)": "is not a",
    r"\bh[ua]ngs? up\b|\bhung up\b": "disconnected",
    r"\bmake room\b": "free space",
    r"\bis (?:over|done|done with)\b": "has expired, has finished",
    r"\bhas gone\b": "is gone",
    r"\btheir time to leave\b": "the timeout",
    r"\bwho (?:has|have) (?:it|them)\b": "the holder",
    r"\bwas to\b|\bis to be\b|\bare to be\b": "say when or why: must, will",
}
"""Words that no text may contain, as regular expressions, with their replacements."""


def _words(text: str) -> Iterator[str]:
    for unwanted, instead in _UNWANTED.items():
        found = re.search(unwanted, text, re.IGNORECASE)
        if found is not None:
            yield f"says {found.group()!r}; say instead: {instead}"


def _phrase(text: str) -> Iterator[str]:
    """Check a text that stands alone: in a table, a manual page, or a comment."""
    if not _START.match(text):
        yield "does not begin with a capital, a number or a literal"
    if found := _SHORTHAND.match(text):
        yield f"begins with {found.group()!r}, as if it continued a sentence"
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


_RELATIVE: Final = re.compile(r"(?:Who|Whom|Whose|Whoever|Whatever|What)\b(?!.*\?$)|.*; who(?:ever)? ")
"""A clause in place of a noun; a question may begin with these words."""

_DIALECT: Final = {
    r"\b(?:he|him|his)\b": "name them: the user, the process",
    r"\b(?:is|are|was|were) (?:let|let in|let go)\b": "may, is admitted, is released",
    r"\bnobody's\b|\bsomebody(?:'s)?\b": "name them: a user, a process",
}
"""Further words that no document may contain."""


def _prose(text: str) -> Iterator[str]:
    """Check a sentence of a document."""
    if found := _RELATIVE.match(text):
        yield f"has a relative clause for a noun: {found.group()[-30:]!r}"
    yield from _words(text)
    for unwanted, instead in _DIALECT.items():
        if word := re.search(unwanted, text):
            yield f"says {word.group()!r}; say instead: {instead}"


_HIDES_THE_ACTOR: Final = {
    unwanted: _UNWANTED[unwanted]
    for unwanted in (
        r"\bwhoever\b",
        r"\b(?:nobody|anybody|everybody)\b",
        r"\b(?:those|anyone|one) who\b",
        r"\bwho (?:is|are|was|were) (?:there|here|left)\b",
        r"\bwho asks\b",
        r"\bpeople\b",
        r"\bin vain\b",
        r"\b(?:is|are|was|were|be) told\b(?! apart)",
        r"\b(?:go|goes|going|went) on\b",
        r"\bof others'",
    )
} | _DIALECT
"""Words that no docstring and no comment may contain. Readers of the code know the terms behind the other ones."""


def _source(text: str) -> Iterator[str]:
    """Check a sentence of a docstring or a comment."""
    if found := _RELATIVE.match(text):
        yield f"has a relative clause for a noun: {found.group()[-30:]!r}"
    for unwanted, instead in _HIDES_THE_ACTOR.items():
        if word := re.search(unwanted, text, re.IGNORECASE):
            yield f"says {word.group()!r}; say instead: {instead}"


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


DOCUMENTS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md", "docs/**/*.md")
"""Documents whose sentences are checked, by their paths from the root of the tree."""


def _documents() -> Iterator[tuple[str, str, Check]]:
    """Yield each sentence of the documents, each heading and each cell of a table, without literals."""
    for path in sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern)):
        for line, text in _sentences(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(ROOT)}:{line}", text, _prose


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a Markdown text, each with the number of its paragraph's first line."""
    plain = re.sub(r"(?s)<!--.*?-->|<[^>]+>|```.*?```", lambda found: "\n" * found[0].count("\n"), text)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", plain)).replace("*", "")
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate([*plain.splitlines(), ""], 1):
        if not line.strip() or re.match(r" *(?:[-+#|]|\d+\.) ?", line):
            yield from ((begin, each) for each in _END.split(" ".join(paragraph)) if each)
            paragraph, begin = [], number
        cells = line.strip().strip("|").split(" | ") if line.startswith("|") else []
        yield from ((number, each) for cell in cells for each in _END.split(cell.strip()) if each)
        if line.strip() and not cells:
            paragraph.append(re.sub(r"^ *(?:[-+#]+|\d+\.) ", "", line).strip())


_END: Final = re.compile(r"(?<=[.?!]) +")


SOURCES: Final = ("mpsd", "tests", "bench")
"""Folders whose docstrings and comments are checked."""


def _docstrings() -> Iterator[tuple[str, str, Check]]:
    """Yield each sentence of the docstrings and comments, without literals and quotations."""
    for module in (module for folder in SOURCES for module in modules(folder)):
        for line, text in _remarks(module):
            plain = " ".join(re.sub(r'``?[^`]*``?|"[^"]*"', "X", text).split())
            yield from ((f"{module.path}:{line}", each, _source) for each in _END.split(plain) if each)


def _remarks(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module with their lines; adjacent comments are one text."""
    for node in nodes(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    begin, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.removeprefix("#").strip(" -")
            if text.startswith(("noqa", "type:", "fmt:")):
                continue
            begin, comment = begin or token.start[0], f"{comment} {text}".strip()
        elif comment and token.type != tokenize.NL:
            yield begin, comment
            begin, comment = 0, ""


_RAISED: Final = {error.__name__ for error in catalogue()} | {MpsdError.__name__}


def _code() -> Iterator[tuple[str, str, Check]]:
    """Yield each text of the code except for docstrings; the details of errors are checked as such."""
    for module in modules("mpsd"):
        details = {id(each) for call in nodes(module) for each in _details(call)}
        silent = set(_silent(module.tree))
        for node in nodes(module):
            text = _text(node)
            if " " in text and id(node) not in silent:
                check = _detail if id(node) in details else _words
                yield f"{module.path}:{getattr(node, 'lineno', 0)}", text, check


def _details(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the detail of an error that is made here."""
    if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in _RAISED:
        yield from node.args[:1]
        yield from (each.value for each in node.keywords if each.arg == "detail")


def _silent(tree: ast.Module) -> Iterator[int]:
    """Yield the texts that are parts of another, or that only readers of the code see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (id(each) for each in ast.walk(node) if each is not node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _text(node: ast.AST) -> str:
    """Return the text of a node, with `{}` for inserted values; an empty one for other nodes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in parts)
        case _:
            return ""


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [_settings, _commands, _errors, _code, _documents, _docstrings],
    ids=lambda texts: texts.__name__.strip("_"),
)
def test_reads_well(texts: Callable[[], Iterator[tuple[str, str, Check]]]) -> None:
    """Every help, error and sentence begins and ends correctly, and contains no unwanted word."""
    all_of_it = list(texts())
    assert len(all_of_it) > 30  # each kind has more: none was lost
    wrong = [f"{where}: {text!r} {what}" for where, text, check in all_of_it for what in check(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_phrase, "for which an event is kept"),
        (_phrase, "For which an event is kept."),
        (_phrase, "How long events are kept"),
        (_phrase, "Of the GPU's threads, in steps of 0.1."),
        (_phrase, "It ends after that, unless it is renewed."),
        (_summary, "Lists the control daemons."),
        (_detail, "the lease has ended."),
        (_words, "nobody is let in"),
        (_words, "let people in again: mpsctl resume gpu0"),
        (_words, "it waited in vain for as long as it was to"),
        (_words, "mend the cause, then: mpsctl reset gpu0"),
        (_words, "the control daemons go on"),
        (_words, "60.0 % of the threads were asked for, and 50 % are left"),
        (_words, "it is no FIFO"),
        (_prose, "Who asks for too much is refused."),
        (_prose, "What mpsd keeps: leases."),
        (_prose, "A claim is taken once; who comes later is refused."),
        (_prose, "The user loses his lease."),
        (_source, "Whoever waited in vain is told which limit it waited for."),
        (_source, "What a lease has on one GPU."),
        (_source, "The claims that nobody has taken yet."),
    ],
)
def test_what_it_finds(check: Check, text: str) -> None:
    """The gate finds texts that users had to read before it existed."""
    assert list(check(text))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_phrase, "How long events are kept."),
        (_phrase, "`leave` does not change the GPU's compute mode."),
        (_summary, "List the control daemons and the limits that they report."),
        (_detail, "only 50 % are left"),
        (_words, "there is no lease 'lease-1'"),
        (_prose, "What is wrong, and what do I type?"),
        (_prose, "A user who holds a lease can command the daemon."),
        (_source, "Return the leases of one user, the oldest first."),
    ],
)
def test_what_it_lets_pass(check: Check, text: str) -> None:
    """The gate accepts plain sentences."""
    assert not list(check(text))
