"""An honest user as a process with its own uid: it takes, renews and releases leases, and reports how long each took.

tests.chaos.users starts it with one argument, a `Plan` as JSON. It knows nothing of mpsd but its socket. It reports its
actions and answers on stdout, as JSON lines: a lease that it was granted; a lease that it is about to release, before
the request; a lease that has ended by mpsd's word; and each request, with its times on the monotonic clock. A request
without an answer, because mpsd died, is repeated until there is one: a lease by its `request_id`. On `pause` or `leave`
(without leases) it stops and reports that it is `idle`; any other line makes it continue.
"""

import json
import os
import random
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from tests.chaos.messages import parsed, request

MOST: Final = 3
"""The most leases that it has at a time."""

PATIENCE: Final = 60.0
"""Seconds without an answer after which it gives up."""


@dataclass(frozen=True)
class Plan:
    """The user's uid, and the leases that it requests."""

    socket: str
    uid: int
    seed: int
    gpu: str


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    os.setgroups([])
    os.setresgid(plan.uid, plan.uid, plan.uid)
    os.setresuid(plan.uid, plan.uid, plan.uid)
    _HonestUser(plan).live()


class _HonestUser:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._dice = random.Random(plan.seed)
        self._orders: list[str] = []
        """Commands that it has received as words, and not carried out yet."""
        self._leases: list[str] = []
        self._number = 0

    def live(self) -> None:
        while True:
            order = self._order(self._dice.uniform(0.005, 0.08))
            while order in {"pause", "leave"}:
                while self._leases and order == "leave":
                    self._release()
                self._say(kind="idle")
                order = self._order(None)
            self._use()

    def _order(self, seconds: float | None) -> str:
        """Return a command that arrives within this time, if any; the process exits when stdin ends."""
        if not self._orders and select.select([0], [], [], seconds)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                raise SystemExit
            self._orders += more.decode().split()  # a line is written whole
        return self._orders.pop(0) if self._orders else ""

    def _use(self) -> None:
        if not self._leases:
            self._take()
            return
        acts = [self._renew, self._look, self._look_around, self._release]
        if len(self._leases) < MOST:
            acts.append(self._take)
        self._dice.choice(acts)()

    def _take(self) -> None:
        self._number += 1
        asked = {"threads": 1, "memory": "1GiB", "gpu": self._plan.gpu, "ttl": 3600}
        name = f"{self._plan.uid}-{os.getpid()}-{self._number}"
        status, lease = self._ask("take", "POST", "/v1/leases", {**asked, "request_id": name})
        if status == 201:
            self._leases.append(lease["id"])
            self._say(kind="granted", lease=lease)

    def _release(self) -> None:
        lease = self._leases.pop(self._dice.randrange(len(self._leases)))
        self._say(kind="releasing", lease=lease)
        status, _ = self._ask("release", "DELETE", f"/v1/leases/{lease}")
        self._say(kind="released", lease=lease, status=status)

    def _renew(self) -> None:
        self._ask("renew", "POST", f"/v1/leases/{self._dice.choice(self._leases)}/renew", {"ttl": 3600})

    def _look(self) -> None:
        self._ask("look", "GET", f"/v1/leases/{self._dice.choice(self._leases)}")

    def _look_around(self) -> None:
        self._ask("status", "GET", "/v1/status")

    def _ask(self, kind: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Repeat a request until it is answered, and report how long the answer took."""
        end = time.monotonic() + PATIENCE
        while True:
            begun = time.monotonic()
            try:
                status, answer = self._exchange(method, path, body)
            except (OSError, ValueError) as error:  # mpsd was killed, or is not back yet
                if isinstance(error, TimeoutError) or time.monotonic() > end:
                    raise SystemExit(f"uid {self._plan.uid} is not answered: {error}") from error
                select.select([], [], [], 0.02)  # the pause between two attempts to connect
                continue
            code = answer.get("code", "")
            state = answer.get("state", "")
            self._say(kind="request", what=kind, begun=begun, ended=time.monotonic(), status=status, code=code,
                      state=state, path=path)  # fmt: skip
            return status, answer

    def _exchange(self, method: str, path: str, body: object) -> tuple[int, Any]:
        """Return the answer to one request. Raises OSError or ValueError when the answer is missing or incomplete."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(self._plan.socket)
            connection.sendall(request(method, path, body))
            return parsed(b"".join(iter(lambda: connection.recv(1 << 16), b"")))

    @staticmethod
    def _say(**what: object) -> None:
        sys.stdout.write(f"{json.dumps(what)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
