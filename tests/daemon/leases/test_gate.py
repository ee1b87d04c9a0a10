"""The processes of a lease that wait for each other begin together, or fail together with a sentence.

Each is a process of its own that uses CUDA on a simulated GPU and calls mpsd itself.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from mpsd.core import holders
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB
from tests.daemon.leases.holding import admitted, asleep
from tests.daemon.leases.line import Talk, message
from tests.gated_client import GatedClient
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.simulated_clients import outside

MOST: Final = 1000
"""More processes than any lease here has: mpsd refuses such a wait, and says who waits already."""


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config="").start()


@pytest.fixture
def lease(node: Node) -> Any:
    """Take out a lease for three processes, held by the process of the tests."""
    return admitted(node, processes=3, threads=30, memory=6 * GIB)


@pytest.fixture
def clients(node: Node, lease: Any) -> Iterator[list[GatedClient]]:
    """Start two processes of the lease."""
    with ExitStack() as ends:
        yield [ends.enter_context(GatedClient(node, lease["env"])) for _ in range(2)]


def asked(node: Node, lease: Any, processes: int, within: float = 60) -> Answer:
    """Wait at a gate as the process of the tests."""
    return node.request("POST", f"/v1/leases/{lease['id']}/gate", {"processes": processes, "within": within})


def at_the_gate(node: Node, lease: Any, *pids: int) -> None:
    """Return when these processes wait at the gate of a lease."""
    said = holders.processes_said(sorted(pids))
    wait_until(
        lambda: f", where {said} came for " in asked(node, lease, MOST).json["detail"],
        what=f"{said} to wait at the gate; the log is {node.stderr}",
    )


def one_failure(*clients: GatedClient) -> str:
    """Return the sentence with which all of these fail."""
    ends = [each.answer() for each in clients]
    assert [each["code"] for each in ends] == ["gate_failed"] * len(clients), ends
    (said,) = {each["error"] for each in ends}
    return str(said)


def test_together(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """None begins before all are there; then all do, and the next gate is a new one."""
    one, two = clients
    assert one.init()["mps"]
    assert two.init()["mps"]
    for _ in range(2):
        one.wait(lease["id"], 2)
        at_the_gate(node, lease, one.pid)
        assert not one.has_answered
        two.wait(lease["id"], 2)
        expected = {"ok": True, "lease": lease["id"], "processes": sorted((one.pid, two.pid))}
        assert one.answer() == two.answer() == expected


def test_missing(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """The shortest time counts for all, who learn which process did not come; a later gate may open."""
    one, two = clients
    with GatedClient(node, lease["env"]) as third:
        for each in (one, two, third):
            assert each.init()["mps"]
        one.wait(lease["id"], 3)
        at_the_gate(node, lease, one.pid)
        two.wait(lease["id"], 3, within=0.5)
        said = one_failure(one, two)
        came = f"2 of 3 processes came to the gate of lease {lease['id']} within 0.5 s"
        assert said.startswith(f"{came}: processes {', '.join(map(str, sorted((one.pid, two.pid))))}")
        assert said.endswith(f"; process {third.pid} did not")
        for each in (one, two, third):
            each.wait(lease["id"], 3)
        assert all(each.answer()["ok"] for each in (one, two, third))


@pytest.mark.parametrize("killed_first", [True, False])
def test_killed(node: Node, lease: Any, clients: list[GatedClient], *, killed_first: bool) -> None:
    """Where one that waits is killed, the others fail at once, although a child of it keeps its connection open."""
    stays, killed = clients
    killed.do("keep")
    for each in (killed, stays) if killed_first else (stays, killed):
        each.init()
        each.wait(lease["id"], 3)
    at_the_gate(node, lease, stays.pid, killed.pid)
    killed.kill()
    # Which of both mpsd sees first is the kernel's choice.
    how = rf"process {killed.pid} (ended|closed its connection) while it waited at the gate of lease {lease['id']}"
    assert re.fullmatch(f"{how}, so that no process begins", one_failure(stays))


def test_disconnected(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """Where one closes its connection, the others fail at once."""
    stays, _ = clients
    stays.wait(lease["id"], 3)
    at_the_gate(node, lease, stays.pid)
    with Talk(node.socket) as leaves:
        leaves.send(message("POST", f"/v1/leases/{lease['id']}/gate", {"processes": 3}))
        at_the_gate(node, lease, stays.pid, os.getpid())
    said = f"process {os.getpid()} closed its connection while it waited at the gate of lease {lease['id']}"
    assert one_failure(stays) == f"{said}, so that no process begins"


def test_outside(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """Where one runs outside MPS, all fail at once with its violation, though others have not come."""
    one, _ = clients
    assert one.init()["mps"]
    with GatedClient(node, {**lease["env"], **outside(node)}) as stray:
        assert not stray.init()["mps"]
        one.wait(lease["id"], 3)
        at_the_gate(node, lease, one.pid)
        stray.wait(lease["id"], 3)
        said = one_failure(one, stray)
        assert said.startswith(f"no process of lease {lease['id']} begins: process {stray.pid} ")
        assert " runs on the GPU of gpu0 outside MPS, " in said


def test_own_environment(node: Node) -> None:
    """Beside a larger lease of its user, mpsd cannot know a process that set its own variables: it fails at once."""
    admitted(node, threads=60, memory=16 * GIB)
    with GatedClient(node, outside(node)) as client:
        lease = admitted(node, pid=client.pid, processes=2, threads=20, memory=2 * GIB)
        for name, value in lease["env"].items():
            assert client.do(f"put {name} {value}")["ok"]
        assert client.init()["mps"]
        client.wait(lease["id"], 2, within=3000)
        answer = client.answer()
        verified = node.get(f"/v1/leases/{lease['id']}/verify").json
        assert verified["verdict"] == "unknown"
        assert answer["error"] == f"no process of lease {lease['id']} begins: {verified['because']}"
        assert "by mpsctl run, or by mpsd.spawn()" in answer["hint"]


def test_no_client(lease: Any, clients: list[GatedClient]) -> None:
    """A process that waits without being a client is not verified; once it is one, all begin."""
    one, two = clients
    assert one.init()["mps"]
    one.wait(lease["id"], 2, within=1)
    two.wait(lease["id"], 2, within=1)
    said = f"not every process of lease {lease['id']} is verified after 1 s: process {two.pid} is no client of MPS"
    assert one_failure(one, two) == f"{said}, and waits"
    assert two.init()["mps"]
    for each in clients:
        each.wait(lease["id"], 2)
    assert all(each.answer()["ok"] for each in clients)


def test_twice(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """A process that waits twice counts once."""
    one, _ = clients
    assert one.init()["mps"]
    one.wait(lease["id"], 3)
    at_the_gate(node, lease, one.pid)
    with Talk(node.socket) as first, Talk(node.socket) as second:
        first.send(message("POST", f"/v1/leases/{lease['id']}/gate", {"processes": 3}))
        at_the_gate(node, lease, one.pid, os.getpid())
        second.send(message("POST", f"/v1/leases/{lease['id']}/gate", {"processes": 3, "within": 0.5}))
        (said,) = {first.answer().json["detail"], second.answer().json["detail"], one.answer()["error"]}
        assert said.startswith(f"2 of 3 processes came to the gate of lease {lease['id']} within 0.5 s")


def test_ended(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """The end of the lease fails all, and afterwards there is no gate."""
    for each in clients:
        each.wait(lease["id"], 3)
    at_the_gate(node, lease, *(each.pid for each in clients))
    assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
    assert one_failure(*clients).startswith(f"lease {lease['id']} has ended: ")
    answer = asked(node, lease, 1)
    assert (answer.status, answer.json["code"]) == (409, "gate_failed")


def test_refused(node: Node, lease: Any, clients: list[GatedClient]) -> None:
    """Who is no process of the lease, or names other numbers, is refused; those that wait do not notice."""
    one, two = clients
    one.wait(lease["id"], 2)
    at_the_gate(node, lease, one.pid)
    for processes in (1, 3):
        answer = asked(node, lease, processes)
        assert (answer.status, answer.json["limit"]) == (422, "processes")
    two.wait(lease["id"], 2)
    at_the_gate(node, lease, one.pid, two.pid)
    answer = asked(node, lease, 2)  # they are no clients, so they wait
    assert answer.status == 422
    assert answer.json["detail"].startswith(f"2 processes wait at the gate of lease {lease['id']} already")
    assert not one.has_answered
    assert not two.has_answered
    with asleep() as other:
        try:
            foreign = admitted(node, pid=other.pid)
            answer = asked(node, foreign, 1)
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
            assert answer.json["detail"] == f"process {os.getpid()} is no process of lease {foreign['id']}"
        finally:
            other.kill()
    too_many = asked(node, admitted(node, processes=3), 4)
    assert (too_many.status, too_many.json["limit"]) == (422, "processes")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_restart(make_node: Start, how: signal.Signals) -> None:
    """Those that wait while mpsd is restarted come to the next one, and begin."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    lease = admitted(node, processes=2, threads=20, memory=4 * GIB)
    with GatedClient(node, lease["env"]) as one, GatedClient(node, lease["env"]) as two:
        _restarted(node, lease, how, one, two)


