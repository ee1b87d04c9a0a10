"""The first process of a cluster's namespaces: it starts the daemons, and inherits and reaps whatever they leave.

Commands come as lines of JSON on stdin: `{"start": [COMMAND, ...], "output": PATH}` is answered by the pid. At the end
of stdin it ends all its descendants, and then itself.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
"""Source: linux/prctl.h."""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended: what it had started is this process's child now
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all() -> None:
    """Kill every descendant, until none is left."""
    while children := _children(os.getpid()):
        while children:
            pid = children.pop()
            children += _children(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        select.select([], [], [], 0.01)


def main() -> None:
    """Run until stdin ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print("ready", flush=True)  # noqa: T201 - the answer
    pending = b""
    while True:
        _reap()
        if not select.select([0], [], [], 0.2)[0]:
            continue
        read = os.read(0, 65536)
        if not read:
            break
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            command = json.loads(line)
            output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            pid = os.posix_spawnp(
                command["start"][0], command["start"], command["environment"], setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2),
                ],
            )  # fmt: skip
            os.close(output)
            print(pid, flush=True)  # noqa: T201
    _end_all()


if __name__ == "__main__":
    main()
