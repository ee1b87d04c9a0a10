"""Every block of docs/reference/api.md runs unchanged, and leaves no lease behind."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.clients.generated import run
from tests.node import Node
from tests.tools import needed

pytestmark = pytest.mark.thorough

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "api.md"

BLOCKS: Final = re.findall(
    r"^```(?!mermaid)(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)

_RUNS: Final = {
    "sh": ("sh", "-eu", "block"),
    "python": ("python", "block"),
    "js": ("node", "block.mjs"),
    "go": ("go", "run", "block.go"),
}
"""The command that runs a block, by its language."""

NAME: Final = r"from-\w+"
"""The name of each example's lease."""

_FEW: Final = "openapi-generator-cli|^package main|node:http"
"""Text in blocks whose programs come only with the extra `clients`."""


@pytest.mark.parametrize(
    ("language", "block"),
    [
        pytest.param(
            language,
            block,
            id=f"{language}-{number}",
            marks=[pytest.mark.clients, pytest.mark.timeout(300)] if re.search(_FEW, block, re.MULTILINE) else [],
        )
        for number, (language, block) in enumerate(BLOCKS)
    ],
)
def test_block(node: Node, short_tmp: Path, language: str, block: str) -> None:
    """Each block succeeds, and every lease that it requests is granted and released."""
    if "curl" in block:
        needed("curl", "curl")
    command = _RUNS[language]
    (short_tmp / command[-1]).write_text(block, encoding="utf-8")
    said = run(*command, cwd=short_tmp, variables={"MPSD_SOCKET": str(node.socket)})
    taken = node.get("/v1/leases?ended=true").json["leases"]
    assert [(each["name"], each["state"]) for each in taken] == [(name, "ended") for name in re.findall(NAME, block)]
    assert all(each["because"].endswith("released it") for each in taken)
    if "heartbeat" in block:
        assert said.splitlines()[-1].endswith(" heartbeat")
    if '**lease["env"]' in block:
        assert "CUDA_MPS_PIPE_DIRECTORY=" in said


def test_every_language_is_there() -> None:
    """The page has a block for each language; otherwise the test above would prove nothing."""
    assert {language for language, _ in BLOCKS} == _RUNS.keys()
