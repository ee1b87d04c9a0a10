"""docs/security.md names a test for everything that it says is stopped, and each of those is there."""

import ast
import re
from typing import Final

from tests.gate.source import ROOT, modules

PAGE: Final = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED: Final = frozenset(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", PAGE))
"""Tests as pytest takes them: a file, or a class or function in it, or a method of a class."""


def there() -> frozenset[str]:
    """Return the names of all tests, and of the classes and files that they are in."""
    found = set()
    for module in modules("tests"):
        for node in module.tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names = [_name(node), *(f"{_name(node)}::{_name(each)}" for each in inner if _name(each))]
            if _name(node):
                found |= {module.path, *(f"{module.path}::{name}" for name in names)}
    return frozenset(found)


def _name(node: ast.stmt) -> str:
    """Return the name of a test or of a class of them; an empty text for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ""
    return node.name if node.name.lower().startswith("test") else ""


def test_each_is_there() -> None:
    """No test is named that is not there, in whatever way it is written."""
    absent = sorted(NAMED - there())
    assert not absent
    assert {each for each in re.findall(r"tests/[\w/.:]+", PAGE) if each not in NAMED} == set()


def test_each_section_has_some() -> None:
    """Each section says what shows what it says."""
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) >= 10
    for section in sections:
        assert NAMED & set(re.findall(r"`(tests/[^`]+)`", section)), section.splitlines()[0]


def test_none_is_forgotten() -> None:
    """Whatever is tested about strangers is on the page: each file of tests/security, or each test in it."""
    ours = {each for each in there() if each.startswith("tests/security/") and each.count("::") == 1}
    files = {each.partition("::")[0] for each in ours}
    assert len(files) >= 4
    missing = {
        each for each in ours if each.partition("::")[0] not in NAMED and not any(n.startswith(each) for n in NAMED)
    }
    assert not missing
