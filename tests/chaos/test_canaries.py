"""A server that serves its clients is never called wedged, however busy it is and whatever becomes of its clients.

Clients compute without a pause, arrive late, reset, stop, and end in every possible way, also in mid-kernel beside
others; strangers end their contexts; the control daemon, servers and clients are stopped for a while; and canaries run
all the time. In CI
this takes some seconds; by hand, any time that you set:

    MPSD_CHAOS_SECONDS=7200 [MPSD_CHAOS_SEED=1] pytest -n 0 -s tests/chaos/test_canaries.py
"""

import os
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.chaos.conftest import Start
from tests.chaos.test_chaos import LONG, for_seconds
from tests.daemon.helpers import stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.chaos, LONG]

CONFIG: Final = "[daemon]\ncanary_deadline = 5.0\n"
CLIENTS: Final = 12
WAYS: Final = ("exit", "idle", "obey", "terminated", "mid-kernel")


@dataclass
class Busy:
    """A node whose only GPU is busy."""

    node: Node
    dice: random.Random
    clients: list[SimulatedClient] = field(default_factory=list)
    servers: dict[int, int] = field(default_factory=dict)
    """The server of each client."""
    done: Counter[str] = field(default_factory=Counter)
    verdicts: list[Any] = field(default_factory=list)
    """The answers of `mpsctl verify --canary`."""

    def come(self) -> None:
        """Start another client, early or late, that computes as long as it lives."""
        late = self.dice.random() < 0.3
        with ExitStack() as unless_it_stays:
            client = unless_it_stays.enter_context(SimulatedClient(variables(self.node), late=late))
            # The server may be handling a fault.
            if not client.hello["ok"] or not (said := client.init())["ok"]:
                self.done["turned away"] += 1
                return
            if client.do("obey TERM")["ok"] and client.do(f"loop {self.dice.uniform(0.001, 0.05)}")["ok"]:
                self.servers[client.pid] = said["server"]
                self.clients.append(client)
                self.done["came"] += 1
                unless_it_stays.pop_all()

    def go(self) -> None:
        """End a client in any way but one: in mid-kernel as the only client."""
        if not self.clients:
            return
        client = self.clients.pop(self.dice.randrange(len(self.clients)))
        how = self.dice.choice(WAYS if self.clients else WAYS[:-1])
        self.done[how] += 1
        with client:  # this closes its pipes: in two hours there are many clients
            match how:
                case "exit":
                    client.end()
                case "idle":
                    client.do("sync")  # this ends its loop
                    client.kill()
                case "obey":
                    client.kill(signal.SIGTERM)
                case "terminated":
                    self.terminate(client)
                    client.kill()
                case _:
                    client.kill()
                    self.leave()  # a client that met its fault has to end
        del self.servers[client.pid]

    def terminate(self, client: SimulatedClient) -> None:
        """Have a stranger end the contexts of a client, which takes as long as its kernel."""
        assert self.node.ask("gpu0", f"terminate_client {self.servers[client.pid]} {client.pid}") == ["0"]

    def leave(self) -> None:
        """Have all clients end by themselves: the last one is alone."""
        for client in self.clients:
            with client:
                client.kill(signal.SIGTERM)
            del self.servers[client.pid]
        self.clients.clear()

    def close(self) -> None:
        for client in self.clients:
            with client:
                pass

    def stop(self) -> None:
        servers = [each["pid"] for each in self.node.daemons()["gpu0"]["servers"]]
        pids = [each.pid for each in self.clients] + servers
        if pids:
            pid = self.dice.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            self.node.get("/v1/status")
            os.kill(pid, signal.SIGCONT)
            self.done["stopped"] += 1

    def stop_daemon(self) -> None:
        """Stop the control daemon until the canary that runs now is over."""
        daemon, before = self.node.daemons()["gpu0"]["pid"], len(self.verdicts)
        with stopped(daemon):
            wait_until(lambda: len(self.verdicts) > before, what="a canary to end")
        self.node.wait_for_state("gpu0", "ready")
        self.done["daemon stopped"] += 1

    def happens(self) -> None:
        often, seldom = [self.come, self.come, self.come, self.go, self.go, self.stop], [self.stop_daemon]
        self.dice.choice(often * 10 + seldom)()
        if len(self.clients) >= CLIENTS:
            self.go()


def send_canaries(busy: Busy, over: threading.Event) -> None:
    while not over.is_set():
        busy.verdicts.append(busy.node.request("POST", "/v1/daemons/gpu0/canary", {}).json)


def test_busy(start: Start, dice: random.Random) -> None:
    """No canary mistakes a busy server for a wedged one, and nothing is closed."""
    node = start(simulate=1, config=CONFIG)
    lease = {"threads": 50, "memory": "20GiB", "gpu": "0", "processes": 2 * CLIENTS}
    assert node.request("POST", "/v1/leases", lease).status == 201
    over = threading.Event()
    busy = Busy(node, dice)
    sending = threading.Thread(target=send_canaries, args=(busy, over))
    with node.stderr.open("rb") as log, closing(busy):
        sending.start()
        try:
            busy.stop_daemon()
            goes_on = for_seconds()
            while goes_on():
                busy.happens()
                assert b"server_wedged" not in log.read()  # the part that is new
            busy.leave()
        finally:
            over.set()
            sending.join()
    found = Counter(each["verdict"] for each in busy.verdicts)
    sys.stdout.write(f"{dict(busy.done)}; {dict(found)}\n")
    assert "wedged" not in found
    assert not node.events("server_wedged")
    assert not [each for each in node.events("canary_ended") if each["proof"] == "silence"]
    wait_until(
        lambda: node.request("POST", "/v1/daemons/gpu0/canary", {}).json["verdict"] == "ok",
        what="a canary to be served at the end",
    )
