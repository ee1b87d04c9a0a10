"""Other processes that call mpsd, with their own uid, groups and lifetime."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.node import Answer

NOBODY: Final = 65534
"""A uid and a gid without any rights."""

needs_root = pytest.mark.root("call as another user")

_PROGRAM: Final = """
import json, os, socket, sys
path, uid, groups = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
if uid >= 0:
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
print(flush=True)
for line in sys.stdin:
    method, target, body = json.loads(line)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(path)
            raw = b"" if body is None else json.dumps(body).encode()
            head = [f"{method} {target} HTTP/1.1", "Host: mpsd", "Connection: close", f"Content-Length: {len(raw)}"]
            connection.sendall("".join(f"{line}\\r\\n" for line in [*head, ""]).encode() + raw)
            answer = connection.makefile("rb").read().decode()
    except OSError as error:
        answer = f"failed: {error.strerror}"
    print(json.dumps(answer), flush=True)
"""


class Caller:
    """A process that calls mpsd on command, and otherwise waits until it is ended."""

    def __init__(
        self,
        socket: Path | str,
        *,
        uid: int | None = None,
        groups: tuple[int, ...] = (),
        cwd: Path | None = None,
        before: str = "",
    ) -> None:
        """Start it, by default as the user of the tests. A relative socket path is resolved from `cwd`.

        `before` is Python code that the process runs first.
        """
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                before + _PROGRAM,
                str(socket),
                str(-1 if uid is None else uid),
                json.dumps(groups),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._line()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, method: str, path: str, body: object = None) -> Answer:
        """Send one request over a connection of its own. Raises OSError when that fails."""
        assert self._process.stdin is not None
        print(json.dumps([method, path, body]), file=self._process.stdin, flush=True)
        answer: str = json.loads(self._line())
        if answer.startswith("failed: "):
            raise OSError(answer)
        head, _, text = answer.partition("\r\n\r\n")
        status, *headers = head.split("\r\n")
        named: Mapping[str, str] = dict(header.split(": ", 1) for header in headers)
        return Answer(int(status.split()[1]), named, text.encode())

    def admit(self, **asked: Any) -> Answer:
        return self.request("POST", "/v1/leases", asked)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the caller {self.pid} ended with {self._process.wait(timeout=10)}"
        return line

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Have it exit by itself, like a program that has finished its work."""
        self._process.communicate(timeout=10)


@contextlib.contextmanager
def calling(socket: Path | str, **options: Any) -> Iterator[Caller]:
    """Start a caller, yield it, and end it."""
    caller = Caller(socket, **options)
    try:
        yield caller
    finally:
        caller.kill()


def granted(caller: Caller, **asked: Any) -> str:
    """Request a lease, by default a small one on the first GPU, which must be granted; return its id."""
    answer = caller.admit(**{"threads": 10, "memory": "1GiB", "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    lease: str = answer.json["id"]
    return lease


def end(caller: Caller, lease: str) -> None:
    assert caller.request("DELETE", f"/v1/leases/{lease}").status == 204
