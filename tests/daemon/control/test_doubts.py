"""Reasons to ask a server at once whether it handles a fatal fault: its words, unknown lines of it, and Xids."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.answers import BRANCHES
from tests.daemon.caller import NOBODY, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import Gate, event, is_running, stopped
from tests.daemon.leases.line import Line
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased

pytestmark = pytest.mark.thorough

SMALL: Final[dict[str, Any]] = {"threads": 10, "memory": "1GiB"}

QUIET: Final = "[daemon]\nprobe_interval = 600\n"
"""During the test mpsd does not ask a control daemon without a reason."""

STATE_WORDS: Final = 550
"""The first branch whose servers have state words, which decide; before, the log and their clients do."""

STAMP: Final = "[2026-11-26 01:02:03.004 Server {:5d}] "

WRITES: Final = """
import sys, time
while True:
    for line in sys.argv[1:]:
        print(line, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=QUIET).start()


@pytest.fixture
def client(node: Node) -> Iterator[SimulatedClient]:
    """Yield a client whose server has told its state word."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        wait_until(lambda: node.daemons()["gpu0"]["servers"][0]["status"] == "ACTIVE", what="its server to be asked")
        yield client


def questions(node: Node) -> int:
    """Count mpsd's conversations in the log of the control daemon."""
    return len(re.findall(r"Cmd:mpsd-[0-9a-f]+-0$", node.control_log("gpu0").read_text(), re.MULTILINE))


def warnings(node: Node) -> set[str]:
    return {each["kind"] for each in node.get("/v1/status").json["warnings"]}


@pytest.mark.parametrize("branch", BRANCHES)
def test_words_of_each_driver(make_node: Start, short_tmp: Path, branch: int) -> None:
    """No lease is granted between the words of a fault and the server's answer, which decides.

    Where the driver has no state word, the words of the log and the clients that the server names decide.
    """
    node = make_node(simulate=1, config=QUIET)
    gate = Gate(node, short_tmp, branch)
    node.start()
    line = Line(node)
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server = client.hello["server"]
        has_word = branch >= STATE_WORDS
        wait_until(
            lambda: node.daemons()["gpu0"]["servers"][0]["status"] or not has_word, what="the server to be asked"
        )
        with gate.shut("get_server_list"):
            client.fault()
            assert event(node, "server_faulted")["server"] == server
            wait_until(gate.has_held, what="the question")
            call = line.call("POST", "/v1/leases", SMALL)
            wait_until(lambda: len(node.get("/v1/leases").json["leases"]) > 1, what="the request to be heard")
            assert not call.answered
            assert "fault_reported" in warnings(node)
        event(node, "leases_faulted", server=server)
        assert [each["kind"] for each in node.get("/v1/status").json["reasons"]] == ["server_fault"]
        assert not call.answered
        client.kill()
        event(node, "server_recovered", server=server)
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready")
    assert call.answer().status == 201


@pytest.mark.parametrize("reason", ["fault", "unknown", "no stamp", "xid"])
def test_reasons(node: Node, client: SimulatedClient, reason: str) -> None:
    """A word of a fault, any unknown line of a server, and an Xid of its GPU reveal a fault that nothing else shows."""
    log = node.control_log("gpu0").parent / "server.log"
    with stopped(node.pid):
        size = log.stat().st_size
        assert not client.fault()["ok"]
        os.truncate(log, size)
    if reason == "xid":
        (gpu,) = gpus(node)
        gpu.report(31)
    else:
        texts = {"fault": "Server is handling a fatal GPU error.", "unknown": "what a new driver says"}
        text = STAMP.format(client.hello["server"]) + texts[reason] if reason in texts else "without a stamp"
        with log.open("a") as file:
            file.write(f"{text}\n")
    event(node, "leases_faulted", server=client.hello["server"])
    assert node.request("POST", "/v1/leases", SMALL).status == 409


def test_reasons_that_prove_nothing(node: Node, client: SimulatedClient) -> None:
    """The word of the server decides: a line about a fault that it does not have stops nothing."""
    with (node.control_log("gpu0").parent / "server.log").open("a") as log:
        log.write(STAMP.format(client.hello["server"]) + "Server is handling a fatal GPU error.\n")
    event(node, "server_faulted")
    assert node.request("POST", "/v1/leases", SMALL).status == 201
    wait_until(lambda: "fault_reported" not in warnings(node), what="the answer")
    assert not node.events("leases_faulted")


@contextlib.contextmanager
def written(node: Node, *lines: str) -> Iterator[None]:
    with (node.control_log("gpu0").parent / "server.log").open("a") as log:
        writer = subprocess.Popen([sys.executable, "-I", "-c", WRITES, *lines], stdout=log)
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("branch", [each for each in BRANCHES if each < STATE_WORDS])
def test_lines_in_a_loop_without_a_client(make_node: Start, short_tmp: Path, branch: int) -> None:
    """Where servers have no state word, a server without a client has no fault, whatever is in its log."""
    node = make_node(simulate=1, config=QUIET)
    Gate(node, short_tmp, branch)
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server = client.hello["server"]
    wait_until(lambda: not node.get("/v1/clients").json["clients"], what="the client to be gone")
    with written(node, STAMP.format(server) + "Server is handling a fatal GPU error."):
        event(node, "server_faulted", server=server)
        for _ in range(5):
            answer = node.request("POST", "/v1/leases", SMALL)
            assert answer.status == 201, answer.json
            assert node.get("/readyz").status == 200
    assert is_running(server)


def test_lines_in_a_loop(node: Node, client: SimulatedClient) -> None:
    """A process that writes such lines into the log in a loop keeps no other user from a lease."""
    stamp, grants = STAMP.format(client.hello["server"]), 5
    lines = [f"{stamp}Server is handling a fatal GPU error.", f"{stamp}what a new driver says"]
    before, began = questions(node), time.monotonic()
    with written(node, *lines):
        wait_until(lambda: node.daemons()["gpu0"]["unknown_lines"] > 100, what="many lines to be read")
        for _ in range(grants):
            answer = node.request("POST", "/v1/leases", SMALL)
            assert answer.status == 201, answer.json
            assert node.get("/readyz").status == 200
            assert node.request("DELETE", f"/v1/leases/{answer.json['id']}").status == 204
        asked, seconds = questions(node) - before, time.monotonic() - began
    # Not the clock's speed is judged, but the number of questions in any time: one a second for these lines, and one
    # for each grant and its end.
    assert asked <= seconds + 1 + 2 * grants
    assert not node.events("leases_faulted")


@needs_root
def test_lease_that_ends_at_the_gate(make_node: Start, short_tmp: Path) -> None:
    """A lease that ends while its limits are being opened leaves its user no pipe access."""
    node = make_node(simulate=1, config=QUIET)
    gate = Gate(node, short_tmp)
    line = Line(node.start())
    listing = ["ls", os.fspath(node.pipe_directory("gpu0"))]
    with gate.shut("set_default_active_thread_percentage"):
        call = line.call("POST", "/v1/leases", SMALL, uid=NOBODY)
        wait_until(gate.has_held, what="its limits to be opened")
        (lease,) = line.leases()
        line.release(lease)
    assert call.answer().status == 409
    assert subprocess.run(listing, user=NOBODY, check=False).returncode
    line.granted(uid=NOBODY, **SMALL)
    assert subprocess.run(listing, user=NOBODY, check=False).returncode == 0
