"""No lease leaks, is doubled, or ends under a container, whatever dies between a claim and its container's end.

A runtime claims a lease, makes a control group, starts a process in it, and has a hook complete the claim; then the
container runs, and ends. At random the runtime dies before its hook, the hook dies before its answer and is repeated,
the container dies at any moment, another container appears with the same claim, and mpsd is killed. In CI there are a
few kills; by hand, as many as you set:

    MPSD_CHAOS_KILLS=500 [MPSD_CHAOS_SEED=1] pytest -n 0 -s tests/chaos/test_claims.py
"""

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos.conftest import Start
from tests.chaos.test_chaos import KILLS
from tests.control_groups import control_group
from tests.harness import wait_until
from tests.node import Answer, Node

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60 + 5 * KILLS)]

CONFIG: Final = "[admission]\nclaim_deadline = 600.0\n"
MOST: Final = 6
"""Containers at a time: more than fit on the GPU together."""
BRIEF: Final = 1.0
"""Seconds after which an untaken claim ends."""


@dataclass
class Container:
    """A container from its claim to its end."""

    group: Path
    stack: ExitStack
    claim: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None

    @property
    def lease(self) -> str:
        found: str = self.claim["id"]
        return found

    def begin(self) -> None:
        """Start its process, in its control group from the first instruction on."""
        joins = 'echo $$ >"$0" && exec sleep inf'
        self.process = subprocess.Popen(["sh", "-c", joins, self.group / "cgroup.procs"])
        pid = str(self.process.pid)
        wait_until(lambda: pid in (self.group / "cgroup.procs").read_text().split(), what=f"{pid} to be in its group")

    def hook(self, ask: Callable[..., Answer]) -> Answer:
        """Complete the claim like a hook, with the container's process and control group."""
        assert self.process is not None
        body = {"pid": self.process.pid, "group": True, "token": self.claim["env"]["MPSD_LEASE_TOKEN"]}
        return ask("POST", f"/v1/leases/{self.lease}/holders", body)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.stack.close()


@dataclass
class Runtime:
    """A runtime that starts containers on a node, and kills."""

    node: Node
    dice: random.Random
    containers: list[Container] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    made: int = 0
    strikes: list[threading.Timer] = field(default_factory=list)

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Send a request; if mpsd is killed before its answer, repeat it to the next mpsd.

        Return which of them answered.
        """
        while True:
            try:
                return self.node.request(method, path, body)
            except (OSError, http.client.HTTPException):
                self.node.process.wait(10)  # type: ignore[union-attr]
                self.node.process = None
                self.node.start()
                self.done["asked again"] += 1

    def strike(self) -> None:
        """Kill mpsd now, or during its next answer."""
        self.done["kills"] += 1
        if self.dice.random() < 0.5:
            self.node.end(signal.SIGKILL)
            self.node.start()
            return
        mpsd = os.pidfd_open(self.node.pid)

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(mpsd, signal.SIGKILL)
            os.close(mpsd)

        self.strikes.append(threading.Timer(self.dice.random() * 0.008, kill))
        self.strikes[-1].start()

    def begin(self) -> None:
        """Claim a lease, and proceed with it as far as the random numbers allow."""
        self.made += 1
        abandoned = self.dice.random() < 0.2
        holder = {"claim": {"deadline": BRIEF} if abandoned else {}}
        body = {"threads": 25, "memory": "4GiB", "holder": holder, "request_id": f"container-{self.made}"}
        answer = self.ask("POST", "/v1/leases", body)
        if answer.status != 201:
            assert answer.status == 409, answer.body
            self.done["refused"] += 1
            return
        if abandoned:  # the runtime has died, and the claim is never taken
            self.done["abandoned"] += 1
            return
        stack = ExitStack()
        group = stack.enter_context(control_group("name=systemd", f"mpsd-chaos-{self.made}"))
        container = Container(group, stack, answer.json)
        self.containers.append(container)
        container.begin()
        if self.dice.random() < 0.3:
            self.strike()
        if self.dice.random() < 0.15:  # the container dies before its hook
            container.process.kill()  # type: ignore[union-attr]
            container.process.wait()  # type: ignore[union-attr]
        answer = container.hook(self.ask)
        if answer.status == 200:
            self.done["started"] += 1
            assert container.hook(self.ask).status == 200, "a hook that is repeated is answered alike"
            self.impostor(container)
        else:
            assert answer.status == 422, answer.body  # there is no such process
            self.ask("DELETE", f"/v1/leases/{container.lease}")  # like a runtime that failed to start it
            self.done["failed"] += 1
            self.containers.remove(container)
            container.end()

    def impostor(self, container: Container) -> None:
        """Check that a second container with the same device is refused."""
        with control_group("name=systemd", f"mpsd-chaos-{self.made}-too") as group, ExitStack() as stack:
            other = Container(group, stack, container.claim)
            other.begin()
            answer = other.hook(self.ask)
            assert (answer.status, answer.json["code"]) == (409, "already_claimed"), answer.body
            other.end()

    def finish(self) -> None:
        if self.containers:
            self.containers.pop(self.dice.randrange(len(self.containers))).end()
            self.done["ended"] += 1

    def check(self) -> None:
        """Check that each running container has its lease, once, and that no other container has one."""
        leases = self.ask("GET", "/v1/leases").json["leases"]
        held = [each["id"] for each in leases]
        assert len(set(held)) == len(held)
        wanted = {each.lease for each in self.containers}
        missing = wanted.difference(held)
        assert not missing, [self.ask("GET", f"/v1/leases/{each}").json["because"] for each in missing]

    def settle(self) -> None:
        """Check that all others end in a while."""
        wanted = {each.lease for each in self.containers}
        wait_until(
            lambda: {each["id"] for each in self.ask("GET", "/v1/leases").json["leases"]} == wanted,
            what=f"{wanted} to be the leases that are left",
            deadline=BRIEF + 15,
        )


def test_killed_at_any_moment(start: Start, dice: random.Random) -> None:
    """Claims end once: with their container, at their deadline, or by the runtime that failed."""
    node = start(simulate=1, config=CONFIG)
    runtime, begun = Runtime(node, dice), time.monotonic()
    try:
        while runtime.done["kills"] < KILLS:
            act = dice.choice([runtime.begin, runtime.begin, runtime.finish, runtime.strike])
            if act == runtime.begin and len(runtime.containers) >= MOST:
                act = runtime.finish
            act()
            runtime.check()
            if dice.random() < 0.1:
                runtime.settle()
    finally:
        left = [each.lease for each in runtime.containers]
        sys.stdout.write(f"{dict(runtime.done)}, {len(left)} left, {time.monotonic() - begun:.0f} s\n")
        for each in runtime.containers:
            each.end()
        runtime.containers.clear()
        for strike in runtime.strikes:
            strike.join()
    runtime.settle()
    (gpu,) = node.get("/v1/gpus").json["gpus"]
    assert (gpu["threads_granted"], gpu["memory_granted"]) == (0, 0)
    # Each lease ended once, whatever was killed.
    events = map(json.loads, node.get("/v1/events?after=0").body.splitlines())
    ends = Counter(each["lease"] for each in events if each["event"] == "lease_ended")
    assert ends
    assert set(ends.values()) == {1}
