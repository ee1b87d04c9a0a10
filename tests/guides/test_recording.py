"""The terminal of README.md can be recorded again, and README.md shows such a recording."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.terminal_theme import MONOKAI

from tests.recording import PICTURES, draw, record

_STORY = (r"mpsctl run .* train", r"mpsctl run .* serve", "kill -9", "unreachable", "mpsd run", "set it back", "step")
"""The contents of the picture, in this order."""


def _text(svg: str) -> str:
    root = ET.fromstring(svg)  # noqa: S314 - our own file
    return " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.thorough
def test_the_scene_runs(short_tmp: Path) -> None:
    """Both clients compute through the death of mpsd and through a foreign command, under the same leases."""
    lines = record(short_tmp)
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    assert re.search(".*".join(_STORY), _text(draw(lines, MONOKAI)))


@pytest.mark.parametrize("name", ["recording-light.svg", "recording-dark.svg"])
def test_the_picture_is_one(name: str) -> None:
    """The pictures of README.md are such recordings, load nothing, and are small."""
    svg = (PICTURES / name).read_text(encoding="utf-8")
    assert re.search(".*".join(_STORY), _text(svg))
    assert len(svg) < 60_000
    assert re.findall(r"https?://", svg.replace("http://www.w3.org/2000/svg", "")) == []
