"""The fighters: a program of many light processes, of several users, that request leases from one node at full speed.

tests.daemon.leases.test_fight starts it with one argument, a `Plan` as JSON. It knows nothing of mpsd but its socket.
Each fighter is a process with its own uid. It requests a lease, waits, holds the grant for a moment and releases it; or
it leaves that to a child, which dies while it waits or while it holds the lease. A fighter stops when its standard
input ends. Each grant is one line in the file of receipts: the moment when the grant was received, and the moment
before the release. The lease was held at least between these two moments.
"""

import json
import os
import random
import select
import socket
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The resources that are fought for, the fighters, and where they write."""

    socket: str
    receipts: str
    """The file for the receipts."""
    fighters: dict[int, int]
    """The number of processes, by uid."""
    memory_heavy: bool
    """Whether memory is the scarce resource; otherwise threads are."""
    seed: int


@dataclass(frozen=True)
class Receipt:
    """A granted lease and the shortest time for which it was held, on the monotonic clock."""

    lease: str
    uid: int
    number: int
    """The number of the fighter among those of its user."""
    gpus: list[str]
    threads: float
    memory: int
    start: float
    end: float


_GIB = 1024**3


def main() -> None:
    """Start the fighters, and wait for them."""
    fields = json.loads(sys.argv[1])
    plan = Plan(**{**fields, "fighters": {int(uid): count for uid, count in fields["fighters"].items()}})
    receipts = os.open(plan.receipts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    children = []
    for uid, count in plan.fighters.items():
        for number in range(count):
            child = os.fork()
            if child == 0:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                _Fighter(plan, receipts, uid, number).fight()
                os._exit(0)
            children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(max(statuses, key=abs) != 0)


class _Fighter:
    """One process."""

    def __init__(self, plan: Plan, receipts: int, uid: int, number: int) -> None:
        self._plan = plan
        self._receipts = receipts
        self._uid = uid
        self._number = number
        self._chance = random.Random(f"{plan.seed}-{uid}-{number}")

    def fight(self) -> None:
        """Request leases until standard input ends."""
        while not self._over(0):
            if self._chance.random() < 0.1:
                child = os.fork()
                if child == 0:
                    self._round(mortal=True)
                    os._exit(0)
                os.waitpid(child, 0)
                self._chance.random()  # otherwise the next round would repeat the child's random numbers
            else:
                self._round(mortal=False)

    def _over(self, seconds: float) -> bool:
        """Wait for this many seconds; return whether the fighter must stop."""
        return bool(select.select([0], [], [], seconds)[0])

    def _request(self) -> dict[str, object]:
        threads = self._chance.choice([5, 10, 15, 20, 25, 30])
        memory = int((threads if self._plan.memory_heavy else threads / 5) * _GIB)
        asked: dict[str, object] = {"threads": threads, "memory": memory, "wait": None}
        if self._chance.random() < 0.2:
            asked["gpu"] = self._chance.choice("01")
        elif self._chance.random() < 0.1:
            asked["gpus"], asked["threads"] = 2, threads / 2
        asked["processes"] = self._chance.choice([1, 1, 1, 2, 3])
        return asked

    def _round(self, *, mortal: bool) -> None:
        """Request one lease and hold it for a moment; a mortal child dies while it waits for the lease or holds it."""
        with self._send("POST", "/v1/leases", self._request()) as connection:
            patience = 0.05 if mortal and self._chance.random() < 0.5 else 3600.0
            if connection.fileno() not in select.select([connection.fileno(), 0], [], [], patience)[0]:
                return  # the test stops, or the wait timed out
            status, answer = _receive(connection)
        if status != 201:
            raise SystemExit(f"uid {self._uid} was refused: {answer!r}")
        lease, start = json.loads(answer), time.monotonic()
        self._over(self._chance.uniform(0.03, 0.15))
        self._write(Receipt(
            lease["id"], self._uid, self._number, lease["gpus"], lease["active_thread_percentage"],
            lease["pinned_device_mem_limit"], start, time.monotonic(),
        ))  # fmt: skip
        if not mortal:
            with self._send("DELETE", f"/v1/leases/{lease['id']}") as connection:
                status, answer = _receive(connection)
            if status != 204:
                raise SystemExit(f"uid {self._uid} could not release {lease['id']}: {answer!r}")

    def _send(self, method: str, target: str, body: object = None) -> socket.socket:
        raw = b"" if body is None else json.dumps(body).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._plan.socket)
        head = f"{method} {target} HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def _write(self, receipt: Receipt) -> None:
        # One write, since the file is open for appending.
        os.write(self._receipts, json.dumps(vars(receipt)).encode() + b"\n")


def _receive(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of an answer after which the server closes the connection."""
    whole = b""
    while piece := connection.recv(65536):
        whole += piece
    head, _, body = whole.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


if __name__ == "__main__":
    main()
