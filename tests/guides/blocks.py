"""The command blocks of the documents: each fenced block of docs, with the conditions in its marker.

A marker is a comment on the line before the fence:

- `<!-- status: 75 -->` is the exit status of the block, 0 where it is absent; with
  `<!-- status: 0 or 1 -->` both are valid, for a command whose answer depends on the machine
- `<!-- granted: 0.9 -->` is the fraction of each GPU that is granted to another process meanwhile
- `<!-- file: NAME -->` makes the block a file in the directory of all later blocks of its page
- `<!-- needs: NAME -->` excuses the block from being run: NAME is one of NEEDS, and the block calls one of its programs
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/reference/api.md"})
"""The documents whose blocks are run; tests/clients runs the examples of the API."""

DOCUMENTS: Final = sorted({*PAGES, *ROOT.glob("*.md"), ROOT / "tests/README.md"} - {ROOT / "CHANGELOG.md"})
"""Every document with commands for a reader."""

NEEDS: Final = {
    "a GPU": r"\bnvidia-smi\b|\bnvidia-cuda-mps-control\b|\btests[./]gpu\b",
    "a launcher": r"\bmpirun\b|\bsrun\b|\btorchrun\b",
    "Slurm": r"\bsbatch\b|^mpsctl slurm\b",
    "a control group": r"--cgroup\b|--unit\b|--group\b",
    "an index of packages": r"^(?:pip|uv pip) ",
    "root": r"^(?:sudo|apt) ",
    "another user": r"--user NAME\b",
    "a cluster": r"\bkubectl\b|^helm ",
    "containers": r"^container/build |\bpodman\b|\bdocker\b|^mpsctl container\b",
    "systemd": r"\bsystemctl\b|\bjournalctl\b|^mpsctl service\b|--unit\b",
}
"""Conditions that a test's machine lacks, or that a test must not change on it, with a command that needs each.

tests/container, tests/systemd, tests/launchers and tests/slurm run such commands: with containers, on a machine of
their own, under launchers, and on a cluster of one node.
"""

_FENCE: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`(mpsctl [^`]+)`")
_MARKER: Final = re.compile(r"<!-- (needs|status|file|granted): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    needs: str | None = None
    status: frozenset[int] = frozenset({0})
    file: str | None = None
    granted: float = 0.0

    @property
    def name(self) -> str:
        """The name of the test: page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_excused(self) -> bool:
        """Whether the block calls the command that its marker says it needs."""
        return self.needs in NEEDS and re.search(NEEDS[self.needs], self.text, re.MULTILINE) is not None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        marks = dict(_MARKER.findall(before))
        line = text.count("\n", 0, found.start()) + 1
        status = frozenset(map(int, marks.get("status", "0").split(" or ")))
        granted = float(marks.get("granted", "0"))
        yield Block(page, line, found[2], dedent(found[3]), marks.get("needs"), status, marks.get("file"), granted)


def spans(page: Path) -> list[str]:
    """Return the calls of mpsctl in the sentences and tables of a page."""
    return _SPAN.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def every(*languages: str) -> list[Block]:
    """Return the blocks of all documents that are in one of these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


_ENDS: Final = frozenset("();<>|&")
"""The characters that end the words of a command."""


def commands(block: Block) -> str:
    """Return the commands that a reader types from a block; in a session they follow the prompts."""
    text = block.text.replace("\\\n", " ")
    if block.language != "console":
        return text
    return "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))


def calls(text: str, program: str = "mpsctl") -> Iterator[list[str]]:
    """Yield the arguments of each call of a program in a shell script, with those of the command that it starts."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            lexer = shlex.shlex(pending, posix=True, punctuation_chars="".join(_ENDS))
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # the next line continues a quotation
            pending += "\n"
            continue
        pending = ""
        for place, word in enumerate(words):
            if word.rpartition("/")[2] == program and _is_called(words[:place], program):
                end = next((at for at in range(place, len(words)) if set(words[at]) <= _ENDS), len(words))
                yield words[place + 1 : end]


def _is_called(before: list[str], program: str) -> bool:
    """Return whether a word is called, by the words before it: another program calls mpsctl in an argument."""
    if not before or program == "mpsctl":
        return not before or not before[-1].startswith("-")
    return set(before[-1]) <= _ENDS or before[-1] == "sudo"
