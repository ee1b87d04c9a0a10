"""What tells users to install mpsd names its checkout or a file, and no name of an index.

No index has mpsd: a program of that name would be that of the first stranger who registers it.
"""

import re
from collections.abc import Iterator
from typing import Final

import pytest

from tests.gate.source import ROOT

TEXTS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FOLDERS: Final = ("mpsd", "docs", "systemd", "container", "debian", "completions", "monitoring", "bench", ".ci")

_INSTALLER: Final = r"\b(?:pip3?|pipx|uvx?|apt|apt-get|aptitude|dnf|yum|zypper|conda|mamba|brew|npm|npx)\b"
_BY_NAME: Final = re.compile(
    rf"{_INSTALLER}[^\n;|&`]*? (?:install|add|run)\b[^\n;|&`]*?"
    r"[\s'\"](mpsd(?:-kubernetes)?(?:\[\w[\w,-]*\])?)(?![\w./:\[-])"
)
_EXTRA: Final = re.compile(r"(?<![\w./-])(mpsd\[[a-z][a-z,]*\])")
"""The form of the package with an extra, whoever is to install it."""


def named(text: str) -> Iterator[str]:
    """Yield the names by which a text has mpsd installed."""
    for form in (_BY_NAME, _EXTRA):
        yield from (found[1] for found in form.finditer(text))


def texts() -> Iterator[tuple[str, str]]:
    files = [ROOT / each for each in TEXTS]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in files:
        if "__pycache__" not in path.parts and path.suffix not in {".png", ".svg"}:
            yield f"{path.relative_to(ROOT)}", path.read_text(encoding="utf-8")


def test_no_text_installs_mpsd_by_name() -> None:
    """No command, hint, comment or document has mpsd installed by its name."""
    found = {path: [*named(text)] for path, text in texts()}
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install 'mpsd[top]'", ["mpsd[top]", "mpsd[top]"]),
        ("sudo apt-get install -y mpsd", ["mpsd"]),
        ("uv tool install mpsd-kubernetes\n", ["mpsd-kubernetes"]),
        ("with its libraries (`mpsd[kubernetes]`)", ["mpsd[kubernetes]"]),
        ("pip install '.[kubernetes]'; apt install ./mpsd_0.1.0-1_amd64.deb; pipx install . && mpsd demo", []),
    ],
)
def test_names_are_found(text: str, names: list[str]) -> None:
    """The search knows the usual installers, and the package with an extra."""
    assert [*named(text)] == names
