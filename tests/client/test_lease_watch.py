"""The thread that keeps a lease of `mpsd.lease`: renewals, also while mpsd dies, and what the program hears."""

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import mpsd
from mpsd.client import Client
from tests.client.programs import printed
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, outside


class Heard:
    """What a program hears of its lease."""

    def __init__(self) -> None:
        self.ending: list[float] = []
        self.draining: list[str] = []
        self._clients: list[Client] = []

    def on_ending(self, lease: mpsd.Lease, seconds: float) -> None:
        assert lease.id
        self.ending.append(seconds)

    def on_draining(self, lease: mpsd.Lease) -> None:
        self.draining.append(lease.id)

    def opened(self, node: Node, **options: Any) -> mpsd.Lease:
        """Take a lease, and leave the environment of this process alone."""
        self._clients.append(client := Client(str(node.socket)))
        hears = {"on_ending": self.on_ending, "on_draining": self.on_draining}
        lease = mpsd.lease(client=client, **{**hears, **options})
        return lease.open(sets_environment=False)

    def closed(self) -> None:
        """Close the connections, and wait until each thread of a lease has ended."""
        for each in self._clients:
            each.close()
        wait_until(lambda: not watchers(), what="the threads of closed leases to end")


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Return what hears; afterwards, each thread of a lease has ended."""
    hears = Heard()
    yield hears
    hears.closed()


def watchers() -> list[str]:
    """Return the names of the threads of leases."""
    return [each.name for each in threading.enumerate() if each.name.startswith("mpsd-")]


def drain(node: Node, lease: mpsd.Lease) -> None:
    """Begin to drain the control daemon of a lease."""
    assert lease.answer is not None
    assert node.request("POST", f"/v1/daemons/{lease.answer['daemon']}/drain", {}).status == 202


def release(node: Node, lease: mpsd.Lease) -> None:
    """End a lease from outside."""
    assert node.request("DELETE", f"/v1/leases/{lease.id}").status == 204


def renewals(node: Node, lease: mpsd.Lease) -> int:
    return len(node.events("lease_renewed", lease=lease.id))


def test_no_thread(node: Node, heard: Heard) -> None:
    """Without a time to live and without callbacks there is nothing to watch."""
    with Client(str(node.socket)) as client, mpsd.lease(fraction=0.25, client=client):
        assert watchers() == []
    lease = heard.opened(node, fraction=0.25)
    assert watchers() == [f"mpsd-{lease.id}"]
    lease.close()


def test_draining_and_the_end(make_node: Start, heard: Heard) -> None:
    """The program hears once that its control daemon is drained, and once that its lease has ended."""
    node = make_node().start()
    lease, beside = (heard.opened(node, fraction=0.25, gpu=gpu) for gpu in (0, 1))
    drain(node, lease)
    wait_until(lambda: heard.draining, what="the drain to be heard of")
    assert (heard.draining, heard.ending, lease.is_held_here) == ([lease.id], [], True)
    release(node, lease)
    wait_until(lambda: lease.state == "ended", what="the end to be heard of")
    assert lease.answer is not None
    assert lease.answer["because"].endswith("released it")
    wait_until(lambda: watchers() == [f"mpsd-{beside.id}"], what="its thread to end")
    assert (heard.draining, heard.ending, lease.is_held_here) == ([lease.id], [0.0], False)
    lease.close()
    beside.close()
    wait_until(lambda: not watchers(), what="the other thread to end")
    assert heard.ending == [0.0]


def test_the_end_of_its_clients(make_node: Start, heard: Heard) -> None:
    """Where mpsd ends the clients of a lease first, its program hears of it before the lease has ended."""
    node = make_node(simulate=1, control=None).start()
    lease = heard.opened(node, fraction=0.25)
    with SimulatedClient({**outside(node), **lease.environment}) as client:
        assert client.hello["mps"]
        client.do("ignore TERM")
        client.launch(60)
        assert node.request("POST", f"/v1/leases/{lease.id}/end", {}).status == 202
        wait_until(lambda: heard.ending, what="the end to be heard of")
        assert heard.ending == [0.0]
    wait_until(lambda: lease.state == "ended", what="the lease to end")
    assert heard.ending == [0.0]


def test_a_callback_that_fails(make_node: Start, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    """What a callback raises is logged with its traceback, and the thread goes on, even after sys.exit."""

    def fail(_: mpsd.Lease) -> None:
        raise SystemExit("a mistake of the program")

    node = make_node().start()
    lease = heard.opened(node, fraction=0.25, on_draining=fail)
    drain(node, lease)
    wait_until(lambda: caplog.records, what="the exception to be logged")
    release(node, lease)
    wait_until(lambda: heard.ending == [0.0], what="the end to be heard of")
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (
        "mpsd",
        logging.ERROR,
        f"a callback of lease {lease.id} failed",
    )
    assert "a mistake of the program" in caplog.text


@pytest.mark.thorough
def test_renewed_by_the_next_mpsd(make_node: Start, heard: Heard) -> None:
    """While mpsd is away the end is announced; an mpsd that is back in time renews the lease, and its events go on."""
    node = make_node().start()
    lease = heard.opened(node, fraction=0.25, ttl=30)
    node.end(signal.SIGKILL)
    (seconds,) = wait_until(lambda: heard.ending, what="the end to be announced", deadline=30)
    assert 0 < seconds <= 10
    node.start()
    wait_until(lambda: renewals(node, lease), what="a renewal by the next mpsd")
    drain(node, lease)
    wait_until(lambda: heard.draining, what="the drain to be heard of")
    assert (lease.state, len(heard.ending)) == ("granted", 1)
    lease.close()
    assert node.leases() == []


@pytest.mark.parametrize("callbacks", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_ended_while_mpsd_is_away(make_node: Start, heard: Heard, *, callbacks: bool) -> None:
    """While mpsd is away the program hears of the end in time, and at the end the lease says that it has ended."""
    node = make_node().start()
    if callbacks:
        lease = heard.opened(node, fraction=0.25, ttl=3)
    else:
        lease = heard.opened(node, fraction=0.25, ttl=3, on_ending=None, on_draining=None)
    node.end(signal.SIGKILL)
    if callbacks:
        (seconds,) = wait_until(lambda: heard.ending, what="the end to be announced")
        assert 0 <= seconds <= 1
    wait_until(lambda: lease.state == "ended", what="the end of its time to live")
    wait_until(lambda: not watchers(), what="its thread to end")
    assert len(heard.ending) == callbacks
    node.start()
    wait_until(lambda: node.leases() == [], what="mpsd to end it too")
    lease.close()


def test_closed_while_mpsd_is_away(make_node: Start, heard: Heard) -> None:
    """A lease that is closed while mpsd is away, by a program that goes on, is released when mpsd is back."""
    node = make_node().start()
    lease = heard.opened(node, fraction=0.25, on_ending=None, on_draining=None)
    node.end(signal.SIGKILL)
    lease.close()
    assert lease.state == "ended"
    node.start()
    wait_until(lambda: node.leases() == [], what="the lease to be released", deadline=30)
    assert node.events("lease_ended", lease=lease.id)[0]["because"].endswith("released it")


def test_forgotten_when_it_is_closed(make_node: Start, heard: Heard) -> None:
    """A lease that has ended so long ago that mpsd forgot it is closed like any other."""
    node = make_node().start()
    lease = heard.opened(node, fraction=0.25, on_ending=None, on_draining=None)
    release(node, lease)
    node.end(signal.SIGKILL)
    node.start()
    assert node.get(f"/v1/leases/{lease.id}").status == 404
    lease.close()
    assert lease.state == "ended"


def test_a_forked_child(node: Node) -> None:
    """The thread is the parent's: the child has none, closes the lease without effect, and hears nothing."""
    program = """
        import os, threading, warnings, mpsd
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside any thread
        lease = mpsd.lease(fraction=0.25, ttl=600, on_ending=lambda *_: print(os.getpid() == parent, flush=True)).open()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            print(threading.active_count(), lease.is_held_here, lease.verify().outside["lease"] == lease.id, flush=True)
            lease.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(threading.active_count(), lease.refresh()["state"], flush=True)
        mpsd.Client().release(lease.id)
        for each in threading.enumerate()[1:]:
            each.join(30)
        print(lease.state)
    """
    assert printed(node, program) == ["1 False True", "2 granted", "True", "ended"]


def test_a_quota_with_a_time_to_live(make_node: Start) -> None:
    """A lease that has a time to live by the quota of its user alone is renewed as well."""
    node = make_node(config='[quota."*"]\nttl = 12\n').start()
    with Client(str(node.socket)) as client:
        lease = mpsd.lease(client=client, fraction=0.25).open(sets_environment=False)
        wait_until(lambda: renewals(node, lease), what="the first renewal")
        assert lease.state == "granted"
        lease.close()
