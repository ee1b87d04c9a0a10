"""Tests show the promises of the documents, in tables, and each test, file and room that these name exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import click
import pytest

from mpsd.cli.group import mpsctl
from mpsd.core.settings import rows
from tests.gate.source import ROOT, modules, nodes

DOCUMENTS: Final = (
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "tests").glob("*.md")),
)

_NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")

_PATH: Final = re.compile(
    r"`((?:mpsd|tests|docs|bench|systemd|debian|container|completions)/[\w./-]+|"
    r"(?:core|system|daemon|cli|simulator)/[\w./-]+\.py)(?:::\w+)*`"
)
"""The form of a file or a folder of this tree, or of a module of mpsd."""


_LABELS: Final = {"mpsd.internal/sharing"}
"""Labels of Kubernetes that look like a path."""

_PLACEHOLDER: Final = re.compile(r"/[A-Z]{2,}\b")

_MEMBER: Final = re.compile(r"`([A-Za-z_]\w*)\.([A-Za-z_]\w*)`")
"""The form of a member of a class, or of a module."""

_SUFFIXES: Final = {"db", "log", "md", "py", "toml"}

_LINK: Final = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
"""The target of a link within this tree."""


@cache
def _tests(path: Path) -> frozenset[str]:
    """Return what pytest would collect from a file, in its notation: `test_x`, `TestY`, `TestY::test_z`."""

    def inside(body: list[ast.stmt], before: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield f"{before}{node.name}"
                yield from inside(node.body, f"{before}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{before}{node.name}"

    return frozenset(inside(ast.parse(path.read_text(encoding="utf-8")).body))


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_named_tests_exist(document: Path) -> None:
    """A test, or a file of tests, that a document names can be run under that name."""
    for path, test in _NAMED.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
        assert not test or test.removeprefix("::") in _tests(ROOT / path), f"{path}{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_named_files_exist(document: Path) -> None:
    """A file or folder that a document names is in the tree; test_links.py tests the links."""
    text = document.read_text(encoding="utf-8")
    named = [path for path in _PATH.findall(text) if path not in _LABELS and not _PLACEHOLDER.search(path)]
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "mpsd" / path).exists()] == []


@cache
def _members() -> dict[str, set[str]]:
    """Return the definitions of each class of mpsd, and of each module."""
    found: dict[str, set[str]] = {}
    for module in modules("mpsd"):
        for node in nodes(module):
            if isinstance(node, ast.ClassDef | ast.Module):
                owner = node.name if isinstance(node, ast.ClassDef) else module.name.rpartition(".")[2]
                found.setdefault(owner, set()).update(_defined(node.body))
    return found


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name


@pytest.mark.parametrize("document", [ROOT / "docs/internals/architecture.md", ROOT / "CONTRIBUTING.md"], ids=_name)
def test_named_functions_exist(document: Path) -> None:
    """A method of a class of mpsd, or a function of a module, that the map names is defined there."""
    text = document.read_text(encoding="utf-8")
    known, settings = _members(), {row.key for row in rows()}
    named = [(owner, name) for owner, name in _MEMBER.findall(text) if owner in known and name not in _SUFFIXES]
    missing = [f"{owner}.{name}" for owner, name in named if name not in known[owner]]
    assert [each for each in missing if each not in settings] == []


def test_the_index_is_complete() -> None:
    """docs/README.md names every document of its folder, and of the folders in it."""
    folder = ROOT / "docs"
    named = set(_LINK.findall((folder / "README.md").read_text(encoding="utf-8")))
    assert {str(each.relative_to(folder)) for each in folder.rglob("*.md")} - {"README.md"} <= named


def test_every_command_is_listed() -> None:
    """docs/reference/commands.md has each command of mpsctl."""
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    assert [
        name for name in mpsctl.list_commands(click.Context(mpsctl)) if not re.search(rf"`(?:mpsctl )?{name}\b", page)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_promises_are_shown(document: Path) -> None:
    """In a table whose last column is called `shown by`, every row names a test that shows its claim."""
    is_promise, bare = False, []
    for line in document.read_text(encoding="utf-8").splitlines():
        last = line.strip().strip("|").rpartition("|")[2].strip() if line.startswith("|") else ""
        if last == "shown by":
            is_promise = True
        elif not line.startswith("|"):
            is_promise = False
        elif is_promise and set(last) != {"-"} and not any(test for _, test in _NAMED.findall(last)):
            bare.append(line)
    assert bare == []


def test_every_attack_is_named() -> None:
    """docs/security.md has a table of attempts with the tests that show each, and names each file of tests/security."""
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    assert "| strangers try to | protection | shown by |" in page  # test_promises_are_shown reads its rows
    named = {path for path, _ in _NAMED.findall(page)}
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "tests/security").glob("test_*.py")} <= named


@pytest.mark.parametrize(
    ("page", "end", "least"),
    [("tests/found.md", "## Not mended yet", 150), ("docs/internals/reliability.md", "## Long runs", 30)],
)
def test_every_line_is_shown(page: str, end: str, least: int) -> None:
    """Each defect that was found, and each failure that mpsd survives, is a line that ends with its test."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{end}")[0]
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(lines) > least
    last = [re.search(f"{_NAMED.pattern}$", line) for line in lines]
    assert [line for line, test in zip(lines, last, strict=True) if test is None or not test[2]] == []
