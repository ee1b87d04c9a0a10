"""Who is on a node under chaos: processes that take leases and become clients, and requests that are on their way."""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from mpsd.simulator import client
from tests.daemon.helpers import is_running
from tests.driven_program import DrivenProgram
from tests.harness import look_at, wait_until
from tests.node import Answer, Node
from tests.simulated_clients import WAITS, variables

AS_USER: Final = """
import os, sys
import mpsd.simulator.client as client
uid, waits = int(sys.argv[1]), sys.argv[2] == "waits"
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
while waits and (said := os.read(0, 1)) != b"\\n":
    if not said:
        sys.exit()
sys.exit(client.main())
"""
"""A client that becomes another user's before all else, who need not be able to read what it was started from."""


class Member(DrivenProgram):
    """A process that may hold a lease, and becomes a client when it is told to; each end of it has its reason."""

    def __init__(self, node: Node, daemon: str, *, goes: bool, uid: int | None = None) -> None:
        """Start it, as this user; one that `goes` is a client at once, and others wait to be told."""
        before = () if goes else WAITS
        if uid is None:
            command = [*before, *client.program()]
        else:
            command = [sys.executable, "-c", AS_USER, str(uid), "goes" if goes else "waits"]
        super().__init__(command, variables(node, daemon))
        if uid is not None:
            wait_until(lambda: is_user(self.pid, uid), what=f"process {self.pid} to be of uid {uid}")
        self.daemon = daemon
        self.lease = ""
        self.went = goes
        self.may_end = ""
        """Why nobody is to wonder when it ends; empty: somebody is."""

    def go(self) -> None:
        """Have it go for the GPU, and do not wait until it has it."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"\n")
        self.went = True

    def say(self, line: str) -> None:
        """Tell it something, wherever it is, and wait for nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{line}\n".encode())

    def leave(self) -> None:
        """Have it end by its own will, which takes a signal where CUDA has it wait."""
        self.may_end = "its own will"
        if self.went and self.has_answered:
            self.say("exit")
        else:
            self.process.send_signal(signal.SIGTERM)

    def cut_down(self) -> None:
        """End it by SIGKILL."""
        self.may_end = "it was killed"
        self.process.kill()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    @property
    def could_not_attach(self) -> bool:
        """Whether it ended because CUDA let it not in, as it says: its server was gone, or its control daemon."""
        return not self.has_answered or not self.hello["ok"]

    def close(self) -> None:
        """End it whatever happens."""
        with self:
            pass


def is_user(pid: int, uid: int) -> bool:
    """Tell whether a process is this user's, wholly."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in text


class Request:
    """A request on its way, whose caller can hang up, and outlives mpsd."""

    def __init__(self, node: Node, method: str, path: str, body: object = None) -> None:
        """Send it. Raises OSError when nobody listens."""
        raw = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nHost: mpsd\r\nContent-Length: {len(raw)}\r\n\r\n"
        self.what = f"{method} {path} {body}"
        self._said = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self.over = False
        """Whether nothing more is to come."""
        try:
            self._socket.settimeout(10)
            self._socket.connect(os.fspath(node.socket))
            self._socket.sendall(head.encode() + raw)
        except OSError:
            self._socket.close()
            raise

    def look(self, seconds: float = 0) -> None:
        """Take in what was answered, for so long at most."""
        while not self.over and select.select([self._socket], [], [], seconds)[0]:
            try:
                more = self._socket.recv(1 << 16)
            except ConnectionError:
                more = b""
            self._said += more
            self.over = not more
        if self.over:
            self._socket.close()

    @property
    def answer(self) -> Answer | None:
        """The whole answer, if there was one."""
        head, end, content = self._said.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        if not self.over or not end or len(content) < int(headers.get("Content-Length", 0)):
            return None
        return Answer(int(lines[0].split()[1]), headers, content)

    def hang_up(self) -> None:
        """Go away."""
        self._socket.close()
        self.over = True


def front_ends(node: Node) -> list[int]:
    """Return mpsd's own front-ends."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text(encoding="ascii").split()
    found = [each for each in map(look_at, map(int, children)) if each is not None]
    return [each.pid for each in found if not each.command.endswith(" -f") and " -f " not in each.command]


def signalled(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal to a process that may be gone; tell whether it was there."""
    if pid is None or not is_running(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def figures(pid: int) -> tuple[Counter[str], int]:
    """Return what descriptors a process has, each by the kind of it, and how many MiB of memory."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            kinds[os.readlink(link).partition("[")[0]] += 1  # noqa: PTH115 - most of these are no paths
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return kinds, pages * os.sysconf("SC_PAGESIZE") >> 20


def watched(pid: int) -> list[str]:
    """Return the processes that a process has a pidfd of, and what each of them is; -1 is one that is gone."""
    found = []
    for each in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [line.split()[1] for line in each.read_text(encoding="ascii").splitlines() if "Pid:" in line[:4]]
    return [f"{each}: {look_at(int(each))}" for each in found]
