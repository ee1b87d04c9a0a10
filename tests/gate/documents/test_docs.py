"""What the documents promise is shown by tests, and each test that they name is there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.gate.source import ROOT

DOCUMENTS: Final = tuple(sorted((ROOT / "docs").glob("*.md")))

_NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")


@cache
def _tests(path: Path) -> frozenset[str]:
    """Return what pytest would collect from a file, as it names it: `test_x`, `TestY`, `TestY::test_z`."""

    def inside(body: list[ast.stmt], before: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield f"{before}{node.name}"
                yield from inside(node.body, f"{before}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{before}{node.name}"

    return frozenset(inside(ast.parse(path.read_text(encoding="utf-8")).body))


def _is_there(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and (not test or test in _tests(file))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    """A test, or a file of tests, that a document names can be run under that name."""
    named = _NAMED.findall(document.read_text(encoding="utf-8"))
    assert [f"{path}{test}" for path, test in named if not _is_there(path, test.removeprefix("::"))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_promises_are_shown(document: Path) -> None:
    """In a table whose last column is called `shown by`, every row names a test that shows what it says."""
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
