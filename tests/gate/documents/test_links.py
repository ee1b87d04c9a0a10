"""Each link of a document leads to an existing file, and to a heading or an anchor in it."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.health import Kind
from tests.gate.source import ROOT

DOCUMENTS: Final = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "tests").glob("*.md")),
)

OPERATOR: Final = ROOT / "docs/guide/operator.md"

_LINK: Final = re.compile(r"\]\(([^)\s:#]*)(?:#([^)\s]+))?\)")
_SOURCE: Final = re.compile(r'\b(?:src|srcset|href)="([^":#]+)"')
"""Pictures and links in a document's HTML."""
_FENCE: Final = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_ANCHOR: Final = re.compile(r'<a id="([^"]+)"></a>')


def slug(heading: str) -> str:
    """Return GitHub's anchor for a heading: lower case, without punctuation, and hyphens for blanks."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(document: Path) -> frozenset[str]:
    """Return the anchors of a document: its own, and those of its headings."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def broken(document: Path, text: str) -> Iterator[str]:
    """Yield each link of a text without a target in this tree."""
    plain = _FENCE.sub("", text)
    for path, anchor in [*_LINK.findall(plain), *((path, "") for path in _SOURCE.findall(plain))]:
        target = (document.parent / path).resolve() if path else document
        if not target.exists():
            yield f"{path}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path}#{anchor}: there is no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """A link within this tree leads to a file, and its anchor to a heading there."""
    assert list(broken(document, document.read_text(encoding="utf-8"))) == []


def test_every_reason_of_status_has_a_section() -> None:
    """Each kind of reason for an unhealthy node, and each warning, has a row that leads to a section."""
    rows = [line for line in OPERATOR.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    linked = {word for row in rows if "](#" in row for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {str(kind) for kind in Kind} <= linked
