"""Python programs of users, as processes, for tests: each is a file, calls a node, and prints lines of JSON."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any, Final, Self

from tests.cli.conftest import ROOT
from tests.harness import look_at, pids, wait_until
from tests.node import Node

_DEADLINE: Final = 50.0
"""Seconds for any line or end: none should come near it."""

_HEAD: Final = """
import json, os, sys, threading, time
import mpsd

def tell(*what):
    print(json.dumps(what), flush=True)

"""


class Script:
    """A program whose main part is `text`, after the definitions in `before`; it ends with its `with` block."""

    def __init__(
        self,
        folder: Path,
        node: Node | None,
        text: str,
        *,
        before: str = "",
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        path = folder / f"script{len(list(folder.glob('script*.py')))}.py"
        main = "\n".join(f"    {line}" for line in dedent(text).strip().splitlines())
        path.write_text(f"{_HEAD}{dedent(before)}\n\nif __name__ == '__main__':\n{main}\n")
        socket = folder / "no-mpsd" if node is None else node.socket
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{socket}", **(environment or {})},
            cwd=folder,
            start_new_session=own_session,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        _, messages = self.process.communicate(timeout=_DEADLINE)
        if error is not None and messages:
            error.add_note(messages.decode())

    def hear(self) -> Any:
        """Return its next line; a list of what it tells."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], _DEADLINE)[0], "the program told nothing"
        line = self.process.stdout.readline()
        assert line, "the program ended"
        return json.loads(line)

    def end(self) -> tuple[int, list[Any], str]:
        """Wait for its end, and return its exit status, what it told, and its messages."""
        output, messages = self.process.communicate(timeout=_DEADLINE)
        return self.process.returncode, [json.loads(line) for line in output.splitlines()], messages.decode()


def told(folder: Path, node: Node | None, text: str, **options: Any) -> list[Any]:
    """Run a program to its end, which must be without an error, and return the lists that it told."""
    with Script(folder, node, text, **options) as script:
        status, lines, messages = script.end()
        assert status == 0, messages
        return lines


def is_gone(pid: int) -> bool:
    process = look_at(pid)
    return process is None or process.zombie


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: all(map(is_gone, pids)), what=f"processes {pids} to end", deadline=30)


def wait_until_free(node: Node) -> None:
    """Wait until the node has no lease."""
    wait_until(lambda: not node.leases(), what="the node to have no lease", deadline=30)


def started_by(marker: str) -> list[int]:
    """Return the pids of the processes that have this variable's value in their environment."""
    found = []
    for pid in pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in variables and not is_gone(pid):
            found.append(pid)
    return found
