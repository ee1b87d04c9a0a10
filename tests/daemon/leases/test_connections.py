"""CUDA_DEVICE_MAX_CONNECTIONS decides how many clients fit on a GPU: requested, inherited, or set by a program itself.

The counts are those of a real GPU (driver 580): 15 clients with 8 connections, 3 with 32.
"""

import contextlib
import os
import signal
from typing import Any

import pytest

from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, outside

pytestmark = pytest.mark.enforcement

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
TINY: dict[str, Any] = {"threads": 1, "memory": "1GiB"}
FULL = "a further context may get OUT_OF_MEMORY (2), although memory is free"


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config="").start()


def taken(node: Node, by: str = "clients") -> int:
    """Return the client places of the GPU that leases have, or `by` clients without a lease."""
    found: int = node.get("/v1/gpus").json["gpus"][0][by]
    return found


def admitted(node: Node, **more: Any) -> dict[str, Any]:
    answer = node.request("POST", "/v1/leases", {**TINY, **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def test_requested(node: Node) -> None:
    """What a lease requests is in its environment, its places are granted, and what does not fit is refused."""
    leases = [admitted(node, connections=32) for _ in range(3)]
    assert {(each["connections"], each["env"][NAME]) for each in leases} == {(32, "32")}
    assert taken(node) == 36
    plain = admitted(node)
    assert plain["connections"] is None
    assert NAME not in plain["env"]
    answer = node.request("POST", "/v1/leases", {**TINY, "connections": 32})
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (409, "does_not_fit", "clients")
    assert f"which take 12 client places by their {NAME}" in answer.json["detail"]
    assert "only 10 of 47 client places are left" in answer.json["detail"]
    assert node.request("POST", "/v1/leases", {**TINY, "processes": 4, "connections": 32}).json["code"] == "never_fits"
    for wrong in (0, 33, "8"):
        assert node.request("POST", "/v1/leases", {**TINY, "connections": wrong}).status == 422
    with contextlib.ExitStack() as stack:  # they all fit
        clients = [stack.enter_context(SimulatedClient({**outside(node), **each["env"]})) for each in [*leases, plain]]
        assert [each.hello["ok"] for each in clients] == [True] * 4
        for each in clients:
            event(node, "client_attributed", client=each.pid)
        assert taken(node) == 37


def test_inherited(node: Node) -> None:
    """`mpsctl run` requests what its own environment has: the program has it, too. An option comes first."""
    environment = {**os.environ, NAME: "8"}
    for options, expected in (((), 8), (("--connections", "2"), 2)):
        command = ("run", "--threads", "1", "--memory", "1GiB", *options, "--", "sh", "-c", f"echo ${NAME}")
        done = node.mpsctl(*command, env=environment)
        assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    assert {each["connections"] for each in node.get("/v1/leases?ended=true").json["leases"]} == {8, 2}


def test_set_by_the_program(node: Node) -> None:
    """A client with more connections than its lease weighs as it is, and is a violation of its lease."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            lease = admitted(node)
            large = stack.enter_context(SimulatedClient({**outside(node), **lease["env"], NAME: "32"}))
            assert large.hello["ok"]
            event(node, "client_attributed", client=large.pid)
        wait_until(lambda: taken(node) == 36, what="their connections to be read")
        answer = node.request("POST", "/v1/leases", {**TINY, "processes": 12, "threads": 12})
        assert (answer.status, answer.json["limit"]) == (409, "clients")
        assert f"others' {NAME} take several each" in answer.json["detail"]
        lease = admitted(node)
        late = stack.enter_context(SimulatedClient({**outside(node), **lease["env"], NAME: "32"}, late=True))
        assert late.init()["ok"]
        event(node, "client_attributed", client=late.pid, lease=lease["id"])
        wait_until(lambda: taken(node) == 48, what="its connections to be read")
        assert late.context()["error"] == "CUDA_ERROR_OUT_OF_MEMORY"
        verified = node.get(f"/v1/leases/{lease['id']}/verify").json
        assert (verified["ok"], verified["verdict"]) == (False, "violation")
        assert f"takes 12 of the 48 client places of gpu0 instead of 1: it was started with {NAME}=32" in str(verified)
        wait_until(lambda: len(node.events("violation", kind="connections")) == 4, what="all of them to be reported")
        assert node.leases()[0]["violations"][0]["kind"] == "connections"
        (told,) = [each for each in node.events("client_attributed", client=late.pid) if "because" in each]
        assert FULL in told["because"]
        explained = node.mpsctl("explain", lease["id"]).stdout
        assert explained.count("although memory is free") >= 2, explained  # the event, and the present state
        found = node.mpsctl("doctor", "--only", "connections", "-o", "json").stdout
        assert f"process {late.pid} of lease {lease['id']} was started with {NAME}=32" in found
        late.end()
        wait_until(lambda: taken(node) == 37, what="its places to be free again")
    wait_until(lambda: taken(node) == 4, what="all of them to be free again")


def test_without_a_lease(make_node: Start) -> None:
    """A client without a lease weighs by its connections, too, and mpsd's successor knows those of each client."""
    node = make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "allow"\n').start()
    environment = {**outside(node), "CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory("gpu0")), NAME: "16"}
    with SimulatedClient(environment) as stray, calling(node.socket) as caller:
        assert stray.hello["ok"]
        wait_until(lambda: taken(node, "clients_unleased") == 6, what="it to be counted")
        lease = caller.admit(**TINY, connections=32).json
        with SimulatedClient({**outside(node), **lease["env"]}) as client:
            event(node, "client_attributed", client=client.pid)
            node.end(signal.SIGKILL)
            node.start()
            wait_until(
                lambda: (taken(node), taken(node, "clients_unleased")) == (12, 6), what="the next mpsd to know them"
            )
            assert node.get(f"/v1/leases/{lease['id']}").json["connections"] == 32


def test_child_of_a_run(node: Node) -> None:
    """The program of a run that sets its connections itself weighs as it is."""
    within = ("env", f"{NAME}=32")
    with leased(node, "--threads", "1", "--memory", "1GiB", within=within) as client:
        assert client.hello["ok"]
        wait_until(lambda: taken(node) == 12, what="its connections to be read")
