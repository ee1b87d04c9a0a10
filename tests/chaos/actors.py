"""The actors on a node under chaos: processes that take leases and become clients, and pending requests."""

import contextlib
import os
import select
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from mpsd.simulator import client
from tests.chaos.messages import request
from tests.daemon.helpers import is_running
from tests.driven_program import DrivenProgram
from tests.harness import Running, look_at, wait_until
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
"""A client that first becomes another user, which may be unable to read the program."""


class Member(DrivenProgram):
    """A process that may hold a lease, and becomes a client on command; each end of it needs a reason."""

    def __init__(self, node: Node, daemon: str, *, goes: bool, uid: int | None = None) -> None:
        """Start it as this user. With `goes` it is a client at once; otherwise it waits for a command."""
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
        """Why its end would be no error; empty if it would."""

    def go(self) -> None:
        """Have it connect to the GPU, without waiting until it has."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"\n")
        self.went = True

    def say(self, line: str) -> None:
        """Send it a line, whatever its state, without waiting."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{line}\n".encode())

    def leave(self) -> None:
        """Have it exit by itself, which takes a signal while CUDA blocks it."""
        self.may_end = "its own will"
        if self.went and self.has_answered:
            self.say("exit")
        else:
            self.process.send_signal(signal.SIGTERM)

    def cut_down(self) -> None:
        self.may_end = "it was killed"
        self.process.kill()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def could_not_attach(self) -> bool:
        """Whether it ended because CUDA refused it, by its own report: its server or its control daemon was gone."""
        return not self.has_answered or not self.hello["ok"]

    def close(self) -> None:
        with self:
            pass


def is_user(pid: int, uid: int) -> bool:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in text


class Request:
    """A pending request, whose caller can disconnect, and outlives mpsd."""

    def __init__(self, node: Node, method: str, path: str, body: object = None) -> None:
        """Send it. Raises OSError when no process listens."""
        self.what = f"{method} {path} {body}"
        self._said = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self.over = False
        """Whether no more is expected."""
        try:
            self._socket.settimeout(10)
            self._socket.connect(os.fspath(node.socket))
            self._socket.sendall(request(method, path, body))
        except OSError:
            self._socket.close()
            raise

    def look(self, seconds: float = 0) -> None:
        """Read the answer so far, for at most so long."""
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
        head, end, content = self._said.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        if not self.over or not end or len(content) < int(headers.get("Content-Length", 0)):
            return None
        return Answer(int(lines[0].split()[1]), headers, content)

    def hang_up(self) -> None:
        self._socket.close()
        self.over = True


def front_ends(node: Node) -> list[int]:
    """Return mpsd's own front-ends.

    A child that has not become its program yet is left out: mpsd waits for that moment, and stops with the child.
    """
    mpsd = look_at(node.pid)
    found = [each for each in _children(node.pid) if mpsd is not None and each.command != mpsd.command]
    found = [each for each in found if "reader_program" not in each.command]
    return [each.pid for each in found if not each.command.endswith(" -f") and " -f " not in each.command]


def _children(pid: int) -> list[Running]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [each for each in map(look_at, map(int, children)) if each is not None]


def signalled(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal to a process that may be gone; return whether it existed."""
    if pid is None or not is_running(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def figures(pid: int) -> tuple[Counter[str], int]:
    """Return a process's descriptors by kind, and its memory in MiB."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed meanwhile
            kinds[os.readlink(link).partition("[")[0]] += 1  # noqa: PTH115 - most of these are no paths
    if any("reader_program" in each.command for each in _children(pid)):
        kinds -= Counter({"anon_inode:": 1, "socket:": 1})  # it ends some seconds after its last use
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return kinds, pages * os.sysconf("SC_PAGESIZE") >> 20


def watched(pid: int) -> list[str]:
    """Return the processes of which a process has a pidfd, with a description; -1 means ended."""
    found = []
    for each in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [line.split()[1] for line in each.read_text(encoding="ascii").splitlines() if "Pid:" in line[:4]]
    return [f"{each}: {look_at(int(each))}" for each in found]
