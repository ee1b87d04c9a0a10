"""The ends of clients by `drain` and `restart --timeout`: a moment of silence cuts no end short."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, look, waiting
from tests.daemon.ends.clients import BUSY, asked, await_steps, target
from tests.daemon.helpers import BRISK, IMPATIENT, SWIFT, event, holding, kill, next_ready, stopped
from tests.daemon.leases.test_busy_servers import made, pids
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.thorough, pytest.mark.enforcement]

GRACE: Final = "[enforcement]\ngrace = 0.3\n"


@contextmanager
def occupied(node: Node) -> Iterator[None]:
    """Have another front-end occupy the control daemon's only seat."""
    with holding(node, "gpu0"):
        yield


@contextmanager
def hung(node: Node) -> Iterator[None]:
    with stopped(node.daemons()["gpu0"]["pid"]):
        node.wait_for_state("gpu0", "unresponsive")
        yield


@pytest.mark.parametrize("verb", ["drain", "restart"])
@pytest.mark.parametrize("trouble", [occupied, hung])
def test_silent_for_a_moment(
    make_node: Start, verb: str, trouble: Callable[[Node], AbstractContextManager[None]]
) -> None:
    """A daemon that answers again ends its clients step by step, although no end could begin at the timeout."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK, durations=SWIFT).start()
    with target(node) as one, target(node) as other:
        for each in (one, other):
            each.launch(6 * BUSY)
        with trouble(node):
            operation = begin(node, verb, timeout=0)
            for each in (one, other):
                event(node, "client_not_ended", pid=each.pid)
            wait_until(lambda: "not ended yet: " in look(node, operation)["because"], what="the reason to be given")
        ended(node, operation)
        for each in (one, other):
            assert each.process.wait(20) == -signal.SIGTERM
            assert each.answer()["ok"]  # the client's kernel has finished
            await_steps(node, each.pid, "terminate_client", "SIGTERM")
            assert asked(node, each.pid) == 1
    assert node.events("daemon_forced") == []


def test_restart_of_a_silent_daemon(make_node: Start) -> None:
    """The timeout of a restart has an end: a daemon that stays silent is ended with its clients, which is reported."""
    node = make_node(simulate=1, control=None, config=GRACE + BRISK, durations=IMPATIENT).start()
    before = node.daemons()["gpu0"]["pid"]
    with target(node) as client:
        kill(before, signal.SIGSTOP)
        ended(node, begin(node, "restart", timeout=0))
        forced = event(node, "daemon_forced", step="quit -t")
        assert f"client {client.pid}" in forced["because"]
        assert "does not answer" in forced["because"]
    next_ready(node, "gpu0", before)


@pytest.mark.parametrize(("verb", "timeout"), [("drain", None), ("restart", 0)])
def test_clients_that_are_not_named_yet(make_node: Start, short_tmp: Path, verb: str, timeout: float | None) -> None:
    """A drain or restart waits for a server that has not named its clients yet, and then ends each of them in order."""
    node, server = made(make_node, short_tmp, "anytime")
    node.durations = SWIFT
    node.start()
    with SimulatedClient(variables(node)) as client:
        _, busy = pids(node, client)
        node.end()
        server.turn(busy=True)
        node.start(ready=False)
        operation = begin(node, verb, timeout=timeout)
        (blocker,) = waiting(node, operation)
        assert (blocker["what"], blocker["pid"]) == ("server", busy)
        server.converse()
        found = look(node, operation)
        assert f"server {busy}, which is busy and has not named its clients (since " in found["because"]
        assert client.sync()["ok"]
        server.turn(busy=False)
        if timeout is None:
            wait_until(lambda: waiting(node, operation)[0]["pid"] == client.pid, what="the client to be named")
            client.end()
        else:
            event(node, "client_forced", pid=client.pid, step="terminate_client")
        ended(node, operation)
    assert node.events("daemon_forced") == []
