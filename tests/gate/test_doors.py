"""Each thing outside mpsd is reached through one door: the banned names of pyproject.toml, checked by file."""

import json
import re
import subprocess
import sys
import tomllib
from typing import Final

from tests.gate.source import ROOT

PLACE: Final = re.compile(r"mpsd/[\w/]+(?:\.py)?")


def bans() -> dict[str, str]:
    """Return the banned names, each with the sentence that says where it is allowed."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tidy = configuration["tool"]["ruff"]["lint"]["flake8-tidy-imports"]
    return {name: ban["msg"] for name, ban in tidy["banned-api"].items()}


def allowed(path: str, sentence: str) -> bool:
    """Return whether a ban's sentence lets this file use the name; the text after the colon is the reason."""
    places = PLACE.findall(sentence.partition(":")[0])
    return any(path.startswith(place) if place.endswith("/") else path == place for place in places)


def test_every_ban_says_where() -> None:
    """Each banned name is allowed `nowhere`, or `only in` files and folders."""
    vague = [name for name, sentence in bans().items() if not re.match(r"nowhere\b|only in mpsd/", sentence)]
    assert not vague


def test_doors_are_used_by_name() -> None:
    """No file of mpsd uses a banned name that is not allowed for it, even if it is exempt for other names."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", "lint.per-file-ignores = {}", "--select", "TID251",
         "--ignore-noqa", "--no-cache", "--output-format", "json", "mpsd"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stderr
    sentences = bans()
    wrong: list[str] = []
    for found in json.loads(done.stdout):
        path = found["filename"].removeprefix(f"{ROOT}/")
        match = re.match(r"`([\w.]+)` is banned", found["message"])
        assert match is not None, found["message"]
        name = match.group(1)
        if not allowed(path, sentences[name]):
            wrong.append(f"{path}:{found['location']['row']}: {name} {sentences[name]}")
    assert not wrong, "\n".join(wrong)


def test_no_shell() -> None:
    """No process is started through a shell, by any function, and no comment on a line can allow that."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", "lint.per-file-ignores = {}", "--ignore-noqa", "--no-cache",
         "--select", "S602,S604,S605,S609", "--output-format", "concise", "mpsd"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
