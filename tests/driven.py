"""A program that a test drives line by line, through a named pipe for each direction: its launcher has one stdin."""

import json
import os
import select
from pathlib import Path
from typing import Any, Final, Self

DEADLINE: Final = 40.0
"""Seconds for the start of a whole job on a busy machine, and for its end."""


class Driven:
    """The pipes `in` and `out` in a directory, and what is at their other ends."""

    def __init__(self, directory: Path, suffix: str = "") -> None:
        """Make the pipes, which anybody may open; `suffix` ends their names."""
        self._ends = []
        for name in ("in", "out"):
            path = directory / f"{name}{suffix}"
            os.mkfifo(path)
            path.chmod(0o666)
            self._ends.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # the test waits for no process to open it
        self._read = b""

    def answer(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Return its next answer, of which the first tells where it runs."""
        while b"\n" not in self._read:
            assert select.select([self._ends[1]], [], [], deadline)[0], "a program does not answer"
            self._read += os.read(self._ends[1], 65536)
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        os.write(self._ends[0], f"{line}\n".encode())

    def close(self) -> None:
        for each in self._ends:
            os.close(each)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