def _restarted(node: Node, lease: Any, how: signal.Signals, one: GatedClient, two: GatedClient) -> None:
    for each in (one, two):
        assert each.init()["mps"]
        each.wait(lease["id"], 2)
    assert one.answer() == two.answer()
    # What was open to a client that attached just now is uncertain for an mpsd that did not see it attach.
    limits = node.root / "run" / "gpu0.limits.json"
    wait_until(lambda: len(json.loads(limits.read_text())["record"]["limits"]) == 1, what="the limits to last")
    one.wait(lease["id"], 2)
    at_the_gate(node, lease, one.pid)
    node.end(how)
    node.start()
    assert not one.has_answered
    two.wait(lease["id"], 2)
    assert one.answer() == two.answer()


@pytest.mark.thorough
def test_many(make_node: Start) -> None:
    """64 processes on two GPUs begin together; where one of them does not come, all fail with one sentence."""
    node = make_node(simulate=2, control=None, config="").start()
    lease = admitted(node, processes=32, gpus=2, gpu="any", threads=64, memory=32 * GIB)
    shares = json.dumps([each["env"] for each in lease["shares"]])
    with GatedClient(node, {**lease["shares"][0]["env"], "SHARES": shares}) as parent:
        for size, processes, within, code in ((64, 64, 60, None), (7, 8, 2, "gate_failed")):
            parent.tell(f"crowd {size} {lease['id']} {processes} {within}")
            ((end, count),) = parent.answer(deadline=50)["ends"]
            assert (end.get("code"), count) == (code, size), end
