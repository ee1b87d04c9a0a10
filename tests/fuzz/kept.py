"""The inputs that are kept: a file for each target, an input a line, as Python writes bytes."""

import ast
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "corpus"

MOST: Final = 300
"""Inputs that are kept for a target."""
LONGEST: Final = 400
"""Bytes of one."""


def load(target: str) -> list[bytes]:
    """Return the inputs that are kept for a target."""
    path = FOLDER / f"{target}.txt"
    return [ast.literal_eval(line) for line in path.read_text(encoding="ascii").splitlines()] if path.exists() else []


def keep(target: str, inputs: list[bytes]) -> None:
    """Keep these, the shortest first, as far as there is room."""
    chosen = sorted({each for each in inputs if len(each) <= LONGEST}, key=lambda each: (len(each), each))[:MOST]
    (FOLDER / f"{target}.txt").write_text("".join(f"{each!r}\n" for each in chosen), encoding="ascii")
