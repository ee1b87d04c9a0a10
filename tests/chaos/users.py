"""Users of a node as processes with their own uids: honest and hostile ones."""

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.chaos.honest_user import Plan
from tests.control_groups import control_group, mounted
from tests.harness import wait_until

ROOT: Final = Path(__file__).parents[2]

CORES: Final = sorted(os.sched_getaffinity(0))
"""The cores of the tests: honest users have the first, hostile ones together the last."""

ANSWER: Final = 60.0
"""Seconds for any command to a user; none should come near it."""


@contextlib.contextmanager
def one_core() -> Iterator[Callable[[int], object]]:
    """Yield a function that restricts a process, and what it starts later, to the last core.

    That is a control group, or where none can be made the affinity of the process.
    """
    top = mounted("cpuset")
    if top is None or not os.access(top, os.W_OK):
        yield lambda pid: os.sched_setaffinity(pid, {CORES[-1]})
        return
    with control_group("cpuset", f"hostile-{secrets.token_hex(4)}") as group:
        (group / "cpuset.cpus").write_text(f"{CORES[-1]}")
        (group / "cpuset.mems").write_text((top / "cpuset.mems").read_text())
        yield lambda pid: (group / "cgroup.procs").write_text(f"{pid}")


def _start(module: str, *arguments: str, session: bool = False) -> "subprocess.Popen[bytes]":
    """Start the program of a user, by its module in this folder."""
    command = [sys.executable, "-m", f"tests.chaos.{module}", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, bufsize=0, start_new_session=session)


class HonestUser:
    """A user that takes, renews and releases leases all the time (tests.chaos.honest_user)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.idle = False
        self._process = _start("honest_user", json.dumps(asdict(plan)))
        os.sched_setaffinity(self.pid, {CORES[0]})
        assert self._process.stdout is not None
        # A larger pipe does not block it while the test is busy.
        fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._text = b""
        self._ahead: list[dict[str, Any]] = []
        """Reports that were read, and not processed yet."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            assert more, f"uid {self.plan.uid} ended with {self._process.wait(10)}: an honest user"
            *lines, self._text = (self._text + more).split(b"\n")
            self._ahead += map(json.loads, lines)

    def reports(self) -> Iterator[dict[str, Any]]:
        self._read()
        reports, self._ahead = self._ahead, []
        for each in reports:
            self.idle = self.idle or each["kind"] == "idle"
            yield each

    def is_giving_back(self) -> set[str]:
        """Return the leases that it has begun to release, as far as that is not processed yet."""
        self._read()
        return {each["lease"] for each in self._ahead if each["kind"] == "releasing"}

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def go_on(self) -> None:
        if self.idle:
            self.idle = False
            self.tell("continue")

    def close(self) -> None:
        with self._process:
            self._process.kill()


class HostileUser:
    """A user without rights that does anything that the kernel does not forbid (tests.chaos.hostile_user)."""

    def __init__(self, uid: int, path: Path) -> None:
        self.uid = uid
        self._process = _start("hostile_user", str(uid), str(path), session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def act(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([what, arguments])}\n".encode())
        assert select.select([self._process.stdout], [], [], ANSWER)[0], f"uid {self.uid} hangs in {what}"
        line = self._process.stdout.readline()
        assert line, f"uid {self.uid} ended with {self._process.wait(10)} in {what}"
        return json.loads(line)

    def close(self) -> None:
        """End it, with all processes that it started, under any uid."""
        with self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def stop(users: list[HonestUser], how: str, take_in: Any) -> None:
    for each in users:
        each.idle = False
        each.tell(how)

    def stopped() -> bool:
        take_in()
        return all(each.idle for each in users)

    wait_until(stopped, what="the honest users to stop", deadline=ANSWER)
