"""docs/security.md names a test for every attack that it calls stopped (test_docs.py: each of them exists)."""

import ast
import re
from typing import Final

from tests.gate.source import ROOT, modules

PAGE: Final = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED: Final = frozenset(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", PAGE))
"""Tests in pytest's notation: a file, or a class or function in it, or a method of a class."""


def there() -> frozenset[str]:
    """Return the names of all tests, and of their classes and files."""
    found = set()
    for module in modules("tests"):
        for node in module.tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names = [_name(node), *(f"{_name(node)}::{_name(each)}" for each in inner if _name(each))]
            if _name(node):
                found |= {module.path, *(f"{module.path}::{name}" for name in names)}
    return frozenset(found)


def _name(node: ast.stmt) -> str:
    """Return the name of a test or of a class of tests; an empty text for any other node."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ""
    return node.name if node.name.lower().startswith("test") else ""


def test_each_section_has_some() -> None:
    """Each section names tests for its claims."""
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) >= 10
    for section in sections:
        assert NAMED & set(re.findall(r"`(tests/[^`]+)`", section)), section.splitlines()[0]


def test_none_is_forgotten() -> None:
    """The page has every test about strangers: each file of tests/security, or each test in it."""
    ours = {each for each in there() if each.startswith("tests/security/") and each.count("::") == 1}
    files = {each.partition("::")[0] for each in ours}
    assert len(files) >= 4
    missing = {
        each for each in ours if each.partition("::")[0] not in NAMED and not any(n.startswith(each) for n in NAMED)
    }
    assert not missing
