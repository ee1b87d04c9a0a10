"""The stored inputs: a file for each target, one input per line, in Python's notation of bytes."""

import ast
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "corpus"

MOST: Final = 300
"""Maximum number of stored inputs of a target."""
LONGEST: Final = 400
"""Maximum bytes of a stored input."""


def load(target: str) -> list[bytes]:
    path = FOLDER / f"{target}.txt"
    return [ast.literal_eval(line) for line in path.read_text(encoding="ascii").splitlines()] if path.exists() else []


def keep(target: str, inputs: list[bytes]) -> None:
    """Store these inputs, the shortest first, as far as there is room."""
    chosen = sorted({each for each in inputs if len(each) <= LONGEST}, key=lambda each: (len(each), each))[:MOST]
    (FOLDER / f"{target}.txt").write_text("".join(f"{each!r}\n" for each in chosen), encoding="ascii")
